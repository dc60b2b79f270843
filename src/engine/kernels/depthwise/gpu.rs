//! CUDA bindings of depthwise convolution, `depthwise.cu`. No tensor may be empty.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Shape, Tensor};

use super::super::conv::gpu::ConvGeometryFfi;
use super::super::cuda::{RawStream, check_status, dtype_code, pointer, scratch, stream, uninit};
use super::{ConvGeometry, GridPartition, cuda_partition, cuda_workspace};

/// Writes the output before bias and activation into `y`.
pub fn forward(device: &CudaDevice, g: &ConvGeometry, x: &Tensor, weight: &Tensor, y: &Tensor) -> Result<()> {
    let (dtype, batch, raw) = (dtype_code(x.dtype())?, x.dim(0)? as c_int, ConvGeometryFfi::new(g));
    let (x, weight, y) = (pointer(x)?, pointer(weight)?, pointer(y)?);
    // SAFETY: the tensors have the sizes of the geometry; stream order keeps them alive until the kernel finishes.
    check_status("depthwise_forward", unsafe {
        depthwise_forward(dtype, &raw, batch, x, weight, y, stream(device))
    })
}

/// The gradient of an input of shape `shape`.
pub fn input_gradient(
    device: &CudaDevice,
    g: &ConvGeometry,
    dy: &Tensor,
    weight: &Tensor,
    shape: &Shape,
) -> Result<Tensor> {
    let dx = uninit(device, dy.dtype(), shape)?;
    let (dtype, batch, raw) = (dtype_code(dy.dtype())?, dy.dim(0)? as c_int, ConvGeometryFfi::new(g));
    let (dy, weight, to) = (pointer(dy)?, pointer(weight)?, pointer(&dx)?);
    // SAFETY: as above.
    check_status("depthwise_input_gradient", unsafe {
        depthwise_input_gradient(dtype, &raw, batch, dy, weight, to, stream(device))
    })?;
    Ok(dx)
}

/// Accumulates the weight gradient, (channels, taps).
pub fn weight_gradient(
    device: &CudaDevice,
    g: &ConvGeometry,
    x: &Tensor,
    dy: &Tensor,
    dweight: &Tensor,
) -> Result<()> {
    let batch = x.dim(0)?;
    let GridPartition { chunk, parts } = cuda_partition(g, batch, x.dtype());
    let partials = scratch(device, cuda_workspace(g, batch, x.dtype()))?;
    let (dtype, raw) = (dtype_code(x.dtype())?, ConvGeometryFfi::new(g));
    let (x, dy, sums, into) = (pointer(x)?, pointer(dy)?, pointer(&partials)?, pointer(dweight)?);
    let (batch, chunk, parts) = (batch as c_int, chunk as i64, parts as c_int);
    // SAFETY: as above; `partials` has room for the sums of all parts, and stream order delays its release.
    check_status("depthwise_weight_gradient", unsafe {
        depthwise_weight_gradient(dtype, &raw, batch, x, dy, sums, into, chunk, parts, stream(device))
    })
}

unsafe extern "C" {
    fn depthwise_forward(
        dtype: c_int,
        g: *const ConvGeometryFfi,
        batch: c_int,
        x: *const c_void,
        weight: *const c_void,
        y: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn depthwise_input_gradient(
        dtype: c_int,
        g: *const ConvGeometryFfi,
        batch: c_int,
        dy: *const c_void,
        weight: *const c_void,
        dx: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn depthwise_weight_gradient(
        dtype: c_int,
        g: *const ConvGeometryFfi,
        batch: c_int,
        x: *const c_void,
        dy: *const c_void,
        sums: *mut c_void,
        dweight: *mut c_void,
        chunk: i64,
        parts: c_int,
        stream: RawStream,
    ) -> c_int;
}
