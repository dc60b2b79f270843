//! Optimizer updates over flat buffers, in place and in one pass that also clears the gradients. `compute_weights` is a
//! copy of the weights in the dtype of the kernels, if that differs; each update refreshes it.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::{Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// Values per chunk of a thread.
pub(super) const CHUNK: usize = 32 * 1024;

/// The arguments that every update takes besides its buffers.
#[derive(Clone, Copy, Debug)]
pub struct UpdateArgs<'a> {
    pub lr: f64,
    /// Factor of the gradients: 1 / samples, clipping and loss scale combined.
    pub grad_scale: f64,
    /// The same factor on the device, as one f64, used instead of `grad_scale`. If it is NaN, the update clears the
    /// gradients and changes nothing else. Only the rules that
    /// [`reads_device_grad_scale`](crate::optim::reads_device_grad_scale) names read it.
    pub device_grad_scale: Option<&'a Tensor>,
    pub weight_decay: f64,
    /// Weight decay applies to the first `decayed_len` values.
    pub decayed_len: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct AdamWKernel {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Number of updates, including this one.
    pub step: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct SgdKernel {
    pub momentum: f64,
    pub nesterov: bool,
    /// Whether this is the first update, which initializes the momentum to the gradient.
    pub first: bool,
}

impl AdamWKernel {
    /// The bias-corrected step size, and the divisor of the second moment's root.
    pub(super) fn bias_corrections(&self, lr: f64) -> (f64, f64) {
        let t = self.step as i32;
        (lr / (1.0 - self.beta1.powi(t)), (1.0 - self.beta2.powi(t)).sqrt())
    }

    /// Decoupled weight decay, then Adam. `m` and `v` are its first and second moments.
    pub fn apply(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        (m, v): (&Tensor, &Tensor),
        compute_weights: Option<&Tensor>,
    ) -> Result<()> {
        on_cuda!(weights, |device| self.apply_cuda(
            device,
            c,
            &gpu::UpdateBuffers::new(c, weights, grads, [Some(m), Some(v)], compute_weights)?,
        ));
        if !reference::has_cpu_kernel(weights) {
            self.reference(c, weights, grads, m, v)?;
            return sync_compute_weights(weights, compute_weights);
        }
        with_elem!(weights.dtype(), T => with_copy(compute_weights, |copy| {
            self.apply_cpu::<T>(c, weights, grads, m, v, copy)
        }))
    }

    fn apply_cpu<T: Elem>(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        m: &Tensor,
        v: &Tensor,
        copy: CopyWeights<T>,
    ) -> Result<()> {
        let (step, root) = self.bias_corrections(c.lr);
        let of = |x: f64| <T::Acc as Real>::of_f64(x);
        let (b1, b2, eps, step, inv_root, gs) =
            (of(self.beta1), of(self.beta2), of(self.eps), of(step), of(1.0 / root), of(c.grad_scale));
        let (a1, a2) = (of(1.0 - self.beta1), of(1.0 - self.beta2));
        cpu::with_slice_mut::<T, _>(weights, |w| {
            cpu::with_slice_mut::<T, _>(grads, |g| {
                cpu::with_slice_mut::<T, _>(m, |m| {
                    cpu::with_slice_mut::<T, _>(v, |v| {
                        let chunks = w
                            .par_chunks_mut(CHUNK)
                            .zip(g.par_chunks_mut(CHUNK))
                            .zip(m.par_chunks_mut(CHUNK))
                            .zip(v.par_chunks_mut(CHUNK));
                        chunks.enumerate().for_each(|(i, (((w, g), m), v))| {
                            apply_weight_decay(w, i * CHUNK, c);
                            vectorised!(T, || {
                                for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                                    let d = g.to_acc() * gs;
                                    let first = b1 * m.to_acc() + a1 * d;
                                    let second = b2 * v.to_acc() + a2 * d * d;
                                    *w = T::from_acc(
                                        w.to_acc() - step * first / (second.sqrt() * inv_root + eps),
                                    );
                                    (*m, *v, *g) = (T::from_acc(first), T::from_acc(second), T::default());
                                }
                            });
                            copy(i * CHUNK, w);
                        })
                    })
                })
            })
        })????;
        Ok(())
    }

    fn reference(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        m: &Tensor,
        v: &Tensor,
    ) -> Result<()> {
        let (step, root) = self.bias_corrections(c.lr);
        let g = (grads * c.grad_scale)?;
        let first = ((m * self.beta1)? + (&g * (1.0 - self.beta1))?)?;
        let second = ((v * self.beta2)? + (g.sqr()? * (1.0 - self.beta2))?)?;
        let direction = (&first / ((second.sqrt()? / root)? + self.eps)?)?;
        let updated = (weight_decay_reference(weights, c)? - (direction * step)?)?;
        for (into, value) in [(weights, &updated), (m, &first), (v, &second), (grads, &grads.zeros_like()?)] {
            into.slice_set(value, 0, 0)?;
        }
        Ok(())
    }
}

impl SgdKernel {
    /// SGD with weight decay as part of the gradient, as in PyTorch. `momentum` is `None` if it is 0.
    pub fn apply(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        momentum: Option<&Tensor>,
        compute_weights: Option<&Tensor>,
    ) -> Result<()> {
        on_cuda!(weights, |device| self.apply_cuda(
            device,
            &gpu::UpdateBuffers::new(c, weights, grads, [momentum, None], compute_weights)?,
        ));
        if !reference::has_cpu_kernel(weights) {
            self.reference(c, weights, grads, momentum)?;
            return sync_compute_weights(weights, compute_weights);
        }
        with_elem!(weights.dtype(), T => with_copy(compute_weights, |copy| {
            self.apply_cpu::<T>(c, weights, grads, momentum, copy)
        }))
    }

    fn apply_cpu<T: Elem>(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        momentum: Option<&Tensor>,
        copy: CopyWeights<T>,
    ) -> Result<()> {
        let of = |x: f64| <T::Acc as Real>::of_f64(x);
        let (lr, gs, mu) = (of(c.lr), of(c.grad_scale), of(self.momentum));
        let wd = |at: usize| if at < c.decayed_len { of(c.weight_decay) } else { T::Acc::ZERO };
        cpu::with_slice_mut::<T, _>(weights, |w| {
            cpu::with_slice_mut::<T, _>(grads, |g| match momentum {
                None => {
                    w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK)).enumerate().for_each(
                        |(i, (w, g))| {
                            vectorised!(T, || {
                                for (j, (w, g)) in w.iter_mut().zip(g).enumerate() {
                                    let d = g.to_acc() * gs + wd(i * CHUNK + j) * w.to_acc();
                                    *w = T::from_acc(w.to_acc() - lr * d);
                                    *g = T::default();
                                }
                            });
                            copy(i * CHUNK, w);
                        },
                    );
                    Ok(())
                }
                Some(momentum) => cpu::with_slice_mut::<T, _>(momentum, |m| {
                    let chunks =
                        w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK)).zip(m.par_chunks_mut(CHUNK));
                    chunks.enumerate().for_each(|(i, ((w, g), m))| {
                        vectorised!(T, || {
                            for (j, ((w, g), m)) in w.iter_mut().zip(g).zip(m).enumerate() {
                                let d = g.to_acc() * gs + wd(i * CHUNK + j) * w.to_acc();
                                let velocity = if self.first { d } else { mu * m.to_acc() + d };
                                let direction = if self.nesterov { d + mu * velocity } else { velocity };
                                *w = T::from_acc(w.to_acc() - lr * direction);
                                (*m, *g) = (T::from_acc(velocity), T::default());
                            }
                        });
                        copy(i * CHUNK, w);
                    })
                }),
            })
        })??
    }

    fn reference(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        momentum: Option<&Tensor>,
    ) -> Result<()> {
        let decay_term = (weights - weight_decay_reference(weights, &UpdateArgs { lr: 1.0, ..*c })?)?;
        let d = ((grads * c.grad_scale)? + decay_term)?;
        let mut direction = d.clone();
        if let Some(momentum) = momentum {
            let velocity = if self.first { d.clone() } else { ((momentum * self.momentum)? + &d)? };
            direction = if self.nesterov { (&d + (&velocity * self.momentum)?)? } else { velocity.clone() };
            momentum.slice_set(&velocity, 0, 0)?;
        }
        weights.slice_set(&(weights - (direction * c.lr)?)?, 0, 0)?;
        grads.slice_set(&grads.zeros_like()?, 0, 0)
    }
}

/// Refreshes the copy of the weights that kernels compute with.
pub(super) fn sync_compute_weights(weights: &Tensor, compute_weights: Option<&Tensor>) -> Result<()> {
    compute_weights.map_or(Ok(()), |copy| cast_into(weights, copy))
}

/// Copies updated weights, which begin at an index, into the weights that kernels compute with.
pub(super) type CopyWeights<'a, T> = &'a (dyn Fn(usize, &[T]) + Sync);

/// Calls `update` with what copies each chunk of weights while it is in cache; no two chunks may overlap.
pub(super) fn with_copy<T: Elem>(
    compute_weights: Option<&Tensor>,
    update: impl FnOnce(CopyWeights<T>) -> Result<()>,
) -> Result<()> {
    let Some(copy) = compute_weights else { return update(&|_, _| ()) };
    with_elem!(copy.dtype(), C => cpu::with_slice_mut::<C, _>(copy, |to| {
        let to = cpu::DisjointSliceMut::new(to);
        update(&|first, from| {
            // SAFETY: the chunks of an update do not overlap.
            cast_slice(from, unsafe { to.range_mut(first, from.len()) });
        })
    })?)
}

fn cast_slice<F: Elem, T: Elem>(from: &[F], to: &mut [T]) {
    vectorised!(T, || {
        to.iter_mut()
            .zip(from)
            .for_each(|(to, from)| *to = T::from_acc(<T as Elem>::Acc::of_f64(from.to_acc().as_f64())))
    })
}

/// `w -= lr weight_decay w` for the decayed part of a chunk that starts at `start`.
pub(super) fn apply_weight_decay<T: Elem>(w: &mut [T], start: usize, c: &UpdateArgs) {
    let decay_factor = <T::Acc as Real>::of_f64(1.0 - c.lr * c.weight_decay);
    let end = c.decayed_len.saturating_sub(start).min(w.len());
    if c.weight_decay != 0.0 {
        vectorised!(T, || w[..end].iter_mut().for_each(|w| *w = T::from_acc(w.to_acc() * decay_factor)));
    }
}

pub(super) fn weight_decay_reference(weights: &Tensor, c: &UpdateArgs) -> Result<Tensor> {
    let n = weights.elem_count();
    if c.decayed_len == 0 || c.weight_decay == 0.0 {
        return Ok(weights.clone());
    }
    let decayed = (weights.narrow(0, 0, c.decayed_len)? * (1.0 - c.lr * c.weight_decay))?;
    Tensor::cat(&[decayed, weights.narrow(0, c.decayed_len, n - c.decayed_len)?], 0)
}

/// Sum of squares of a flat buffer, in f64, in an order that does not depend on the number of threads.
pub fn sum_of_squares(values: &Tensor) -> Result<f64> {
    on_cuda!(values, |device| Ok(gpu::sum_of_squares(device, values)?.to_vec1::<f64>()?[0]));
    if !reference::has_cpu_kernel(values) {
        return values.to_dtype(candle_core::DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>();
    }
    with_elem!(values.dtype(), T => {
        let values = cpu::view::<T>(values)?;
        let sum = |chunk: &[T]| vectorised!(T, || {
            // Sixteen partial sums, so that the loop vectorizes.
            let mut sums = [<T as Elem>::Acc::ZERO; 16];
            for group in chunk.chunks(16) {
                group.iter().zip(&mut sums).for_each(|(v, s)| *s += v.to_acc() * v.to_acc());
            }
            sums.iter().map(|s| s.as_f64()).sum::<f64>()
        });
        let chunks = cpu::parallel_map(values.len().div_ceil(CHUNK), &|i| {
            sum(&values[i * CHUNK..values.len().min((i + 1) * CHUNK)])
        });
        Ok(chunks.into_iter().sum())
    })
}

/// `to = from`, rounded to the dtype of `to`: refreshes the copy of the weights that kernels compute with.
pub fn cast_into(from: &Tensor, to: &Tensor) -> Result<()> {
    on_cuda!(from, |device| gpu::cast(device, from, to));
    if !reference::has_cpu_kernel(from) {
        return to.slice_set(&from.to_dtype(to.dtype())?, 0, 0);
    }
    with_elem!(from.dtype(), F => {
        let from = cpu::view::<F>(from)?;
        with_elem!(to.dtype(), T => cpu::with_slice_mut::<T, _>(to, |to| {
            cpu::parallel_for_chunks(to, CHUNK, |i, to| cast_slice(&from[i * CHUNK..], to))
        }))
    })
}

/// `average = decay average + (1 - decay) values`.
pub fn ema_update(average: &Tensor, values: &Tensor, decay: f64) -> Result<()> {
    on_cuda!(values, |device| gpu::ema_update(device, average, values, decay));
    if !reference::has_cpu_kernel(values) {
        return average.slice_set(&((average * decay)? + (values * (1.0 - decay))?)?, 0, 0);
    }
    with_elem!(values.dtype(), T => {
        let values = cpu::view::<T>(values)?;
        let (keep, rest) = (<T as Elem>::Acc::of_f64(decay), <T as Elem>::Acc::of_f64(1.0 - decay));
        cpu::with_slice_mut::<T, _>(average, |average| {
            cpu::parallel_for_chunks(average, CHUNK, |i, average| vectorised!(T, || {
                average
                    .iter_mut()
                    .zip(&values[i * CHUNK..])
                    .for_each(|(a, v)| *a = T::from_acc(keep * a.to_acc() + rest * v.to_acc()))
            }))
        })
    })
}

/// Swaps the contents of two buffers.
pub fn swap(a: &Tensor, b: &Tensor) -> Result<()> {
    on_cuda!(a, |device| gpu::swap(device, a, b));
    if !reference::has_cpu_kernel(a) {
        let kept = a.copy()?;
        a.slice_set(b, 0, 0)?;
        return b.slice_set(&kept, 0, 0);
    }
    with_elem!(a.dtype(), T => cpu::with_slice_mut::<T, _>(a, |a| {
        cpu::with_slice_mut::<T, _>(b, |b| {
            a.par_chunks_mut(CHUNK).zip(b.par_chunks_mut(CHUNK)).for_each(|(a, b)| a.swap_with_slice(b))
        })
    })?)
}

pub fn clear(values: &Tensor) -> Result<()> {
    on_cuda!(values, |device| gpu::clear(device, values));
    if !reference::has_cpu_kernel(values) {
        return values.slice_set(&values.zeros_like()?, 0, 0);
    }
    with_elem!(values.dtype(), T => cpu::with_slice_mut::<T, _>(values, |v| {
        cpu::parallel_for_chunks(v, CHUNK, |_, v| v.fill(T::default()))
    }))
}
