//! A picture on its way to a sample: fitted to the declared size, augmented, normalised.
//!
//! [`Pipeline`] is the one way from pixels, of whatever source, to the values of a sample. It takes (height,
//! width, channels) bytes or floats of 0 to 1 and writes f32 in the same layout. What is drawn for a picture is
//! a function of its [`Key`] alone; a pipeline without augmentation, for what is measured on, draws nothing.
//! [`mix`] blends whole samples and lies above it.

mod colour;
mod erase;
mod geometry;
pub mod mix;
mod resample;
mod scratch;

pub use colour::Jitter;
pub use erase::Erasing;
pub use geometry::{Fit, ResizedCrop};
pub use scratch::{Lent, Pool, Scratch};

use super::{DataError, Key};
use crate::random::{Draws, Random, stream};
use geometry::Span;

/// Pixels as they were decoded or drawn.
#[derive(Clone, Copy, Debug)]
pub struct Picture<'a> {
    pub height: usize,
    pub width: usize,
    /// (height, width, channels)
    pub pixels: Pixels<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum Pixels<'a> {
    /// 0 to 255 stands for 0 to 1.
    Bytes(&'a [u8]),
    Floats(&'a [f32]),
}

/// `mean` is taken from every value of 0 to 1 and the rest divided by `std`; one number, or one a channel.
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

/// What is drawn anew for every sample of every epoch. All of it is off by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Augment {
    /// A part of the picture, drawn, in the place of the fitted picture.
    pub resized_crop: Option<ResizedCrop>,
    /// Pixels of black around the fitted picture, out of which its size is cut anywhere.
    pub padding: usize,
    /// Chances of a mirror image.
    pub horizontal_flip: f64,
    pub vertical_flip: f64,
    pub jitter: Jitter,
    pub erasing: Option<Erasing>,
}

/// How pictures become samples.
#[derive(Clone, Debug)]
pub struct Pipeline {
    height: usize,
    width: usize,
    channels: usize,
    fit: Fit,
    /// Of every channel.
    normalise: Normalise,
    /// The normalised value of each byte, a channel each.
    tables: Vec<[f32; 256]>,
    augment: Option<Augment>,
}

const CROP: u64 = stream("augment.crop");
const FLIP: u64 = stream("augment.flip");
const COLOUR: u64 = stream("augment.colour");
const ERASE: u64 = stream("augment.erase");

impl Pipeline {
    /// To samples of (`height`, `width`, `channels`) that are measured on: nothing is drawn.
    pub fn new(
        [height, width, channels]: [usize; 3],
        fit: Fit,
        normalise: Normalise,
    ) -> Result<Self, DataError> {
        let each = |name, values: Vec<f32>, fits: fn(f32) -> bool, wanted| match values.len() {
            _ if !values.iter().all(|v| v.is_finite() && fits(*v)) => {
                Err(DataError::Setting { name, value: format!("{values:?}"), wanted })
            }
            1 => Ok(vec![values[0]; channels]),
            n if n == channels => Ok(values),
            _ => Err(DataError::Setting {
                name,
                value: format!("{values:?}"),
                wanted: "it is one number, or one for each channel",
            }),
        };
        let mean = each("mean", normalise.mean, |_| true, "it must be finite")?;
        let std = each("std", normalise.std, |v| v > 0.0, "it must be positive and finite")?;
        let table = |c: usize| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean[c]) / std[c]);
        let tables = (0..channels).map(table).collect();
        Ok(Self { height, width, channels, fit, normalise: Normalise { mean, std }, tables, augment: None })
    }

    /// The same, for training.
    pub fn augmented(self, augment: Augment) -> Result<Self, DataError> {
        if self.channels == 1 && (augment.jitter.saturation > 0.0 || augment.jitter.hue > 0.0) {
            let (name, value) = ("saturation", "changed".into());
            return Err(DataError::Setting { name, value, wanted: "pictures of one channel have no colour" });
        }
        Ok(Self { augment: (augment != Augment::default()).then_some(augment), ..self })
    }

    /// (height, width, channels) of a sample.
    pub fn shape(&self) -> [usize; 3] {
        [self.height, self.width, self.channels]
    }

    /// Whether a picture that has a sample's size already is only normalised.
    pub fn is_plain(&self) -> bool {
        self.augment.is_none()
    }

    /// Bytes of scratch that a picture of this size, of `bytes` bytes a value, needs at most.
    pub fn scratch_bytes(&self, height: usize, width: usize, bytes: usize) -> u64 {
        resample::scratch_bytes([height, width], [self.height, self.width], self.channels * bytes)
    }

    /// Writes the sample that `picture` makes under `key` over `into`. An error says what cannot be done.
    pub fn apply(
        &self,
        picture: Picture<'_>,
        key: Key,
        scratch: &mut Scratch,
        into: &mut [f32],
    ) -> Result<(), String> {
        let size = [picture.height, picture.width];
        let out = [self.height, self.width];
        let Some(augment) = &self.augment else {
            let placed = self.fit.place(size, out);
            let picture = resample::cut(picture, placed.from, placed.to, self.channels, scratch)?;
            self.write(picture, placed.at, [false; 2], true, into);
            return Ok(());
        };

        let draws = |stream| -> Draws { Random::new(key.seed, stream).at(key.epoch).at(key.sample).draws() };
        let mut crop = draws(CROP);
        let mut placed = match &augment.resized_crop {
            Some(resized) => geometry::Placed { from: resized.draw(size, &mut crop), to: out, at: [0, 0] },
            None => self.fit.place(size, out),
        };
        if augment.padding > 0 {
            let mut shift = || crop.below(2 * augment.padding as u64 + 1) as isize - augment.padding as isize;
            placed.at = [placed.at[0] + shift(), placed.at[1] + shift()];
        }
        let mut flip = draws(FLIP);
        let flips = [augment.vertical_flip, augment.horizontal_flip].map(|chance| hit(&mut flip, chance));

        let picture = resample::cut(picture, placed.from, placed.to, self.channels, scratch)?;
        let coloured = augment.jitter != Jitter::default();
        self.write(picture, placed.at, flips, !coloured, into);
        if coloured {
            augment.jitter.apply(self.channels, &mut draws(COLOUR), into);
            self.normalise(into);
        }
        if let Some(erasing) = &augment.erasing
            && let Some([rows, columns]) = erasing.draw(out, &mut draws(ERASE))
        {
            for row in rows {
                let start = row * self.width;
                into[(start + columns.start) * self.channels..(start + columns.end) * self.channels]
                    .fill(0.0);
            }
        }
        Ok(())
    }

    /// Writes `picture` with its first pixel at row and column `at` of the sample, mirrored as a whole where
    /// `flips` (vertical, horizontal) say so, black around it.
    fn write(
        &self,
        picture: Picture<'_>,
        at: [isize; 2],
        flips: [bool; 2],
        normalised: bool,
        into: &mut [f32],
    ) {
        let Self { height, width, channels, .. } = *self;
        let rows = Span::shared(at[0], picture.height, height);
        let columns = Span::shared(at[1], picture.width, width);
        let one = |c: usize, value: f32| match normalised {
            true => (value - self.normalise.mean[c]) / self.normalise.std[c],
            false => value,
        };
        if rows.len < height || columns.len < width {
            for pixel in into.chunks_exact_mut(channels) {
                pixel.iter_mut().enumerate().for_each(|(c, value)| *value = one(c, 0.0));
            }
        }
        if rows.len == 0 || columns.len == 0 {
            return;
        }
        for i in 0..rows.len {
            let row = if flips[0] { height - 1 - (rows.to + i) } else { rows.to + i };
            let first = if flips[1] { width - columns.to - columns.len } else { columns.to };
            let to = &mut into[(row * width + first) * channels..][..columns.len * channels];
            let start = ((rows.from + i) * picture.width + columns.from) * channels;
            let from = start..start + columns.len * channels;
            match (picture.pixels, normalised) {
                (Pixels::Bytes(bytes), true) => {
                    spread(&bytes[from], to, channels, flips[1], |c, byte| self.tables[c][byte as usize])
                }
                (Pixels::Bytes(bytes), false) => {
                    spread(&bytes[from], to, channels, flips[1], |_, byte| byte as f32 / 255.0)
                }
                (Pixels::Floats(floats), _) => spread(&floats[from], to, channels, flips[1], one),
            }
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

/// Writes a row of pixels, mirrored or not, each value as `of` (its channel, itself).
#[inline(always)]
fn spread<T: Copy>(
    from: &[T],
    to: &mut [f32],
    channels: usize,
    mirrored: bool,
    of: impl Fn(usize, T) -> f32 + Copy,
) {
    #[inline(always)]
    fn each<'a, T: Copy + 'a, const C: usize>(
        from: impl Iterator<Item = &'a [T]>,
        to: &mut [f32],
        of: impl Fn(usize, T) -> f32,
    ) {
        for (to, from) in to.chunks_exact_mut(C).zip(from) {
            for c in 0..C {
                to[c] = of(c, from[c]);
            }
        }
    }
    // The number of channels as a constant keeps the bounds and the tables out of the loop.
    match (channels, mirrored) {
        (3, false) => each::<T, 3>(from.chunks_exact(3), to, of),
        (3, true) => each::<T, 3>(from.chunks_exact(3).rev(), to, of),
        (1, false) => each::<T, 1>(from.chunks_exact(1), to, of),
        (1, true) => each::<T, 1>(from.chunks_exact(1).rev(), to, of),
        _ => {
            let mut pixels = from.chunks_exact(channels);
            for to in to.chunks_exact_mut(channels) {
                let from = if mirrored { pixels.next_back() } else { pixels.next() };
                let values = from.into_iter().flatten();
                to.iter_mut().zip(values).enumerate().for_each(|(c, (to, from))| *to = of(c, *from));
            }
        }
    }
}

/// Whether something of this chance happens; certain from 1 on, never at 0.
fn hit(draws: &mut Draws, chance: f64) -> bool {
    (draws.between(0.0, 1.0) as f64) < chance
}

/// Uniform between the ends of a range, in f64.
fn between(draws: &mut Draws, [low, high]: [f64; 2]) -> f64 {
    low + (high - low) * draws.between(0.0, 1.0) as f64
}

#[cfg(test)]
mod tests;
