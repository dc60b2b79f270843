//! Metrics per row on a GPU, and their sums.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::PendingMetricSums;
use crate::kernels::cuda::{RawStream, check_status, pointer, scratch, stream, uninit};

/// Loss, weight and hit flags of each row; the flags say that it counts, is a top-1 hit, is a top-5 hit.
pub struct RowMetrics {
    buffer: Tensor,
    rows: usize,
}

impl RowMetrics {
    pub fn new(device: &CudaDevice, rows: usize) -> Result<Self> {
        Ok(Self { buffer: scratch(device, rows * (2 * size_of::<f64>() + size_of::<u32>()))?, rows })
    }

    /// Pointers to the entries of row `first`: loss, weight, hits.
    pub fn row_ptrs(&self, first: usize) -> Result<(*mut f64, *mut f64, *mut u32)> {
        let base: *mut f64 = pointer(&self.buffer)?.cast();
        let (loss, weight) = (base.wrapping_add(first), base.wrapping_add(self.rows + first));
        Ok((loss, weight, base.wrapping_add(2 * self.rows).cast::<u32>().wrapping_add(first)))
    }

    /// Enqueues the sums over all rows. Does not synchronize.
    pub fn reduce(self, device: &CudaDevice) -> Result<PendingMetricSums> {
        let sums = uninit(device, DType::F64, 5)?;
        let (loss, weight, hits) = self.row_ptrs(0)?;
        // SAFETY: the buffer holds an entry for each row.
        check_status("metric_sums_reduce", unsafe {
            metric_sums_reduce(
                loss.cast(),
                weight.cast(),
                hits.cast(),
                pointer(&sums)?,
                self.rows as i64,
                stream(device),
            )
        })?;
        Ok(PendingMetricSums::OnDevice(sums))
    }
}

unsafe extern "C" {
    fn metric_sums_reduce(
        loss: *const c_void,
        weight: *const c_void,
        hits: *const c_void,
        metric_sums: *mut c_void,
        rows: i64,
        stream: RawStream,
    ) -> c_int;
}
