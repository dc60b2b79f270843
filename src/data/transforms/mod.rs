//! Image preprocessing: resize to the declared size, augment, normalize.
//!
//! [`Pipeline`] is the only path from pixels, of any source, to the values of a sample. It takes (height, width,
//! channels) bytes, or floats of 0 to 1, and writes f32 in the same layout. If it only moves and resizes pixels, it can
//! write the bytes themselves instead ([`Pipeline::palette`]), a quarter of the memory. Random choices for an image are
//! a function of its [`SampleKey`] alone; a pipeline without augmentation, as for validation, makes none. [`mix`]
//! blends whole samples on top of it.

mod affine;
mod augmentation;
mod blur;
mod colour;
mod enhance;
mod erase;
mod geometry;
pub mod mix;
mod randaugment;
mod resample;
mod scratch;

pub use affine::RandomAffine;
pub use augmentation::Augmentation;
pub use blur::RandomBlur;
pub use colour::ColorJitter;
pub use erase::RandomErasing;
pub use geometry::{RandomResizedCrop, ResizeMode};
pub use randaugment::RandAugment;
pub use resample::scratch_bytes;
pub use scratch::{LargeImages, LargestImage, Scratch, ScratchGuard, ScratchPool};

use std::sync::Arc;

use super::{DataError, PixelLut, SampleKey, SliceMut};
use crate::base::random::{CounterRng, RngKey, stream_id};
use geometry::Overlap;

/// Decoded or generated pixels.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    pub height: usize,
    pub width: usize,
    /// (height, width, channels)
    pub pixels: Pixels<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum Pixels<'a> {
    /// 0 to 255 maps to 0 to 1.
    Bytes(&'a [u8]),
    Floats(&'a [f32]),
}

/// Normalizes values of 0 to 1 to (x - `mean`) / `std`; one number, or one per channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalise {
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
}

impl Default for Normalise {
    fn default() -> Self {
        Self { mean: vec![0.0], std: vec![1.0] }
    }
}

/// Turns images into samples.
#[derive(Clone, Debug)]
pub struct Pipeline {
    height: usize,
    width: usize,
    channels: usize,
    resize_mode: ResizeMode,
    /// One value per channel.
    normalise: Normalise,
    /// Normalized value of each byte.
    palette: Arc<PixelLut>,
    augmentation: Option<Augmentation>,
}

const CROP: u64 = stream_id("augment.crop");
const FLIP: u64 = stream_id("augment.flip");
const COLOUR: u64 = stream_id("augment.colour");
const ERASE: u64 = stream_id("augment.erase");

impl Pipeline {
    /// A pipeline to samples of (`height`, `width`, `channels`) without augmentation, as for validation.
    pub fn new(
        [height, width, channels]: [usize; 3],
        resize_mode: ResizeMode,
        normalise: Normalise,
    ) -> Result<Self, DataError> {
        let each = |name, values: Vec<f32>, fits: fn(f32) -> bool, expected| match values.len() {
            _ if !values.iter().all(|v| v.is_finite() && fits(*v)) => {
                Err(DataError::InvalidSetting { name, value: format!("{values:?}"), expected })
            }
            1 => Ok(vec![values[0]; channels]),
            n if n == channels => Ok(values),
            _ => Err(DataError::InvalidSetting {
                name,
                value: format!("{values:?}"),
                expected: "expected one number, or one per channel",
            }),
        };
        let mean = each("mean", normalise.mean, |_| true, "expected a finite number")?;
        let std = each("std", normalise.std, |v| v > 0.0, "expected a finite number above 0")?;
        let table = |c: usize| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean[c]) / std[c]);
        let palette = Arc::new(PixelLut { tables: (0..channels).map(table).collect() });
        Ok(Self {
            height,
            width,
            channels,
            resize_mode,
            normalise: Normalise { mean, std },
            palette,
            augmentation: None,
        })
    }

    /// Adds augmentation, for training.
    pub fn augmented(self, augmentation: Augmentation) -> Result<Self, DataError> {
        if self.channels == 1 && (augmentation.jitter.saturation > 0.0 || augmentation.jitter.hue > 0.0) {
            let (name, value) = ("saturation", "changed".into());
            return Err(DataError::InvalidSetting {
                name,
                value,
                expected: "images of one channel have no color",
            });
        }
        if ![1, 3].contains(&self.channels) && augmentation.randaugment.is_some() {
            return Err(DataError::InvalidSetting {
                name: "augment.randaugment",
                value: format!("used for {} channels", self.channels),
                expected: "it needs images of one or three channels",
            });
        }
        Ok(Self { augmentation: (augmentation != Augmentation::default()).then_some(augmentation), ..self })
    }

    /// (height, width, channels) of a sample.
    pub fn shape(&self) -> [usize; 3] {
        [self.height, self.width, self.channels]
    }

    /// Lookup table from bytes to values, if byte images can stay bytes: the pipeline moves and resizes pixels but does
    /// not change their values afterwards, and there are at most 4 channels.
    pub fn palette(&self) -> Option<Arc<PixelLut>> {
        let moves = |a: &Augmentation| a.jitter == ColorJitter::default() && a.erasing.is_none();
        let stays = self.channels <= 4 && self.augmentation.as_ref().is_none_or(moves);
        stays.then(|| self.palette.clone())
    }

    /// Whether an image of the sample's size is only normalized.
    pub fn is_normalize_only(&self) -> bool {
        self.augmentation.is_none()
    }

    /// Upper bound on the scratch bytes for an image of this size with `bytes` bytes per value.
    pub fn scratch_bytes(&self, height: usize, width: usize, bytes: usize) -> u64 {
        resample::scratch_bytes([height, width], [self.height, self.width], self.channels * bytes)
            + self.augment_bytes()
    }

    /// Scratch bytes of the augmentations that work on a sample of bytes.
    pub fn augment_bytes(&self) -> u64 {
        let Some(augment) = self.augmentation.as_ref().filter(|a| a.changes_bytes()) else { return 0 };
        let values = self.height * self.width * self.channels;
        let spare = if augment.resamples() { values } else { 0 };
        let blurred = if augment.blur.is_some() { 4 * (values + self.width * self.channels) } else { 0 };
        (values + spare + blurred) as u64
    }

    /// Writes the sample for `image` under `key` to `into`: f32 values, or bytes if there is a [lookup
    /// table](Self::palette) and the image has bytes. An error states what cannot be done.
    pub fn apply(
        &self,
        image: Image<'_>,
        key: SampleKey,
        scratch: &mut Scratch,
        into: &mut SliceMut<'_>,
    ) -> Result<(), String> {
        let size = [image.height, image.width];
        let out = [self.height, self.width];
        let draws = |stream| -> CounterRng {
            RngKey::new(key.seed, stream).fold_in(key.epoch).fold_in(key.sample).rng()
        };
        let (mut crop_resize, mut flips) = (self.resize_mode.crop_and_resize(size, out), [false; 2]);
        let augmentation = self.augmentation_of(key);
        if let Some(augment) = augmentation {
            let mut crop = draws(CROP);
            if let Some(resized) = &augment.resized_crop {
                crop_resize = geometry::CropAndResize {
                    crop: resized.draw(size, &mut crop),
                    size: out,
                    offset: [0, 0],
                };
            }
            if augment.padding > 0 {
                let most = augment.padding as isize;
                let mut shift = || crop.below(2 * augment.padding as u64 + 1) as isize - most;
                crop_resize.offset = [crop_resize.offset[0] + shift(), crop_resize.offset[1] + shift()];
            }
            let mut flip = draws(FLIP);
            flips =
                [augment.vertical_flip, augment.horizontal_flip].map(|chance| bernoulli(&mut flip, chance));
        }
        let mut buffers = std::mem::take(&mut scratch.augment);
        let image =
            resample::crop_and_resize(image, crop_resize.crop, crop_resize.size, self.channels, scratch)?;
        let placement =
            PixelPlacement { size: [image.height, image.width], offset: crop_resize.offset, flips };
        match augmentation.filter(|augment| augment.changes_bytes()) {
            None => self.write(image.pixels, placement, augmentation, draws, into),
            Some(augment) => {
                buffers.image.resize(self.height * self.width * self.channels, 0);
                self.write_bytes(image.pixels, placement, &mut buffers.image);
                augment.augment_bytes(self.shape(), draws, &mut buffers);
                let whole = PixelPlacement { size: out, offset: [0; 2], flips: [false; 2] };
                self.write(Pixels::Bytes(&buffers.image), whole, augmentation, draws, into);
            }
        }
        scratch.augment = buffers;
        Ok(())
    }

    /// The augmentation of the sample `key`.
    fn augmentation_of(&self, key: SampleKey) -> Option<&Augmentation> {
        self.augmentation.as_ref().filter(|augment| !(augment.plain_first_view && key.epoch == 0))
    }

    /// Writes an image of which only values change from here on.
    fn write(
        &self,
        pixels: Pixels<'_>,
        placement: PixelPlacement,
        augmentation: Option<&Augmentation>,
        draws: impl Fn(u64) -> CounterRng,
        into: &mut SliceMut<'_>,
    ) {
        match into {
            SliceMut::U8(into) => self.write_bytes(pixels, placement, into),
            into => {
                let into = into.as_f32_mut();
                let coloured = augmentation.is_some_and(|augment| augment.jitter != ColorJitter::default());
                self.write_floats(pixels, placement, coloured, into);
                if let Some(augment) = augmentation {
                    self.augment_values(augment, draws, into);
                }
            }
        }
    }

    /// Writes an image as bytes; floats of 0 to 1 are rounded.
    fn write_bytes(&self, pixels: Pixels<'_>, placement: PixelPlacement, into: &mut [u8]) {
        match pixels {
            Pixels::Bytes(bytes) => {
                let mirror = self.row_mapper(|_, byte| byte);
                let line = |from: &[u8], to: &mut [u8], mirrored| match mirrored {
                    true => mirror(from, to, mirrored),
                    false => to.copy_from_slice(from),
                };
                self.blit(bytes, placement, into, |_| 0, line)
            }
            Pixels::Floats(floats) => {
                let line = self.row_mapper(|_, value: f32| (value * 255.0 + 0.5) as u8);
                self.blit(floats, placement, into, |_| 0, line)
            }
        }
    }

    /// Writes the values of an image, normalized unless color jitter still follows (`coloured`).
    fn write_floats(&self, pixels: Pixels<'_>, moved: PixelPlacement, coloured: bool, into: &mut [f32]) {
        let one = |c: usize, value: f32| (value - self.normalise.mean[c]) / self.normalise.std[c];
        let tables = &self.palette.tables;
        match (pixels, coloured) {
            (Pixels::Bytes(bytes), false) => {
                let line = self.row_mapper(|c, byte: u8| tables[c][byte as usize]);
                self.blit(bytes, moved, into, |c| one(c, 0.0), line)
            }
            (Pixels::Bytes(bytes), true) => {
                self.blit(bytes, moved, into, |_| 0.0, self.row_mapper(|_, byte: u8| byte as f32 / 255.0))
            }
            (Pixels::Floats(floats), false) => {
                self.blit(floats, moved, into, |c| one(c, 0.0), self.row_mapper(one))
            }
            (Pixels::Floats(floats), true) => {
                self.blit(floats, moved, into, |_| 0.0, self.row_mapper(|_, value| value))
            }
        }
    }

    /// Augments the values in place: color jitter and erasing.
    fn augment_values(&self, augment: &Augmentation, draws: impl Fn(u64) -> CounterRng, into: &mut [f32]) {
        if augment.jitter != ColorJitter::default() {
            augment.jitter.apply(self.channels, &mut draws(COLOUR), into);
            self.normalise(into);
        }
        if let Some(erasing) = &augment.erasing
            && let Some([rows, columns]) = erasing.draw([self.height, self.width], &mut draws(ERASE))
        {
            for row in rows {
                let start = row * self.width;
                into[(start + columns.start) * self.channels..(start + columns.end) * self.channels]
                    .fill(0.0);
            }
        }
    }

    /// Returns a function that writes a row of pixels, mirrored or not, as `map_value(channel, value)`.
    fn row_mapper<T: Copy, U>(
        &self,
        map_value: impl Fn(usize, T) -> U + Copy,
    ) -> impl Fn(&[T], &mut [U], bool) {
        let channels = self.channels;
        move |from, to, mirrored| map_row(from, to, channels, mirrored, map_value)
    }

    /// Copies an image to its place in the sample, row by row (mirrored or not) with `write_row`, and fills the rest
    /// with `black(channel)`.
    fn blit<T, U>(
        &self,
        from: &[T],
        moved: PixelPlacement,
        into: &mut [U],
        black: impl Fn(usize) -> U,
        write_row: impl Fn(&[T], &mut [U], bool),
    ) {
        let Self { height, width, channels, .. } = *self;
        let PixelPlacement { size, offset: at, flips } = moved;
        let rows = Overlap::new(at[0], size[0], height);
        let columns = Overlap::new(at[1], size[1], width);
        if rows.len < height || columns.len < width {
            for pixel in into.chunks_exact_mut(channels) {
                pixel.iter_mut().enumerate().for_each(|(c, value)| *value = black(c));
            }
        }
        if rows.len == 0 || columns.len == 0 {
            return;
        }
        for i in 0..rows.len {
            let row = if flips[0] { height - 1 - (rows.dest_start + i) } else { rows.dest_start + i };
            let first = if flips[1] { width - columns.dest_start - columns.len } else { columns.dest_start };
            let to = &mut into[(row * width + first) * channels..][..columns.len * channels];
            let start = ((rows.source_start + i) * size[1] + columns.source_start) * channels;
            write_row(&from[start..start + columns.len * channels], to, flips[1]);
        }
    }

    fn normalise(&self, into: &mut [f32]) {
        for pixel in into.chunks_exact_mut(self.channels) {
            for (c, value) in pixel.iter_mut().enumerate() {
                *value = (*value - self.normalise.mean[c]) / self.normalise.std[c];
            }
        }
    }
}

/// Where an image of (height, width) `size` goes: its first pixel to row and column `offset` of the sample, which is
/// then mirrored along the axes in `flips` (vertical, horizontal).
#[derive(Clone, Copy)]
struct PixelPlacement {
    size: [usize; 2],
    offset: [isize; 2],
    flips: [bool; 2],
}

/// Writes a row of pixels, mirrored or not, as `map_value(channel, value)`.
#[inline(always)]
fn map_row<T: Copy, U>(
    from: &[T],
    to: &mut [U],
    channels: usize,
    mirrored: bool,
    map_value: impl Fn(usize, T) -> U + Copy,
) {
    #[inline(always)]
    fn map_pixels<'a, T: Copy + 'a, U, const C: usize>(
        from: impl Iterator<Item = &'a [T]>,
        to: &mut [U],
        map_value: impl Fn(usize, T) -> U,
    ) {
        for (to, from) in to.chunks_exact_mut(C).zip(from) {
            for c in 0..C {
                to[c] = map_value(c, from[c]);
            }
        }
    }
    // A constant channel count lets the compiler hoist bounds checks and table lookups out of the loop.
    match (channels, mirrored) {
        (3, false) => map_pixels::<T, U, 3>(from.chunks_exact(3), to, map_value),
        (3, true) => map_pixels::<T, U, 3>(from.chunks_exact(3).rev(), to, map_value),
        (1, false) => map_pixels::<T, U, 1>(from.chunks_exact(1), to, map_value),
        (1, true) => map_pixels::<T, U, 1>(from.chunks_exact(1).rev(), to, map_value),
        _ => {
            let mut pixels = from.chunks_exact(channels);
            for to in to.chunks_exact_mut(channels) {
                let from = if mirrored { pixels.next_back() } else { pixels.next() };
                let values = from.into_iter().flatten();
                to.iter_mut().zip(values).enumerate().for_each(|(c, (to, from))| *to = map_value(c, *from));
            }
        }
    }
}

/// True with this probability; always from 1 on, never at 0.
fn bernoulli(draws: &mut CounterRng, probability: f64) -> bool {
    (draws.uniform(0.0, 1.0) as f64) < probability
}

/// Uniform in the given range, in f64.
fn uniform(draws: &mut CounterRng, [low, high]: [f64; 2]) -> f64 {
    low + (high - low) * draws.uniform(0.0, 1.0) as f64
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod torchvision_tests;
