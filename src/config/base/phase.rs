//! The phase of a run that memory is held in.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    // Before the first micro-batch: tensors and the loader are set up.
    Start,
    // Data is located, counted and tokenized, before the plan is made.
    Preparation,
    // The teacher computes the logits that are stored, before the first update.
    Teacher,
    Forward,
    Backward,
    Update,
    Eval,
    Checkpoint,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.serialize(f)
    }
}
