//! A picture on its way to a sample: fitted to the declared size, augmented, normalised.
//!
//! [`Pipeline`] is the one way from pixels, of whatever source, to the values of a sample. It takes (height,
//! width, channels) bytes or floats of 0 to 1 and writes f32 in the same layout, or the bytes themselves where all it
//! does is to move them ([`Pipeline::palette`]). What is drawn for a picture is
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
pub use resample::scratch_bytes;
pub use scratch::{Large, Largest, Lent, Pool, Scratch};

use std::sync::Arc;

use super::{DataError, Key, Palette, Slice};
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
    /// The normalised values of bytes.
    palette: Arc<Palette>,
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
        let palette = Arc::new(Palette { tables: (0..channels).map(table).collect() });
        Ok(Self { height, width, channels, fit, normalise: Normalise { mean, std }, palette, augment: None })
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

    /// What bytes stand for, where a picture of bytes can stay bytes: its pixels are moved and resized, their values
    /// not changed after that, and it has no more channels than colours and opacity.
    pub fn palette(&self) -> Option<Arc<Palette>> {
        let moves = |a: &Augment| a.jitter == Jitter::default() && a.erasing.is_none();
        let stays = self.channels <= 4 && self.augment.as_ref().is_none_or(moves);
        stays.then(|| self.palette.clone())
    }

    /// Whether a picture that has a sample's size already is only normalised.
    pub fn is_plain(&self) -> bool {
        self.augment.is_none()
    }

    /// Bytes of scratch that a picture of this size, of `bytes` bytes a value, needs at most.
    pub fn scratch_bytes(&self, height: usize, width: usize, bytes: usize) -> u64 {
        resample::scratch_bytes([height, width], [self.height, self.width], self.channels * bytes)
    }

    /// Writes the sample that `picture` makes under `key` over `into`: f32 values, or bytes where there is a
    /// [palette](Self::palette) and the picture has bytes. An error says what cannot be done.
    pub fn apply(
        &self,
        picture: Picture<'_>,
        key: Key,
        scratch: &mut Scratch,
        into: &mut Slice<'_>,
    ) -> Result<(), String> {
        let size = [picture.height, picture.width];
        let out = [self.height, self.width];
        let draws = |stream| -> Draws { Random::new(key.seed, stream).at(key.epoch).at(key.sample).draws() };
        let (mut placed, mut flips) = (self.fit.place(size, out), [false; 2]);
        if let Some(augment) = &self.augment {
            let mut crop = draws(CROP);
            if let Some(resized) = &augment.resized_crop {
                placed = geometry::Placed { from: resized.draw(size, &mut crop), to: out, at: [0, 0] };
            }
            if augment.padding > 0 {
                let most = augment.padding as isize;
                let mut shift = || crop.below(2 * augment.padding as u64 + 1) as isize - most;
                placed.at = [placed.at[0] + shift(), placed.at[1] + shift()];
            }
            let mut flip = draws(FLIP);
            flips = [augment.vertical_flip, augment.horizontal_flip].map(|chance| hit(&mut flip, chance));
        }
        let picture = resample::cut(picture, placed.from, placed.to, self.channels, scratch)?;
        let moved = Moved { size: [picture.height, picture.width], at: placed.at, flips };
        match (picture.pixels, into) {
            (Pixels::Bytes(bytes), Slice::U8(into)) => {
                let mirror = self.each(|_, byte| byte);
                let line = |from: &[u8], to: &mut [u8], mirrored| match mirrored {
                    true => mirror(from, to, mirrored),
                    false => to.copy_from_slice(from),
                };
                self.write(bytes, moved, into, |_| 0, line)
            }
            (pixels, into) => {
                let into = into.f32();
                self.write_floats(pixels, moved, into);
                if let Some(augment) = &self.augment {
                    self.colour(augment, draws, into);
                }
            }
        }
        Ok(())
    }

    /// Writes the values of a picture, normalised unless they are still to be coloured.
    fn write_floats(&self, pixels: Pixels<'_>, moved: Moved, into: &mut [f32]) {
        let coloured = self.augment.as_ref().is_some_and(|augment| augment.jitter != Jitter::default());
        let one = |c: usize, value: f32| (value - self.normalise.mean[c]) / self.normalise.std[c];
        let tables = &self.palette.tables;
        match (pixels, coloured) {
            (Pixels::Bytes(bytes), false) => {
                let line = self.each(|c, byte: u8| tables[c][byte as usize]);
                self.write(bytes, moved, into, |c| one(c, 0.0), line)
            }
            (Pixels::Bytes(bytes), true) => {
                self.write(bytes, moved, into, |_| 0.0, self.each(|_, byte: u8| byte as f32 / 255.0))
            }
            (Pixels::Floats(floats), false) => {
                self.write(floats, moved, into, |c| one(c, 0.0), self.each(one))
            }
            (Pixels::Floats(floats), true) => {
                self.write(floats, moved, into, |_| 0.0, self.each(|_, value| value))
            }
        }
    }

    /// What is drawn for values in their places.
    fn colour(&self, augment: &Augment, draws: impl Fn(u64) -> Draws, into: &mut [f32]) {
        if augment.jitter != Jitter::default() {
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

    /// Writes a row of pixels, mirrored or not, each value as `of` (its channel, itself).
    fn each<T: Copy, U>(&self, of: impl Fn(usize, T) -> U + Copy) -> impl Fn(&[T], &mut [U], bool) {
        let channels = self.channels;
        move |from, to, mirrored| spread(from, to, channels, mirrored, of)
    }

    /// Writes a picture to its place in the sample, row by row (mirrored or not) with `line`, and `black` (of a
    /// channel) around it.
    fn write<T, U>(
        &self,
        from: &[T],
        moved: Moved,
        into: &mut [U],
        black: impl Fn(usize) -> U,
        line: impl Fn(&[T], &mut [U], bool),
    ) {
        let Self { height, width, channels, .. } = *self;
        let Moved { size, at, flips } = moved;
        let rows = Span::shared(at[0], size[0], height);
        let columns = Span::shared(at[1], size[1], width);
        if rows.len < height || columns.len < width {
            for pixel in into.chunks_exact_mut(channels) {
                pixel.iter_mut().enumerate().for_each(|(c, value)| *value = black(c));
            }
        }
        if rows.len == 0 || columns.len == 0 {
            return;
        }
        for i in 0..rows.len {
            let row = if flips[0] { height - 1 - (rows.to + i) } else { rows.to + i };
            let first = if flips[1] { width - columns.to - columns.len } else { columns.to };
            let to = &mut into[(row * width + first) * channels..][..columns.len * channels];
            let start = ((rows.from + i) * size[1] + columns.from) * channels;
            line(&from[start..start + columns.len * channels], to, flips[1]);
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

/// Where a picture of (height, width) `size` goes: its first pixel to row and column `at` of the sample, which is then
/// mirrored where `flips` (vertical, horizontal) say so.
#[derive(Clone, Copy)]
struct Moved {
    size: [usize; 2],
    at: [isize; 2],
    flips: [bool; 2],
}

/// Writes a row of pixels, mirrored or not, each value as `of` (its channel, itself).
#[inline(always)]
fn spread<T: Copy, U>(
    from: &[T],
    to: &mut [U],
    channels: usize,
    mirrored: bool,
    of: impl Fn(usize, T) -> U + Copy,
) {
    #[inline(always)]
    fn each<'a, T: Copy + 'a, U, const C: usize>(
        from: impl Iterator<Item = &'a [T]>,
        to: &mut [U],
        of: impl Fn(usize, T) -> U,
    ) {
        for (to, from) in to.chunks_exact_mut(C).zip(from) {
            for c in 0..C {
                to[c] = of(c, from[c]);
            }
        }
    }
    // The number of channels as a constant keeps the bounds and the tables out of the loop.
    match (channels, mirrored) {
        (3, false) => each::<T, U, 3>(from.chunks_exact(3), to, of),
        (3, true) => each::<T, U, 3>(from.chunks_exact(3).rev(), to, of),
        (1, false) => each::<T, U, 1>(from.chunks_exact(1), to, of),
        (1, true) => each::<T, U, 1>(from.chunks_exact(1).rev(), to, of),
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
