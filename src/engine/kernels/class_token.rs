//! Prepends a learned class token to each sequence and adds learned positions to all of it.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::{Elem, cpu, reference};
use crate::{vectorised, with_elem};

/// `y[b] = [class, x[b]...] + positions`
pub struct ClassTokenKernel<'a> {
    /// `width` values of any shape.
    pub class: &'a Tensor,
    /// (length + 1) * width values of any shape.
    pub positions: &'a Tensor,
}

/// The gradients to accumulate into; `None` for a frozen parameter.
pub struct ClassTokenGrads<'a> {
    pub class: Option<&'a Tensor>,
    pub positions: Option<&'a Tensor>,
}

impl ClassTokenKernel<'_> {
    /// (length + 1, width)
    fn sizes(&self) -> (usize, usize) {
        let width = self.class.elem_count();
        (self.positions.elem_count() / width, width)
    }

    /// Reference implementation; `x` is (batch, length..., width).
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let ((length, n), batch) = (self.sizes(), x.dim(0)?);
        let class = self.class.reshape((1, 1, n))?.broadcast_as((batch, 1, n))?.contiguous()?;
        let y = Tensor::cat(&[class, x.reshape((batch, length - 1, n))?], 1)?;
        y.broadcast_add(&self.positions.reshape((1, length, n))?)
    }

    /// (batch, length + 1, width)
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        on_cuda!(x, |device| self.forward_cuda(device, x));
        if !reference::has_cpu_kernel(x) {
            return self.reference(x);
        }
        let ((length, n), batch) = (self.sizes(), x.dim(0)?);
        with_elem!(x.dtype(), T => {
            let (x, class) = (cpu::view::<T>(x)?, cpu::view::<T>(self.class)?);
            let positions = cpu::view::<T>(self.positions)?;
            let mut y = cpu::uninit::<T>(batch * length * n);
            cpu::parallel_for_rows(&mut y, n, |first, y| {
                for (i, y) in y.chunks_exact_mut(n).enumerate() {
                    let (sample, t) = ((first + i) / length, (first + i) % length);
                    let from = match t {
                        0 => &class[..],
                        _ => &x[(sample * (length - 1) + t - 1) * n..][..n],
                    };
                    let position = &positions[t * n..][..n];
                    vectorised!(T, || {
                        let values = y.iter_mut().zip(from).zip(position);
                        values.for_each(|((y, x), p)| *y = T::from_acc(x.to_acc() + p.to_acc()))
                    });
                }
            });
            cpu::tensor(y, (batch, length, n))
        })
    }

    /// Accumulates the gradients of both parameters into `grads`; returns the input gradient with `shape` if it is
    /// given.
    pub fn backward(
        &self,
        dy: &Tensor,
        grads: &ClassTokenGrads,
        shape: Option<&[usize]>,
    ) -> Result<Option<Tensor>> {
        on_cuda!(dy, |device| self.backward_cuda(device, dy, grads, shape));
        let (length, n) = self.sizes();
        with_elem!(dy.dtype(), T => accumulate_grads::<T>(dy, grads, length, n)?);
        shape.map(|shape| dy.narrow(1, 1, length - 1)?.contiguous()?.reshape(shape)).transpose()
    }
}

/// One thread owns each position and adds the samples in order, so the result is deterministic.
fn accumulate_grads<T: Elem>(dy: &Tensor, grads: &ClassTokenGrads, length: usize, n: usize) -> Result<()> {
    let dy = cpu::view::<T>(dy)?;
    let add = |t: usize, into: &mut [T::Acc]| {
        for sample in dy.chunks_exact(length * n) {
            let row = &sample[t * n..][..n];
            vectorised!(T, || into.iter_mut().zip(row).for_each(|(a, d)| *a += d.to_acc()));
        }
    };
    if let Some(positions) = grads.positions {
        cpu::with_slice_mut::<T::Acc, _>(positions, |table| cpu::parallel_for_chunks(table, n, add))?;
    }
    grads.class.map_or(Ok(()), |class| cpu::with_slice_mut::<T::Acc, _>(class, |class| add(0, class)))
}
