//! The way between a card and page-locked host memory: copies each way on a stream of their own, beside the one
//! that computes.
//!
//! Nothing here waits on the host's side but [`CopyStreams::synchronize`]. Who starts a copy says what it comes after, and gets a
//! mark that others wait for.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::pointer;
use crate::kernels::cpu;

/// A moment of a stream, which others can wait for.
pub type StreamEvent = CudaEvent;

/// The streams of one card.
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

    /// All that was given to the card to compute so far.
    pub fn record_compute(&self) -> Result<StreamEvent> {
        self.compute.record_event(None).w()
    }

    /// What is computed from here on comes after `mark`.
    pub fn compute_wait(&self, event: &StreamEvent) -> Result<()> {
        self.compute.wait(event).w()
    }

    /// Copies as many bytes as `to` has from byte `at` of `host`, after `mark`.
    pub fn copy_to_device(
        &self,
        host: &PinnedBuffer,
        offset: usize,
        to: &Tensor,
        after: &StreamEvent,
    ) -> Result<StreamEvent> {
        let (from, bytes) = host.slice_for(offset, to)?;
        self.h2d.wait(after).w()?;
        // SAFETY: both sides have so many bytes, and their owners wait for the mark before they let go of them.
        unsafe { sys::cuMemcpyHtoDAsync_v2(pointer(to)? as u64, from, bytes, self.h2d.cu_stream()) }
            .result()
            .w()?;
        self.h2d.record_event(None).w()
    }

    /// Copies `from`, as it is after all that was computed so far, to byte `at` of `host`.
    pub fn copy_to_host(&self, from: &Tensor, host: &PinnedBuffer, offset: usize) -> Result<StreamEvent> {
        let (to, bytes) = host.slice_for(offset, from)?;
        self.d2h.wait(&self.record_compute()?).w()?;
        // SAFETY: as in `copy_to_device`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, pointer(from)? as u64, bytes, self.d2h.cu_stream()) }
            .result()
            .w()?;
        self.d2h.record_event(None).w()
    }

    /// Waits until all copies are done.
    pub fn synchronize(&self) -> Result<()> {
        self.h2d.synchronize().w()?;
        self.d2h.synchronize().w()
    }
}

/// The memory of a tensor on the host, which stays where it is and which a card reads and writes by itself.
pub struct PinnedBuffer {
    context: Arc<CudaContext>,
    ptr: *mut c_void,
    bytes: usize,
    tensor: Tensor,
}

impl PinnedBuffer {
    /// Zeros.
    pub fn new(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let tensor = Tensor::zeros(len, dtype, &Device::Cpu)?;
        let start = match dtype {
            DType::F32 => cpu::with_slice_mut::<f32, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            DType::F64 => cpu::with_slice_mut::<f64, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            DType::U8 => cpu::with_slice_mut::<u8, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            other => bail!("no host memory of {other:?} is locked for a card"),
        };
        let (context, bytes) = (device.cuda_stream().context().clone(), len * dtype.size_in_bytes());
        context.bind_to_thread().w()?;
        // SAFETY: the tensor's own memory, which lasts as long as this; the driver is told before it goes.
        unsafe { sys::cuMemHostRegister_v2(start, bytes, 0) }.result().w()?;
        Ok(Self { context, ptr: start, bytes, tensor })
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the part for a tensor begins that lies from byte `offset` on, and its bytes.
    fn slice_for(&self, offset: usize, tensor: &Tensor) -> Result<(*mut c_void, usize)> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        if offset + bytes > self.bytes {
            bail!("bytes {offset} to {} of {} that are locked", offset + bytes, self.bytes)
        }
        // SAFETY: within the memory, as was just seen.
        Ok((unsafe { self.ptr.byte_add(offset) }, bytes))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // A context that is gone took the lock with it.
        let _ = self.context.bind_to_thread();
        // SAFETY: locked by `new`, and its owner waited for the copies from and to it.
        let _ = unsafe { sys::cuMemHostUnregister(self.ptr) };
    }
}
