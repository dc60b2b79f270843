//! `[data]`: where samples come from, and how they are brought to the model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Size;

/// Where samples come from. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Data {
    #[serde(flatten)]
    pub source: Source,
    #[serde(flatten)]
    pub loading: Loading,
}

/// The samples themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Source {
    Shapes(Shapes),
}

impl Source {
    /// The name of its `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Shapes(_) => "shapes",
        }
    }
}

/// Grey pictures of ten shapes, drawn by the program from the seed: nothing to download.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Shapes {
    /// Samples in the training set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub train_samples: usize,
    /// Samples in the validation set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub valid_samples: usize,
    /// Width and height, in pixels.
    #[schemars(range(min = 16, max = 256))]
    pub image_size: usize,
}

impl Default for Shapes {
    fn default() -> Self {
        Self { train_samples: 12_000, valid_samples: 2_000, image_size: 28 }
    }
}

/// How samples are brought to the model; the same keys for every kind of data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Loading {
    /// Visit the training samples in a new order each epoch, drawn from the seed.
    pub shuffle: bool,
    /// Threads that prepare samples; 0 means as many as the machine has cores. No result depends on it.
    #[schemars(range(max = 1024))]
    pub workers: usize,
    /// Host memory that prepared samples may take while they wait; a percentage is of `memory.ram`.
    pub prefetch: Size,
}

impl Default for Loading {
    fn default() -> Self {
        Self { shuffle: true, workers: 0, prefetch: Size::Auto }
    }
}
