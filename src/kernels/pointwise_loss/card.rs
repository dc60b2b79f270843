//! The body for cards.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::Kind;
use crate::kernels::cuda::{Stream, checked, code, pointer, stream};
use crate::kernels::tally::Counted;
use crate::kernels::tally::card::Rows;

/// Counts predictions and, where there is a `scale`, turns them into gradients.
pub(super) fn compare(
    device: &CudaDevice,
    kind: Kind,
    p: &Tensor,
    targets: &Tensor,
    scale: Option<f64>,
) -> Result<Counted> {
    let samples = p.dim(0)?;
    let values = p.elem_count() / samples.max(1);
    if targets.elem_count() != samples * values || targets.dtype() != DType::F32 {
        bail!("{} targets of {:?} for {samples} samples", targets.elem_count(), targets.dtype());
    }
    let counts = Rows::new(device, samples)?;
    let (loss, weight, hits) = counts.from(0)?;
    let (kind, delta) = match kind {
        Kind::Squared => (0, 0.0),
        Kind::Huber { delta } => (1, delta),
        Kind::Binary => (2, 0.0),
    };
    // SAFETY: there are as many targets as predictions, and a row of the tally for each sample.
    checked("pointwise_loss_compare", unsafe {
        pointwise_loss_compare(
            code(p.dtype())?,
            kind,
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
    counts.add(device)
}

unsafe extern "C" {
    fn pointwise_loss_compare(
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
        pull: f64,
        learn: c_int,
        stream: Stream,
    ) -> c_int;
}
