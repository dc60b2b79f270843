//! `[model]`: the network. `kind` decides the other keys.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::data::one_or_many::{list_of_one_or_many, one_or_list};
use super::image_models::{MobilenetConfig, ResnetConfig};
use super::layers::LayersConfig;
use super::transformer::{BertConfig, GptConfig, LlamaConfig, VitConfig};

/// The network. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ModelConfig {
    Mlp(MlpConfig),
    Cnn(CnnConfig),
    Gpt(GptConfig),
    Llama(LlamaConfig),
    Bert(BertConfig),
    Vit(VitConfig),
    Resnet(ResnetConfig),
    Mobilenet(MobilenetConfig),
    Layers(LayersConfig),
}

impl ModelConfig {
    /// Tokens in a sample, for models of sequences.
    pub fn context(&self) -> Option<usize> {
        match self {
            Self::Gpt(gpt) => Some(gpt.context),
            Self::Llama(llama) => Some(llama.context),
            Self::Bert(bert) => Some(bert.context),
            _ => None,
        }
    }

    /// Whether it can learn embeddings of a table's categories.
    pub fn supports_embedding(&self) -> bool {
        matches!(self, Self::Mlp(_) | Self::Layers(_))
    }

    /// Whether it predicts the next token of a text.
    pub fn generates_text(&self) -> bool {
        matches!(self, Self::Gpt(_) | Self::Llama(_))
    }

    /// The name of its `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Mlp(_) => "mlp",
            Self::Cnn(_) => "cnn",
            Self::Gpt(_) => "gpt",
            Self::Llama(_) => "llama",
            Self::Bert(_) => "bert",
            Self::Vit(_) => "vit",
            Self::Resnet(_) => "resnet",
            Self::Mobilenet(_) => "mobilenet",
            Self::Layers(_) => "layers",
        }
    }
}

/// An MLP: the flattened sample, dense layers, then one output per class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MlpConfig {
    /// Widths of the hidden layers, first to last; `[]` is a linear model.
    #[serde(deserialize_with = "list_of_one_or_many")]
    #[schemars(inner(range(min = 1, max = 1_048_576)), transform = one_or_list)]
    pub hidden: Vec<usize>,
    /// Activation after every hidden layer.
    pub activation: ActivationKind,
    /// Dropout probability after each hidden layer.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
}

impl Default for MlpConfig {
    fn default() -> Self {
        Self { hidden: vec![256], activation: ActivationKind::Relu, dropout: 0.0 }
    }
}

/// A convolutional network: stages over the image, then flattened and dense layers as in `mlp`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CnnConfig {
    /// Widths of the hidden dense layers after the stages; with `[]`, only the output layer follows them.
    #[serde(deserialize_with = "list_of_one_or_many")]
    #[schemars(inner(range(min = 1, max = 1_048_576)), transform = one_or_list)]
    pub hidden: Vec<usize>,
    /// Activation after every convolution and every hidden layer.
    pub activation: ActivationKind,
    /// Dropout probability after each hidden layer.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
    /// Samples that batch norm, if a stage has it, normalizes together; the micro-batch is then a multiple of it.
    #[schemars(range(min = 1, max = 65_536))]
    pub norm_group: usize,
    /// The convolutions, first to last; each a `[[model.stages]]` table or written inline.
    #[schemars(length(min = 1))]
    pub stages: Vec<StageConfig>,
}

impl Default for CnnConfig {
    fn default() -> Self {
        let stage = |channels| StageConfig { channels, kernel: 3, stride: 1, norm: NormKind::None, pool: 2 };
        Self {
            hidden: vec![128],
            activation: ActivationKind::Relu,
            dropout: 0.0,
            norm_group: 32,
            stages: vec![stage(32), stage(64)],
        }
    }
}

/// A convolution padded by `kernel / 2` (rounded down) on every side, then normalization, activation and max pooling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageConfig {
    /// Output channels.
    #[schemars(range(min = 1, max = 65_536))]
    pub channels: usize,
    /// Width and height of the kernel, in pixels.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 31))]
    pub kernel: usize,
    /// Stride, in pixels.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 31))]
    pub stride: usize,
    /// Normalization between the convolution, which then has no bias, and the activation.
    #[serde(default)]
    pub norm: NormKind,
    /// Size and stride of the max pooling after the activation; 1 means none.
    #[serde(default = "two")]
    #[schemars(range(min = 1, max = 31))]
    pub pool: usize,
}

fn one() -> usize {
    1
}

fn two() -> usize {
    2
}

fn three() -> usize {
    3
}

/// The normalization of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// No normalization.
    #[default]
    None,
    /// Batch norm: per channel, over groups of samples.
    Batch,
    /// Group norm: per sample, over groups of channels. The number of groups is the largest power of two up to 32 that
    /// divides the channels.
    Group,
}

/// The activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// ReLU.
    Relu,
    /// GELU, exact (by the error function).
    Gelu,
    /// GELU in the tanh approximation that GPT-2 uses.
    GeluTanh,
    /// SiLU: the input times its logistic function.
    Silu,
}
