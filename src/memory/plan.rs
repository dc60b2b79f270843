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
    /// Device bytes that the CUDA context takes beside the budget and the peak; 0 where no card was looked at.
    #[serde(default)]
    pub context_bytes: u64,
    /// What is live at the peak: on the device at its peak, on the host at the host's.
    pub parts: Vec<Part>,
    /// Every way of running considered.
    pub rungs: Vec<Rung>,
    /// What to change in the job: a key and a value that make it fit where it does not, or that make it
    /// faster where ways were measured.
    pub advice: Option<String>,
    /// What differs from the job as written, rung by rung; empty when it fits as it is.
    #[serde(default)]
    pub shrunk: Vec<Shrunk>,
    /// The highest moment of each phase of the chosen way.
    #[serde(default)]
    pub phases: Vec<Phase>,
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

/// Device bytes in two pools: of what the passes of micro-batches take, and of all else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apart {
    pub passes: u64,
    pub rest: u64,
}

impl Apart {
    /// Bytes that the pool of passes has: theirs come and go in all sizes and leave gaps. With an eighth more, those of GPT-2
    /// (3.7 GB, and 13 for 64 x 1024) and of ResNet-50 (8 GB) all find room in one piece, with a fortieth they do not.
    pub fn most(passes: u64) -> u64 {
        passes.saturating_add(passes / 8)
    }
}

impl Plan {
    /// The two pools this plan can be run in, where the budget has room for both. One pool for all takes less: passes and
    /// evaluations have their memory in turns there. A micro-batch, of so many bytes, stays while weights are updated.
    pub fn apart(&self, micro_batch: u64) -> Option<Apart> {
        let of = |names: &[&str]| {
            let named = self.phases.iter().filter(|phase| names.contains(&phase.name.as_str()));
            named.map(|phase| phase.vram_bytes).max()
        };
        // While a checkpoint is written the device holds what lasts, and nothing else.
        let learning = of(&["forward", "backward"])?;
        let passes = learning.checked_sub(of(&["checkpoint"])?)?;
        let updating = of(&["update", "checkpoint"])?.saturating_add(micro_batch);
        let rest = updating.max(of(&["eval"]).unwrap_or(0));
        let room = rest.saturating_add(Apart::most(passes)) <= self.budget.vram_bytes && updating <= learning;
        room.then_some(Apart { passes, rest })
    }
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
    /// What waits in host memory; nothing on the CPU.
    pub offload: Vec<Offload>,
    /// The optimizer's kind, which says what state it keeps.
    pub optimizer: String,
    /// Samples of the evaluation in memory at once.
    pub eval_micro_batch: usize,
}

impl Chosen {
    pub fn split(&self) -> Split {
        Split { micro_batch: self.micro_batch, accumulation_steps: self.accumulation_steps }
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
pub struct Shrunk {
    /// The key of `chosen` that changed: `micro_batch`, `recompute`, `optimizer`, `offload`.
    pub rung: String,
    pub from: String,
    pub to: String,
    /// What it would take with the rungs above alone.
    pub why: String,
}

/// The highest moment of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Phase {
    /// `forward`, `backward`, `update`, `eval` or `checkpoint`.
    pub name: String,
    pub vram_bytes: u64,
    pub ram_bytes: u64,
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
    /// Measured time of an update over that of the fastest measured, where `plan --measure` ran it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_time: Option<f64>,
    pub fits: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(budget: u64, phases: &[(&str, u64)]) -> Plan {
        let split = Split { micro_batch: 1, accumulation_steps: 1 };
        let phase = |&(name, vram_bytes): &(&str, u64)| Phase { name: name.into(), vram_bytes, ram_bytes: 0 };
        Plan {
            verdict: Verdict::Fits,
            device: "cuda:0".into(),
            budget: Budget { vram_bytes: budget, ram_bytes: 0 },
            peak: Peak { vram_bytes: 900, ram_bytes: 0, phase: "backward".into() },
            requested: split,
            chosen: Chosen {
                micro_batch: 1,
                accumulation_steps: 1,
                recompute: 0,
                offload: Vec::new(),
                optimizer: "adamw".into(),
                eval_micro_batch: 1,
            },
            samples_per_update: 1,
            context_bytes: 0,
            parts: Vec::new(),
            rungs: Vec::new(),
            advice: None,
            shrunk: Vec::new(),
            phases: phases.iter().map(phase).collect(),
            disk: Disk::default(),
        }
    }

    #[test]
    fn passes_have_a_pool_of_their_own_where_there_is_room_for_both() {
        let phases =
            [("forward", 700), ("backward", 900), ("update", 120), ("eval", 300), ("checkpoint", 100)];
        let wanted = Some(Apart { passes: 800, rest: 300 });
        assert_eq!(plan(1200, &phases).apart(50), wanted);
        assert_eq!(plan(1200, &phases).apart(781), None, "an update has no room for the micro-batch");
        assert_eq!(plan(1199, &phases).apart(50), None, "it fits in 900, not in two pools");
        // Without an evaluation.
        let phases = &[phases[0], phases[1], phases[2], phases[4]];
        assert_eq!(plan(1070, phases).apart(50), Some(Apart { passes: 800, rest: 170 }));
        assert_eq!(plan(1069, phases).apart(50), None, "the micro-batch is not in the passes' pool");
        assert_eq!(plan(u64::MAX, &[]).apart(50), None);
    }
}
