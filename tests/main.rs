//! The tests of behaviour, one module per subject: `cargo test --test integration bounds::` runs those of a module.
//!
//! They run at the same time in one process. None changes its directory or environment, and one that measures the
//! memory of its own process runs in a child (`harness::ran_in_own_process`).

mod bounds;
mod compress;
mod cuda_signatures;
mod decoding;
mod dispatch;
mod distill;
mod docs;
mod durable;
mod evaluations;
mod export;
mod exported;
mod faults;
#[allow(dead_code)]
#[path = "../src/data/images/fixtures.rs"]
mod fixtures;
mod freeze;
mod generate;
mod harness;
mod history;
mod hostile_files;
mod images;
mod imports;
mod inference;
mod interop;
mod jobs;
mod language;
mod lowrank;
mod memory_invariance;
mod memory_retry;
mod memory_snapshots;
mod mlflow;
mod oracles;
mod plans;
mod profile;
mod prune;
mod prune_units;
mod quantize;
mod random;
mod reference;
mod runs;
mod splits;
mod streams;
mod supervisor;
mod tables;
mod targets;
mod terminal;
mod tune;
mod type_names;
mod verify;

use trainer::memory::measure::CountingAllocator;

/// For the tests that measure the memory of their own process.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
