//! `act(a + b)`, into a new tensor or in place: the end of a residual branch.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::activation::{self, each_activation};
#[cfg(feature = "cuda")]
use super::cuda;
use super::{Activation, Elem, cpu, reference};
use crate::{vectorised, with_elem};

/// `act(a + b)` as a new tensor.
pub fn forward(a: &Tensor, b: &Tensor, act: Activation) -> Result<Tensor> {
    on_cuda!(a, |device| {
        let y = cuda::uninit(device, a.dtype(), a.shape())?;
        gpu::add_activation(device, a, b, &y, act)?;
        Ok(y)
    });
    if !reference::has_cpu_kernel(a) {
        return activation::reference::forward(&(a + b)?, act);
    }
    inplace(&a.copy()?, b, act)
}

/// `a = act(a + b)` in place; returns `a`.
pub fn inplace(a: &Tensor, b: &Tensor, act: Activation) -> Result<Tensor> {
    on_cuda!(a, |device| {
        gpu::add_activation(device, a, b, a, act)?;
        Ok(a.clone())
    });
    if !reference::has_cpu_kernel(a) {
        a.slice_set(&activation::reference::forward(&(a + b)?, act)?, 0, 0)?;
        return Ok(a.clone());
    }
    with_elem!(a.dtype(), T => {
        let b = cpu::view::<T>(b)?;
        cpu::with_slice_mut::<T, _>(a, |a| {
            cpu::parallel_for_rows(a, 1, |start, a| add_activation(a, &b[start..][..a.len()], act))
        })?;
    });
    Ok(a.clone())
}

/// `dy = dy act'(y)` in place. `act` must be an activation whose derivative follows from its output.
pub fn activation_backward_inplace(y: &Tensor, dy: &Tensor, act: Activation) -> Result<()> {
    on_cuda!(y, |device| activation::gpu::backward(device, y, dy, dy, act));
    if !reference::has_cpu_kernel(y) {
        return dy.slice_set(&activation::backward(y, dy, act)?, 0, 0);
    }
    with_elem!(y.dtype(), T => {
        let y = cpu::view::<T>(y)?;
        cpu::with_slice_mut::<T, _>(dy, |dy| cpu::parallel_for_rows(dy, 1, |start, dy| {
            let y = &y[start..][..dy.len()];
            vectorised!(T, || {
                each_activation!(act, f => dy
                    .iter_mut()
                    .zip(y)
                    .for_each(|(dy, y)| *dy = T::from_acc(dy.to_acc() * f.derivative(y.to_acc()))))
            })
        }))
    })
}

fn add_activation<T: Elem>(a: &mut [T], b: &[T], act: Activation) {
    vectorised!(T, || each_activation!(act, f => a
            .iter_mut()
            .zip(b)
            .for_each(|(a, b)| *a = T::from_acc(f.value(a.to_acc() + b.to_acc())))),)
}
