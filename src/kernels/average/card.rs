//! Average pooling on a card.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::cuda::{Stream, checked, code, fresh, pointer, stream};
use super::super::pool::card::Raw;
use super::Window;

pub(super) fn windows(device: &CudaDevice, x: &Tensor, w: &Window) -> Result<Tensor> {
    let ((h, width), batch) = (w.output(), x.dim(0)?);
    let y = fresh(device, x.dtype(), (batch, h, width, w.channels))?;
    let (dtype, raw) = (code(x.dtype())?, Raw::new(w, batch));
    let (x, to) = (pointer(x)?, pointer(&y)?);
    // SAFETY: the tensors have the sizes of the window, and outlive the launch in the stream's order.
    checked("average_windows", unsafe { average_windows(dtype, &raw, x, to, stream(device)) })?;
    Ok(y)
}

pub(super) fn windows_backward(device: &CudaDevice, dy: &Tensor, w: &Window) -> Result<Tensor> {
    let batch = dy.dim(0)?;
    let dx = fresh(device, dy.dtype(), (batch, w.height, w.width, w.channels))?;
    let (dtype, raw) = (code(dy.dtype())?, Raw::new(w, batch));
    let (dy, to) = (pointer(dy)?, pointer(&dx)?);
    // SAFETY: as above.
    checked("average_windows_backward", unsafe {
        average_windows_backward(dtype, &raw, dy, to, stream(device))
    })?;
    Ok(dx)
}

pub(super) fn whole(device: &CudaDevice, x: &Tensor) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let y = fresh(device, x.dtype(), (batch, c))?;
    let (dtype, from, to) = (code(x.dtype())?, pointer(x)?, pointer(&y)?);
    let (batch, pixels, c) = (batch as c_int, (h * w) as i64, c as c_int);
    // SAFETY: `x` has so many values, `y` one for each picture and channel; both outlive the launch.
    checked("average_whole", unsafe { average_whole(dtype, from, to, batch, pixels, c, stream(device)) })?;
    Ok(y)
}

pub(super) fn whole_backward(device: &CudaDevice, dy: &Tensor, (h, w): (usize, usize)) -> Result<Tensor> {
    let (batch, c) = dy.dims2()?;
    let dx = fresh(device, dy.dtype(), (batch, h, w, c))?;
    let (dtype, from, to) = (code(dy.dtype())?, pointer(dy)?, pointer(&dx)?);
    let (batch, pixels, c) = (batch as c_int, (h * w) as i64, c as c_int);
    // SAFETY: as above.
    checked("average_whole_backward", unsafe {
        average_whole_backward(dtype, from, to, batch, pixels, c, stream(device))
    })?;
    Ok(dx)
}

unsafe extern "C" {
    fn average_windows(
        dtype: c_int,
        window: *const Raw,
        x: *const c_void,
        y: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn average_windows_backward(
        dtype: c_int,
        window: *const Raw,
        dy: *const c_void,
        dx: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn average_whole(
        dtype: c_int,
        x: *const c_void,
        y: *mut c_void,
        batch: c_int,
        pixels: i64,
        channels: c_int,
        stream: Stream,
    ) -> c_int;
    fn average_whole_backward(
        dtype: c_int,
        dy: *const c_void,
        dx: *mut c_void,
        batch: c_int,
        pixels: i64,
        channels: c_int,
        stream: Stream,
    ) -> c_int;
}
