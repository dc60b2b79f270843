//! The keys of transformer models: `gpt`, `llama`, `bert` and `vit`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A language model of GPT-2's shape: learned positions, layer norm before each part, GELU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GptConfig {
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Attention heads of a layer; `width` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Values that stand for a token.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Positions there are weights for; a sample may have fewer tokens.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub context: usize,
    /// Fraction of the embedding's and of each branch's outputs, and of the attention weights, dropped while training.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
    /// The scores of the next token use the token embedding's weights.
    pub tie: bool,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self { layers: 4, heads: 4, width: 128, context: 64, dropout: 0.0, tie: true }
    }
}

/// A language model of Llama's shape: rotary positions, RMS norm, SwiGLU, shared key heads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LlamaConfig {
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Query heads of a layer; `width` is an even multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Key and value heads of a layer; `heads` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub kv_heads: usize,
    /// Values that stand for a token.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Values inside the SwiGLU part.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub hidden: usize,
    /// The most tokens a sample may have.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub context: usize,
    /// Base of the rotary positions' wavelengths.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub rope_theta: f64,
    /// The scores of the next token use the token embedding's weights.
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
            tie: false,
        }
    }
}

/// An encoder of BERT's shape that tells texts apart: every token sees all others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BertConfig {
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Attention heads of a layer; `width` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Values that stand for a token.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Values inside the feed-forward part.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub hidden: usize,
    /// Positions there are weights for; a sample may have fewer tokens.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub context: usize,
    /// Fraction of the embedding's, of each branch's and of the pooled outputs, and of the attention weights, dropped while
    /// training.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
}

impl Default for BertConfig {
    fn default() -> Self {
        Self { layers: 4, heads: 4, width: 128, hidden: 512, context: 128, dropout: 0.1 }
    }
}

/// A vision transformer: patches of an image as a sequence, with a class token before them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VitConfig {
    /// Width and height of a patch, in pixels; those of the image are multiples of it.
    #[schemars(range(min = 1, max = 256))]
    pub patch: usize,
    /// Transformer layers.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: usize,
    /// Attention heads of a layer; `width` is a multiple of it.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: usize,
    /// Values that stand for a patch.
    #[schemars(range(min = 1, max = 65_536))]
    pub width: usize,
    /// Values inside the feed-forward part, as a multiple of `width`.
    #[schemars(range(min = 1, max = 64))]
    pub ratio: usize,
    /// Fraction of the embedding's and of each branch's outputs, and of the attention weights, dropped while training.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
}

impl Default for VitConfig {
    fn default() -> Self {
        Self { patch: 4, layers: 6, heads: 4, width: 128, ratio: 4, dropout: 0.0 }
    }
}
