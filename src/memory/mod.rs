//! Memory, before and during: what is there, what a step needs, what is chosen, what is held.

pub mod advice;
pub mod budget;
pub mod card;
pub mod correction;
pub mod device;
pub mod estimate;
pub mod heap;
pub mod ladder;
pub mod ledger;
pub mod lock;
pub mod measure;
#[cfg(feature = "cuda")]
mod nvml;
#[cfg(target_os = "linux")]
pub mod pages;
pub mod placement;
pub mod plan;
pub mod pressure;
pub mod probe;
pub mod process;
pub mod refusal;
pub mod search;
pub mod time;
pub mod trail;

pub use ledger::{Fault, Ledger, Oom, Reservation};
pub use plan::{Plan, Role};
