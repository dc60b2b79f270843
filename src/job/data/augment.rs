//! `[data.augment]`: random augmentations, drawn per sample and epoch.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is drawn anew for each sample of each epoch, from the seed, the epoch and the sample; never for what is
/// measured on. All of it is off unless it is asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AugmentConfig {
    /// Take a part of the image with a fraction of its area between these, anywhere, and resize it; [0.08, 1.0]
    /// is usual for large images.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(inner(range(min = 0.0001, max = 1.0)))]
    pub random_resized_crop: Option<[f64; 2]>,
    /// Width over height of that part, between these.
    #[schemars(inner(range(min = 0.001, max = 1000.0)))]
    pub crop_ratio: [f64; 2],
    /// Pixels of black put around the image, out of which its size is cut anywhere; 4 is usual for 32 x 32.
    #[schemars(range(max = 1024))]
    pub crop_padding: usize,
    /// Chance that left and right are exchanged.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub horizontal_flip: f64,
    /// Chance that top and bottom are exchanged.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub vertical_flip: f64,
    /// Multiply all values by a factor within 1 - x and 1 + x.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub brightness: f64,
    /// The same for the distance of values from the image's mean.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub contrast: f64,
    /// The same for the distance of colours from grey.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub saturation: f64,
    /// Turn the colour wheel by up to this fraction of it either way.
    #[schemars(range(min = 0.0, max = 0.5))]
    pub hue: f64,
    /// Chance that a rectangle is blanked.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub erasing: f64,
    /// Fraction of the area of that rectangle, between these.
    #[schemars(inner(range(min = 0.0001, max = 1.0)))]
    pub erasing_area: [f64; 2],
    /// Width over height of that rectangle, between these.
    #[schemars(inner(range(min = 0.001, max = 1000.0)))]
    pub erasing_ratio: [f64; 2],
    /// Blend each sample and its class with another one's; the share is drawn from the beta distribution with
    /// both parameters this. 0.2 is usual.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub mixup: f64,
    /// Put a rectangle of another sample over each one; its area is drawn from the beta distribution with both
    /// parameters this. 1.0 is usual. With `mixup` too, each sample gets one of them.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub cutmix: f64,
    /// Fraction of the samples that `mixup` and `cutmix` change.
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
    /// Whether nothing was said: then a resolved job says nothing either.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }

    /// Keys that are a lower and an upper end.
    pub fn ranges(&self) -> [(&'static str, [f64; 2]); 4] {
        [
            ("random_resized_crop", self.random_resized_crop.unwrap_or_default()),
            ("crop_ratio", self.crop_ratio),
            ("erasing_area", self.erasing_area),
            ("erasing_ratio", self.erasing_ratio),
        ]
    }
}
