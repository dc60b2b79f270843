//! CUDA binding of the mask.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream};

pub(super) fn apply(device: &CudaDevice, values: &Tensor, mask: &Tensor) -> Result<()> {
    let len = values.elem_count();
    if mask.elem_count() != len || mask.dtype() != DType::U8 {
        bail!("mask: {len} values need as many bytes, not {} of {:?}", mask.elem_count(), mask.dtype())
    }
    // SAFETY: both buffers have `len` elements of their types.
    check_status("mask_apply", unsafe {
        mask_apply(dtype_code(values.dtype())?, pointer(values)?, pointer(mask)?, len as i64, stream(device))
    })
}

unsafe extern "C" {
    fn mask_apply(
        dtype: c_int,
        values: *mut c_void,
        mask: *const c_void,
        len: i64,
        stream: RawStream,
    ) -> c_int;
}
