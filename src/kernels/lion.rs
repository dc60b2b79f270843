//! Lion (Chen et al., 2023): steps of one size along the sign of a mixture of momentum and gradient. One
//! buffer of state.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda;
use super::update::{self, CHUNK, Common, decay, decay_reference};
use super::{Elem, Real, cpu, reference};
use crate::params::Flat;
use crate::{vectorised, with_elem};

#[derive(Clone, Copy, Debug)]
pub struct Lion {
    /// Share of the momentum in the direction taken.
    pub beta1: f64,
    /// Share of the momentum in the next momentum.
    pub beta2: f64,
}

/// Values of its state, of the master's type.
pub fn state_len(params: &Flat) -> usize {
    params.len
}

impl Lion {
    /// Decoupled weight decay, then the step; clears the gradients.
    pub fn apply(
        &self,
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        momentum: &Tensor,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(weights) {
            let buffers = update::card::Buffers::new(c, weights, grads, [Some(momentum), None], copy)?;
            return update::card::lion(device, self, &buffers);
        }
        match reference::has_body(weights) {
            false => self.reference(c, weights, grads, momentum)?,
            true => with_elem!(weights.dtype(), T => self.cpu::<T>(c, weights, grads, momentum)?),
        }
        update::follow(weights, copy)
    }

    fn cpu<T: Elem>(&self, c: &Common, weights: &Tensor, grads: &Tensor, momentum: &Tensor) -> Result<()> {
        let of = |x: f64| <T::Acc as Real>::of(x);
        let (b1, b2, lr, gs) = (of(self.beta1), of(self.beta2), of(c.lr), of(c.grad_scale));
        let (a1, a2) = (of(1.0 - self.beta1), of(1.0 - self.beta2));
        cpu::update::<T, _>(weights, |w| {
            cpu::update::<T, _>(grads, |g| {
                cpu::update::<T, _>(momentum, |m| {
                    let chunks =
                        w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK)).zip(m.par_chunks_mut(CHUNK));
                    chunks.enumerate().for_each(|(i, ((w, g), m))| {
                        decay(w, i * CHUNK, c);
                        vectorised!(T, || {
                            for ((w, g), m) in w.iter_mut().zip(g).zip(m) {
                                let d = g.up() * gs;
                                let go = b1 * m.up() + a1 * d;
                                let up = if go > T::Acc::ZERO { lr } else { T::Acc::ZERO };
                                let down = if go < T::Acc::ZERO { lr } else { T::Acc::ZERO };
                                *w = T::down(w.up() - up + down);
                                (*m, *g) = (T::down(b2 * m.up() + a2 * d), T::default());
                            }
                        })
                    })
                })
            })
        })???;
        Ok(())
    }

    fn reference(&self, c: &Common, weights: &Tensor, grads: &Tensor, momentum: &Tensor) -> Result<()> {
        let g = (grads * c.grad_scale)?;
        let go = ((momentum * self.beta1)? + (&g * (1.0 - self.beta1))?)?.sign()?;
        let next = ((momentum * self.beta2)? + (&g * (1.0 - self.beta2))?)?;
        weights.slice_set(&(decay_reference(weights, c)? - (go * c.lr)?)?, 0, 0)?;
        momentum.slice_set(&next, 0, 0)?;
        grads.slice_set(&grads.zeros_like()?, 0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::check::{device, flat, random};
    use candle_core::DType;

    #[test]
    fn updates_equal_the_plain_rule() {
        let (n, decayed) = (CHUNK + 77, CHUNK + 3);
        let lion = Lion { beta1: 0.9, beta2: 0.99 };
        let c = Common { lr: 0.01, grad_scale: 0.5, judged: None, weight_decay: 0.1, decayed };
        for reference in [false, true] {
            let w = random(&[n], 1).to_dtype(DType::F32).unwrap();
            let g = Tensor::zeros(n, DType::F32, &device()).unwrap();
            let m = g.copy().unwrap();
            let (mut plain, mut speed) = (flat(&w), vec![0f64; n]);
            for step in 0..6 {
                let new = random(&[n], 50 + step).to_dtype(DType::F32).unwrap();
                super::super::update::round_into(&new, &g).unwrap();
                let d: Vec<f64> = flat(&new).iter().map(|g| 0.5 * g).collect();
                match reference {
                    true => lion.reference(&c, &w, &g, &m).unwrap(),
                    false => lion.apply(&c, &w, &g, &m, None).unwrap(),
                }
                for i in 0..n {
                    if i < decayed {
                        plain[i] *= 1.0 - 0.01 * 0.1;
                    }
                    let go = 0.9 * speed[i] + 0.1 * d[i];
                    plain[i] -= 0.01 * if go == 0.0 { 0.0 } else { go.signum() };
                    speed[i] = 0.99 * speed[i] + 0.01 * d[i];
                }
                // Where the direction is all but zero, f32 and f64 may take different sides.
                let apart = flat(&w).iter().zip(&plain).filter(|(a, b)| (**a - **b).abs() > 1e-5).count();
                assert!(apart <= n / 10_000, "{apart} of {n} weights apart after step {step}");
                assert!(flat(&g).iter().all(|g| *g == 0.0), "gradients are cleared");
            }
        }
    }
}
