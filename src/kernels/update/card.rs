//! The bodies for cards: one pass over everything, the copy that kernels compute with included.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::{AdamW, Common, Sgd};
use crate::kernels::cuda::{Stream, checked, code, fresh, pointer, pointer_or_null, stream};
use crate::kernels::lion::Lion;

/// Blocks that sum squares: a few for each processor of a large card.
const PARTS: usize = 1056;

/// `Buffers` in update.cu.
#[repr(C)]
pub(in crate::kernels) struct Buffers {
    dtype: c_int,
    copy_dtype: c_int,
    weights: *mut c_void,
    grads: *mut c_void,
    first: *mut c_void,
    second: *mut c_void,
    copy: *mut c_void,
    len: i64,
    decayed: i64,
    lr: f64,
    grad_scale: f64,
    weight_decay: f64,
    judged: *const c_void,
}

impl Buffers {
    /// Weights, their gradients, their state and their copy, all as long.
    pub(in crate::kernels) fn new(
        c: &Common,
        weights: &Tensor,
        grads: &Tensor,
        state: [Option<&Tensor>; 2],
        copy: Option<&Tensor>,
    ) -> Result<Self> {
        let len = weights.elem_count();
        for other in [Some(grads), state[0], state[1], copy].into_iter().flatten() {
            if other.elem_count() != len {
                bail!("a buffer of {} values for {len} weights", other.elem_count())
            }
        }
        for other in [Some(grads), state[0], state[1]].into_iter().flatten() {
            if other.dtype() != weights.dtype() {
                bail!("a buffer of {:?} for weights of {:?}", other.dtype(), weights.dtype())
            }
        }
        if let Some(copy) = copy
            && (weights.dtype() != DType::F32 || !matches!(copy.dtype(), DType::BF16 | DType::F16))
        {
            bail!("a copy of {:?} of weights of {:?}", copy.dtype(), weights.dtype())
        }
        Ok(Self {
            dtype: code(weights.dtype())?,
            copy_dtype: code(copy.map_or(DType::BF16, Tensor::dtype))?,
            weights: pointer(weights)?,
            grads: pointer(grads)?,
            first: pointer_or_null(state[0])?,
            second: pointer_or_null(state[1])?,
            copy: pointer_or_null(copy)?,
            len: len as i64,
            decayed: if c.weight_decay == 0.0 { 0 } else { c.decayed as i64 },
            lr: c.lr,
            grad_scale: c.grad_scale,
            weight_decay: c.weight_decay,
            judged: pointer_or_null(c.judged)?,
        })
    }
}

impl AdamW {
    pub(super) fn card(&self, device: &CudaDevice, c: &Common, buffers: &Buffers) -> Result<()> {
        let (step, root) = self.corrections(c.lr);
        let numbers = [self.beta1, self.beta2, self.eps, step, root];
        // SAFETY: `Buffers::new` compared all lengths and types.
        checked("update_adamw", unsafe { update_adamw(buffers, numbers.as_ptr(), stream(device)) })
    }
}

impl Sgd {
    pub(super) fn card(&self, device: &CudaDevice, buffers: &Buffers) -> Result<()> {
        let numbers = [self.momentum, self.nesterov as u8 as f64, self.first as u8 as f64];
        // SAFETY: as for AdamW.
        checked("update_sgd", unsafe { update_sgd(buffers, numbers.as_ptr(), stream(device)) })
    }
}

pub(in crate::kernels) fn lion(device: &CudaDevice, rule: &Lion, buffers: &Buffers) -> Result<()> {
    let numbers = [rule.beta1, rule.beta2];
    // SAFETY: as for AdamW.
    checked("update_lion", unsafe { update_lion(buffers, numbers.as_ptr(), stream(device)) })
}

/// The sum of squares, as one f64 on the card.
pub fn squares(device: &CudaDevice, values: &Tensor) -> Result<Tensor> {
    let sums = fresh(device, DType::F64, PARTS + 1)?;
    let len = values.elem_count() as i64;
    // SAFETY: there is room for the blocks' sums and the total.
    checked("update_squares", unsafe {
        let parts = PARTS as c_int;
        update_squares(code(values.dtype())?, pointer(values)?, pointer(&sums)?, parts, len, stream(device))
    })?;
    sums.narrow(0, PARTS, 1)
}

pub(super) fn round(device: &CudaDevice, from: &Tensor, to: &Tensor) -> Result<()> {
    if from.elem_count() != to.elem_count() {
        bail!("buffers of {} and {} values", from.elem_count(), to.elem_count())
    }
    let (a, b, len) = (code(from.dtype())?, code(to.dtype())?, from.elem_count() as i64);
    // SAFETY: both are as long.
    checked("update_round", unsafe { update_round(a, b, pointer(from)?, pointer(to)?, len, stream(device)) })
}

pub(super) fn blend(device: &CudaDevice, average: &Tensor, values: &Tensor, keep: f64) -> Result<()> {
    alike(average, values)?;
    let (dtype, len) = (code(values.dtype())?, values.elem_count() as i64);
    // SAFETY: both are as long.
    checked("update_blend", unsafe {
        update_blend(dtype, pointer(average)?, pointer(values)?, len, keep, stream(device))
    })
}

pub(super) fn swap(device: &CudaDevice, a: &Tensor, b: &Tensor) -> Result<()> {
    alike(a, b)?;
    let (dtype, len) = (code(a.dtype())?, a.elem_count() as i64);
    // SAFETY: both are as long.
    checked("update_swap", unsafe { update_swap(dtype, pointer(a)?, pointer(b)?, len, stream(device)) })
}

pub(super) fn clear(device: &CudaDevice, values: &Tensor) -> Result<()> {
    let bytes = (values.elem_count() * values.dtype().size_in_bytes()) as i64;
    // SAFETY: the bytes are those of a contiguous tensor.
    checked("update_clear", unsafe { update_clear(pointer(values)?, bytes, stream(device)) })
}

fn alike(a: &Tensor, b: &Tensor) -> Result<()> {
    match (a.elem_count(), a.dtype()) == (b.elem_count(), b.dtype()) {
        true => Ok(()),
        false => bail!("buffers of {:?} {:?} and {:?} {:?}", a.dims(), a.dtype(), b.dims(), b.dtype()),
    }
}

unsafe extern "C" {
    fn update_adamw(buffers: *const Buffers, numbers: *const f64, stream: Stream) -> c_int;
    fn update_sgd(buffers: *const Buffers, numbers: *const f64, stream: Stream) -> c_int;
    fn update_lion(buffers: *const Buffers, numbers: *const f64, stream: Stream) -> c_int;
    fn update_squares(
        dtype: c_int,
        values: *const c_void,
        sums: *mut c_void,
        parts: c_int,
        len: i64,
        stream: Stream,
    ) -> c_int;
    fn update_round(
        from_dtype: c_int,
        dtype: c_int,
        from: *const c_void,
        to: *mut c_void,
        len: i64,
        stream: Stream,
    ) -> c_int;
    fn update_blend(
        dtype: c_int,
        average: *mut c_void,
        values: *const c_void,
        len: i64,
        keep: f64,
        stream: Stream,
    ) -> c_int;
    fn update_swap(dtype: c_int, a: *mut c_void, b: *mut c_void, len: i64, stream: Stream) -> c_int;
    fn update_clear(values: *mut c_void, bytes: i64, stream: Stream) -> c_int;
}
