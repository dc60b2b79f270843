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

/// Physical bytes that a heap may map beyond its `tensors`: partially filled chunks. The budget counts tensors only.
#[cfg(feature = "cuda")]
fn slack(tensors: u64) -> u64 {
    (tensors / 40).max(96 << 20)
}

/// Why a GPU could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error("this build has no CUDA")]
    NoCuda,
    #[error("there is no card {ordinal}: {why}")]
    NoDevice { ordinal: usize, why: String },
    #[error("the card {ordinal} has {} free, and {} were asked for", Bytes(*.free), Bytes(*.requested))]
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
        heap: Arc<Mutex<DeviceHeap<MappedChunks>>>,
    }

    /// Every GPU that the driver reports; empty without a driver.
    pub fn all() -> Vec<GpuInfo> {
        let count = result::init().and_then(|()| result::device::get_count()).unwrap_or(0);
        (0..count as usize).filter_map(|ordinal| query(ordinal).ok()).collect()
    }

    fn query(ordinal: usize) -> Result<GpuInfo, GpuError> {
        result::init().map_err(|e| no_device(ordinal, &e))?;
        let address = nvml::pci_bus_id(ordinal);
        let used = || nvml::used_bytes(address.as_deref()?);
        let before = used();
        let context = CudaContext::new(ordinal).map_err(|e| no_device(ordinal, &e))?;
        let (free, total) = context.mem_get_info().map_err(driver_error("to say what is free"))?;
        let (major, minor) = context.compute_capability().map_err(driver_error("to say its capability"))?;
        let model = context.name().map_err(driver_error("to say its name"))?;
        let capability = (major as u32, minor as u32);
        let own = before.zip(used()).map_or(0, |(before, after)| after.saturating_sub(before));
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
            Ok(Self { ordinal, device, limit, context_bytes, capability: info.capability, heap })
        }

        /// The heap that all tensors of the device come from.
        pub fn heap(&self) -> MutexGuard<'_, DeviceHeap<MappedChunks>> {
            self.heap.lock().unwrap_or_else(PoisonError::into_inner)
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

        pub fn take_recent_peak(&self) -> u64 {
            match self.never {}
        }

        pub fn stats(&self) -> HeapStats {
            match self.never {}
        }

        pub fn preallocate(&self, _: u64) {
            match self.never {}
        }

        pub fn take_last_oom(&self) -> Option<(u64, u64)> {
            match self.never {}
        }
    }
}
