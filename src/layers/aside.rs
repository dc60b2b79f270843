//! Inputs of blocks that run forward again, waiting in host memory instead of where the network computes.
//!
//! One leaves while its block computes and comes back while the block after it does; what it takes on the host is
//! asked of the host's ledger. Where the CPU computes, or nothing but the plan is made, nothing moves and only the
//! ledger is asked.

use candle_core::{Result, Tensor};

use super::network::StepError;
use crate::memory::{Ledger, Reservation, Role};

/// The host's side.
pub struct Aside {
    host: Ledger,
    #[cfg(feature = "cuda")]
    card: Option<card::Buffers>,
}

/// What waits.
pub enum Gone {
    /// Where it was: nothing moved.
    Here { value: Option<Tensor>, _hold: Reservation },
    #[cfg(feature = "cuda")]
    There(card::There),
}

/// A copy under way: dropped, what is computed from then on comes after it. It is dropped before the memory that is
/// read or written.
#[derive(Default)]
pub struct Moving {
    #[cfg(feature = "cuda")]
    _copy: Option<card::Copy>,
}

impl Moving {
    /// What is computed from here on comes after the copy.
    pub fn end(self) {}
}

impl Aside {
    /// Where nothing moves; `host` is asked all the same.
    pub fn planned(host: Ledger) -> Self {
        Self {
            host,
            #[cfg(feature = "cuda")]
            card: None,
        }
    }

    /// For a device, which may be the host itself.
    pub fn new(host: Ledger, device: &candle_core::Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let candle_core::Device::Cuda(cuda) = device {
            return Ok(Self { host, card: Some(card::Buffers::new(cuda)?) });
        }
        let _ = device;
        Ok(Self::planned(host))
    }

    /// Begins to move `value`, of so many bytes. It may be let go of when the copy is dropped.
    pub fn send(&self, value: Option<&Tensor>, bytes: u64) -> std::result::Result<(Gone, Moving), StepError> {
        let ask = || self.host.reserve(Role::Activations, "inputs of blocks", bytes);
        #[cfg(feature = "cuda")]
        if let (Some(card), Some(value)) = (&self.card, value) {
            return card.send(value, ask);
        }
        Ok((Gone::Here { value: value.cloned(), _hold: ask()? }, Moving::default()))
    }

    /// Begins to move it back. What comes may be read when the copy is dropped.
    pub fn fetch(&self, gone: Gone) -> Result<(Option<Tensor>, Moving)> {
        match gone {
            Gone::Here { value, .. } => Ok((value, Moving::default())),
            #[cfg(feature = "cuda")]
            Gone::There(there) => there.fetch(),
        }
    }
}

#[cfg(feature = "cuda")]
mod card {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Shape, Tensor};

    use super::{Gone, Moving, Reservation, StepError};
    use crate::kernels::cuda::fresh;
    use crate::kernels::cuda::link::{Link, Mark, Pinned};
    use crate::memory::Oom;

    /// Page-locked buffers, which are kept and used again: locking takes longer than copying.
    pub struct Buffers(Rc<Shared>);

    struct Shared {
        device: CudaDevice,
        link: Link,
        free: RefCell<Vec<(Pinned, Reservation)>>,
    }

    /// A copy that computing has not waited for yet.
    pub struct Copy {
        buffers: Rc<Shared>,
        mark: Mark,
        /// A buffer that is read, and free after that.
        emptied: Option<(Pinned, Reservation)>,
    }

    /// A tensor in a buffer.
    pub struct There {
        buffers: Rc<Shared>,
        buffer: Option<(Pinned, Reservation)>,
        dtype: DType,
        shape: Shape,
    }

    impl Buffers {
        pub fn new(device: &CudaDevice) -> Result<Self> {
            let (device, link) = (device.clone(), Link::new(device)?);
            Ok(Self(Rc::new(Shared { device, link, free: RefCell::default() })))
        }

        pub fn send(
            &self,
            value: &Tensor,
            ask: impl FnOnce() -> std::result::Result<Reservation, Oom>,
        ) -> std::result::Result<(Gone, Moving), StepError> {
            let bytes = value.elem_count() * value.dtype().size_in_bytes();
            let buffer = match self.0.take(bytes) {
                Some(buffer) => buffer,
                None => {
                    let hold = ask()?;
                    (Pinned::new(&self.0.device, DType::U8, bytes)?, hold)
                }
            };
            let mark = self.0.link.send(value, &buffer.0, 0)?;
            let (dtype, shape) = (value.dtype(), value.shape().clone());
            let there = There { buffers: self.0.clone(), buffer: Some(buffer), dtype, shape };
            Ok((Gone::There(there), Moving::new(&self.0, mark, None)))
        }
    }

    impl Shared {
        /// A free buffer with room for so many bytes. One that is too small goes: a larger one takes its place.
        fn take(&self, bytes: usize) -> Option<(Pinned, Reservation)> {
            let mut free = self.free.borrow_mut();
            match free.iter().position(|(buffer, _)| buffer.bytes() >= bytes) {
                Some(fits) => Some(free.swap_remove(fits)),
                None => {
                    let small = free.pop();
                    if small.is_some() {
                        // What was copied to it may be under way, for a step that was given up. An error shows later.
                        let _ = self.link.settle();
                    }
                    None
                }
            }
        }
    }

    impl There {
        pub fn fetch(mut self) -> Result<(Option<Tensor>, Moving)> {
            let shared = self.buffers.clone();
            let value = fresh(&shared.device, self.dtype, self.shape.clone())?;
            let Some(buffer) = self.buffer.take() else { return Ok((None, Moving::default())) };
            // The memory may have been another's, which is computed with until now.
            let mark = shared.link.fetch(&buffer.0, 0, &value, &shared.link.now()?)?;
            Ok((Some(value), Moving::new(&shared, mark, Some(buffer))))
        }
    }

    impl Drop for There {
        fn drop(&mut self) {
            self.buffers.free.borrow_mut().extend(self.buffer.take());
        }
    }

    impl Moving {
        fn new(buffers: &Rc<Shared>, mark: Mark, emptied: Option<(Pinned, Reservation)>) -> Self {
            Self { _copy: Some(Copy { buffers: buffers.clone(), mark, emptied }) }
        }
    }

    impl Drop for Copy {
        fn drop(&mut self) {
            // A card that cannot be told to wait has failed, and says so at the next launch.
            let _ = self.buffers.link.computes_after(&self.mark);
            self.buffers.free.borrow_mut().extend(self.emptied.take());
        }
    }

    impl Drop for Shared {
        fn drop(&mut self) {
            let _ = self.link.settle();
        }
    }
}
