//! Attention on a GPU: cuDNN's fused kernel if it is available and supports the call, otherwise our own kernels. cuDNN
//! is never used with dropout or padding.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{AttentionDims, AttentionKernel};
use crate::kernels::cuda::{
    self, RawStream, acc_dtype, check_status, dtype_code, pointer, pointer_or_null, scratch, stream, uninit,
};
use crate::kernels::sample_keys::{self, SampleKeys};

/// Samples per launch: CUDA limits gridDim.z to this.
const MAX_GRID_Z: usize = 65_535;

/// The dimensions that launchers take.
#[repr(C)]
struct AttentionFfiDims {
    dtype: c_int,
    batch: c_int,
    length: c_int,
    heads: c_int,
    kv_heads: c_int,
    head_dim: c_int,
    causal: c_int,
    scale: f32,
}

/// `AttentionArgs` in `cuda/attention.cuh`: the arguments of our own launchers.
#[repr(C)]
struct AttentionArgs {
    dims: AttentionFfiDims,
    lengths: *const c_void,
    keys: *const c_void,
    threshold: u32,
    kept_scale: f64,
}

impl AttentionKernel<'_> {
    /// Whether cuDNN runs this call: no padding, no dropout, and a supported dtype and head size.
    fn uses_cudnn(&self, dtype: DType) -> bool {
        let plain = self.lengths.is_none() && self.dropout.is_none();
        plain && self.dims.fits_tensor_cores(dtype) && cuda::cudnn::is_usable()
    }

    fn ffi_dims(&self, qkv: &Tensor) -> Result<AttentionFfiDims> {
        let AttentionDims { length, heads, kv_heads, head_dim } = self.dims;
        let [length, heads, kv_heads, head_dim] = [length, heads, kv_heads, head_dim].map(|n| n as c_int);
        let (dtype, batch) = (dtype_code(qkv.dtype())?, qkv.dim(0)? as c_int);
        let scale = (self.dims.head_dim as f64).powf(-0.5) as f32;
        Ok(AttentionFfiDims {
            dtype,
            batch,
            length,
            heads,
            kv_heads,
            head_dim,
            causal: self.causal as c_int,
            scale,
        })
    }

    /// The projections with RoPE applied.
    pub(super) fn apply_rotary_cuda(&self, device: &CudaDevice, qkv: &Tensor) -> Result<Tensor> {
        let Some(rotary) = self.rotary else { return Ok(qkv.clone()) };
        let rotated = uninit(device, qkv.dtype(), qkv.shape())?;
        rotary.rotate_cuda(device, qkv, &rotated, (self.dims.heads, self.dims.kv_heads), false)?;
        Ok(rotated)
    }

    /// Turns the gradient of the output of [`apply_rotary_cuda`](Self::apply_rotary_cuda) into that of its input, in
    /// place.
    pub(super) fn rotary_backward_cuda(&self, device: &CudaDevice, dx: Tensor) -> Result<Tensor> {
        if let Some(rotary) = self.rotary {
            rotary.rotate_cuda(device, &dx, &dx, (self.dims.heads, self.dims.kv_heads), true)?;
        }
        Ok(dx)
    }

    /// Like `forward`, for projections that are already rotated.
    pub(super) fn forward_cuda(&self, device: &CudaDevice, qkv: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, s) = (qkv.dim(0)?, &self.dims);
        let y = uninit(device, qkv.dtype(), (batch, s.length, s.width()))?;
        let logsumexp = uninit(device, acc_dtype(qkv.dtype()), (batch, s.heads, s.length))?;
        if self.uses_cudnn(qkv.dtype()) {
            let (from, to, lse_ptr, stream) =
                (pointer(qkv)?, pointer(&y)?, pointer(&logsumexp)?, stream(device));
            let AttentionFfiDims { dtype, batch, length, heads, kv_heads, head_dim, causal, scale } =
                self.ffi_dims(qkv)?;
            let work = scratch(device, self.cudnn_workspace_bytes(device, qkv, false)?)?;
            // SAFETY: the tensors have the shapes given by the dimensions, and the workspace has the size that cuDNN
            // requested.
            check_status("attention_cudnn_forward", unsafe {
                let work = pointer(&work)?;
                attention_cudnn_forward(
                    dtype, batch, length, heads, kv_heads, head_dim, causal, scale, from, to, lse_ptr, work,
                    stream,
                )
            })?;
            return Ok((y, logsumexp));
        }
        let tensor_cores = self.dropout.is_some() && self.dims.fits_tensor_cores(qkv.dtype());
        let forward = if tensor_cores { attention_tensor_core_forward } else { attention_forward };
        self.launch_chunked(device, [qkv, &y, &logsumexp], |call, [qkv, y, sums]| {
            // SAFETY: the tensors have the shapes given by the dimensions; lengths and keys hold one entry per sample.
            check_status("attention_forward", unsafe { forward(call, qkv, y, sums, stream(device)) })
        })?;
        Ok((y, logsumexp))
    }

    /// Like `backward`, with respect to projections that are already rotated.
    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        qkv: &Tensor,
        y: &Tensor,
        logsumexp: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let dx = uninit(device, qkv.dtype(), qkv.shape())?;
        if self.uses_cudnn(qkv.dtype()) {
            self.backward_cudnn(device, [qkv, y, logsumexp, dy, &dx])?;
            return Ok(dx);
        }
        let tensor_cores = self.dropout.is_some() && self.dims.fits_tensor_cores(qkv.dtype());
        let backward = if tensor_cores { attention_tensor_core_backward } else { attention_backward };
        let delta = uninit(device, logsumexp.dtype(), logsumexp.shape())?;
        self.launch_chunked(
            device,
            [qkv, y, logsumexp, dy, &delta, &dx],
            |call, [qkv, y, logsumexp, dy, delta, dx]| {
                let stream = stream(device);
                // SAFETY: as in `forward_cuda`.
                check_status("attention_delta", unsafe { attention_delta(call, y, dy, delta, stream) })?;
                // SAFETY: as in `forward_cuda`.
                check_status("attention_backward", unsafe {
                    backward(call, qkv, logsumexp, dy, delta, dx, stream)
                })
            },
        )?;
        Ok(dx)
    }

    /// Calls `launch` for at most [`MAX_GRID_Z`] samples at a time, with pointers to their part of each tensor.
    fn launch_chunked<const N: usize>(
        &self,
        device: &CudaDevice,
        tensors: [&Tensor; N],
        launch: impl Fn(&AttentionArgs, [*mut c_void; N]) -> Result<()>,
    ) -> Result<()> {
        let (batch, lengths) = (tensors[0].dim(0)?, self.device_lengths(device, tensors[0].dim(0)?)?);
        let keys = self.dropout.as_ref().map(|mask| mask.keys.derive(device)).transpose()?;
        for first in (0..batch).step_by(MAX_GRID_Z) {
            let count = MAX_GRID_Z.min(batch - first);
            let part = |tensor: &Tensor| tensor.narrow(0, first, count);
            let mut at = [std::ptr::null_mut(); N];
            for (at, tensor) in at.iter_mut().zip(tensors) {
                *at = pointer(&part(tensor)?)?;
            }
            let lengths = lengths.as_ref().map(part).transpose()?;
            let (threshold, kept_scale) = match &self.dropout {
                Some(mask) => (mask.threshold as u32, mask.scale),
                None => (0, 1.0),
            };
            let keys = pointer_or_null(keys.as_ref())?.wrapping_byte_add(SampleKeys::bytes(first) as usize);
            let (dims, lengths) = (self.ffi_dims(&part(tensors[0])?)?, pointer_or_null(lengths.as_ref())?);
            launch(&AttentionArgs { dims, lengths, keys, threshold, kept_scale }, at)?;
        }
        Ok(())
    }

    /// Runs a few samples per call: cuDNN's deterministic backward pass stores the score gradients of all its samples.
    fn backward_cudnn(&self, device: &CudaDevice, tensors: [&Tensor; 5]) -> Result<()> {
        let batch = tensors[0].dim(0)?;
        let chunk = self.dims.samples_per_call(batch);
        for first in (0..batch).step_by(chunk) {
            let part = |tensor: &Tensor| tensor.narrow(0, first, chunk.min(batch - first));
            let [qkv, y, logsumexp, dy, dx] = tensors.map(part);
            let (qkv, y, logsumexp, dy, dx) = (qkv?, y?, logsumexp?, dy?, dx?);
            let work = scratch(device, self.cudnn_workspace_bytes(device, &qkv, true)?)?;
            let [from, y, lse_ptr, dy] = [pointer(&qkv)?, pointer(&y)?, pointer(&logsumexp)?, pointer(&dy)?];
            let (to, work, stream) = (pointer(&dx)?, pointer(&work)?, stream(device));
            let AttentionFfiDims { dtype, batch, length, heads, kv_heads, head_dim, causal, scale } =
                self.ffi_dims(&qkv)?;
            // SAFETY: the tensors have the shapes given by the dimensions, and the workspace has the size that cuDNN
            // requested.
            check_status("attention_cudnn_backward", unsafe {
                attention_cudnn_backward(
                    dtype, batch, length, heads, kv_heads, head_dim, causal, scale, from, y, lse_ptr, dy, to,
                    work, stream,
                )
            })?;
        }
        Ok(())
    }

    /// Workspace in bytes that cuDNN requests.
    fn cudnn_workspace_bytes(&self, device: &CudaDevice, qkv: &Tensor, backward: bool) -> Result<usize> {
        let AttentionFfiDims { dtype, batch, length, heads, kv_heads, head_dim, causal, scale } =
            self.ffi_dims(qkv)?;
        let mut bytes = 0i64;
        // SAFETY: the dimensions are plain numbers, and `bytes` outlives the call.
        check_status("attention_cudnn_workspace", unsafe {
            let (backward, stream) = (backward as c_int, stream(device));
            attention_cudnn_workspace(
                dtype, batch, length, heads, kv_heads, head_dim, causal, scale, backward, stream, &mut bytes,
            )
        })?;
        Ok(bytes.max(1) as usize)
    }

    /// The lengths on the device: a view of the uploaded sample info, or else uploaded now.
    fn device_lengths(&self, device: &CudaDevice, samples: usize) -> Result<Option<Tensor>> {
        let Some(lengths) = self.lengths else { return Ok(None) };
        match self.sample_info {
            Some(staged) => staged.narrow(0, 2 + 2 * samples, samples).map(Some),
            None => sample_keys::upload(device, lengths).map(Some),
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
        head_dim: c_int,
        causal: c_int,
        scale: f32,
        backward: c_int,
        stream: RawStream,
        bytes: *mut i64,
    ) -> c_int;
    fn attention_cudnn_forward(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head_dim: c_int,
        causal: c_int,
        scale: f32,
        qkv: *mut c_void,
        y: *mut c_void,
        logsumexp: *mut c_void,
        workspace: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn attention_cudnn_backward(
        dtype: c_int,
        batch: c_int,
        length: c_int,
        heads: c_int,
        kv_heads: c_int,
        head_dim: c_int,
        causal: c_int,
        scale: f32,
        qkv: *mut c_void,
        y: *mut c_void,
        logsumexp: *mut c_void,
        dy: *mut c_void,
        dx: *mut c_void,
        workspace: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn attention_forward(
        args: *const AttentionArgs,
        qkv: *mut c_void,
        y: *mut c_void,
        logsumexp: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn attention_tensor_core_forward(
        args: *const AttentionArgs,
        qkv: *mut c_void,
        y: *mut c_void,
        logsumexp: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn attention_delta(
        args: *const AttentionArgs,
        y: *mut c_void,
        dy: *mut c_void,
        delta: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn attention_backward(
        args: *const AttentionArgs,
        qkv: *mut c_void,
        logsumexp: *mut c_void,
        dy: *mut c_void,
        delta: *mut c_void,
        dx: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn attention_tensor_core_backward(
        args: *const AttentionArgs,
        qkv: *mut c_void,
        logsumexp: *mut c_void,
        dy: *mut c_void,
        delta: *mut c_void,
        dx: *mut c_void,
        stream: RawStream,
    ) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::gradcheck::test_device;

    #[test]
    fn cudnn_workspace_is_within_the_plan() {
        let (device, Some(_)) = (test_device(), cuda::cudnn::version()) else { return };
        let candle_core::Device::Cuda(gpu) = &device else { return };
        let lengths = [17, 50, 65, 197, 257].map(|length| (length, 3, 3, 64));
        let heads = [(197, 6, 6, 32), (50, 12, 12, 64), (1024, 12, 12, 64), (256, 6, 6, 64), (64, 4, 4, 32)];
        let shared = [(1000, 8, 2, 128), (65, 6, 3, 32), (2048, 16, 16, 64)];
        let all = [&lengths[..], &heads, &shared].concat();
        for (i, (length, heads, kv_heads, head)) in all.into_iter().enumerate() {
            let sizes = AttentionDims { length, heads, kv_heads, head_dim: head };
            let batch = sizes.samples_per_call(16);
            let qkv = Tensor::zeros((batch, length, sizes.qkv_width()), DType::BF16, &device).unwrap();
            let causal = i % 2 == 0;
            let attention = AttentionKernel {
                dims: sizes,
                causal,
                rotary: None,
                lengths: None,
                sample_info: None,
                dropout: None,
            };
            let requested = [false, true]
                .map(|backward| attention.cudnn_workspace_bytes(gpu, &qkv, backward).unwrap() as u64);
            let (forward, backward) = sizes.cuda_workspace(DType::BF16, batch, false, false, false);
            println!(
                "{sizes:?}, {batch} samples: {requested:?} asked for, {:?} counted",
                (forward, backward)
            );
            assert!(requested[0] <= forward && requested[1] <= backward, "{sizes:?}: {requested:?}");
            assert!(
                backward <= requested[1] + requested[1] / 50,
                "{sizes:?}: {requested:?}, and {backward} counted"
            );
        }
    }
}
