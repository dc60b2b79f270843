//! Copies between a GPU and page-locked host memory, on one stream per direction, concurrent with the compute stream.
//!
//! Only [`CopyStreams::synchronize`] blocks the host. The caller passes the event a copy must follow and receives an
//! event that others can wait for.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::pointer;
use crate::kernels::cpu;

/// A point in a stream that other streams can wait for.
pub type StreamEvent = CudaEvent;

/// The compute stream and the two copy streams of one GPU.
pub struct CopyStreams {
    compute: Arc<CudaStream>,
    h2d: Arc<CudaStream>,
    d2h: Arc<CudaStream>,
}

impl CopyStreams {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let compute = device.cuda_stream();
        let context = compute.context();
        Ok(Self { h2d: context.new_stream().w()?, d2h: context.new_stream().w()?, compute })
    }

    /// Records an event after all compute work enqueued so far.
    pub fn record_compute(&self) -> Result<StreamEvent> {
        self.compute.record_event(None).w()
    }

    /// Makes compute work enqueued from now on wait for `event`.
    pub fn compute_wait(&self, event: &StreamEvent) -> Result<()> {
        self.compute.wait(event).w()
    }

    /// Copies to `to`, all of it, from byte `offset` of `host`, once `after` has completed.
    pub fn copy_to_device(
        &self,
        host: &PinnedBuffer,
        offset: usize,
        to: &Tensor,
        after: &StreamEvent,
    ) -> Result<StreamEvent> {
        let (from, bytes) = host.slice_for(offset, to)?;
        self.h2d.wait(after).w()?;
        // SAFETY: both sides hold `bytes` bytes, and their owners wait for the returned event before they free them.
        unsafe { sys::cuMemcpyHtoDAsync_v2(pointer(to)? as u64, from, bytes, self.h2d.cu_stream()) }
            .result()
            .w()?;
        self.h2d.record_event(None).w()
    }

    /// Copies `from` to byte `offset` of `host`, after all compute work enqueued so far.
    pub fn copy_to_host(&self, from: &Tensor, host: &PinnedBuffer, offset: usize) -> Result<StreamEvent> {
        let (to, bytes) = host.slice_for(offset, from)?;
        self.d2h.wait(&self.record_compute()?).w()?;
        // SAFETY: as in `copy_to_device`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, pointer(from)? as u64, bytes, self.d2h.cu_stream()) }
            .result()
            .w()?;
        self.d2h.record_event(None).w()
    }

    /// Blocks the host until all copies are done.
    pub fn synchronize(&self) -> Result<()> {
        self.h2d.synchronize().w()?;
        self.d2h.synchronize().w()
    }
}

/// A host tensor in page-locked memory, which the GPU reads and writes by DMA. The memory never moves.
pub struct PinnedBuffer {
    context: Arc<CudaContext>,
    ptr: *mut c_void,
    bytes: usize,
    tensor: Tensor,
}

impl PinnedBuffer {
    /// Allocates a zeroed buffer and registers it with the driver.
    pub fn new(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let tensor = Tensor::zeros(len, dtype, &Device::Cpu)?;
        let start = match dtype {
            DType::F32 => cpu::with_slice_mut::<f32, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            DType::F64 => cpu::with_slice_mut::<f64, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            DType::U8 => cpu::with_slice_mut::<u8, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            other => bail!("pinned host memory of {other:?} is not supported"),
        };
        let (context, bytes) = (device.cuda_stream().context().clone(), len * dtype.size_in_bytes());
        context.bind_to_thread().w()?;
        // SAFETY: the tensor owns this memory and lives as long as `self`; `drop` unregisters it before the tensor
        // frees it.
        unsafe { sys::cuMemHostRegister_v2(start, bytes, 0) }.result().w()?;
        Ok(Self { context, ptr: start, bytes, tensor })
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of byte `offset` and the size of `tensor` in bytes; an error if the range exceeds the buffer.
    fn slice_for(&self, offset: usize, tensor: &Tensor) -> Result<(*mut c_void, usize)> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        if offset + bytes > self.bytes {
            bail!("bytes {offset} to {} exceed the {} pinned bytes", offset + bytes, self.bytes)
        }
        // SAFETY: the check above keeps the range within the allocation.
        Ok((unsafe { self.ptr.byte_add(offset) }, bytes))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // If the context is already destroyed, so is the registration.
        let _ = self.context.bind_to_thread();
        // SAFETY: `new` registered the memory, and its owner waited for all copies from and to it.
        let _ = unsafe { sys::cuMemHostUnregister(self.ptr) };
    }
}
