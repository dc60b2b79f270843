//! `[data.augment]`: random augmentations, drawn per sample and epoch.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Augmentation of training images, random per sample and epoch and determined by the seed; the validation set is not
/// augmented. Everything is off by default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AugmentConfig {
    /// Crop a random part of the image, whose fraction of the area is in this range, and resize it; [0.08, 1.0] is
    /// usual for large images.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(inner(range(min = 0.0001, max = 1.0)))]
    pub random_resized_crop: Option<[f64; 2]>,
    /// Range of the crop's aspect ratio, width divided by height.
    #[schemars(inner(range(min = 0.001, max = 1000.0)))]
    pub crop_ratio: [f64; 2],
    /// Pad the image with this many black pixels on each side and crop it at random to its size; 4 is usual for 32 x
    /// 32.
    #[schemars(range(max = 1024))]
    pub crop_padding: usize,
    /// Probability of a horizontal flip.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub horizontal_flip: f64,
    /// Probability of a vertical flip.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub vertical_flip: f64,
    /// Rotates the image by a random angle of up to this many degrees in either direction; the corners become black.
    #[schemars(range(min = 0.0, max = 180.0))]
    pub rotation: f64,
    /// Shifts the image by up to this fraction of its sides in each direction. With `rotation`, `scale` and `shear`,
    /// this is one affine map, torchvision's `RandomAffine`.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub translate: f64,
    /// Range of the factor by which the image is enlarged about its center; below 1 it shrinks, with a black border.
    #[schemars(inner(range(min = 0.01, max = 100.0)))]
    pub scale: [f64; 2],
    /// Shears the image by a random angle of up to this many degrees in either direction.
    #[schemars(range(min = 0.0, max = 80.0))]
    pub shear: f64,
    /// RandAugment: this many operations per image, drawn from torchvision's fourteen (shear, translation, rotation,
    /// brightness, color, contrast, sharpness, posterize, solarize, autocontrast, equalize, identity). 2 is usual; 0 is
    /// off.
    #[schemars(range(max = 16))]
    pub randaugment: usize,
    /// Magnitude of RandAugment's operations, of 30.
    #[schemars(range(max = 30))]
    pub randaugment_magnitude: usize,
    /// Probability of a Gaussian blur.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub blur: f64,
    /// Width of the blur's kernel in pixels, an odd number.
    #[schemars(range(min = 1, max = 255))]
    pub blur_kernel: usize,
    /// Range of the blur's standard deviation in pixels.
    #[schemars(inner(range(min = 0.01, max = 100.0)))]
    pub blur_sigma: [f64; 2],
    /// Brightness jitter x: multiplies all values by a random factor between 1 - x and 1 + x.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub brightness: f64,
    /// Contrast jitter: the same factor, applied to the difference from the image's mean.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub contrast: f64,
    /// Saturation jitter: the same factor, applied to the difference from grey.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub saturation: f64,
    /// Hue jitter: rotates the hue by up to this fraction of the color wheel in either direction.
    #[schemars(range(min = 0.0, max = 0.5))]
    pub hue: f64,
    /// Probability of random erasing: a rectangle of the image is blanked.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub erasing: f64,
    /// Range of the erased fraction of the area.
    #[schemars(inner(range(min = 0.0001, max = 1.0)))]
    pub erasing_area: [f64; 2],
    /// Range of the erased rectangle's aspect ratio, width divided by height.
    #[schemars(inner(range(min = 0.001, max = 1000.0)))]
    pub erasing_ratio: [f64; 2],
    /// Mixup: blends each sample and its class with another sample's, with a weight from Beta(`mixup`, `mixup`). 0.2 is
    /// usual; 0 is off.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub mixup: f64,
    /// CutMix: replaces a rectangle of each sample by that of another, with an area from Beta(`cutmix`, `cutmix`).
    /// 1.0 is usual; 0 is off. If `mixup` is on too, each sample gets one of the two.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub cutmix: f64,
    /// Probability that a sample gets `mixup` or `cutmix`.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub mix_chance: f64,
}

impl Default for AugmentConfig {
    fn default() -> Self {
        Self {
            random_resized_crop: None,
            crop_ratio: [3.0 / 4.0, 4.0 / 3.0],
            crop_padding: 0,
            horizontal_flip: 0.0,
            vertical_flip: 0.0,
            rotation: 0.0,
            translate: 0.0,
            scale: [1.0, 1.0],
            shear: 0.0,
            randaugment: 0,
            randaugment_magnitude: 9,
            blur: 0.0,
            blur_kernel: 9,
            blur_sigma: [0.1, 2.0],
            brightness: 0.0,
            contrast: 0.0,
            saturation: 0.0,
            hue: 0.0,
            erasing: 0.0,
            erasing_area: [0.02, 0.33],
            erasing_ratio: [0.3, 3.3],
            mixup: 0.0,
            cutmix: 0.0,
            mix_chance: 1.0,
        }
    }
}

impl AugmentConfig {
    /// Whether everything is default; a resolved job then omits the table.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }

    /// The keys that are a lower and an upper bound.
    pub fn ranges(&self) -> [(&'static str, [f64; 2]); 6] {
        [
            ("random_resized_crop", self.random_resized_crop.unwrap_or_default()),
            ("crop_ratio", self.crop_ratio),
            ("scale", self.scale),
            ("blur_sigma", self.blur_sigma),
            ("erasing_area", self.erasing_area),
            ("erasing_ratio", self.erasing_ratio),
        ]
    }
}
