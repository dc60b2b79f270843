//! `[data]`: where samples come from, and how they are brought to the model.

use std::path::PathBuf;

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
    Idx(Idx),
    Text(Text),
    #[serde(rename = "text-synthetic")]
    TextSynthetic(TextSynthetic),
}

impl Source {
    /// The name of its `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Shapes(_) => "shapes",
            Self::Idx(_) => "idx",
            Self::Text(_) => "text",
            Self::TextSynthetic(_) => "text-synthetic",
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

fn each_a_path(schema: &mut schemars::Schema) {
    if let Some(items) = schema.get_mut("items").and_then(serde_json::Value::as_object_mut) {
        items.insert("format".into(), "path".into());
    }
}

fn tenth() -> f64 {
    0.1
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

/// Sequences of tokens that follow a hidden rule, drawn by the program from the seed: for a language model
/// to go on with, or for a classifier to tell by which of several rules they were made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TextSynthetic {
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

impl Default for TextSynthetic {
    fn default() -> Self {
        Self { train_samples: 8_000, valid_samples: 1_000, vocab: 24, classes: 0 }
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
