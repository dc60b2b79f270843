//! Synthetic datasets, generated from the seed: nothing to download.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::augment::AugmentConfig;

/// Grey images of ten shapes, drawn by the program from the seed: nothing to download.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShapesConfig {
    /// Samples in the training set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub train_samples: usize,
    /// Samples in the validation set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub valid_samples: usize,
    /// Width and height, in pixels.
    #[schemars(range(min = 16, max = 256))]
    pub image_size: usize,
    /// What is drawn anew for each sample of each epoch; never for the validation set.
    #[serde(skip_serializing_if = "AugmentConfig::is_off")]
    pub augment: AugmentConfig,
}

impl Default for ShapesConfig {
    fn default() -> Self {
        Self {
            train_samples: 12_000,
            valid_samples: 2_000,
            image_size: 28,
            augment: AugmentConfig::default(),
        }
    }
}

/// Sequences of tokens that follow a hidden rule, drawn by the program from the seed: for a language model
/// to go on with, or for a classifier to tell by which of several rules they were made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TextSyntheticConfig {
    /// Samples in the training set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub train_samples: usize,
    /// Samples in the validation set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub valid_samples: usize,
    /// Different tokens.
    #[schemars(range(min = 2, max = 1_000_000))]
    pub vocab: usize,
    /// Rules to tell apart; 0 means that the next token is to be predicted.
    #[schemars(range(max = 1000))]
    pub classes: usize,
}

impl Default for TextSyntheticConfig {
    fn default() -> Self {
        Self { train_samples: 8_000, valid_samples: 1_000, vocab: 24, classes: 0 }
    }
}
