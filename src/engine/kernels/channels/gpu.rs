//! CUDA bindings of `channels.cu`: the shared passes of batch norm and group norm.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::clamp::ClampActivation;
use super::super::cuda::{
    RawStream, check_status, dtype_code, pointer, pointer_or_null, scratch, stream, uninit,
};
use super::super::linear::WeightBiasGrads;
use super::{ChannelLayout, GridPartition, cuda_workspace};

/// The accumulator type of the CUDA kernels for values of `dtype`.
pub fn acc_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A normalization whose channels form `groups`, each with its own statistics.
pub struct ChannelNorm<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub act: ClampActivation,
    pub eps: f64,
    pub layout: ChannelLayout,
    pub groups: usize,
}

/// Running mean and variance, and the momentum a new unit's statistics enter with.
pub type RunningStatsArgs<'a> = (&'a Tensor, &'a Tensor, f64);

impl ChannelNorm<'_> {
    fn to_ffi(&self, x: &Tensor, saved_stats: &Tensor) -> Result<ChannelNormFfi> {
        let GridPartition { chunk, parts } = GridPartition::new(x.dtype(), &self.layout);
        Ok(ChannelNormFfi {
            dtype: dtype_code(x.dtype())?,
            clip: match self.act {
                ClampActivation::Identity => 0,
                ClampActivation::Relu => 1,
                ClampActivation::Relu6 => 2,
            },
            channels_per_group: (self.layout.channels / self.groups) as c_int,
            channels: self.layout.channels as c_int,
            rows: self.layout.rows as i64,
            rows_per_unit: self.layout.rows_per_unit as i64,
            chunk: chunk as i64,
            parts: parts as c_int,
            eps: self.eps,
            x: pointer(x)?,
            weight: pointer(self.weight)?,
            bias: pointer(self.bias)?,
            saved_stats: pointer(saved_stats)?,
        })
    }

    /// Returns the output and the saved statistics: (units, 2, groups) of mean and rstd. `residual` is added before the
    /// clamp.
    pub fn forward(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        running: Option<RunningStatsArgs>,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let dtype = x.dtype();
        let saved_stats = uninit(device, acc_dtype(dtype), (self.layout.units(), 2, self.groups))?;
        let y = uninit(device, dtype, x.shape())?;
        let workspace = scratch(device, cuda_workspace(dtype, &self.layout, self.groups).0)?;
        let (mean, var, momentum) = match running {
            Some((mean, var, momentum)) => (pointer(mean)?, pointer(var)?, momentum),
            None => (std::ptr::null_mut(), std::ptr::null_mut(), 0.0),
        };
        let (args, residual) = (self.to_ffi(x, &saved_stats)?, pointer_or_null(residual)?);
        // SAFETY: the tensors have the sizes in `args`; stream order keeps them alive until the kernels finish.
        check_status("channels_forward", unsafe {
            channels_forward(
                &args,
                residual,
                pointer(&y)?,
                pointer(&workspace)?,
                mean,
                var,
                momentum,
                stream(device),
            )
        })?;
        Ok((y, saved_stats))
    }

    /// Recomputes the output from the statistics that [`forward`](Self::forward) saved.
    pub fn recompute_output(&self, device: &CudaDevice, x: &Tensor, saved_stats: &Tensor) -> Result<Tensor> {
        let y = uninit(device, x.dtype(), x.shape())?;
        let args = self.to_ffi(x, saved_stats)?;
        // SAFETY: as above.
        check_status("channels_apply", unsafe { channels_apply(&args, pointer(&y)?, stream(device)) })?;
        Ok(y)
    }

    /// The output under a given mean and variance per channel; all rows form one unit.
    pub fn evaluate(&self, device: &CudaDevice, x: &Tensor, mean: &Tensor, var: &Tensor) -> Result<Tensor> {
        let y = uninit(device, x.dtype(), x.shape())?;
        let saved_stats = uninit(device, acc_dtype(x.dtype()), (2, self.layout.channels))?;
        let args = self.to_ffi(x, &saved_stats)?;
        let (mean, var) = (pointer(mean)?, pointer(var)?);
        // SAFETY: as above.
        check_status("channels_evaluate", unsafe {
            channels_evaluate(&args, mean, var, pointer(&y)?, stream(device))
        })?;
        Ok(y)
    }

    /// Accumulates the parameter gradients into `grads` and returns the input gradient if `needs_input_grad`. With a
    /// fused residual, the output `y` tells what the clamp let through, and `dy` becomes the gradient before the clamp,
    /// in place.
    pub fn backward(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        saved_stats: &Tensor,
        (dy, y): (&Tensor, Option<&Tensor>),
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let dx = needs_input_grad.then(|| uninit(device, x.dtype(), x.shape())).transpose()?;
        let workspace = scratch(device, cuda_workspace(x.dtype(), &self.layout, self.groups).1)?;
        let args = self.to_ffi(x, saved_stats)?;
        let (dweight, dbias) = (pointer_or_null(grads.weight)?, pointer_or_null(grads.bias)?);
        let (dy, y, to) = (pointer(dy)?, pointer_or_null(y)?, pointer_or_null(dx.as_ref())?);
        // SAFETY: as above; the gradients have the accumulator type.
        check_status("channels_backward", unsafe {
            channels_backward(&args, dy, y, to, dweight, dbias, pointer(&workspace)?, stream(device))
        })?;
        Ok(dx)
    }
}

/// `ChannelNormFfi` in channels.cu.
#[repr(C)]
struct ChannelNormFfi {
    dtype: c_int,
    clip: c_int,
    channels_per_group: c_int,
    channels: c_int,
    rows: i64,
    rows_per_unit: i64,
    chunk: i64,
    parts: c_int,
    eps: f64,
    x: *const c_void,
    weight: *const c_void,
    bias: *const c_void,
    saved_stats: *mut c_void,
}

unsafe extern "C" {
    fn channels_forward(
        norm: *const ChannelNormFfi,
        residual: *const c_void,
        y: *mut c_void,
        scratch: *mut c_void,
        mean: *mut c_void,
        var: *mut c_void,
        momentum: f64,
        stream: RawStream,
    ) -> c_int;
    fn channels_apply(norm: *const ChannelNormFfi, y: *mut c_void, stream: RawStream) -> c_int;
    fn channels_evaluate(
        norm: *const ChannelNormFfi,
        mean: *const c_void,
        var: *const c_void,
        y: *mut c_void,
        stream: RawStream,
    ) -> c_int;
    fn channels_backward(
        norm: *const ChannelNormFfi,
        dy: *mut c_void,
        y: *const c_void,
        dx: *mut c_void,
        dweight: *mut c_void,
        dbias: *mut c_void,
        scratch: *mut c_void,
        stream: RawStream,
    ) -> c_int;
}
