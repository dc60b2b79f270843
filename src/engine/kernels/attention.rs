//! Flash attention over packed projections: scores exist one tile at a time, and the (length, length) matrix is never
//! stored.
//!
//! The input is (batch, length, (heads + 2 kv_heads) head_dim): the queries of all heads, then the keys, then the
//! values, as GPT-2's fused projection lays them out. With fewer key heads than query heads (grouped-query attention),
//! each run of `heads / kv_heads` query heads shares one. A thread processes one key head of a sample with all its
//! query heads, so a single thread sums the gradients of shared keys in a fixed order.

mod decode;
mod dims;
mod dropout_mask;
#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

pub use decode::{CacheRows, DecodeKernel};
pub use dims::AttentionDims;
pub use dropout_mask::DropoutMask;

use super::matmul::{MatView, Threading, gemm};
use super::parallel::{ParallelChunks, ParallelItems};
use super::rotary::Rotary;
use super::{Elem, Real, cpu, lanes, reference};
use crate::{vectorised, with_elem};

/// Queries and keys of a tile: large enough for few, long GEMM calls, small enough that the scores stay in the L2
/// cache.
const QUERY_TILE: usize = 64;
const KEY_TILE: usize = 256;
/// SIMD width in which a row of scores is processed; the vectors past the last visible key are skipped.
const LANES: usize = lanes::LANES;

/// Buffers per thread, as counts of shapes (length, head_dim), (QUERY_TILE, head_dim), (QUERY_TILE, KEY_TILE) and
/// (QUERY_TILE).
const FORWARD_BUFFERS: (usize, usize, usize, usize) = (2, 2, 1, 2);
const BACKWARD_BUFFERS: (usize, usize, usize, usize) = (4, 3, 2, 1);

pub struct AttentionKernel<'a> {
    pub dims: AttentionDims,
    /// Each position attends to itself and to earlier positions only.
    pub causal: bool,
    pub rotary: Option<&'a Rotary>,
    /// Valid positions per sample, counted from the first; `None` means no padding.
    pub lengths: Option<&'a [u32]>,
    /// The sample info uploaded with the batch, in the layout of
    /// [`sample_keys::pack_sample_info`](super::sample_keys::pack_sample_info).
    pub sample_info: Option<&'a Tensor>,
    /// Dropout of attention weights, if any.
    pub dropout: Option<DropoutMask<'a>>,
}

/// The unit of work of a thread: one key head of one sample.
struct KvHeadTask<'a, T> {
    /// (length, qkv_width)
    qkv: &'a [T],
    sample: usize,
    kv_head: usize,
    /// Number of unpadded keys.
    key_count: usize,
}

impl AttentionKernel<'_> {
    /// The reference implementation, in candle operations.
    pub fn reference(&self, qkv: &Tensor) -> Result<Tensor> {
        let AttentionDims { length, heads, kv_heads, head_dim } = self.dims;
        let batch = qkv.dim(0)?;
        let split_heads = |first: usize, heads: usize| {
            let part = qkv
                .narrow(2, first * head_dim, heads * head_dim)?
                .reshape((batch, length, heads, head_dim))?;
            part.transpose(1, 2)?.contiguous()
        };
        let rotate = |x: Tensor| self.rotary.map_or(Ok(x.clone()), |rotary| rotary.reference(&x));
        let repeat_kv = |x: Tensor| {
            let shape = (batch, kv_heads, heads / kv_heads, length, head_dim);
            x.unsqueeze(2)?.broadcast_as(shape)?.contiguous()?.reshape((batch, heads, length, head_dim))
        };
        let q = rotate(split_heads(0, heads)?)?;
        let k = repeat_kv(rotate(split_heads(heads, kv_heads)?)?)?;
        let v = repeat_kv(split_heads(heads + kv_heads, kv_heads)?)?;
        let mask = (0..batch * length * length).map(|i| {
            let (sample, query, key) = (i / length / length, i / length % length, i % length);
            let visible = key < self.key_count(sample) && (!self.causal || key <= query);
            if visible { 0.0 } else { f32::NEG_INFINITY }
        });
        let mask = Tensor::from_vec(mask.collect::<Vec<f32>>(), (batch, 1, length, length), qkv.device())?;
        let scores = (q.matmul(&k.t()?)? * (head_dim as f64).powf(-0.5))?;
        let p = candle_nn::ops::softmax(&scores.broadcast_add(&mask.to_dtype(qkv.dtype())?)?, 3)?;
        let p = match &self.dropout {
            Some(mask) => (p * mask.to_tensor(&self.dims, qkv)?)?,
            None => p,
        };
        p.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((batch, length, heads * head_dim))
    }

    /// Number of unpadded keys of a sample.
    fn key_count(&self, sample: usize) -> usize {
        self.lengths.map_or(self.dims.length, |l| (l[sample] as usize).min(self.dims.length))
    }

    /// Number of keys that the queries `first..first + rows` may attend to.
    fn visible_keys(&self, keys: usize, first: usize, rows: usize) -> usize {
        if self.causal { keys.min(first + rows) } else { keys }
    }

    fn scale<R: Real>(&self) -> R {
        R::of_f64((self.dims.head_dim as f64).powf(-0.5))
    }

    fn task<'a, T>(&self, qkv: &'a [T], index: usize) -> KvHeadTask<'a, T> {
        let (sample, kv_head) = (index / self.dims.kv_heads, index % self.dims.kv_heads);
        let len = self.dims.length * self.dims.qkv_width();
        KvHeadTask { qkv: &qkv[sample * len..][..len], sample, kv_head, key_count: self.key_count(sample) }
    }

    /// Query heads per key head.
    fn group_size(&self) -> usize {
        self.dims.heads / self.dims.kv_heads
    }

    /// First column of a key head and of its values in a packed row.
    fn kv_columns(&self, kv: usize) -> (usize, usize) {
        let AttentionDims { heads, kv_heads, head_dim, .. } = self.dims;
        ((heads + kv) * head_dim, (heads + kv_heads + kv) * head_dim)
    }

    /// The output, (batch, length, heads head_dim), and the log-sum-exp of each row of scores, (batch, heads, length).
    pub fn forward(&self, qkv: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, s) = (qkv.dim(0)?, &self.dims);
        let (y_shape, logsumexp_shape) = ((batch, s.length, s.width()), (batch, s.heads, s.length));
        on_cuda!(qkv, |device| self.forward_cuda(device, &self.apply_rotary_cuda(device, qkv)?));
        with_elem!(qkv.dtype(), T => {
            if !reference::has_cpu_kernel(qkv) {
                let dtype = <<T as Elem>::Acc as candle_core::WithDType>::DTYPE;
                return Ok((self.reference(qkv)?, Tensor::zeros(logsumexp_shape, dtype, qkv.device())?));
            }
            let (y, sums) = self.forward_cpu::<T>(&cpu::view::<T>(qkv)?, batch);
            Ok((cpu::tensor(y, y_shape)?, cpu::tensor(sums, logsumexp_shape)?))
        })
    }

    fn forward_cpu<T: Elem>(&self, qkv: &[T], batch: usize) -> (Vec<T>, Vec<T::Acc>) {
        let AttentionDims { length, heads, head_dim, .. } = self.dims;
        let mut y = cpu::uninit::<T>(batch * length * heads * head_dim);
        let mut logsumexp = vec![T::Acc::ZERO; batch * heads * length];
        let out = cpu::DisjointSliceMut::new(&mut y);
        let tasks = logsumexp.par_chunks_mut(self.group_size() * length).enumerate();
        tasks.for_each_init(
            || AttentionBuffers::<T::Acc>::new(FORWARD_BUFFERS, &self.dims),
            |work, (index, logsumexp)| {
                let task = self.task(qkv, index);
                let (k_column, v_column) = self.kv_columns(task.kv_head);
                let [k, v] = work.sequences.each_mut_first();
                self.load(task.qkv, k_column, 0, T::Acc::ONE, true, k);
                self.load(task.qkv, v_column, 0, T::Acc::ONE, false, v);
                for (g, logsumexp) in logsumexp.chunks_exact_mut(length).enumerate() {
                    let column = (task.kv_head * self.group_size() + g) * head_dim;
                    for (first, logsumexp) in (0..).step_by(QUERY_TILE).zip(logsumexp.chunks_mut(QUERY_TILE))
                    {
                        self.forward_tile(&task, column, first, work, logsumexp);
                        let o = &work.tiles[1];
                        for (row, o) in o.chunks_exact(head_dim).take(logsumexp.len()).enumerate() {
                            let at = (task.sample * length + first + row) * heads * head_dim + column;
                            // SAFETY: only this task writes the columns of its heads.
                            let out = unsafe { out.range_mut(at, head_dim) };
                            out.iter_mut().zip(o).for_each(|(y, o)| *y = T::from_acc(*o));
                        }
                    }
                }
            },
        );
        (y, logsumexp)
    }

    /// Computes the outputs of the `logsumexp.len()` queries from `first` on, into the second tile.
    fn forward_tile<T: Elem>(
        &self,
        task: &KvHeadTask<T>,
        column: usize,
        first: usize,
        work: &mut AttentionBuffers<T::Acc>,
        logsumexp: &mut [T::Acc],
    ) {
        let (head_dim, n) = (self.dims.head_dim, logsumexp.len());
        let (limit, zero) = (self.visible_keys(task.key_count, first, n), T::Acc::ZERO);
        let AttentionBuffers { sequences, tiles, scores, rows } = work;
        let ([k, v], [q, o]) = (sequences.each_mut_first(), tiles.each_mut_first());
        let ([scores], [row_max, row_sum]) = (scores.each_mut_first(), rows.each_mut_first());
        self.load(task.qkv, column, first, self.scale(), true, &mut q[..n * head_dim]);
        row_max.fill(T::Acc::NEG_INFINITY);
        row_sum.fill(zero);
        o.fill(zero);
        for from in (0..limit).step_by(KEY_TILE) {
            let c = KEY_TILE.min(limit - from);
            let (k, v) = (
                MatView::new(&k[from * head_dim..], c, head_dim),
                MatView::new(&v[from * head_dim..], c, head_dim),
            );
            gemm::<T::Acc>(scores, KEY_TILE, MatView::new(q, n, head_dim), k.t(), false, Threading::Serial);
            vectorised!(T::Acc, || {
                for (i, scores) in scores.chunks_exact_mut(KEY_TILE).take(n).enumerate() {
                    let seen = c.min(self.visible_keys(limit, first + i, 1).saturating_sub(from));
                    let (scores, hidden) = scores.split_at_mut(seen.next_multiple_of(LANES));
                    scores[seen..].fill(T::Acc::NEG_INFINITY);
                    hidden[..c.saturating_sub(scores.len())].fill(zero);
                    let new_max = lanes::max(scores).larger(row_max[i]);
                    let rescale = (row_max[i] - new_max).exp();
                    for lanes in scores.as_chunks_mut::<LANES>().0 {
                        lanes.iter_mut().for_each(|s| *s = (*s - new_max).exp());
                    }
                    row_sum[i] = row_sum[i] * rescale + lanes::sum([&*scores], |[s]| s);
                    if let Some(mask) = &self.dropout {
                        let kept = &mut [zero; KEY_TILE][..scores.len()];
                        mask.fill_row(task.sample, column / head_dim, first + i, from, kept);
                        scores.iter_mut().zip(kept).for_each(|(s, kept)| *s *= *kept);
                    }
                    row_max[i] = new_max;
                    o[i * head_dim..][..head_dim].iter_mut().for_each(|o| *o *= rescale);
                }
            });
            gemm::<T::Acc>(o, head_dim, MatView::strided(scores, n, c, KEY_TILE), v, true, Threading::Serial);
        }
        vectorised!(T::Acc, || {
            for (i, sum) in logsumexp.iter_mut().enumerate() {
                // A sample with no valid key outputs zeros.
                let total = if limit == 0 { T::Acc::ONE } else { row_sum[i] };
                *sum = if limit == 0 { zero } else { row_max[i] + total.ln() };
                let inv_sum = T::Acc::ONE / total;
                o[i * head_dim..][..head_dim].iter_mut().for_each(|o| *o *= inv_sum);
            }
        });
    }

    /// The gradient of the input, from the input, the output and the log-sum-exp of the forward pass.
    pub fn backward(&self, qkv: &Tensor, y: &Tensor, logsumexp: &Tensor, dy: &Tensor) -> Result<Tensor> {
        on_cuda!(qkv, |device| {
            let dx = self.backward_cuda(device, &self.apply_rotary_cuda(device, qkv)?, y, logsumexp, dy)?;
            self.rotary_backward_cuda(device, dx)
        });
        with_elem!(qkv.dtype(), T => {
            let (x, sums) = (cpu::view::<T>(qkv)?, cpu::view::<<T as Elem>::Acc>(logsumexp)?);
            let dx = self.backward_cpu::<T>(&x, &cpu::view::<T>(y)?, &sums, &cpu::view::<T>(dy)?);
            cpu::tensor(dx, qkv.shape())
        })
    }

    fn backward_cpu<T: Elem>(&self, qkv: &[T], y: &[T], logsumexp: &[T::Acc], dy: &[T]) -> Vec<T> {
        let AttentionDims { length, heads, head_dim, .. } = self.dims;
        let width = heads * head_dim;
        let mut dx = cpu::uninit::<T>(qkv.len());
        let out = cpu::DisjointSliceMut::new(&mut dx);
        let tasks = logsumexp.par_chunks(self.group_size() * length).enumerate();
        tasks.for_each_init(
            || AttentionBuffers::<T::Acc>::new(BACKWARD_BUFFERS, &self.dims),
            |work, (index, logsumexp)| {
                let task = self.task(qkv, index);
                let (k_column, v_column) = self.kv_columns(task.kv_head);
                let [k, v, dk, dv] = work.sequences.each_mut_first();
                self.load(task.qkv, k_column, 0, T::Acc::ONE, true, k);
                self.load(task.qkv, v_column, 0, T::Acc::ONE, false, v);
                dk.fill(T::Acc::ZERO);
                dv.fill(T::Acc::ZERO);
                let of_sample = task.sample * length * width..(task.sample + 1) * length * width;
                let (y, dy) = (&y[of_sample.clone()], &dy[of_sample]);
                for (g, logsumexp) in logsumexp.chunks_exact(length).enumerate() {
                    let column = (task.kv_head * self.group_size() + g) * head_dim;
                    for (first, logsumexp) in (0..).step_by(QUERY_TILE).zip(logsumexp.chunks(QUERY_TILE)) {
                        self.backward_tile(&task, column, first, y, dy, work, logsumexp);
                        let dq = &work.tiles[2][..logsumexp.len() * head_dim];
                        // SAFETY: only this task writes the columns of its heads.
                        unsafe { self.store(&out, dq, task.sample, column, first, self.scale(), true) };
                    }
                }
                let [_, _, dk, dv] = work.sequences.each_mut_first();
                // SAFETY: only this task writes the columns of its key head.
                unsafe {
                    self.store(&out, dk, task.sample, k_column, 0, T::Acc::ONE, true);
                    self.store(&out, dv, task.sample, v_column, 0, T::Acc::ONE, false);
                }
            },
        );
        dx
    }

    /// Accumulates the key and value gradients of the `logsumexp.len()` queries from `first` on, and leaves the
    /// gradient of the queries in the third tile.
    #[allow(clippy::too_many_arguments)]
    fn backward_tile<T: Elem>(
        &self,
        task: &KvHeadTask<T>,
        column: usize,
        first: usize,
        y: &[T],
        dy: &[T],
        work: &mut AttentionBuffers<T::Acc>,
        logsumexp: &[T::Acc],
    ) {
        let (head_dim, width, n) = (self.dims.head_dim, self.dims.width(), logsumexp.len());
        let limit = self.visible_keys(task.key_count, first, n);
        let AttentionBuffers { sequences, tiles, scores, rows } = work;
        let ([k, v, dk, dv], [q, d, dq]) = (sequences.each_mut_first(), tiles.each_mut_first());
        let ([p, dp], [delta]) = (scores.each_mut_first(), rows.each_mut_first());
        self.load(task.qkv, column, first, self.scale(), true, &mut q[..n * head_dim]);
        dq.fill(T::Acc::ZERO);
        vectorised!(T, || {
            for (i, d) in d.chunks_exact_mut(head_dim).take(n).enumerate() {
                let at = (first + i) * width + column;
                let (y, dy) = (&y[at..][..head_dim], &dy[at..][..head_dim]);
                delta[i] = lanes::sum([y, dy], |[y, dy]| y * dy);
                d.iter_mut().zip(dy).for_each(|(d, dy)| *d = dy.to_acc());
            }
        });
        let (q, d) = (MatView::new(q, n, head_dim), MatView::new(d, n, head_dim));
        for from in (0..limit).step_by(KEY_TILE) {
            let c = KEY_TILE.min(limit - from);
            let (k, v) = (
                MatView::new(&k[from * head_dim..], c, head_dim),
                MatView::new(&v[from * head_dim..], c, head_dim),
            );
            gemm::<T::Acc>(p, KEY_TILE, q, k.t(), false, Threading::Serial);
            gemm::<T::Acc>(dp, KEY_TILE, d, v.t(), false, Threading::Serial);
            vectorised!(T::Acc, || {
                let mut kept = [[T::Acc::ONE; LANES]; KEY_TILE / LANES];
                let rows = p.chunks_exact_mut(KEY_TILE).zip(dp.chunks_exact_mut(KEY_TILE)).take(n);
                for (i, (p, dp)) in rows.enumerate() {
                    let seen = c.min(self.visible_keys(limit, first + i, 1).saturating_sub(from));
                    let (p, hidden) = p.split_at_mut(seen.next_multiple_of(LANES));
                    let (dp, hidden_too) = dp.split_at_mut(p.len());
                    p[seen..].fill(T::Acc::NEG_INFINITY);
                    dp[seen..].fill(T::Acc::ZERO);
                    let rest = c.saturating_sub(p.len());
                    hidden[..rest].fill(T::Acc::ZERO);
                    hidden_too[..rest].fill(T::Acc::ZERO);
                    if let Some(mask) = &self.dropout {
                        let kept = &mut kept.as_flattened_mut()[..p.len()];
                        mask.fill_row(task.sample, column / head_dim, first + i, from, kept);
                    }
                    let (p, dp) = (p.as_chunks_mut::<LANES>().0, dp.as_chunks_mut::<LANES>().0);
                    for ((p, dp), kept) in p.iter_mut().zip(dp).zip(&kept) {
                        for ((p, dp), kept) in p.iter_mut().zip(dp).zip(kept) {
                            let prob = (*p - logsumexp[i]).exp();
                            *dp = prob * (*dp * *kept - delta[i]);
                            *p = prob * *kept;
                        }
                    }
                }
            });
            let (p, dp) = (MatView::strided(p, n, c, KEY_TILE), MatView::strided(dp, n, c, KEY_TILE));
            gemm::<T::Acc>(&mut dv[from * head_dim..], head_dim, p.t(), d, true, Threading::Serial);
            gemm::<T::Acc>(&mut dk[from * head_dim..], head_dim, dp.t(), q, true, Threading::Serial);
            gemm::<T::Acc>(dq, head_dim, dp, k, true, Threading::Serial);
        }
    }

    /// Loads rows of one head from position `first` on, scaled, and rotated if `rotate` is set and the model uses RoPE.
    fn load<T: Elem>(
        &self,
        packed: &[T],
        column: usize,
        first: usize,
        scale: T::Acc,
        rotate: bool,
        into: &mut [T::Acc],
    ) {
        let rotary = self.rotary.filter(|_| rotate);
        vectorised!(T, || {
            for (i, into) in into.chunks_exact_mut(self.dims.head_dim).enumerate() {
                let from = &packed[(first + i) * self.dims.qkv_width() + column..][..into.len()];
                match rotary {
                    Some(rotary) => rotary.rotate::<T, T::Acc>(from, into, first + i, scale, false),
                    None => into.iter_mut().zip(from).for_each(|(a, b)| *a = b.to_acc() * scale),
                }
            }
        })
    }

    /// The transpose of [`AttentionKernel::load`]: writes gradients back, with the inverse rotation.
    ///
    /// # Safety The caller must be the only one that writes these columns of the sample.
    #[allow(clippy::too_many_arguments)]
    unsafe fn store<T: Elem>(
        &self,
        out: &cpu::DisjointSliceMut<T>,
        rows: &[T::Acc],
        sample: usize,
        column: usize,
        first: usize,
        scale: T::Acc,
        rotate: bool,
    ) {
        let (head_dim, rotary) = (self.dims.head_dim, self.rotary.filter(|_| rotate));
        vectorised!(T, || {
            for (i, row) in rows.chunks_exact(head_dim).enumerate() {
                let position = sample * self.dims.length + first + i;
                // SAFETY: the caller guarantees exclusive access to these columns.
                let out = unsafe { out.range_mut(position * self.dims.qkv_width() + column, head_dim) };
                match rotary {
                    Some(rotary) => rotary.rotate::<T::Acc, T>(row, out, first + i, scale, true),
                    None => out.iter_mut().zip(row).for_each(|(a, b)| *a = T::from_acc(*b * scale)),
                }
            }
        })
    }
}

/// The buffers of one thread; see [`FORWARD_BUFFERS`].
struct AttentionBuffers<R> {
    sequences: Vec<Vec<R>>,
    tiles: Vec<Vec<R>>,
    scores: Vec<Vec<R>>,
    rows: Vec<Vec<R>>,
}

impl<R: Real> AttentionBuffers<R> {
    fn new(counts: (usize, usize, usize, usize), sizes: &AttentionDims) -> Self {
        let of = |count: usize, len: usize| vec![vec![R::ZERO; len]; count];
        Self {
            sequences: of(counts.0, sizes.length * sizes.head_dim),
            tiles: of(counts.1, QUERY_TILE * sizes.head_dim),
            scores: of(counts.2, QUERY_TILE * KEY_TILE),
            rows: of(counts.3, QUERY_TILE),
        }
    }
}

trait EachMut<R> {
    /// The first `N` buffers as disjoint slices.
    fn each_mut_first<const N: usize>(&mut self) -> [&mut [R]; N];
}

impl<R> EachMut<R> for Vec<Vec<R>> {
    fn each_mut_first<const N: usize>(&mut self) -> [&mut [R]; N] {
        match self.first_chunk_mut::<N>() {
            Some(buffers) => buffers.each_mut().map(|b| b.as_mut_slice()),
            None => unreachable!("FORWARD_BUFFERS and BACKWARD_BUFFERS count the buffers"),
        }
    }
}
