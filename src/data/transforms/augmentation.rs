//! The random augmentations of a sample, and those that work on its bytes.

use super::blur::{RandomBlur, gaussian_blur};
use super::scratch::AugmentBuffers;
use super::{ColorJitter, RandAugment, RandomAffine, RandomErasing, RandomResizedCrop};
use crate::base::random::{CounterRng, stream_id};

const AFFINE: u64 = stream_id("augment.affine");
const RANDAUGMENT: u64 = stream_id("augment.randaugment");
const BLUR: u64 = stream_id("augment.blur");

/// Random augmentation, drawn anew for every sample in every epoch. Everything is off by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Augmentation {
    /// Use a random crop instead of the resized image.
    pub resized_crop: Option<RandomResizedCrop>,
    /// Pixels of black added around the resized image before a random crop of the sample's size.
    pub padding: usize,
    /// Probabilities of mirroring.
    pub horizontal_flip: f64,
    pub vertical_flip: f64,
    pub affine: RandomAffine,
    pub randaugment: Option<RandAugment>,
    pub blur: Option<RandomBlur>,
    pub jitter: ColorJitter,
    pub erasing: Option<RandomErasing>,
    /// At test time, an epoch is a view of the sample, and the first view is not augmented.
    pub plain_first_view: bool,
}

impl Augmentation {
    /// Whether bytes of the sample's size are changed before they become values.
    pub(super) fn changes_bytes(&self) -> bool {
        self.resamples() || self.blur.is_some()
    }

    pub(super) fn resamples(&self) -> bool {
        self.affine != RandomAffine::default() || self.randaugment.is_some()
    }

    /// Changes the bytes of a sample: the affine map, RandAugment and blur.
    pub(super) fn augment_bytes(
        &self,
        shape: [usize; 3],
        draws: impl Fn(u64) -> CounterRng,
        AugmentBuffers { image, spare, rows }: &mut AugmentBuffers,
    ) {
        if self.affine != RandomAffine::default() {
            let map = self.affine.draw([shape[0], shape[1]], &mut draws(AFFINE));
            map.apply(shape, image, spare);
        }
        if let Some(randaugment) = &self.randaugment {
            randaugment.apply(shape, &mut draws(RANDAUGMENT), image, spare);
        }
        if let Some(random_blur) = &self.blur
            && let Some(sigma) = random_blur.draw(&mut draws(BLUR))
        {
            gaussian_blur(shape, image, rows, random_blur.kernel, sigma);
        }
    }
}
