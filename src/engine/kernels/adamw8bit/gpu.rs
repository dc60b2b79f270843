//! 8-bit AdamW on a GPU.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::{AdamW8bitState, blocks};
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, pointer_or_null, stream};
use crate::kernels::update::{AdamWKernel, UpdateArgs};

impl AdamWKernel {
    pub(super) fn apply_8bit_cuda(
        &self,
        device: &CudaDevice,
        c: &UpdateArgs,
        (weights, grads): (&Tensor, &Tensor),
        s: &AdamW8bitState,
        compute_weights: Option<&Tensor>,
    ) -> Result<()> {
        let len = weights.elem_count();
        let lengths = [grads, &s.m, &s.v].map(Tensor::elem_count);
        let scales = [&s.m_scale, &s.v_scale].map(Tensor::elem_count);
        if lengths != [len; 3]
            || scales != [blocks(len); 2]
            || compute_weights.is_some_and(|c| c.elem_count() != len)
        {
            bail!("buffers of {lengths:?} values and {scales:?} scales for {len} weights")
        }
        if grads.dtype() != weights.dtype() || compute_weights.is_some() && weights.dtype() != DType::F32 {
            bail!("weights of {:?} with gradients of {:?}", weights.dtype(), grads.dtype())
        }
        let (step, root) = self.bias_corrections(c.lr);
        let args = AdamW8bitArgs {
            dtype: dtype_code(weights.dtype())?,
            compute_dtype: dtype_code(compute_weights.map_or(DType::BF16, Tensor::dtype))?,
            weights: pointer(weights)?,
            grads: pointer(grads)?,
            compute_weights: pointer_or_null(compute_weights)?,
            m: pointer(&s.m)?.cast(),
            v: pointer(&s.v)?.cast(),
            m_scale: pointer(&s.m_scale)?.cast(),
            v_scale: pointer(&s.v_scale)?.cast(),
            len: len as i64,
            decayed_len: if c.weight_decay == 0.0 { 0 } else { c.decayed_len as i64 },
            step_number: self.step,
            decay_factor: 1.0 - c.lr * c.weight_decay,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            eps: self.eps as f32,
            step_size: step as f32,
            inv_root: (1.0 / root) as f32,
            grad_scale: c.grad_scale as f32,
        };
        // SAFETY: the lengths were checked above.
        check_status("adamw8bit_update", unsafe { adamw8bit_update(&args, stream(device)) })
    }
}

/// `AdamW8bitArgs` in adamw8bit.cu.
#[repr(C)]
struct AdamW8bitArgs {
    dtype: c_int,
    compute_dtype: c_int,
    weights: *mut c_void,
    grads: *mut c_void,
    compute_weights: *mut c_void,
    m: *mut u8,
    v: *mut u8,
    m_scale: *mut f32,
    v_scale: *mut f32,
    len: i64,
    decayed_len: i64,
    step_number: u64,
    decay_factor: f64,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    eps: f32,
    step_size: f32,
    inv_root: f32,
    grad_scale: f32,
}

unsafe extern "C" {
    fn adamw8bit_update(args: *const AdamW8bitArgs, stream: RawStream) -> c_int;
}
