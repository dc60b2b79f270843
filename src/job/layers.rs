//! `[[model.layers]]`: a network as a list of layers. Keys have the names PyTorch users know.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A network of your own: layers first to last; a linear map to the classes follows by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LayersConfig {
    /// The layers, each a `[[model.layers]]` table or written inline. An activation is a layer of its
    /// own; one that follows a layer that can take it in costs nothing extra.
    #[schemars(length(min = 1))]
    pub layers: Vec<LayerConfig>,
}

/// Every layer once, as a part of a residual group and as a layer that may be such a group: a schema
/// that contains itself could not be written out in place.
macro_rules! layers {
    ($($(#[$doc:meta])* $name:ident($keys:ty),)*) => {
        /// A layer. `kind` decides the other keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        pub enum LayerConfig {
            $($(#[$doc])* $name($keys),)*
            /// The sum of two ways through: its layers, and its shortcut or the input itself.
            Residual(ResidualConfig),
        }

        /// A layer of a residual group. `kind` decides the other keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        pub enum BranchLayerConfig {
            $($(#[$doc])* $name($keys),)*
        }

        impl From<BranchLayerConfig> for LayerConfig {
            fn from(part: BranchLayerConfig) -> Self {
                match part {
                    $(BranchLayerConfig::$name(keys) => Self::$name(keys),)*
                }
            }
        }
    };
}

layers! {
    /// A linear map of vectors.
    Linear(LinearConfig),
    /// A convolution of images.
    Conv(ConvConfig),
    /// The largest value of every window.
    MaxPool(PoolConfig),
    /// The mean of every window.
    AvgPool(PoolConfig),
    /// The image's mean a channel, a vector.
    GlobalPool(EmptyConfig),
    /// An image as a vector.
    Flatten(EmptyConfig),
    /// Values dropped at random while training.
    Dropout(DropoutConfig),
    /// Normalisation a channel, over groups of samples.
    BatchNorm(BatchNormConfig),
    /// Normalisation a sample, over groups of channels.
    GroupNorm(GroupNormConfig),
    /// Every channel scaled by a gate computed from the image's means.
    SqueezeExcite(SqueezeExciteConfig),
    /// ReLU.
    Relu(EmptyConfig),
    /// ReLU, cut off at 6.
    Relu6(EmptyConfig),
    /// Exact, by the error function.
    Gelu(EmptyConfig),
    /// The tanh approximation that GPT-2 uses.
    GeluTanh(EmptyConfig),
    /// The input times its logistic function.
    Silu(EmptyConfig),
    /// The logistic function.
    Sigmoid(EmptyConfig),
    /// The hyperbolic tangent.
    Tanh(EmptyConfig),
}

/// A layer without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EmptyConfig {}

/// A linear map of vectors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinearConfig {
    /// Values it gives for each vector.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub outputs: usize,
    /// Whether a bias is added.
    #[serde(default = "yes")]
    pub bias: bool,
}

/// A convolution of images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConvConfig {
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
    /// Zeros put around the image, in pixels; half the kernel keeps the image's size.
    #[serde(default)]
    #[schemars(range(min = 0, max = 31))]
    pub padding: usize,
    /// Pixels from one cell of the kernel to the next.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 31))]
    pub dilation: usize,
    /// Groups of channels that do not see each other; as many as channels is a depthwise convolution.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 65_536))]
    pub groups: usize,
    /// Whether a bias is added.
    #[serde(default = "yes")]
    pub bias: bool,
}

/// A window that moves over the image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PoolConfig {
    /// Width and height of the window, in pixels.
    #[schemars(range(min = 1, max = 15))]
    pub size: usize,
    /// Pixels from one window to the next; 0 means the window's size.
    #[schemars(range(min = 0, max = 31))]
    pub stride: usize,
    /// Pixels put around the image, at most half the size.
    #[schemars(range(min = 0, max = 7))]
    pub padding: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { size: 2, stride: 0, padding: 0 }
    }
}

impl PoolConfig {
    /// Pixels from one window to the next.
    pub fn stride(&self) -> usize {
        if self.stride == 0 { self.size } else { self.stride }
    }
}

/// Values dropped at random while training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DropoutConfig {
    /// Fraction of the values dropped.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub p: f64,
}

impl Default for DropoutConfig {
    fn default() -> Self {
        Self { p: 0.5 }
    }
}

/// Normalisation a channel, over groups of samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BatchNormConfig {
    /// Samples normalised together; a micro-batch is a multiple of it.
    #[schemars(range(min = 1, max = 65_536))]
    pub group: usize,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self { group: 32 }
    }
}

/// Normalisation a sample, over groups of channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GroupNormConfig {
    /// Groups the channels are cut into, a divisor of their number.
    #[schemars(range(min = 1, max = 65_536))]
    pub groups: usize,
}

impl Default for GroupNormConfig {
    fn default() -> Self {
        Self { groups: 32 }
    }
}

/// Every channel scaled by a gate computed from the image's means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SqueezeExciteConfig {
    /// The image's channels over the values in the middle of the gate.
    #[schemars(range(min = 1, max = 65_536))]
    pub ratio: usize,
}

impl Default for SqueezeExciteConfig {
    fn default() -> Self {
        Self { ratio: 4 }
    }
}

/// The sum of two ways through, which must give one shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResidualConfig {
    /// The layers of the one way; residual groups do not nest.
    #[schemars(length(min = 1))]
    pub layers: Vec<BranchLayerConfig>,
    /// The layers of the other way; none is the input itself.
    #[serde(default)]
    pub shortcut: Vec<BranchLayerConfig>,
    /// Follows the sum.
    #[serde(default)]
    pub activation: ResidualActivation,
}

/// What follows a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResidualActivation {
    /// Nothing.
    #[default]
    None,
    /// ReLU.
    Relu,
}

fn yes() -> bool {
    true
}

fn one() -> usize {
    1
}

fn three() -> usize {
    3
}
