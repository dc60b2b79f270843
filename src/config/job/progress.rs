//! `[eval]`, `[checkpoint]` and `[log]`: what a run evaluates, keeps and reports, and how often.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::data::one_or_many::{list_of_one_or_many, one_or_list};

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
    /// Also evaluate before the first update: the value that training starts from. It writes a checkpoint of step 0,
    /// which may be the best, and counts for `[stop]` as any other evaluation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub at_start: bool,
    /// Metrics besides the loss, reported as `valid.NAME`, as scikit-learn computes them; by default `accuracy` of
    /// classes and tokens, `f1_micro` and `f1_macro` of labels, `rmse` of values. Those of several regression targets
    /// are means over the targets, and `valid.NAME.TARGET` is that of each.
    #[schemars(extend("uniqueItems" = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Vec<Metric>>,
    /// Samples in a micro-batch of the evaluation; chosen by the memory plan if absent.
    #[schemars(range(min = 1, max = 1_048_576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Texts that a language model (`gpt`, `llama`) continues once it is trained, always with the most probable token,
    /// for `report.html`: one or a list of them.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(length(max = 32), transform = one_or_list)]
    pub prompts: Vec<String>,
    /// New tokens after each of `prompts`, at most, 64 if absent; the context of the model may end a text earlier.
    #[schemars(range(min = 1, max = 65_536))]
    #[serde(skip_serializing_if = "is_default_prompt_tokens")]
    pub prompt_tokens: usize,
}

const PROMPT_TOKENS: usize = 64;

fn is_default_prompt_tokens(tokens: &usize) -> bool {
    *tokens == PROMPT_TOKENS
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            every_epochs: None,
            every_steps: None,
            at_start: false,
            metrics: None,
            batch_size: None,
            prompts: Vec::new(),
            prompt_tokens: PROMPT_TOKENS,
        }
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
    /// Fraction of samples whose class has the highest logit, of tokens likewise, or of samples whose labels are all
    /// right.
    Accuracy,
    /// Fraction of samples whose class is among the five highest logits; of tokens likewise.
    Top5,
    /// Precision of a class against the rest, mean over classes.
    Precision,
    /// Recall of a class against the rest, mean over classes.
    Recall,
    /// F1 of a class against the rest, mean over classes.
    F1,
    /// Area under the ROC curve of a class against the rest, mean over classes.
    RocAuc,
    /// Mean of -ln(probability of the class), without the weights and the smoothing of the loss.
    LogLoss,
    /// Expected calibration error: the mean distance of confidence and accuracy over 15 bins.
    CalibrationError,
    /// F1 of all labels together.
    F1Micro,
    /// F1 of each label, mean over labels.
    F1Macro,
    /// Average precision of each label, mean over labels.
    AveragePrecision,
    /// Root of the mean squared error, in the units of the target.
    Rmse,
    /// Mean absolute error, in the units of the target.
    Mae,
    /// Coefficient of determination.
    R2,
    /// e to the loss per token.
    Perplexity,
    /// Loss in bits per byte of text.
    BitsPerByte,
}

impl Metric {
    const ALL: [Metric; 16] = [
        Metric::Accuracy,
        Metric::Top5,
        Metric::Precision,
        Metric::Recall,
        Metric::F1,
        Metric::RocAuc,
        Metric::LogLoss,
        Metric::CalibrationError,
        Metric::F1Micro,
        Metric::F1Macro,
        Metric::AveragePrecision,
        Metric::Rmse,
        Metric::Mae,
        Metric::R2,
        Metric::Perplexity,
        Metric::BitsPerByte,
    ];

    /// Its name after `valid.`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::Top5 => "top5",
            Self::Precision => "precision",
            Self::Recall => "recall",
            Self::F1 => "f1",
            Self::RocAuc => "roc_auc",
            Self::LogLoss => "log_loss",
            Self::CalibrationError => "calibration_error",
            Self::F1Micro => "f1_micro",
            Self::F1Macro => "f1_macro",
            Self::AveragePrecision => "average_precision",
            Self::Rmse => "rmse",
            Self::Mae => "mae",
            Self::R2 => "r2",
            Self::Perplexity => "perplexity",
            Self::BitsPerByte => "bits_per_byte",
        }
    }

    /// Whether the outputs of the model are needed, and not only the sums that the loss computes.
    pub fn needs_outputs(self) -> bool {
        !matches!(self, Self::Accuracy | Self::Top5 | Self::Perplexity | Self::BitsPerByte)
    }

    fn is_lower_better(self) -> bool {
        matches!(
            self,
            Self::LogLoss
                | Self::CalibrationError
                | Self::Rmse
                | Self::Mae
                | Self::Perplexity
                | Self::BitsPerByte
        )
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
    /// The metric that selects the best checkpoint: the lowest loss or error, or the highest of other metrics.
    pub best: BestMetric,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_epochs: None, every_steps: None, every_minutes: None, keep: 3, best: BestMetric::LOSS }
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

/// The value that ranks checkpoints: `valid.loss`, or `valid.` and the name of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BestMetric(Option<Metric>);

impl BestMetric {
    pub const LOSS: Self = Self(None);

    pub fn of(metric: Metric) -> Self {
        Self(Some(metric))
    }

    fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::LOSS).chain(Metric::ALL.map(Self::of))
    }

    /// Its name in events and metrics: `valid.loss`, ...
    pub fn name(self) -> String {
        format!("valid.{}", self.0.map_or("loss", Metric::name))
    }

    /// The metric that must be measured for it; none for the loss, which always is.
    pub fn metric(self) -> Option<Metric> {
        self.0
    }

    pub fn is_lower_better(self) -> bool {
        self.0.is_none_or(Metric::is_lower_better)
    }

    /// Whether `new` ranks above `old`. A value that is not a number never does.
    pub fn improves(self, new: f64, old: f64) -> bool {
        if self.is_lower_better() { new < old } else { new > old }
    }
}

impl Serialize for BestMetric {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.name())
    }
}

impl<'de> Deserialize<'de> for BestMetric {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || D::Error::custom(format!("`{name}` is not a metric"));
        Self::all().find(|metric| metric.name() == name).ok_or_else(unknown)
    }
}

impl JsonSchema for BestMetric {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "BestMetric".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": Self::all().map(Self::name).collect::<Vec<_>>() })
    }
}

/// What a run logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LogConfig {
    /// Updates between two `step` events.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_steps: u64,
    /// Write TensorBoard files into the run's folder: metrics, and the confusion matrix of the best evaluation.
    pub tensorboard: bool,
    /// Also write a histogram of each trained parameter at every evaluation, for TensorBoard.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub histograms: bool,
    /// Send parameters and metrics to MLflow, in an experiment of the job's `name`: to the tracking server at this
    /// address, such as `http://localhost:5000`, or into the file that MLflow opens under `sqlite:///mlflow.db`,
    /// relative to the current folder. A store that does not answer is a warning. `https` needs a build with
    /// `--features https`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlflow: Option<String>,
    /// Write `report.html` into the run's folder at its end, if that takes less than a second; `trainer report` writes
    /// it at any time.
    pub report: bool,
    /// What is kept of who held which memory. The page shows it.
    pub memory: MemoryLog,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            every_steps: 10,
            tensorboard: true,
            histograms: false,
            mlflow: None,
            report: true,
            memory: MemoryLog::Summary,
        }
    }
}

/// What a run keeps in `memory/` of its folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryLog {
    /// The holders at the first and at the last few out-of-memory errors.
    #[default]
    Summary,
    /// Every reservation and release of the last two updates, before an out-of-memory error, after the last evaluation
    /// and at the end; half a MiB of host memory for each device, which the plan counts.
    Detailed,
}
