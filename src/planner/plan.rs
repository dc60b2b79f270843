//! The memory plan: the verdict whether a job fits, and the chosen execution.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base::Role;

/// A memory plan as `trainer plan --json` prints it and `plan.json` keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryPlan {
    pub verdict: PlanVerdict,
    /// `cpu`, `cuda:0`, ... On the CPU, tensors count as host memory.
    pub device: String,
    pub budget: Budget,
    pub peak: Peak,
    pub requested: BatchSplit,
    pub chosen: PlanChoice,
    /// Samples in every update but the last of an epoch; no plan changes it.
    pub samples_per_update: usize,
    /// Device bytes that the CUDA context takes beside the budget and the peak; 0 where no GPU was looked at.
    #[serde(default)]
    pub context_bytes: u64,
    /// What is live at the peak: on the device at its peak, on the host at the host's.
    pub parts: Vec<MemoryPart>,
    /// Every way of running considered.
    pub rungs: Vec<CandidateSummary>,
    /// What to change in the job: a key and a value that make it fit where it does not, or that make it
    /// faster where ways were measured.
    pub advice: Option<String>,
    /// What differs from the job as written, rung by rung; empty when it fits as it is.
    #[serde(default)]
    pub shrunk: Vec<PlanAdjustment>,
    /// The highest moment of each phase of the chosen way.
    #[serde(default)]
    pub phases: Vec<PhasePeak>,
    /// What the run keeps on disk.
    #[serde(default)]
    pub disk: Disk,
}

/// Bytes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Disk {
    /// Of one checkpoint.
    pub checkpoint_bytes: u64,
    /// Checkpoints at most at any time: those kept, the best one, and one that is being written.
    pub checkpoints: u64,
    /// Of all of them. `fit` compares it with the free space before the first step.
    pub checkpoints_bytes: u64,
    /// Of what the data needs in `runs/.data`, which is there once it is planned.
    pub data_cache_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlanVerdict {
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
    /// The phase the peak falls in: `preparation`, `forward`, `backward`, `update`, `eval`, `checkpoint`.
    pub phase: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BatchSplit {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanChoice {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
    /// Blocks whose activations are recomputed in the backward pass.
    pub recompute: usize,
    /// What waits in host memory; nothing on the CPU.
    pub offload: Vec<Offload>,
    /// The optimizer's kind, which says what state it keeps.
    pub optimizer: String,
    /// Samples of the evaluation in memory at once.
    pub eval_micro_batch: usize,
}

impl PlanChoice {
    pub fn split(&self) -> BatchSplit {
        BatchSplit { micro_batch: self.micro_batch, accumulation_steps: self.accumulation_steps }
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

impl std::fmt::Display for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Offload::OptimizerState => "optimizer state",
            Offload::Activations => "activations",
        })
    }
}

/// A rung taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanAdjustment {
    /// The key of `chosen` that changed: `micro_batch`, `recompute`, `optimizer`, `offload`.
    pub rung: String,
    pub from: String,
    pub to: String,
    /// What it would take with the rungs above alone.
    pub why: String,
}

/// The highest moment of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PhasePeak {
    /// `preparation` (of the data), `forward`, `backward`, `update`, `eval` or `checkpoint`.
    pub name: String,
    pub vram_bytes: u64,
    pub ram_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryPart {
    pub name: String,
    pub role: Role,
    pub bytes: u64,
    pub r#where: MemorySpace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemorySpace {
    Ram,
    Vram,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CandidateSummary {
    /// What differs from the job as written; empty for the job as written.
    pub change: String,
    pub vram_bytes: u64,
    pub ram_bytes: u64,
    /// Predicted time of an update over that of the job as written.
    pub relative_time: f64,
    /// Measured time of an update over that of the fastest measured, where `plan --measure` ran it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_time: Option<f64>,
    pub fits: bool,
}
