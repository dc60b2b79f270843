//! Text and tokens in files, for language models.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::files::{each_a_path, tenth};

/// Characters of text files, for a language model: a sample is a window of the model's `context`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Text {
    /// UTF-8 files, read one after the other.
    #[schemars(length(min = 1), transform = each_a_path)]
    pub files: Vec<PathBuf>,
    /// Share of the text, at its end, that is measured on.
    #[serde(default = "tenth")]
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    pub valid_share: f64,
    /// Where the training windows lie.
    #[serde(default)]
    pub windows: Windows,
}

/// Where the training windows of a text lie; those measured on lie end to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Windows {
    /// End to end: an epoch predicts each character once.
    Fixed,
    /// Anywhere, drawn anew for each sample of each epoch.
    #[default]
    Random,
}
