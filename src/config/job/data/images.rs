//! Image datasets in files.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::augment::AugmentConfig;
use super::files::FilesConfig;
use super::one_or_many::{OneOrMany, above_zero, at_least_one};
use super::split::SplitKind;

/// Images in idx files, as MNIST and its family are published; plain or gzip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IdxConfig {
    /// Training images.
    #[schemars(extend("format" = "path"))]
    pub train_images: PathBuf,
    /// Labels of the training images.
    #[schemars(extend("format" = "path"))]
    pub train_labels: PathBuf,
    /// Validation images.
    #[schemars(extend("format" = "path"))]
    pub valid_images: PathBuf,
    /// Labels of the validation images.
    #[schemars(extend("format" = "path"))]
    pub valid_labels: PathBuf,
    /// Test images, which training never reads: `trainer eval --split test` evaluates them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "path"))]
    pub test_images: Option<PathBuf>,
    /// Labels of the test images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "path"))]
    pub test_labels: Option<PathBuf>,
    /// Number of classes; labels are 0 to `classes` - 1.
    #[serde(default = "ten")]
    #[schemars(range(min = 2, max = 256))]
    pub classes: usize,
    /// Mean subtracted from values scaled to 0 to 1: one number, or one per channel.
    #[serde(default = "zero")]
    pub mean: OneOrMany<f64>,
    /// Standard deviation that values are then divided by: one number, or one per channel.
    #[serde(default = "one")]
    #[schemars(transform = above_zero)]
    pub std: OneOrMany<f64>,
    /// Augmentation of the training images.
    #[serde(default, skip_serializing_if = "AugmentConfig::is_off")]
    pub augment: AugmentConfig,
}

/// Images in JPEG, PNG or WebP files: folders named by class, tables of paths and labels, or archives (tar, zip). The
/// format is detected from the content, and the EXIF orientation is applied.
///
/// `train` and `valid` take folders that contain a folder of images for each class; tables (.csv, .tsv) with a
/// header and paths relative to the table; zip files, and tar files (.tar, or compressed as .tar.gz and .tar.zst, which
/// are read sequentially), where an image's class is the folder that contains it or the text of the member `NAME.cls`
/// beside it, or the field `label` of `NAME.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ImagesConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// Height and width of a sample in pixels: [height, width], or one number for both.
    #[schemars(transform = at_least_one)]
    pub image_size: OneOrMany<usize>,
    /// 3 for RGB, 1 for grayscale; other images are converted, and an alpha channel is dropped.
    #[serde(default = "three")]
    #[schemars(extend("enum" = [1, 3]))]
    pub channels: usize,
    /// How an image of another aspect ratio becomes a sample.
    #[serde(default)]
    pub fit: ImageFit,
    /// With `fit = "crop"`, the sides of the center crop as a fraction of the largest crop; 0.875 is 224 of 256.
    #[serde(default = "whole")]
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0.0))]
    pub crop_fraction: f64,
    /// Preset of `mean` and `std`, which override it.
    #[serde(default)]
    pub normalise: NormalizePreset,
    /// Mean subtracted from values scaled to 0 to 1: one number, or one per channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<OneOrMany<f64>>,
    /// Standard deviation that values are then divided by: one number, or one per channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = above_zero)]
    pub std: Option<OneOrMany<f64>>,
    /// The column of a table with the paths.
    #[serde(default = "path")]
    pub path_column: String,
    /// The column of a table with the classes.
    #[serde(default = "label")]
    pub label_column: String,
    /// What separates the labels of an image with any number of them, as `|` does in `red|round`; an empty cell of a
    /// table has none. A label of a tar file that is a list, in `NAME.json`, needs no separator. Without this key an
    /// image has one class, and a table whose labels look like lists is refused; `""` says that each text is one class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_separator: Option<String>,
    /// How samples of `train` are assigned to the validation and the test set.
    #[serde(default, skip_serializing_if = "SplitKind::is_random")]
    pub split: SplitKind,
    /// An image whose header declares more pixels is a bad record and is not decoded.
    #[serde(default = "pixels")]
    #[schemars(range(min = 1, max = 4_000_000_000u64))]
    pub max_pixels: u64,
    /// Augmentation of the training images.
    #[serde(default, skip_serializing_if = "AugmentConfig::is_off")]
    pub augment: AugmentConfig,
}

/// How an image of another aspect ratio becomes a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageFit {
    /// The largest centered part of the sample's aspect ratio, resized.
    #[default]
    Crop,
    /// The whole image, resized and padded with black.
    Pad,
    /// The whole image, resized to the sample's shape: the aspect ratio changes.
    Stretch,
}

/// How values are normalized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormalizePreset {
    /// Mean and standard deviation of ImageNet's channels, as pretrained models expect.
    #[default]
    Imagenet,
    /// Mean 0.5 and standard deviation 0.5: values are -1 to 1.
    Half,
    /// No normalization: values are 0 to 1.
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
