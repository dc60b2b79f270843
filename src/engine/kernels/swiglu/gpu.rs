//! CUDA bindings of SwiGLU.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};

pub(super) fn forward(device: &CudaDevice, x: &Tensor) -> Result<Tensor> {
    let n = x.dim(x.rank() - 1)? / 2;
    let y = uninit(device, x.dtype(), [&x.dims()[..x.rank() - 1], &[n]].concat())?;
    let rows = x.elem_count() / (2 * n).max(1);
    // SAFETY: `y` has one row of `n` values for each row of `2 n` in `x`.
    check_status("swiglu_forward", unsafe {
        swiglu_forward(
            dtype_code(x.dtype())?,
            pointer(x)?,
            pointer(&y)?,
            rows as i64,
            n as c_int,
            stream(device),
        )
    })?;
    Ok(y)
}

pub(super) fn backward(device: &CudaDevice, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let n = x.dim(x.rank() - 1)? / 2;
    let dx = uninit(device, x.dtype(), x.shape())?;
    let (rows, dtype) = (x.elem_count() / (2 * n).max(1), dtype_code(x.dtype())?);
    let [from, d, to] = [pointer(x)?, pointer(dy)?, pointer(&dx)?];
    // SAFETY: as above, and `dx` has the size of `x`.
    check_status("swiglu_backward", unsafe {
        swiglu_backward(dtype, from, d, to, rows as i64, n as c_int, stream(device))
    })?;
    Ok(dx)
}

unsafe extern "C" {
    fn swiglu_forward(
        dtype: c_int,
        x: *const c_void,
        y: *mut c_void,
        rows: i64,
        n: c_int,
        stream: RawStream,
    ) -> c_int;
    fn swiglu_backward(
        dtype: c_int,
        x: *const c_void,
        dy: *const c_void,
        dx: *mut c_void,
        rows: i64,
        n: c_int,
        stream: RawStream,
    ) -> c_int;
}
