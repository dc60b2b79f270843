//! `[memory]`: the budgets, and what the trainer may do to stay within them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base::units::{Bytes, MemorySize};

/// Budgets of device and host memory, and what may be done to stay within them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MemoryConfig {
    /// Device memory the run may use; a percentage is of the GPU, `auto` what is free at the start.
    pub vram: MemorySize,
    /// Host memory the run may use; a percentage is of what the process may have at most, `auto` what
    /// is available at the start.
    pub ram: MemorySize,
    /// Left unused of either budget, so that a small surprise is not an out-of-memory error.
    #[schemars(extend("format" = "share"))]
    pub headroom: MemorySize,
    /// What may be done when memory runs out; `[]` means to fail with exit code 3.
    #[schemars(extend("uniqueItems" = true))]
    pub on_oom: Vec<OomAction>,
    /// Retries in a row, without an update made, after an out-of-memory error before the run gives up with exit
    /// code 3; also how often a killed process is started again without a new checkpoint.
    #[schemars(range(max = 1000))]
    pub max_retries: u32,
    /// On a GPU, capture what is launched for a micro-batch as a CUDA graph and replay it: the same numbers, sooner.
    pub graphs: bool,
    /// Work in a child process, which is started again from its newest checkpoint, with less memory, when
    /// the kernel kills it or an allocation fails. On Linux; elsewhere there is one process.
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

/// A way to need less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OomAction {
    /// Smaller micro-batches and more accumulation: the same samples in an update.
    Shrink,
    /// Blocks of the model keep only their input and run forward again for the backward pass: the same
    /// numbers, in more time.
    Recompute,
    /// Optimizer state and the inputs of recomputed blocks wait in host memory: the same numbers. The CPU computes in
    /// host memory, so there it changes nothing.
    Offload,
    /// `adamw` keeps its two means in a byte a value, as `adamw8bit` does: nearly the same numbers, not the same,
    /// so only a job that names it has it.
    #[serde(rename = "optimizer-8bit")]
    Optimizer8bit,
}

impl OomAction {
    /// As a job spells it.
    pub fn name(self) -> &'static str {
        match self {
            OomAction::Shrink => "shrink",
            OomAction::Recompute => "recompute",
            OomAction::Offload => "offload",
            OomAction::Optimizer8bit => "optimizer-8bit",
        }
    }
}
