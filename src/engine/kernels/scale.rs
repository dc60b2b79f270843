//! `y = x s` with one factor per sample and channel: (batch, height, width, channels) by (batch, channels).

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// Reference implementation.
pub fn reference(x: &Tensor, s: &Tensor) -> Result<Tensor> {
    let (batch, c) = s.dims2()?;
    x.broadcast_mul(&s.reshape((batch, 1, 1, c))?)
}

pub fn forward(x: &Tensor, s: &Tensor) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::apply(device, x, s, None));
    if !reference::has_cpu_kernel(x) {
        return reference(x, s);
    }
    with_elem!(x.dtype(), T => {
        let (values, s) = (cpu::view::<T>(x)?, cpu::view::<T>(s)?);
        let (sample, c) = (values.len() / x.dim(0)?.max(1), x.dim(3)?);
        let mut y = cpu::uninit::<T>(values.len());
        y.par_chunks_mut(sample).zip(values.par_chunks(sample)).zip(s.par_chunks(c)).for_each(|((y, x), s)| {
            vectorised!(T, || {
                for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
                    y.iter_mut().zip(x).zip(s).for_each(|((y, x), s)| *y = T::from_acc(x.to_acc() * s.to_acc()));
                }
            })
        });
        cpu::tensor(y, x.shape())
    })
}

/// The gradient of the factors, (batch, channels): sums of `x dy` over the pixels.
pub fn factor_gradient(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::factor_gradient(device, x, dy));
    with_elem!(x.dtype(), T => factor_gradient_cpu::<T>(x, dy))
}

fn factor_gradient_cpu<T: Elem>(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let (values, d) = (cpu::view::<T>(x)?, cpu::view::<T>(dy)?);
    let mut ds = cpu::uninit::<T>(batch * c);
    let sample = h * w * c;
    ds.par_chunks_mut(c).zip(values.par_chunks(sample)).zip(d.par_chunks(sample)).for_each_init(
        || vec![T::Acc::ZERO; c],
        |sum, ((ds, x), d)| {
            vectorised!(T, || {
                sum.fill(T::Acc::ZERO);
                for (x, d) in x.chunks_exact(c).zip(d.chunks_exact(c)) {
                    sum.iter_mut().zip(x).zip(d).for_each(|((s, x), d)| *s += x.to_acc() * d.to_acc());
                }
                ds.iter_mut().zip(&*sum).for_each(|(ds, s)| *ds = T::from_acc(*s));
            })
        },
    );
    cpu::tensor(ds, (batch, c))
}

/// `dx = dy s + m / pixels`: the gradient through the scaling, plus the gradient `m` (batch, channels) of the image's
/// means.
pub fn backward_with_mean_gradient(dy: &Tensor, s: &Tensor, m: &Tensor) -> Result<Tensor> {
    on_cuda!(dy, |device| gpu::apply(device, dy, s, Some(m)));
    let (_, h, w, c) = dy.dims4()?;
    with_elem!(dy.dtype(), T => {
        let (d, s, m) = (cpu::view::<T>(dy)?, cpu::view::<T>(s)?, cpu::view::<T>(m)?);
        let inv_pixels = <T as Elem>::Acc::of_f64(1.0 / (h * w) as f64);
        let mut dx = cpu::uninit::<T>(d.len());
        let factors = s.par_chunks(c).zip(m.par_chunks(c));
        dx.par_chunks_mut(h * w * c).zip(d.par_chunks(h * w * c)).zip(factors).for_each(|((dx, d), (s, m))| {
            vectorised!(T, || {
                for (dx, d) in dx.chunks_exact_mut(c).zip(d.chunks_exact(c)) {
                    for (((dx, d), s), m) in dx.iter_mut().zip(d).zip(s).zip(m) {
                        *dx = T::from_acc(d.to_acc() * s.to_acc() + m.to_acc() * inv_pixels);
                    }
                }
            })
        });
        cpu::tensor(dx, dy.shape())
    })
}
