//! A card under a budget: the driver's own memory pool with a limit, which it enforces and measures.
//!
//! All tensors of the device come from the pool, because it is made the device's current one before the first of
//! them. What the context itself takes is outside of it, and measured here. Where the budget has room for it, what the
//! passes of micro-batches take is a pool of its own within the same limit: nothing else moves what is there, so that
//! launches can be recorded with their addresses.

use candle_core::Device;

use crate::units::Bytes;

/// Bytes of a pool beside those of its `tensors`, at most: the driver adds to it in pieces of 32 MiB and cannot fill them
/// all, and a large tensor may find no room in one piece. With CUDA 13.0 on an H200, 96 MiB were enough for jobs of 34 MiB to
/// 8 GiB; one of 24 GiB needed more than 305 MiB and no more than 561, where this gives 614.
#[cfg(feature = "cuda")]
fn pieces(tensors: u64) -> u64 {
    (tensors / 40).max(96 << 20)
}

/// What may go wrong before there is a card to compute on.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error("this build has no CUDA")]
    NoCuda,
    #[error("there is no card {ordinal}: {why}")]
    NoCard { ordinal: usize, why: String },
    #[error("the card {ordinal} has {} free, and {} were asked for", Bytes(*.free), Bytes(*.asked))]
    TooSmall { ordinal: usize, free: u64, asked: u64 },
    #[error("the driver refused {what}: {why}")]
    Driver { what: &'static str, why: String },
}

/// A card as the driver describes it, and its memory now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub ordinal: usize,
    pub model: String,
    pub total: u64,
    pub free: u64,
    pub capability: (u32, u32),
    /// Bytes that a context takes of it, where there was none before and that could be measured.
    pub context: u64,
}

#[cfg(feature = "cuda")]
pub use with_cuda::{Card, PassMemory, all};
#[cfg(not(feature = "cuda"))]
pub use without_cuda::{Card, all};

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::ffi::c_void;
    use std::ops::Range;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};

    use super::super::nvml;
    use super::super::plan::Apart;
    use super::*;
    use crate::kernels::cuda::{self, recording};

    /// A card that is computed on.
    pub struct Card {
        pub ordinal: usize,
        pub device: Device,
        /// Bytes tensors may take.
        pub limit: u64,
        /// Bytes that the context took before the first tensor, beside the limit; 0 where that is not known.
        pub context: u64,
        /// Whether the driver enforces the limit; else the ledger alone does.
        pub enforced: bool,
        pools: Mutex<Pools>,
    }

    struct Pools {
        main: sys::CUmemoryPool,
        passes: Option<sys::CUmemoryPool>,
        /// Where the memory of passes lies, as long as none of it was moved.
        piece: Option<Range<u64>>,
        /// The most bytes tensors had at once, up to the last change between the two.
        peak: u64,
    }

    // SAFETY: a pool is the driver's, which may be asked about it from any thread.
    unsafe impl Send for Pools {}

    /// As long as this is there, tensors come from the pool of passes.
    pub struct PassMemory<'a>(&'a Card);

    impl Drop for PassMemory<'_> {
        fn drop(&mut self) {
            self.0.serve(|pools| Some(pools.main));
            if !recording::stayed() {
                self.0.pools().piece = None;
            }
        }
    }

    /// Every card that the driver shows; none where there is no driver.
    pub fn all() -> Vec<Seen> {
        let count = result::init().and_then(|()| result::device::get_count()).unwrap_or(0);
        (0..count as usize).filter_map(|ordinal| see(ordinal).ok()).collect()
    }

    fn see(ordinal: usize) -> Result<Seen, CardError> {
        result::init().map_err(|e| no_card(ordinal, &e))?;
        let address = nvml::address(ordinal);
        let used = || nvml::used(address.as_deref()?);
        let before = used();
        let context = CudaContext::new(ordinal).map_err(|e| no_card(ordinal, &e))?;
        let (free, total) = context.mem_get_info().map_err(refused("to say what is free"))?;
        let (major, minor) = context.compute_capability().map_err(refused("to say its capability"))?;
        let model = context.name().map_err(refused("to say its name"))?;
        let capability = (major as u32, minor as u32);
        let own = before.zip(used()).map_or(0, |(before, after)| after.saturating_sub(before));
        Ok(Seen { ordinal, model, total: total as u64, free: free as u64, capability, context: own })
    }

    fn no_card(ordinal: usize, error: &dyn std::fmt::Display) -> CardError {
        CardError::NoCard { ordinal, why: error.to_string() }
    }

    fn refused<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> CardError {
        move |error| CardError::Driver { what, why: error.to_string() }
    }

    impl Card {
        /// Opens a card whose tensors may take `limit(free)` bytes of what is free.
        pub fn open(ordinal: usize, limit: impl FnOnce(&Seen) -> u64) -> Result<Self, CardError> {
            let context = see(ordinal)?.context;
            let device = Device::new_cuda_with_stream(ordinal).map_err(|e| no_card(ordinal, &e))?;
            let seen = see(ordinal)?;
            if let Device::Cuda(device) = &device {
                // SAFETY: everything runs on the device's one stream but the copies of a carrier, which has events of
                // its own, so that no use of a tensor needs another to be ordered.
                unsafe { device.disable_event_tracking() };
            }
            let limit = limit(&seen);
            if limit > seen.free {
                return Err(CardError::TooSmall { ordinal, free: seen.free, asked: limit });
            }
            let (main, enforced) = pool(ordinal, limit)?;
            let pools = Mutex::new(Pools { main, passes: None, piece: None, peak: 0 });
            Ok(Self { ordinal, device, limit, context, enforced, pools })
        }

        fn pools(&self) -> MutexGuard<'_, Pools> {
            self.pools.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// The most bytes that tensors had at once since this was last asked.
        pub fn take_recent_peak(&self) -> u64 {
            let mut pools = self.pools();
            pools.look();
            std::mem::take(&mut pools.peak)
        }

        /// Takes the card's memory for so many bytes of tensors, so that nobody else can; it stays the pool's. Where
        /// others have it already, what is left comes when it is asked for, as without. With `passes`, micro-batches have
        /// so many bytes beside those for themselves, within the same limit. To be called before the first tensor.
        pub fn claim(&self, bytes: u64, passes: Option<u64>) -> candle_core::Result<()> {
            let passes = passes.filter(|_| self.enforced);
            self.set_apart(passes).map_err(candle_core::Error::wrap)?;
            if let (Some(passes), Some(_there)) = (passes, self.passes()) {
                let piece = self.fill(Apart::most(passes))?;
                self.pools().piece = piece;
            }
            self.fill(bytes.min(self.limit))?;
            // The peak is of tensors.
            self.take_recent_peak();
            Ok(())
        }

        /// A pool for the passes of micro-batches, where they are to have one, and one for what the limit leaves beside it,
        /// in the place of those there were.
        fn set_apart(&self, passes: Option<u64>) -> Result<(), CardError> {
            let mut pools = self.pools();
            if passes.is_none() && pools.passes.is_none() {
                return Ok(());
            }
            let most = passes.map_or(0, Apart::most);
            let apart = passes.map(|_| pool(self.ordinal, most)).transpose()?;
            let main = pool(self.ordinal, self.limit.saturating_sub(most))?.0;
            let before = [Some(std::mem::replace(&mut pools.main, main)), pools.passes.take()];
            pools.passes = apart.map(|(apart, _)| apart);
            before.into_iter().flatten().try_for_each(|pool| {
                // SAFETY: no tensor is asked of it any more; what there is of it stays until it is freed.
                told("to give back a memory pool", unsafe { sys::cuMemPoolDestroy(pool) })
            })
        }

        /// Makes the pool that serves large enough for so many bytes of tensors, and says where they will be; none where
        /// others have the memory.
        fn fill(&self, tensors: u64) -> candle_core::Result<Option<Range<u64>>> {
            let Device::Cuda(device) = &self.device else { return Ok(None) };
            let bytes = (tensors + pieces(tensors)) as usize;
            let piece = match cuda::scratch(device, bytes) {
                Err(error) if cuda::is_out_of_memory(&error) => None,
                claimed => {
                    let at = cuda::pointer(&claimed?)? as u64;
                    Some(at..at + bytes as u64)
                }
            };
            self.device.synchronize()?;
            Ok(piece)
        }

        /// Tensors come from the pool of passes until this is dropped; none where they have no pool of their own.
        pub fn passes(&self) -> Option<PassMemory<'_>> {
            self.serve(|pools| pools.passes).then(|| {
                self.pools().piece.clone().into_iter().for_each(recording::watch);
                PassMemory(self)
            })
        }

        /// Whether what passes have is where it was from the start on.
        pub fn passes_stay(&self) -> bool {
            self.pools().piece.is_some()
        }

        /// Whether there are two pools, the one of which serves from now on.
        fn serve(&self, which: impl Fn(&Pools) -> Option<sys::CUmemoryPool>) -> bool {
            let mut pools = self.pools();
            let (Some(_), Some(pool)) = (pools.passes, which(&pools)) else { return false };
            let Ok(device) = result::device::get(self.ordinal as i32) else { return false };
            pools.look();
            // SAFETY: both are pools of this card. It fails with the context alone.
            unsafe { sys::cuDeviceSetMemPool(device, pool) };
            true
        }
    }

    impl Pools {
        /// Takes note of the most bytes since this was last done.
        fn look(&mut self) {
            let high = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
            let of = |pool: sys::CUmemoryPool| {
                let (mut bytes, mut zero) = (0u64, 0u64);
                // SAFETY: pools live as long as the card, and both values as long as the calls.
                unsafe {
                    sys::cuMemPoolGetAttribute(pool, high, (&raw mut bytes).cast::<c_void>());
                    sys::cuMemPoolSetAttribute(pool, high, (&raw mut zero).cast::<c_void>());
                }
                bytes
            };
            self.peak = self.peak.max(of(self.main) + self.passes.map_or(0, of));
        }
    }

    fn told(what: &'static str, code: sys::CUresult) -> Result<(), CardError> {
        code.result().map_err(refused(what))
    }

    /// A pool for `limit` bytes of tensors, made the device's current one. A driver before CUDA 12.2 knows no limit: the
    /// device's own pool serves there.
    fn pool(ordinal: usize, limit: u64) -> Result<(sys::CUmemoryPool, bool), CardError> {
        let device = result::device::get(ordinal as i32).map_err(refused("to name the card"))?;
        // SAFETY: plain structures and pointers to locals, as the driver's interface asks for.
        unsafe {
            let mut version = 0;
            told("to say its version", sys::cuDriverGetVersion(&mut version))?;
            let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
            let enforced = version >= 12020;
            if enforced {
                let mut props: sys::CUmemPoolProps = std::mem::zeroed();
                props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
                props.location.id = ordinal as i32;
                props.maxSize = (limit + pieces(limit)) as usize;
                told("a memory pool", sys::cuMemPoolCreate(&mut pool, &props))?;
                told("the memory pool", sys::cuDeviceSetMemPool(device, pool))?;
            } else {
                told("its memory pool", sys::cuDeviceGetMemPool(&mut pool, device))?;
            }
            // What was claimed is kept: giving it back to the system would let others have it.
            let mut keep = u64::MAX;
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let set = sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast::<c_void>());
            told("to keep its memory", set)?;
            Ok((pool, enforced))
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod without_cuda {
    use super::*;

    /// There is none in this build.
    pub struct Card {
        pub ordinal: usize,
        pub device: Device,
        pub limit: u64,
        pub context: u64,
        pub enforced: bool,
        never: std::convert::Infallible,
    }

    pub fn all() -> Vec<Seen> {
        Vec::new()
    }

    impl Card {
        pub fn open(_: usize, _: impl FnOnce(&Seen) -> u64) -> Result<Self, CardError> {
            Err(CardError::NoCuda)
        }

        pub fn take_recent_peak(&self) -> u64 {
            match self.never {}
        }

        pub fn claim(&self, _: u64, _: Option<u64>) -> candle_core::Result<()> {
            match self.never {}
        }
    }
}
