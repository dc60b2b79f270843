//! Column sums of a matrix, accumulated into a bias gradient. The order of summation depends on the sizes alone, so
//! results are deterministic.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::cublaslt::GpuMat;
use super::{RawStream, check_status, dtype_code, pointer, scratch, stream};
use crate::kernels::linear::{bias_gradient_workspace, cuda_row_ranges};

/// `into += column sums of d`. `d` must not be transposed. Allocates `linear::bias_gradient_workspace` bytes of
/// scratch.
pub fn add_column_sums(device: &CudaDevice, into: &Tensor, d: GpuMat) -> Result<()> {
    let dtype = d.tensor.dtype();
    let partial = scratch(device, bias_gradient_workspace(dtype, d.rows, d.cols) as usize)?;
    let from = d.offset * dtype.size_in_bytes();
    // SAFETY: the matrix lies within its tensor, and `partial` holds one sum per row range and column.
    check_status("column_sums_accumulate", unsafe {
        column_sums_accumulate(
            dtype_code(dtype)?,
            pointer(d.tensor)?.byte_add(from),
            pointer(&partial)?,
            pointer(into)?,
            d.rows as i64,
            d.stride as i64,
            d.cols as i64,
            cuda_row_ranges(d.rows, d.cols) as c_int,
            stream(device),
        )
    })
}

unsafe extern "C" {
    fn column_sums_accumulate(
        dtype: c_int,
        d: *const c_void,
        partial: *mut c_void,
        into: *mut c_void,
        rows: i64,
        stride: i64,
        columns: i64,
        parts: c_int,
        stream: RawStream,
    ) -> c_int;
}
