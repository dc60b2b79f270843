//! Image datasets in files.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::augment::AugmentConfig;
use super::files::FilesConfig;
use super::one_or_many::{OneOrMany, above_zero, at_least_one};

/// Images in idx files, as MNIST and its family are published; plain or gzip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IdxConfig {
    /// Images to train on.
    #[schemars(extend("format" = "path"))]
    pub train_images: PathBuf,
    /// Their labels.
    #[schemars(extend("format" = "path"))]
    pub train_labels: PathBuf,
    /// Images to measure on.
    #[schemars(extend("format" = "path"))]
    pub valid_images: PathBuf,
    /// Their labels.
    #[schemars(extend("format" = "path"))]
    pub valid_labels: PathBuf,
    /// Number of classes; labels are below it.
    #[serde(default = "ten")]
    #[schemars(range(min = 2, max = 256))]
    pub classes: usize,
    /// Taken from every value, which is first scaled to 0 to 1; one number, or one a channel.
    #[serde(default = "zero")]
    pub mean: OneOrMany<f64>,
    /// Divides every value after that.
    #[serde(default = "one")]
    #[schemars(transform = above_zero)]
    pub std: OneOrMany<f64>,
    /// What is drawn anew for each sample of each epoch; never for the validation set.
    #[serde(default, skip_serializing_if = "AugmentConfig::is_off")]
    pub augment: AugmentConfig,
}

/// Images in JPEG, PNG or WebP files: folders named by class, tables of paths and labels, or tar files. The
/// format is seen from the content, and orientations noted by cameras are applied.
///
/// `train` and `valid` take folders that hold a folder of images for each class; tables (.csv, .tsv) with a
/// header, whose paths are relative to them; tar files (.tar, or packed as .tar.gz and .tar.zst, then read in
/// order), where an image's class is the folder it lies in or the text of the member `NAME.cls` beside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ImagesConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// Height and width of a sample in pixels; one number for both.
    #[schemars(transform = at_least_one)]
    pub image_size: OneOrMany<usize>,
    /// 3 for colour, 1 for grey; images of the other sort are converted, alpha is left away.
    #[serde(default = "three")]
    #[schemars(extend("enum" = [1, 3]))]
    pub channels: usize,
    /// How an image of another shape becomes a sample.
    #[serde(default)]
    pub fit: ImageFit,
    /// With `fit = "crop"`, fraction of the sides of the center crop that is kept; 0.875 is 224 out of 256.
    #[serde(default = "whole")]
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0.0))]
    pub crop_fraction: f64,
    /// What is taken from values of 0 to 1, and what they are divided by; `mean` and `std` come before it.
    #[serde(default)]
    pub normalise: NormalizePreset,
    /// Taken from every value, which is first scaled to 0 to 1; one number, or one a channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<OneOrMany<f64>>,
    /// Divides every value after that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = above_zero)]
    pub std: Option<OneOrMany<f64>>,
    /// The column of a table that holds paths.
    #[serde(default = "path")]
    pub path_column: String,
    /// The column of a table that holds classes.
    #[serde(default = "label")]
    pub label_column: String,
    /// An image whose header says that it has more pixels is a bad record: it is not decoded.
    #[serde(default = "pixels")]
    #[schemars(range(min = 1, max = 4_000_000_000u64))]
    pub max_pixels: u64,
    /// What is drawn anew for each sample of each epoch; never for the validation set.
    #[serde(default, skip_serializing_if = "AugmentConfig::is_off")]
    pub augment: AugmentConfig,
}

/// How an image of another shape becomes a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageFit {
    /// The largest middle part of the sample's shape, resized.
    #[default]
    Crop,
    /// The whole image, resized, black above and below it or at its sides.
    Pad,
    /// The whole image, resized whatever its shape.
    Stretch,
}

/// How values are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormalizePreset {
    /// The mean and deviation of ImageNet's channels, as models trained on it expect.
    #[default]
    Imagenet,
    /// To -1 to 1.
    Half,
    /// Values stay 0 to 1.
    None,
}

fn ten() -> usize {
    10
}

fn three() -> usize {
    3
}

fn whole() -> f64 {
    1.0
}

fn zero() -> OneOrMany<f64> {
    OneOrMany::One(0.0)
}

fn one() -> OneOrMany<f64> {
    OneOrMany::One(1.0)
}

fn path() -> String {
    "path".into()
}

fn label() -> String {
    "label".into()
}

fn pixels() -> u64 {
    64_000_000
}
