//! Inputs of blocks that run forward again, waiting in host memory instead of where the network computes.
//!
//! One leaves while its block computes and comes back while the block after it does; what it takes on the host is
//! asked of the host's ledger. Where the CPU computes, or nothing but the plan is made, nothing moves and only the
//! ledger is asked.

use candle_core::{Result, Tensor};

use super::network::StepError;
use crate::memory::{Ledger, Reservation, Role};

/// The host's side.
pub struct ActivationOffload {
    host_ledger: Ledger,
    #[cfg(feature = "cuda")]
    pool: Option<gpu::PinnedPool>,
}

/// What waits.
pub enum OffloadedTensor {
    /// Where it was: nothing moved.
    Resident { value: Option<Tensor>, _reservation: Reservation },
    #[cfg(feature = "cuda")]
    Pinned(gpu::PinnedTensor),
}

/// A copy under way: dropped, what is computed from then on comes after it. It is dropped before the memory that is
/// read or written.
#[derive(Default)]
pub struct PendingCopy {
    #[cfg(feature = "cuda")]
    _copy: Option<gpu::InFlightCopy>,
}

impl PendingCopy {
    /// What is computed from here on comes after the copy.
    pub fn wait(self) {}
}

impl ActivationOffload {
    /// Where nothing moves; `host_ledger` is asked all the same.
    pub fn accounting_only(host_ledger: Ledger) -> Self {
        Self {
            host_ledger,
            #[cfg(feature = "cuda")]
            pool: None,
        }
    }

    /// For a device, which may be the host itself.
    pub fn new(host_ledger: Ledger, device: &candle_core::Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let candle_core::Device::Cuda(cuda) = device {
            return Ok(Self { host_ledger, pool: Some(gpu::PinnedPool::new(cuda)?) });
        }
        let _ = device;
        Ok(Self::accounting_only(host_ledger))
    }

    /// Begins to move `value`, of so many bytes. It may be let go of when the copy is dropped.
    pub fn copy_to_host(
        &self,
        value: Option<&Tensor>,
        bytes: u64,
    ) -> std::result::Result<(OffloadedTensor, PendingCopy), StepError> {
        let reserve = || self.host_ledger.reserve(Role::Activations, "inputs of blocks", bytes);
        #[cfg(feature = "cuda")]
        if let (Some(pool), Some(value)) = (&self.pool, value) {
            return pool.copy_to_host(value, reserve);
        }
        Ok((
            OffloadedTensor::Resident { value: value.cloned(), _reservation: reserve()? },
            PendingCopy::default(),
        ))
    }

    /// Begins to move it back. What comes may be read when the copy is dropped.
    pub fn copy_to_device(&self, offloaded: OffloadedTensor) -> Result<(Option<Tensor>, PendingCopy)> {
        match offloaded {
            OffloadedTensor::Resident { value, .. } => Ok((value, PendingCopy::default())),
            #[cfg(feature = "cuda")]
            OffloadedTensor::Pinned(pinned) => pinned.copy_to_device(),
        }
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Shape, Tensor};

    use super::{OffloadedTensor, PendingCopy, Reservation, StepError};
    use crate::kernels::cuda::copy_streams::{CopyStreams, PinnedBuffer, StreamEvent};
    use crate::kernels::cuda::uninit;
    use crate::memory::Oom;

    /// Page-locked buffers, which are kept and used again: locking takes longer than copying.
    pub struct PinnedPool(Rc<PoolInner>);

    struct PoolInner {
        device: CudaDevice,
        copy_streams: CopyStreams,
        free: RefCell<Vec<(PinnedBuffer, Reservation)>>,
    }

    /// A copy that computing has not waited for yet.
    pub struct InFlightCopy {
        pool: Rc<PoolInner>,
        event: StreamEvent,
        /// A buffer that is read, and free after that.
        source: Option<(PinnedBuffer, Reservation)>,
    }

    /// A tensor in a buffer.
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
    }

    impl PoolInner {
        /// A free buffer with room for so many bytes. One that is too small goes: a larger one takes its place.
        fn take_free(&self, bytes: usize) -> Option<(PinnedBuffer, Reservation)> {
            let mut free = self.free.borrow_mut();
            match free.iter().position(|(buffer, _)| buffer.bytes() >= bytes) {
                Some(fits) => Some(free.swap_remove(fits)),
                None => {
                    let small = free.pop();
                    if small.is_some() {
                        // What was copied to it may be under way, for a step that was given up. An error shows later.
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
            // The memory may have been another's, which is computed with until now.
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
            // A card that cannot be told to wait has failed, and says so at the next launch.
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
