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
mod memory;
mod model;
mod optimizer;
mod page;
mod progress;
mod rules;
mod schema;
mod set;
mod source;
mod train;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::de::DeTable;

pub use change::Change;
pub use data::{Data, Loading, Shapes, Source};
pub use error::{Code, Error, Errors};
pub use memory::{Memory, Rung};
pub use model::{Activation, Cnn, Mlp, Model, Stage};
pub use optimizer::{Adamw, Constant, Decay, Onecycle, Optimizer, Schedule, Sgd, Step};
pub use page::page;
pub use progress::{Best, Checkpoint, Eval, Every, Log, Metric};
pub use schema::schema;
use source::Sources;
pub use source::{Place, Spot};
pub use train::{Length, Precision, Train};

/// A job file larger than this is no job file.
const MAX_BYTES: u64 = 1 << 20;

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
    /// Reads the job at `path` with each of `sets` (`key.path=value`) put over it.
    pub fn load(path: &Path, sets: &[String]) -> Result<Job, Errors> {
        let mut sources = Sources::default();
        let unreadable = |why: &str| Error {
            place: Some(Place { file: path.display().to_string(), spot: None }),
            ..Error::new(Code::Unreadable, format!("cannot read the job: {why}"))
        };
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
        read.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                unreadable("no such file").hint("`trainer init -o job.toml` writes one".to_owned())
            }
            ErrorKind::IsADirectory => unreadable("it is a folder"),
            _ => unreadable(&error.to_string()),
        })?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(unreadable("it is over 1 MiB, too large for a job").into());
        }
        let Err(error) = str::from_utf8(&bytes) else {
            return Job::parse(&String::from_utf8_lossy(&bytes), path, sets);
        };
        let start = error.valid_up_to();
        sources.add(&path.display().to_string(), &String::from_utf8_lossy(&bytes));
        let message = format!("the job is not UTF-8 text: byte {:#04x}", bytes[start]);
        Err(Error { place: sources.place(start..start + 1), ..Error::new(Code::Syntax, message) }.into())
    }

    /// The job in `text`, which is or could be the file at `path`: that names it and is where its
    /// relative paths start.
    pub fn parse(text: &str, path: &Path, sets: &[String]) -> Result<Job, Errors> {
        let mut sources = Sources::default();
        sources.add(&path.display().to_string(), text);
        let (mut tree, broken) = DeTable::parse_recoverable(text);
        let syntax = |e: &toml::de::Error| {
            (e.span().unwrap_or(source::WHOLE), Error::new(Code::Syntax, e.message().to_lowercase()).into())
        };
        let mut found: Vec<check::Found> = broken.iter().map(syntax).collect();
        let schema = schema();
        for set in sets {
            let start = sources.add("--set", &format!("--set {set}")) + "--set ".len();
            found.extend(set::apply(set, start, &mut tree, &schema).err());
        }
        if found.is_empty() {
            let folder = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            found = check::check(&mut tree, &schema, folder.parent().unwrap_or(Path::new("/")));
        }
        if found.is_empty() {
            match Job::deserialize(toml::de::Deserializer::from(tree.clone())) {
                Ok(mut job) => {
                    found = rules::contradictions(&job, tree.get_ref());
                    if found.is_empty() {
                        if job.name.is_empty() {
                            let stem = path.file_stem().unwrap_or_default();
                            job.name = check::name_from(&stem.to_string_lossy());
                        }
                        job.eval.resolve();
                        job.checkpoint.resolve();
                        return Ok(job);
                    }
                }
                Err(error) => found.push(syntax(&error)),
            }
        }
        found.sort_by_key(|(span, _)| span.start);
        let placed = |(span, error): check::Found| Error { place: sources.place(span), ..*error };
        Err(Errors(found.into_iter().map(placed).collect()))
    }

    /// The resolved job as TOML: itself a valid job, equal to this one wherever it lies.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a job holds only what TOML can: i64 integers, string keys")
    }

    /// The resolved job as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a job holds only what JSON can: string keys")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str, sets: &[&str]) -> Result<Job, Errors> {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        Job::parse(text, Path::new("tiny.toml"), &sets)
    }

    const TINY: &str = "[model]\nkind = 'mlp'\n[data]\nkind = 'shapes'\n[train]\nepochs = 1\n";

    fn load(text: &str, sets: &[&str]) -> Job {
        parse(text, sets).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn a_small_job_gets_every_default() {
        let job = load(TINY, &[]);
        assert_eq!((job.name.as_str(), job.seed), ("tiny", 42));
        assert_eq!(job.train.length(), Length::Epochs(1));
        assert_eq!(job.eval.every(), Every::Epochs(1));
        assert_eq!(job.checkpoint.every(), Every::Epochs(1));
        assert_eq!(job.optimizer, Optimizer::Adamw(Adamw::default()));
    }

    #[test]
    fn the_command_line_decides_between_keys_that_exclude_each_other() {
        let job = load(TINY, &["train.steps=3", "checkpoint.every_minutes=5", "eval.every_steps=2"]);
        assert_eq!(job.train.length(), Length::Steps(3));
        assert_eq!(job.checkpoint.every(), Every::Minutes(5));
        assert_eq!(job.eval.every(), Every::Steps(2));
        let both = parse(TINY, &["train.steps=3", "train.epochs=4"]).unwrap();
        assert_eq!(both.train.length(), Length::Epochs(4), "the last one wins");
    }

    #[test]
    fn a_default_kind_need_not_be_named() {
        let Optimizer::Adamw(adamw) = load(TINY, &["optimizer.lr=0.5"]).optimizer else { panic!() };
        assert_eq!(adamw, Adamw { lr: 0.5, ..Adamw::default() });
        assert_eq!(load(&format!("{TINY}[schedule]\nwarmup_steps = 7"), &[]).schedule.warmup_steps(), 7);
    }

    #[test]
    fn a_set_reaches_into_lists() {
        let cnn = TINY.replace("'mlp'", "'cnn'\nstages = [{channels = 4}, {channels = 8}]");
        let Model::Cnn(model) = load(&cnn, &["model.stages.1.channels=16"]).model else { panic!() };
        assert_eq!(model.stages[1].channels, 16);
        assert!(parse(&cnn, &["model.stages.2.channels=16"]).is_err());
    }

    #[test]
    fn a_byte_order_mark_is_no_mistake() {
        assert_eq!(load(&format!("\u{feff}{TINY}"), &[]), load(TINY, &[]));
    }

    #[test]
    fn a_number_past_64_bits_is_out_of_range() {
        let errors = parse(TINY, &["seed=9223372036854775808"]).unwrap_err();
        assert_eq!(errors.0[0].code, Code::OutOfRange);
        assert_eq!(load(TINY, &["seed=9223372036854775807"]).seed, i64::MAX as u64);
    }

    fn model() -> impl Strategy<Value = Vec<String>> {
        let hidden = prop::collection::vec(1usize..2000, 0..4);
        let activation = prop::sample::select(vec!["relu", "gelu", "gelu_tanh", "silu"]);
        let stages = prop::collection::vec((1usize..200, 1usize..8, 1usize..4, 1usize..4), 1..4);
        (any::<bool>(), hidden, activation, 0.0..1.0f64, stages).prop_map(
            |(cnn, hidden, act, dropout, stages)| {
                let stage = |(c, k, s, p)| format!("{{channels={c}, kernel={k}, stride={s}, pool={p}}}");
                let stages: Vec<String> = stages.into_iter().map(stage).collect();
                let mut sets = vec![
                    format!("model.hidden={hidden:?}"),
                    format!("model.activation={act}"),
                    format!("model.dropout={dropout}"),
                ];
                if cnn {
                    sets.extend(["model.kind=cnn".into(), format!("model.stages=[{}]", stages.join(", "))]);
                }
                sets
            },
        )
    }

    fn rest() -> impl Strategy<Value = Vec<String>> {
        let length = prop::sample::select(vec!["train.epochs=3", "train.steps=5000"]);
        let every =
            prop::sample::select(vec!["eval.every_steps=9", "checkpoint.every_minutes=3", "name=a.b-c"]);
        let optimizer =
            prop::sample::select(vec!["optimizer={kind='sgd', momentum=0.9, nesterov=true}", "seed=1"]);
        let schedule = prop::sample::select(vec![
            "schedule={kind='step', every_steps=10}",
            "schedule={kind='onecycle', div=3}",
            "schedule={kind='linear', final_lr_ratio=0.1}",
        ]);
        let ram = prop_oneof![
            (0u64..1 << 50).prop_map(|b| format!("memory.ram={b}B")),
            Just("memory.ram=3.5%".into())
        ];
        (length, every, optimizer, schedule, ram, 1e-9..1.0f64).prop_map(|(a, b, c, d, ram, clip)| {
            let clip = format!("train.clip_norm={clip}");
            [a, b, c, d].map(String::from).into_iter().chain([ram, clip]).collect()
        })
    }

    proptest! {
        /// The job written to a run's folder is a valid job, and the same one.
        #[test]
        fn a_resolved_job_loads_as_itself(model in model(), rest in rest()) {
            let sets: Vec<String> = model.into_iter().chain(rest).collect();
            let job = Job::parse(TINY, Path::new("tiny.toml"), &sets).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let again = Job::parse(&job.to_toml(), Path::new("/runs/other.toml"), &[]);
            prop_assert_eq!(again.map_err(|e| TestCaseError::fail(e.to_string()))?, job);
        }
    }
}
