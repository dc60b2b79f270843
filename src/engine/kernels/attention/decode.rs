//! Attention of new positions over cached keys and values: what generation runs instead of
//! [`AttentionKernel`](super::AttentionKernel).
//!
//! The input is packed like that kernel's. Keys, rotated, and values of the new positions are appended to the cache,
//! (slots, kv_heads, capacity, head_dim) each, in place; then every new position attends to all positions of its
//! sequence up to itself. Sequences differ in length: a row of the input has its own slot, its own first position, and
//! its own number of new positions, after which it is padding.
//!
//! A thread takes one key head of a row with all its query heads. A few queries read the cache as it is stored; many
//! (a prompt) run as GEMMs over tiles of keys in the accumulator type.

#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

use super::{AttentionDims, KEY_TILE, LANES, QUERY_TILE};
use crate::kernels::matmul::{MatView, Threading, add_weighted, dot_rows, gemm};
use crate::kernels::rotary::Rotary;
use crate::kernels::{Elem, Real, cpu, lanes, reference};
use crate::{vectorised, with_elem};

/// Queries of one key head up to which the cache is read directly. More are worth converting a tile of it.
const STREAMED_QUERIES: usize = 8;

/// Cached rows that are read at once.
const ROWS_AT_ONCE: usize = 4;

/// Where each row of the input is in the cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheRows<'a> {
    /// The slot of the sequence. No slot occurs twice.
    pub slots: &'a [usize],
    /// Cached positions of the sequence before this pass: the position of its first new token.
    pub starts: &'a [usize],
    /// New positions; the rest of the row is padding.
    pub counts: &'a [usize],
}

pub struct DecodeKernel<'a> {
    /// `length` is the number of new positions in each row of the input, with padding.
    pub dims: AttentionDims,
    pub rotary: Option<&'a Rotary>,
    pub rows: CacheRows<'a>,
}

/// One key head of one row.
struct DecodeTask<'a, T> {
    /// (length, qkv_width)
    qkv: &'a [T],
    kv_head: usize,
    start: usize,
    count: usize,
}

/// The buffers of one thread.
struct DecodeBuffers<R> {
    /// Queries and outputs, (group, count, head_dim).
    q: Vec<R>,
    o: Vec<R>,
    /// Largest score and sum of exponentials of each query.
    row_max: Vec<R>,
    row_sum: Vec<R>,
    /// (QUERY_TILE, KEY_TILE)
    scores: Vec<R>,
    /// A tile of keys and of values, (KEY_TILE, head_dim), if they are converted.
    k: Vec<R>,
    v: Vec<R>,
}

impl DecodeKernel<'_> {
    /// The output, (rows, length, heads head_dim); zeros where the input is padding. Appends to `keys` and `values`.
    pub fn forward(&self, qkv: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
        let (batch, capacity) = (qkv.dim(0)?, self.check(qkv, keys, values)?);
        if !reference::has_cpu_kernel(qkv) {
            return self.reference(qkv, keys, values);
        }
        with_elem!(qkv.dtype(), T => {
            let x = cpu::view::<T>(qkv)?;
            let mut y = cpu::zeros::<T>(batch * self.dims.length * self.dims.width());
            cpu::with_slice_mut::<T, _>(keys, |keys| {
                cpu::with_slice_mut::<T, _>(values, |values| {
                    self.forward_cpu(&x, keys, values, capacity, &mut y)
                })
            })??;
            cpu::tensor(y, (batch, self.dims.length, self.dims.width()))
        })
    }

    /// Checks that the rows are in the cache; returns its positions per slot.
    fn check(&self, qkv: &Tensor, keys: &Tensor, values: &Tensor) -> Result<usize> {
        let (AttentionDims { length, kv_heads, head_dim, .. }, rows) = (self.dims, &self.rows);
        let (batch, width) = (rows.slots.len(), self.dims.qkv_width());
        if qkv.dims() != [batch, length, width] || [rows.starts.len(), rows.counts.len()] != [batch; 2] {
            bail!("decode: {:?} for {batch} rows of {length} positions, {width} values each", qkv.dims())
        }
        let (slots, cached_heads, capacity, cached_dim) = keys.dims4()?;
        if (cached_heads, cached_dim) != (kv_heads, head_dim) || values.dims() != keys.dims() {
            bail!("decode: a cache of {:?} for {kv_heads} heads of {head_dim} values", keys.dims())
        }
        let mut taken = vec![false; slots];
        for ((&slot, start), count) in rows.slots.iter().zip(rows.starts).zip(rows.counts) {
            if slot >= slots || std::mem::replace(&mut taken[slot], true) {
                bail!("decode: slot {slot} of {slots} does not exist or occurs twice")
            }
            if *count > length || start + count > capacity {
                bail!("decode: {count} of {length} new positions after {start}, in a cache of {capacity}")
            }
        }
        Ok(capacity)
    }

    /// The reference implementation, in candle operations on views of the cache. It appends too. Half types are
    /// computed in f32, as by the kernels.
    pub fn reference(&self, qkv: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
        let AttentionDims { length, heads, kv_heads, head_dim } = self.dims;
        let group = heads / kv_heads;
        let dtype = qkv.dtype();
        let acc = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut outputs = Vec::with_capacity(self.rows.slots.len());
        for (row, &slot) in self.rows.slots.iter().enumerate() {
            let (start, count) = (self.rows.starts[row], self.rows.counts[row]);
            let total = start + count;
            if count == 0 {
                outputs.push(Tensor::zeros((1, length, heads * head_dim), qkv.dtype(), qkv.device())?);
                continue;
            }
            // (1, heads, count, head_dim)
            let split_heads = |first: usize, heads: usize| {
                let part = qkv.narrow(0, row, 1)?.narrow(1, 0, count)?;
                let part = part.narrow(2, first * head_dim, heads * head_dim)?.contiguous()?;
                part.reshape((1, count, heads, head_dim))?.transpose(1, 2)?.contiguous()
            };
            let rotate = |x: Tensor| {
                let x = x.to_dtype(acc)?;
                self.rotary.map_or(Ok(x.clone()), |rotary| rotary.reference_from(&x, start))
            };
            let append = |cache: &Tensor, new: Tensor| {
                let cache = cache.narrow(0, slot, 1)?;
                cache.slice_set(&new.to_dtype(dtype)?.contiguous()?, 2, start)?;
                cache.squeeze(0)?.narrow(1, 0, total)?.to_dtype(acc)
            };
            let q = rotate(split_heads(0, heads)?)?.reshape((kv_heads, group * count, head_dim))?;
            let k = append(keys, rotate(split_heads(heads, kv_heads)?)?)?;
            let v = append(values, split_heads(heads + kv_heads, kv_heads)?)?;
            let scores = (q.matmul(&k.t()?)? * (head_dim as f64).powf(-0.5))?;
            let scores = scores.reshape((kv_heads, group, count, total))?;
            let scores = match count {
                // A single position sees everything: no mask to upload.
                1 => scores,
                _ => scores.broadcast_add(&causal_mask(start, count, &scores)?)?,
            };
            let p = candle_nn::ops::softmax(&scores, 3)?.reshape((kv_heads, group * count, total))?;
            let y = p.matmul(&v)?.reshape((heads, count, head_dim))?.transpose(0, 1)?.contiguous()?;
            let y = y.reshape((1, count, heads * head_dim))?.to_dtype(dtype)?;
            outputs.push(y.pad_with_zeros(1, 0, length - count)?);
        }
        Tensor::cat(&outputs, 0)
    }

    fn forward_cpu<T: Elem>(
        &self,
        qkv: &[T],
        keys: &mut [T],
        values: &mut [T],
        capacity: usize,
        y: &mut [T],
    ) {
        let AttentionDims { length, heads, kv_heads, head_dim } = self.dims;
        let [keys, values, y] = [keys, values, y].map(cpu::DisjointSliceMut::new);
        let of_sample = length * self.dims.qkv_width();
        let most = self.rows.counts.iter().copied().max().unwrap_or(0);
        (0..self.rows.slots.len() * kv_heads).into_par_iter().for_each_init(
            || DecodeBuffers::<T::Acc>::new(&self.dims, most),
            |work, index| {
                let (row, kv_head) = (index / kv_heads, index % kv_heads);
                let (start, count) = (self.rows.starts[row], self.rows.counts[row]);
                let qkv = &qkv[row * of_sample..][..of_sample];
                let at = (self.rows.slots[row] * kv_heads + kv_head) * capacity * head_dim;
                // SAFETY: slots are distinct, so no other task has this key head of this slot.
                let (keys, values) = unsafe {
                    (
                        keys.range_mut(at, (start + count) * head_dim),
                        values.range_mut(at, (start + count) * head_dim),
                    )
                };
                let task = DecodeTask { qkv, kv_head, start, count };
                self.append(&task, keys, values);
                self.attend(&task, keys, values, work);
                let group = heads / kv_heads;
                for (i, o) in work.o.chunks_exact(head_dim).take(group * count).enumerate() {
                    let (g, position) = (i / count, i % count);
                    let column = (kv_head * group + g) * head_dim;
                    // SAFETY: only this task writes the columns of its heads.
                    let y = unsafe {
                        y.range_mut((row * length + position) * heads * head_dim + column, head_dim)
                    };
                    vectorised!(T, || y.iter_mut().zip(o).for_each(|(y, o)| *y = T::from_acc(*o)));
                }
            },
        );
    }

    /// Appends the keys and values of the new positions.
    fn append<T: Elem>(&self, task: &DecodeTask<T>, keys: &mut [T], values: &mut [T]) {
        let AttentionDims { heads, kv_heads, head_dim, .. } = self.dims;
        let (k_column, v_column) =
            ((heads + task.kv_head) * head_dim, (heads + kv_heads + task.kv_head) * head_dim);
        let new = |cache: usize| (task.start + cache) * head_dim..(task.start + cache + 1) * head_dim;
        for (i, row) in task.qkv.chunks_exact(self.dims.qkv_width()).enumerate().take(task.count) {
            let (k, v) = (&row[k_column..][..head_dim], &row[v_column..][..head_dim]);
            match self.rotary {
                Some(rotary) => vectorised!(T, || rotary.rotate::<T, T>(
                    k,
                    &mut keys[new(i)],
                    task.start + i,
                    T::Acc::ONE,
                    false
                )),
                None => keys[new(i)].copy_from_slice(k),
            }
            values[new(i)].copy_from_slice(v);
        }
    }

    /// Computes the outputs of all query heads of the task into `work.o`, (group, count, head_dim).
    fn attend<T: Elem>(
        &self,
        task: &DecodeTask<T>,
        keys: &[T],
        values: &[T],
        work: &mut DecodeBuffers<T::Acc>,
    ) {
        let (head_dim, group) = (self.dims.head_dim, self.dims.heads / self.dims.kv_heads);
        let (queries, total, zero) = (group * task.count, task.start + task.count, T::Acc::ZERO);
        let streamed = queries <= STREAMED_QUERIES;
        self.load_queries(task, &mut work.q);
        let DecodeBuffers { q, o, row_max, row_sum, scores, k, v } = work;
        o[..queries * head_dim].fill(zero);
        row_max[..queries].fill(T::Acc::NEG_INFINITY);
        row_sum[..queries].fill(zero);
        for from in (0..total).step_by(KEY_TILE) {
            let c = KEY_TILE.min(total - from);
            let (keys, values) = (&keys[from * head_dim..][..c * head_dim], &values[from * head_dim..]);
            let values = &values[..c * head_dim];
            if !streamed {
                vectorised!(T, || {
                    k.iter_mut().zip(keys).for_each(|(k, key)| *k = key.to_acc());
                    v.iter_mut().zip(values).for_each(|(v, value)| *v = value.to_acc());
                });
            }
            for first in (0..queries).step_by(QUERY_TILE) {
                let n = QUERY_TILE.min(queries - first);
                let q = &q[first * head_dim..][..n * head_dim];
                let o = &mut o[first * head_dim..][..n * head_dim];
                if streamed {
                    stream_scores(keys, head_dim, q, scores);
                } else {
                    let (q, k) = (MatView::new(q, n, head_dim), MatView::new(k, c, head_dim));
                    gemm::<T::Acc>(scores, KEY_TILE, q, k.t(), false, Threading::Serial);
                }
                vectorised!(T::Acc, || {
                    for (i, scores) in scores.chunks_exact_mut(KEY_TILE).take(n).enumerate() {
                        let query = first + i;
                        // Positions up to the query's own.
                        let visible = task.start + query % task.count + 1;
                        let seen = c.min(visible.saturating_sub(from));
                        let (scores, hidden) = scores.split_at_mut(seen.next_multiple_of(LANES));
                        scores[seen..].fill(T::Acc::NEG_INFINITY);
                        hidden[..c.saturating_sub(scores.len())].fill(zero);
                        let new_max = lanes::max(scores).larger(row_max[query]);
                        let rescale = (row_max[query] - new_max).exp();
                        for lanes in scores.as_chunks_mut::<LANES>().0 {
                            lanes.iter_mut().for_each(|s| *s = (*s - new_max).exp());
                        }
                        row_sum[query] = row_sum[query] * rescale + lanes::sum([&*scores], |[s]| s);
                        row_max[query] = new_max;
                        o[i * head_dim..][..head_dim].iter_mut().for_each(|o| *o *= rescale);
                    }
                });
                if streamed {
                    stream_values(values, head_dim, scores, o);
                } else {
                    let p = MatView::strided(scores, n, c, KEY_TILE);
                    let v = MatView::new(v, c, head_dim);
                    gemm::<T::Acc>(o, head_dim, p, v, true, Threading::Serial);
                }
            }
        }
        vectorised!(T::Acc, || {
            for (o, sum) in o.chunks_exact_mut(head_dim).zip(row_sum.iter()).take(queries) {
                let inv_sum = T::Acc::ONE / *sum;
                o.iter_mut().for_each(|o| *o *= inv_sum);
            }
        });
    }

    /// Loads the queries of the task, rotated and scaled, (group, count, head_dim).
    fn load_queries<T: Elem>(&self, task: &DecodeTask<T>, into: &mut [T::Acc]) {
        let (head_dim, group) = (self.dims.head_dim, self.dims.heads / self.dims.kv_heads);
        let scale = T::Acc::of_f64((head_dim as f64).powf(-0.5));
        vectorised!(T, || {
            for (i, into) in into.chunks_exact_mut(head_dim).take(group * task.count).enumerate() {
                let (g, position) = (i / task.count, i % task.count);
                let column = (task.kv_head * group + g) * head_dim;
                let from = &task.qkv[position * self.dims.qkv_width() + column..][..head_dim];
                match self.rotary {
                    Some(rotary) => {
                        rotary.rotate::<T, T::Acc>(from, into, task.start + position, scale, false)
                    }
                    None => into.iter_mut().zip(from).for_each(|(a, b)| *a = b.to_acc() * scale),
                }
            }
        })
    }

    /// Workspace in bytes on the CPU.
    pub fn workspace(dims: &AttentionDims, dtype: DType, batch: usize, threads: usize) -> u64 {
        let values = DecodeBuffers::<f32>::lens(dims, dims.length).iter().sum::<usize>();
        (threads.min(batch * dims.kv_heads) * cpu::acc_bytes(dtype) * values) as u64
    }

    /// Workspace in bytes of the reference implementation over at most `capacity` cached positions: the scores of one
    /// row, and what masking and softmax make of them; copies of the input and the output.
    pub fn reference_workspace(dims: &AttentionDims, dtype: DType, batch: usize, capacity: usize) -> u64 {
        let acc = cpu::acc_bytes(dtype);
        let scores = acc * dims.heads * dims.length * capacity;
        let mask = acc * dims.length * capacity;
        // Keys and values as accumulators. Candle's GEMM may copy an operand whose strides it does not take.
        let cached = 2 * acc * 2 * dims.kv_heads * capacity * dims.head_dim;
        let copies = acc * dims.length * (4 * dims.qkv_width() + 2 * batch * dims.width());
        (6 * scores + 2 * mask + cached + copies) as u64
    }
}

/// 0 where one of `count` positions from `start` on may attend, negative infinity elsewhere: (count, start + count).
fn causal_mask(start: usize, count: usize, like: &Tensor) -> Result<Tensor> {
    let total = start + count;
    let visible = |i: usize| i % total <= start + i / total;
    let mask = (0..count * total).map(|i| if visible(i) { 0.0 } else { f32::NEG_INFINITY });
    Tensor::from_vec(mask.collect::<Vec<f32>>(), (count, total), like.device())?.to_dtype(like.dtype())
}

/// The scores of a few queries: `scores[i][j] = q[i] . keys[j]`, rows of `KEY_TILE`.
fn stream_scores<T: Elem>(keys: &[T], head_dim: usize, q: &[T::Acc], scores: &mut [T::Acc]) {
    vectorised!(T, || {
        for (j, keys) in keys.chunks(ROWS_AT_ONCE * head_dim).enumerate() {
            let (count, at) = (keys.len() / head_dim, j * ROWS_AT_ONCE);
            let rows: [&[T]; ROWS_AT_ONCE] =
                std::array::from_fn(|r| &keys[r.min(count - 1) * head_dim..][..head_dim]);
            for (q, scores) in q.chunks_exact(head_dim).zip(scores.chunks_exact_mut(KEY_TILE)) {
                scores[at..at + count].copy_from_slice(&dot_rows(rows, q)[..count]);
            }
        }
    })
}

/// `o[i] += sum_j scores[i][j] values[j]` for a few queries.
fn stream_values<T: Elem>(values: &[T], head_dim: usize, scores: &[T::Acc], o: &mut [T::Acc]) {
    vectorised!(T, || {
        for (j, values) in values.chunks(ROWS_AT_ONCE * head_dim).enumerate() {
            let (count, at) = (values.len() / head_dim, j * ROWS_AT_ONCE);
            let rows: [&[T]; ROWS_AT_ONCE] =
                std::array::from_fn(|r| &values[r.min(count - 1) * head_dim..][..head_dim]);
            for (o, scores) in o.chunks_exact_mut(head_dim).zip(scores.chunks_exact(KEY_TILE)) {
                let weights = std::array::from_fn(|r| if r < count { scores[at + r] } else { T::Acc::ZERO });
                add_weighted(o, rows, weights);
            }
        }
    })
}

impl<R: Real> DecodeBuffers<R> {
    /// Lengths of the buffers, in order, for rows of up to `count` new positions.
    fn lens(dims: &AttentionDims, count: usize) -> [usize; 7] {
        let queries = dims.heads / dims.kv_heads * count;
        let tile = if queries <= STREAMED_QUERIES { 0 } else { KEY_TILE * dims.head_dim };
        let outputs = queries * dims.head_dim;
        [outputs, outputs, queries, queries, queries.min(QUERY_TILE) * KEY_TILE, tile, tile]
    }

    fn new(dims: &AttentionDims, count: usize) -> Self {
        let [q, o, row_max, row_sum, scores, k, v] = Self::lens(dims, count).map(|len| vec![R::ZERO; len]);
        Self { q, o, row_max, row_sum, scores, k, v }
    }
}
