//! `[model]` tables of standard image networks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// ResNet, with torchvision's parameter names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ResnetConfig {
    /// Layers with weights: 18, 34 or 50.
    #[schemars(extend("enum" = [18, 34, 50]))]
    pub depth: usize,
    /// The first layers, for small or for large images.
    pub stem: Stem,
    /// Samples that batch norm normalizes together; the micro-batch is a multiple of it.
    #[schemars(range(min = 1, max = 65_536))]
    pub norm_group: usize,
}

impl Default for ResnetConfig {
    fn default() -> Self {
        Self { depth: 18, stem: Stem::Imagenet, norm_group: 32 }
    }
}

/// MobileNet v2, with torchvision's parameter names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MobilenetConfig {
    /// Width multiplier: scales the channels of every layer, rounded to multiples of 8.
    #[schemars(range(min = 0.1, max = 4.0))]
    pub width: f64,
    /// The first layers, for small or for large images.
    pub stem: Stem,
    /// Dropout probability before the last layer.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub dropout: f64,
    /// Samples that batch norm normalizes together; the micro-batch is a multiple of it.
    #[schemars(range(min = 1, max = 65_536))]
    pub norm_group: usize,
}

impl Default for MobilenetConfig {
    fn default() -> Self {
        Self { width: 1.0, stem: Stem::Imagenet, dropout: 0.2, norm_group: 32 }
    }
}

/// The first layers of an image network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stem {
    /// For images of about 32 x 32: the first convolution is 3 x 3 with stride 1.
    Small,
    /// As published, for images of about 224 x 224: the first layers downsample.
    Imagenet,
}

impl Stem {
    /// Stride of the first convolution.
    pub fn stride(self) -> usize {
        match self {
            Stem::Small => 1,
            Stem::Imagenet => 2,
        }
    }
}
