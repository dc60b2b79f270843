//! CUDA bindings of max pooling.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};
use super::PoolGeometry;

pub(super) fn max(device: &CudaDevice, x: &Tensor, w: &PoolGeometry) -> Result<(Tensor, Tensor)> {
    let ((h, width), batch) = (w.output(), x.dim(0)?);
    let shape = (batch, h, width, w.channels);
    let (y, indices) = (uninit(device, x.dtype(), shape)?, uninit(device, DType::U8, shape)?);
    let (dtype, raw) = (dtype_code(x.dtype())?, PoolGeometryFfi::new(w, batch));
    let (x, to, cells) = (pointer(x)?, pointer(&y)?, pointer(&indices)?);
    // SAFETY: the tensors have the sizes in `raw`; stream order keeps them alive until the kernel finishes.
    check_status("max_pool_forward", unsafe { max_pool_forward(dtype, &raw, x, to, cells, stream(device)) })?;
    Ok((y, indices))
}

pub(super) fn max_backward(
    device: &CudaDevice,
    indices: &Tensor,
    dy: &Tensor,
    w: &PoolGeometry,
) -> Result<Tensor> {
    let batch = dy.dim(0)?;
    let dx = uninit(device, dy.dtype(), (batch, w.height, w.width, w.channels))?;
    let (dtype, raw) = (dtype_code(dy.dtype())?, PoolGeometryFfi::new(w, batch));
    let (indices, dy, to) = (pointer(indices)?, pointer(dy)?, pointer(&dx)?);
    // SAFETY: as above.
    check_status("max_pool_backward", unsafe {
        max_pool_backward(dtype, &raw, indices, dy, to, stream(device))
    })?;
    Ok(dx)
}

/// `PoolGeometry` in cuda/pooling.cuh.
#[repr(C)]
pub(in super::super) struct PoolGeometryFfi {
    batch: c_int,
    height: c_int,
    width: c_int,
    channels: c_int,
    out_height: c_int,
    out_width: c_int,
    size: c_int,
    stride: c_int,
    padding: c_int,
}

impl PoolGeometryFfi {
    pub(in super::super) fn new(w: &PoolGeometry, batch: usize) -> Self {
        let (out_height, out_width) = w.output();
        Self {
            batch: batch as c_int,
            height: w.height as c_int,
            width: w.width as c_int,
            channels: w.channels as c_int,
            out_height: out_height as c_int,
            out_width: out_width as c_int,
            size: w.size as c_int,
            stride: w.stride as c_int,
            padding: w.padding as c_int,
        }
    }
}

unsafe extern "C" {
    fn max_pool_forward(
        dtype: c_int,
        window: *const PoolGeometryFfi,
        x: *const c_void,
        y: *mut c_void,
        indices: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn max_pool_backward(
        dtype: c_int,
        window: *const PoolGeometryFfi,
        indices: *const c_void,
        dy: *const c_void,
        dx: *mut c_void,
        stream: RawStream,
    ) -> c_int;
}
