//! `[[model.layers]]`: a network as a list of layers. Keys have the names PyTorch users know.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A network declared layer by layer, first to last. A final linear layer to the classes (or target values) is added
/// automatically.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LayersConfig {
    /// The layers, each a `[[model.layers]]` table or written inline. An activation is a layer of its
    /// own; where the kernel of the layer before it can fuse it, it costs nothing extra.
    #[schemars(length(min = 1))]
    pub layers: Vec<LayerConfig>,
}

/// Defines every layer once, for both enums: layers of a residual group, and layers that may be such a group. One
/// recursive enum would give a recursive schema, which cannot be inlined.
macro_rules! layers {
    ($($(#[$doc:meta])* $name:ident($keys:ty),)*) => {
        /// A layer. `kind` decides the other keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        pub enum LayerConfig {
            $($(#[$doc])* $name($keys),)*
            /// A residual connection: the sum of its layers' output and its shortcut's, by default the input itself.
            Residual(ResidualConfig),
        }

        /// A layer of a residual group. `kind` decides the other keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        pub enum BranchLayerConfig {
            $($(#[$doc])* $name($keys),)*
        }

        impl From<BranchLayerConfig> for LayerConfig {
            fn from(layer: BranchLayerConfig) -> Self {
                match layer {
                    $(BranchLayerConfig::$name(keys) => Self::$name(keys),)*
                }
            }
        }
    };
}

layers! {
    /// A linear layer over vectors.
    Linear(LinearConfig),
    /// A 2-d convolution.
    Conv(ConvConfig),
    /// Max pooling.
    MaxPool(PoolConfig),
    /// Average pooling; padding counts as zeros.
    AvgPool(PoolConfig),
    /// Global average pooling: the mean per channel, a vector.
    GlobalPool(EmptyConfig),
    /// Flattens an image to a vector.
    Flatten(EmptyConfig),
    /// Dropout.
    Dropout(DropoutConfig),
    /// Batch norm: normalizes per channel, over groups of samples.
    BatchNorm(BatchNormConfig),
    /// Group norm: normalizes per sample, over groups of channels.
    GroupNorm(GroupNormConfig),
    /// Squeeze-and-excitation: scales every channel by a gate computed from the channel means.
    SqueezeExcite(SqueezeExciteConfig),
    /// ReLU.
    Relu(EmptyConfig),
    /// ReLU, clamped to 6.
    Relu6(EmptyConfig),
    /// GELU, exact (by the error function).
    Gelu(EmptyConfig),
    /// GELU in the tanh approximation that GPT-2 uses.
    GeluTanh(EmptyConfig),
    /// SiLU: the input times its logistic function.
    Silu(EmptyConfig),
    /// The logistic function.
    Sigmoid(EmptyConfig),
    /// The hyperbolic tangent.
    Tanh(EmptyConfig),
}

/// A layer without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EmptyConfig {}

/// A linear layer over vectors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinearConfig {
    /// Output dimension.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub outputs: usize,
    /// Whether a bias is added.
    #[serde(default = "yes")]
    pub bias: bool,
}

/// A 2-d convolution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConvConfig {
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
    /// Zero padding on each side, in pixels; half the kernel size keeps the image size.
    #[serde(default)]
    #[schemars(range(min = 0, max = 31))]
    pub padding: usize,
    /// Dilation: pixels from one kernel element to the next.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 31))]
    pub dilation: usize,
    /// Groups of channels that are convolved separately; as many as input channels is a depthwise convolution.
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
    /// Width and height of the pooling window, in pixels.
    #[schemars(range(min = 1, max = 15))]
    pub size: usize,
    /// Stride, in pixels; 0 means the window's size.
    #[schemars(range(min = 0, max = 31))]
    pub stride: usize,
    /// Padding on each side, in pixels; at most half the window's size.
    #[schemars(range(min = 0, max = 7))]
    pub padding: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { size: 2, stride: 0, padding: 0 }
    }
}

impl PoolConfig {
    /// Stride, in pixels.
    pub fn stride(&self) -> usize {
        if self.stride == 0 { self.size } else { self.stride }
    }
}

/// Dropout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DropoutConfig {
    /// Dropout probability.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub p: f64,
}

impl Default for DropoutConfig {
    fn default() -> Self {
        Self { p: 0.5 }
    }
}

/// Batch norm: normalizes per channel, over groups of samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BatchNormConfig {
    /// Samples normalized together; the micro-batch is a multiple of it.
    #[schemars(range(min = 1, max = 65_536))]
    pub group: usize,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self { group: 32 }
    }
}

/// Group norm: normalizes per sample, over groups of channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GroupNormConfig {
    /// Number of groups; it divides the number of channels.
    #[schemars(range(min = 1, max = 65_536))]
    pub groups: usize,
}

impl Default for GroupNormConfig {
    fn default() -> Self {
        Self { groups: 32 }
    }
}

/// Squeeze-and-excitation: scales every channel by a gate computed from the channel means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SqueezeExciteConfig {
    /// Reduction ratio: input channels divided by the gate's hidden dimension.
    #[schemars(range(min = 1, max = 65_536))]
    pub ratio: usize,
}

impl Default for SqueezeExciteConfig {
    fn default() -> Self {
        Self { ratio: 4 }
    }
}

/// A residual connection; the branch and the shortcut must have the same output shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResidualConfig {
    /// The layers of the branch; residual groups do not nest.
    #[schemars(length(min = 1))]
    pub layers: Vec<BranchLayerConfig>,
    /// The layers of the shortcut; without any it is the identity.
    #[serde(default)]
    pub shortcut: Vec<BranchLayerConfig>,
    /// Activation after the sum.
    #[serde(default)]
    pub activation: ResidualActivation,
}

/// Activation after a residual sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResidualActivation {
    /// No activation.
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
