//! Column sums of a matrix, added onto a gradient in an order that depends on the sizes alone.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::product::Mat;
use super::{Stream, checked, code, pointer, scratch, stream};
use crate::kernels::linear::{card_ranges, card_workspace};

/// `into += sums of the columns of d`, which is not turned; takes `linear::card_workspace` bytes meanwhile.
pub fn add_sums(device: &CudaDevice, into: &Tensor, d: Mat) -> Result<()> {
    let dtype = d.of.dtype();
    let partial = scratch(device, card_workspace(dtype, d.rows, d.cols) as usize)?;
    let from = d.from * dtype.size_in_bytes();
    // SAFETY: the matrix lies within its tensor, and the sums of each range of rows have room.
    checked("columns_add", unsafe {
        columns_add(
            code(dtype)?,
            pointer(d.of)?.byte_add(from),
            pointer(&partial)?,
            pointer(into)?,
            d.rows as i64,
            d.stride as i64,
            d.cols as i64,
            card_ranges(d.rows, d.cols) as c_int,
            stream(device),
        )
    })
}

unsafe extern "C" {
    fn columns_add(
        dtype: c_int,
        d: *const c_void,
        partial: *mut c_void,
        into: *mut c_void,
        rows: i64,
        stride: i64,
        columns: i64,
        parts: c_int,
        stream: Stream,
    ) -> c_int;
}
