//! From a seed to a job: TOML over the whole schema, and a description of the data files it needs. Pure: writes and
//! runs nothing.
//!
//! Jobs are valid by construction. What a job may not be is stated here, once, as a rule with its reason. A case that
//! failed once is a rule too, drawn more often than chance would.

mod compression;
mod formats;
mod language;
mod model;
mod settings;
mod source;

use toml::{Table, Value};

use super::data::DataSpec;
use super::draw::Draw;

/// Size of the jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// About a second per run in a development build on a CPU.
    Small,
    /// A few seconds per run on a GPU.
    Large,
}

impl Scale {
    pub fn either<T>(self, small: T, large: T) -> T {
        if self == Scale::Small { small } else { large }
    }
}

/// A job, its data, and its disturbances.
#[derive(Clone, Debug)]
pub struct GeneratedJob {
    pub seed: u64,
    pub job: Table,
    pub files: DataSpec,
    /// Threads of the CPU kernels.
    pub threads: usize,
    /// `train.init` names weights that a first run of the same model, with another seed, must write.
    pub needs_initial_weights: bool,
    /// `distill.teacher` names a run of the same job that must be made first.
    pub needs_teacher: bool,
    pub disturbance: Option<Disturbance>,
}

/// A budget and a kill, for every third job.
#[derive(Clone, Debug)]
pub struct Disturbance {
    /// The budget as a fraction of the job's planned peak.
    pub budget_fraction: f64,
    pub kill: KillMode,
    /// Where in the run to kill it, as a fraction of its updates.
    pub kill_at: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillMode {
    /// SIGKILL to the worker: its supervisor starts another.
    Worker,
    /// SIGKILL to the whole run at a step, then `--resume`.
    Whole,
    /// SIGKILL to the supervisor from outside, wherever the run is, then `--resume`.
    Signal,
}

/// The shape of a sample, as far as a model must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleShape {
    /// A row of a table, for dense layers.
    Row,
    /// (height, width, channels).
    Image([usize; 3]),
    /// At most `context` tokens.
    Tokens { context: usize },
}

/// `[model]` and `[data]`, with what the other tables must know about them.
struct ModelAndData {
    model: Table,
    data: Table,
    files: DataSpec,
    /// Training samples; approximate for text.
    train_samples: usize,
    /// Whether targets are classes; otherwise values or tokens.
    classes: bool,
    /// Limit on updates, from the cost of one.
    most_updates: usize,
    batch_size: usize,
}

pub const MODELS: [&str; 9] = ["mlp", "cnn", "gpt", "llama", "bert", "vit", "resnet", "mobilenet", "layers"];

/// The job of a seed.
pub fn case(seed: u64, scale: Scale) -> GeneratedJob {
    // Consecutive seeds, as many as there are models, have every model once; disturbances rotate over them.
    let models = MODELS.len() as u64;
    let (block, place) = (seed / models, (seed % models) as usize);
    let mut draw = Draw::new(seed, "job");
    let disturbed = (block + place as u64).is_multiple_of(3);
    // A budget is only meaningful if samples take more memory than the program itself.
    let heavy = disturbed && scale == Scale::Small && draw.chance(0.5);
    let mut parts = source::model_and_data(&mut draw, scale, MODELS[place], heavy);
    formats::choose(&mut Draw::new(seed, "formats"), &mut parts);
    formats::choose_targets(&mut Draw::new(seed, "targets"), &mut parts);
    let trial = disturbed.then(|| Disturbance {
        budget_fraction: draw.pick(&[0.9, 0.7, 0.5]),
        kill: draw.pick(&[KillMode::Worker, KillMode::Whole, KillMode::Signal]),
        kill_at: draw.float(0.0, 1.0),
    });
    settings::case(&mut draw, scale, seed, parts, trial)
}

/// Chainable setters for the keys of a table.
trait TableExt {
    fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self;
    fn number(&mut self, key: &str, value: usize) -> &mut Self;
}

impl TableExt for Table {
    fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.insert(key.into(), value.into());
        self
    }

    fn number(&mut self, key: &str, value: usize) -> &mut Self {
        self.set(key, value as i64)
    }
}

fn int_array(values: &[usize]) -> Value {
    Value::Array(values.iter().map(|&value| Value::Integer(value as i64)).collect())
}

fn string_array(values: &[String]) -> Value {
    Value::Array(values.iter().map(|value| Value::String(value.clone())).collect())
}

fn table_of_kind(kind: &str) -> Table {
    let mut table = Table::new();
    table.set("kind", kind);
    table
}
