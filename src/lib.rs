//! `trainer` trains a declared model within a memory budget.
//!
//! The flow, top to bottom; a module depends only on those above it:
//!
//! ```text
//! job.toml -> job -> models -> memory -> data -> train -> report
//!             typed   network   plan      stream  steps    user-facing output
//! ```

pub mod base;
pub mod cli;
pub mod data;
pub mod events;
pub mod graph;
pub mod history;
pub mod inference;
pub mod job;
pub mod kernels;
pub mod layers;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod optim;
pub mod param_store;
pub mod params;
pub mod planner;
pub mod report;
pub mod train;
pub mod tune;

/// For the tests that measure memory.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: memory::measure::CountingAllocator = memory::measure::CountingAllocator;
