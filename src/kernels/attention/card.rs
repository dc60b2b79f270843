//! The body for cards: cuDNN's fused attention where that is there and has it, which is never where weights are
//! dropped, else tiles of our own.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{Attention, Sizes};
use crate::kernels::cuda::{
    self, Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream, wide,
};
use crate::kernels::keys::{self, Keys};

/// Samples of a launch: a grid has no more blocks along its third side.
const AT_ONCE: usize = 65_535;

/// The sizes as launchers take them.
#[repr(C)]
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

/// What launchers of our own are told: `Call` in `cuda/attention.cuh`.
#[repr(C)]
struct Call {
    shape: Shape,
    lengths: *const c_void,
    keys: *const c_void,
    threshold: u32,
    kept_scale: f64,
}

impl Attention<'_> {
    /// Whether cuDNN makes it: samples that are seen whole, and no weight of them dropped.
    fn fused(&self, dtype: DType) -> bool {
        let plain = self.lengths.is_none() && self.mask.is_none();
        plain && self.sizes.narrow(dtype) && cuda::cudnn::version().is_some()
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
        let (batch, s) = (qkv.dim(0)?, &self.sizes);
        let y = fresh(device, qkv.dtype(), (batch, s.length, s.width()))?;
        let sums = fresh(device, wide(qkv.dtype()), (batch, s.heads, s.length))?;
        if self.fused(qkv.dtype()) {
            let (from, to, rows, stream) = (pointer(qkv)?, pointer(&y)?, pointer(&sums)?, stream(device));
            let Shape { dtype, batch, length, heads, kv_heads, head, causal, scale } = self.shape(qkv)?;
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
        let dropped = self.mask.is_some() && self.sizes.narrow(qkv.dtype());
        let forward = if dropped { attention_narrow_forward } else { attention_forward };
        self.in_parts(device, [qkv, &y, &sums], |call, [qkv, y, sums]| {
            // SAFETY: the tensors have the shapes that the sizes say; there is a length and a key a sample.
            checked("attention_forward", unsafe { forward(call, qkv, y, sums, stream(device)) })
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
        let dx = fresh(device, qkv.dtype(), qkv.shape())?;
        if self.fused(qkv.dtype()) {
            self.backward_fused(device, [qkv, y, sums, dy, &dx])?;
            return Ok(dx);
        }
        let dropped = self.mask.is_some() && self.sizes.narrow(qkv.dtype());
        let backward = if dropped { attention_narrow_backward } else { attention_backward };
        let along = fresh(device, sums.dtype(), sums.shape())?;
        self.in_parts(device, [qkv, y, sums, dy, &along, &dx], |call, [qkv, y, sums, dy, along, dx]| {
            let stream = stream(device);
            // SAFETY: as above.
            checked("attention_along", unsafe { attention_along(call, y, dy, along, stream) })?;
            // SAFETY: as above.
            checked("attention_backward", unsafe { backward(call, qkv, sums, dy, along, dx, stream) })
        })?;
        Ok(dx)
    }

    /// Calls `launch` with where the samples of each tensor lie, with as many as a launch takes.
    fn in_parts<const N: usize>(
        &self,
        device: &CudaDevice,
        tensors: [&Tensor; N],
        launch: impl Fn(&Call, [*mut c_void; N]) -> Result<()>,
    ) -> Result<()> {
        let (batch, lengths) = (tensors[0].dim(0)?, self.seen_lengths(device, tensors[0].dim(0)?)?);
        let keys = self.mask.as_ref().map(|mask| mask.keys.derive(device)).transpose()?;
        for first in (0..batch).step_by(AT_ONCE) {
            let some = AT_ONCE.min(batch - first);
            let part = |tensor: &Tensor| tensor.narrow(0, first, some);
            let mut at = [std::ptr::null_mut(); N];
            for (at, tensor) in at.iter_mut().zip(tensors) {
                *at = pointer(&part(tensor)?)?;
            }
            let lengths = lengths.as_ref().map(part).transpose()?;
            let (threshold, kept_scale) = match &self.mask {
                Some(mask) => (mask.threshold as u32, mask.scale),
                None => (0, 1.0),
            };
            let keys = pointer_or_null(keys.as_ref())?.wrapping_byte_add(Keys::bytes(first) as usize);
            let (shape, lengths) = (self.shape(&part(tensors[0])?)?, pointer_or_null(lengths.as_ref())?);
            launch(&Call { shape, lengths, keys, threshold, kept_scale }, at)?;
        }
        Ok(())
    }

    /// A few samples at a time: cuDNN's deterministic backward pass keeps the scores' gradients of all it is given.
    fn backward_fused(&self, device: &CudaDevice, tensors: [&Tensor; 5]) -> Result<()> {
        let batch = tensors[0].dim(0)?;
        let at_once = self.sizes.samples_at_once(batch);
        for first in (0..batch).step_by(at_once) {
            let part = |tensor: &Tensor| tensor.narrow(0, first, at_once.min(batch - first));
            let [qkv, y, sums, dy, dx] = tensors.map(part);
            let (qkv, y, sums, dy, dx) = (qkv?, y?, sums?, dy?, dx?);
            let work = scratch(device, self.fused_bytes(device, &qkv, true)?)?;
            let [from, y, rows, dy] = [pointer(&qkv)?, pointer(&y)?, pointer(&sums)?, pointer(&dy)?];
            let (to, work, stream) = (pointer(&dx)?, pointer(&work)?, stream(device));
            let Shape { dtype, batch, length, heads, kv_heads, head, causal, scale } = self.shape(&qkv)?;
            // SAFETY: the tensors have the shapes that the sizes say, and the workspace the bytes asked for.
            checked("attention_cudnn_backward", unsafe {
                attention_cudnn_backward(
                    dtype, batch, length, heads, kv_heads, head, causal, scale, from, y, rows, dy, to, work,
                    stream,
                )
            })?;
        }
        Ok(())
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

    /// The lengths on the device: those that were staged with the samples, or uploaded now.
    fn seen_lengths(&self, device: &CudaDevice, samples: usize) -> Result<Option<Tensor>> {
        let Some(lengths) = self.lengths else { return Ok(None) };
        match self.staged {
            Some(staged) => staged.narrow(0, 2 + 2 * samples, samples).map(Some),
            None => keys::upload(device, lengths).map(Some),
        }
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
        call: *const Call,
        qkv: *mut c_void,
        y: *mut c_void,
        sums: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_narrow_forward(
        call: *const Call,
        qkv: *mut c_void,
        y: *mut c_void,
        sums: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_along(
        call: *const Call,
        y: *mut c_void,
        dy: *mut c_void,
        along: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_backward(
        call: *const Call,
        qkv: *mut c_void,
        sums: *mut c_void,
        dy: *mut c_void,
        along: *mut c_void,
        dx: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn attention_narrow_backward(
        call: *const Call,
        qkv: *mut c_void,
        sums: *mut c_void,
        dy: *mut c_void,
        along: *mut c_void,
        dx: *mut c_void,
        stream: Stream,
    ) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::check::device;

    #[test]
    fn cudnn_asks_for_what_the_plan_counts() {
        let (device, Some(_)) = (device(), cuda::cudnn::version()) else { return };
        let candle_core::Device::Cuda(card) = &device else { return };
        let lengths = [17, 50, 65, 197, 257].map(|length| (length, 3, 3, 64));
        let heads = [(197, 6, 6, 32), (50, 12, 12, 64), (1024, 12, 12, 64), (256, 6, 6, 64), (64, 4, 4, 32)];
        let shared = [(1000, 8, 2, 128), (65, 6, 3, 32), (2048, 16, 16, 64)];
        let all = [&lengths[..], &heads, &shared].concat();
        for (i, (length, heads, kv_heads, head)) in all.into_iter().enumerate() {
            let sizes = Sizes { length, heads, kv_heads, head };
            let batch = sizes.samples_at_once(16);
            let qkv = Tensor::zeros((batch, length, sizes.packed()), DType::BF16, &device).unwrap();
            let causal = i % 2 == 0;
            let attention =
                Attention { sizes, causal, rotary: None, lengths: None, staged: None, mask: None };
            let asked =
                [false, true].map(|backward| attention.fused_bytes(card, &qkv, backward).unwrap() as u64);
            let (forward, backward) = sizes.card_workspace(DType::BF16, batch, false, false, false);
            println!("{sizes:?}, {batch} samples: {asked:?} asked for, {:?} counted", (forward, backward));
            assert!(asked[0] <= forward && asked[1] <= backward, "{sizes:?}: {asked:?}");
            assert!(backward <= asked[1] + asked[1] / 50, "{sizes:?}: {asked:?}, and {backward} counted");
        }
    }
}
