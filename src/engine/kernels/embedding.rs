//! Embedding lookup, and the accumulation of gradients into the tables.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

use super::linear::{self, column_sums, column_sums_bytes};
use super::{Elem, cpu, reference};
use crate::{vectorised, with_elem};

/// `y[b, t] = tokens[ids[b, t]] + positions[starts[b] + t] + token_types[0]`
pub struct EmbeddingKernel<'a> {
    /// (vocabulary, width)
    pub tokens: &'a Tensor,
    /// (context, width); the context is at least the sequence length.
    pub positions: Option<&'a Tensor>,
    /// (token types, width): every token has type 0.
    pub token_types: Option<&'a Tensor>,
    /// The position of each row's first token; 0 if absent. Rows are padded at the end: padding beyond the last
    /// position has that position.
    pub starts: Option<&'a [usize]>,
}

/// The gradients to accumulate into, in the shapes of [`EmbeddingKernel`]; `None` for a frozen table.
pub struct EmbeddingGrads<'a> {
    pub tokens: Option<&'a Tensor>,
    pub positions: Option<&'a Tensor>,
    pub token_types: Option<&'a Tensor>,
}

impl EmbeddingKernel<'_> {
    /// The reference implementation; `ids` is (batch, length).
    pub fn reference(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, length) = ids.dims2()?;
        let width = self.tokens.dim(1)?;
        let y = self.tokens.index_select(&ids.flatten_all()?, 0)?.reshape((batch, length, width))?;
        let y = match (self.positions, self.starts) {
            (Some(positions), None) => y.broadcast_add(&positions.narrow(0, 0, length)?)?,
            (Some(positions), Some(_)) => (y + self.position_rows(positions, batch, length)?)?,
            (None, _) => y,
        };
        match self.token_types {
            Some(token_types) => y.broadcast_add(&token_types.narrow(0, 0, 1)?),
            None => Ok(y),
        }
    }

    /// The position of token `t` of row `b`, in a table of `context` positions.
    fn position(&self, b: usize, t: usize, context: usize) -> usize {
        let start = self.starts.and_then(|starts| starts.get(b)).copied().unwrap_or(0);
        (start + t).min(context.saturating_sub(1))
    }

    /// The rows of `positions` for every token, (batch, length, width).
    fn position_rows(&self, positions: &Tensor, batch: usize, length: usize) -> Result<Tensor> {
        let (context, width) = positions.dims2()?;
        let at = (0..batch * length).map(|i| self.position(i / length, i % length, context) as u32);
        let at = Tensor::from_vec(at.collect::<Vec<u32>>(), batch * length, positions.device())?;
        positions.index_select(&at, 0)?.reshape((batch, length, width))
    }

    /// (batch, length, width)
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        if let (Some(positions), Some(_), false) = (self.positions, self.starts, ids.device().is_cpu()) {
            // The CUDA kernel has one row of positions for all samples.
            let (batch, length) = ids.dims2()?;
            let y = Self { positions: None, starts: None, ..*self }.forward(ids)?;
            return y + self.position_rows(positions, batch, length)?;
        }
        on_cuda!(ids, |device| self.forward_cuda(device, ids));
        if !reference::has_cpu_kernel(ids) {
            return self.reference(ids);
        }
        with_elem!(self.tokens.dtype(), T => self.forward_cpu::<T>(ids))
    }

    fn forward_cpu<T: Elem>(&self, ids: &Tensor) -> Result<Tensor> {
        let ((batch, length), (vocab, n)) = (ids.dims2()?, self.tokens.dims2()?);
        let (ids, tokens) = (cpu::view::<u32>(ids)?, cpu::view::<T>(self.tokens)?);
        if let Some(id) = ids.par_iter().find_first(|&&id| id as usize >= vocab) {
            bail!("token {id} is not in the vocabulary, which has {vocab}")
        }
        let context = self.positions.map_or(Ok(0), |positions| positions.dim(0))?;
        let positions = self.positions.map(cpu::view::<T>).transpose()?;
        let token_types = self.token_types.map(cpu::view::<T>).transpose()?;
        let mut y = cpu::uninit::<T>(ids.len() * n);
        let add = |y: &mut [T], row: &[T]| {
            vectorised!(T, || y
                .iter_mut()
                .zip(row)
                .for_each(|(y, r)| *y = T::from_acc(y.to_acc() + r.to_acc())))
        };
        cpu::parallel_for_rows(&mut y, n, |first, y| {
            for (i, y) in y.chunks_exact_mut(n).enumerate().map(|(i, y)| (first + i, y)) {
                y.copy_from_slice(&tokens[ids[i] as usize * n..][..n]);
                if let Some(positions) = &positions {
                    add(y, &positions[self.position(i / length, i % length, context) * n..][..n]);
                }
                if let Some(token_types) = &token_types {
                    add(y, &token_types[..n]);
                }
            }
        });
        cpu::tensor(y, (batch, length, n))
    }

    /// Accumulates the gradients of the tables into `grads`.
    pub fn backward(&self, ids: &Tensor, dy: &Tensor, grads: &EmbeddingGrads) -> Result<()> {
        on_cuda!(ids, |device| self.backward_cuda(device, ids, dy, grads));
        with_elem!(dy.dtype(), T => self.backward_cpu::<T>(ids, dy, grads))
    }

    fn backward_cpu<T: Elem>(&self, ids: &Tensor, dy: &Tensor, grads: &EmbeddingGrads) -> Result<()> {
        let ((_, length), (vocab, n)) = (ids.dims2()?, self.tokens.dims2()?);
        let (ids, dy) = (cpu::view::<u32>(ids)?, cpu::view::<T>(dy)?);
        let row_of = |i: usize| &dy[i * n..][..n];
        let add = |into: &mut [T::Acc], row: &[T]| {
            vectorised!(T, || into.iter_mut().zip(row).for_each(|(a, d)| *a += d.to_acc()))
        };
        if let Some(tokens) = grads.tokens {
            // Sorted by token, then by position: each owner of a range of the table finds its rows together and adds
            // them in the same order, however the table is split among threads.
            let mut sort_keys: Vec<u64> =
                ids.iter().enumerate().map(|(i, &id)| (id as u64) << 32 | i as u64).collect();
            sort_keys.par_sort_unstable();
            let rows = vocab.div_ceil(64).max(1);
            cpu::with_slice_mut::<T::Acc, _>(tokens, |table| {
                cpu::parallel_for_chunks(table, rows * n, |chunk, table| {
                    let first = chunk * rows;
                    let from = sort_keys.partition_point(|p| ((p >> 32) as usize) < first);
                    let own = sort_keys[from..].iter().take_while(|p| ((*p >> 32) as usize) < first + rows);
                    for sort_key in own {
                        let row = (sort_key >> 32) as usize - first;
                        add(&mut table[row * n..][..n], row_of(*sort_key as u32 as usize));
                    }
                })
            })?;
        }
        if let Some(positions) = grads.positions {
            cpu::with_slice_mut::<T::Acc, _>(positions, |table| {
                cpu::parallel_for_chunks(&mut table[..length * n], n, |t, into| {
                    (t..ids.len()).step_by(length).for_each(|i| add(into, row_of(i)));
                })
            })?;
        }
        if let Some(token_types) = grads.token_types {
            let sums = column_sums(&dy, n);
            cpu::with_slice_mut::<T::Acc, _>(token_types, |token_types| {
                sums.add_to(&mut token_types[..n], 0)
            })?;
        }
        Ok(())
    }
}

/// Workspace in bytes of the backward pass over `rows` tokens, which computes these gradients.
pub fn workspace(
    dtype: DType,
    rows: usize,
    width: usize,
    (token_grad, token_type_grad): (bool, bool),
) -> u64 {
    let sort_keys = if token_grad { (rows * size_of::<u64>()) as u64 } else { 0 };
    sort_keys + if token_type_grad { column_sums_bytes(dtype, rows, width) } else { 0 }
}

/// Sorted rows per GPU block: `SEGMENT_LEN` in embedding.cu.
const SEGMENT_LEN: usize = 32;

/// Bytes of the buffer in which a GPU sorts the rows of `rows` tokens.
fn cuda_sort_bytes(rows: usize, vocab: usize) -> u64 {
    ((2 * vocab + 1 + rows) * size_of::<u32>()) as u64
}

/// Bytes of the partial sums of runs that cross a segment boundary.
fn cuda_boundary_bytes(dtype: DType, rows: usize, width: usize) -> u64 {
    (rows.div_ceil(SEGMENT_LEN) * 2 * width * cpu::acc_bytes(dtype)) as u64
}

/// Workspace in bytes of the backward pass over `rows` tokens on a GPU.
pub fn cuda_workspace(
    dtype: DType,
    rows: usize,
    (vocab, width): (usize, usize),
    (token_grad, token_type_grad): (bool, bool),
) -> u64 {
    let tokens = cuda_sort_bytes(rows, vocab) + cuda_boundary_bytes(dtype, rows, width);
    let token_types = linear::bias_gradient_workspace(dtype, rows, width);
    [(token_grad, tokens), (token_type_grad, token_types)]
        .into_iter()
        .filter(|(computed, _)| *computed)
        .map(|(_, bytes)| bytes)
        .max()
        .unwrap_or(0)
}
