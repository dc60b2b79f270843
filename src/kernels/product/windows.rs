//! The windows of a convolution as operands of AMX: gathered, split and packed in one go, and its weight for
//! the way back.

use std::ops::Range;

use super::super::windows::Geometry;
use super::split::{Lines, Operand, Split, put};
use super::tiles::{DEPTH, SIDE, TILE};

/// A row for each output pixel of a batch: the cells of its window one after the other, each with all channels, of which
/// there is a multiple of [`DEPTH`].
pub(super) struct Windows<'a, E> {
    g: &'a Geometry,
    pictures: &'a [E],
    /// Pixels of the output of a picture, and in a line of it.
    pixels: usize,
    line: usize,
}

impl<'a, E: Split> Windows<'a, E> {
    pub(super) fn new(g: &'a Geometry, pictures: &'a [E]) -> Self {
        Self { g, pictures, pixels: g.pixels(), line: g.output().1 }
    }

    /// Output pixels of all pictures.
    pub(super) fn count(&self) -> usize {
        self.pictures.len() / (self.g.height * self.g.width * self.g.inputs) * self.pixels
    }

    /// The picture of an output pixel, and where in it its window begins.
    fn place(&self, pixel: usize) -> (usize, isize, isize) {
        let (picture, at) = (pixel / self.pixels, pixel % self.pixels);
        self.begin(picture, at / self.line, at % self.line)
    }

    fn begin(&self, picture: usize, y: usize, x: usize) -> (usize, isize, isize) {
        let begin = |i: usize| (i * self.g.stride) as isize - self.g.padding as isize;
        (picture, begin(y), begin(x))
    }

    /// The channels of a cell of a window; none outside of the picture.
    fn cell(&self, (picture, y, x): (usize, isize, isize), cell: usize) -> Option<&[E]> {
        let g = self.g;
        let along = |from: isize, i: usize, size: usize| {
            let at = from + (i * g.dilation) as isize;
            (0..size as isize).contains(&at).then_some(at as usize)
        };
        let (y, x) = (along(y, cell / g.kernel, g.height)?, along(x, cell % g.kernel, g.width)?);
        Some(&self.pictures[((picture * g.height + y) * g.width + x) * g.inputs..][..g.inputs])
    }
}

impl<E: Split> Operand for Windows<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(!columns, "windows are rows");
        let rows = self.count().saturating_sub(first).min(SIDE);
        let mut places = [(0, 0, 0); SIDE];
        (0..rows).for_each(|i| places[i] = self.place(first + i));
        let mut cells = [None; SIDE];
        for (step, p) in inner.clone().step_by(DEPTH).enumerate() {
            let (cell, channel) = (p / self.g.inputs, p % self.g.inputs);
            if channel == 0 || step == 0 {
                (0..rows).for_each(|i| cells[i] = self.cell(places[i], cell));
            }
            for (i, cell) in cells.iter().enumerate() {
                // Outside of the image there is nothing.
                let (values, count) = cell.map_or((&[][..], 0), |cell| (&cell[channel..][..DEPTH], DEPTH));
                // SAFETY: there are as many values, and a tile has 16 rows of 64 bytes.
                unsafe { put::<E>(E::dense(values.as_ptr(), count), to.add(step * E::PARTS * TILE + i * 64)) }
            }
        }
    }
}

/// A line for each value of a window, of what all output pixels see there.
pub(super) struct Turned<'a, E>(pub(super) Windows<'a, E>);

impl<E: Split> Operand for Turned<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(columns, "values of windows are columns");
        let windows = &self.0;
        let (cell, channel) = (first / windows.g.inputs, first % windows.g.inputs);
        // Where in its picture the next pixel is.
        let (mut picture, at) = (inner.start / windows.pixels, inner.start % windows.pixels);
        let (mut y, mut x) = (at / windows.line, at % windows.line);
        for (step, p) in inner.clone().step_by(DEPTH).enumerate() {
            // Outside of the image, and beyond the last pixel, there is nothing.
            let mut seen = [(std::ptr::null(), 0); DEPTH];
            for seen in &mut seen[..(inner.end - p).min(DEPTH)] {
                if let Some(values) = windows.cell(windows.begin(picture, y, x), cell) {
                    *seen = (values[channel..][..SIDE].as_ptr(), !0);
                }
                x += 1;
                if x == windows.line {
                    (x, y) = (0, y + 1);
                }
                if y * windows.line == windows.pixels {
                    (y, picture) = (0, picture + 1);
                }
            }
            for i in 0..SIDE {
                let low = i * E::PAIR.0;
                // SAFETY: there are as many values, and a tile has 16 rows of 64 bytes.
                unsafe {
                    let pairs = E::across(seen[low], seen[low + E::PAIR.1]);
                    put::<E>(pairs, to.add(step * E::PARTS * TILE + i * 64));
                }
            }
        }
    }
}

/// The weight of a convolution, (depth, cells, count), for the way back: a column for each of its inputs, of the outputs
/// that the cells of a window see, the last cell first.
pub(super) struct Flipped<'a, E> {
    pub(super) weight: &'a [E],
    pub(super) count: usize,
    pub(super) cells: usize,
    /// A multiple of [`DEPTH`].
    pub(super) depth: usize,
}

impl<E: Split> Operand for Flipped<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        for (step, p) in inner.step_by(DEPTH).enumerate() {
            let (cell, from) = (p / self.depth, p % self.depth);
            let data = self.weight[(self.cells - 1 - cell) * self.count..].as_ptr();
            let lines = Lines { data, count: self.count, line: 1, inner: self.cells * self.count };
            // SAFETY: the same promises, and the last value of a cell's last output is the weight's at most.
            unsafe { lines.pack(first, from..from + DEPTH, columns, to.add(step * E::PARTS * TILE)) }
        }
    }
}
