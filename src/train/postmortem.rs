//! `oom.json`: the post-mortem of a run that ran out of memory for good.

use serde::Serialize;

use super::Failure;
use super::run::error_chain;
use super::run_dir::{self, RunDir};
use super::setup::Setup;
use crate::base::Phase;
use crate::memory::Oom;
use crate::memory::ledger::Holder;
use crate::planner::{ExecutionPlan, ladder};

/// A failed reservation, and what was tried next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OomAttempt {
    /// Updates applied before it.
    pub step: u64,
    pub phase: Phase,
    pub requester: String,
    /// Bytes requested, and bytes available.
    pub bytes: u64,
    pub left: u64,
    /// The smaller plan tried next; absent if none was left or allowed.
    pub next_plan: Option<String>,
}

impl OomAttempt {
    pub fn new(step: u64, oom: &Oom, next_plan: Option<String>) -> Self {
        let Oom { phase, bytes, available: left, .. } = *oom;
        Self { step, phase, requester: oom.requester.clone(), bytes, left, next_plan }
    }
}

/// The plan with the lowest peak that the job allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeanestPlan {
    pub change: String,
    /// Its peak in bytes.
    pub ram_bytes: u64,
}

/// Contents of `oom.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PostMortem {
    /// The error message the run ended with.
    pub error: String,
    /// Budget of the run, in bytes.
    pub budget_bytes: u64,
    /// The first failed reservation; absent if the process was killed.
    pub first: Option<OomAttempt>,
    /// Reservations live at that moment, by role and layer, largest first; for a killed process, those its plan has
    /// live at the peak.
    pub live: Vec<Holder>,
    pub tried: Vec<OomAttempt>,
    /// How each worker process died.
    pub deaths: Vec<String>,
    /// A plan that fits, given enough memory.
    pub would_fit: Option<LeanestPlan>,
}

impl PostMortem {
    /// Of a run under `plan` that ran out of memory for good; `None` for another failure.
    pub fn new(setup: &Setup, plan: ExecutionPlan, failure: &Failure, budget_bytes: u64) -> Option<Self> {
        let Failure::OutOfMemory { first, tried } = failure else { return None };
        let (leanest, ram_bytes) = setup.leanest_plan(plan);
        let step = tried.first().map_or(0, |attempt| attempt.step);
        let next_plan = tried.first().and_then(|attempt| attempt.next_plan.clone());
        Some(Self {
            error: error_chain(failure),
            budget_bytes,
            first: Some(OomAttempt::new(step, first, next_plan)),
            live: first.live.clone(),
            tried: tried.clone(),
            deaths: Vec::new(),
            would_fit: Some(LeanestPlan { change: ladder::describe_split(leanest), ram_bytes }),
        })
    }

    pub fn write(&self, folder: &RunDir) -> Result<(), Failure> {
        let text = serde_json::to_vec_pretty(self).map_err(std::io::Error::from);
        run_dir::write_atomic(&folder.oom(), &text.map_err(Failure::io("write", folder.oom()))?)
    }
}
