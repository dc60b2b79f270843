//! `[train]`: samples per update, length of the run, and precision.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::data::one_or_many::{list_of_one_or_many, one_or_list};

/// An update's samples, the run's length and its precision.
// The bounds keep samples x updates and samples x epochs of a run within 63 bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend(
    "x-one-of" = ["epochs", "steps"],
    "oneOf" = [{ "required": ["epochs"] }, { "required": ["steps"] }],
))]
pub struct TrainConfig {
    /// Requested samples per micro-batch: the memory plan may choose fewer, with more accumulation steps.
    #[serde(default = "batch_size")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub batch_size: usize,
    /// Micro-batches per update. An update always has `batch_size` x `accumulation_steps` samples (the last of an
    /// epoch: what is left).
    #[serde(default = "accumulation_steps")]
    #[schemars(range(min = 1, max = 4096))]
    pub accumulation_steps: usize,
    /// Length of the run in epochs. Either this or `steps`.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    epochs: Option<u64>,
    /// Length of the run in updates. Either this or `epochs`.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    /// Number format of activations and matmuls.
    #[serde(default)]
    pub precision: Precision,
    /// Let matmuls and convolutions in `f32` round their operands to TF32 on a GPU (10 of 23 mantissa bits), which is
    /// several times faster. Requires `precision = "f32"`; no effect on the CPU.
    #[serde(default)]
    pub tf32: bool,
    /// What is minimized.
    #[serde(default)]
    pub loss: LossKind,
    /// Distance from which `huber` grows linearly, in the units that the model predicts: standard deviations of the
    /// target if it is standardized.
    #[serde(default = "huber_delta")]
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub huber_delta: f64,
    /// Exponent of the factor (1 - probability of the target) of `focal`; 0 is cross-entropy.
    #[serde(default = "focal_gamma")]
    #[schemars(range(min = 0.0, max = 20.0))]
    pub focal_gamma: f64,
    /// Fraction of each target that is spread over all classes; of several labels per sample, over 1 and 0.
    #[serde(default)]
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub label_smoothing: f64,
    /// Weight of each class in the loss: a table of class names and weights, 1 for those it does not name, or
    /// `"balanced"`, inversely proportional to their samples in the training set. With several labels per sample, the
    /// weight of a label where it is present; `"balanced"`: samples without it per sample with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_weights: Option<ClassWeightsConfig>,
    /// Clip the gradient to this norm; no clipping if absent.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Initialize the weights by name from this run, checkpoint, safetensors file, or folder of shards with their
    /// index, in any float type; randomly if absent. Of a run it is the best checkpoint, and of a checkpoint, which
    /// must be intact, the moving average of the weights if it has one.
    #[schemars(extend("format" = "path"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    /// What of `init` may differ from the model.
    #[serde(default)]
    pub init_head: InitHead,
    /// Decay rate of an exponential moving average of the weights, such as 0.999; evaluations then use the average.
    /// None if absent.
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema: Option<f64>,
    /// Parameters that training does not change: patterns on their names in checkpoints, in which `*` stands for any
    /// characters, dots too, `?` for one and `[ab]` for one of these. A pattern matches a parameter, `head.bias`, or a
    /// module with all its parameters, `blocks.0`. A pattern that begins with `!` is an exception; the last pattern
    /// that matches decides: `["*", "!head"]` trains the head alone. Frozen parameters take no memory for gradients and
    /// optimizer state, and none before the first trained layer for activations; a frozen batch norm normalizes with
    /// its running statistics and leaves them as they are. Dropout stays on.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(transform = one_or_list)]
    pub freeze: Vec<String>,
    /// Learning rate and weight decay of some parameters, each group a `[[train.groups]]` table. Of several groups that
    /// match a parameter, the last applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroupConfig>,
}

/// How some parameters are trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ParamGroupConfig {
    /// The parameters: patterns as in `train.freeze`, without exceptions.
    #[serde(deserialize_with = "list_of_one_or_many")]
    #[schemars(length(min = 1), transform = one_or_list)]
    pub params: Vec<String>,
    /// Factor on the learning rate at every step of the schedule.
    #[serde(default = "lr_scale")]
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr_scale: f64,
    /// In place of `optimizer.weight_decay`. Like that, it applies to matrices.
    #[schemars(range(min = 0.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

fn lr_scale() -> f64 {
    1.0
}

fn batch_size() -> usize {
    64
}

fn huber_delta() -> f64 {
    1.0
}

fn focal_gamma() -> f64 {
    2.0
}

fn accumulation_steps() -> usize {
    1
}

impl TrainConfig {
    /// How long to train. A loaded job states exactly one of the two.
    pub fn length(&self) -> RunLength {
        match (self.steps, self.epochs) {
            (Some(steps), _) => RunLength::Steps(steps),
            (None, epochs) => RunLength::Epochs(epochs.unwrap_or(1)),
        }
    }

    /// Samples in every update but the last of an epoch.
    pub fn samples_per_update(&self) -> usize {
        self.batch_size * self.accumulation_steps
    }
}

/// What of the initial weights may differ from the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InitHead {
    /// Nothing: every parameter must be there, in the same shape.
    #[default]
    Strict,
    /// The last linear layer, which starts at random where the classes differ, and the size of the vocabulary and of
    /// the context, of which the common part is taken.
    Auto,
}

/// What training minimizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// `cross_entropy` for classes and tokens, `bce` for several labels per sample, `mse` for values.
    #[default]
    Auto,
    /// Cross-entropy of the softmax over classes or tokens.
    CrossEntropy,
    /// Binary cross-entropy of a sigmoid per label; of two classes it is `cross_entropy`.
    Bce,
    /// `cross_entropy` or `bce`, times (1 - probability of the target)^`focal_gamma`: what is predicted well counts
    /// less.
    Focal,
    /// Mean squared error.
    Mse,
    /// Mean absolute error.
    Mae,
    /// Squared up to `huber_delta`, then linear.
    Huber,
}

/// The weights of classes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ClassWeightsConfig {
    /// Inversely proportional to the samples of the class.
    Named(ClassWeightsRule),
    /// By class name.
    Table(std::collections::BTreeMap<String, f64>),
}

/// How class weights follow from the training set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClassWeightsRule {
    /// `samples / (classes x samples of the class)`, as in scikit-learn.
    Balanced,
}

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunLength {
    /// Passes over the training set.
    Epochs(u64),
    /// Updates.
    Steps(u64),
}

impl RunLength {
    /// The key that states it.
    pub fn key(self) -> &'static str {
        match self {
            RunLength::Epochs(_) => "train.epochs",
            RunLength::Steps(_) => "train.steps",
        }
    }
}

/// Number format of activations and matmuls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// `bf16` on a GPU, `f32` on the CPU.
    #[default]
    Auto,
    /// 32-bit floating point.
    F32,
    /// bfloat16: 16 bits with the range of `f32`. Master weights, gradients, sums and optimizer state stay in `f32`.
    Bf16,
    /// Half precision: 16 bits, more precise than `bf16` and with less range. Uses dynamic loss scaling; an update
    /// whose gradient overflows is skipped and counted.
    F16,
}
