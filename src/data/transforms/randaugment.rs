//! RandAugment: a few operations per image, drawn from a fixed list, all of the same magnitude.
//!
//! The list, the magnitudes and the arithmetic are torchvision's, with bilinear sampling as in its training recipes.

use super::affine::{AffineMap, AffineParameters};
use super::enhance;
use crate::base::random::CounterRng;

/// Applies `operations` operations, drawn with repetition, at `magnitude` of [`MAX_MAGNITUDE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandAugment {
    pub operations: usize,
    pub magnitude: usize,
}

/// torchvision's default of 31 bins.
pub const MAX_MAGNITUDE: usize = 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Identity,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
    Rotate,
    Brightness,
    Color,
    Contrast,
    Sharpness,
    Posterize,
    Solarize,
    AutoContrast,
    Equalize,
}

impl Operation {
    pub const ALL: [Self; 14] = [
        Self::Identity,
        Self::ShearX,
        Self::ShearY,
        Self::TranslateX,
        Self::TranslateY,
        Self::Rotate,
        Self::Brightness,
        Self::Color,
        Self::Contrast,
        Self::Sharpness,
        Self::Posterize,
        Self::Solarize,
        Self::AutoContrast,
        Self::Equalize,
    ];

    /// Applies the operation at `magnitude`, in the other direction if it is `negative` and has one. `spare` is a
    /// buffer of the size of `image`.
    pub fn apply(
        self,
        magnitude: usize,
        negative: bool,
        shape: [usize; 3],
        image: &mut Vec<u8>,
        spare: &mut Vec<u8>,
    ) {
        let [height, width, channels] = shape;
        let signed = |most: f32| {
            let value = linspace(most, magnitude);
            if negative { -value } else { value }
        };
        let still = AffineParameters {
            center: [0.0; 2],
            degrees: 0.0,
            translate: [0.0; 2],
            scale: 1.0,
            shear: [0.0; 2],
        };
        let mut moved = |parameters| AffineMap::new(&parameters).apply(shape, image, spare);
        let shear = || signed(0.3).atan().to_degrees();
        let shift = |side: usize| signed((150.0 / 331.0 * side as f64) as f32).trunc();
        let factor = || (1.0 + signed(0.9)) as f32;
        match self {
            Self::Identity => {}
            Self::ShearX => moved(AffineParameters { shear: [shear(), 0.0], ..still }),
            Self::ShearY => moved(AffineParameters { shear: [0.0, shear()], ..still }),
            Self::TranslateX => moved(AffineParameters { translate: [shift(width), 0.0], ..still }),
            Self::TranslateY => moved(AffineParameters { translate: [0.0, shift(height)], ..still }),
            Self::Rotate => {
                let center = [width, height].map(|side| side as f64 / 2.0);
                moved(AffineParameters { center, degrees: -signed(30.0), ..still });
            }
            Self::Brightness => enhance::brightness(image, factor()),
            Self::Color => enhance::saturation(image, channels, factor()),
            Self::Contrast => enhance::contrast(image, channels, factor()),
            Self::Sharpness => enhance::sharpness(shape, image, spare, factor()),
            Self::Posterize => {
                let dropped = 4.0 * magnitude as f64 / MAX_MAGNITUDE as f64;
                enhance::posterize(image, 8 - dropped.round() as u32);
            }
            Self::Solarize => {
                enhance::solarize(image, 255.0 - 255.0 / MAX_MAGNITUDE as f64 * magnitude as f64)
            }
            Self::AutoContrast => enhance::autocontrast(image, channels),
            Self::Equalize => enhance::equalize(image, channels),
        }
    }
}

/// `magnitude` of [`MAX_MAGNITUDE`] steps from 0 to `most`, in f32 from the nearer end: `torch.linspace`, to the last
/// bit, which the truncation of bytes makes visible.
fn linspace(most: f32, magnitude: usize) -> f64 {
    let step = most / MAX_MAGNITUDE as f32;
    f64::from(match magnitude < MAX_MAGNITUDE / 2 {
        true => step * magnitude as f32,
        false => (-step).mul_add((MAX_MAGNITUDE - magnitude) as f32, most),
    })
}

impl RandAugment {
    pub fn apply(&self, shape: [usize; 3], draws: &mut CounterRng, image: &mut Vec<u8>, spare: &mut Vec<u8>) {
        for _ in 0..self.operations {
            let operation = Operation::ALL[draws.below(Operation::ALL.len() as u64) as usize];
            let negative = draws.below(2) == 1;
            operation.apply(self.magnitude, negative, shape, image, spare);
        }
    }
}
