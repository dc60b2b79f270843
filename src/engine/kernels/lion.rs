//! Lion (Chen et al., 2023): steps of constant size along the sign of an interpolation of momentum and gradient. The
//! state is one buffer.

use candle_core::{Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::update::{
    self, CHUNK, CopyWeights, UpdateArgs, apply_weight_decay, weight_decay_reference, with_copy,
};
use super::{Elem, Real, cpu, reference};
use crate::params::FlatLayout;
use crate::{vectorised, with_elem};

#[derive(Clone, Copy, Debug)]
pub struct LionKernel {
    /// Weight of the momentum in the step direction.
    pub beta1: f64,
    /// Weight of the momentum in the next momentum.
    pub beta2: f64,
}

/// Number of state values, in the dtype of the master weights.
pub fn state_len(params: &FlatLayout) -> usize {
    params.trained_len
}

impl LionKernel {
    /// Applies decoupled weight decay, then the step; clears the gradients.
    pub fn apply(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        momentum: &Tensor,
        compute_weights: Option<&Tensor>,
    ) -> Result<()> {
        on_cuda!(weights, |device| {
            let buffers =
                update::gpu::UpdateBuffers::new(c, weights, grads, [Some(momentum), None], compute_weights)?;
            update::gpu::lion(device, self, &buffers)
        });
        if !reference::has_cpu_kernel(weights) {
            self.reference(c, weights, grads, momentum)?;
            return update::sync_compute_weights(weights, compute_weights);
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
        momentum: &Tensor,
        copy: CopyWeights<T>,
    ) -> Result<()> {
        let of = |x: f64| <T::Acc as Real>::of_f64(x);
        let (b1, b2, lr, gs) = (of(self.beta1), of(self.beta2), of(c.lr), of(c.grad_scale));
        let (a1, a2) = (of(1.0 - self.beta1), of(1.0 - self.beta2));
        cpu::with_slice_mut::<T, _>(weights, |w| {
            cpu::with_slice_mut::<T, _>(grads, |g| {
                cpu::with_slice_mut::<T, _>(momentum, |m| {
                    let chunks =
                        w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK)).zip(m.par_chunks_mut(CHUNK));
                    chunks.enumerate().for_each(|(i, ((w, g), m))| {
                        apply_weight_decay(w, i * CHUNK, c);
                        vectorised!(T, || {
                            for ((w, g), m) in w.iter_mut().zip(g).zip(m) {
                                let d = g.to_acc() * gs;
                                let direction = b1 * m.to_acc() + a1 * d;
                                let up = if direction > T::Acc::ZERO { lr } else { T::Acc::ZERO };
                                let down = if direction < T::Acc::ZERO { lr } else { T::Acc::ZERO };
                                *w = T::from_acc(w.to_acc() - up + down);
                                (*m, *g) = (T::from_acc(b2 * m.to_acc() + a2 * d), T::default());
                            }
                        });
                        copy(i * CHUNK, w);
                    })
                })
            })
        })???;
        Ok(())
    }

    fn reference(&self, c: &UpdateArgs, weights: &Tensor, grads: &Tensor, momentum: &Tensor) -> Result<()> {
        let g = (grads * c.grad_scale)?;
        let direction = ((momentum * self.beta1)? + (&g * (1.0 - self.beta1))?)?.sign()?;
        let next = ((momentum * self.beta2)? + (&g * (1.0 - self.beta2))?)?;
        weights.slice_set(&(weight_decay_reference(weights, c)? - (direction * c.lr)?)?, 0, 0)?;
        momentum.slice_set(&next, 0, 0)?;
        grads.slice_set(&grads.zeros_like()?, 0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::gradcheck::{random_tensor, test_device, to_f64_vec};
    use candle_core::DType;

    #[test]
    fn updates_equal_the_plain_rule() {
        let (n, decayed) = (CHUNK + 77, CHUNK + 3);
        let lion = LionKernel { beta1: 0.9, beta2: 0.99 };
        let c = UpdateArgs {
            lr: 0.01,
            grad_scale: 0.5,
            device_grad_scale: None,
            weight_decay: 0.1,
            decayed_len: decayed,
        };
        for reference in [false, true] {
            let w = random_tensor(&[n], 1).to_dtype(DType::F32).unwrap();
            let g = Tensor::zeros(n, DType::F32, &test_device()).unwrap();
            let m = g.copy().unwrap();
            let (mut plain, mut velocity) = (to_f64_vec(&w), vec![0f64; n]);
            for step in 0..6 {
                let new = random_tensor(&[n], 50 + step).to_dtype(DType::F32).unwrap();
                super::super::update::cast_into(&new, &g).unwrap();
                let d: Vec<f64> = to_f64_vec(&new).iter().map(|g| 0.5 * g).collect();
                match reference {
                    true => lion.reference(&c, &w, &g, &m).unwrap(),
                    false => lion.apply(&c, &w, &g, &m, None).unwrap(),
                }
                for i in 0..n {
                    if i < decayed {
                        plain[i] *= 1.0 - 0.01 * 0.1;
                    }
                    let direction = 0.9 * velocity[i] + 0.1 * d[i];
                    plain[i] -= 0.01 * if direction == 0.0 { 0.0 } else { direction.signum() };
                    velocity[i] = 0.99 * velocity[i] + 0.01 * d[i];
                }
                // If the direction is close to zero, f32 and f64 may differ in its sign.
                let apart =
                    to_f64_vec(&w).iter().zip(&plain).filter(|(a, b)| (**a - **b).abs() > 1e-5).count();
                assert!(apart <= n / 10_000, "{apart} of {n} weights apart after step {step}");
                assert!(to_f64_vec(&g).iter().all(|g| *g == 0.0), "gradients are cleared");
            }
        }
    }
}
