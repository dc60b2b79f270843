//! The memory plan: the verdict whether a job fits, and the chosen execution.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::execution_plan::{BatchSplit, ExecutionPlan};
use super::prediction::SmallerModel;
use crate::base::{MemorySpace, Phase, Role};
use crate::job::PruneStructure;

/// A memory plan as `trainer plan --json` prints it and `plan.json` keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryPlan {
    pub verdict: PlanVerdict,
    /// `cpu`, `cuda:0`, ... On the CPU, tensors count as host memory.
    pub device: String,
    pub budget: Budget,
    pub peak: Peak,
    pub requested: BatchSplit,
    pub chosen: ExecutionPlan,
    /// Samples in every update but the last of an epoch; no plan changes it.
    pub samples_per_update: usize,
    /// Parameters of the model, and how many of them are trained: all but those that `train.freeze` names.
    #[serde(default)]
    pub parameters: u64,
    #[serde(default)]
    pub trained_parameters: u64,
    /// Device bytes that the CUDA context takes beside the budget and the peak; 0 if no GPU was probed.
    #[serde(default)]
    pub context_bytes: u64,
    /// What is live at the peak: on the device at its peak, on the host at the host's.
    pub parts: Vec<MemoryPart>,
    /// Every execution plan considered.
    #[serde(alias = "rungs")]
    pub candidates: Vec<CandidateSummary>,
    /// What to change in the job: a key and a value that make it fit where it does not, or that make it
    /// faster where execution plans were measured.
    pub advice: Option<String>,
    /// What differs from the job as written, one entry per change; empty when it fits as written.
    #[serde(default)]
    pub shrunk: Vec<PlanAdjustment>,
    /// The peak of each phase of the chosen execution plan.
    #[serde(default)]
    pub phases: Vec<PhasePeak>,
    /// The pruned model, if the job prunes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pruned: Option<Box<PrunedModel>>,
    /// What one sample takes with the trained model, if the job prunes or distills.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<SmallerModel>,
    /// What the run keeps on disk.
    #[serde(default)]
    pub disk: Disk,
}

/// The weights that a run with `[prune]` ends with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrunedModel {
    /// Weights that may be pruned.
    pub weights: u64,
    /// Fraction of these that is zero after the last update.
    pub sparsity: f64,
    /// Size of the whole model in f32.
    pub bytes: u64,
    /// Estimated size of that after gzip.
    pub compressed_bytes: u64,
    /// The channels or heads that an export is without, if those are pruned; the sizes are without them too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<RemovedUnits>,
}

/// Channels or heads that are pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RemovedUnits {
    pub structure: PruneStructure,
    pub removed: u64,
    /// Those that may be.
    pub units: u64,
}

/// Bytes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Disk {
    /// Size of one checkpoint.
    pub checkpoint_bytes: u64,
    /// Checkpoints at most at any time: those kept, the best one, and one that is being written.
    pub checkpoints: u64,
    /// Size of all of them. `fit` compares it with the free space before the first step.
    pub checkpoints_bytes: u64,
    /// Size of the prepared data in `runs/.data`, which exists by the time of the plan.
    pub data_cache_bytes: u64,
    /// Size of the teacher's logits in `runs/.data`, if the job stores them.
    #[serde(default)]
    pub stored_logits_bytes: u64,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Peak {
    pub vram_bytes: u64,
    pub ram_bytes: u64,
    /// The phase the peak falls in: that of the device, on the CPU that of the host.
    pub phase: Phase,
}

/// What the planner changes when memory is short, in this order: a key of `chosen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlanKey {
    MicroBatch,
    Recompute,
    Optimizer,
    Offload,
}

impl std::fmt::Display for PlanKey {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.serialize(f)
    }
}

/// A change from the job as written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanAdjustment {
    /// The key of `chosen` that changed.
    #[serde(alias = "rung")]
    pub key: PlanKey,
    pub from: String,
    pub to: String,
    /// The memory without this change, with only those listed before it.
    pub why: String,
}

/// The highest moment of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PhasePeak {
    pub name: Phase,
    pub vram_bytes: u64,
    pub ram_bytes: u64,
}

impl PhasePeak {
    pub fn bytes_in(&self, space: MemorySpace) -> u64 {
        if space == MemorySpace::Vram { self.vram_bytes } else { self.ram_bytes }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryPart {
    pub name: String,
    pub role: Role,
    pub bytes: u64,
    pub r#where: MemorySpace,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CandidateSummary {
    /// What differs from the job as written; empty for the job as written.
    pub change: String,
    pub vram_bytes: u64,
    pub ram_bytes: u64,
    /// Predicted time of an update, relative to the job as written.
    pub relative_time: f64,
    /// Measured time of an update, relative to the fastest measured; only if `plan --measure` ran it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_time: Option<f64>,
    pub fits: bool,
}
