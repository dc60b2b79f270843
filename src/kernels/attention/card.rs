//! The body for cards: cuDNN's fused attention where that is there and has it, else tiles of our own.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{Attention, Sizes};
use crate::kernels::cpu::acc_bytes;
use crate::kernels::cuda::{self, Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream};

/// The sizes as launchers take them.
struct Shape {
    dtype: c_int,
    batch: c_int,
    length: c_int,
    heads: c_int,
    kv_heads: c_int,
    head: c_int,
    causal: c_int,
    scale: f32,
}

impl Attention<'_> {
    /// Whether cuDNN makes it: types of 16 bits, heads it has, and samples that are seen whole.
    fn fused(&self, dtype: DType) -> bool {
        let head = self.sizes.head;
        matches!(dtype, DType::BF16 | DType::F16)
            && head.is_multiple_of(8)
            && head <= 128
            && self.lengths.is_none()
            && cuda::cudnn::version().is_some()
    }

    fn shape(&self, qkv: &Tensor) -> Result<Shape> {
        let Sizes { length, heads, kv_heads, head } = self.sizes;
        let [length, heads, kv_heads, head] = [length, heads, kv_heads, head].map(|n| n as c_int);
        let (dtype, batch) = (code(qkv.dtype())?, qkv.dim(0)? as c_int);
        let scale = (self.sizes.head as f64).powf(-0.5) as f32;
        Ok(Shape { dtype, batch, length, heads, kv_heads, head, causal: self.causal as c_int, scale })
    }

    /// The projections with their rotary positions turned.
    pub(super) fn turned_card(&self, device: &CudaDevice, qkv: &Tensor) -> Result<Tensor> {
        let Some(rotary) = self.rotary else { return Ok(qkv.clone()) };
        let turned = fresh(device, qkv.dtype(), qkv.shape())?;
        rotary.turn_card(device, qkv, &turned, (self.sizes.heads, self.sizes.kv_heads), false)?;
        Ok(turned)
    }

    /// A gradient with respect to what [`turned_card`](Self::turned_card) gave, as one with respect to what it was given.
    pub(super) fn turned_back_card(&self, device: &CudaDevice, dx: Tensor) -> Result<Tensor> {
        if let Some(rotary) = self.rotary {
            rotary.turn_card(device, &dx, &dx, (self.sizes.heads, self.sizes.kv_heads), true)?;
        }
        Ok(dx)
    }

    /// As `forward`, of projections whose rotary positions are turned already.
    pub(super) fn forward_card(&self, device: &CudaDevice, qkv: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, s, shape) = (qkv.dim(0)?, &self.sizes, self.shape(qkv)?);
        let y = fresh(device, qkv.dtype(), (batch, s.length, s.width()))?;
        let wide = if qkv.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let sums = fresh(device, wide, (batch, s.heads, s.length))?;
        let (from, to, rows, stream) = (pointer(qkv)?, pointer(&y)?, pointer(&sums)?, stream(device));
        let Shape { dtype, batch, length, heads, kv_heads, head, causal, scale } = shape;
        if self.fused(qkv.dtype()) {
            let work = scratch(device, self.fused_bytes(device, qkv, false)?)?;
            // SAFETY: the tensors have the shapes that the sizes say, and the workspace the bytes asked for.
            checked("attention_cudnn_forward", unsafe {
                let work = pointer(&work)?;
                attention_cudnn_forward(
                    dtype, batch, length, heads, kv_heads, head, causal, scale, from, to, rows, work, stream,
                )
            })?;
            return Ok((y, sums));
        }
        let seen = self.seen_lengths(device)?;
        // SAFETY: as above; there is a length a sample.
        checked("attention_forward", unsafe {
            let seen = pointer_or_null(seen.as_ref())?;
            attention_forward(
                dtype, batch, length, heads, kv_heads, head, causal, scale, seen, from, to, rows, stream,
            )
        })?;
        Ok((y, sums))
    }

    /// As `backward`, with respect to projections whose rotary positions are turned already.
    pub(super) fn backward_card(
        &self,
        device: &CudaDevice,
        qkv: &Tensor,
        y: &Tensor,
        sums: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let shape = self.shape(qkv)?;
        let dx = fresh(device, qkv.dtype(), qkv.shape())?;
        let [from, y, rows, dy, to] =
            [pointer(qkv)?, pointer(y)?, pointer(sums)?, pointer(dy)?, pointer(&dx)?];
        let stream = stream(device);
        let Shape { dtype, batch, length, heads, kv_heads, head, causal, scale } = shape;
        if self.fused(qkv.dtype()) {
            let work = scratch(device, self.fused_bytes(device, qkv, true)?)?;
            // SAFETY: the tensors have the shapes that the sizes say, and the workspace the bytes asked for.
            checked("attention_cudnn_backward", unsafe {
                let work = pointer(&work)?;
                attention_cudnn_backward(
                    dtype, batch, length, heads, kv_heads, head, causal, scale, from, y, rows, dy, to, work,
                    stream,
                )
            })?;
            return Ok(dx);
        }
        let along = scratch(device, sums.elem_count() * acc_bytes(qkv.dtype()))?;
        let seen = self.seen_lengths(device)?;
        // SAFETY: as above; `along` has a value a row of each head.
        checked("attention_backward", unsafe {
            let (along, seen) = (pointer(&along)?, pointer_or_null(seen.as_ref())?);
            attention_backward(
                dtype, batch, length, heads, kv_heads, head, causal, scale, seen, from, y, rows, dy, along,
                to, stream,
            )
        })?;
        Ok(dx)
    }

    /// Bytes of the workspace cuDNN asks for.
    fn fused_bytes(&self, device: &CudaDevice, qkv: &Tensor, backward: bool) -> Result<usize> {
        let Shape { dtype, batch, length, heads, kv_heads, head, causal, scale } = self.shape(qkv)?;
        let mut bytes = 0i64;
        // SAFETY: the sizes are plain numbers, and `bytes` outlives the call.
        checked("attention_cudnn_workspace", unsafe {
            let (backward, stream) = (backward as c_int, stream(device));
            attention_cudnn_workspace(
                dtype, batch, length, heads, kv_heads, head, causal, scale, backward, stream, &mut bytes,
            )
        })?;
        Ok(bytes.max(1) as usize)
    }

    /// The lengths on the card; 4 bytes a sample.
    fn seen_lengths(&self, device: &CudaDevice) -> Result<Option<Tensor>> {
        let device = candle_core::Device::Cuda(device.clone());
        self.lengths.map(|lengths| Tensor::new(lengths, &device)).transpose()
    }
}

unsafe extern "C" {
    fn attention_cudnn_workspace(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head: c_int,
        causal: c_int,
        scale: f32,
        backward: c_int,
        stream: Stream,
        bytes: *mut i64,
    ) -> c_int;
    fn attention_cudnn_forward(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head: c_int,
        causal: c_int,
        scale: f32,
        qkv: *mut c_void,
        y: *mut c_void,
        sums: *mut c_void,
        workspace: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_cudnn_backward(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head: c_int,
        causal: c_int,
        scale: f32,
        qkv: *mut c_void,
        y: *mut c_void,
        sums: *mut c_void,
        dy: *mut c_void,
        dx: *mut c_void,
        workspace: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_forward(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head: c_int,
        causal: c_int,
        scale: f32,
        lengths: *const c_void,
        qkv: *const c_void,
        y: *mut c_void,
        sums: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_backward(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head: c_int,
        causal: c_int,
        scale: f32,
        lengths: *const c_void,
        qkv: *const c_void,
        y: *const c_void,
        sums: *const c_void,
        dy: *const c_void,
        along: *mut c_void,
        dx: *mut c_void,
        stream: Stream,
    ) -> c_int;
}
