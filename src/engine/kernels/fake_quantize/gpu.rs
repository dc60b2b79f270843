//! CUDA bindings of fake quantization.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::RANGE_LEN;
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};

pub(super) fn forward(device: &CudaDevice, x: &Tensor, range: &Tensor, observe: bool) -> Result<Tensor> {
    let y = uninit(device, x.dtype(), x.shape())?;
    let (from, to, range, len) = (pointer(x)?, pointer(&y)?, range_pointer(range)?, x.elem_count() as i64);
    // SAFETY: both tensors have `len` values of one type.
    check_status("fake_quantize_forward", unsafe {
        fake_quantize_forward(
            dtype_code(x.dtype())?,
            from,
            to,
            range,
            len,
            c_int::from(observe),
            stream(device),
        )
    })?;
    Ok(y)
}

pub(super) fn backward(device: &CudaDevice, x: &Tensor, dy: &Tensor, range: &Tensor) -> Result<Tensor> {
    if (dy.elem_count(), dy.dtype()) != (x.elem_count(), x.dtype()) {
        bail!("fake_quantize: gradients of {:?} for values of {:?}", dy.shape(), x.shape())
    }
    let dx = uninit(device, x.dtype(), x.shape())?;
    let (values, d, to, range) = (pointer(x)?, pointer(dy)?, pointer(&dx)?, range_pointer(range)?);
    let (dtype, len) = (dtype_code(x.dtype())?, x.elem_count() as i64);
    // SAFETY: the three tensors have `len` values of one type.
    check_status("fake_quantize_backward", unsafe {
        fake_quantize_backward(dtype, values, d, to, range, len, stream(device))
    })?;
    Ok(dx)
}

pub(super) fn round_rows(
    device: &CudaDevice,
    from: Option<&Tensor>,
    into: &Tensor,
    rows: usize,
) -> Result<()> {
    let len = into.elem_count();
    let width = len / rows.max(1);
    let is_valid = |from: &Tensor| from.elem_count() == len && from.dtype() == DType::F32;
    if width * rows != len || !from.is_none_or(is_valid) {
        bail!("fake_quantize: {len} weights in {rows} rows")
    }
    let from = from.map_or(Ok(std::ptr::null_mut()), pointer)?;
    let (dtype, into) = (dtype_code(into.dtype())?, pointer(into)?);
    // SAFETY: `into` has `rows` rows of `width` values, and so has `from` unless it is null.
    check_status("fake_quantize_rows", unsafe {
        fake_quantize_rows(dtype, from.cast(), into, rows as i64, width as i64, stream(device))
    })
}

pub(super) fn move_range(device: &CudaDevice, range: &Tensor, fraction: Option<f64>) -> Result<()> {
    let range = range_pointer(range)?;
    // SAFETY: a range has two ends and two extremes.
    check_status("fake_quantize_move_range", unsafe {
        fake_quantize_move_range(range, fraction.unwrap_or(0.0), stream(device))
    })
}

fn range_pointer(range: &Tensor) -> Result<*mut f32> {
    if (range.elem_count(), range.dtype()) != (RANGE_LEN, DType::F32) {
        bail!("fake_quantize: a range of {} values of {:?}", range.elem_count(), range.dtype())
    }
    Ok(pointer(range)?.cast())
}

unsafe extern "C" {
    fn fake_quantize_forward(
        dtype: c_int,
        x: *const c_void,
        y: *mut c_void,
        range: *mut f32,
        len: i64,
        observe: c_int,
        stream: RawStream,
    ) -> c_int;
    fn fake_quantize_backward(
        dtype: c_int,
        x: *const c_void,
        dy: *const c_void,
        dx: *mut c_void,
        range: *const f32,
        len: i64,
        stream: RawStream,
    ) -> c_int;
    fn fake_quantize_rows(
        dtype: c_int,
        from: *const f32,
        into: *mut c_void,
        rows: i64,
        width: i64,
        stream: RawStream,
    ) -> c_int;
    fn fake_quantize_move_range(range: *mut f32, fraction: f64, stream: RawStream) -> c_int;
}
