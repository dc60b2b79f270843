//! Operands of an implicit-GEMM convolution on AMX: patches gathered, split and packed in one pass, and the flipped
//! weight of the input gradient.

use std::ops::Range;

use super::super::im2col::ConvGeometry;
use super::amx_tiles::{TILE_BYTES, TILE_DIM, TILE_K};
use super::avx512::lane_mask;
use super::bf16_split::{AmxElem, Operand, store_tile_row};

/// Values of the longest slice of a patch.
pub(super) const MAX_LINE: usize = 2 * super::amx::MAX_PANEL_TILES * TILE_K;

/// One row per output pixel of a batch: the taps of its patch in order, each with all channels.
pub(super) struct PatchRows<'a, E> {
    g: &'a ConvGeometry,
    images: &'a [E],
    /// Output pixels per image, and per row of it.
    pixels: usize,
    output_width: usize,
}

/// The image of an output pixel, and the origin of its patch in it.
type PatchOrigin = (usize, isize, isize);

/// Adjacent values of a patch that are adjacent in the image too, padding included.
#[derive(Clone, Copy, Default)]
struct PatchRun {
    /// Row of the image, from the origin of the patch.
    row: isize,
    /// Values from the origin of the patch in that row.
    first: isize,
    len: usize,
}

impl<'a, E: AmxElem> PatchRows<'a, E> {
    pub(super) fn new(g: &'a ConvGeometry, images: &'a [E]) -> Self {
        Self { g, images, pixels: g.output_pixels(), output_width: g.output().1 }
    }

    /// Output pixels of all images.
    pub(super) fn count(&self) -> usize {
        self.images.len() / (self.g.height * self.g.width * self.g.in_channels) * self.pixels
    }

    fn patch_origin(&self, pixel: usize) -> PatchOrigin {
        let (image, at) = (pixel / self.pixels, pixel % self.pixels);
        self.origin(image, at / self.output_width, at % self.output_width)
    }

    fn origin(&self, image: usize, y: usize, x: usize) -> PatchOrigin {
        let start = |i: usize| (i * self.g.stride) as isize - self.g.padding as isize;
        (image, start(y), start(x))
    }

    /// The channels of one tap of a patch; `None` outside the image.
    fn tap_channels(&self, (image, y, x): PatchOrigin, cell: usize) -> Option<&[E]> {
        let g = self.g;
        let input_index = |from: isize, i: usize, size: usize| {
            let at = from + (i * g.dilation) as isize;
            (0..size as isize).contains(&at).then_some(at as usize)
        };
        let (y, x) = (input_index(y, cell / g.kernel, g.height)?, input_index(x, cell % g.kernel, g.width)?);
        Some(&self.images[((image * g.height + y) * g.width + x) * g.in_channels..][..g.in_channels])
    }

    /// The runs of the values `inner` of a patch: a row of the kernel each, or a tap if taps are not adjacent.
    fn runs(&self, inner: Range<usize>) -> impl Iterator<Item = PatchRun> {
        let g = self.g;
        let (runs_per_row, taps) = if g.dilation == 1 { (1, g.kernel) } else { (g.kernel, 1) };
        let (channels, dilation, longest) = (g.in_channels, g.dilation, taps * g.in_channels);
        let mut at = inner.start;
        std::iter::from_fn(move || {
            let (index, offset) = (at / longest, at % longest);
            let len = (longest - offset).min(inner.end - at);
            at += len;
            (len > 0).then(|| PatchRun {
                row: (index / runs_per_row * dilation) as isize,
                first: (index % runs_per_row * dilation * channels + offset) as isize,
                len,
            })
        })
    }

    /// Copies a run of the patch at an origin; what lies outside the image is 0.
    #[inline]
    fn copy_run(&self, (image, y, x): PatchOrigin, run: PatchRun, to: &mut [E]) {
        let (g, row) = (self.g, y + run.row);
        if !(0..g.height as isize).contains(&row) {
            return to.fill(E::from_acc(0.0));
        }
        let (width, len) = (g.width * g.in_channels, run.len as isize);
        let first = x * g.in_channels as isize + run.first;
        let start = (-first).clamp(0, len);
        let end = (width as isize - first).clamp(start, len);
        let from = (image * g.height + row as usize) * width;
        to[..start as usize].fill(E::from_acc(0.0));
        to[end as usize..].fill(E::from_acc(0.0));
        if start < end {
            let from = from + (first + start) as usize;
            to[start as usize..end as usize]
                .copy_from_slice(&self.images[from..from + (end - start) as usize]);
        }
    }

    /// Packs the taps of `rows` patches from where they are in the images.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_taps(&self, origins: &[PatchOrigin], inner: Range<usize>, to: *mut u8) {
        let mut taps = [None; TILE_DIM];
        for (step, p) in inner.step_by(TILE_K).enumerate() {
            let (tap, channel) = (p / self.g.in_channels, p % self.g.in_channels);
            if channel == 0 || step == 0 {
                origins
                    .iter()
                    .zip(&mut taps)
                    .for_each(|(origin, cell)| *cell = self.tap_channels(*origin, tap));
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

impl<E: AmxElem> Operand for PatchRows<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(!columns, "patch rows are a left operand");
        let rows = self.count().saturating_sub(first).min(TILE_DIM);
        let mut origins = [(0, 0, 0); TILE_DIM];
        (0..rows).for_each(|i| origins[i] = self.patch_origin(first + i));
        if self.g.in_channels.is_multiple_of(TILE_K) {
            // SAFETY: the caller upholds the contract.
            return unsafe { self.pack_taps(&origins[..rows], inner, to) };
        }
        let mut line = [E::from_acc(0.0); MAX_LINE];
        for (i, origin) in origins.into_iter().enumerate() {
            let mut at = 0;
            for run in self.runs(inner.clone()).take(if i < rows { usize::MAX } else { 0 }) {
                self.copy_run(origin, run, &mut line[at..at + run.len]);
                at += run.len;
            }
            // Rows past the last, and values past the end of a patch, pack as zeros.
            for step in 0..inner.len().div_ceil(TILE_K) {
                let values = &line[step * TILE_K..][..TILE_K];
                let count = at.saturating_sub(step * TILE_K).min(TILE_K);
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

/// One line per value of a patch: that value at every output pixel.
pub(super) struct PatchColumns<'a, E>(pub(super) PatchRows<'a, E>);

impl<E: AmxElem> Operand for PatchColumns<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(columns, "patch columns pack pairs by lines");
        let windows = &self.0;
        let (tap, channel) = (first / windows.g.in_channels, first % windows.g.in_channels);
        // Lines of one tap are read where they are; others are gathered.
        let in_place = windows.g.in_channels.is_multiple_of(TILE_DIM);
        let lines = (windows.g.patch_len() - first).min(TILE_DIM);
        let (mut runs, mut run_count) = ([PatchRun::default(); TILE_DIM], 0);
        for run in windows.runs(first..first + lines) {
            runs[run_count] = run;
            run_count += 1;
        }
        let mut gathered = [[E::from_acc(0.0); TILE_DIM]; TILE_K];
        // Position of the next output pixel in its image.
        let (mut image, at) = (inner.start / windows.pixels, inner.start % windows.pixels);
        let (mut y, mut x) = (at / windows.output_width, at % windows.output_width);
        for (step, p) in inner.clone().step_by(TILE_K).enumerate() {
            // Padding, and pixels past the last one, pack as zeros.
            let mut sources = [(std::ptr::null(), 0); TILE_K];
            for (source, gathered) in sources.iter_mut().zip(&mut gathered).take(inner.end - p) {
                let origin = windows.origin(image, y, x);
                if in_place {
                    if let Some(values) = windows.tap_channels(origin, tap) {
                        *source = (values[channel..][..TILE_DIM].as_ptr(), !0);
                    }
                } else {
                    let mut at = 0;
                    for run in &runs[..run_count] {
                        windows.copy_run(origin, *run, &mut gathered[at..at + run.len]);
                        at += run.len;
                    }
                    *source = (gathered.as_ptr(), lane_mask(lines));
                }
                x += 1;
                if x == windows.output_width {
                    (x, y) = (0, y + 1);
                }
                if y * windows.output_width == windows.pixels {
                    (y, image) = (0, image + 1);
                }
            }
            // SAFETY: each source has the elements of its mask, and a tile of each part fits there.
            unsafe { store_pairs(&sources, to.add(step * E::PARTS * TILE_BYTES)) }
        }
    }
}

/// Stores a tile of each part of pairs by lines; `sources` has the values of all lines at each K index.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL), each source has the elements of its mask, and `to` has room for the tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn store_pairs<E: AmxElem>(sources: &[(*const E, u16); TILE_K], to: *mut u8) {
    for i in 0..TILE_DIM {
        let low = i * E::PAIR.0;
        // SAFETY: the caller upholds this function's contract; a tile has 16 rows of 64 bytes.
        unsafe {
            store_tile_row::<E>(E::pack_strided(sources[low], sources[low + E::PAIR.1]), to.add(i * 64));
        }
    }
}

/// The weight of a convolution, (channels, kernel_area, count), for its input gradient: one column per input channel of
/// that convolution, with the output channels of each tap, the last tap first.
pub(super) struct FlippedWeight<'a, E> {
    pub(super) weight: &'a [E],
    pub(super) count: usize,
    pub(super) kernel_area: usize,
    pub(super) channels: usize,
}

impl<E: AmxElem> Operand for FlippedWeight<'_, E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        debug_assert!(columns, "a flipped weight is a right operand");
        let lines = lane_mask(self.count - first);
        for (step, p) in inner.clone().step_by(TILE_K).enumerate() {
            let mut sources = [(std::ptr::null(), 0); TILE_K];
            for (i, source) in sources.iter_mut().enumerate().take(inner.end - p) {
                let (tap, channel) = ((p + i) / self.channels, (p + i) % self.channels);
                let row = channel * self.kernel_area + self.kernel_area - 1 - tap;
                *source = (self.weight[row * self.count + first..].as_ptr(), lines);
            }
            // SAFETY: each source has the elements of its mask, and a tile of each part fits there.
            unsafe { store_pairs(&sources, to.add(step * E::PARTS * TILE_BYTES)) }
        }
    }
}
