//! `[model]`: the network. `kind` decides the other keys.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

    /// Whether it can learn a vector for each category of a table.
    pub fn supports_embedding(&self) -> bool {
        matches!(self, Self::Mlp(_) | Self::Layers(_))
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

/// An MLP: the sample flattened, dense layers, then one output a class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MlpConfig {
    /// Widths of the hidden layers, first to last; `[]` is a linear model.
    #[schemars(inner(range(min = 1, max = 1_048_576)))]
    pub hidden: Vec<usize>,
    /// Follows every hidden layer.
    pub activation: ActivationKind,
    /// Fraction of each hidden layer's outputs dropped while training.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
}

impl Default for MlpConfig {
    fn default() -> Self {
        Self { hidden: vec![256], activation: ActivationKind::Relu, dropout: 0.0 }
    }
}

/// A convolutional network: stages over the image, flattened, then dense layers as in `mlp`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CnnConfig {
    /// Widths of the hidden dense layers after the stages; `[]` goes straight to the classes.
    #[schemars(inner(range(min = 1, max = 1_048_576)))]
    pub hidden: Vec<usize>,
    /// Follows every convolution and every hidden layer.
    pub activation: ActivationKind,
    /// Fraction of each hidden layer's outputs dropped while training.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
    /// Samples that batch norm, where a stage has it, looks at together; a micro-batch is a multiple of it.
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

/// A convolution padded by `kernel / 2` (rounded down) on every side, its normalisation, the activation,
/// then max pooling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageConfig {
    /// Output channels.
    #[schemars(range(min = 1, max = 65_536))]
    pub channels: usize,
    /// Width and height of the kernel, in pixels.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 31))]
    pub kernel: usize,
    /// Pixels from one kernel position to the next.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 31))]
    pub stride: usize,
    /// Normalisation between the convolution, which then has no bias, and the activation.
    #[serde(default)]
    pub norm: NormKind,
    /// Factor of the max pooling after the activation; 1 means none.
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

/// How a stage's channels are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Not at all.
    #[default]
    None,
    /// A channel, over groups of samples.
    Batch,
    /// A sample, over groups of channels: the largest power of two of them, up to 32, that divides.
    Group,
}

/// The non-linearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// ReLU.
    Relu,
    /// Exact, by the error function.
    Gelu,
    /// The tanh approximation that GPT-2 uses.
    GeluTanh,
    /// The input times its logistic function.
    Silu,
}
