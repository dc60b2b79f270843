//! Convolution where every channel sees itself alone: direct sums, tiles of channels in registers.
//!
//! A product would be one row wide here. Both the output and the input's gradient are sums of a few
//! pixels, each multiplied with its cell of the window; only which pixels differs.

#[cfg(feature = "cuda")]
pub(super) mod card;

use candle_core::DType;
use rayon::prelude::*;

use super::channels::{Cut, Parts};
use super::windows::Geometry;
use super::{Elem, Real, cpu};
use crate::vectorised;

/// Channels summed at once: few enough to stay in vector registers.
const TILE: usize = 32;

/// Runs of pictures whose sums make the weight's gradient; a constant, so that it is the same sum on
/// any machine.
const RUNS: usize = 16;

/// Pictures of a run, and runs.
fn runs(batch: usize) -> (usize, usize) {
    let run = batch.div_ceil(RUNS).max(1);
    (run, batch.div_ceil(run))
}

/// A cell of the window and the pixel it meets.
type Tap = (usize, usize);

impl Geometry {
    pub(super) fn is_depthwise(&self) -> bool {
        self.groups > 1 && self.groups == self.inputs && self.groups == self.outputs
    }

    /// The pixels of the input that an output pixel sees.
    fn seen(&self, oy: usize, ox: usize, taps: &mut Vec<Tap>) {
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

    /// The pixels of the output that an input pixel is seen by.
    fn seen_by(&self, iy: usize, ix: usize, taps: &mut Vec<Tap>) {
        let (h, w) = self.output();
        let along = |i: usize, k: usize, size: usize| {
            let from = (i + self.padding).checked_sub(k * self.dilation)?;
            (from % self.stride == 0 && from / self.stride < size).then_some(from / self.stride)
        };
        taps.clear();
        for ky in 0..self.kernel {
            let Some(y) = along(iy, ky, h) else { continue };
            for kx in 0..self.kernel {
                if let Some(x) = along(ix, kx, w) {
                    taps.push((ky * self.kernel + kx, y * w + x));
                }
            }
        }
    }

    /// Bytes of temporaries of the forward pass and of the backward pass.
    pub(super) fn depthwise_workspace(&self, at: crate::layers::At) -> (u64, u64) {
        let acc = at.dtype.size_in_bytes().max(4);
        let cells = self.kernel * self.kernel;
        let (c, taps) = (self.inputs, cells * std::mem::size_of::<Tap>());
        let each = |pixels: usize| cells * c * acc + at.threads() * (pixels * c * acc + taps);
        let weight = runs(at.batch).1 * cells * c * acc;
        (each(self.output().1) as u64, weight.max(each(1)) as u64)
    }
}

/// How a card's blocks share the output pixels where the weight's gradient is summed: so that the sums of all parts
/// take an eighth of the bytes that are read for them.
pub(super) fn card_parts(g: &Geometry, batch: usize, dtype: DType) -> Parts {
    let rows = batch * g.pixels();
    let Parts { chunk, .. } = Parts::new(dtype, &Cut { channels: g.inputs, rows, unit: rows });
    let chunk = chunk.max(32 * g.cells() / dtype.size_in_bytes());
    Parts { chunk, parts: rows.div_ceil(chunk).max(1) }
}

/// Bytes of the sums of all parts.
pub(super) fn card_workspace(g: &Geometry, batch: usize, dtype: DType) -> usize {
    card_parts(g, batch, dtype).parts * g.cells() * g.inputs * dtype.size_in_bytes().max(4)
}

/// The weight, (channels, cells), as (cells, channels) of the type computed with.
pub fn turned<T: Elem>(weight: &[T], channels: usize) -> Vec<T::Acc> {
    let cells = weight.len() / channels;
    (0..weight.len()).map(|i| weight[i % channels * cells + i / channels].up()).collect()
}

/// `to = sum over taps of pixel * cell`, over channels.
#[inline(always)]
fn sum_taps<T: Elem>(pixels: &[T], weight: &[T::Acc], taps: &[Tap], to: &mut [T::Acc]) {
    let c = to.len();
    let mut tiles = to.chunks_exact_mut(TILE);
    let mut start = 0;
    for to in &mut tiles {
        let mut sum = [T::Acc::ZERO; TILE];
        for &(cell, pixel) in taps {
            let x: &[T] = &pixels[pixel * c + start..][..TILE];
            let w: &[T::Acc] = &weight[cell * c + start..][..TILE];
            sum.iter_mut().zip(x).zip(w).for_each(|((s, x), w)| *s += x.up() * *w);
        }
        to.copy_from_slice(&sum);
        start += TILE;
    }
    let to = tiles.into_remainder();
    to.fill(T::Acc::ZERO);
    for &(cell, pixel) in taps {
        let (x, w) = (&pixels[pixel * c + start..], &weight[cell * c + start..]);
        to.iter_mut().zip(x).zip(w).for_each(|((s, x), w)| *s += x.up() * *w);
    }
}

/// One line of output pixels of a picture, before bias and activation, into `to` (width, channels).
pub fn line<T: Elem>(g: &Geometry, picture: &[T], weight: &[T::Acc], oy: usize, to: &mut [T::Acc]) {
    let mut taps = Vec::with_capacity(g.kernel * g.kernel);
    vectorised!(T, || {
        for (ox, to) in to.chunks_exact_mut(g.outputs).enumerate() {
            g.seen(oy, ox, &mut taps);
            sum_taps(picture, weight, &taps, to);
        }
    })
}

/// The gradient of the input from that of the output, `d`.
pub fn input_gradient<T: Elem>(g: &Geometry, weight: &[T], d: &[T]) -> Vec<T> {
    let (c, weight) = (g.inputs, turned(weight, g.inputs));
    let (h, w) = g.output();
    let batch = d.len() / (h * w * c);
    let mut dx = cpu::fresh::<T>(batch * g.height * g.width * c);
    dx.par_chunks_mut(g.width * c).enumerate().for_each_init(
        || (vec![T::Acc::ZERO; c], Vec::with_capacity(g.kernel * g.kernel)),
        |(wide, taps), (i, line)| {
            let (b, iy) = (i / g.height, i % g.height);
            let d = &d[b * h * w * c..][..h * w * c];
            vectorised!(T, || {
                for (ix, to) in line.chunks_exact_mut(c).enumerate() {
                    g.seen_by(iy, ix, taps);
                    match T::as_acc_mut(to) {
                        Some(to) => sum_taps(d, &weight, taps, to),
                        None => {
                            sum_taps(d, &weight, taps, wide);
                            to.iter_mut().zip(&*wide).for_each(|(to, w)| *to = T::down(*w));
                        }
                    }
                }
            })
        },
    );
    dx
}

/// The gradient of the weight, (cells, channels), as sums over runs of pictures.
pub fn weight_gradient<T: Elem>(g: &Geometry, values: &[T], d: &[T]) -> Vec<Vec<T::Acc>> {
    let ((h, w), c, cells) = (g.output(), g.inputs, g.kernel * g.kernel);
    let picture = g.height * g.width * c;
    let batch = values.len() / picture;
    let (run, parts) = runs(batch);
    let of_run = |part: usize| {
        let mut sums = vec![T::Acc::ZERO; cells * c];
        for b in part * run..((part + 1) * run).min(batch) {
            let (x, d) = (&values[b * picture..][..picture], &d[b * h * w * c..][..h * w * c]);
            vectorised!(T, || add_picture(g, x, d, &mut sums));
        }
        sums
    };
    (0..parts).into_par_iter().map(of_run).collect()
}

#[inline(always)]
fn add_picture<T: Elem>(g: &Geometry, x: &[T], d: &[T], sums: &mut [T::Acc]) {
    let ((h, w), c) = (g.output(), g.inputs);
    for oy in 0..h {
        for (cell, sums) in sums.chunks_exact_mut(c).enumerate() {
            let (ky, kx) = (cell / g.kernel * g.dilation, cell % g.kernel * g.dilation);
            let Some(y) = (oy * g.stride + ky).checked_sub(g.padding).filter(|y| *y < g.height) else {
                continue;
            };
            // The output pixels whose cell lies inside the line.
            let first = g.padding.saturating_sub(kx).div_ceil(g.stride);
            let end = (g.width + g.padding).saturating_sub(kx).div_ceil(g.stride).min(w);
            let meets = |ox: usize| y * g.width + ox * g.stride + kx - g.padding;
            let mut tiles = sums.chunks_exact_mut(TILE);
            let mut start = 0;
            for to in &mut tiles {
                let mut sum = [T::Acc::ZERO; TILE];
                for ox in first..end {
                    let x: &[T] = &x[meets(ox) * c + start..][..TILE];
                    let d: &[T] = &d[(oy * w + ox) * c + start..][..TILE];
                    sum.iter_mut().zip(x).zip(d).for_each(|((s, x), d)| *s += x.up() * d.up());
                }
                to.iter_mut().zip(&sum).for_each(|(to, s)| *to += *s);
                start += TILE;
            }
            let to = tiles.into_remainder();
            for ox in first..end {
                let (x, d) = (&x[meets(ox) * c + start..], &d[(oy * w + ox) * c + start..]);
                to.iter_mut().zip(x).zip(d).for_each(|((s, x), d)| *s += x.up() * d.up());
            }
        }
    }
}
