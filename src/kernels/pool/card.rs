//! Max pooling on a card.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::cuda::{Stream, checked, code, fresh, pointer, stream};
use super::Window;

pub(super) fn max(device: &CudaDevice, x: &Tensor, w: &Window) -> Result<(Tensor, Tensor)> {
    let ((h, width), batch) = (w.output(), x.dim(0)?);
    let shape = (batch, h, width, w.channels);
    let (y, which) = (fresh(device, x.dtype(), shape)?, fresh(device, DType::U8, shape)?);
    let (dtype, raw) = (code(x.dtype())?, Raw::new(w, batch));
    let (x, to, cells) = (pointer(x)?, pointer(&y)?, pointer(&which)?);
    // SAFETY: the tensors have the sizes of the window, and outlive the launch in the stream's order.
    checked("pool_max", unsafe { pool_max(dtype, &raw, x, to, cells, stream(device)) })?;
    Ok((y, which))
}

pub(super) fn max_backward(device: &CudaDevice, which: &Tensor, dy: &Tensor, w: &Window) -> Result<Tensor> {
    let batch = dy.dim(0)?;
    let dx = fresh(device, dy.dtype(), (batch, w.height, w.width, w.channels))?;
    let (dtype, raw) = (code(dy.dtype())?, Raw::new(w, batch));
    let (which, dy, to) = (pointer(which)?, pointer(dy)?, pointer(&dx)?);
    // SAFETY: as above.
    checked("pool_max_backward", unsafe { pool_max_backward(dtype, &raw, which, dy, to, stream(device)) })?;
    Ok(dx)
}

/// `Window` in cuda/pooling.cuh.
#[repr(C)]
pub(in super::super) struct Raw {
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

impl Raw {
    pub(in super::super) fn new(w: &Window, batch: usize) -> Self {
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
    fn pool_max(
        dtype: c_int,
        window: *const Raw,
        x: *const c_void,
        y: *mut c_void,
        which: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn pool_max_backward(
        dtype: c_int,
        window: *const Raw,
        which: *const c_void,
        dy: *const c_void,
        dx: *mut c_void,
        stream: Stream,
    ) -> c_int;
}
