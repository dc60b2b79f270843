//! How a job runs. The planner chooses an execution plan, the estimator predicts its memory, a run executes it and
//! shrinks it when memory is short, and events and checkpoints record it. It never decides which samples an update has.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::job::OptimizerKind;

/// How the samples of an update are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BatchSplit {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
}

/// How updates and evaluations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExecutionPlan {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
    /// Blocks whose activations are recomputed in the backward pass.
    pub recompute: usize,
    /// What waits in host memory; nothing on the CPU.
    // Checkpoints of earlier versions have neither this nor the optimizer; a resumed run takes both from its new plan.
    #[serde(default, deserialize_with = "offload_set")]
    #[schemars(with = "Vec<Offload>")]
    pub offload: &'static [Offload],
    /// The optimizer's kind, which says what state it keeps.
    #[serde(default)]
    pub optimizer: OptimizerKind,
    /// Samples of the evaluation in memory at once.
    pub eval_micro_batch: usize,
    /// Limit of the loader's buffers, in bytes. It follows from the host memory of each session, so no file keeps it.
    #[serde(skip)]
    pub prefetch: u64,
}

impl ExecutionPlan {
    pub fn split(&self) -> BatchSplit {
        BatchSplit { micro_batch: self.micro_batch, accumulation_steps: self.accumulation_steps }
    }

    pub fn with_split(self, BatchSplit { micro_batch, accumulation_steps }: BatchSplit) -> Self {
        Self { micro_batch, accumulation_steps, ..self }
    }

    pub fn offloads(&self, what: Offload) -> bool {
        self.offload.contains(&what)
    }

    /// What is offloaded, for people.
    pub fn offload_names(&self) -> String {
        let names: Vec<String> = self.offload.iter().map(ToString::to_string).collect();
        if names.is_empty() { "nothing".into() } else { names.join(" and ") }
    }

    /// Clamps every field so that the result needs no more memory than `limit`, whose offload and optimizer it takes.
    pub fn clamped_to(self, limit: Self) -> Self {
        let larger = self.micro_batch > limit.micro_batch;
        Self {
            micro_batch: self.micro_batch.min(limit.micro_batch),
            accumulation_steps: if larger { limit.accumulation_steps } else { self.accumulation_steps },
            recompute: self.recompute.max(limit.recompute),
            eval_micro_batch: self.eval_micro_batch.min(limit.eval_micro_batch),
            prefetch: self.prefetch.min(limit.prefetch),
            ..limit
        }
    }
}

/// What can wait in host memory while the device works on something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    OptimizerState,
    /// The inputs of blocks that run forward again.
    Activations,
}

/// The combinations of what may be offloaded.
pub const OFFLOAD_SETS: [&[Offload]; 4] = [
    &[],
    &[Offload::OptimizerState],
    &[Offload::Activations],
    &[Offload::OptimizerState, Offload::Activations],
];

fn offload_set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<&'static [Offload], D::Error> {
    let read = Vec::<Offload>::deserialize(deserializer)?;
    Ok(OFFLOAD_SETS.into_iter().find(|set| read.iter().all(|what| set.contains(what))).unwrap_or_default())
}

impl std::fmt::Display for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Offload::OptimizerState => "optimizer state",
            Offload::Activations => "activations",
        })
    }
}
