//! Operands of an implicit-GEMM convolution on AMX: patches gathered, split and packed in one pass, and the flipped
//! weight of the input gradient.

use std::ops::Range;

use super::super::im2col::ConvGeometry;
use super::amx_tiles::{TILE_BYTES, TILE_DIM, TILE_K};
use super::bf16_split::{AmxElem, Operand, StridedOperand, store_tile_row};

/// One row per output pixel of a batch: the taps of its patch in order, each with all channels. The channel count is a
/// multiple of [`TILE_K`].
pub(super) struct PatchRows<'a, E> {
    g: &'a ConvGeometry,
    images: &'a [E],
    /// Output pixels per image, and per row of it.
    pixels: usize,
    output_width: usize,
}

impl<'a, E: AmxElem> PatchRows<'a, E> {
    pub(super) fn new(g: &'a ConvGeometry, images: &'a [E]) -> Self {
        Self { g, images, pixels: g.output_pixels(), output_width: g.output().1 }
    }

    /// Output pixels of all images.
    pub(super) fn count(&self) -> usize {
        self.images.len() / (self.g.height * self.g.width * self.g.in_channels) * self.pixels
    }

    /// The image of an output pixel, and the origin of its patch in it.
    fn patch_origin(&self, pixel: usize) -> (usize, isize, isize) {
        let (image, at) = (pixel / self.pixels, pixel % self.pixels);
        self.origin(image, at / self.output_width, at % self.output_width)
    }

    fn origin(&self, image: usize, y: usize, x: usize) -> (usize, isize, isize) {
        let start = |i: usize| (i * self.g.stride) as isize - self.g.padding as isize;
        (image, start(y), start(x))
    }

    /// The channels of one tap of a patch; `None` outside the image.
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
        debug_assert!(!columns, "patch rows are a left operand");
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
                // Padding packs as zeros.
                let (values, count) = cell.map_or((&[][..], 0), |cell| (&cell[channel..][..TILE_K], TILE_K));
                // SAFETY: `values` has `count` elements, and a tile has 16 rows of 64 bytes.
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

/// One line per value of a patch: that value at every output pixel. The channel count is a multiple of [`TILE_DIM`].
pub(super) struct PatchColumns<'a, E>(pub(super) PatchRows<'a, E>);

impl<E: AmxElem> Operand for PatchColumns<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(columns, "patch columns pack pairs by lines");
        let windows = &self.0;
        let (tap, channel) = (first / windows.g.in_channels, first % windows.g.in_channels);
        // Position of the next output pixel in its image.
        let (mut image, at) = (inner.start / windows.pixels, inner.start % windows.pixels);
        let (mut y, mut x) = (at / windows.output_width, at % windows.output_width);
        for (step, p) in inner.clone().step_by(TILE_K).enumerate() {
            // Padding, and pixels past the last one, pack as zeros.
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
                // SAFETY: each source has `TILE_DIM` elements or an empty mask, and a tile has 16 rows of 64 bytes.
                unsafe {
                    let pairs = E::pack_strided(sources[low], sources[low + E::PAIR.1]);
                    store_tile_row::<E>(pairs, to.add(step * E::PARTS * TILE_BYTES + i * 64));
                }
            }
        }
    }
}

/// The weight of a convolution, (channels, kernel_area, count), for its input gradient: one column per input channel of
/// that convolution, with the output channels of each tap, the last tap first.
pub(super) struct FlippedWeight<'a, E> {
    pub(super) weight: &'a [E],
    pub(super) count: usize,
    pub(super) kernel_area: usize,
    /// A multiple of [`TILE_K`].
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
            // SAFETY: the caller upholds the contract; the last value of a tap's last output channel still lies inside
            // the weight.
            unsafe { lines.pack(first, from..from + TILE_K, columns, to.add(step * E::PARTS * TILE_BYTES)) }
        }
    }
}
