//! The way between a card and page-locked host memory: copies each way on a stream of their own, beside the one
//! that computes.
//!
//! Nothing here waits on the host's side but [`Link::settle`]. Who starts a copy says what it comes after, and gets a
//! mark that others wait for.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::pointer;
use crate::kernels::cpu;

/// A moment of a stream, which others can wait for.
pub type Mark = CudaEvent;

/// The streams of one card.
pub struct Link {
    computes: Arc<CudaStream>,
    inward: Arc<CudaStream>,
    outward: Arc<CudaStream>,
}

impl Link {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let computes = device.cuda_stream();
        let context = computes.context();
        Ok(Self { inward: context.new_stream().w()?, outward: context.new_stream().w()?, computes })
    }

    /// All that was given to the card to compute so far.
    pub fn now(&self) -> Result<Mark> {
        self.computes.record_event(None).w()
    }

    /// What is computed from here on comes after `mark`.
    pub fn computes_after(&self, mark: &Mark) -> Result<()> {
        self.computes.wait(mark).w()
    }

    /// Copies as many bytes as `to` has from byte `at` of `host`, after `mark`.
    pub fn fetch(&self, host: &Pinned, at: usize, to: &Tensor, mark: &Mark) -> Result<Mark> {
        let (from, bytes) = host.part(at, to)?;
        self.inward.wait(mark).w()?;
        // SAFETY: both sides have so many bytes, and their owners wait for the mark before they let go of them.
        unsafe { sys::cuMemcpyHtoDAsync_v2(pointer(to)? as u64, from, bytes, self.inward.cu_stream()) }
            .result()
            .w()?;
        self.inward.record_event(None).w()
    }

    /// Copies `from`, as it is after all that was computed so far, to byte `at` of `host`.
    pub fn send(&self, from: &Tensor, host: &Pinned, at: usize) -> Result<Mark> {
        let (to, bytes) = host.part(at, from)?;
        self.outward.wait(&self.now()?).w()?;
        // SAFETY: as in `fetch`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, pointer(from)? as u64, bytes, self.outward.cu_stream()) }
            .result()
            .w()?;
        self.outward.record_event(None).w()
    }

    /// Waits until all copies are done.
    pub fn settle(&self) -> Result<()> {
        self.inward.synchronize().w()?;
        self.outward.synchronize().w()
    }
}

/// The memory of a tensor on the host, which stays where it is and which a card reads and writes by itself.
pub struct Pinned {
    context: Arc<CudaContext>,
    at: *mut c_void,
    bytes: usize,
    tensor: Tensor,
}

impl Pinned {
    /// Zeros.
    pub fn new(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let tensor = Tensor::zeros(len, dtype, &Device::Cpu)?;
        let start = match dtype {
            DType::F32 => cpu::update::<f32, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            DType::F64 => cpu::update::<f64, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            DType::U8 => cpu::update::<u8, _>(&tensor, |all| all.as_mut_ptr().cast::<c_void>())?,
            other => bail!("no host memory of {other:?} is locked for a card"),
        };
        let (context, bytes) = (device.cuda_stream().context().clone(), len * dtype.size_in_bytes());
        context.bind_to_thread().w()?;
        // SAFETY: the tensor's own memory, which lasts as long as this; the driver is told before it goes.
        unsafe { sys::cuMemHostRegister_v2(start, bytes, 0) }.result().w()?;
        Ok(Self { context, at: start, bytes, tensor })
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the part for a tensor begins that lies from byte `at` on, and its bytes.
    fn part(&self, at: usize, tensor: &Tensor) -> Result<(*mut c_void, usize)> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        if at + bytes > self.bytes {
            bail!("bytes {at} to {} of {} that are locked", at + bytes, self.bytes)
        }
        // SAFETY: within the memory, as was just seen.
        Ok((unsafe { self.at.byte_add(at) }, bytes))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A context that is gone took the lock with it.
        let _ = self.context.bind_to_thread();
        // SAFETY: locked by `new`, and its owner waited for the copies from and to it.
        let _ = unsafe { sys::cuMemHostUnregister(self.at) };
    }
}
