//! Searches for better settings of a job: sweeps over values of its keys, and the learning-rate range test.
//!
//! Takes a job file, the keys to vary and the memory of the machine. Every trial is planned first; those that fit run
//! as `trainer fit` in child processes, side by side within memory and cores. The state of a sweep is a folder, from
//! which it continues after any death. The policies (values, halving, slots, the suggested rate) are pure functions.

mod child;
pub mod folder;
pub mod halving;
pub mod lr_range;
pub mod lr_test;
mod planning;
pub mod search_space;
pub mod slots;
pub mod sweep;

pub use child::ChildOptions;
pub use folder::{PlannedTrial, Sweep, TrialOutcome, TrialResult, TuneFolder};
pub use search_space::{Assignment, Parameter, SpaceError};
pub use slots::{Capacity, MemoryNeed};
pub use sweep::{SweepEnd, SweepEvent, SweepOptions, TrialState};
