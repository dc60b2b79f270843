//! Training: the loop, its updates, evaluation, checkpoints, recovery, and the events it emits.

pub mod autotune;
pub mod checkpoint;
pub mod data_wait;
pub mod datasets;
pub mod described_job;
pub mod early_stop;
pub mod engine;
pub mod evaluation_file;
mod failure;
pub mod fault_injection;
#[cfg(feature = "cuda")]
mod graph_cache;
pub mod initial_weights;
pub mod low_rank;
pub mod memory_snapshot;
pub mod no_graph;
pub mod parent_death;
mod pass_key;
mod planning;
pub mod postmortem;
pub mod profile;
pub mod retry;
pub mod run;
pub mod run_dir;
pub mod run_lock;
pub mod setup;
pub mod signals;
pub mod staging;
pub mod supervisor;
pub mod teacher;
pub mod tensor_files;
pub mod tensor_reader;
mod trial_updates;
pub mod validation_metrics;
pub mod verify;

pub use failure::Failure;
