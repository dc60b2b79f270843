//! The job: what to train, on what data, for how long and within what memory, as a TOML file states it.
//!
//! Owns the file's keys, their defaults, their checks and the messages about them. Takes a file and `--set`
//! overrides; returns a [`Job`] with every default filled in, or [`JobErrors`] that name every independent mistake
//! and its location. Refuses unknown keys, wrong types, values out of range and keys that contradict each other. The
//! types below are the single definition: the schema, the checks and the reference page are generated from them.

mod change;
mod check;
mod data;
mod distill;
mod error;
mod image_models;
mod layers;
mod load;
mod lowrank;
mod memory;
mod model;
mod optimizer;
mod overrides;
mod progress;
mod prune;
mod quantize;
mod reductions;
mod reference;
mod renamed;
mod rules;
mod schema;
mod source_map;
mod stop;
mod synonyms;
mod train;
mod transformer;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use change::{JobChange, job_values};
pub use data::*;
pub use distill::{DistillConfig, FeatureConfig, LogitSource, TeacherPrecision};
pub use error::{ErrorCode, JobError, JobErrors};
pub use image_models::*;
pub use layers::*;
pub use lowrank::{LowRankConfig, Ranks, SizeRatio};
pub use memory::{MemoryConfig, OomAction};
pub use model::*;
pub use optimizer::{
    AdafactorConfig, AdamwConfig, ConstantSchedule, DecaySchedule, ExponentialSchedule, LionConfig,
    OnecycleSchedule, OptimizerConfig, OptimizerKind, ScheduleConfig, SgdConfig, StepSchedule,
};
pub use progress::{BestMetric, CheckpointConfig, EvalConfig, Interval, LogConfig, MemoryLog, Metric};
pub use prune::{PruneConfig, PruneSchedule, PruneScope, PruneStructure, UnitCounts};
pub use quantize::{INT8_KINDS, QuantizeConfig};
pub use reductions::{NO_REDUCTIONS, Reductions};
pub use reference::job_markdown;
pub use schema::schema;
pub use source_map::{Snippet, SourceLocation};
pub use stop::StopConfig;
pub use synonyms::{command_called, flag_key, flag_note};
pub use train::{
    ClassWeightsConfig, ClassWeightsRule, InitHead, LossKind, ParamGroupConfig, Precision, RunLength,
    TrainConfig,
};
pub use transformer::*;

/// A resolved job: every default is filled in, every path absolute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Job {
    /// Name of the run's folder, `runs/NAME/...`; by default the file's name without its extension.
    #[serde(default)]
    #[schemars(extend("format" = "name", "pattern" = "^[A-Za-z0-9_][A-Za-z0-9_.-]*$"), transform = no_default)]
    pub name: String,
    /// Determines all randomness: initial weights, sample order, dropout, augmentation, generated data.
    #[serde(default = "seed")]
    #[schemars(range(max = 9_223_372_036_854_775_807u64))]
    pub seed: u64,
    pub model: ModelConfig,
    pub data: DataConfig,
    pub train: TrainConfig,
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    #[serde(default)]
    pub schedule: ScheduleConfig,
    #[serde(default)]
    pub memory: MemoryConfig,
    #[serde(default)]
    pub eval: EvalConfig,
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    #[serde(default, skip_serializing_if = "StopConfig::is_off")]
    pub stop: StopConfig,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prune: Option<PruneConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowrank: Option<LowRankConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize: Option<QuantizeConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distill: Option<DistillConfig>,
    #[serde(default)]
    pub log: LogConfig,
}

fn seed() -> u64 {
    42
}

/// The default of `name` depends on the file.
fn no_default(schema: &mut schemars::Schema) {
    schema.remove("default");
}

impl Job {
    /// The rank of each factorized layer; empty until a job's `[lowrank]` is resolved.
    pub fn ranks(&self) -> Ranks {
        self.lowrank.as_ref().map(|lowrank| lowrank.ranks.clone()).unwrap_or_default()
    }

    /// Whether values are rounded to 8-bit integers in training.
    pub fn quantizes(&self) -> bool {
        self.quantize.as_ref().is_some_and(|quantize| quantize.training)
    }

    /// `[prune]`, if training sets anything to zero.
    pub fn pruning(&self) -> Option<&PruneConfig> {
        self.prune.as_ref().filter(|prune| prune.is_active())
    }

    /// Whether the model after this many updates is as sparse as it will be, and rounded if it is trained for that.
    pub fn is_reduced_after(&self, step: u64) -> bool {
        self.pruning().is_none_or(|prune| step >= prune.last_step())
            && self.quantize.as_ref().is_none_or(|config| !config.training || config.rounds_after(step))
    }

    /// The resolved job as TOML: itself a valid job, equal to this one in any folder.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a job holds only what TOML can: i64 integers, string keys")
    }

    /// The resolved job as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a job holds only what JSON can: string keys")
    }
}
