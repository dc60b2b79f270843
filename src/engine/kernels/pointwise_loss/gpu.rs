//! Pointwise losses on a GPU.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::{LinearPointwiseLoss, PointwiseLossFn};
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, pointer_or_null, stream};
use crate::kernels::metric_sums::PendingMetricSums;
use crate::kernels::metric_sums::gpu::RowMetrics;

/// Computes the metric sums and, with a `scale`, turns the predictions into gradients in place.
pub(super) fn loss_and_grad(
    device: &CudaDevice,
    head: &LinearPointwiseLoss,
    p: &Tensor,
    targets: &Tensor,
    scale: Option<f64>,
) -> Result<PendingMetricSums> {
    let samples = p.dim(0)?;
    let values = p.elem_count() / samples.max(1);
    let per_sample = targets.elem_count() / samples.max(1);
    let fits = per_sample * samples == targets.elem_count() && [values, values + 1].contains(&per_sample);
    if !fits || targets.dtype() != DType::F32 {
        bail!("{} targets of {:?} for {samples} samples", targets.elem_count(), targets.dtype());
    }
    let row_metrics = RowMetrics::new(device, samples)?;
    let (loss, weight, hits) = row_metrics.row_ptrs(0)?;
    let (kind, parameter) = match head.loss_fn {
        PointwiseLossFn::SquaredError => (0, 0.0),
        PointwiseLossFn::Huber { delta } => (1, delta),
        PointwiseLossFn::BceWithLogits => (2, 0.0),
        PointwiseLossFn::AbsoluteError => (3, 0.0),
        PointwiseLossFn::Focal { gamma } => (4, gamma),
    };
    let positive_weights = head.positive_weights.map(|weights| weights.to_device(p.device())).transpose()?;
    let args = PointwiseLossArgs {
        dtype: dtype_code(p.dtype())?,
        kind,
        backward: scale.is_some() as c_int,
        p: pointer(p)?,
        targets: pointer(targets)?.cast(),
        positive_weights: pointer_or_null(positive_weights.as_ref())?.cast(),
        loss,
        weight,
        hits,
        samples: samples as i64,
        values: values as i64,
        per_sample: per_sample as i64,
        outputs: head.weight.dim(0)? as i64,
        parameter,
        smoothing: head.smoothing,
        grad_scale: scale.unwrap_or(0.0) / values as f64,
    };
    // SAFETY: there is a target per prediction, and a row of metrics per sample.
    check_status("pointwise_loss_and_grad", unsafe { pointwise_loss_and_grad(&args, stream(device)) })?;
    row_metrics.reduce(device)
}

/// `PointwiseLossArgs` in pointwise_loss.cu.
#[repr(C)]
struct PointwiseLossArgs {
    dtype: c_int,
    kind: c_int,
    backward: c_int,
    p: *mut c_void,
    targets: *const f32,
    positive_weights: *const f32,
    loss: *mut f64,
    weight: *mut f64,
    hits: *mut u32,
    samples: i64,
    values: i64,
    per_sample: i64,
    outputs: i64,
    parameter: f64,
    smoothing: f64,
    grad_scale: f64,
}

unsafe extern "C" {
    fn pointwise_loss_and_grad(args: *const PointwiseLossArgs, stream: RawStream) -> c_int;
}
