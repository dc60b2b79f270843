//! CUDA binding of `add`.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use crate::kernels::Activation;
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream};

/// `y = act(a + b)`; `y` may be `a`.
pub(super) fn add_activation(
    device: &CudaDevice,
    a: &Tensor,
    b: &Tensor,
    y: &Tensor,
    act: Activation,
) -> Result<()> {
    if a.elem_count() != b.elem_count() {
        candle_core::bail!("add: shapes differ: {:?} and {:?}", a.dims(), b.dims())
    }
    // SAFETY: all three tensors have the same number of elements; one thread reads and writes each of them.
    check_status("add_forward", unsafe {
        add_forward(
            dtype_code(a.dtype())?,
            act as c_int,
            pointer(a)?,
            pointer(b)?,
            pointer(y)?,
            a.elem_count() as i64,
            stream(device),
        )
    })
}

unsafe extern "C" {
    fn add_forward(
        dtype: c_int,
        act: c_int,
        a: *const c_void,
        b: *const c_void,
        y: *mut c_void,
        len: i64,
        stream: RawStream,
    ) -> c_int;
}
