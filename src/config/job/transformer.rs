//! The keys of transformer models: `gpt`, `llama`, `bert` and `vit`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// GPT-2's architecture: learned positions, pre-layer-norm, GELU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GptConfig {
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Attention heads per layer; `width` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Embedding dimension.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Maximum tokens per sample: the number of position embeddings.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub context: usize,
    /// Dropout probability of the embedding, of each residual branch's output and of the attention weights.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
    /// Tie the output layer's weights to the token embedding.
    pub tie: bool,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self { layers: 4, heads: 4, width: 128, context: 64, dropout: 0.0, tie: true }
    }
}

/// Llama's architecture: rotary positions, RMS norm, SwiGLU, grouped-query attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LlamaConfig {
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Query heads per layer; `width` is an even multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Key and value heads per layer; `heads` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub kv_heads: usize,
    /// Embedding dimension.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Hidden dimension of SwiGLU.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub hidden: usize,
    /// Maximum tokens per sample.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub context: usize,
    /// Base of the rotary embedding's wavelengths.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub rope_theta: f64,
    /// Added to the mean square in RMS norms; published models have 1e-5 or 1e-6 (`rms_norm_eps`).
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0.0))]
    pub norm_eps: f64,
    /// Tie the output layer's weights to the token embedding.
    pub tie: bool,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            layers: 4,
            heads: 4,
            kv_heads: 2,
            width: 128,
            hidden: 384,
            context: 64,
            rope_theta: 10_000.0,
            norm_eps: 1e-6,
            tie: false,
        }
    }
}

/// BERT's encoder with a classifier: every token attends to all others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BertConfig {
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Attention heads per layer; `width` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Embedding dimension.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Hidden dimension of the feed-forward block.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub hidden: usize,
    /// Maximum tokens per sample: the number of position embeddings.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub context: usize,
    /// Dropout probability of the embedding, of each residual branch's output, of the pooled output and of the
    /// attention weights.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
}

impl Default for BertConfig {
    fn default() -> Self {
        Self { layers: 4, heads: 4, width: 128, hidden: 512, context: 128, dropout: 0.1 }
    }
}

/// A vision transformer: patches of an image as a sequence, preceded by a class token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VitConfig {
    /// Width and height of a patch, in pixels; they divide those of the image.
    #[schemars(range(min = 1, max = 256))]
    pub patch: usize,
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Attention heads per layer; `width` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Embedding dimension.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Hidden dimension of the feed-forward block, as a multiple of `width`.
    #[schemars(range(min = 1, max = 64))]
    pub ratio: usize,
    /// Dropout probability of the embedding, of each residual branch's output and of the attention weights.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
}

impl Default for VitConfig {
    fn default() -> Self {
        Self { patch: 4, layers: 6, heads: 4, width: 128, ratio: 4, dropout: 0.0 }
    }
}
