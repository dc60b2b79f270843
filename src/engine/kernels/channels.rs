//! Passes over images with a few coefficients per channel: the building blocks of batch norm and group norm.
//!
//! Values are rows of channels. Rows are split into units that share statistics: a group of samples in batch norm, one
//! sample in group norm. Each unit has its own coefficients per channel. A pass sums chunk by chunk while the chunk is
//! in cache and combines the partial sums in order, so the result does not depend on thread scheduling.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::DType;

use super::clamp::{ClampActivation, clamp, clamp_backward};
use super::grid::GRID_SMS;
use super::parallel::{ParallelChunks, ParallelItems};
use super::{Elem, Real, cpu};
use crate::vectorised;

/// How rows of channels are split into units.
#[derive(Clone, Copy, Debug)]
pub struct ChannelLayout {
    pub channels: usize,
    pub rows: usize,
    /// Rows per unit; the last unit may have fewer.
    pub rows_per_unit: usize,
}

impl ChannelLayout {
    pub fn units(&self) -> usize {
        self.rows.div_ceil(self.rows_per_unit.max(1))
    }

    pub fn unit_rows(&self, unit: usize) -> usize {
        self.rows_per_unit.min(self.rows - unit * self.rows_per_unit)
    }

    fn chunk(&self) -> usize {
        cpu::rows_per_chunk(self.channels).min(self.rows_per_unit)
    }

    fn chunks_per_unit(&self) -> usize {
        self.rows_per_unit.div_ceil(self.chunk().max(1))
    }

    /// Number of partial sums in one pass.
    pub fn num_partials(&self) -> usize {
        self.units() * self.chunks_per_unit() * 2 * self.channels
    }

    /// Rows of chunk `i`, counted over all units; empty where a short last unit has no such chunk.
    fn chunk_rows(&self, i: usize) -> std::ops::Range<usize> {
        let (unit, start) = (i / self.chunks_per_unit(), i % self.chunks_per_unit() * self.chunk());
        let end = (start + self.chunk()).min(self.unit_rows(unit)).max(start);
        unit * self.rows_per_unit + start..unit * self.rows_per_unit + end
    }

    /// Runs `body` on every chunk; each chunk produces two values per channel.
    fn map_chunks<R: Real>(
        &self,
        body: impl Fn(usize, std::ops::Range<usize>, &mut [R], &mut [R]) + Sync,
    ) -> Vec<R> {
        let mut all = vec![R::ZERO; self.num_partials()];
        cpu::parallel_for_chunks(&mut all, 2 * self.channels, |i, pair| {
            let (first, second) = pair.split_at_mut(self.channels);
            let rows = self.chunk_rows(i);
            if !rows.is_empty() {
                body(i / self.chunks_per_unit(), rows, first, second);
            }
        });
        all
    }
}

/// Thread blocks that fill a GPU once: `COLUMN_BLOCKS` on each SM.
const FULL_GRID_BLOCKS: usize = 3 * GRID_SMS;

/// How the CUDA kernels split a unit: into `parts` of `chunk` rows, one thread block each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridPartition {
    pub chunk: usize,
    pub parts: usize,
}

impl GridPartition {
    pub fn new(dtype: DType, layout: &ChannelLayout) -> Self {
        // Mirrors `BlockLayout` in cuda/channels.cuh, where a thread moves 16 bytes of a row at once.
        let packs = (layout.channels * dtype.size_in_bytes()).div_ceil(16).max(1);
        let column_blocks = packs.div_ceil(64);
        let block_rows = 256 / packs.div_ceil(column_blocks);
        let wanted = (FULL_GRID_BLOCKS / (column_blocks * layout.units().max(1))).max(1);
        // A block with fewer than four rows per thread does not pay.
        let chunk = layout.rows_per_unit.div_ceil(wanted).max(4 * block_rows);
        Self { chunk, parts: layout.rows_per_unit.div_ceil(chunk).max(1) }
    }
}

/// Bytes of CUDA temporaries of the forward and the backward pass, where a unit has statistics for each of `groups`
/// channel groups: partial sums, their f64 totals, and two more values per group in the backward pass.
pub fn cuda_workspace(dtype: DType, layout: &ChannelLayout, groups: usize) -> (usize, usize) {
    let acc = if dtype == DType::F64 { 8 } else { 4 };
    let pairs = 2 * layout.units() * layout.channels;
    let forward = (8 + GridPartition::new(dtype, layout).parts * acc) * pairs;
    (forward, forward + 2 * layout.units() * groups * acc)
}

/// Mean and sum of squared deviations (M2) of each unit and channel: (units, 2, channels). In f64, because it merges
/// the means of many chunks.
pub fn moments<T: Elem>(x: &[T], layout: &ChannelLayout) -> Vec<[Vec<f64>; 2]> {
    let c = layout.channels;
    let parts = layout.map_chunks::<T::Acc>(|_, rows, mean, m2| {
        let inv_rows = T::Acc::of_f64(1.0 / rows.len() as f64);
        let x = &x[rows.start * c..rows.end * c];
        vectorised!(T, || {
            add_rows(x, mean, c, |x| x.to_acc());
            mean.iter_mut().for_each(|m| *m *= inv_rows);
            for row in x.chunks_exact(c) {
                for ((s, m), x) in m2.iter_mut().zip(&*mean).zip(row) {
                    let d = x.to_acc() - *m;
                    *s += d * d;
                }
            }
        });
    });
    let fold = |unit: usize| {
        let (mut mean, mut m2, mut n) = (vec![0f64; c], vec![0f64; c], 0f64);
        for i in unit * layout.chunks_per_unit()..(unit + 1) * layout.chunks_per_unit() {
            let rows = layout.chunk_rows(i).len() as f64;
            if rows == 0.0 {
                continue;
            }
            let (part_mean, part_m2) = parts[i * 2 * c..][..2 * c].split_at(c);
            let (weight, cross) = (rows / (n + rows), n * rows / (n + rows));
            for (((mean, m2), part_mean), part_m2) in mean.iter_mut().zip(&mut m2).zip(part_mean).zip(part_m2)
            {
                let delta = part_mean.as_f64() - *mean;
                *mean += delta * weight;
                *m2 += part_m2.as_f64() + delta * delta * cross;
            }
            n += rows;
        }
        [mean, m2]
    };
    cpu::parallel_map(layout.units(), &fold)
}

/// Sums rows four at a time, which takes fewer passes over `sums`.
#[inline(always)]
fn add_rows<T: Elem, R: Real>(x: &[T], sums: &mut [R], c: usize, of: impl Fn(T) -> R) {
    let mut four = x.chunks_exact(4 * c);
    for rows in &mut four {
        let (a, rest) = rows.split_at(c);
        let (b, rest) = rest.split_at(c);
        let (d, e) = rest.split_at(c);
        for ((((s, a), b), d), e) in sums.iter_mut().zip(a).zip(b).zip(d).zip(e) {
            *s += (of(*a) + of(*b)) + (of(*d) + of(*e));
        }
    }
    for row in four.remainder().chunks_exact(c) {
        sums.iter_mut().zip(row).for_each(|(s, x)| *s += of(*x));
    }
}

/// `y = clamp((x - mean) scale + shift)`; each unit has `[mean, scale, shift]` per channel.
pub struct Affine<R>(pub Vec<[Vec<R>; 3]>);

impl<R: Real> Affine<R> {
    pub fn apply<T: Elem<Acc = R>>(
        &self,
        x: &[T],
        y: &mut [T],
        layout: &ChannelLayout,
        act: ClampActivation,
    ) {
        let (c, bounds) = (layout.channels, act.bounds::<R>());
        y.par_chunks_mut(layout.rows_per_unit * c)
            .zip(x.par_chunks(layout.rows_per_unit * c))
            .zip(self.0.as_slice())
            .for_each(|((y, x), [mean, scale, shift])| {
                y.par_chunks_mut(layout.chunk() * c).zip(x.par_chunks(layout.chunk() * c)).for_each(
                    |(y, x)| {
                        vectorised!(T, || {
                            for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
                                for ((((y, x), m), a), b) in
                                    y.iter_mut().zip(x).zip(mean).zip(scale).zip(shift)
                                {
                                    *y = T::from_acc(clamp((x.to_acc() - *m) * *a + *b, bounds));
                                }
                            }
                        })
                    },
                )
            })
    }

    /// For each unit and channel, with `d` the gradient that passes the clamp: the sum of `d` and the sum of
    /// `d (x - mean)`.
    pub fn gradient_sums<T: Elem<Acc = R>>(
        &self,
        x: &[T],
        dy: &[T],
        layout: &ChannelLayout,
        act: ClampActivation,
    ) -> Vec<[Vec<f64>; 2]> {
        let (c, bounds) = (layout.channels, act.bounds::<R>());
        let parts = layout.map_chunks::<R>(|unit, rows, sum, cross| {
            let [mean, scale, shift] = &self.0[unit];
            let (x, dy) = (&x[rows.start * c..rows.end * c], &dy[rows.start * c..rows.end * c]);
            vectorised!(T, || {
                for (x, d) in x.chunks_exact(c).zip(dy.chunks_exact(c)) {
                    let numbers = mean.iter().zip(scale).zip(shift);
                    for ((((s, k), x), d), ((m, a), b)) in
                        sum.iter_mut().zip(cross.iter_mut()).zip(x).zip(d).zip(numbers)
                    {
                        let centered = x.to_acc() - *m;
                        let d = clamp_backward(centered * *a + *b, d.to_acc(), bounds);
                        *s += d;
                        *k += d * centered;
                    }
                }
            })
        });
        let fold = |unit: usize| {
            let mut sums = [vec![0f64; c], vec![0f64; c]];
            for pair in parts[unit * layout.chunks_per_unit() * 2 * c..][..layout.chunks_per_unit() * 2 * c]
                .chunks_exact(2 * c)
            {
                for (sums, part) in sums.iter_mut().zip(pair.chunks_exact(c)) {
                    sums.iter_mut().zip(part).for_each(|(s, p)| *s += p.as_f64());
                }
            }
            sums
        };
        cpu::parallel_map(layout.units(), &fold)
    }

    /// `dx = scale d - slope (x - mean) - level`; each unit has `[slope, level]` per channel.
    pub fn backward<T: Elem<Acc = R>>(
        &self,
        x: &[T],
        dy: &[T],
        layout: &ChannelLayout,
        act: ClampActivation,
        corrections: &[[Vec<R>; 2]],
    ) -> Vec<T> {
        let (c, bounds) = (layout.channels, act.bounds::<R>());
        let mut dx = cpu::uninit::<T>(x.len());
        let units = dx.par_chunks_mut(layout.rows_per_unit * c).zip(x.par_chunks(layout.rows_per_unit * c));
        units.zip(dy.par_chunks(layout.rows_per_unit * c)).zip(self.0.as_slice()).zip(corrections).for_each(
            |((((dx, x), dy), [mean, scale, shift]), [slope, level])| {
                let size = layout.chunk() * c;
                let chunks = dx.par_chunks_mut(size).zip(x.par_chunks(size)).zip(dy.par_chunks(size));
                chunks.for_each(|((dx, x), dy)| {
                    vectorised!(T, || {
                        for ((dx, x), d) in
                            dx.chunks_exact_mut(c).zip(x.chunks_exact(c)).zip(dy.chunks_exact(c))
                        {
                            let numbers = mean.iter().zip(scale).zip(shift).zip(slope).zip(level);
                            for (((dx, x), d), ((((m, a), b), k), l)) in
                                dx.iter_mut().zip(x).zip(d).zip(numbers)
                            {
                                let centered = x.to_acc() - *m;
                                let d = clamp_backward(centered * *a + *b, d.to_acc(), bounds);
                                *dx = T::from_acc(*a * d - *k * centered - *l);
                            }
                        }
                    })
                })
            },
        );
        dx
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The parts of a unit cover all its rows, and no part of a full unit is empty.
        #[test]
        fn parts_hold_every_row(channels in 1usize..3000, unit in 1usize..1_000_000, units in 1usize..300) {
            let layout = ChannelLayout { channels, rows: unit * units, rows_per_unit: unit };
            for dtype in [DType::BF16, DType::F32, DType::F64] {
                let GridPartition { chunk, parts } = GridPartition::new(dtype, &layout);
                prop_assert!(parts * chunk >= unit && (parts - 1) * chunk < unit);
            }
        }
    }
}
