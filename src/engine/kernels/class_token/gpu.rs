//! CUDA bindings of the class token.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{ClassTokenGrads, ClassTokenKernel};
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, pointer_or_null, stream, uninit};

impl ClassTokenKernel<'_> {
    pub(super) fn forward_cuda(&self, device: &CudaDevice, x: &Tensor) -> Result<Tensor> {
        let ((length, n), samples) = (self.sizes(), x.dim(0)?);
        let y = uninit(device, x.dtype(), (samples, length, n))?;
        let dtype = dtype_code(x.dtype())?;
        let [from, class, positions, to] =
            [pointer(x)?, pointer(self.class)?, pointer(self.positions)?, pointer(&y)?];
        let (samples, length, n) = (samples as c_int, length as c_int, n as c_int);
        // SAFETY: `x` has `length - 1` rows per sample; `y` has `length` per sample, and `positions` has `length`.
        check_status("class_token_forward", unsafe {
            class_token_forward(dtype, from, class, positions, to, samples, length, n, stream(device))
        })?;
        Ok(y)
    }

    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        dy: &Tensor,
        grads: &ClassTokenGrads,
        shape: Option<&[usize]>,
    ) -> Result<Option<Tensor>> {
        let (length, n) = self.sizes();
        let dx = shape.map(|shape| uninit(device, dy.dtype(), shape)).transpose()?;
        let (dtype, samples) = (dtype_code(dy.dtype())?, dy.dim(0)? as c_int);
        let [d, class, positions] =
            [pointer(dy)?, pointer_or_null(grads.class)?, pointer_or_null(grads.positions)?];
        let (to, length, n) = (pointer_or_null(dx.as_ref())?, length as c_int, n as c_int);
        // SAFETY: as above; the gradients have the sizes of their parameters.
        check_status("class_token_backward", unsafe {
            class_token_backward(dtype, d, class, positions, to, samples, length, n, stream(device))
        })?;
        Ok(dx)
    }
}

unsafe extern "C" {
    fn class_token_forward(
        dtype: c_int,
        x: *const c_void,
        class: *const c_void,
        positions: *const c_void,
        y: *mut c_void,
        samples: c_int,
        length: c_int,
        n: c_int,
        stream: RawStream,
    ) -> c_int;
    fn class_token_backward(
        dtype: c_int,
        dy: *const c_void,
        class: *mut c_void,
        positions: *mut c_void,
        dx: *mut c_void,
        samples: c_int,
        length: c_int,
        n: c_int,
        stream: RawStream,
    ) -> c_int;
}
