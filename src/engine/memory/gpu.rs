//! A GPU under a budget: its tensors come from a heap whose capacity is the budget.
//!
//! Every tensor on the device comes from this heap, whoever allocates it, because the program intercepts the driver's
//! allocation calls on the compute stream ([`intercept`]). The memory of the CUDA context is outside the heap, and is
//! measured here.

#[cfg(feature = "cuda")]
mod chunks;
#[cfg(feature = "cuda")]
mod intercept;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use candle_core::Device;

use crate::base::ComputeCapability;
use crate::base::units::Bytes;

/// Device memory that the heap leaves to the driver. Kernels, which are loaded at their first launch, plans of cuBLASLt
/// and cuDNN, and CUDA graphs take device memory that no budget counts; without any left, a launch fails.
pub const DRIVER_RESERVE_BYTES: u64 = 64 << 20;

/// Physical bytes that a heap may map beyond its `tensors`: partially filled chunks. The budget counts tensors only.
#[cfg(feature = "cuda")]
fn slack(tensors: u64) -> u64 {
    (tensors / 40).max(MAX_FIXED_SLACK)
}

const MAX_FIXED_SLACK: u64 = 96 << 20;

/// The most bytes of tensors that fit into `free` bytes beside the driver's reserve and the slack of partially filled
/// chunks: a fortieth of the tensors, and at least 96 MiB or an eighth of them, whichever is less.
pub fn max_tensor_bytes(free: u64) -> u64 {
    let heap = free.saturating_sub(DRIVER_RESERVE_BYTES);
    heap - heap.div_ceil(41).max(heap.div_ceil(9).min(MAX_FIXED_SLACK))
}

/// Why a GPU could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error("this build has no CUDA")]
    NoCuda,
    #[error("there is no GPU {ordinal}: {why}")]
    NoDevice { ordinal: usize, why: String },
    #[error("GPU {ordinal} has {} free, and {} were requested", Bytes(*.free), Bytes(*.requested))]
    TooSmall { ordinal: usize, free: u64, requested: u64 },
    #[error("the driver refused {what}: {why}")]
    Driver { what: &'static str, why: String },
}

/// A GPU as the driver describes it, and its current memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    pub ordinal: usize,
    pub model: String,
    pub total: u64,
    pub free: u64,
    pub capability: ComputeCapability,
    /// Bytes that a CUDA context takes, if there was none before and it could be measured.
    pub context_bytes: u64,
}

#[cfg(feature = "cuda")]
pub use with_cuda::{GpuDevice, all};
#[cfg(not(feature = "cuda"))]
pub use without_cuda::{GpuDevice, all};

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    use candle_core::cuda_backend::cudarc::driver::{CudaContext, result};

    use super::super::device_heap::{DeviceHeap, HeapStats};
    use super::super::nvml;
    use super::chunks::MappedChunks;
    use super::*;

    /// A GPU opened for compute.
    pub struct GpuDevice {
        pub ordinal: usize,
        pub device: Device,
        /// Bytes that tensors may take.
        pub limit: u64,
        /// Bytes that the CUDA context took before the first tensor, not part of the limit; 0 if unknown.
        pub context_bytes: u64,
        pub capability: ComputeCapability,
        /// Bytes that were free before the heap mapped any.
        free_at_start: u64,
        heap: Arc<Mutex<DeviceHeap<MappedChunks>>>,
    }

    /// Every GPU that the driver reports; empty without a driver.
    pub fn all() -> Vec<GpuInfo> {
        let count = result::init().and_then(|()| result::device::get_count()).unwrap_or(0);
        (0..count as usize).filter_map(|ordinal| query(ordinal).ok()).collect()
    }

    fn query(ordinal: usize) -> Result<GpuInfo, GpuError> {
        result::init().map_err(|e| no_device(ordinal, &e))?;
        let before = nvml::used_bytes(ordinal);
        let context = CudaContext::new(ordinal).map_err(|e| no_device(ordinal, &e))?;
        let (free, total) = context.mem_get_info().map_err(driver_error("to say what is free"))?;
        let (major, minor) = context.compute_capability().map_err(driver_error("to say its capability"))?;
        let model = context.name().map_err(driver_error("to say its name"))?;
        let capability = (major as u32, minor as u32);
        let own =
            before.zip(nvml::used_bytes(ordinal)).map_or(0, |(before, after)| after.saturating_sub(before));
        Ok(GpuInfo { ordinal, model, total: total as u64, free: free as u64, capability, context_bytes: own })
    }

    fn no_device(ordinal: usize, error: &dyn std::fmt::Display) -> GpuError {
        GpuError::NoDevice { ordinal, why: error.to_string() }
    }

    pub(super) fn driver_error<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> GpuError {
        move |error| GpuError::Driver { what, why: error.to_string() }
    }

    impl GpuDevice {
        /// Opens a GPU whose tensors may take `limit(info)` bytes of its free memory.
        pub fn open(ordinal: usize, limit: impl FnOnce(&GpuInfo) -> u64) -> Result<Self, GpuError> {
            let context_bytes = query(ordinal)?.context_bytes;
            let device = Device::new_cuda_with_stream(ordinal).map_err(|e| no_device(ordinal, &e))?;
            let info = query(ordinal)?;
            let Device::Cuda(cuda) = &device else { return Err(GpuError::NoCuda) };
            // SAFETY: all kernels run on the device's single stream, and copies on other streams use their own events,
            // so no use of a tensor relies on cudarc's event tracking for its order.
            unsafe { cuda.disable_event_tracking() };
            let limit = limit(&info);
            if limit > info.free {
                return Err(GpuError::TooSmall { ordinal, free: info.free, requested: limit });
            }
            let stream = cuda.cuda_stream();
            let heap = Arc::new(Mutex::new(MappedChunks::new_heap(&stream, ordinal, limit + slack(limit))?));
            intercept::register(&stream, &heap);
            let (capability, free_at_start) = (info.capability, info.free);
            Ok(Self { ordinal, device, limit, context_bytes, capability, free_at_start, heap })
        }

        /// The heap that all tensors of the device come from.
        pub fn heap(&self) -> MutexGuard<'_, DeviceHeap<MappedChunks>> {
            self.heap.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// Bytes of live tensors.
        pub fn used_bytes(&self) -> u64 {
            self.heap().used_bytes()
        }

        /// Peak bytes of live tensors since the last call.
        pub fn take_recent_peak(&self) -> u64 {
            self.heap().take_peak()
        }

        /// What serving the allocations cost so far.
        pub fn stats(&self) -> HeapStats {
            self.heap().stats
        }

        /// Maps device memory for this many bytes of tensors, so that no other process can take it. If others hold it
        /// already, the rest is mapped on demand.
        pub fn preallocate(&self, bytes: u64) {
            let bytes = bytes.min(self.limit);
            self.heap().preallocate(bytes + slack(bytes));
        }

        /// Returns the heap's free chunks to the driver, which needs memory for itself. The heap maps others on demand.
        pub fn release_free_chunks(&self) {
            self.heap().release_free_chunks();
        }

        /// Gives the driver its reserve back if what it loaded has taken most of it.
        pub fn replenish_driver_reserve(&self) {
            if self.free_bytes() < DRIVER_RESERVE_BYTES / 2 {
                self.release_free_chunks();
            }
        }

        /// Bytes that no process has allocated; 0 if the driver does not say.
        pub fn free_bytes(&self) -> u64 {
            let Device::Cuda(cuda) = &self.device else { return 0 };
            cuda.cuda_stream().context().mem_get_info().map_or(0, |(free, _)| free as u64)
        }

        /// Bytes allocated outside the heap since the GPU was opened, by other processes too.
        pub fn outside_heap_bytes(&self) -> u64 {
            self.free_at_start.saturating_sub(self.free_bytes() + self.heap().mapped_bytes())
        }

        /// Requested and available bytes of the last failed allocation; clears it.
        pub fn take_last_oom(&self) -> Option<(u64, u64)> {
            intercept::take_last_oom().map(|oom| (oom.bytes, oom.available))
        }
    }

    impl Drop for GpuDevice {
        fn drop(&mut self) {
            drop(self.device.synchronize());
            intercept::unregister(&self.heap);
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod without_cuda {
    use super::super::device_heap::HeapStats;
    use super::*;

    /// Stub: this build has no CUDA.
    pub struct GpuDevice {
        pub ordinal: usize,
        pub device: Device,
        pub limit: u64,
        pub context_bytes: u64,
        pub capability: ComputeCapability,
        never: std::convert::Infallible,
    }

    pub fn all() -> Vec<GpuInfo> {
        Vec::new()
    }

    impl GpuDevice {
        pub fn open(_: usize, _: impl FnOnce(&GpuInfo) -> u64) -> Result<Self, GpuError> {
            Err(GpuError::NoCuda)
        }

        pub fn used_bytes(&self) -> u64 {
            match self.never {}
        }

        pub fn take_recent_peak(&self) -> u64 {
            match self.never {}
        }

        pub fn stats(&self) -> HeapStats {
            match self.never {}
        }

        pub fn preallocate(&self, _: u64) {
            match self.never {}
        }

        pub fn release_free_chunks(&self) {
            match self.never {}
        }

        pub fn replenish_driver_reserve(&self) {
            match self.never {}
        }

        pub fn free_bytes(&self) -> u64 {
            match self.never {}
        }

        pub fn outside_heap_bytes(&self) -> u64 {
            match self.never {}
        }

        pub fn take_last_oom(&self) -> Option<(u64, u64)> {
            match self.never {}
        }
    }
}

#[cfg(test)]
mod budget_tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Tensors, the chunks they fill partially and the reserve fit into what is free, and little more would not.
        #[test]
        fn the_heap_and_the_reserve_fit_into_what_is_free(free in 0u64..200 << 30) {
            let tensors = max_tensor_bytes(free);
            let needed = |tensors: u64| {
                tensors + (tensors / 40).max((tensors / 8).min(MAX_FIXED_SLACK)) + DRIVER_RESERVE_BYTES
            };
            prop_assert!(tensors == 0 || needed(tensors) <= free);
            prop_assert!(needed(tensors + 64) > free);
        }
    }
}
