//! CUDA binding of the transpose.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use crate::kernels::cuda::{RawStream, check_status, pointer, stream, uninit};

pub(super) fn forward(
    device: &CudaDevice,
    x: &Tensor,
    (batch, rows, cols): (usize, usize, usize),
) -> Result<Tensor> {
    let y = uninit(device, x.dtype(), (batch, cols, rows))?;
    let (size, from, to) = (x.dtype().size_in_bytes() as c_int, pointer(x)?, pointer(&y)?);
    // SAFETY: both have `batch` matrices of `rows` by `cols` values.
    check_status("transpose_forward", unsafe {
        transpose_forward(size, from, to, batch as i64, rows as c_int, cols as c_int, stream(device))
    })?;
    Ok(y)
}

unsafe extern "C" {
    fn transpose_forward(
        size: c_int,
        x: *const c_void,
        y: *mut c_void,
        batch: i64,
        rows: c_int,
        cols: c_int,
        stream: RawStream,
    ) -> c_int;
}
