//! Pictures in files.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Pictures in idx files, as MNIST and its family are published; plain or gzip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Idx {
    /// Pictures to train on.
    #[schemars(extend("format" = "path"))]
    pub train_images: PathBuf,
    /// Their labels.
    #[schemars(extend("format" = "path"))]
    pub train_labels: PathBuf,
    /// Pictures to measure on.
    #[schemars(extend("format" = "path"))]
    pub valid_images: PathBuf,
    /// Their labels.
    #[schemars(extend("format" = "path"))]
    pub valid_labels: PathBuf,
    /// Number of classes; labels are below it.
    #[serde(default = "ten")]
    #[schemars(range(min = 2, max = 256))]
    pub classes: usize,
    /// Taken from every value, which is first scaled to 0 to 1.
    #[serde(default)]
    pub mean: f64,
    /// Divides every value after that.
    #[serde(default = "one")]
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub std: f64,
}

fn ten() -> usize {
    10
}

fn one() -> f64 {
    1.0
}
