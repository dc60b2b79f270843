//! Memory as it is: what the machine has, what is reserved and held, what the allocator, the kernel and the driver
//! count.

pub mod alloc_failure;
pub mod code_pages;
pub mod device;
pub mod device_heap;
pub mod gpu;
pub mod ledger;
pub mod measure;
#[cfg(feature = "cuda")]
mod nvml;
#[cfg(target_os = "linux")]
pub mod page_pool;
pub mod placement;
pub mod pressure;
pub mod probe;
pub mod process;
pub mod recorder;
pub mod resident_limit;

pub use ledger::{InjectedOom, Ledger, Oom, RefusedBy, Reservation};
