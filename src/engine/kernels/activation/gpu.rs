//! CUDA bindings of the element-wise activations.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::Activation;
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};

pub(super) fn forward(device: &CudaDevice, x: &Tensor, act: Activation) -> Result<Tensor> {
    let y = uninit(device, x.dtype(), x.shape())?;
    forward_into(device, x, &y, act)?;
    Ok(y)
}

/// `y = act(x)`; `y` may be `x`.
pub fn forward_into(device: &CudaDevice, x: &Tensor, y: &Tensor, act: Activation) -> Result<()> {
    if x.elem_count() != y.elem_count() {
        candle_core::bail!("activation: shapes differ: {:?} and {:?}", x.dims(), y.dims())
    }
    // SAFETY: both tensors have the same number of elements; one thread reads and writes each of them.
    check_status("activation_forward", unsafe {
        let len = x.elem_count() as i64;
        activation_forward(
            dtype_code(x.dtype())?,
            act as c_int,
            pointer(x)?,
            pointer(y)?,
            len,
            stream(device),
        )
    })
}

/// `dx = dy act'(v)`; `dx` may be `dy`.
pub fn backward(device: &CudaDevice, v: &Tensor, dy: &Tensor, dx: &Tensor, act: Activation) -> Result<()> {
    if v.elem_count() != dy.elem_count() {
        candle_core::bail!("activation backward: shapes differ: {:?} and {:?}", dy.dims(), v.dims())
    }
    // SAFETY: all three tensors have the same number of elements; one thread reads and writes each of them.
    check_status("activation_backward", unsafe {
        activation_backward(
            dtype_code(dy.dtype())?,
            act as c_int,
            pointer(v)?,
            pointer(dy)?,
            pointer(dx)?,
            dy.elem_count() as i64,
            stream(device),
        )
    })
}

unsafe extern "C" {
    fn activation_forward(
        dtype: c_int,
        act: c_int,
        x: *const c_void,
        y: *mut c_void,
        len: i64,
        stream: RawStream,
    ) -> c_int;
    fn activation_backward(
        dtype: c_int,
        act: c_int,
        v: *const c_void,
        dy: *const c_void,
        dx: *mut c_void,
        len: i64,
        stream: RawStream,
    ) -> c_int;
}
