//! The job: what to train, on what, for how long and within what memory, as a TOML file states it.
//!
//! Owns the file's keys, their defaults, their checks and the messages about them. Takes a file and
//! `--set` texts; gives a [`Job`] in which every default is filled in, or [`Errors`] that name every
//! independent mistake with its place. Refuses unknown keys, wrong types, values out of range and
//! keys that contradict each other. The types below are the one definition: the schema, the checks
//! and the reference page are made from them.

mod change;
mod check;
mod data;
mod error;
mod layers;
mod load;
mod memory;
mod model;
mod optimizer;
mod page;
mod pictures;
mod progress;
mod rules;
mod schema;
mod set;
mod source;
mod train;
mod transformer;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use change::Change;
pub use data::{
    Augment, ChatLoss, Columns, Csv, Data, Delimiter, Encode, Files, Fit, Idx, Images, Jsonl, Loading,
    OnBadRecord, OnMissing, OnUnknown, OneOr, Parquet, Preset, Shapes, Source, Task, Text, TextSynthetic,
    TokenType, Tokens, TooLong, Windows,
};
pub use error::{Code, Error, Errors};
pub use layers::{AfterSum, Layer, Layers, Part};
pub use memory::{Memory, Rung};
pub use model::{Activation, Cnn, Mlp, Model, Norm, Stage};
pub use optimizer::{Adafactor, Adamw, Constant, Decay, Lion, Onecycle, Optimizer, Schedule, Sgd, Step};
pub use page::page;
pub use pictures::{Mobilenet, Resnet, Stem};
pub use progress::{Best, Checkpoint, Eval, Every, Log, Metric};
pub use schema::schema;
pub use source::{Place, Spot};
pub use train::{Length, Precision, Train};
pub use transformer::{Bert, Gpt, Llama, Vit};

/// A resolved job: every default is filled in, every path absolute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Job {
    /// Names the run's folder, `runs/NAME/...`; the file's name without its ending when absent.
    #[serde(default)]
    #[schemars(extend("format" = "name", "pattern" = "^[A-Za-z0-9_][A-Za-z0-9_.-]*$"), transform = no_default)]
    pub name: String,
    /// All randomness follows from it: first weights, order of samples, dropout, generated data.
    #[serde(default = "seed")]
    #[schemars(range(max = 9_223_372_036_854_775_807u64))]
    pub seed: u64,
    pub model: Model,
    pub data: Data,
    pub train: Train,
    #[serde(default)]
    pub optimizer: Optimizer,
    #[serde(default)]
    pub schedule: Schedule,
    #[serde(default)]
    pub memory: Memory,
    #[serde(default)]
    pub eval: Eval,
    #[serde(default)]
    pub checkpoint: Checkpoint,
    #[serde(default)]
    pub log: Log,
}

fn seed() -> u64 {
    42
}

/// The default of `name` is another for every file.
fn no_default(schema: &mut schemars::Schema) {
    schema.remove("default");
}

impl Job {
    /// The resolved job as TOML: itself a valid job, equal to this one wherever it lies.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a job holds only what TOML can: i64 integers, string keys")
    }

    /// The resolved job as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a job holds only what JSON can: string keys")
    }
}
