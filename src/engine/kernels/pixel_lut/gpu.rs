//! CUDA binding of the pixel lookup table.

use std::ffi::{c_int, c_void};

use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::cuda::{self, RawStream, check_status, dtype_code, pointer, stream};
use crate::kernels::kernel_timer;

/// Looks up `bytes` (..., channels) in f32 `tables` (channels, 256) and writes the values, rounded to the type of
/// `values`.
pub fn expand(bytes: &Tensor, tables: &Tensor, values: &Tensor) -> Result<()> {
    let _scope = kernel_timer::enter(module_path!());
    let (Some(device), (channels, 256)) = (cuda::device_of(bytes), tables.dims2()?) else {
        bail!("pixel_lut: want (channels, 256) on CUDA, got {:?} on {:?}", tables.dims(), bytes.device())
    };
    let sizes = bytes.dims().last() == Some(&channels) && bytes.dims() == values.dims();
    if bytes.dtype() != DType::U8 || tables.dtype() != DType::F32 || !sizes {
        bail!("{:?} of {:?} by {:?} of {:?}", bytes.dims(), bytes.dtype(), tables.dims(), tables.dtype())
    }
    let (from, to, count) = (pointer(bytes)?, pointer(values)?, bytes.elem_count() as i64);
    // SAFETY: `values` has one element per byte, and every channel has a table.
    check_status("pixel_lut_expand", unsafe {
        let dtype = dtype_code(values.dtype())?;
        pixel_lut_expand(dtype, from, pointer(tables)?, to, count, channels as c_int, stream(device))
    })
}

unsafe extern "C" {
    fn pixel_lut_expand(
        dtype: c_int,
        bytes: *const c_void,
        tables: *const c_void,
        values: *mut c_void,
        count: i64,
        channels: c_int,
        stream: RawStream,
    ) -> c_int;
}
