//! The verdict: whether a job fits, and the way it will be run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A memory plan as `trainer plan --json` prints it and `plan.json` keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    pub verdict: Verdict,
    /// `cpu`, `cuda:0`, ... On the CPU, tensors count as host memory.
    pub device: String,
    pub budget: Budget,
    pub peak: Peak,
    pub requested: Split,
    pub chosen: Chosen,
    /// Samples in every update but the last of an epoch; no plan changes it.
    pub samples_per_update: usize,
    /// What is live at the peak.
    pub parts: Vec<Part>,
    /// Every way of running considered.
    pub rungs: Vec<Rung>,
    /// What to change in the job when it does not fit.
    pub advice: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Fits,
    FitsAfterShrink,
    DoesNotFit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Budget {
    pub vram_bytes: u64,
    pub ram_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Peak {
    pub vram_bytes: u64,
    pub ram_bytes: u64,
    /// The phase the peak falls in: `forward`, `backward`, `update`, `eval`, `checkpoint`.
    pub phase: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Split {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Chosen {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
    /// Blocks whose activations are recomputed in the backward pass.
    pub recompute: usize,
    pub offload: bool,
    pub optimizer: String,
    pub eval_micro_batch: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Part {
    pub name: String,
    pub role: Role,
    pub bytes: u64,
    pub r#where: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Weights,
    Gradients,
    OptimizerState,
    Activations,
    Workspace,
    Batch,
    DataPipeline,
    CheckpointWriting,
    Reserve,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Role::Weights => "weights",
            Role::Gradients => "gradients",
            Role::OptimizerState => "optimizer state",
            Role::Activations => "activations",
            Role::Workspace => "workspace",
            Role::Batch => "batch",
            Role::DataPipeline => "data pipeline",
            Role::CheckpointWriting => "checkpoint writing",
            Role::Reserve => "reserve",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    Ram,
    Vram,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Rung {
    /// What differs from the job as written; empty for the job as written.
    pub change: String,
    pub vram_bytes: u64,
    pub ram_bytes: u64,
    /// Predicted time of an update over that of the job as written.
    pub relative_time: f64,
    pub fits: bool,
}
