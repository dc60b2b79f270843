//! The body for cards.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::{State, blocks};
use crate::kernels::cuda::{Stream, checked, code, pointer, pointer_or_null, stream};
use crate::kernels::update::{AdamW, Common};

impl AdamW {
    pub(super) fn card_8bit(
        &self,
        device: &CudaDevice,
        c: &Common,
        (weights, grads): (&Tensor, &Tensor),
        s: &State,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        let len = weights.elem_count();
        let lengths = [grads, &s.m, &s.v].map(Tensor::elem_count);
        let scales = [&s.m_scale, &s.v_scale].map(Tensor::elem_count);
        if lengths != [len; 3] || scales != [blocks(len); 2] || copy.is_some_and(|c| c.elem_count() != len) {
            bail!("buffers of {lengths:?} values and {scales:?} scales for {len} weights")
        }
        if grads.dtype() != weights.dtype() || copy.is_some() && weights.dtype() != DType::F32 {
            bail!("weights of {:?} with gradients of {:?}", weights.dtype(), grads.dtype())
        }
        let (step, root) = self.corrections(c.lr);
        let asked = Asked {
            dtype: code(weights.dtype())?,
            copy_dtype: code(copy.map_or(DType::BF16, Tensor::dtype))?,
            weights: pointer(weights)?,
            grads: pointer(grads)?,
            copy: pointer_or_null(copy)?,
            m: pointer(&s.m)?.cast(),
            v: pointer(&s.v)?.cast(),
            m_scale: pointer(&s.m_scale)?.cast(),
            v_scale: pointer(&s.v_scale)?.cast(),
            len: len as i64,
            decayed: if c.weight_decay == 0.0 { 0 } else { c.decayed as i64 },
            number: self.step,
            keep: 1.0 - c.lr * c.weight_decay,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            eps: self.eps as f32,
            step: step as f32,
            inv_root: (1.0 / root) as f32,
            grad_scale: c.grad_scale as f32,
        };
        // SAFETY: the lengths were compared above.
        checked("adamw8bit_update", unsafe { adamw8bit_update(&asked, stream(device)) })
    }
}

/// `Asked` in adamw8bit.cu.
#[repr(C)]
struct Asked {
    dtype: c_int,
    copy_dtype: c_int,
    weights: *mut c_void,
    grads: *mut c_void,
    copy: *mut c_void,
    m: *mut u8,
    v: *mut u8,
    m_scale: *mut f32,
    v_scale: *mut f32,
    len: i64,
    decayed: i64,
    number: u64,
    keep: f64,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
    step: f32,
    inv_root: f32,
    grad_scale: f32,
}

unsafe extern "C" {
    fn adamw8bit_update(asked: *const Asked, stream: Stream) -> c_int;
}
