//! Normalization of each row to unit mean square: layer norm (centred) and RMS norm.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::grid::GRID_SMS;
use super::linear::WeightBiasGrads;
use super::parallel::{ParallelChunks, ParallelItems};
use super::partial_sums::PartialSums;
use super::{Elem, Real, cpu, lanes, reference};
use crate::{vectorised, with_elem};

/// `y = w (x - mean) / sqrt(mean((x - mean)^2) + eps) + b` over the last dimension.
pub struct NormKernel<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    /// True for layer norm. If false, the mean counts as 0, which is RMS norm.
    pub centred: bool,
    pub eps: f64,
}

/// What a backward pass can fuse besides the gradients.
#[derive(Clone, Copy, Default)]
pub struct NormBackwardFusion<'a> {
    /// Gradient of the residual branch, added to the input's gradient.
    pub residual_grad: Option<&'a Tensor>,
    /// Accumulates the column sums of the input's gradient, for the bias of the layer below. GPU only.
    pub dx_column_sums: Option<&'a Tensor>,
    /// Overwrites the given gradient with the recomputed output, bit for bit. GPU only.
    pub recompute_output: bool,
}

/// Number of row ranges, one per block, whose parameter gradients a GPU sums separately: as many blocks as the SMs
/// of a GPU run at once. A block has four warps if a warp holds a whole row, otherwise one thread per 16 bytes of
/// a row.
pub fn cuda_row_ranges(dtype: DType, rows: usize, width: usize) -> usize {
    let bytes = width * dtype.size_in_bytes();
    let threads = bytes.div_ceil(16).next_multiple_of(32);
    let blocks = match bytes {
        ..=768 => 4,
        769..=1536 => 2,
        _ => (512 / threads).clamp(4, 8),
    };
    rows.div_ceil(8).clamp(1, GRID_SMS * blocks)
}

/// Bytes of these partial sums for `vectors` parameter vectors, plus the column sums of the input's gradient.
pub fn cuda_workspace(dtype: DType, rows: usize, width: usize, vectors: usize) -> u64 {
    (cuda_row_ranges(dtype, rows, width) * (vectors + 1) * width * cpu::acc_bytes(dtype)) as u64
}

impl NormKernel<'_> {
    /// The reference implementation, in candle operations.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let n = self.weight.elem_count() as f64;
        let last = x.rank() - 1;
        let x = match self.centred {
            true => x.broadcast_sub(&(x.sum_keepdim(last)? / n)?)?,
            false => x.clone(),
        };
        let root = ((x.sqr()?.sum_keepdim(last)? / n)? + self.eps)?.sqrt()?;
        let y = x.broadcast_div(&root)?.broadcast_mul(self.weight)?;
        match self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// Saved values per row: the reciprocal of its root mean square, preceded by its mean if centred.
    fn stats_per_row(&self) -> usize {
        1 + self.centred as usize
    }

    /// The output, and the saved statistics of each row.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        on_cuda!(x, |device| self.forward_cuda(device, x));
        with_elem!(x.dtype(), T => {
            let shape = (x.elem_count() / self.weight.elem_count(), self.stats_per_row());
            if !reference::has_cpu_kernel(x) {
                let stats = Tensor::zeros(shape, <<T as Elem>::Acc as candle_core::WithDType>::DTYPE, x.device())?;
                return Ok((self.reference(x)?, stats));
            }
            let (y, stats) = self.forward_cpu::<T>(x)?;
            Ok((cpu::tensor(y, x.shape())?, cpu::tensor(stats, shape)?))
        })
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<(Vec<T>, Vec<T::Acc>)> {
        let (x, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let (n, stats_per_row) = (weight.len(), self.stats_per_row());
        let (inv_n, eps) = (T::Acc::of_f64(1.0 / n as f64), T::Acc::of_f64(self.eps));
        let mut y = cpu::uninit::<T>(x.len());
        let mut stats = vec![T::Acc::ZERO; x.len() / n * stats_per_row];
        let rows = cpu::rows_per_chunk(n);
        let chunks = x.par_chunks(rows * n).zip(y.par_chunks_mut(rows * n));
        chunks.zip(stats.par_chunks_mut(rows * stats_per_row)).for_each(|((x, y), stats)| {
            vectorised!(T, || {
                for ((x, y), stats) in
                    x.chunks_exact(n).zip(y.chunks_exact_mut(n)).zip(stats.chunks_exact_mut(stats_per_row))
                {
                    let mean = if self.centred { lanes::sum([x], |[x]| x) * inv_n } else { T::Acc::ZERO };
                    let square = lanes::sum([x], |[x]| (x - mean) * (x - mean)) * inv_n;
                    let scale = T::Acc::ONE / (square + eps).sqrt();
                    (stats[0], stats[stats_per_row - 1]) = (mean, scale);
                    match &bias {
                        Some(bias) => {
                            y.iter_mut().zip(x).zip(&*weight).zip(&**bias).for_each(|(((y, x), w), b)| {
                                *y = T::from_acc((x.to_acc() - mean) * scale * w.to_acc() + b.to_acc())
                            })
                        }
                        None => y.iter_mut().zip(x).zip(&*weight).for_each(|((y, x), w)| {
                            *y = T::from_acc((x.to_acc() - mean) * scale * w.to_acc())
                        }),
                    }
                }
            })
        });
        Ok((y, stats))
    }

    /// Recomputes the output, bit for bit, on a GPU; `None` elsewhere. There a pass over the input costs less than
    /// keeping the output in memory.
    pub fn recompute_output(&self, _x: &Tensor, _stats: &Tensor) -> Result<Option<Tensor>> {
        on_cuda!(_x, |device| self.output_cuda(device, _x, _stats, true).map(Some));
        Ok(None)
    }

    /// Accumulates the parameter gradients into `grads` and returns the input's gradient if it is needed. `stats` is
    /// what `forward` saved.
    pub fn backward(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
        fusion: NormBackwardFusion,
    ) -> Result<Option<Tensor>> {
        on_cuda!(x, |device| self.backward_cuda(device, (x, stats, dy), grads, needs_input_grad, fusion));
        if fusion.recompute_output || fusion.dx_column_sums.is_some() {
            candle_core::bail!("norm: fused backward outputs are supported on CUDA only")
        }
        with_elem!(x.dtype(), T => {
            let dx = self.backward_cpu::<T>(x, stats, dy, grads, needs_input_grad, fusion.residual_grad)?;
            needs_input_grad.then(|| cpu::tensor(dx, x.shape())).transpose()
        })
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
        residual_grad: Option<&Tensor>,
    ) -> Result<Vec<T>> {
        let residual_grad = residual_grad.map(cpu::view::<T>).transpose()?;
        let (x, dy, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(dy)?, cpu::view::<T>(self.weight)?);
        let stats = cpu::view::<T::Acc>(stats)?;
        let (n, stats_per_row) = (weight.len(), self.stats_per_row());
        let mut dx = cpu::uninit::<T>(if needs_input_grad { x.len() } else { 0 });
        let all = cpu::DisjointSliceMut::new(&mut dx);
        let num_weights = if grads.weight.is_some() { n } else { 0 };
        let num_biases = if grads.bias.is_some() { n } else { 0 };
        let sums = PartialSums::of_rows(x.len() / n, n, num_weights + num_biases, &|_, rows, sums| {
            let values = rows.start * n..rows.end * n;
            // SAFETY: the ranges of rows do not overlap.
            let dx = unsafe { all.range_mut(values.start, values.len()) };
            let (dw, db) = sums.split_at_mut(num_weights);
            vectorised!(T, || {
                for r in 0..rows.len() {
                    let at = (rows.start + r) * n..(rows.start + r + 1) * n;
                    let (x, dy): (&[T], &[T]) = (&x[at.clone()], &dy[at.clone()]);
                    let stats = &stats[(rows.start + r) * stats_per_row..][..stats_per_row];
                    let mean = if self.centred { stats[0] } else { T::Acc::ZERO };
                    let scale = stats[stats_per_row - 1];
                    if needs_input_grad {
                        let dx = &mut dx[r * n..][..n];
                        self.row_gradient::<T>(x, dy, &weight, mean, scale, dx);
                        if let Some(residual_grad) = &residual_grad {
                            dx.iter_mut()
                                .zip(&residual_grad[at])
                                .for_each(|(dx, r)| *dx = T::from_acc(dx.to_acc() + r.to_acc()));
                        }
                    }
                    dw.iter_mut()
                        .zip(x)
                        .zip(dy)
                        .for_each(|((dw, x), dy)| *dw += dy.to_acc() * (x.to_acc() - mean) * scale);
                    db.iter_mut().zip(dy).for_each(|(db, dy)| *db += dy.to_acc());
                }
            });
        });
        for (into, first) in [(grads.weight, 0), (grads.bias, num_weights)] {
            let Some(into) = into else { continue };
            cpu::with_slice_mut::<T::Acc, _>(into, |into| sums.add_to(into, first))?;
        }
        Ok(dx)
    }

    #[inline(always)]
    fn row_gradient<T: Elem>(&self, x: &[T], dy: &[T], w: &[T], mean: T::Acc, scale: T::Acc, dx: &mut [T]) {
        let inv_n = T::Acc::of_f64(1.0 / x.len() as f64);
        let dot_xhat = lanes::sum([x, dy, w], |[x, dy, w]| dy * w * (x - mean)) * scale * scale * inv_n;
        let mean_dy = match self.centred {
            true => lanes::sum([dy, w], |[dy, w]| dy * w) * inv_n,
            false => T::Acc::ZERO,
        };
        for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(w) {
            *dx = T::from_acc(scale * (dy.to_acc() * w.to_acc() - mean_dy - (x.to_acc() - mean) * dot_xhat));
        }
    }
}
