//! Computes which region of an image is used and where it goes; touches no pixels.

use super::uniform;
use crate::base::random::CounterRng;

/// How an image of another aspect ratio becomes a sample of the declared size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ResizeMode {
    /// The largest centered crop with the sample's aspect ratio, its sides multiplied by `fraction`, resized.
    CenterCrop { fraction: f64 },
    /// The whole image, resized to fit into the sample and centered on black.
    Pad,
    /// The whole image, resized without regard to its aspect ratio.
    Stretch,
}

/// A region of an image: first row and column, height and width, in fractional pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rect {
    pub top: f64,
    pub left: f64,
    pub height: f64,
    pub width: f64,
}

/// The region `crop` of an image is resized to `size` (height, width) and placed at `offset` (row, column) of the
/// sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CropAndResize {
    pub crop: Rect,
    pub size: [usize; 2],
    pub offset: [isize; 2],
}

impl ResizeMode {
    /// Placement of an image of (height, width) `size` in a sample of (height, width) `out`.
    pub fn crop_and_resize(&self, size: [usize; 2], out: [usize; 2]) -> CropAndResize {
        let [height, width] = size.map(|n| n as f64);
        let whole = Rect { top: 0.0, left: 0.0, height, width };
        let scales = [height / out[0] as f64, width / out[1] as f64];
        match self {
            ResizeMode::Stretch => CropAndResize { crop: whole, size: out, offset: [0, 0] },
            ResizeMode::CenterCrop { fraction } => {
                let scale = scales[0].min(scales[1]) * fraction;
                let (h, w) = ((out[0] as f64 * scale).min(height), (out[1] as f64 * scale).min(width));
                let from = Rect { top: (height - h) / 2.0, left: (width - w) / 2.0, height: h, width: w };
                CropAndResize { crop: from, size: out, offset: [0, 0] }
            }
            ResizeMode::Pad => {
                let scale = scales[0].max(scales[1]);
                let to = [0, 1].map(|i| ((size[i] as f64 / scale).round() as usize).clamp(1, out[i]));
                let at = [0, 1].map(|i| ((out[i] - to[i]) / 2) as isize);
                CropAndResize { crop: whole, size: to, offset: at }
            }
        }
    }
}

/// A crop of random area and aspect ratio, resized to the sample, as in torchvision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomResizedCrop {
    /// Minimum and maximum fraction of the image's area.
    pub scale: [f64; 2],
    /// Minimum and maximum aspect ratio (width / height); drawn uniformly in its logarithm.
    pub ratio: [f64; 2],
}

/// Draws of a crop that does not fit into the image before the fallback.
const MAX_TRIES: usize = 10;

impl RandomResizedCrop {
    pub fn draw(&self, size: [usize; 2], draws: &mut CounterRng) -> Rect {
        for _ in 0..MAX_TRIES {
            if let Some(part) = random_rect(size, self.scale, self.ratio, draws) {
                return part;
            }
        }
        // Fallback: the largest centered crop with an allowed aspect ratio.
        let [height, width] = size.map(|n| n as f64);
        let ratio = (width / height).clamp(self.ratio[0], self.ratio[1]);
        let (h, w) = (height.min(width / ratio), width.min(height * ratio));
        Rect { top: (height - h) / 2.0, left: (width - w) / 2.0, height: h, width: w }
    }
}

/// A random rectangle of whole pixels within an image of `size`, with a fraction of the area and an aspect ratio from
/// the given ranges; `None` if the drawn one does not fit.
pub fn random_rect(
    size: [usize; 2],
    area_fraction: [f64; 2],
    ratio: [f64; 2],
    draws: &mut CounterRng,
) -> Option<Rect> {
    let area = (size[0] * size[1]) as f64 * uniform(draws, area_fraction);
    let ratio = uniform(draws, ratio.map(f64::ln)).exp();
    let width = (area * ratio).sqrt().round() as usize;
    let height = (area / ratio).sqrt().round() as usize;
    if !(1..=size[1]).contains(&width) || !(1..=size[0]).contains(&height) {
        return None;
    }
    let top = draws.below((size[0] - height + 1) as u64) as f64;
    let left = draws.below((size[1] - width + 1) as u64) as f64;
    Some(Rect { top, left, height: height as f64, width: width as f64 })
}

/// Overlap of the image and the sample along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// First pixel in the image.
    pub source_start: usize,
    /// First pixel in the sample.
    pub dest_start: usize,
    pub len: usize,
}

impl Overlap {
    /// Overlap of `len` pixels, placed at offset `at`, with a sample of `out` pixels.
    pub fn new(at: isize, len: usize, out: usize) -> Self {
        let from = (-at).max(0) as usize;
        let to = at.max(0) as usize;
        Self { source_start: from, dest_start: to, len: len.saturating_sub(from).min(out.saturating_sub(to)) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::RngKey;

    fn inside(part: Rect, size: [usize; 2]) -> bool {
        let within =
            |start: f64, len: f64, all: usize| start >= 0.0 && len > 0.0 && start + len <= all as f64 + 1e-9;
        within(part.top, part.height, size[0]) && within(part.left, part.width, size[1])
    }

    proptest! {
        #[test]
        fn the_crop_lies_in_the_image_and_the_result_in_the_sample(
            size in [1usize..500, 1usize..500], out in [1usize..300, 1usize..300], fraction in 0.1..1.0f64,
        ) {
            for fit in [ResizeMode::CenterCrop { fraction }, ResizeMode::Pad, ResizeMode::Stretch] {
                let placed = fit.crop_and_resize(size, out);
                prop_assert!(inside(placed.crop, size), "{fit:?} {placed:?}");
                let within = |i: usize| placed.offset[i] >= 0 && placed.offset[i] as usize + placed.size[i] <= out[i];
                prop_assert!(within(0) && within(1), "{fit:?} {placed:?}");
            }
            // A crop has the sample's aspect ratio; padding fills one side.
            let cropped = ResizeMode::CenterCrop { fraction }.crop_and_resize(size, out).crop;
            let shape = out[1] as f64 / out[0] as f64;
            prop_assert!((cropped.width / cropped.height / shape - 1.0).abs() < 1e-6);
            let padded = ResizeMode::Pad.crop_and_resize(size, out);
            prop_assert!((0..2).any(|i| padded.size[i] == out[i]));
        }

        #[test]
        fn a_resized_crop_has_the_area_and_the_shape_allowed(
            size in [8usize..400, 8usize..400], low in 0.05..0.9f64, key: u64,
        ) {
            let crop = RandomResizedCrop { scale: [low, 1.0], ratio: [0.75, 4.0 / 3.0] };
            let part = crop.draw(size, &mut RngKey::new(key, 0).rng());
            prop_assert!(inside(part, size), "{part:?}");
            // Rounding to whole pixels moves each side by up to half a pixel.
            let ratio = part.width / part.height;
            let slack = 1.0 / part.height.min(part.width) + 1e-9;
            prop_assert!(ratio > 0.75 * (1.0 - slack) && ratio < 4.0 / 3.0 * (1.0 + slack), "{part:?}");
            prop_assert_eq!(crop.draw(size, &mut RngKey::new(key, 0).rng()), part);
        }

        #[test]
        fn the_overlap_lies_in_both(at in -50isize..50, len in 1usize..40, out in 1usize..40) {
            let span = Overlap::new(at, len, out);
            let expected = (0..out as isize).filter(|x| (0..len as isize).contains(&(x - at))).count();
            prop_assert_eq!(span.len, expected);
            if span.len > 0 {
                prop_assert_eq!(span.dest_start as isize - span.source_start as isize, at);
            }
        }
    }

    #[test]
    fn a_crop_is_resize_of_the_shorter_side_then_the_centre() {
        // 375 x 500 resized to 256 on the shorter side is 256 x 341.3; its 224 x 224 center covers 328.125 source
        // pixels.
        let placed =
            ResizeMode::CenterCrop { fraction: 224.0 / 256.0 }.crop_and_resize([375, 500], [224, 224]);
        let side = 375.0 * 224.0 / 256.0;
        let expected =
            Rect { top: (375.0 - side) / 2.0, left: (500.0 - side) / 2.0, height: side, width: side };
        assert_eq!(placed.crop, expected);
    }

    #[test]
    fn a_shape_that_never_fits_gives_the_middle() {
        let crop = RandomResizedCrop { scale: [1.0, 1.0], ratio: [1.0, 1.0] };
        let part = crop.draw([100, 300], &mut RngKey::new(1, 1).rng());
        assert_eq!(part, Rect { top: 0.0, left: 100.0, height: 100.0, width: 100.0 });
    }
}
