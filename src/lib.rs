//! `trainer` trains a declared model within a memory budget.
//!
//! The flow, top to bottom; a module uses only what stands above it:
//!
//! ```text
//! job.toml -> job -> models -> memory -> data -> train -> report
//!             typed   network   plan      stream  steps    what people see
//! ```

pub mod cli;
pub mod job;
pub mod memory;
pub mod train;
pub mod units;
