//! Adafactor on a GPU, parameter by parameter. The norms that determine the step size stay on the device, so nothing
//! synchronizes.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor, bail};

use super::{
    AdafactorKernel, CUDA_BLOCKS, CUDA_SUMS_BYTES, FactoredParam, cuda_column_bytes, factored_params,
    state_len,
};
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, scratch, stream};
use crate::kernels::linear::cuda_row_ranges;
use crate::kernels::update::UpdateArgs;
use crate::params::FlatLayout;

impl AdafactorKernel {
    pub(super) fn apply_cuda(
        &self,
        device: &CudaDevice,
        c: &UpdateArgs,
        params: &FlatLayout,
        (weights, grads, state): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        let lengths = [weights, grads, state].map(Tensor::elem_count);
        if lengths != [params.trained_len, params.trained_len, state_len(params)]
            || [grads.dtype(), state.dtype()] != [weights.dtype(); 2]
        {
            bail!("buffers of {lengths:?} values for {} parameters", params.trained_len)
        }
        let columns = scratch(device, cuda_column_bytes(params, weights.dtype()) as usize)?;
        let sums = scratch(device, CUDA_SUMS_BYTES as usize)?;
        let (sums, size) = (pointer(&sums)?.cast::<f64>(), weights.dtype().size_in_bytes());
        let of = |tensor: &Tensor, at: usize| {
            Ok::<_, candle_core::Error>(pointer(tensor)?.wrapping_byte_add(at * size))
        };
        for param in factored_params(params) {
            let (lr, weight_decay) = param.lr_and_decay(c);
            let FactoredParam { start, rows, cols, state_offset: at, .. } = param;
            let args = AdafactorArgs {
                dtype: dtype_code(weights.dtype())?,
                weights: of(weights, start)?,
                grads: of(grads, start)?,
                state: of(state, at)?,
                partial: pointer(&columns)?,
                sums,
                measured: sums.wrapping_add(CUDA_BLOCKS),
                rows: rows as i64,
                cols: cols as i64,
                parts: cuda_row_ranges(rows, cols) as c_int,
                blocks: CUDA_BLOCKS as c_int,
                grad_scale: c.grad_scale,
                one_minus_beta2: (self.step as f64).powf(self.decay),
                decay_factor: 1.0 - lr * weight_decay,
                rho: lr.min(1.0 / (self.step as f64).sqrt()),
                eps: self.eps,
                clip: self.clip,
            };
            // SAFETY: the parameter and its state lie within their buffers, and the sums have the size that the kernel
            // needs.
            check_status("adafactor_update", unsafe { adafactor_update(&args, stream(device)) })?;
        }
        Ok(())
    }
}

/// `AdafactorArgs` in adafactor.cu.
#[repr(C)]
struct AdafactorArgs {
    dtype: c_int,
    weights: *mut c_void,
    grads: *mut c_void,
    state: *mut c_void,
    partial: *mut c_void,
    sums: *mut f64,
    measured: *mut f64,
    rows: i64,
    cols: i64,
    parts: c_int,
    blocks: c_int,
    grad_scale: f64,
    one_minus_beta2: f64,
    decay_factor: f64,
    rho: f64,
    eps: f64,
    clip: f64,
}

unsafe extern "C" {
    fn adafactor_update(args: *const AdafactorArgs, stream: RawStream) -> c_int;
}
