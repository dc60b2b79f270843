//! Adafactor (Shazeer and Stern, 2018): the second moment of a matrix is factored into one mean per row and one per
//! column. Step sizes are relative to the RMS of the weights. Matches `torch.optim.Adafactor`, except that a
//! convolution filter is treated as one matrix (outputs, everything else) instead of many small ones.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::linear::bias_gradient_workspace;
use super::parallel::{ParallelChunks, ParallelItems};
use super::partial_sums::{PartialSums, num_parts};
use super::update::{CHUNK, UpdateArgs, clear, sync_compute_weights};
use super::{Elem, Real, cpu, reference};
use crate::params::FlatLayout;
use crate::{vectorised, with_elem};

#[derive(Clone, Copy, Debug)]
pub struct AdafactorKernel {
    /// Exponent of the second moment's decay, `1 - beta2 = step^decay`; negative.
    pub decay: f64,
    /// Lower bound of the weights' RMS, which scales the step.
    pub eps: f64,
    /// RMS to which an update is clipped.
    pub clip: f64,
    /// Number of updates, including this one.
    pub step: u64,
}

/// Lower bound of the second moment, `torch.finfo(torch.float32).eps`.
const MIN_SECOND_MOMENT: f64 = 1.192_092_895_507_812_5e-7;

/// A parameter in the flat buffer, and its state in the state buffer. A vector has one column, and its state is its
/// full second moment. The state of a matrix is one value per row, then one value per column.
#[derive(Clone, Copy, Debug)]
struct FactoredParam {
    start: usize,
    rows: usize,
    cols: usize,
    state_offset: usize,
    /// Weight decay applies to it.
    is_decayed: bool,
    /// Those of its group.
    lr_scale: f64,
    weight_decay: Option<f64>,
}

impl FactoredParam {
    /// The rate and the weight decay of this parameter.
    fn lr_and_decay(&self, c: &UpdateArgs) -> (f64, f64) {
        let decay = self.weight_decay.unwrap_or(c.weight_decay);
        (c.lr * self.lr_scale, if self.is_decayed { decay } else { 0.0 })
    }

    fn len(&self) -> usize {
        self.rows * self.cols
    }

    fn is_matrix(&self) -> bool {
        self.cols > 1
    }

    fn state_len(&self) -> usize {
        if self.is_matrix() { self.rows + self.cols } else { self.rows }
    }

    /// Rows per chunk of a thread.
    fn chunk(&self) -> usize {
        (CHUNK / self.cols).max(1)
    }
}

fn factored_params(params: &FlatLayout) -> Vec<FactoredParam> {
    let mut state_offset = 0;
    let part = |(spec, range): (&crate::params::TensorSpec, std::ops::Range<usize>)| {
        let rows = if spec.shape.len() < 2 { range.len() } else { spec.shape[0] };
        let group = params.groups.iter().find(|group| group.range.contains(&range.start));
        let part = FactoredParam {
            start: range.start,
            rows,
            cols: range.len() / rows.max(1),
            state_offset,
            is_decayed: spec.shape.len() >= 2,
            lr_scale: group.map_or(1.0, |group| group.lr_scale),
            weight_decay: group.and_then(|group| group.weight_decay),
        };
        state_offset += part.state_len();
        part
    };
    params.trained().map(part).collect()
}

/// Number of state values, in the dtype of the master weights.
pub fn state_len(params: &FlatLayout) -> usize {
    factored_params(params).iter().map(FactoredParam::state_len).sum()
}

/// Values of the largest workspace that an update needs: column sums per part of the rows.
pub fn workspace_len(params: &FlatLayout) -> usize {
    factored_params(params).iter().map(|p| num_parts(p.rows, p.cols) * p.cols).max().unwrap_or(0)
}

/// GPU blocks that reduce over a parameter.
const CUDA_BLOCKS: usize = 528;

/// Bytes of the partial column sums on a GPU.
fn cuda_column_bytes(params: &FlatLayout, dtype: DType) -> u64 {
    factored_params(params).iter().map(|p| bias_gradient_workspace(dtype, p.rows, p.cols)).max().unwrap_or(0)
}

/// Bytes of the partial sums per block on a GPU, and of the three reduced values.
const CUDA_SUMS_BYTES: u64 = (CUDA_BLOCKS as u64 + 3) * size_of::<f64>() as u64;

/// Workspace in bytes of an update on a GPU, with weights of this dtype.
pub fn cuda_workspace(params: &FlatLayout, dtype: DType) -> u64 {
    cuda_column_bytes(params, dtype) + CUDA_SUMS_BYTES
}

impl AdafactorKernel {
    /// Applies decoupled weight decay, then the step, parameter by parameter; clears the gradients. `state` is flat,
    /// [`state_len`] long, and zero before the first update.
    pub fn apply(
        &self,
        c: &UpdateArgs,
        params: &FlatLayout,
        weights: &Tensor,
        grads: &Tensor,
        state: &Tensor,
        compute_weights: Option<&Tensor>,
    ) -> Result<()> {
        on_cuda!(weights, |device| {
            self.apply_cuda(device, c, params, (weights, grads, state))?;
            sync_compute_weights(weights, compute_weights)
        });
        match reference::has_cpu_kernel(weights) {
            false => self.reference(c, params, weights, grads, state)?,
            true => with_elem!(weights.dtype(), T => self.apply_cpu::<T>(c, params, weights, grads, state)?),
        }
        sync_compute_weights(weights, compute_weights)
    }

    fn apply_cpu<T: Elem>(
        &self,
        c: &UpdateArgs,
        params: &FlatLayout,
        weights: &Tensor,
        grads: &Tensor,
        state: &Tensor,
    ) -> Result<()> {
        cpu::with_slice_mut::<T, _>(weights, |w| {
            cpu::with_slice_mut::<T, _>(grads, |g| {
                cpu::with_slice_mut::<T, _>(state, |s| {
                    for part in factored_params(params) {
                        let range = part.start..part.start + part.len();
                        let state = &mut s[part.state_offset..][..part.state_len()];
                        self.step_param(c, &part, &mut w[range.clone()], &mut g[range], state);
                    }
                })
            })
        })???;
        Ok(())
    }

    fn step_param<T: Elem>(
        &self,
        c: &UpdateArgs,
        p: &FactoredParam,
        w: &mut [T],
        g: &mut [T],
        state: &mut [T],
    ) {
        let one_minus_beta2 = (self.step as f64).powf(self.decay);
        let size = (p.chunk() * p.cols).max(1);
        let squares = |values: &[T]| -> f64 {
            let sum = |v: &[T]| {
                vectorised!(T, || v.iter().map(|v| v.to_acc() * v.to_acc()).sum::<T::Acc>().as_f64())
            };
            values.par_chunks(size).map_collect(sum).into_iter().sum()
        };
        let (lr, weight_decay) = p.lr_and_decay(c);
        let decay_factor = 1.0 - lr * weight_decay;
        let rms = (squares(w) / p.len() as f64).sqrt();
        self.update_second_moment(c, p, g, state, one_minus_beta2);

        // The divisor of the gradient: the product of a row and a column factor, or for a vector the moment itself.
        let (rows, columns) = state.split_at(p.rows);
        let mean = rows.iter().map(|r| r.to_acc().as_f64()).sum::<f64>() / p.rows as f64;
        let inv_mean = 1.0 / mean.max(MIN_SECOND_MOMENT);
        let root = |row: T, column: T::Acc| {
            let v = row.to_acc() * column;
            let least = T::Acc::of_f64(MIN_SECOND_MOMENT * MIN_SECOND_MOMENT);
            T::Acc::ONE / v.larger(least).sqrt()
        };
        let column =
            |j: usize| columns.get(j).map_or(T::Acc::ONE, |v| T::Acc::of_f64(v.to_acc().as_f64() * inv_mean));
        let columns: Vec<T::Acc> = (0..p.cols).map(column).collect();
        let gs = T::Acc::of_f64(c.grad_scale);
        let sum_of = |(g, rows): (&[T], &[T])| {
            vectorised!(T, || {
                let mut sum = T::Acc::ZERO;
                for (g, row) in g.chunks_exact(p.cols).zip(rows) {
                    for (g, column) in g.iter().zip(&columns) {
                        let u = g.to_acc() * gs * root(*row, *column);
                        sum += u * u;
                    }
                }
                sum.as_f64()
            })
        };
        let sums: Vec<f64> = g.par_chunks(size).zip(rows.par_chunks(p.chunk())).map_collect(sum_of);
        let update_rms = (sums.iter().sum::<f64>() / p.len() as f64).sqrt();
        let rho = lr.min(1.0 / (self.step as f64).sqrt());
        let alpha = T::Acc::of_f64(rho * rms.max(self.eps) / (update_rms / self.clip).max(1.0));
        let decay_factor = T::Acc::of_f64(decay_factor);
        let chunks = w.par_chunks_mut(size).zip(g.par_chunks_mut(size)).zip(rows.par_chunks(p.chunk()));
        chunks.for_each(|((w, g), rows)| {
            vectorised!(T, || {
                for ((w, g), row) in w.chunks_exact_mut(p.cols).zip(g.chunks_exact_mut(p.cols)).zip(rows) {
                    for ((w, g), column) in w.iter_mut().zip(g).zip(&columns) {
                        let u = g.to_acc() * gs * root(*row, *column);
                        *w = T::from_acc(w.to_acc() * decay_factor - alpha * u);
                        *g = T::default();
                    }
                }
            })
        });
    }

    /// Updates the second moment: an exponential moving average that weights the new value by `one_minus_beta2`.
    fn update_second_moment<T: Elem>(
        &self,
        c: &UpdateArgs,
        p: &FactoredParam,
        g: &[T],
        state: &mut [T],
        one_minus_beta2: f64,
    ) {
        let gs = T::Acc::of_f64(c.grad_scale);
        let mix = |s: &mut T, found: f64| {
            *s = T::from_acc(T::Acc::of_f64(
                (1.0 - one_minus_beta2) * s.to_acc().as_f64() + one_minus_beta2 * found,
            ))
        };
        let (rows, columns) = state.split_at_mut(p.rows);
        let rows = cpu::DisjointSliceMut::new(rows);
        let sums = PartialSums::<T::Acc>::of_rows(p.rows, p.cols, columns.len(), &|_, part, sums| {
            // SAFETY: the ranges of rows do not overlap.
            let rows = unsafe { rows.range_mut(part.start, part.len()) };
            vectorised!(T, || {
                for (g, row) in g[part.start * p.cols..].chunks_exact(p.cols).zip(rows) {
                    let squares = |g: &T| (g.to_acc() * gs) * (g.to_acc() * gs);
                    sums.iter_mut().zip(g).for_each(|(s, g)| *s += squares(g));
                    let sum = g.iter().map(squares).sum::<T::Acc>();
                    mix(row, sum.as_f64() / p.cols as f64);
                }
            });
        });
        for (j, column) in columns.iter_mut().enumerate() {
            mix(column, sums.parts().map(|s: &[T::Acc]| s[j].as_f64()).sum::<f64>() / p.rows as f64);
        }
    }

    fn reference(
        &self,
        c: &UpdateArgs,
        params: &FlatLayout,
        weights: &Tensor,
        grads: &Tensor,
        state: &Tensor,
    ) -> Result<()> {
        let one_minus_beta2 = (self.step as f64).powf(self.decay);
        let mix =
            |old: &Tensor, found: &Tensor| (old * (1.0 - one_minus_beta2))? + (found * one_minus_beta2)?;
        let rms = |t: &Tensor| t.to_dtype(DType::F64)?.sqr()?.mean_all()?.to_scalar::<f64>().map(f64::sqrt);
        for p in factored_params(params) {
            let w = weights.narrow(0, p.start, p.len())?.reshape((p.rows, p.cols))?;
            let g = (grads.narrow(0, p.start, p.len())?.reshape((p.rows, p.cols))? * c.grad_scale)?;
            let param_rms = rms(&w)?;
            let (lr, weight_decay) = p.lr_and_decay(c);
            let w = if weight_decay > 0.0 { (w * (1.0 - lr * weight_decay))? } else { w };
            let rows = mix(&state.narrow(0, p.state_offset, p.rows)?, &g.sqr()?.mean(1)?)?;
            state.slice_set(&rows, 0, p.state_offset)?;
            let mut v = rows.reshape((p.rows, 1))?;
            if p.is_matrix() {
                let columns = mix(&state.narrow(0, p.state_offset + p.rows, p.cols)?, &g.sqr()?.mean(0)?)?;
                state.slice_set(&columns, 0, p.state_offset + p.rows)?;
                let mean = rows.to_dtype(DType::F64)?.mean_all()?.to_scalar::<f64>()?;
                v = v.broadcast_mul(&(columns.reshape((1, p.cols))? / mean.max(MIN_SECOND_MOMENT))?)?;
            }
            let u = (g / v.maximum(MIN_SECOND_MOMENT * MIN_SECOND_MOMENT)?.sqrt()?)?;
            let rho = lr.min(1.0 / (self.step as f64).sqrt());
            let alpha = rho * param_rms.max(self.eps) / (rms(&u)? / self.clip).max(1.0);
            weights.slice_set(&(w - (u * alpha)?)?.flatten_all()?, 0, p.start)?;
        }
        clear(grads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::gradcheck::{random_tensor, relative_error, test_device, to_f64_vec};
    use crate::param_store::ParamStore;
    use crate::params::{ParamInit, ParamRegistry};

    fn store(dtype: DType, shapes: &[(&str, &[usize])]) -> ParamStore {
        let mut declared = ParamRegistry::default();
        for (name, shape) in shapes {
            declared.param(*name, shape.to_vec(), ParamInit::Normal(0.5));
        }
        ParamStore::new(declared.into_layout().unwrap(), 3, dtype, &test_device()).unwrap()
    }

    /// ```python
    /// import torch, math
    /// w = torch.nn.Parameter(torch.tensor([[.1, -.2, .3], [-.4, .5, -.6]]))
    /// b = torch.nn.Parameter(torch.tensor([.7, -.8]))
    /// opt = torch.optim.Adafactor([{"params": [w]}, {"params": [b], "weight_decay": 0.}], lr=.05, weight_decay=.1)
    /// for s in range(1, 11):
    ///     g = torch.tensor([math.sin(3 * i + s) for i in range(8)])
    ///     w.grad, b.grad = g[:6].reshape(2, 3), g[6:]
    ///     opt.step()
    /// print([round(x, 6) for x in w.flatten().tolist() + b.tolist()])
    /// ```
    #[test]
    fn ten_updates_equal_pytorchs() {
        for dtype in [DType::F32, DType::F64] {
            let store = store(dtype, &[("w", &[2, 3]), ("x", &[2])]);
            let set = |t: &Tensor, v: Vec<f64>| {
                super::super::update::cast_into(&Tensor::new(v, &test_device()).unwrap(), t).unwrap()
            };
            set(&store.master_weights, vec![0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]);
            let params = &store.layout.params;
            assert_eq!(state_len(params), 2 + 3 + 2);
            let state =
                Tensor::zeros(state_len(params), store.master_weights.dtype(), &test_device()).unwrap();
            let c = UpdateArgs {
                lr: 0.05,
                grad_scale: 0.5,
                device_grad_scale: None,
                weight_decay: 0.1,
                decayed_len: params.trained_len,
            };
            for step in 1..=10u64 {
                set(&store.grads, (0..8).map(|i| 2.0 * ((3 * i + step) as f64).sin()).collect());
                let rule = AdafactorKernel { decay: -0.8, eps: 1e-3, clip: 1.0, step };
                rule.apply(&c, params, &store.master_weights, &store.grads, &state, None).unwrap();
            }
            let far = relative_error(&to_f64_vec(&store.master_weights), &PYTORCH);
            assert!(far < 2e-6, "{far}: {:?}", to_f64_vec(&store.master_weights));
        }
    }

    const PYTORCH: [f64; 8] =
        [0.066259, -0.154738, 0.243122, -0.332139, 0.424783, -0.518772, 0.583409, -0.677011];

    #[test]
    fn the_body_follows_the_reference() {
        let shapes: &[(&str, &[usize])] = &[("a", &[300, 170]), ("b", &[7, 3, 3, 5]), ("c", &[40_000])];
        let (ours, plain) = (store(DType::F32, shapes), store(DType::F64, shapes));
        let params = &ours.layout.params;
        let zeros = |dtype| Tensor::zeros(state_len(params), dtype, &test_device()).unwrap();
        let (s, t) = (zeros(DType::F32), zeros(DType::F64));
        let c = UpdateArgs {
            lr: 0.05,
            grad_scale: 0.5,
            device_grad_scale: None,
            weight_decay: 0.1,
            decayed_len: params.trained_len,
        };
        for step in 1..=4 {
            let g = random_tensor(&[params.len], 90 + step);
            super::super::update::cast_into(&g, &ours.grads).unwrap();
            super::super::update::cast_into(&g, &plain.grads).unwrap();
            let rule = AdafactorKernel { decay: -0.8, eps: 1e-3, clip: 1.0, step };
            rule.apply(&c, params, &ours.master_weights, &ours.grads, &s, None).unwrap();
            rule.reference(&c, params, &plain.master_weights, &plain.grads, &t).unwrap();
        }
        assert!(relative_error(&to_f64_vec(&ours.master_weights), &to_f64_vec(&plain.master_weights)) < 1e-5);
        assert!(to_f64_vec(&ours.grads).iter().all(|g| *g == 0.0), "gradients are cleared");
    }
}
