//! The floor: types and functions that every module may use and that use none of them.

pub mod backend;
pub mod byte_count;
pub mod features;
pub mod file_format;
pub mod memory_space;
pub mod panics;
pub mod phase;
pub mod proc_status;
pub mod random;
pub mod regular_file;
pub mod role;
pub mod units;
pub mod words;

pub use backend::{Backend, ComputeCapability, HOPPER, MicroBatchSpec};
pub use memory_space::MemorySpace;
pub use phase::Phase;
pub use role::Role;
