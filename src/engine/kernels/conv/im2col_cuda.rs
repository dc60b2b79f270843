//! im2col and col2im on CUDA, in blocks of rows that fit a workspace: patches are gathered before a GEMM and scattered
//! back after one.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::cuda::cublaslt::GpuMat;
use super::super::cuda::{RawStream, check_status, dtype_code, pointer, stream, uninit};
use super::super::im2col::{Blocking, PixelBlock};
use super::ConvGeometry;
use super::gpu::ConvGeometryFfi;
use super::workspace::padded_patch_len;

/// A strided matrix inside a tensor.
pub(super) fn submatrix(of: &Tensor, from: usize, rows: usize, cols: usize, stride: usize) -> GpuMat<'_> {
    GpuMat { tensor: of, offset: from, rows, cols, stride, transposed: false }
}

/// Blocks of output pixels whose patches take at most `capacity` values; a block has at least one patch.
pub(super) fn blocking(g: &ConvGeometry, batch: usize, capacity: usize) -> Blocking {
    let (rows, image_pixels) = ((capacity / padded_patch_len(g)).max(1), g.output_pixels());
    Blocking {
        batch,
        image_pixels,
        block_images: (rows / image_pixels).clamp(1, batch),
        block_pixels: rows.min(image_pixels),
    }
}

/// Gathers the patches of a block into `to`, as rows of [`padded_patch_len`] values.
pub(super) fn im2col(
    device: &CudaDevice,
    g: &ConvGeometry,
    x: &Tensor,
    to: &Tensor,
    group: usize,
    block: PixelBlock,
) -> Result<()> {
    let (first, rows) = (block.first_row(g.output_pixels()) as i64, block.rows() as i64);
    let (dtype, raw) = (dtype_code(x.dtype())?, ConvGeometryFfi::new(g));
    let (x, to) = (pointer(x)?, pointer(to)?);
    // SAFETY: the block lies in the batch, and `to` has room for its patches.
    check_status("conv_im2col", unsafe {
        conv_im2col(
            dtype,
            &raw,
            x,
            to,
            group as c_int,
            first,
            rows,
            padded_patch_len(g) as c_int,
            stream(device),
        )
    })
}

/// Copies the (n, k) matrix `of` into a tensor of `bytes` bytes, each row zero-padded to `row` values.
pub(super) fn pad_rows(
    device: &CudaDevice,
    of: &Tensor,
    bytes: usize,
    n: usize,
    k: usize,
    row: usize,
) -> Result<Tensor> {
    let to = uninit(device, of.dtype(), bytes / of.dtype().size_in_bytes())?;
    let (dtype, from, rows) = (dtype_code(of.dtype())?, pointer(of)?, n as i64);
    // SAFETY: both have `n` rows, of `k` and `row` values.
    check_status("conv_pad_rows", unsafe {
        conv_pad_rows(dtype, from, pointer(&to)?, rows, k as c_int, row as c_int, stream(device))
    })?;
    Ok(to)
}

/// Adds the (n, k) matrix in `grad`, of type `dtype` with row stride `row`, to `dweight`.
pub(super) fn accumulate_gradient(
    device: &CudaDevice,
    dtype: DType,
    grad: &Tensor,
    dweight: &Tensor,
    n: usize,
    k: usize,
    row: usize,
) -> Result<()> {
    let (dtype, what, into) = (dtype_code(dtype)?, pointer(grad)?, pointer(dweight)?);
    // SAFETY: both have `n` rows of the stated lengths and types.
    check_status("conv_accumulate_gradient", unsafe {
        conv_accumulate_gradient(dtype, what, into, n as i64, k as c_int, row as c_int, stream(device))
    })
}

pub(super) fn col2im(
    device: &CudaDevice,
    g: &ConvGeometry,
    patches: &Tensor,
    dx: &Tensor,
    group: usize,
    block: PixelBlock,
    add: bool,
) -> Result<()> {
    let (line, lines) = input_rows(g, block);
    let (first, rows) = (block.first_row(g.output_pixels()) as i64, block.rows() as i64);
    let (dtype, raw) = (dtype_code(dx.dtype())?, ConvGeometryFfi::new(g));
    let (from, to) = (pointer(patches)?, pointer(dx)?);
    // SAFETY: the block lies in the batch, `patches` holds its patches, and the lines lie in `dx`.
    check_status("conv_col2im", unsafe {
        conv_col2im(
            dtype,
            &raw,
            from,
            to,
            group as c_int,
            first,
            rows,
            line as i64,
            lines as i64,
            add as c_int,
            stream(device),
        )
    })
}

/// The input lines, counted over the batch, that the patches of a block cover: the first line and their number.
fn input_rows(g: &ConvGeometry, block: PixelBlock) -> (usize, usize) {
    let start = block.first_image * g.height;
    if block.pixels == g.output_pixels() {
        return (start, block.images * g.height);
    }
    let width = g.output().1;
    let (top, bottom) = (block.first_pixel / width, (block.first_pixel + block.pixels - 1) / width);
    let from = (top * g.stride).saturating_sub(g.padding);
    let until = bottom * g.stride + (g.kernel - 1) * g.dilation + 1;
    let until = until.saturating_sub(g.padding).min(g.height);
    (start + from, until.saturating_sub(from))
}

unsafe extern "C" {
    fn conv_im2col(
        dtype: c_int,
        g: *const ConvGeometryFfi,
        x: *const c_void,
        to: *mut c_void,
        group: c_int,
        first: i64,
        rows: i64,
        row: c_int,
        stream: RawStream,
    ) -> c_int;
    fn conv_pad_rows(
        dtype: c_int,
        from: *const c_void,
        to: *mut c_void,
        rows: i64,
        columns: c_int,
        row: c_int,
        stream: RawStream,
    ) -> c_int;
    fn conv_col2im(
        dtype: c_int,
        g: *const ConvGeometryFfi,
        windows: *const c_void,
        dx: *mut c_void,
        group: c_int,
        first: i64,
        rows: i64,
        line: i64,
        lines: i64,
        add: c_int,
        stream: RawStream,
    ) -> c_int;
    fn conv_accumulate_gradient(
        dtype: c_int,
        what: *const c_void,
        into: *mut c_void,
        rows: i64,
        columns: c_int,
        row: c_int,
        stream: RawStream,
    ) -> c_int;
}
