//! Layer norm and RMS norm on a GPU: one warp per row.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{NormBackwardFusion, NormKernel, cuda_row_ranges, cuda_workspace};
use crate::kernels::cuda::{
    RawStream, acc_dtype, check_status, dtype_code, pointer, pointer_or_null, scratch, stream, uninit,
};
use crate::kernels::linear::WeightBiasGrads;

impl NormKernel<'_> {
    pub(super) fn forward_cuda(&self, device: &CudaDevice, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let rows = x.elem_count() / self.weight.elem_count();
        let stats = uninit(device, acc_dtype(x.dtype()), (rows, self.stats_per_row()))?;
        Ok((self.output_cuda(device, x, &stats, false)?, stats))
    }

    /// Computes the output, and the statistics unless they are known.
    pub(super) fn output_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        stats: &Tensor,
        have_stats: bool,
    ) -> Result<Tensor> {
        let n = self.weight.elem_count();
        let y = uninit(device, x.dtype(), x.shape())?;
        // SAFETY: `y` has the size of `x`, and `stats` holds the statistics of each row.
        check_status("norm_forward", unsafe {
            norm_forward(
                dtype_code(x.dtype())?,
                pointer(x)?,
                pointer(self.weight)?,
                pointer_or_null(self.bias)?,
                pointer(&y)?,
                pointer(stats)?,
                (x.elem_count() / n) as i64,
                n as c_int,
                self.eps,
                self.centred as c_int,
                have_stats as c_int,
                stream(device),
            )
        })?;
        Ok(y)
    }

    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        (x, stats, dy): (&Tensor, &Tensor, &Tensor),
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
        NormBackwardFusion { residual_grad, dx_column_sums, recompute_output }: NormBackwardFusion,
    ) -> Result<Option<Tensor>> {
        if residual_grad.is_some_and(|grad| grad.elem_count() != x.elem_count()) {
            candle_core::bail!("norm: the residual gradient differs from shape {:?}", x.dims())
        }
        let dx = if needs_input_grad { Some(uninit(device, x.dtype(), x.shape())?) } else { None };
        let n = self.weight.elem_count();
        let rows = x.elem_count() / n;
        let vectors = 1 + grads.bias.is_some() as usize;
        let partial = scratch(device, cuda_workspace(x.dtype(), rows, n, vectors) as usize)?;
        // SAFETY: the gradients have the shapes of their tensors, and `partial` has the size that the kernel needs.
        check_status("norm_backward", unsafe {
            norm_backward(
                dtype_code(x.dtype())?,
                pointer(x)?,
                pointer(stats)?,
                pointer(dy)?,
                pointer(self.weight)?,
                pointer_or_null(self.bias)?,
                pointer_or_null(dx.as_ref())?,
                pointer_or_null(residual_grad)?,
                pointer(&partial)?,
                pointer_or_null(grads.weight)?,
                pointer_or_null(grads.bias)?,
                pointer_or_null(dx_column_sums)?,
                rows as i64,
                n as c_int,
                cuda_row_ranges(x.dtype(), rows, n) as c_int,
                self.centred as c_int,
                recompute_output as c_int,
                stream(device),
            )
        })?;
        Ok(dx)
    }
}

unsafe extern "C" {
    fn norm_forward(
        dtype: c_int,
        x: *const c_void,
        weight: *const c_void,
        bias: *const c_void,
        y: *mut c_void,
        stats: *mut c_void,
        rows: i64,
        n: c_int,
        eps: f64,
        centred: c_int,
        have_stats: c_int,
        stream: RawStream,
    ) -> c_int;
    fn norm_backward(
        dtype: c_int,
        x: *const c_void,
        stats: *const c_void,
        dy: *mut c_void,
        weight: *const c_void,
        bias: *const c_void,
        dx: *mut c_void,
        residual_grad: *const c_void,
        partial: *mut c_void,
        dw: *mut c_void,
        db: *mut c_void,
        dx_column_sums: *mut c_void,
        rows: i64,
        n: c_int,
        parts: c_int,
        centred: c_int,
        recompute_output: c_int,
        stream: RawStream,
    ) -> c_int;
}
