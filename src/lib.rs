//! `trainer` trains a declared model within a memory budget.
//!
//! The flow, top to bottom; a module depends only on those above it:
//!
//! ```text
//! job.toml -> job -> models -> memory -> data -> train -> report
//!             typed   network   plan      stream  steps    user-facing output
//! ```

pub use trainer_config::{base, job};
pub use trainer_data as data;
pub use trainer_engine::{
    graph, kernels, layers, memory, metrics, models, optim, param_store, params, quantization,
};

pub mod cli;
pub mod events;
pub mod history;
pub mod inference;
pub mod planner;
pub mod report;
pub mod train;
pub mod tune;

/// For the tests that measure memory.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: memory::measure::CountingAllocator = memory::measure::CountingAllocator;
