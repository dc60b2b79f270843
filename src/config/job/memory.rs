//! `[memory]`: the budgets, and what the trainer may do to stay within them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base::units::{Bytes, MemorySize};

/// Budgets of device and host memory, and what may be done to stay within them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MemoryConfig {
    /// Device memory that the run may use: a size, a percentage of the GPU's memory, or `auto`, what is free at the
    /// start.
    pub vram: MemorySize,
    /// Host memory that the run may use: a size, a percentage of the process's limit (of RAM, cgroup and `RLIMIT_AS`
    /// the smallest), or `auto`, what is available at the start.
    pub ram: MemorySize,
    /// Safety margin: how much of the available memory an `auto` budget leaves unused.
    #[schemars(extend("format" = "size-or-percent"))]
    pub headroom: MemorySize,
    /// What the trainer may do if the job does not fit as written, or runs out of memory; with `[]` it ends with exit
    /// code 3 instead.
    #[schemars(extend("uniqueItems" = true))]
    pub on_oom: Vec<OomAction>,
    /// Retries of one update after out-of-memory errors before the run ends with exit code 3; also restarts of a killed
    /// process without a new checkpoint in between.
    #[schemars(range(max = 1000))]
    pub max_retries: u32,
    /// On a GPU, capture the kernels of a micro-batch as a CUDA graph and replay it: faster, with the same numbers.
    pub graphs: bool,
    /// Train in a child process, which is restarted from its newest checkpoint, with less memory, if the OOM killer
    /// ends it or an allocation fails. Linux only; elsewhere there is one process.
    pub supervise: bool,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            vram: MemorySize::Auto,
            ram: MemorySize::Auto,
            headroom: MemorySize::Percent(5.0),
            on_oom: vec![OomAction::Shrink, OomAction::Recompute, OomAction::Offload],
            max_retries: 8,
            graphs: true,
            supervise: true,
        }
    }
}

impl MemoryConfig {
    /// What is left of `budget` after the headroom.
    pub fn usable(&self, budget: Bytes) -> Bytes {
        Bytes(budget.0.saturating_sub(self.headroom.resolve(budget).0))
    }
}

/// A measure that reduces memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OomAction {
    /// Smaller micro-batches and more accumulation steps: an update has the same samples.
    Shrink,
    /// Activation checkpointing: blocks of the model save only their input and recompute their activations in the
    /// backward pass. The same numbers, but slower.
    Recompute,
    /// Optimizer state and the inputs of recomputed blocks are offloaded from the GPU to host memory. The same numbers,
    /// but slower. No effect on the CPU.
    Offload,
    /// `adamw` stores its two moments in 8 bits per value, as `adamw8bit` does. This changes the numbers slightly, so
    /// it is used only if the job lists it.
    #[serde(rename = "optimizer-8bit")]
    Optimizer8bit,
}

impl OomAction {
    /// Its name in a job.
    pub fn name(self) -> &'static str {
        match self {
            OomAction::Shrink => "shrink",
            OomAction::Recompute => "recompute",
            OomAction::Offload => "offload",
            OomAction::Optimizer8bit => "optimizer-8bit",
        }
    }
}
