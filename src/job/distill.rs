//! `[distill]`: a teacher whose outputs the model learns from.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Knowledge distillation: the model also learns the probabilities that a trained model, its teacher, gives to all classes.
/// The loss is (1 - weight) CE + weight temperature^2 KL, of cross-entropy with the targets and of the divergence from the
/// teacher's probabilities, both at this temperature. The teacher may be a model of another kind. It computes along, in
/// evaluation mode and in the same micro-batches; its memory is part of the plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DistillConfig {
    /// The teacher: the folder of a run, whose best checkpoint is used, of a checkpoint, or of an export as safetensors. It
    /// was trained on the same classes or tokens, with inputs of the same shape and normalization.
    #[schemars(extend("format" = "path"))]
    pub teacher: PathBuf,
    /// Divides the logits of both models before the softmax: above 1, small probabilities count more.
    #[serde(default = "temperature")]
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1000.0))]
    pub temperature: f64,
    /// Fraction of the loss that is the teacher's; 0 to 1.
    #[serde(default = "weight")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub weight: f64,
    /// Number format that the teacher computes in, and its weights are held in.
    #[serde(default)]
    pub teacher_precision: TeacherPrecision,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TeacherPrecision {
    /// That of the model that learns from it.
    #[default]
    Same,
    /// 32-bit floating point.
    F32,
    /// bfloat16: half the memory of `f32`, for a teacher that is larger than the model that learns from it.
    Bf16,
}

fn temperature() -> f64 {
    4.0
}

fn weight() -> f64 {
    0.5
}
