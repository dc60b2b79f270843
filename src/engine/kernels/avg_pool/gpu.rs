//! CUDA bindings of average pooling.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};
use super::super::pool::gpu::PoolGeometryFfi;
use super::PoolGeometry;

pub(super) fn avg_pool2d(device: &CudaDevice, x: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    let ((h, width), batch) = (w.output(), x.dim(0)?);
    let y = uninit(device, x.dtype(), (batch, h, width, w.channels))?;
    let (dtype, raw) = (dtype_code(x.dtype())?, PoolGeometryFfi::new(w, batch));
    let (x, to) = (pointer(x)?, pointer(&y)?);
    // SAFETY: the tensors have the sizes in `raw`; stream order keeps them alive until the kernel finishes.
    check_status("avg_pool_forward", unsafe { avg_pool_forward(dtype, &raw, x, to, stream(device)) })?;
    Ok(y)
}

pub(super) fn avg_pool2d_backward(device: &CudaDevice, dy: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    let batch = dy.dim(0)?;
    let dx = uninit(device, dy.dtype(), (batch, w.height, w.width, w.channels))?;
    let (dtype, raw) = (dtype_code(dy.dtype())?, PoolGeometryFfi::new(w, batch));
    let (dy, to) = (pointer(dy)?, pointer(&dx)?);
    // SAFETY: as above.
    check_status("avg_pool_backward", unsafe { avg_pool_backward(dtype, &raw, dy, to, stream(device)) })?;
    Ok(dx)
}

pub(super) fn global_avg_pool(device: &CudaDevice, x: &Tensor) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let y = uninit(device, x.dtype(), (batch, c))?;
    let (dtype, from, to) = (dtype_code(x.dtype())?, pointer(x)?, pointer(&y)?);
    let (batch, pixels, c) = (batch as c_int, (h * w) as i64, c as c_int);
    // SAFETY: `x` has batch * pixels * channels elements and `y` has batch * channels; stream order keeps both alive
    // until the kernel finishes.
    check_status("avg_pool_global_forward", unsafe {
        avg_pool_global_forward(dtype, from, to, batch, pixels, c, stream(device))
    })?;
    Ok(y)
}

pub(super) fn global_avg_pool_backward(
    device: &CudaDevice,
    dy: &Tensor,
    (h, w): (usize, usize),
) -> Result<Tensor> {
    let (batch, c) = dy.dims2()?;
    let dx = uninit(device, dy.dtype(), (batch, h, w, c))?;
    let (dtype, from, to) = (dtype_code(dy.dtype())?, pointer(dy)?, pointer(&dx)?);
    let (batch, pixels, c) = (batch as c_int, (h * w) as i64, c as c_int);
    // SAFETY: as above.
    check_status("avg_pool_global_backward", unsafe {
        avg_pool_global_backward(dtype, from, to, batch, pixels, c, stream(device))
    })?;
    Ok(dx)
}

unsafe extern "C" {
    fn avg_pool_forward(
        dtype: c_int,
        window: *const PoolGeometryFfi,
        x: *const c_void,
        y: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn avg_pool_backward(
        dtype: c_int,
        window: *const PoolGeometryFfi,
        dy: *const c_void,
        dx: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn avg_pool_global_forward(
        dtype: c_int,
        x: *const c_void,
        y: *mut c_void,
        batch: c_int,
        pixels: i64,
        channels: c_int,
        stream: RawStream,
    ) -> c_int;
    fn avg_pool_global_backward(
        dtype: c_int,
        dy: *const c_void,
        dx: *mut c_void,
        batch: c_int,
        pixels: i64,
        channels: c_int,
        stream: RawStream,
    ) -> c_int;
}
