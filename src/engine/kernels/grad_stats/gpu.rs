//! Gradient statistics on a GPU, with asynchronous readback to the host.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, result};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor};

use super::{GradStats, GradStatsConfig};
use crate::kernels::cuda::{RawStream, check_status, pointer, stream, uninit};
use crate::kernels::metric_sums::{MetricSums, PendingMetricSums};
use crate::kernels::update::gpu::sum_of_squares;

/// Number of values read back: the five metric sums, the norm and the gradient scale.
const STATS_LEN: usize = 7;
const GRAD_SCALE_INDEX: usize = 6;

/// Computes the statistics of one update after the other. Two slots: those of the previous update stay readable.
pub struct DeviceGradStats {
    slots: [Arc<ReadbackSlot>; 2],
    next: usize,
}

/// Statistics on the device and, once `ready` has fired, on the host.
struct ReadbackSlot {
    device_stats: Tensor,
    host_stats: *mut f64,
    ready: CudaEvent,
}

// SAFETY: the slot owns the memory. The GPU writes it before the event, and the host reads it only after.
unsafe impl Send for ReadbackSlot {}
unsafe impl Sync for ReadbackSlot {}

impl Drop for ReadbackSlot {
    fn drop(&mut self) {
        // SAFETY: `malloc_host` allocated the memory, and the GPU is done with it. The call fails only if the context
        // is gone.
        let _ = self.ready.synchronize().and_then(|()| unsafe { result::free_host(self.host_stats.cast()) });
    }
}

/// Statistics that the GPU is still computing; valid until the update after the next one is launched.
#[derive(Clone)]
pub struct PendingGradStats(Arc<ReadbackSlot>);

impl DeviceGradStats {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let slot = || -> Result<Arc<ReadbackSlot>> {
            let ready = device.cuda_stream().context().new_event(None).w()?;
            // SAFETY: the bytes are written before they are read, and `drop` frees them.
            let host_stats = unsafe { result::malloc_host(STATS_LEN * size_of::<f64>(), 0) }.w()?.cast();
            Ok(Arc::new(ReadbackSlot {
                device_stats: uninit(device, DType::F64, STATS_LEN)?,
                host_stats,
                ready,
            }))
        };
        Ok(Self { slots: [slot()?, slot()?], next: 0 })
    }

    /// Enqueues the statistics of `grads`, for micro-batches with these metric sums. Does not synchronize.
    pub fn launch(
        &mut self,
        metrics: &[PendingMetricSums],
        grads: &Tensor,
        config: &GradStatsConfig,
    ) -> Result<PendingGradStats> {
        let _scope = crate::kernels::kernel_timer::enter(module_path!());
        let slot = &self.slots[self.next];
        self.next ^= 1;
        let Some(device) = crate::kernels::cuda::device_of(grads) else {
            candle_core::bail!("grad_stats: the gradients are not on a CUDA device")
        };
        let (compute_stream, device_stats) = (device.cuda_stream(), pointer(&slot.device_stats)?);
        let squares = sum_of_squares(device, grads)?;
        let empty = [PendingMetricSums::Ready(MetricSums::default())];
        let metrics = if metrics.is_empty() { &empty } else { metrics };
        for (i, part) in metrics.iter().enumerate() {
            let sums = match part {
                PendingMetricSums::OnDevice(sums) => sums.clone(),
                PendingMetricSums::Ready(t) => {
                    let numbers = [t.loss, t.weight, t.count as f64, t.top1 as f64, t.top5 as f64];
                    Tensor::new(&numbers, grads.device())?
                }
            };
            // SAFETY: both buffers hold the five metric sums.
            check_status("grad_stats_accumulate", unsafe {
                grad_stats_accumulate(pointer(&sums)?, device_stats, (i == 0) as c_int, stream(device))
            })?;
        }
        let max_norm = config.max_norm.unwrap_or(f64::INFINITY);
        // SAFETY: `device_stats` holds all `STATS_LEN` values.
        check_status("grad_stats_finalize", unsafe {
            grad_stats_finalize(
                pointer(&squares)?,
                device_stats,
                config.divisor,
                config.loss_scale,
                max_norm,
                stream(device),
            )
        })?;
        // SAFETY: both sides hold `STATS_LEN` values and live as long as the slot.
        unsafe {
            let host = std::slice::from_raw_parts_mut(slot.host_stats, STATS_LEN);
            result::memcpy_dtoh_async(host, device_stats as u64, compute_stream.cu_stream()).w()?;
        }
        slot.ready.record(&compute_stream).w()?;
        Ok(PendingGradStats(slot.clone()))
    }
}

impl PendingGradStats {
    /// A view of the gradient scale on the device: one f64.
    pub fn grad_scale(&self) -> Result<Tensor> {
        self.0.device_stats.narrow(0, GRAD_SCALE_INDEX, 1)
    }

    /// Waits until the GPU has computed them, but not for work enqueued later.
    pub fn read(&self) -> Result<GradStats> {
        self.0.ready.synchronize().w()?;
        // SAFETY: the GPU has written the values and does not write them again until the slot is reused.
        let n = unsafe { std::slice::from_raw_parts(self.0.host_stats, STATS_LEN) };
        let metrics =
            MetricSums { loss: n[0], weight: n[1], count: n[2] as u64, top1: n[3] as u64, top5: n[4] as u64 };
        Ok(GradStats { metrics, norm: n[5], grad_scale: n[GRAD_SCALE_INDEX] })
    }
}

unsafe extern "C" {
    fn grad_stats_accumulate(
        sums: *const c_void,
        stats: *mut c_void,
        first: c_int,
        stream: RawStream,
    ) -> c_int;
    fn grad_stats_finalize(
        squares: *const c_void,
        stats: *mut c_void,
        divisor: f64,
        loss_scale: f64,
        max_norm: f64,
        stream: RawStream,
    ) -> c_int;
}
