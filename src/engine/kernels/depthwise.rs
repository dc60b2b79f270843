//! Depthwise convolution: direct sums, with tiles of channels in registers.
//!
//! As a GEMM it would be one row wide. The output and the input gradient are both sums over a few pixels, each times
//! its kernel tap; they differ only in which pixels.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::DType;

use super::channels::{ChannelLayout, GridPartition};
use super::im2col::ConvGeometry;
use super::parallel::{ParallelChunks, ParallelItems};
use super::partial_sums::PartialSums;
use super::{Elem, Real, cpu};
use crate::vectorised;

/// Channels summed at once: few enough for vector registers.
const CHANNEL_TILE: usize = 32;

/// Runs of images whose partial sums make the weight gradient. A constant, so that the order of summation is the same
/// on every machine.
const MAX_RUNS: usize = 16;

/// Images per run, and number of runs.
fn image_runs(batch: usize) -> (usize, usize) {
    let run = batch.div_ceil(MAX_RUNS).max(1);
    (run, batch.div_ceil(run))
}

/// A kernel tap and the pixel it multiplies.
type Tap = (usize, usize);

impl ConvGeometry {
    pub(super) fn is_depthwise(&self) -> bool {
        self.groups > 1 && self.groups == self.in_channels && self.groups == self.out_channels
    }

    /// The input pixels in the receptive field of an output pixel.
    fn input_taps(&self, oy: usize, ox: usize, taps: &mut Vec<Tap>) {
        taps.clear();
        for ky in 0..self.kernel {
            let Some(y) = (oy * self.stride + ky * self.dilation).checked_sub(self.padding) else { continue };
            for kx in 0..self.kernel {
                let x = (ox * self.stride + kx * self.dilation).wrapping_sub(self.padding);
                if y < self.height && x < self.width {
                    taps.push((ky * self.kernel + kx, y * self.width + x));
                }
            }
        }
    }

    /// The output pixels whose receptive field contains an input pixel.
    fn output_taps(&self, iy: usize, ix: usize, taps: &mut Vec<Tap>) {
        let (h, w) = self.output();
        let output_index = |i: usize, k: usize, size: usize| {
            let from = (i + self.padding).checked_sub(k * self.dilation)?;
            (from % self.stride == 0 && from / self.stride < size).then_some(from / self.stride)
        };
        taps.clear();
        for ky in 0..self.kernel {
            let Some(y) = output_index(iy, ky, h) else { continue };
            for kx in 0..self.kernel {
                if let Some(x) = output_index(ix, kx, w) {
                    taps.push((ky * self.kernel + kx, y * w + x));
                }
            }
        }
    }

    /// Bytes of temporaries of the forward pass and of the backward pass.
    pub(super) fn depthwise_workspace(
        &self,
        at: crate::base::MicroBatchSpec,
        weight_grad: bool,
    ) -> (u64, u64) {
        let acc = at.dtype.size_in_bytes().max(4);
        let cells = self.kernel * self.kernel;
        let (c, taps) = (self.in_channels, cells * std::mem::size_of::<Tap>());
        let each = |pixels: usize| cells * c * acc + at.threads() * (pixels * c * acc + taps);
        let weight = if weight_grad { image_runs(at.batch).1 * cells * c * acc } else { 0 };
        (each(self.output().1) as u64, weight.max(each(1)) as u64)
    }
}

/// Splits the output pixels among thread blocks for the weight gradient. Chunks are large enough that the partial sums
/// of all parts take about an eighth of the bytes that are read.
pub(super) fn cuda_partition(g: &ConvGeometry, batch: usize, dtype: DType) -> GridPartition {
    let rows = batch * g.output_pixels();
    let GridPartition { chunk, .. } =
        GridPartition::new(dtype, &ChannelLayout { channels: g.in_channels, rows, rows_per_unit: rows });
    let chunk = chunk.max(32 * g.kernel_area() / dtype.size_in_bytes());
    GridPartition { chunk, parts: rows.div_ceil(chunk).max(1) }
}

/// Bytes of the partial sums of all parts.
pub(super) fn cuda_workspace(g: &ConvGeometry, batch: usize, dtype: DType) -> usize {
    cuda_partition(g, batch, dtype).parts * g.kernel_area() * g.in_channels * dtype.size_in_bytes().max(4)
}

/// The weight, (channels, taps), as (taps, channels) in the accumulator type.
pub fn transposed_weight<T: Elem>(weight: &[T], channels: usize) -> Vec<T::Acc> {
    let cells = weight.len() / channels;
    (0..weight.len()).map(|i| weight[i % channels * cells + i / channels].to_acc()).collect()
}

/// `to = sum over taps of pixel * weight`, per channel.
#[inline(always)]
fn sum_taps<T: Elem>(pixels: &[T], weight: &[T::Acc], taps: &[Tap], to: &mut [T::Acc]) {
    let c = to.len();
    let mut tiles = to.chunks_exact_mut(CHANNEL_TILE);
    let mut start = 0;
    for to in &mut tiles {
        let mut sum = [T::Acc::ZERO; CHANNEL_TILE];
        for &(cell, pixel) in taps {
            let x: &[T] = &pixels[pixel * c + start..][..CHANNEL_TILE];
            let w: &[T::Acc] = &weight[cell * c + start..][..CHANNEL_TILE];
            sum.iter_mut().zip(x).zip(w).for_each(|((s, x), w)| *s += x.to_acc() * *w);
        }
        to.copy_from_slice(&sum);
        start += CHANNEL_TILE;
    }
    let to = tiles.into_remainder();
    to.fill(T::Acc::ZERO);
    for &(cell, pixel) in taps {
        let (x, w) = (&pixels[pixel * c + start..], &weight[cell * c + start..]);
        to.iter_mut().zip(x).zip(w).for_each(|((s, x), w)| *s += x.to_acc() * *w);
    }
}

/// One row of output pixels of an image, before bias and activation, into `to` (width, channels).
pub fn forward_row<T: Elem>(g: &ConvGeometry, image: &[T], weight: &[T::Acc], oy: usize, to: &mut [T::Acc]) {
    let mut taps = Vec::with_capacity(g.kernel * g.kernel);
    vectorised!(T, || {
        for (ox, to) in to.chunks_exact_mut(g.out_channels).enumerate() {
            g.input_taps(oy, ox, &mut taps);
            sum_taps(image, weight, &taps, to);
        }
    })
}

/// The input gradient, from the output gradient `d`.
pub fn input_gradient<T: Elem>(g: &ConvGeometry, weight: &[T], d: &[T]) -> Vec<T> {
    let (c, weight) = (g.in_channels, transposed_weight(weight, g.in_channels));
    let (h, w) = g.output();
    let batch = d.len() / (h * w * c);
    let mut dx = cpu::uninit::<T>(batch * g.height * g.width * c);
    dx.par_chunks_mut(g.width * c).enumerate().for_each_init(
        || (vec![T::Acc::ZERO; c], Vec::with_capacity(g.kernel * g.kernel)),
        |(acc, taps), (i, line)| {
            let (b, iy) = (i / g.height, i % g.height);
            let d = &d[b * h * w * c..][..h * w * c];
            vectorised!(T, || {
                for (ix, to) in line.chunks_exact_mut(c).enumerate() {
                    g.output_taps(iy, ix, taps);
                    match T::as_acc_mut(to) {
                        Some(to) => sum_taps(d, &weight, taps, to),
                        None => {
                            sum_taps(d, &weight, taps, acc);
                            to.iter_mut().zip(&*acc).for_each(|(to, w)| *to = T::from_acc(*w));
                        }
                    }
                }
            })
        },
    );
    dx
}

/// The weight gradient, (taps, channels), as one partial sum per run of images.
pub fn weight_gradient<T: Elem>(g: &ConvGeometry, values: &[T], d: &[T]) -> PartialSums<T::Acc> {
    let ((h, w), c, cells) = (g.output(), g.in_channels, g.kernel * g.kernel);
    let image_len = g.height * g.width * c;
    let batch = values.len() / image_len;
    let (run, parts) = image_runs(batch);
    PartialSums::of_parts(parts, cells * c, &|part, sums| {
        for b in part * run..((part + 1) * run).min(batch) {
            let (x, d) = (&values[b * image_len..][..image_len], &d[b * h * w * c..][..h * w * c]);
            vectorised!(T, || accumulate_image(g, x, d, sums));
        }
    })
}

#[inline(always)]
fn accumulate_image<T: Elem>(g: &ConvGeometry, x: &[T], d: &[T], sums: &mut [T::Acc]) {
    let ((h, w), c) = (g.output(), g.in_channels);
    for oy in 0..h {
        for (cell, sums) in sums.chunks_exact_mut(c).enumerate() {
            let (ky, kx) = (cell / g.kernel * g.dilation, cell % g.kernel * g.dilation);
            let Some(y) = (oy * g.stride + ky).checked_sub(g.padding).filter(|y| *y < g.height) else {
                continue;
            };
            // The output pixels whose tap falls inside the input row.
            let first = g.padding.saturating_sub(kx).div_ceil(g.stride);
            let end = (g.width + g.padding).saturating_sub(kx).div_ceil(g.stride).min(w);
            let input_pixel = |ox: usize| y * g.width + ox * g.stride + kx - g.padding;
            let mut tiles = sums.chunks_exact_mut(CHANNEL_TILE);
            let mut start = 0;
            for to in &mut tiles {
                let mut sum = [T::Acc::ZERO; CHANNEL_TILE];
                for ox in first..end {
                    let x: &[T] = &x[input_pixel(ox) * c + start..][..CHANNEL_TILE];
                    let d: &[T] = &d[(oy * w + ox) * c + start..][..CHANNEL_TILE];
                    sum.iter_mut().zip(x).zip(d).for_each(|((s, x), d)| *s += x.to_acc() * d.to_acc());
                }
                to.iter_mut().zip(&sum).for_each(|(to, s)| *to += *s);
                start += CHANNEL_TILE;
            }
            let to = tiles.into_remainder();
            for ox in first..end {
                let (x, d) = (&x[input_pixel(ox) * c + start..], &d[(oy * w + ox) * c + start..]);
                to.iter_mut().zip(x).zip(d).for_each(|((s, x), d)| *s += x.to_acc() * d.to_acc());
            }
        }
    }
}
