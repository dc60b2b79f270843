//! CUDA binding of dropout.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};
use crate::kernels::sample_keys::SampleKeys;

pub(super) fn apply(
    device: &CudaDevice,
    x: &Tensor,
    threshold: u64,
    scale: f64,
    keys: &SampleKeys,
) -> Result<Tensor> {
    let y = uninit(device, x.dtype(), x.shape())?;
    let samples = x.dim(0)?;
    let width = x.elem_count() / samples.max(1);
    let keys = keys.derive(device)?;
    let (from, to, keys) = (pointer(x)?, pointer(&y)?, pointer(&keys)?);
    let (dtype, samples) = (dtype_code(x.dtype())?, samples as c_int);
    // SAFETY: both tensors have `samples` rows of `width` values, and `keys` has one key per sample.
    check_status("dropout_apply", unsafe {
        dropout_apply(dtype, from, to, keys, samples, width as i64, threshold as u32, scale, stream(device))
    })?;
    Ok(y)
}

unsafe extern "C" {
    fn dropout_apply(
        dtype: c_int,
        x: *const c_void,
        y: *mut c_void,
        keys: *const c_void,
        samples: c_int,
        width: i64,
        threshold: u32,
        scale: f64,
        stream: RawStream,
    ) -> c_int;
}
