//! Passes over pictures with a few numbers a channel: what the normalisations of pictures are made of.
//!
//! Values are rows of channels; rows are cut into units (some samples of a batch, one sample), and
//! every unit has its own numbers a channel. Sums are made chunk by chunk, each chunk while it is in
//! the cache, and put together in order, so that they are the same whatever the threads do.

#[cfg(feature = "cuda")]
pub(super) mod card;

use candle_core::DType;
use rayon::prelude::*;

use super::clip::{Clip, clip, through};
use super::{Elem, Real, cpu};
use crate::vectorised;

/// How rows of channels are cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub channels: usize,
    pub rows: usize,
    /// Rows of a unit; the last may have fewer.
    pub unit: usize,
}

impl Cut {
    pub fn units(&self) -> usize {
        self.rows.div_ceil(self.unit.max(1))
    }

    pub fn unit_rows(&self, unit: usize) -> usize {
        self.unit.min(self.rows - unit * self.unit)
    }

    fn chunk(&self) -> usize {
        cpu::rows_per_chunk(self.channels).min(self.unit)
    }

    fn chunks(&self) -> usize {
        self.unit.div_ceil(self.chunk().max(1))
    }

    /// Numbers the partial sums of one pass take.
    pub fn partials(&self) -> usize {
        self.units() * self.chunks() * 2 * self.channels
    }

    /// The rows of chunk `i`, counted over all units; none where a short last unit has no such chunk.
    fn chunk_rows(&self, i: usize) -> std::ops::Range<usize> {
        let (unit, start) = (i / self.chunks(), i % self.chunks() * self.chunk());
        let end = (start + self.chunk()).min(self.unit_rows(unit)).max(start);
        unit * self.unit + start..unit * self.unit + end
    }

    /// Two numbers a channel for every chunk.
    fn by_chunk<R: Real>(
        &self,
        body: impl Fn(usize, std::ops::Range<usize>, &mut [R], &mut [R]) + Sync,
    ) -> Vec<R> {
        let mut all = vec![R::ZERO; self.partials()];
        all.par_chunks_mut(2 * self.channels).enumerate().for_each(|(i, pair)| {
            let (first, second) = pair.split_at_mut(self.channels);
            let rows = self.chunk_rows(i);
            if !rows.is_empty() {
                body(i / self.chunks(), rows, first, second);
            }
        });
        all
    }
}

/// Blocks that fill a card, as many as the largest of today's can run at once.
const BLOCKS: usize = 8 * 132;

/// How a card cuts units: every block goes down the `chunk` rows of one of a unit's `parts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    pub chunk: usize,
    pub parts: usize,
}

impl Parts {
    pub fn new(dtype: DType, cut: &Cut) -> Self {
        // As `Lanes` in cuda/channels.cuh has it, where rows are moved 16 bytes at once.
        let packs = (cut.channels * dtype.size_in_bytes()).div_ceil(16).max(1);
        let across = packs.div_ceil(64);
        let tall = 256 / packs.div_ceil(across);
        let wanted = (BLOCKS / (across * cut.units().max(1))).max(1);
        // Fewer than four rows a thread are not worth a block.
        let chunk = cut.unit.div_ceil(wanted).max(4 * tall);
        Self { chunk, parts: cut.unit.div_ceil(chunk).max(1) }
    }
}

/// Bytes of a card's temporaries of the forward pass and of the backward pass, where a unit has statistics for each of
/// `groups` of its channels: sums of parts, their totals in f64, and two numbers a group on the way back.
pub fn card_workspace(dtype: DType, cut: &Cut, groups: usize) -> (usize, usize) {
    let acc = if dtype == DType::F64 { 8 } else { 4 };
    let pairs = 2 * cut.units() * cut.channels;
    let forward = (8 + Parts::new(dtype, cut).parts * acc) * pairs;
    (forward, forward + 2 * cut.units() * groups * acc)
}

/// Mean and sum of squared distances from it, of each unit and channel: (units, 2, channels), in f64
/// because the means of many chunks are put together.
pub fn moments<T: Elem>(x: &[T], cut: &Cut) -> Vec<[Vec<f64>; 2]> {
    let c = cut.channels;
    let parts = cut.by_chunk::<T::Acc>(|_, rows, mean, m2| {
        let over = T::Acc::of(1.0 / rows.len() as f64);
        let x = &x[rows.start * c..rows.end * c];
        vectorised!(T, || {
            add_rows(x, mean, c, |x| x.up());
            mean.iter_mut().for_each(|m| *m *= over);
            for row in x.chunks_exact(c) {
                for ((s, m), x) in m2.iter_mut().zip(&*mean).zip(row) {
                    let d = x.up() - *m;
                    *s += d * d;
                }
            }
        });
    });
    let fold = |unit: usize| {
        let (mut mean, mut m2, mut n) = (vec![0f64; c], vec![0f64; c], 0f64);
        for i in unit * cut.chunks()..(unit + 1) * cut.chunks() {
            let rows = cut.chunk_rows(i).len() as f64;
            if rows == 0.0 {
                continue;
            }
            let (of, spread) = parts[i * 2 * c..][..2 * c].split_at(c);
            let (share, cross) = (rows / (n + rows), n * rows / (n + rows));
            for (((mean, m2), of), spread) in mean.iter_mut().zip(&mut m2).zip(of).zip(spread) {
                let apart = of.wide() - *mean;
                *mean += apart * share;
                *m2 += spread.wide() + apart * apart * cross;
            }
            n += rows;
        }
        [mean, m2]
    };
    (0..cut.units()).into_par_iter().map(fold).collect()
}

/// Sums of rows, four at a time: fewer passes over the sums.
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

/// `y = clip((x - mean) scale + shift)`; a unit's three numbers a channel are `[mean, scale, shift]`.
pub struct Affine<R>(pub Vec<[Vec<R>; 3]>);

impl<R: Real> Affine<R> {
    pub fn apply<T: Elem<Acc = R>>(&self, x: &[T], y: &mut [T], cut: &Cut, act: Clip) {
        let (c, bounds) = (cut.channels, act.bounds::<R>());
        y.par_chunks_mut(cut.unit * c).zip(x.par_chunks(cut.unit * c)).zip(&self.0).for_each(
            |((y, x), [mean, scale, shift])| {
                y.par_chunks_mut(cut.chunk() * c).zip(x.par_chunks(cut.chunk() * c)).for_each(|(y, x)| {
                    vectorised!(T, || {
                        for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
                            for ((((y, x), m), a), b) in y.iter_mut().zip(x).zip(mean).zip(scale).zip(shift) {
                                *y = T::down(clip((x.up() - *m) * *a + *b, bounds));
                            }
                        }
                    })
                })
            },
        )
    }

    /// For each unit and channel, with `d` the gradient that comes through the clip: the sum of `d` and
    /// the sum of `d (x - mean)`.
    pub fn sums<T: Elem<Acc = R>>(&self, x: &[T], dy: &[T], cut: &Cut, act: Clip) -> Vec<[Vec<f64>; 2]> {
        let (c, bounds) = (cut.channels, act.bounds::<R>());
        let parts = cut.by_chunk::<R>(|unit, rows, sum, cross| {
            let [mean, scale, shift] = &self.0[unit];
            let (x, dy) = (&x[rows.start * c..rows.end * c], &dy[rows.start * c..rows.end * c]);
            vectorised!(T, || {
                for (x, d) in x.chunks_exact(c).zip(dy.chunks_exact(c)) {
                    let numbers = mean.iter().zip(scale).zip(shift);
                    for ((((s, k), x), d), ((m, a), b)) in
                        sum.iter_mut().zip(cross.iter_mut()).zip(x).zip(d).zip(numbers)
                    {
                        let from = x.up() - *m;
                        let d = through(from * *a + *b, d.up(), bounds);
                        *s += d;
                        *k += d * from;
                    }
                }
            })
        });
        let fold = |unit: usize| {
            let mut sums = [vec![0f64; c], vec![0f64; c]];
            for pair in parts[unit * cut.chunks() * 2 * c..][..cut.chunks() * 2 * c].chunks_exact(2 * c) {
                for (sums, part) in sums.iter_mut().zip(pair.chunks_exact(c)) {
                    sums.iter_mut().zip(part).for_each(|(s, p)| *s += p.wide());
                }
            }
            sums
        };
        (0..cut.units()).into_par_iter().map(fold).collect()
    }

    /// `dx = scale d - slope (x - mean) - level`, a unit's two numbers a channel being `[slope, level]`.
    pub fn backward<T: Elem<Acc = R>>(
        &self,
        x: &[T],
        dy: &[T],
        cut: &Cut,
        act: Clip,
        pull: &[[Vec<R>; 2]],
    ) -> Vec<T> {
        let (c, bounds) = (cut.channels, act.bounds::<R>());
        let mut dx = cpu::fresh::<T>(x.len());
        let units = dx.par_chunks_mut(cut.unit * c).zip(x.par_chunks(cut.unit * c));
        units.zip(dy.par_chunks(cut.unit * c)).zip(&self.0).zip(pull).for_each(
            |((((dx, x), dy), [mean, scale, shift]), [slope, level])| {
                let size = cut.chunk() * c;
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
                                let from = x.up() - *m;
                                let d = through(from * *a + *b, d.up(), bounds);
                                *dx = T::down(*a * d - *k * from - *l);
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
        /// A unit's parts hold all its rows, and none is empty where the unit is whole.
        #[test]
        fn parts_hold_every_row(channels in 1usize..3000, unit in 1usize..1_000_000, units in 1usize..300) {
            let cut = Cut { channels, rows: unit * units, unit };
            for dtype in [DType::BF16, DType::F32, DType::F64] {
                let Parts { chunk, parts } = Parts::new(dtype, &cut);
                prop_assert!(parts * chunk >= unit && (parts - 1) * chunk < unit);
            }
        }
    }
}
