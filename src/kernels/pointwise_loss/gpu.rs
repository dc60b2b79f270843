//! Pointwise losses on a GPU.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::PointwiseLossFn;
use crate::kernels::cuda::{RawStream, check_status, dtype_code, pointer, stream};
use crate::kernels::metric_sums::PendingMetricSums;
use crate::kernels::metric_sums::gpu::RowMetrics;

/// Computes the metric sums and, with a `scale`, turns the predictions into gradients in place.
pub(super) fn loss_and_grad(
    device: &CudaDevice,
    loss_fn: PointwiseLossFn,
    p: &Tensor,
    targets: &Tensor,
    scale: Option<f64>,
) -> Result<PendingMetricSums> {
    let samples = p.dim(0)?;
    let values = p.elem_count() / samples.max(1);
    if targets.elem_count() != samples * values || targets.dtype() != DType::F32 {
        bail!("{} targets of {:?} for {samples} samples", targets.elem_count(), targets.dtype());
    }
    let row_metrics = RowMetrics::new(device, samples)?;
    let (loss, weight, hits) = row_metrics.row_ptrs(0)?;
    let (kind_code, delta) = match loss_fn {
        PointwiseLossFn::SquaredError => (0, 0.0),
        PointwiseLossFn::Huber { delta } => (1, delta),
        PointwiseLossFn::BceWithLogits => (2, 0.0),
        PointwiseLossFn::AbsoluteError => (3, 0.0),
    };
    // SAFETY: there is a target per prediction, and a row of metrics per sample.
    check_status("pointwise_loss_and_grad", unsafe {
        pointwise_loss_and_grad(
            dtype_code(p.dtype())?,
            kind_code,
            pointer(p)?,
            pointer(targets)?,
            loss,
            weight,
            hits,
            samples as i64,
            values as i64,
            delta,
            scale.unwrap_or(0.0) / values as f64,
            scale.is_some() as c_int,
            stream(device),
        )
    })?;
    row_metrics.reduce(device)
}

unsafe extern "C" {
    fn pointwise_loss_and_grad(
        dtype: c_int,
        kind: c_int,
        p: *mut c_void,
        targets: *const c_void,
        loss: *mut f64,
        weight: *mut f64,
        hits: *mut u32,
        samples: i64,
        values: i64,
        delta: f64,
        grad_scale: f64,
        backward: c_int,
        stream: RawStream,
    ) -> c_int;
}
