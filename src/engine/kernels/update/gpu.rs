//! Optimizer updates on a GPU: one pass over all buffers, including the copy of the weights that kernels compute with.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::{AdamWKernel, SgdKernel, UpdateArgs};
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, pointer_or_null, stream, uninit};
use crate::kernels::lion::LionKernel;

/// Blocks of the sum of squares: a few per SM of a large GPU.
const REDUCE_BLOCKS: usize = 1056;

/// `UpdateBuffers` in update.cu.
#[repr(C)]
pub(in crate::kernels) struct UpdateBuffers {
    dtype: c_int,
    compute_dtype: c_int,
    weights: *mut c_void,
    grads: *mut c_void,
    first: *mut c_void,
    second: *mut c_void,
    compute_weights: *mut c_void,
    len: i64,
    decayed_len: i64,
    lr: f64,
    grad_scale: f64,
    weight_decay: f64,
    device_grad_scale: *const c_void,
}

impl UpdateBuffers {
    /// Checks that weights, gradients, state and compute weights have equal lengths.
    pub(in crate::kernels) fn new(
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        state: [Option<&Tensor>; 2],
        compute_weights: Option<&Tensor>,
    ) -> Result<Self> {
        let len = weights.elem_count();
        for other in [Some(grads), state[0], state[1], compute_weights].into_iter().flatten() {
            if other.elem_count() != len {
                bail!("a buffer of {} values for {len} weights", other.elem_count())
            }
        }
        for other in [Some(grads), state[0], state[1]].into_iter().flatten() {
            if other.dtype() != weights.dtype() {
                bail!("a buffer of {:?} for weights of {:?}", other.dtype(), weights.dtype())
            }
        }
        if let Some(copy) = compute_weights
            && (weights.dtype() != DType::F32 || !matches!(copy.dtype(), DType::BF16 | DType::F16))
        {
            bail!("compute weights of {:?} for weights of {:?}", copy.dtype(), weights.dtype())
        }
        Ok(Self {
            dtype: dtype_code(weights.dtype())?,
            compute_dtype: dtype_code(compute_weights.map_or(DType::BF16, Tensor::dtype))?,
            weights: pointer(weights)?,
            grads: pointer(grads)?,
            first: pointer_or_null(state[0])?,
            second: pointer_or_null(state[1])?,
            compute_weights: pointer_or_null(compute_weights)?,
            len: len as i64,
            decayed_len: if c.weight_decay == 0.0 { 0 } else { c.decayed_len as i64 },
            lr: c.lr,
            grad_scale: c.grad_scale,
            weight_decay: c.weight_decay,
            device_grad_scale: pointer_or_null(c.device_grad_scale)?,
        })
    }
}

impl AdamWKernel {
    pub(super) fn apply_cuda(
        &self,
        device: &CudaDevice,
        c: &UpdateArgs,
        buffers: &UpdateBuffers,
    ) -> Result<()> {
        let (step, root) = self.bias_corrections(c.lr);
        let hyperparams = [self.beta1, self.beta2, self.eps, step, root];
        // SAFETY: `UpdateBuffers::new` checked all lengths and dtypes.
        check_status("update_adamw", unsafe { update_adamw(buffers, hyperparams.as_ptr(), stream(device)) })
    }
}

impl SgdKernel {
    pub(super) fn apply_cuda(&self, device: &CudaDevice, buffers: &UpdateBuffers) -> Result<()> {
        let hyperparams = [self.momentum, self.nesterov as u8 as f64, self.first as u8 as f64];
        // SAFETY: as for AdamW.
        check_status("update_sgd", unsafe { update_sgd(buffers, hyperparams.as_ptr(), stream(device)) })
    }
}

pub(in crate::kernels) fn lion(
    device: &CudaDevice,
    rule: &LionKernel,
    buffers: &UpdateBuffers,
) -> Result<()> {
    let hyperparams = [rule.beta1, rule.beta2];
    // SAFETY: as for AdamW.
    check_status("update_lion", unsafe { update_lion(buffers, hyperparams.as_ptr(), stream(device)) })
}

/// The sum of squares, as one f64 on the device.
pub fn sum_of_squares(device: &CudaDevice, values: &Tensor) -> Result<Tensor> {
    let sums = uninit(device, DType::F64, REDUCE_BLOCKS + 1)?;
    let len = values.elem_count() as i64;
    // SAFETY: `sums` holds the partial sums of all blocks and the total.
    check_status("update_sum_of_squares", unsafe {
        let parts = REDUCE_BLOCKS as c_int;
        update_sum_of_squares(
            dtype_code(values.dtype())?,
            pointer(values)?,
            pointer(&sums)?,
            parts,
            len,
            stream(device),
        )
    })?;
    sums.narrow(0, REDUCE_BLOCKS, 1)
}

pub(super) fn cast(device: &CudaDevice, from: &Tensor, to: &Tensor) -> Result<()> {
    if from.elem_count() != to.elem_count() {
        bail!("buffers of {} and {} values", from.elem_count(), to.elem_count())
    }
    let (a, b, len) = (dtype_code(from.dtype())?, dtype_code(to.dtype())?, from.elem_count() as i64);
    // SAFETY: both buffers have `len` values.
    check_status("update_cast", unsafe {
        update_cast(a, b, pointer(from)?, pointer(to)?, len, stream(device))
    })
}

pub(super) fn ema_update(device: &CudaDevice, average: &Tensor, values: &Tensor, decay: f64) -> Result<()> {
    check_same_layout(average, values)?;
    let (dtype, len) = (dtype_code(values.dtype())?, values.elem_count() as i64);
    // SAFETY: both buffers have `len` values.
    check_status("update_ema", unsafe {
        update_ema(dtype, pointer(average)?, pointer(values)?, len, decay, stream(device))
    })
}

pub(super) fn swap(device: &CudaDevice, a: &Tensor, b: &Tensor) -> Result<()> {
    check_same_layout(a, b)?;
    let (dtype, len) = (dtype_code(a.dtype())?, a.elem_count() as i64);
    // SAFETY: both buffers have `len` values.
    check_status("update_swap", unsafe { update_swap(dtype, pointer(a)?, pointer(b)?, len, stream(device)) })
}

pub(super) fn clear(device: &CudaDevice, values: &Tensor) -> Result<()> {
    let bytes = (values.elem_count() * values.dtype().size_in_bytes()) as i64;
    // SAFETY: `bytes` is the size of a contiguous tensor.
    check_status("update_clear", unsafe { update_clear(pointer(values)?, bytes, stream(device)) })
}

fn check_same_layout(a: &Tensor, b: &Tensor) -> Result<()> {
    match (a.elem_count(), a.dtype()) == (b.elem_count(), b.dtype()) {
        true => Ok(()),
        false => bail!("buffers of {:?} {:?} and {:?} {:?}", a.dims(), a.dtype(), b.dims(), b.dtype()),
    }
}

unsafe extern "C" {
    fn update_adamw(buffers: *const UpdateBuffers, hyperparams: *const f64, stream: RawStream) -> c_int;
    fn update_sgd(buffers: *const UpdateBuffers, hyperparams: *const f64, stream: RawStream) -> c_int;
    fn update_lion(buffers: *const UpdateBuffers, hyperparams: *const f64, stream: RawStream) -> c_int;
    fn update_sum_of_squares(
        dtype: c_int,
        values: *const c_void,
        sums: *mut c_void,
        parts: c_int,
        len: i64,
        stream: RawStream,
    ) -> c_int;
    fn update_cast(
        from_dtype: c_int,
        dtype: c_int,
        from: *const c_void,
        to: *mut c_void,
        len: i64,
        stream: RawStream,
    ) -> c_int;
    fn update_ema(
        dtype: c_int,
        average: *mut c_void,
        values: *const c_void,
        len: i64,
        decay: f64,
        stream: RawStream,
    ) -> c_int;
    fn update_swap(dtype: c_int, a: *mut c_void, b: *mut c_void, len: i64, stream: RawStream) -> c_int;
    fn update_clear(values: *mut c_void, bytes: i64, stream: RawStream) -> c_int;
}
