//! What makes the layers of a model smaller than its `[model]` says.

use std::collections::BTreeMap;

use super::{Job, Ranks, UnitCounts};

/// The ranks of factorized layers, and the channels and heads that pruning left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reductions {
    pub ranks: Ranks,
    pub kept: UnitCounts,
}

/// Layers are as `[model]` says.
pub static NO_REDUCTIONS: Reductions = Reductions { ranks: BTreeMap::new(), kept: BTreeMap::new() };

impl Reductions {
    pub fn of_job(job: &Job) -> Self {
        let kept = job.prune.as_ref().map(|prune| prune.kept.clone()).unwrap_or_default();
        Self { ranks: job.ranks(), kept }
    }
}
