//! Optimizer updates over flat buffers: one pass, in place, gradients cleared on the way. `copy` is the weights
//! as kernels compute with them, where that is another type: it follows them.

#[cfg(feature = "cuda")]
pub(super) mod card;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// Values a thread takes at once.
pub(super) const CHUNK: usize = 32 * 1024;

/// What every update is given beside its buffers.
#[derive(Clone, Copy, Debug)]
pub struct Common<'a> {
    pub lr: f64,
    /// The gradient is multiplied with this first: one over the samples, clipping, loss scale.
    pub grad_scale: f64,
    /// Where a card has that number instead, as one f64; where it is not a number, gradients are cleared and nothing
    /// else moves. Only rules that [`judged_there`](crate::optim::judged_there) names read it.
    pub judged: Option<&'a Tensor>,
    pub weight_decay: f64,
    /// Weight decay touches the first so many values.
    pub decayed: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Updates made, this one included.
    pub step: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    pub momentum: f64,
    pub nesterov: bool,
    /// The first update, on which the momentum begins as the gradient itself.
    pub first: bool,
}

impl AdamW {
    /// How far to go, and what the root of the second moment is divided by.
    pub(super) fn corrections(&self, lr: f64) -> (f64, f64) {
        let t = self.step as i32;
        (lr / (1.0 - self.beta1.powi(t)), (1.0 - self.beta2.powi(t)).sqrt())
    }

    /// Decoupled weight decay, then Adam. `m` and `v` are its first and second moments.
    pub fn apply(
        &self,
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        (m, v): (&Tensor, &Tensor),
        copy: Option<&Tensor>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(weights) {
            return self.card(device, c, &card::Buffers::new(c, weights, grads, [Some(m), Some(v)], copy)?);
        }
        match reference::has_body(weights) {
            false => self.reference(c, weights, grads, m, v)?,
            true => with_elem!(weights.dtype(), T => self.cpu::<T>(c, weights, grads, m, v)?),
        }
        follow(weights, copy)
    }

    fn cpu<T: Elem>(
        &self,
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        m: &Tensor,
        v: &Tensor,
    ) -> Result<()> {
        let (step, root) = self.corrections(c.lr);
        let of = |x: f64| <T::Acc as Real>::of(x);
        let (b1, b2, eps, step, inv_root, gs) =
            (of(self.beta1), of(self.beta2), of(self.eps), of(step), of(1.0 / root), of(c.grad_scale));
        let (a1, a2) = (of(1.0 - self.beta1), of(1.0 - self.beta2));
        cpu::update::<T, _>(weights, |w| {
            cpu::update::<T, _>(grads, |g| {
                cpu::update::<T, _>(m, |m| {
                    cpu::update::<T, _>(v, |v| {
                        let chunks = w
                            .par_chunks_mut(CHUNK)
                            .zip(g.par_chunks_mut(CHUNK))
                            .zip(m.par_chunks_mut(CHUNK))
                            .zip(v.par_chunks_mut(CHUNK));
                        chunks.enumerate().for_each(|(i, (((w, g), m), v))| {
                            decay(w, i * CHUNK, c);
                            vectorised!(T, || {
                                for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                                    let d = g.up() * gs;
                                    let first = b1 * m.up() + a1 * d;
                                    let second = b2 * v.up() + a2 * d * d;
                                    *w = T::down(w.up() - step * first / (second.sqrt() * inv_root + eps));
                                    (*m, *v, *g) = (T::down(first), T::down(second), T::default());
                                }
                            })
                        })
                    })
                })
            })
        })????;
        Ok(())
    }

    fn reference(&self, c: &Common, weights: &Tensor, grads: &Tensor, m: &Tensor, v: &Tensor) -> Result<()> {
        let (step, root) = self.corrections(c.lr);
        let g = (grads * c.grad_scale)?;
        let first = ((m * self.beta1)? + (&g * (1.0 - self.beta1))?)?;
        let second = ((v * self.beta2)? + (g.sqr()? * (1.0 - self.beta2))?)?;
        let direction = (&first / ((second.sqrt()? / root)? + self.eps)?)?;
        let moved = (decay_reference(weights, c)? - (direction * step)?)?;
        for (into, value) in [(weights, &moved), (m, &first), (v, &second), (grads, &grads.zeros_like()?)] {
            into.slice_set(value, 0, 0)?;
        }
        Ok(())
    }
}

impl Sgd {
    /// Weight decay as part of the gradient, as PyTorch has it. `momentum` is absent where it is 0.
    pub fn apply(
        &self,
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        momentum: Option<&Tensor>,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(weights) {
            return self.card(device, &card::Buffers::new(c, weights, grads, [momentum, None], copy)?);
        }
        match reference::has_body(weights) {
            false => self.reference(c, weights, grads, momentum)?,
            true => with_elem!(weights.dtype(), T => self.cpu::<T>(c, weights, grads, momentum)?),
        }
        follow(weights, copy)
    }

    fn cpu<T: Elem>(
        &self,
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        momentum: Option<&Tensor>,
    ) -> Result<()> {
        let of = |x: f64| <T::Acc as Real>::of(x);
        let (lr, gs, mu) = (of(c.lr), of(c.grad_scale), of(self.momentum));
        let wd = |at: usize| if at < c.decayed { of(c.weight_decay) } else { T::Acc::ZERO };
        cpu::update::<T, _>(weights, |w| {
            cpu::update::<T, _>(grads, |g| match momentum {
                None => {
                    w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK)).enumerate().for_each(
                        |(i, (w, g))| {
                            vectorised!(T, || {
                                for (j, (w, g)) in w.iter_mut().zip(g).enumerate() {
                                    let d = g.up() * gs + wd(i * CHUNK + j) * w.up();
                                    *w = T::down(w.up() - lr * d);
                                    *g = T::default();
                                }
                            })
                        },
                    );
                    Ok(())
                }
                Some(momentum) => cpu::update::<T, _>(momentum, |m| {
                    let chunks =
                        w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK)).zip(m.par_chunks_mut(CHUNK));
                    chunks.enumerate().for_each(|(i, ((w, g), m))| {
                        vectorised!(T, || {
                            for (j, ((w, g), m)) in w.iter_mut().zip(g).zip(m).enumerate() {
                                let d = g.up() * gs + wd(i * CHUNK + j) * w.up();
                                let speed = if self.first { d } else { mu * m.up() + d };
                                let go = if self.nesterov { d + mu * speed } else { speed };
                                *w = T::down(w.up() - lr * go);
                                (*m, *g) = (T::down(speed), T::default());
                            }
                        })
                    })
                }),
            })
        })??
    }

    fn reference(
        &self,
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        momentum: Option<&Tensor>,
    ) -> Result<()> {
        let shrink = (weights - decay_reference(weights, &Common { lr: 1.0, ..*c })?)?;
        let d = ((grads * c.grad_scale)? + shrink)?;
        let mut go = d.clone();
        if let Some(momentum) = momentum {
            let speed = if self.first { d.clone() } else { ((momentum * self.momentum)? + &d)? };
            go = if self.nesterov { (&d + (&speed * self.momentum)?)? } else { speed.clone() };
            momentum.slice_set(&speed, 0, 0)?;
        }
        weights.slice_set(&(weights - (go * c.lr)?)?, 0, 0)?;
        grads.slice_set(&grads.zeros_like()?, 0, 0)
    }
}

/// Brings the copy of the weights up to them.
pub(super) fn follow(weights: &Tensor, copy: Option<&Tensor>) -> Result<()> {
    copy.map_or(Ok(()), |copy| round_into(weights, copy))
}

/// `w -= lr weight_decay w` for the decayed part of a chunk that begins at `start`.
pub(super) fn decay<T: Elem>(w: &mut [T], start: usize, c: &Common) {
    let keep = <T::Acc as Real>::of(1.0 - c.lr * c.weight_decay);
    let until = c.decayed.saturating_sub(start).min(w.len());
    if c.weight_decay != 0.0 {
        vectorised!(T, || w[..until].iter_mut().for_each(|w| *w = T::down(w.up() * keep)));
    }
}

pub(super) fn decay_reference(weights: &Tensor, c: &Common) -> Result<Tensor> {
    let n = weights.elem_count();
    if c.decayed == 0 || c.weight_decay == 0.0 {
        return Ok(weights.clone());
    }
    let shrunk = (weights.narrow(0, 0, c.decayed)? * (1.0 - c.lr * c.weight_decay))?;
    Tensor::cat(&[shrunk, weights.narrow(0, c.decayed, n - c.decayed)?], 0)
}

/// Sum of squares of a flat buffer, added up in f64 in an order that no thread changes.
pub fn sum_of_squares(values: &Tensor) -> Result<f64> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(values) {
        return Ok(card::squares(device, values)?.to_vec1::<f64>()?[0]);
    }
    if !reference::has_body(values) {
        return values.to_dtype(candle_core::DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>();
    }
    with_elem!(values.dtype(), T => {
        let values = cpu::view::<T>(values)?;
        let sum = |chunk: &[T]| vectorised!(T, || {
            // Sixteen running sums, so that the loop vectorises.
            let mut sums = [<T as Elem>::Acc::ZERO; 16];
            for group in chunk.chunks(16) {
                group.iter().zip(&mut sums).for_each(|(v, s)| *s += v.up() * v.up());
            }
            sums.iter().map(|s| s.wide()).sum::<f64>()
        });
        Ok(values.par_chunks(CHUNK).map(sum).collect::<Vec<_>>().into_iter().sum())
    })
}

/// `to = from`, rounded to the type of `to`: the copy of the weights that kernels compute with.
pub fn round_into(from: &Tensor, to: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(from) {
        return card::round(device, from, to);
    }
    if !reference::has_body(from) {
        return to.slice_set(&from.to_dtype(to.dtype())?, 0, 0);
    }
    with_elem!(from.dtype(), F => {
        let from = cpu::view::<F>(from)?;
        with_elem!(to.dtype(), T => cpu::update::<T, _>(to, |to| {
            to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| vectorised!(T, || {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = T::down(<T as Elem>::Acc::of(from.up().wide())))
            }))
        }))
    })
}

/// `average = keep average + (1 - keep) values`.
pub fn blend(average: &Tensor, values: &Tensor, keep: f64) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(values) {
        return card::blend(device, average, values, keep);
    }
    if !reference::has_body(values) {
        return average.slice_set(&((average * keep)? + (values * (1.0 - keep))?)?, 0, 0);
    }
    with_elem!(values.dtype(), T => {
        let values = cpu::view::<T>(values)?;
        let (keep, rest) = (<T as Elem>::Acc::of(keep), <T as Elem>::Acc::of(1.0 - keep));
        cpu::update::<T, _>(average, |average| {
            average.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(average, values)| vectorised!(T, || {
                average.iter_mut().zip(values).for_each(|(a, v)| *a = T::down(keep * a.up() + rest * v.up()))
            }))
        })
    })
}

/// Exchanges the values of two buffers.
pub fn swap(a: &Tensor, b: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(a) {
        return card::swap(device, a, b);
    }
    if !reference::has_body(a) {
        let kept = a.copy()?;
        a.slice_set(b, 0, 0)?;
        return b.slice_set(&kept, 0, 0);
    }
    with_elem!(a.dtype(), T => cpu::update::<T, _>(a, |a| {
        cpu::update::<T, _>(b, |b| {
            a.par_chunks_mut(CHUNK).zip(b.par_chunks_mut(CHUNK)).for_each(|(a, b)| a.swap_with_slice(b))
        })
    })?)
}

/// Sets every value to zero.
pub fn clear(values: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(values) {
        return card::clear(device, values);
    }
    if !reference::has_body(values) {
        return values.slice_set(&values.zeros_like()?, 0, 0);
    }
    with_elem!(values.dtype(), T => cpu::update::<T, _>(values, |v| v.par_chunks_mut(CHUNK).for_each(|v| v.fill(T::default()))))
}
