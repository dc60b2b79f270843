//! Memory before and during a run: what the machine has, what a step needs, which plan is chosen, what is held.

pub mod advice;
pub mod alloc_failure;
pub mod budget;
pub mod correction;
pub mod cost_model;
pub mod device;
pub mod device_heap;
pub mod estimate;
pub mod gpu;
pub mod ledger;
pub mod ledger_trace;
pub mod measure;
#[cfg(feature = "cuda")]
mod nvml;
#[cfg(target_os = "linux")]
pub mod page_pool;
pub mod placement;
pub mod plan;
pub mod plan_lock;
pub mod planner;
pub mod pressure;
pub mod probe;
pub mod process;
pub mod search;

pub use ledger::{InjectedOom, Ledger, Oom, Reservation};
pub use plan::{MemoryPlan, Role};
