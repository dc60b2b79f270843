//! `[eval]`, `[checkpoint]` and `[log]`: what a run evaluates, keeps and reports, and how often.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How often something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// Updates.
    Steps(u64),
    /// Passes over the training set.
    Epochs(u64),
    /// Minutes of wall-clock time.
    Minutes(u64),
}

/// Evaluation on the validation set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-one-of" = ["every_epochs", "every_steps"]))]
pub struct EvalConfig {
    /// Epochs between evaluations; 1 if neither this nor `every_steps` is given.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    every_epochs: Option<u64>,
    /// Updates between evaluations, instead of `every_epochs`.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    every_steps: Option<u64>,
    /// Metrics besides the loss, reported as `valid.NAME`.
    #[schemars(extend("uniqueItems" = true))]
    pub metrics: Vec<Metric>,
    /// Samples in a micro-batch of the evaluation; chosen by the memory plan if absent.
    #[schemars(range(min = 1, max = 1_048_576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_epochs: None, every_steps: None, metrics: vec![Metric::Accuracy], batch_size: None }
    }
}

impl EvalConfig {
    /// How often to evaluate.
    pub fn every(&self) -> Interval {
        match (self.every_steps, self.every_epochs) {
            (Some(steps), _) => Interval::Steps(steps),
            (None, epochs) => Interval::Epochs(epochs.unwrap_or(1)),
        }
    }

    /// Writes the default of the either/or keys, so that the resolved job states it.
    pub(super) fn resolve(&mut self) {
        if self.every_steps.is_none() {
            self.every_epochs.get_or_insert(1);
        }
    }
}

/// A metric besides the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Fraction of samples whose class has the highest logit.
    Accuracy,
    /// Fraction of samples whose class is among the five highest logits.
    Top5,
}

impl Metric {
    /// Its name after `valid.`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::Top5 => "top5",
        }
    }
}

/// Checkpoints: how often they are written and which are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-one-of" = ["every_epochs", "every_steps", "every_minutes"]))]
pub struct CheckpointConfig {
    /// Epochs between checkpoints; 1 if no `every_` key is given.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    every_epochs: Option<u64>,
    /// Updates between checkpoints, instead of `every_epochs`.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    every_steps: Option<u64>,
    /// Minutes between checkpoints, instead of `every_epochs`.
    #[schemars(range(min = 1, max = 525_600))]
    #[serde(skip_serializing_if = "Option::is_none")]
    every_minutes: Option<u64>,
    /// How many of the newest checkpoints are kept; the best one is kept too.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub keep: usize,
    /// The metric that selects the best checkpoint: the lowest loss, or the highest accuracy.
    pub best: BestMetric,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_epochs: None, every_steps: None, every_minutes: None, keep: 3, best: BestMetric::Loss }
    }
}

impl CheckpointConfig {
    /// How often to write one.
    pub fn every(&self) -> Interval {
        match (self.every_steps, self.every_minutes, self.every_epochs) {
            (Some(steps), ..) => Interval::Steps(steps),
            (None, Some(minutes), _) => Interval::Minutes(minutes),
            (None, None, epochs) => Interval::Epochs(epochs.unwrap_or(1)),
        }
    }

    /// Writes the default of the either/or keys, so that the resolved job states it.
    pub(super) fn resolve(&mut self) {
        if self.every_steps.is_none() && self.every_minutes.is_none() {
            self.every_epochs.get_or_insert(1);
        }
    }
}

/// The value that ranks checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BestMetric {
    #[serde(rename = "valid.loss")]
    Loss,
    #[serde(rename = "valid.accuracy")]
    Accuracy,
    #[serde(rename = "valid.top5")]
    Top5,
}

impl BestMetric {
    /// Its name in events and metrics: `valid.loss`, ...
    pub fn name(self) -> &'static str {
        match self {
            Self::Loss => "valid.loss",
            Self::Accuracy => "valid.accuracy",
            Self::Top5 => "valid.top5",
        }
    }

    /// The metric that must be measured for it; none for the loss, which always is.
    pub fn metric(self) -> Option<Metric> {
        match self {
            Self::Loss => None,
            Self::Accuracy => Some(Metric::Accuracy),
            Self::Top5 => Some(Metric::Top5),
        }
    }

    pub fn is_lower_better(self) -> bool {
        self == Self::Loss
    }

    /// Whether `new` ranks above `old`. A value that is not a number never does.
    pub fn improves(self, new: f64, old: f64) -> bool {
        if self.is_lower_better() { new < old } else { new > old }
    }
}

/// What a run logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LogConfig {
    /// Updates between two `step` events.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_steps: u64,
    /// Write TensorBoard files into the run's folder.
    pub tensorboard: bool,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { every_steps: 10, tensorboard: true }
    }
}
