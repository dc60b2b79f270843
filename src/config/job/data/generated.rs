//! Synthetic datasets, generated from the seed: nothing to download.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::augment::AugmentConfig;

/// Grayscale images of ten shapes, generated from the seed: nothing to download.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShapesConfig {
    /// Samples in the training set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub train_samples: usize,
    /// Samples in the validation set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub valid_samples: usize,
    /// Samples in the test set, which `trainer eval --split test` evaluates; 0 for none.
    #[schemars(range(max = 1_000_000_000))]
    #[serde(skip_serializing_if = "is_zero")]
    pub test_samples: usize,
    /// Width and height of an image, in pixels.
    #[schemars(range(min = 16, max = 256))]
    pub image_size: usize,
    /// Augmentation of the training images.
    #[serde(skip_serializing_if = "AugmentConfig::is_off")]
    pub augment: AugmentConfig,
}

impl Default for ShapesConfig {
    fn default() -> Self {
        Self {
            train_samples: 12_000,
            valid_samples: 2_000,
            test_samples: 0,
            image_size: 28,
            augment: AugmentConfig::default(),
        }
    }
}

/// Token sequences generated from the seed by hidden rules: for a language model to continue, or for a classifier to
/// recognize the rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TextSyntheticConfig {
    /// Samples in the training set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub train_samples: usize,
    /// Samples in the validation set.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub valid_samples: usize,
    /// Samples in the test set, which `trainer eval --split test` evaluates; 0 for none.
    #[schemars(range(max = 1_000_000_000))]
    #[serde(skip_serializing_if = "is_zero")]
    pub test_samples: usize,
    /// Vocabulary size.
    #[schemars(range(min = 2, max = 1_000_000))]
    pub vocab: usize,
    /// Number of rules, which are the classes; 0 means that the target is the next token.
    #[schemars(range(max = 1000))]
    pub classes: usize,
}

impl Default for TextSyntheticConfig {
    fn default() -> Self {
        Self { train_samples: 8_000, valid_samples: 1_000, test_samples: 0, vocab: 24, classes: 0 }
    }
}

fn is_zero(samples: &usize) -> bool {
    *samples == 0
}
