//! CUDA binding of rotary position embeddings.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor, bail};

use super::Rotary;
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream};

impl Rotary {
    /// Rotates, or with `inverse` rotates back, the queries and keys of packed (batch, length, packed) projections.
    /// `to` may be `from`; if not, the values are copied too. `heads` counts query heads, `kv_heads` key heads.
    pub fn rotate_cuda(
        &self,
        device: &CudaDevice,
        from: &Tensor,
        to: &Tensor,
        (heads, kv_heads): (usize, usize),
        inverse: bool,
    ) -> Result<()> {
        let (batch, length, packed) = from.dims3()?;
        if length > self.length
            || packed != (heads + 2 * kv_heads) * 2 * self.half
            || to.dims() != from.dims()
        {
            bail!("rotary: {:?} into {:?}, {heads} query and {kv_heads} KV heads", from.dims(), to.dims())
        }
        // SAFETY: the sizes were checked above, and one thread reads and writes each pair of values.
        check_status("rotary_apply", unsafe {
            rotary_apply(
                dtype_code(from.dtype())?,
                pointer(from)?,
                pointer(to)?,
                batch as c_int,
                length as c_int,
                heads as c_int,
                kv_heads as c_int,
                self.half as c_int,
                self.theta,
                inverse as c_int,
                stream(device),
            )
        })
    }
}

unsafe extern "C" {
    fn rotary_apply(
        dtype: c_int,
        from: *const c_void,
        to: *mut c_void,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        half: c_int,
        theta: f64,
        inverse: c_int,
        stream: RawStream,
    ) -> c_int;
}
