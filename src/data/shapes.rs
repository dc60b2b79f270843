//! Generated images of ten shapes, so that a job can train without a download.
//!
//! An image is a function of the seed, the split and the index. Shapes vary in position, size, rotation, aspect ratio
//! and contrast, are surrounded by clutter and noise, and are light on dark as often as dark on light. No single pixel
//! is informative, so a linear model fails where a convolutional network does well.

use std::f32::consts::PI;

use super::split::DatasetSplit;
use super::transforms::{Augmentation, Image, Normalise, Pipeline, Pixels, ResizeMode, ScratchPool};
use super::{BatchRow, DataError, Dataset, Features, InputSpec, SampleKey, TargetSpec};
use crate::base::random::{CounterRng, RngKey, stream_id};

/// Class names by label.
pub const CLASS_NAMES: [&str; 10] =
    ["disc", "ring", "square", "frame", "triangle", "cross", "star", "crescent", "bars", "wave"];

/// Allowed side lengths in pixels. Smaller images cannot resolve the shapes; larger ones are a mistake.
const SIZES: std::ops::RangeInclusive<usize> = 16..=1024;

/// Images of (`image_size`, `image_size`, 1) with values of about 0 to 1. Classes alternate.
pub struct ShapesDataset {
    size: usize,
    samples: u64,
    key: RngKey,
    features: Features,
    /// Augmentation of the generated images.
    augmentation: Option<(Pipeline, ScratchPool)>,
}

impl ShapesDataset {
    pub fn new(image_size: usize, samples: u64, seed: u64, part: DatasetSplit) -> Result<Self, DataError> {
        if !SIZES.contains(&image_size) {
            let (name, value) = ("image_size", image_size.to_string());
            return Err(DataError::InvalidSetting { name, value, expected: "expected 16 to 1024 pixels" });
        }
        let stream = match part {
            DatasetSplit::Train => const { stream_id("shapes.train") },
            DatasetSplit::Valid => const { stream_id("shapes.valid") },
            DatasetSplit::Test => const { stream_id("shapes.test") },
        };
        let features = Features::new(
            InputSpec::Floats { shape: vec![image_size, image_size, 1] },
            TargetSpec::Class { names: CLASS_NAMES.map(str::to_owned).to_vec() },
        );
        Ok(ShapesDataset {
            size: image_size,
            samples,
            key: RngKey::new(seed, stream),
            features,
            augmentation: None,
        })
    }

    /// Adds augmentation, for `readers` concurrent reader threads.
    pub fn augmented(self, augment: Augmentation, readers: usize) -> Result<Self, DataError> {
        let shape = [self.size, self.size, 1];
        let pipeline = Pipeline::new(shape, ResizeMode::Stretch, Normalise::default())?.augmented(augment)?;
        if pipeline.is_normalize_only() {
            return Ok(self);
        }
        let drawn = 4 * (self.size * self.size) as u64;
        let pool = ScratchPool::new(readers, drawn + pipeline.scratch_bytes(self.size, self.size, 4));
        Ok(Self { augmentation: Some((pipeline, pool)), ..self })
    }
}

impl Dataset for ShapesDataset {
    fn len(&self) -> u64 {
        self.samples
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let class = index % CLASS_NAMES.len() as u64;
        into.target.as_u32_mut()[0] = class as u32;
        let size = self.size;
        let Some((pipeline, pool)) = &self.augmentation else {
            draw(class, size, self.key.fold_in(index), into.input.as_f32_mut());
            return Ok(());
        };
        let mut scratch = pool.acquire();
        let mut drawn = std::mem::take(&mut scratch.floats);
        drawn.resize(into.input.len(), 0.0);
        draw(class, size, self.key.fold_in(index), &mut drawn);
        let image = Image { height: size, width: size, pixels: Pixels::Floats(&drawn) };
        let applied = pipeline.apply(image, key, &mut scratch, &mut into.input);
        scratch.floats = drawn;
        applied.map_err(|value| DataError::InvalidSetting {
            name: "augment",
            value,
            expected: "the augmentation cannot be applied",
        })
    }

    fn resident_bytes(&self) -> u64 {
        self.augmentation.as_ref().map_or(0, |(_, pool)| pool.bytes())
    }
}

fn draw(class: u64, size: usize, key: RngKey, pixels: &mut [f32]) {
    let mut draws = key.rng();
    let side = size as f32;

    let contrast = draws.uniform(0.4, 0.9);
    let low = draws.uniform(0.0, 1.0 - contrast);
    let (ground, ink) = if draws.below(2) == 0 { (low, low + contrast) } else { (low + contrast, low) };
    pixels.fill(ground);

    for _ in 0..draws.below(4) {
        clutter(&mut draws, size, ground, contrast, pixels);
    }

    let radius = side * draws.uniform(0.26, 0.4);
    let reach = side / 2.0 - 1.05 * radius;
    let center = [0; 2].map(|_| side / 2.0 + draws.uniform(-reach, reach));
    let pose = Pose { center, radius, angle: draws.uniform(-0.45, 0.45), stretch: draws.uniform(0.87, 1.15) };
    let pen = draws.uniform(0.14, 0.22);
    let mut canvas = Canvas { size, ink, pixels };
    // The dimensions give all classes about the same area.
    match class {
        0 => canvas.fill_shape(pose, |x, y| norm(x, y) - 0.74),
        1 => canvas.fill_shape(pose, |x, y| (norm(x, y) - 0.76).abs() - pen),
        2 => canvas.fill_shape(pose, |x, y| x.abs().max(y.abs()) - 0.66),
        3 => canvas.fill_shape(pose, |x, y| (x.abs().max(y.abs()) - 0.64).abs() - pen),
        4 => canvas.fill_shape(pose, triangle),
        5 => canvas.fill_shape(pose, |x, y| {
            let (x, y) = (x.abs(), y.abs());
            (x.max(y) - 0.98).max(x.min(y) - pen - 0.06)
        }),
        6 => canvas.fill_shape(pose, star),
        7 => canvas.fill_shape(pose, |x, y| (norm(x, y) - 0.96).max(0.74 - norm(x - 0.54, y))),
        8 => canvas.fill_shape(pose, |x, y| {
            let y = y.abs();
            let from_bar = if y > 0.34 { (y - 0.68).abs() } else { y };
            (x.abs() - 0.9).max(from_bar - pen * 0.9)
        }),
        _ => canvas.fill_shape(pose, |x, y| {
            // The height above the curve, divided by the length of its gradient, approximates the distance.
            let (sin, cos) = (1.6 * PI * x).sin_cos();
            let from_curve = (y - 0.42 * sin).abs() / norm(0.42 * 1.6 * PI * cos, 1.0);
            (x.abs() - 1.0).max(from_curve - pen * 1.25)
        }),
    }
    noise(key, draws.uniform(0.03, 0.24), pixels);
}

/// `hypot` without its overflow handling, and several times as fast.
fn norm(x: f32, y: f32) -> f32 {
    (x * x + y * y).sqrt()
}

/// Signed distance to an equilateral triangle.
fn triangle(x: f32, y: f32) -> f32 {
    let slope = 3f32.sqrt() / 2.0;
    (slope * x.abs() + 0.5 * y).max(-y) - 0.55
}

/// Signed distance to a five-pointed star with a tip at (0, 1): folds the plane along the star's mirror axes until one
/// edge is left.
fn star(x: f32, y: f32) -> f32 {
    /// Directions of the mirror axes at 18 and 54 degrees: (cosine, sine).
    const MIRRORS: [(f32, f32); 2] = [(0.951_056_5, 0.309_017), (0.587_785_25, 0.809_017)];
    const TIP: f32 = 1.08;
    /// Distance of the inner corners from the center.
    const INNER: f32 = 0.5;
    let (mut x, mut y) = (x, y);
    for (cos, sin) in MIRRORS {
        x = x.abs();
        let beyond = (cos * y - sin * x).min(0.0);
        (x, y) = (x + 2.0 * beyond * sin, y - 2.0 * beyond * cos);
    }
    let edge = (INNER * MIRRORS[1].0, INNER * MIRRORS[1].1 - TIP);
    ((y - TIP) * edge.0 - x * edge.1) / edge.0.hypot(edge.1)
}

/// Placement of a shape of radius about 1 in the image; lengths in pixels.
#[derive(Clone, Copy)]
struct Pose {
    center: [f32; 2],
    radius: f32,
    angle: f32,
    /// Width divided by height.
    stretch: f32,
}

struct Canvas<'a> {
    size: usize,
    ink: f32,
    pixels: &'a mut [f32],
}

impl Canvas<'_> {
    /// Fills the inside of a shape given by its signed distance, with one pixel of antialiasing.
    #[inline]
    fn fill_shape(&mut self, pose: Pose, distance: impl Fn(f32, f32) -> f32) {
        let (sin, cos) = pose.angle.sin_cos();
        let (wide, high) = (pose.radius * pose.stretch.sqrt(), pose.radius / pose.stretch.sqrt());
        let (per_wide, per_high) = (1.0 / wide, 1.0 / high);
        let reach = 1.25 * wide.max(high) + 1.0;
        let span = |middle: f32| {
            ((middle - reach).max(0.0) as usize)..((middle + reach).max(0.0) as usize + 1).min(self.size)
        };
        for row in span(pose.center[1]) {
            for column in span(pose.center[0]) {
                let (x, y) = (column as f32 + 0.5 - pose.center[0], row as f32 + 0.5 - pose.center[1]);
                let (x, y) = ((cos * x + sin * y) * per_wide, (cos * y - sin * x) * per_high);
                let cover = (0.5 - pose.radius * distance(x, y)).clamp(0.0, 1.0);
                let pixel = &mut self.pixels[row * self.size + column];
                *pixel += cover * (self.ink - *pixel);
            }
        }
    }
}

/// Draws a short stroke that is lighter or darker than the background by at most 0.8 of the contrast.
fn clutter(draws: &mut CounterRng, size: usize, ground: f32, contrast: f32, pixels: &mut [f32]) {
    let side = size as f32;
    let center = [0; 2].map(|_| draws.uniform(0.0, side));
    let pose =
        Pose { center, radius: side * draws.uniform(0.07, 0.2), angle: draws.uniform(0.0, PI), stretch: 1.0 };
    let shade = (ground + contrast * draws.uniform(-0.8, 0.8)).clamp(0.0, 1.0);
    let pen = side * draws.uniform(0.018, 0.04) / pose.radius;
    Canvas { size, ink: shade, pixels }.fill_shape(pose, |x, y| (x.abs() - 1.0).max(y.abs() - pen));
}

/// Adds triangularly distributed noise within `amount`.
fn noise(key: RngKey, amount: f32, pixels: &mut [f32]) {
    // Two pixels per draw; each sums two 16-bit uniforms. The counters are far from those of all other draws.
    let scale = amount / 65536.0;
    for (i, pair) in pixels.chunks_mut(2).enumerate() {
        let mut bits = key.bits((1 << 32) + i as u64);
        for pixel in pair {
            let sum = (bits as u16) as u32 + ((bits >> 16) as u16) as u32;
            *pixel += scale * (sum as f32 - 65535.0);
            bits >>= 32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SliceMut;

    const KEY: SampleKey = SampleKey { seed: 0, epoch: 0, sample: 0 };

    fn image(set: &ShapesDataset, index: u64) -> (Vec<f32>, u32) {
        let (mut pixels, mut label) = (vec![f32::NAN; set.size * set.size], [99]);
        let mut row =
            BatchRow { input: SliceMut::F32(&mut pixels), target: SliceMut::U32(&mut label), length: 0 };
        set.read(index, KEY, &mut row).unwrap();
        (pixels, label[0])
    }

    #[test]
    fn an_image_depends_on_seed_split_and_index_only() {
        let set = |seed, part| ShapesDataset::new(28, 100, seed, part).unwrap();
        let first = image(&set(1, DatasetSplit::Train), 17);
        assert_eq!(first, image(&set(1, DatasetSplit::Train), 17));
        assert_eq!(first.1, 7);
        for other in [
            image(&set(2, DatasetSplit::Train), 17),
            image(&set(1, DatasetSplit::Valid), 17),
            image(&set(1, DatasetSplit::Train), 27),
        ] {
            assert_ne!(first.0, other.0);
        }
    }

    #[test]
    fn every_size_is_covered_with_values_near_the_unit_range() {
        for size in [16, 28, 33, 64] {
            let set = ShapesDataset::new(size, 300, 3, DatasetSplit::Train).unwrap();
            for index in 0..set.len() {
                let (pixels, _) = image(&set, index);
                assert!(pixels.iter().all(|v| (-0.25..1.25).contains(v)), "{size}: image {index}");
            }
        }
        assert!(ShapesDataset::new(8, 1, 0, DatasetSplit::Train).is_err());
    }

    /// What a linear model could use: how the per-pixel mean of a class differs from that of the others.
    #[test]
    fn no_pixel_and_no_brightness_gives_a_class_away() {
        let set = ShapesDataset::new(28, 20_000, 5, DatasetSplit::Train).unwrap();
        let (mut means, mut contrast) = (vec![[0.0; 784]; 10], [0.0; 10]);
        for index in 0..set.len() {
            let (pixels, label) = image(&set, index);
            let brightness = pixels.iter().sum::<f32>() / 784.0;
            for (mean, pixel) in means[label as usize].iter_mut().zip(&pixels) {
                *mean += pixel / 2000.0;
            }
            // How much of the image is not background, in units of contrast.
            contrast[label as usize] +=
                pixels.iter().map(|p| (p - brightness).abs()).sum::<f32>() / 784.0 / 2000.0;
        }
        // 0.04 is five standard deviations of the mean of 2,000 pixels that are uniform on the unit range.
        assert!(means.iter().flatten().all(|mean| (mean - 0.5).abs() < 0.04));
        let (least, most) =
            (contrast.iter().copied().reduce(f32::min), contrast.iter().copied().reduce(f32::max));
        assert!(most.unwrap() < 1.25 * least.unwrap(), "{contrast:?}");
    }
}
