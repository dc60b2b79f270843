//! Attention over packed projections, tile by tile: no (length, length) matrix is ever whole.
//!
//! The input is (batch, length, (heads + 2 kv_heads) head): the queries of all heads, then the keys, then
//! the values, as GPT-2's fused projection lays them out. With fewer key heads than query heads, each run of
//! `heads / kv_heads` query heads shares one. A thread takes a sample's key head with all its query heads, so
//! that the gradients of shared keys are summed by one thread in one order.

#[cfg(feature = "cuda")]
mod card;
mod mask;
mod sizes;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

pub use mask::Mask;
pub use sizes::Sizes;

use super::product::{By, Mat, multiply};
use super::rotary::Rotary;
use super::{Elem, Real, cpu, lanes, reference};
use crate::{vectorised, with_elem};

/// Queries of a tile, and keys they meet at once: long products of few calls, whose scores stay in the
/// second-level cache.
const TILE: usize = 64;
const KEYS: usize = 256;
/// A row of scores is worked on in whole lanes, up to the first that holds none that is seen.
const LANES: usize = lanes::LANES;

/// What a thread works with: buffers of (length, head), (TILE, head), (TILE, KEYS) and (TILE).
const FORWARD: (usize, usize, usize, usize) = (2, 2, 1, 2);
const BACKWARD: (usize, usize, usize, usize) = (4, 3, 2, 1);

pub struct Attention<'a> {
    pub sizes: Sizes,
    /// A position sees itself and those before it.
    pub causal: bool,
    pub rotary: Option<&'a Rotary>,
    /// Positions of each sample that are seen at all, from the first; all where absent.
    pub lengths: Option<&'a [u32]>,
    /// What was staged of the samples with their lengths, as [`keys::staged`](super::keys::staged) lays it out.
    pub staged: Option<&'a Tensor>,
    /// The weights that are dropped; none where absent.
    pub mask: Option<Mask<'a>>,
}

/// A sample's key head: what one thread does.
struct Unit<'a, T> {
    /// (length, packed)
    packed: &'a [T],
    sample: usize,
    kv: usize,
    /// Keys that are seen.
    keys: usize,
}

impl Attention<'_> {
    /// The reference.
    pub fn reference(&self, qkv: &Tensor) -> Result<Tensor> {
        let Sizes { length, heads, kv_heads, head } = self.sizes;
        let batch = qkv.dim(0)?;
        let part = |first: usize, heads: usize| {
            let part = qkv.narrow(2, first * head, heads * head)?.reshape((batch, length, heads, head))?;
            part.transpose(1, 2)?.contiguous()
        };
        let turned = |x: Tensor| self.rotary.map_or(Ok(x.clone()), |rotary| rotary.reference(&x));
        let shared = |x: Tensor| {
            let shape = (batch, kv_heads, heads / kv_heads, length, head);
            x.unsqueeze(2)?.broadcast_as(shape)?.contiguous()?.reshape((batch, heads, length, head))
        };
        let q = turned(part(0, heads)?)?;
        let k = shared(turned(part(heads, kv_heads)?)?)?;
        let v = shared(part(heads + kv_heads, kv_heads)?)?;
        let mask = (0..batch * length * length).map(|i| {
            let (sample, query, key) = (i / length / length, i / length % length, i % length);
            let seen = key < self.keys(sample) && (!self.causal || key <= query);
            if seen { 0.0 } else { f32::NEG_INFINITY }
        });
        let mask = Tensor::from_vec(mask.collect::<Vec<f32>>(), (batch, 1, length, length), qkv.device())?;
        let scores = (q.matmul(&k.t()?)? * (head as f64).powf(-0.5))?;
        let p = candle_nn::ops::softmax(&scores.broadcast_add(&mask.to_dtype(qkv.dtype())?)?, 3)?;
        let p = match &self.mask {
            Some(mask) => (p * mask.whole(&self.sizes, qkv)?)?,
            None => p,
        };
        p.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((batch, length, heads * head))
    }

    /// Keys of a sample that are seen.
    fn keys(&self, sample: usize) -> usize {
        self.lengths.map_or(self.sizes.length, |l| (l[sample] as usize).min(self.sizes.length))
    }

    /// Keys that the queries `first..first + rows` may see.
    fn seen(&self, keys: usize, first: usize, rows: usize) -> usize {
        if self.causal { keys.min(first + rows) } else { keys }
    }

    fn scale<R: Real>(&self) -> R {
        R::of((self.sizes.head as f64).powf(-0.5))
    }

    fn unit<'a, T>(&self, qkv: &'a [T], unit: usize) -> Unit<'a, T> {
        let (sample, kv) = (unit / self.sizes.kv_heads, unit % self.sizes.kv_heads);
        let len = self.sizes.length * self.sizes.packed();
        Unit { packed: &qkv[sample * len..][..len], sample, kv, keys: self.keys(sample) }
    }

    /// Query heads that share a key head.
    fn group(&self) -> usize {
        self.sizes.heads / self.sizes.kv_heads
    }

    /// First packed columns of a key head and of its values.
    fn columns(&self, kv: usize) -> (usize, usize) {
        let Sizes { heads, kv_heads, head, .. } = self.sizes;
        ((heads + kv) * head, (heads + kv_heads + kv) * head)
    }

    /// The output (batch, length, heads head), and the logarithm of each row's sum of exponentials
    /// (batch, heads, length).
    pub fn forward(&self, qkv: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, s) = (qkv.dim(0)?, &self.sizes);
        let (y_shape, sums_shape) = ((batch, s.length, s.width()), (batch, s.heads, s.length));
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(qkv) {
            return self.forward_card(device, &self.turned_card(device, qkv)?);
        }
        with_elem!(qkv.dtype(), T => {
            if !reference::has_body(qkv) {
                let dtype = <<T as Elem>::Acc as candle_core::WithDType>::DTYPE;
                return Ok((self.reference(qkv)?, Tensor::zeros(sums_shape, dtype, qkv.device())?));
            }
            let (y, sums) = self.forward_cpu::<T>(&cpu::view::<T>(qkv)?, batch);
            Ok((cpu::tensor(y, y_shape)?, cpu::tensor(sums, sums_shape)?))
        })
    }

    fn forward_cpu<T: Elem>(&self, qkv: &[T], batch: usize) -> (Vec<T>, Vec<T::Acc>) {
        let Sizes { length, heads, head, .. } = self.sizes;
        let mut y = cpu::fresh::<T>(batch * length * heads * head);
        let mut sums = vec![T::Acc::ZERO; batch * heads * length];
        let out = cpu::Blocks::new(&mut y);
        let units = sums.par_chunks_mut(self.group() * length).enumerate();
        units.for_each_init(
            || Buffers::<T::Acc>::new(FORWARD, &self.sizes),
            |work, (unit, sums)| {
                let unit = self.unit(qkv, unit);
                let (k_column, v_column) = self.columns(unit.kv);
                let [k, v] = work.sequences.each_mut_first();
                self.load(unit.packed, k_column, 0, T::Acc::ONE, true, k);
                self.load(unit.packed, v_column, 0, T::Acc::ONE, false, v);
                for (g, sums) in sums.chunks_exact_mut(length).enumerate() {
                    let column = (unit.kv * self.group() + g) * head;
                    for (first, sums) in (0..).step_by(TILE).zip(sums.chunks_mut(TILE)) {
                        self.forward_tile(&unit, column, first, work, sums);
                        let o = &work.tiles[1];
                        for (row, o) in o.chunks_exact(head).take(sums.len()).enumerate() {
                            let at = (unit.sample * length + first + row) * heads * head + column;
                            // SAFETY: this unit alone writes the columns of its heads.
                            let out = unsafe { out.get(at, head) };
                            out.iter_mut().zip(o).for_each(|(y, o)| *y = T::down(*o));
                        }
                    }
                }
            },
        );
        (y, sums)
    }

    /// The outputs of `sums.len()` queries from `first` into the second tile.
    fn forward_tile<T: Elem>(
        &self,
        unit: &Unit<T>,
        column: usize,
        first: usize,
        work: &mut Buffers<T::Acc>,
        sums: &mut [T::Acc],
    ) {
        let (head, n) = (self.sizes.head, sums.len());
        let (limit, zero) = (self.seen(unit.keys, first, n), T::Acc::ZERO);
        let Buffers { sequences, tiles, scores, rows } = work;
        let ([k, v], [q, o]) = (sequences.each_mut_first(), tiles.each_mut_first());
        let ([scores], [largest, total]) = (scores.each_mut_first(), rows.each_mut_first());
        self.load(unit.packed, column, first, self.scale(), true, &mut q[..n * head]);
        largest.fill(T::Acc::NEG_INFINITY);
        total.fill(zero);
        o.fill(zero);
        for from in (0..limit).step_by(KEYS) {
            let c = KEYS.min(limit - from);
            let (k, v) = (Mat::new(&k[from * head..], c, head), Mat::new(&v[from * head..], c, head));
            multiply::<T::Acc>(scores, KEYS, Mat::new(q, n, head), k.t(), false, By::Me);
            vectorised!(T::Acc, || {
                for (i, scores) in scores.chunks_exact_mut(KEYS).take(n).enumerate() {
                    let seen = c.min(self.seen(limit, first + i, 1).saturating_sub(from));
                    let (scores, hidden) = scores.split_at_mut(seen.next_multiple_of(LANES));
                    scores[seen..].fill(T::Acc::NEG_INFINITY);
                    hidden[..c.saturating_sub(scores.len())].fill(zero);
                    let now = lanes::max(scores).larger(largest[i]);
                    let shrink = (largest[i] - now).exp();
                    for lanes in scores.as_chunks_mut::<LANES>().0 {
                        lanes.iter_mut().for_each(|s| *s = (*s - now).exp());
                    }
                    total[i] = total[i] * shrink + lanes::sum([&*scores], |[s]| s);
                    if let Some(mask) = &self.mask {
                        let kept = &mut [zero; KEYS][..scores.len()];
                        mask.row(unit.sample, column / head, first + i, from, kept);
                        scores.iter_mut().zip(kept).for_each(|(s, kept)| *s *= *kept);
                    }
                    largest[i] = now;
                    o[i * head..][..head].iter_mut().for_each(|o| *o *= shrink);
                }
            });
            multiply::<T::Acc>(o, head, Mat::strided(scores, n, c, KEYS), v, true, By::Me);
        }
        vectorised!(T::Acc, || {
            for (i, sum) in sums.iter_mut().enumerate() {
                // A sample without a single key gives zeros.
                let total = if limit == 0 { T::Acc::ONE } else { total[i] };
                *sum = if limit == 0 { zero } else { largest[i] + total.ln() };
                let share = T::Acc::ONE / total;
                o[i * head..][..head].iter_mut().for_each(|o| *o *= share);
            }
        });
    }

    /// The input's gradient, from the input, the output and the sums of the forward pass.
    pub fn backward(&self, qkv: &Tensor, y: &Tensor, sums: &Tensor, dy: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(qkv) {
            let dx = self.backward_card(device, &self.turned_card(device, qkv)?, y, sums, dy)?;
            return self.turned_back_card(device, dx);
        }
        if !reference::has_body(qkv) {
            return Ok(reference::gradients(&[qkv], dy, |t| self.reference(&t[0]))?.remove(0));
        }
        with_elem!(qkv.dtype(), T => {
            let (x, sums) = (cpu::view::<T>(qkv)?, cpu::view::<<T as Elem>::Acc>(sums)?);
            let dx = self.backward_cpu::<T>(&x, &cpu::view::<T>(y)?, &sums, &cpu::view::<T>(dy)?);
            cpu::tensor(dx, qkv.shape())
        })
    }

    fn backward_cpu<T: Elem>(&self, qkv: &[T], y: &[T], sums: &[T::Acc], dy: &[T]) -> Vec<T> {
        let Sizes { length, heads, head, .. } = self.sizes;
        let width = heads * head;
        let mut dx = cpu::fresh::<T>(qkv.len());
        let out = cpu::Blocks::new(&mut dx);
        let units = sums.par_chunks(self.group() * length).enumerate();
        units.for_each_init(
            || Buffers::<T::Acc>::new(BACKWARD, &self.sizes),
            |work, (unit, sums)| {
                let unit = self.unit(qkv, unit);
                let (k_column, v_column) = self.columns(unit.kv);
                let [k, v, dk, dv] = work.sequences.each_mut_first();
                self.load(unit.packed, k_column, 0, T::Acc::ONE, true, k);
                self.load(unit.packed, v_column, 0, T::Acc::ONE, false, v);
                dk.fill(T::Acc::ZERO);
                dv.fill(T::Acc::ZERO);
                let of_sample = unit.sample * length * width..(unit.sample + 1) * length * width;
                let (y, dy) = (&y[of_sample.clone()], &dy[of_sample]);
                for (g, sums) in sums.chunks_exact(length).enumerate() {
                    let column = (unit.kv * self.group() + g) * head;
                    for (first, sums) in (0..).step_by(TILE).zip(sums.chunks(TILE)) {
                        self.backward_tile(&unit, column, first, y, dy, work, sums);
                        let dq = &work.tiles[2][..sums.len() * head];
                        // SAFETY: this unit alone writes the columns of its heads.
                        unsafe { self.store(&out, dq, unit.sample, column, first, self.scale(), true) };
                    }
                }
                let [_, _, dk, dv] = work.sequences.each_mut_first();
                // SAFETY: this unit alone writes the columns of its key head.
                unsafe {
                    self.store(&out, dk, unit.sample, k_column, 0, T::Acc::ONE, true);
                    self.store(&out, dv, unit.sample, v_column, 0, T::Acc::ONE, false);
                }
            },
        );
        dx
    }

    /// Adds what `sums.len()` queries from `first` give to the gradients of keys and values, and leaves
    /// their own in the third tile.
    #[allow(clippy::too_many_arguments)]
    fn backward_tile<T: Elem>(
        &self,
        unit: &Unit<T>,
        column: usize,
        first: usize,
        y: &[T],
        dy: &[T],
        work: &mut Buffers<T::Acc>,
        sums: &[T::Acc],
    ) {
        let (head, width, n) = (self.sizes.head, self.sizes.width(), sums.len());
        let limit = self.seen(unit.keys, first, n);
        let Buffers { sequences, tiles, scores, rows } = work;
        let ([k, v, dk, dv], [q, d, dq]) = (sequences.each_mut_first(), tiles.each_mut_first());
        let ([p, dp], [dots]) = (scores.each_mut_first(), rows.each_mut_first());
        self.load(unit.packed, column, first, self.scale(), true, &mut q[..n * head]);
        dq.fill(T::Acc::ZERO);
        vectorised!(T, || {
            for (i, d) in d.chunks_exact_mut(head).take(n).enumerate() {
                let at = (first + i) * width + column;
                let (y, dy) = (&y[at..][..head], &dy[at..][..head]);
                dots[i] = lanes::sum([y, dy], |[y, dy]| y * dy);
                d.iter_mut().zip(dy).for_each(|(d, dy)| *d = dy.up());
            }
        });
        let (q, d) = (Mat::new(q, n, head), Mat::new(d, n, head));
        for from in (0..limit).step_by(KEYS) {
            let c = KEYS.min(limit - from);
            let (k, v) = (Mat::new(&k[from * head..], c, head), Mat::new(&v[from * head..], c, head));
            multiply::<T::Acc>(p, KEYS, q, k.t(), false, By::Me);
            multiply::<T::Acc>(dp, KEYS, d, v.t(), false, By::Me);
            vectorised!(T::Acc, || {
                let mut kept = [[T::Acc::ONE; LANES]; KEYS / LANES];
                let rows = p.chunks_exact_mut(KEYS).zip(dp.chunks_exact_mut(KEYS)).take(n);
                for (i, (p, dp)) in rows.enumerate() {
                    let seen = c.min(self.seen(limit, first + i, 1).saturating_sub(from));
                    let (p, hidden) = p.split_at_mut(seen.next_multiple_of(LANES));
                    let (dp, hidden_too) = dp.split_at_mut(p.len());
                    p[seen..].fill(T::Acc::NEG_INFINITY);
                    dp[seen..].fill(T::Acc::ZERO);
                    let rest = c.saturating_sub(p.len());
                    hidden[..rest].fill(T::Acc::ZERO);
                    hidden_too[..rest].fill(T::Acc::ZERO);
                    if let Some(mask) = &self.mask {
                        let kept = &mut kept.as_flattened_mut()[..p.len()];
                        mask.row(unit.sample, column / head, first + i, from, kept);
                    }
                    let (p, dp) = (p.as_chunks_mut::<LANES>().0, dp.as_chunks_mut::<LANES>().0);
                    for ((p, dp), kept) in p.iter_mut().zip(dp).zip(&kept) {
                        for ((p, dp), kept) in p.iter_mut().zip(dp).zip(kept) {
                            let whole = (*p - sums[i]).exp();
                            *dp = whole * (*dp * *kept - dots[i]);
                            *p = whole * *kept;
                        }
                    }
                }
            });
            let (p, dp) = (Mat::strided(p, n, c, KEYS), Mat::strided(dp, n, c, KEYS));
            multiply::<T::Acc>(&mut dv[from * head..], head, p.t(), d, true, By::Me);
            multiply::<T::Acc>(&mut dk[from * head..], head, dp.t(), q, true, By::Me);
            multiply::<T::Acc>(dq, head, dp, k, true, By::Me);
        }
    }

    /// Rows of one head, from position `first`, scaled and turned where the model turns it.
    fn load<T: Elem>(
        &self,
        packed: &[T],
        column: usize,
        first: usize,
        scale: T::Acc,
        turn: bool,
        into: &mut [T::Acc],
    ) {
        let rotary = self.rotary.filter(|_| turn);
        vectorised!(T, || {
            for (i, into) in into.chunks_exact_mut(self.sizes.head).enumerate() {
                let from = &packed[(first + i) * self.sizes.packed() + column..][..into.len()];
                match rotary {
                    Some(rotary) => rotary.turn::<T, T::Acc>(from, into, first + i, scale, false),
                    None => into.iter_mut().zip(from).for_each(|(a, b)| *a = b.up() * scale),
                }
            }
        })
    }

    /// The way back of [`Attention::load`], for gradients.
    ///
    /// # Safety
    /// Nobody else writes these columns of the sample.
    #[allow(clippy::too_many_arguments)]
    unsafe fn store<T: Elem>(
        &self,
        out: &cpu::Blocks<T>,
        rows: &[T::Acc],
        sample: usize,
        column: usize,
        first: usize,
        scale: T::Acc,
        turn: bool,
    ) {
        let (head, rotary) = (self.sizes.head, self.rotary.filter(|_| turn));
        vectorised!(T, || {
            for (i, row) in rows.chunks_exact(head).enumerate() {
                let position = sample * self.sizes.length + first + i;
                // SAFETY: promised by the caller.
                let out = unsafe { out.get(position * self.sizes.packed() + column, head) };
                match rotary {
                    Some(rotary) => rotary.turn::<T::Acc, T>(row, out, first + i, scale, true),
                    None => out.iter_mut().zip(row).for_each(|(a, b)| *a = T::down(*b * scale)),
                }
            }
        })
    }
}

/// What a thread works with; see [`FORWARD`].
struct Buffers<R> {
    sequences: Vec<Vec<R>>,
    tiles: Vec<Vec<R>>,
    scores: Vec<Vec<R>>,
    rows: Vec<Vec<R>>,
}

impl<R: Real> Buffers<R> {
    fn new(counts: (usize, usize, usize, usize), sizes: &Sizes) -> Self {
        let of = |count: usize, len: usize| vec![vec![R::ZERO; len]; count];
        Self {
            sequences: of(counts.0, sizes.length * sizes.head),
            tiles: of(counts.1, TILE * sizes.head),
            scores: of(counts.2, TILE * KEYS),
            rows: of(counts.3, TILE),
        }
    }
}

trait EachMut<R> {
    /// The first `N` buffers, apart from each other.
    fn each_mut_first<const N: usize>(&mut self) -> [&mut [R]; N];
}

impl<R> EachMut<R> for Vec<Vec<R>> {
    fn each_mut_first<const N: usize>(&mut self) -> [&mut [R]; N] {
        match self.first_chunk_mut::<N>() {
            Some(buffers) => buffers.each_mut().map(|b| b.as_mut_slice()),
            None => unreachable!("FORWARD and BACKWARD count the buffers"),
        }
    }
}
