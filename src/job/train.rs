//! `[train]`: samples per update, length of the run, and precision.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An update's samples, the run's length and its precision.
// The bounds keep samples x updates and samples x epochs of a run within 63 bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend(
    "x-one-of" = ["epochs", "steps"],
    "oneOf" = [{ "required": ["epochs"] }, { "required": ["steps"] }],
))]
pub struct TrainConfig {
    /// Samples in a micro-batch, as wished: the memory plan may take fewer, with more accumulation.
    #[serde(default = "batch_size")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub batch_size: usize,
    /// Micro-batches in an update. An update sees `batch_size` x `accumulation_steps` samples, always.
    #[serde(default = "accumulation_steps")]
    #[schemars(range(min = 1, max = 4096))]
    pub accumulation_steps: usize,
    /// Length of the run in passes over the training set. Either this or `steps`.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    epochs: Option<u64>,
    /// Length of the run in updates. Either this or `epochs`.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    /// Number format of the computation.
    #[serde(default)]
    pub precision: Precision,
    /// Let a GPU round what `f32` products multiply to TF32, 10 bits after the point: several times faster. Only with
    /// `precision = "f32"`; the CPU has no such thing.
    #[serde(default)]
    pub tf32: bool,
    /// Scale the gradient down to this norm when it is longer; absent means never.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Begin with the weights in this safetensors file, by name, instead of with random ones.
    #[schemars(extend("format" = "path"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    /// Keep a moving average of the weights that forgets at this rate, such as 0.999, and measure with it;
    /// absent means none.
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema: Option<f64>,
}

fn batch_size() -> usize {
    64
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

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunLength {
    /// Passes over the training set.
    Epochs(u64),
    /// Updates.
    Steps(u64),
}

/// Number format of the computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// What is fastest on the device without loss of quality; `f32` on the CPU.
    #[default]
    Auto,
    /// 32-bit floating point.
    F32,
    /// Half the bits, the range of `f32`; weights, sums and the optimizer stay in `f32`.
    Bf16,
    /// Half the bits, more digits and less range than `bf16`; the loss is scaled so that small gradients
    /// are not lost, and an update that overflows is skipped and counted.
    F16,
}
