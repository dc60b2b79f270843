//! `[distill]`: a teacher whose outputs the model learns from.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Knowledge distillation: the model also learns the probabilities that a trained model, its teacher, gives to all
/// classes. The loss is (1 - weight) CE + weight temperature^2 KL, of cross-entropy with the targets and of the
/// divergence from the teacher's probabilities, both at this temperature. The teacher may be a model of another kind.
/// It computes in evaluation mode; its memory is part of the plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DistillConfig {
    /// The teacher: the folder of a run, whose best checkpoint is used, of a checkpoint, or of an export as
    /// safetensors. It was trained on the same classes or tokens, with inputs of the same shape and normalization.
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
    /// When the teacher computes its logits.
    #[serde(default)]
    pub logits: LogitSource,
    /// With `logits = "stored"`: how many logits are kept per sample, for language models per token: the largest ones,
    /// in 16 bits, and the sum of the others; 16 if absent. The divergence is that of these classes, and of all others
    /// as one.
    #[serde(default = "top_k", skip_serializing_if = "is_default_top_k")]
    #[schemars(range(min = 1, max = 65_536))]
    pub top_k: usize,
    /// Features that the model also learns from: `[[distill.features]]`, one table each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<FeatureConfig>,
    /// Number format that the teacher computes in, and that its weights are held in.
    #[serde(default)]
    pub teacher_precision: TeacherPrecision,
}

/// Features that the model learns to predict: the output of a block of the teacher, from that of one of its own blocks,
/// by a linear map over the last dimension (of images, the channels) that is trained along and not exported.
/// `weight` times their mean squared error is added to the loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FeatureConfig {
    /// A block of the model: `layers.0`, `stages.1`, `layer2.0`, `transformer.h.3`, ... `trainer plan -v` lists them.
    pub student: String,
    /// A block of the teacher. Both outputs have the same shape, except for the last dimension.
    pub teacher: String,
    /// Factor on the mean squared error.
    #[serde(default = "feature_weight")]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub weight: f64,
}

/// When a teacher computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogitSource {
    /// In every step, on the same micro-batches: it stays in memory beside the model.
    #[default]
    EveryStep,
    /// Once, before the first step, on all training samples; `runs/.data` keeps them for later runs. Its memory is
    /// free before training begins. Inputs must be the same in every epoch: without augmentation and random windows.
    Stored,
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
    /// Weights as 8-bit integers with a scale per output, norms and biases as floats: a quarter of the memory of
    /// `f32`. It computes in the format of the model that learns from it: a layer has its weights as floats while it
    /// runs, so that those of the largest layer are in memory besides.
    Int8,
}

fn temperature() -> f64 {
    4.0
}

fn weight() -> f64 {
    0.5
}

fn top_k() -> usize {
    16
}

/// A resolved job states it only if the user did: without stored logits it has no effect, which is an error.
fn is_default_top_k(value: &usize) -> bool {
    *value == top_k()
}

fn feature_weight() -> f64 {
    1.0
}
