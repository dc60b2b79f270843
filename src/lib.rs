//! `trainer` trains a declared model within a memory budget.
//!
//! The flow, top to bottom; a module depends only on those above it:
//!
//! ```text
//! job.toml -> job -> models -> memory -> data -> train -> report
//!             typed   network   plan      stream  steps    user-facing output
//! ```

pub mod cli;
pub mod data;
pub mod features;
pub mod job;
pub mod kernels;
pub mod layers;
pub mod memory;
pub mod models;
pub mod optim;
pub mod panics;
pub mod params;
pub mod random;
pub mod regular_file;
pub mod report;
pub mod train;
pub mod units;
