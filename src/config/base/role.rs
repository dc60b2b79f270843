//! What memory is held for: the key of ledger entries and of the parts of a plan.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    // Resident memory besides the heap: code, stacks, caches of the allocator and of libraries.
    Process,
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
            Role::Process => "process",
        })
    }
}
