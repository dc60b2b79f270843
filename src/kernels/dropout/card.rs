//! The body for cards: the keys of samples travel with the launch.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use crate::kernels::cuda::{SAMPLES, Stream, checked, code, fresh, pointer, stream};
use crate::random::Random;

pub(super) fn apply(
    device: &CudaDevice,
    x: &Tensor,
    threshold: u64,
    scale: f64,
    key: impl Fn(usize) -> Random,
) -> Result<Tensor> {
    let y = fresh(device, x.dtype(), x.shape())?;
    let samples = x.dim(0)?;
    let width = x.elem_count() / samples.max(1);
    let (from, to) = (pointer(x)?, pointer(&y)?);
    for first in (0..samples).step_by(SAMPLES) {
        let keys: Vec<Random> = (first..samples.min(first + SAMPLES)).map(&key).collect();
        let offset = first * width * x.dtype().size_in_bytes();
        // SAFETY: the samples from `first` on lie within both tensors, and the keys are read before it returns.
        checked("dropout_apply", unsafe {
            dropout_apply(
                code(x.dtype())?,
                from.byte_add(offset),
                to.byte_add(offset),
                keys.as_ptr().cast(),
                keys.len() as c_int,
                width as i64,
                threshold as u32,
                scale,
                stream(device),
            )
        })?;
    }
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
        stream: Stream,
    ) -> c_int;
}
