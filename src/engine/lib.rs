//! What computes: memory, kernels, layers, models and optimizers.
//!
//! A module depends only on those above it:
//!
//! ```text
//! metrics, params -> memory -> kernels -> param_store -> layers -> graph -> optim -> models -> quantization
//! ```

pub use trainer_config::{base, job};

pub mod graph;
pub mod kernels;
pub mod layers;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod optim;
pub mod param_store;
pub mod params;
pub mod quantization;

/// For the tests that measure memory.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: memory::measure::CountingAllocator = memory::measure::CountingAllocator;
