//! The windows of a convolution as operands of AMX: gathered, split and packed in one go, and its weight for
//! the way back.

use std::ops::Range;

use super::super::im2col::ConvGeometry;
use super::amx_tiles::{TILE_BYTES, TILE_DIM, TILE_K};
use super::bf16_split::{AmxElem, Operand, StridedOperand, store_tile_row};

/// A row for each output pixel of a batch: the cells of its window one after the other, each with all channels, of which
/// there is a multiple of [`DEPTH`].
pub(super) struct PatchRows<'a, E> {
    g: &'a ConvGeometry,
    images: &'a [E],
    /// Pixels of the output of a picture, and in a line of it.
    pixels: usize,
    output_width: usize,
}

impl<'a, E: AmxElem> PatchRows<'a, E> {
    pub(super) fn new(g: &'a ConvGeometry, images: &'a [E]) -> Self {
        Self { g, images, pixels: g.output_pixels(), output_width: g.output().1 }
    }

    /// Output pixels of all pictures.
    pub(super) fn count(&self) -> usize {
        self.images.len() / (self.g.height * self.g.width * self.g.in_channels) * self.pixels
    }

    /// The picture of an output pixel, and where in it its window begins.
    fn patch_origin(&self, pixel: usize) -> (usize, isize, isize) {
        let (image, at) = (pixel / self.pixels, pixel % self.pixels);
        self.origin(image, at / self.output_width, at % self.output_width)
    }

    fn origin(&self, image: usize, y: usize, x: usize) -> (usize, isize, isize) {
        let start = |i: usize| (i * self.g.stride) as isize - self.g.padding as isize;
        (image, start(y), start(x))
    }

    /// The channels of a cell of a window; none outside of the picture.
    fn tap_channels(&self, (image, y, x): (usize, isize, isize), cell: usize) -> Option<&[E]> {
        let g = self.g;
        let input_index = |from: isize, i: usize, size: usize| {
            let at = from + (i * g.dilation) as isize;
            (0..size as isize).contains(&at).then_some(at as usize)
        };
        let (y, x) = (input_index(y, cell / g.kernel, g.height)?, input_index(x, cell % g.kernel, g.width)?);
        Some(&self.images[((image * g.height + y) * g.width + x) * g.in_channels..][..g.in_channels])
    }
}

impl<E: AmxElem> Operand for PatchRows<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(!columns, "windows are rows");
        let rows = self.count().saturating_sub(first).min(TILE_DIM);
        let mut origins = [(0, 0, 0); TILE_DIM];
        (0..rows).for_each(|i| origins[i] = self.patch_origin(first + i));
        let mut taps = [None; TILE_DIM];
        for (step, p) in inner.clone().step_by(TILE_K).enumerate() {
            let (tap, channel) = (p / self.g.in_channels, p % self.g.in_channels);
            if channel == 0 || step == 0 {
                (0..rows).for_each(|i| taps[i] = self.tap_channels(origins[i], tap));
            }
            for (i, cell) in taps.iter().enumerate() {
                // Outside of the image there is nothing.
                let (values, count) = cell.map_or((&[][..], 0), |cell| (&cell[channel..][..TILE_K], TILE_K));
                // SAFETY: there are as many values, and a tile has 16 rows of 64 bytes.
                unsafe {
                    store_tile_row::<E>(
                        E::pack_contiguous(values.as_ptr(), count),
                        to.add(step * E::PARTS * TILE_BYTES + i * 64),
                    )
                }
            }
        }
    }
}

/// A line for each value of a window, of what all output pixels see there.
pub(super) struct PatchColumns<'a, E>(pub(super) PatchRows<'a, E>);

impl<E: AmxElem> Operand for PatchColumns<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(columns, "values of windows are columns");
        let windows = &self.0;
        let (tap, channel) = (first / windows.g.in_channels, first % windows.g.in_channels);
        // Where in its picture the next pixel is.
        let (mut image, at) = (inner.start / windows.pixels, inner.start % windows.pixels);
        let (mut y, mut x) = (at / windows.output_width, at % windows.output_width);
        for (step, p) in inner.clone().step_by(TILE_K).enumerate() {
            // Outside of the image, and beyond the last pixel, there is nothing.
            let mut sources = [(std::ptr::null(), 0); TILE_K];
            for source in &mut sources[..(inner.end - p).min(TILE_K)] {
                if let Some(values) = windows.tap_channels(windows.origin(image, y, x), tap) {
                    *source = (values[channel..][..TILE_DIM].as_ptr(), !0);
                }
                x += 1;
                if x == windows.output_width {
                    (x, y) = (0, y + 1);
                }
                if y * windows.output_width == windows.pixels {
                    (y, image) = (0, image + 1);
                }
            }
            for i in 0..TILE_DIM {
                let low = i * E::PAIR.0;
                // SAFETY: there are as many values, and a tile has 16 rows of 64 bytes.
                unsafe {
                    let pairs = E::pack_strided(sources[low], sources[low + E::PAIR.1]);
                    store_tile_row::<E>(pairs, to.add(step * E::PARTS * TILE_BYTES + i * 64));
                }
            }
        }
    }
}

/// The weight of a convolution, (depth, cells, count), for the way back: a column for each of its inputs, of the outputs
/// that the cells of a window see, the last cell first.
pub(super) struct FlippedWeight<'a, E> {
    pub(super) weight: &'a [E],
    pub(super) count: usize,
    pub(super) kernel_area: usize,
    /// A multiple of [`DEPTH`].
    pub(super) channels: usize,
}

impl<E: AmxElem> Operand for FlippedWeight<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        for (step, p) in inner.step_by(TILE_K).enumerate() {
            let (tap, from) = (p / self.channels, p % self.channels);
            let data = self.weight[(self.kernel_area - 1 - tap) * self.count..].as_ptr();
            let lines = StridedOperand {
                data,
                count: self.count,
                outer_stride: 1,
                inner_stride: self.kernel_area * self.count,
            };
            // SAFETY: the same promises, and the last value of a cell's last output is the weight's at most.
            unsafe { lines.pack(first, from..from + TILE_K, columns, to.add(step * E::PARTS * TILE_BYTES)) }
        }
    }
}
