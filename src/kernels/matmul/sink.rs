//! Where a GEMM's sums go: the epilogue, rounding to the stored type, and the result.

use super::CpuEpilogue;
use crate::kernels::clamp::clamp;
use crate::kernels::cpu::DisjointSliceMut;
use crate::kernels::{Elem, Real};

pub(super) struct Sink<'a, O> {
    out: DisjointSliceMut<O>,
    stride: usize,
    /// Columns of the result.
    n: usize,
    accumulate: bool,
    epilogue: CpuEpilogue<'a, O>,
}

impl<'a, O: Elem> Sink<'a, O> {
    /// A row-major result of `n` columns with row stride `stride`. Sums that accumulate have no epilogue.
    pub fn new(
        out: &mut [O],
        stride: usize,
        n: usize,
        accumulate: bool,
        epilogue: CpuEpilogue<'a, O>,
    ) -> Self {
        Self { out: DisjointSliceMut::new(out), stride, n, accumulate, epilogue }
    }

    /// Stores sums of row `i` from column `first` on. Only the task that owns these may call this.
    #[inline(always)]
    pub fn store(&self, i: usize, first: usize, sums: &[O::Acc]) {
        // SAFETY: tasks own disjoint parts of the result.
        let out = unsafe { self.out.range_mut(i * self.stride + first, sums.len()) };
        if self.accumulate {
            out.iter_mut().zip(sums).for_each(|(o, s)| *o = O::from_acc(o.to_acc() + *s));
            return;
        }
        let bounds = self.epilogue.clamp.bounds();
        for (j, (o, sum)) in out.iter_mut().zip(sums).enumerate() {
            let bias = self.epilogue.bias.map_or(O::Acc::ZERO, |bias| bias[first + j].to_acc());
            let residual =
                self.epilogue.residual.map_or(O::Acc::ZERO, |all| all[i * self.n + first + j].to_acc());
            *o = O::from_acc(clamp(*sum + bias, bounds) + residual);
        }
    }
}
