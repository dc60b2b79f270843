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
mod transformer;

use std::io::Read;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::de::DeTable;

pub use change::Change;
pub use data::{Data, Loading, Shapes, Source};
pub use error::{Code, Error, Errors};
pub use memory::{Memory, Rung};
pub use model::{Activation, Cnn, Mlp, Model, Stage};
pub use optimizer::{Adamw, Constant, Cosine, Linear, Onecycle, Optimizer, Schedule, Sgd, Step};
pub use page::page;
pub use progress::{Best, Checkpoint, Eval, Every, Log, Metric};
pub use schema::schema;
pub use source::Place;
pub use train::{Length, Precision, Train};
pub use transformer::{Bert, Gpt, Llama, Vit};

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
        let shown = path.display();
        let unreadable =
            |why: String| Error::new(Code::Unreadable, format!("cannot read the job `{shown}`: {why}"));
        let refuse = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                unreadable("no such file".into()).hint("`trainer init -o job.toml` writes one".to_owned())
            }
            std::io::ErrorKind::IsADirectory => unreadable("it is a folder".into()),
            _ => unreadable(error.to_string()),
        };
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(refuse)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(unreadable("it is over 1 MiB, too large for a job".into()).into());
        }
        match str::from_utf8(&bytes) {
            Ok(text) => Job::parse(text, path, sets),
            Err(error) => {
                let start = error.valid_up_to();
                let end = start + error.error_len().unwrap_or(1);
                let mut sources = source::Sources::default();
                sources.add(&shown.to_string(), &String::from_utf8_lossy(&bytes));
                let message = format!("the job is not UTF-8 text: byte {:#04x}", bytes[start]);
                let error = Error { place: sources.place(start..end), ..Error::new(Code::Syntax, message) };
                Err(error.into())
            }
        }
    }

    /// The job in `text`, which is or could be the file at `path`: that names it and is where its
    /// relative paths start.
    pub fn parse(text: &str, path: &Path, sets: &[String]) -> Result<Job, Errors> {
        let mut sources = source::Sources::default();
        sources.add(&path.display().to_string(), text);
        let (mut tree, broken) = DeTable::parse_recoverable(text);
        let syntax = |e: &toml::de::Error| {
            (e.span().unwrap_or(0..0), Error::new(Code::Syntax, e.message().to_lowercase()))
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
        // What is about the whole file, such as a missing table, has no line to show.
        let place = |span: std::ops::Range<usize>| if span == (0..0) { None } else { sources.place(span) };
        Err(Errors(found.into_iter().map(|(span, error)| Error { place: place(span), ..error }).collect()))
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

    fn parse(text: &str, sets: &[&str]) -> Result<Job, Errors> {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        Job::parse(text, Path::new("tiny.toml"), &sets)
    }

    const TINY: &str = "[model]\nkind = 'mlp'\n[data]\nkind = 'shapes'\n[train]\nepochs = 1\n";

    #[test]
    fn a_small_job_gets_every_default() {
        let job = parse(TINY, &[]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((job.name.as_str(), job.seed), ("tiny", 42));
        assert_eq!(job.train.length(), Length::Epochs(1));
        assert_eq!(job.eval.every(), Every::Epochs(1));
    }
}
