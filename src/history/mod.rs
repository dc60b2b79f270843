//! Runs as their folders tell them: finished, running, killed, of this version or another.
//!
//! Takes folders and returns [`RunRecord`]s, the order of runs and what differs between them. Reads only: a run that is
//! being written may be read at any moment. Refuses folders that hold no run; skips lines that are no events, and says
//! which.

mod differences;
mod event_reader;
mod order;
pub mod run_history;
mod run_record;
mod thin;

pub use differences::{Difference, differences};
pub use event_reader::{EventReader, SkippedLines};
pub use order::{SortKey, sort};
pub use run_history::{MemoryMark, PlannedPeak, RunHistory};
pub use run_record::{HistoryError, RecordedState, RunRecord, find_runs};
pub use thin::{Curve, Point};
