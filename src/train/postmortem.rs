//! `oom.json`: what a run leaves behind that ran out of memory for good.

use serde::Serialize;

use super::Failure;
use super::run_dir::{self, RunDir};
use crate::memory::Oom;
use crate::memory::ledger::Holder;

/// An ask that failed, and what was tried then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OomAttempt {
    /// Updates made before it.
    pub step: u64,
    pub phase: &'static str,
    pub asker: String,
    /// Bytes asked for, and those that were left.
    pub bytes: u64,
    pub left: u64,
    /// The smaller plan that was taken; none was left, or allowed, where it is absent.
    pub then: Option<String>,
}

impl OomAttempt {
    pub fn new(step: u64, oom: &Oom, then: Option<String>) -> Self {
        let Oom { phase, bytes, available: left, .. } = *oom;
        Self { step, phase, asker: oom.requester.clone(), bytes, left, then }
    }
}

/// The leanest way to run the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeanestPlan {
    pub change: String,
    /// Bytes its plan needs.
    pub ram_bytes: u64,
}

/// The whole of `oom.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PostMortem {
    /// The message the run ended with.
    pub error: String,
    /// Bytes the run was allowed.
    pub budget_bytes: u64,
    /// The first ask that failed; absent where the process was killed.
    pub first: Option<OomAttempt>,
    /// What was live then, by role and layer, the largest first; of a killed process, what its plan says is
    /// live at the peak.
    pub live: Vec<Holder>,
    pub tried: Vec<OomAttempt>,
    /// What ended the processes that worked on the run.
    pub deaths: Vec<String>,
    /// What would have fitted, with enough memory.
    pub would_fit: Option<LeanestPlan>,
}

impl PostMortem {
    pub fn write(&self, folder: &RunDir) -> Result<(), Failure> {
        let text = serde_json::to_vec_pretty(self).map_err(std::io::Error::from);
        run_dir::write_atomic(&folder.oom(), &text.map_err(Failure::io("write", folder.oom()))?)
    }
}
