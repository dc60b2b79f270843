//! Activation offload: keeps the inputs of recomputed blocks in host memory instead of device memory.
//!
//! An input is copied to the host while its block computes, and back during the backward pass of the block after it.
//! Its host bytes are reserved from the host ledger. On the CPU, and in a dry run, nothing is copied and only the
//! reservation is made.

use candle_core::{Device, Result, Tensor};
use serde::Serialize;

use super::network::StepError;
use crate::base::Role;
use crate::memory::{Ledger, Reservation};

/// Owner of the pinned host buffers and the host ledger.
pub struct ActivationOffload {
    host_ledger: Ledger,
    pool: Option<gpu::PinnedPool>,
}

/// An activation that was offloaded.
pub enum OffloadedTensor {
    /// Nothing was copied: it is only accounted for.
    Resident {
        value: Option<Tensor>,
        _reservation: Reservation,
    },
    Pinned(gpu::PinnedTensor),
}

/// Measured bytes per second of copies between a GPU and pinned host memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CopySpeed {
    pub to_host: f64,
    pub to_device: f64,
}

/// A copy in flight. Dropping it makes the compute stream wait for the copy. Drop it before the memory that the copy
/// reads or writes.
#[derive(Default)]
pub struct PendingCopy {
    _copy: Option<gpu::InFlightCopy>,
}

impl PendingCopy {
    /// Orders all later compute after the copy.
    pub fn wait(self) {}
}

impl ActivationOffload {
    /// Copies nothing, and still reserves from `host_ledger`.
    pub fn accounting_only(host_ledger: Ledger) -> Self {
        Self { host_ledger, pool: None }
    }

    /// For a device, which may be the CPU.
    pub fn new(host_ledger: Ledger, device: &Device) -> Result<Self> {
        match device {
            Device::Cuda(cuda) => Ok(Self { host_ledger, pool: Some(gpu::PinnedPool::new(cuda)?) }),
            _ => Ok(Self::accounting_only(host_ledger)),
        }
    }

    /// Starts copying `value`, of this many bytes, to the host. The caller may free it once the copy is dropped.
    pub fn copy_to_host(
        &self,
        value: Option<&Tensor>,
        bytes: u64,
    ) -> std::result::Result<(OffloadedTensor, PendingCopy), StepError> {
        let reserve = || self.host_ledger.reserve(Role::Activations, "inputs of blocks", bytes);
        if let (Some(pool), Some(value)) = (&self.pool, value) {
            return pool.copy_to_host(value, reserve);
        }
        Ok((
            OffloadedTensor::Resident { value: value.cloned(), _reservation: reserve()? },
            PendingCopy::default(),
        ))
    }

    /// Measures copies of this many bytes, reserved of the host's ledger and of `tensors`; `None` where nothing is
    /// copied.
    pub fn measure_copies(
        &self,
        tensors: &Ledger,
        bytes: u64,
    ) -> std::result::Result<Option<CopySpeed>, StepError> {
        if let Some(pool) = &self.pool {
            let _host = self.host_ledger.reserve(Role::Activations, "inputs of blocks", bytes)?;
            let _device = tensors.reserve(Role::Activations, "inputs of blocks", bytes)?;
            return Ok(Some(pool.measure_copies(bytes as usize)?));
        }
        Ok(None)
    }

    /// Starts copying back. The caller may read the result once the copy is dropped.
    pub fn copy_to_device(&self, offloaded: OffloadedTensor) -> Result<(Option<Tensor>, PendingCopy)> {
        match offloaded {
            OffloadedTensor::Resident { value, .. } => Ok((value, PendingCopy::default())),
            OffloadedTensor::Pinned(pinned) => pinned.copy_to_device(),
        }
    }
}

mod gpu {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::Instant;

    use candle_core::{CudaDevice, DType, Result, Shape, Tensor};

    use super::{CopySpeed, OffloadedTensor, PendingCopy, Reservation, StepError};
    use crate::kernels::cuda::copy_streams::{CopyStreams, PinnedBuffer, StreamEvent};
    use crate::kernels::cuda::uninit;
    use crate::memory::Oom;

    /// Pinned buffers, kept for reuse: pinning takes longer than copying.
    pub struct PinnedPool(Rc<PoolInner>);

    struct PoolInner {
        device: CudaDevice,
        copy_streams: CopyStreams,
        free: RefCell<Vec<(PinnedBuffer, Reservation)>>,
    }

    /// A copy that the compute stream does not wait for yet.
    pub struct InFlightCopy {
        pool: Rc<PoolInner>,
        event: StreamEvent,
        /// The buffer that the copy reads; free afterwards.
        source: Option<(PinnedBuffer, Reservation)>,
    }

    /// A tensor in a pinned buffer.
    pub struct PinnedTensor {
        pool: Rc<PoolInner>,
        buffer: Option<(PinnedBuffer, Reservation)>,
        dtype: DType,
        shape: Shape,
    }

    impl PinnedPool {
        pub fn new(device: &CudaDevice) -> Result<Self> {
            let (device, copy_streams) = (device.clone(), CopyStreams::new(device)?);
            Ok(Self(Rc::new(PoolInner { device, copy_streams, free: RefCell::default() })))
        }

        pub fn copy_to_host(
            &self,
            value: &Tensor,
            reserve: impl FnOnce() -> std::result::Result<Reservation, Oom>,
        ) -> std::result::Result<(OffloadedTensor, PendingCopy), StepError> {
            let bytes = value.elem_count() * value.dtype().size_in_bytes();
            let buffer = match self.0.take_free(bytes) {
                Some(buffer) => buffer,
                None => {
                    let reservation = reserve()?;
                    (PinnedBuffer::new(&self.0.device, DType::U8, bytes)?, reservation)
                }
            };
            let event = self.0.copy_streams.copy_to_host(value, &buffer.0, 0)?;
            let (dtype, shape) = (value.dtype(), value.shape().clone());
            let pinned = PinnedTensor { pool: self.0.clone(), buffer: Some(buffer), dtype, shape };
            Ok((OffloadedTensor::Pinned(pinned), PendingCopy::new(&self.0, event, None)))
        }

        /// One copy each way as a warm-up, then several, one after another, without compute beside them.
        pub fn measure_copies(&self, bytes: usize) -> Result<CopySpeed> {
            const COPIES: usize = 8;
            let PoolInner { device, copy_streams, .. } = &*self.0;
            let (host, tensor) =
                (PinnedBuffer::new(device, DType::U8, bytes)?, uninit(device, DType::U8, bytes)?);
            let compute = copy_streams.record_compute()?;
            let measure = |copy: &dyn Fn() -> Result<StreamEvent>| -> Result<f64> {
                copy()?;
                copy_streams.synchronize()?;
                let begun = Instant::now();
                (0..COPIES).try_for_each(|_| copy().map(drop))?;
                copy_streams.synchronize()?;
                Ok((COPIES * bytes) as f64 / begun.elapsed().as_secs_f64())
            };
            let to_host = measure(&|| copy_streams.copy_to_host(&tensor, &host, 0))?;
            let to_device = measure(&|| copy_streams.copy_to_device(&host, 0, &tensor, &compute))?;
            Ok(CopySpeed { to_host, to_device })
        }
    }

    impl PoolInner {
        /// Takes a free buffer of at least this many bytes. If there is none, drops a smaller one: a larger buffer
        /// replaces it.
        fn take_free(&self, bytes: usize) -> Option<(PinnedBuffer, Reservation)> {
            let mut free = self.free.borrow_mut();
            match free.iter().position(|(buffer, _)| buffer.bytes() >= bytes) {
                Some(fits) => Some(free.swap_remove(fits)),
                None => {
                    let small = free.pop();
                    if small.is_some() {
                        // A copy of an aborted step may still write to it. An error here surfaces later.
                        let _ = self.copy_streams.synchronize();
                    }
                    None
                }
            }
        }
    }

    impl PinnedTensor {
        pub fn copy_to_device(mut self) -> Result<(Option<Tensor>, PendingCopy)> {
            let pool = self.pool.clone();
            let value = uninit(&pool.device, self.dtype, self.shape.clone())?;
            let Some(buffer) = self.buffer.take() else { return Ok((None, PendingCopy::default())) };
            // The memory may have belonged to a tensor that queued kernels still read: the copy waits for them.
            let event = pool.copy_streams.copy_to_device(
                &buffer.0,
                0,
                &value,
                &pool.copy_streams.record_compute()?,
            )?;
            Ok((Some(value), PendingCopy::new(&pool, event, Some(buffer))))
        }
    }

    impl Drop for PinnedTensor {
        fn drop(&mut self) {
            self.pool.free.borrow_mut().extend(self.buffer.take());
        }
    }

    impl PendingCopy {
        fn new(
            pool: &Rc<PoolInner>,
            event: StreamEvent,
            source: Option<(PinnedBuffer, Reservation)>,
        ) -> Self {
            Self { _copy: Some(InFlightCopy { pool: pool.clone(), event, source }) }
        }
    }

    impl Drop for InFlightCopy {
        fn drop(&mut self) {
            // If the wait cannot be queued the device has failed, and the next launch reports it.
            let _ = self.pool.copy_streams.compute_wait(&self.event);
            self.pool.free.borrow_mut().extend(self.source.take());
        }
    }

    impl Drop for PoolInner {
        fn drop(&mut self) {
            let _ = self.copy_streams.synchronize();
        }
    }
}
