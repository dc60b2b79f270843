//! `y = silu(gate) up`, on rows that hold `gate` and then `up`.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::{Activation, Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

const ACT: Activation = Activation::Silu;

/// Reference implementation; `x` is (..., 2 n), the result (..., n).
pub fn reference(x: &Tensor) -> Result<Tensor> {
    let last = x.rank() - 1;
    let n = x.dim(last)? / 2;
    x.narrow(last, 0, n)?.silu()? * x.narrow(last, n, n)?
}

pub fn forward(x: &Tensor) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::forward(device, x));
    if !reference::has_cpu_kernel(x) {
        return reference(x);
    }
    let n = x.dim(x.rank() - 1)? / 2;
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let mut y = cpu::uninit::<T>(values.len() / 2);
        cpu::parallel_for_rows(&mut y, n, |first, y| {
            let x = &values[2 * first * n..][..2 * y.len()];
            vectorised!(T, || {
                for (x, y) in x.chunks_exact(2 * n).zip(y.chunks_exact_mut(n)) {
                    let (gate, up) = x.split_at(n);
                    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                        *y = T::from_acc(ACT.value(gate.to_acc()) * up.to_acc());
                    }
                }
            })
        });
        cpu::tensor(y, [&x.dims()[..x.rank() - 1], &[n]].concat())
    })
}

/// The gradient of `x`.
pub fn backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::backward(device, x, dy));
    let n = x.dim(x.rank() - 1)? / 2;
    with_elem!(x.dtype(), T => {
        let (values, dy) = (cpu::view::<T>(x)?, cpu::view::<T>(dy)?);
        let mut dx = cpu::uninit::<T>(values.len());
        let rows = cpu::rows_per_chunk(n);
        let chunks = dx.par_chunks_mut(2 * rows * n).zip(values.par_chunks(2 * rows * n));
        chunks.zip(dy.par_chunks(rows * n)).for_each(|((dx, x), dy)| {
            vectorised!(T, || {
                let rows = dx.chunks_exact_mut(2 * n).zip(x.chunks_exact(2 * n)).zip(dy.chunks_exact(n));
                for ((dx, x), dy) in rows {
                    let ((gate, up), (d_gate, d_up)) = (x.split_at(n), dx.split_at_mut(n));
                    for ((((dg, du), gate), up), dy) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(dy) {
                        let (g, d) = (gate.to_acc(), dy.to_acc());
                        let one = <T as Elem>::Acc::ONE;
                        let s = one / (one + (-g).exp());
                        *dg = T::from_acc(d * up.to_acc() * s * (one + g * (one - s)));
                        *du = T::from_acc(d * g * s);
                    }
                }
            })
        });
        cpu::tensor(dx, x.shape())
    })
}
