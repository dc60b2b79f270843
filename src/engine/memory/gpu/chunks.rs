//! Physical GPU memory in chunks, mapped into one reserved address range by CUDA's virtual memory management API.

use std::collections::BTreeMap;
use std::mem::zeroed;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};

use super::with_cuda::driver_error;
use super::{DRIVER_RESERVE_BYTES, GpuError};
use crate::memory::device_heap::{Backing, DeviceHeap};

/// Reserved addresses per byte of capacity: compaction maps chunks at fresh addresses and never reuses old ones.
const ADDRESS_SPACE_FACTOR: u64 = 32;

/// Handles of the mapped chunks, by address.
pub struct MappedChunks {
    stream: Arc<CudaStream>,
    ordinal: usize,
    chunk_bytes: u64,
    addresses: (u64, u64),
    handles: BTreeMap<u64, sys::CUmemGenericAllocationHandle>,
}

impl MappedChunks {
    /// A heap of at most `capacity` bytes, none of them mapped yet.
    pub fn new_heap(
        stream: &Arc<CudaStream>,
        ordinal: usize,
        capacity: u64,
    ) -> Result<DeviceHeap<Self>, GpuError> {
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as SUPPORTED;
        if stream.context().attribute(SUPPORTED).unwrap_or(0) == 0 {
            let why = "it does not support virtual memory management".into();
            return Err(GpuError::Driver { what: "a memory heap", why });
        }
        // Chunks of about a thousandth of the capacity are quick to remap and waste little; the driver's granularity is
        // 2 MiB.
        let chunk_bytes = (capacity / 1024).next_power_of_two().clamp(2 << 20, 64 << 20);
        let bytes = (capacity.next_multiple_of(chunk_bytes)) * ADDRESS_SPACE_FACTOR;
        let mut at = 0;
        // SAFETY: plain FFI call; the only pointer is to a local.
        let code = unsafe { sys::cuMemAddressReserve(&mut at, bytes as usize, chunk_bytes as usize, 0, 0) };
        code.result().map_err(driver_error("to reserve addresses"))?;
        let (stream, handles) = (stream.clone(), BTreeMap::new());
        let chunks = Self { stream, ordinal, chunk_bytes, addresses: (at, bytes), handles };
        Ok(DeviceHeap::new(chunks, chunk_bytes, at..at + bytes, capacity))
    }

    fn location(&self) -> sys::CUmemLocation {
        // SAFETY: the struct is plain data, for which all zeros are valid.
        let mut location: sys::CUmemLocation = unsafe { zeroed() };
        location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        location.id = self.ordinal as i32;
        location
    }

    fn create_chunk(&self) -> Result<sys::CUmemGenericAllocationHandle, result::DriverError> {
        // SAFETY: the struct is plain data, for which all zeros are valid; pointers are to locals.
        unsafe {
            let mut properties: sys::CUmemAllocationProp = zeroed();
            properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.location = self.location();
            let mut handle = 0;
            sys::cuMemCreate(&mut handle, self.chunk_bytes as usize, &properties, 0).result()?;
            Ok(handle)
        }
    }

    /// Grants kernels read and write access to these addresses.
    fn set_access(&self, at: u64, bytes: u64) -> Result<(), result::DriverError> {
        // SAFETY: the struct is plain data, for which all zeros are valid; the addresses are mapped.
        unsafe {
            let mut access: sys::CUmemAccessDesc = zeroed();
            access.location = self.location();
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            sys::cuMemSetAccess(at, bytes as usize, &access, 1).result()
        }
    }

    fn map_handle(
        &mut self,
        at: u64,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Result<(), result::DriverError> {
        // SAFETY: the range is reserved, exactly one chunk long, and nothing is mapped there.
        unsafe { sys::cuMemMap(at, self.chunk_bytes as usize, 0, handle, 0) }.result()?;
        self.handles.insert(at, handle);
        Ok(())
    }

    fn unmap(&mut self, at: u64) -> Option<sys::CUmemGenericAllocationHandle> {
        let handle = self.handles.remove(&at)?;
        // SAFETY: mapped by this object, and no work in flight uses it: the caller synchronized with the device.
        let _ = unsafe { sys::cuMemUnmap(at, self.chunk_bytes as usize) };
        Some(handle)
    }

    /// Waits until no work in flight uses any chunk; false if that is not possible now.
    fn synchronize(&self) -> bool {
        // The device cannot be synchronized during CUDA graph capture.
        let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let context = self.stream.context();
        // Copies use streams of their own, so synchronize the whole context.
        self.stream.capture_status() == Ok(none)
            && context.bind_to_thread().is_ok()
            && context.synchronize().is_ok()
    }

    fn release_chunks(&mut self, from: u64, chunks: u64) {
        for at in (from..from + chunks * self.chunk_bytes).step_by(self.chunk_bytes as usize) {
            if let Some(handle) = self.unmap(at) {
                // SAFETY: created by this object, and no longer mapped.
                let _ = unsafe { sys::cuMemRelease(handle) };
            }
        }
    }
}

impl Backing for MappedChunks {
    fn map(&mut self, at: u64, chunks: u64) -> u64 {
        if self.stream.context().bind_to_thread().is_err() {
            return 0;
        }
        let free = self.stream.context().mem_get_info().map_or(0, |(free, _)| free as u64);
        let chunks = chunks.min(free.saturating_sub(DRIVER_RESERVE_BYTES) / self.chunk_bytes);
        let mut mapped = 0;
        while mapped < chunks {
            let Ok(handle) = self.create_chunk() else { break };
            if self.map_handle(at + mapped * self.chunk_bytes, handle).is_err() {
                // SAFETY: created by this object, and mapped nowhere.
                let _ = unsafe { sys::cuMemRelease(handle) };
                break;
            }
            mapped += 1;
        }
        if mapped > 0 && self.set_access(at, mapped * self.chunk_bytes).is_err() {
            self.release_chunks(at, mapped);
            return 0;
        }
        mapped
    }

    fn remap(&mut self, from: &[u64], to: u64) -> bool {
        if !self.synchronize() {
            return false;
        }
        let mut target = to;
        for at in from {
            let Some(handle) = self.unmap(*at) else { return false };
            if self.map_handle(target, handle).is_err() {
                return false;
            }
            target += self.chunk_bytes;
        }
        self.set_access(to, target - to).is_ok()
    }

    fn release(&mut self, chunks: &[u64]) -> bool {
        let idle = self.synchronize();
        if idle {
            chunks.iter().for_each(|at| self.release_chunks(*at, 1));
        }
        idle
    }
}

impl Drop for MappedChunks {
    /// The last tensor is gone, but kernels that use it may still run: synchronize first. An error means that the
    /// context itself is gone.
    fn drop(&mut self) {
        let _ = self.stream.context().bind_to_thread();
        let _ = self.stream.context().synchronize();
        let mapped: Vec<u64> = self.handles.keys().copied().collect();
        mapped.into_iter().for_each(|at| self.release_chunks(at, 1));
        // SAFETY: reserved by this object, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.addresses.0, self.addresses.1 as usize) };
    }
}
