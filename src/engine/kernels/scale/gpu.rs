//! CUDA bindings of the per-channel scaling.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, pointer_or_null, stream, uninit};

/// `x s`, plus the gradient of the means, `m / pixels`, if given.
pub(super) fn apply(device: &CudaDevice, x: &Tensor, s: &Tensor, m: Option<&Tensor>) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let y = uninit(device, x.dtype(), x.shape())?;
    // SAFETY: `s` and `m` have one value per sample and channel of `x`.
    check_status("scale_apply", unsafe {
        scale_apply(
            dtype_code(x.dtype())?,
            pointer(x)?,
            pointer(s)?,
            pointer_or_null(m)?,
            pointer(&y)?,
            batch as i64,
            (h * w) as i64,
            c as c_int,
            1.0 / (h * w) as f64,
            stream(device),
        )
    })?;
    Ok(y)
}

pub(super) fn factor_gradient(device: &CudaDevice, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let ds = uninit(device, x.dtype(), (batch, c))?;
    let [from, d, to] = [pointer(x)?, pointer(dy)?, pointer(&ds)?];
    let (dtype, pixels) = (dtype_code(x.dtype())?, (h * w) as i64);
    // SAFETY: `dy` has the size of `x`, and `ds` has one value per sample and channel.
    check_status("scale_factor_gradient", unsafe {
        scale_factor_gradient(dtype, from, d, to, batch as i64, pixels, c as c_int, stream(device))
    })?;
    Ok(ds)
}

unsafe extern "C" {
    fn scale_apply(
        dtype: c_int,
        x: *const c_void,
        s: *const c_void,
        m: *const c_void,
        y: *mut c_void,
        samples: i64,
        pixels: i64,
        channels: c_int,
        inv_pixels: f64,
        stream: RawStream,
    ) -> c_int;
    fn scale_factor_gradient(
        dtype: c_int,
        x: *const c_void,
        dy: *const c_void,
        ds: *mut c_void,
        samples: i64,
        pixels: i64,
        channels: c_int,
        stream: RawStream,
    ) -> c_int;
}
