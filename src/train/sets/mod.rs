//! From a job's `[data]` to the opened training and validation set: one file for each family of kinds.

mod generated;
mod language;
mod pictures;
mod tables;

use std::sync::Arc;

use super::Failure;
use crate::data::fingerprint::{Input, Kind};
use crate::data::{Opening, Source, files};
use crate::job::{self, Job};
use crate::models::ModelError;

/// The training and the validation set.
pub struct Sets {
    pub train: Arc<dyn Source>,
    pub valid: Arc<dyn Source>,
}

impl Sets {
    /// Opens the data.
    pub fn open(job: &Job, opening: &Opening) -> Result<Self, Failure> {
        match &job.data.source {
            job::Source::Shapes(s) => generated::shapes(s, readers(job), opening),
            job::Source::Idx(s) => pictures::idx(s, readers(job), opening),
            job::Source::Images(s) => pictures::images(s, readers(job), opening),
            job::Source::Csv(s) => tables::csv(s, &job.data.loading, opening),
            job::Source::Parquet(s) => tables::parquet(s, &job.data.loading, opening),
            job::Source::Text(s) => language::text(s, context(job)?, opening),
            job::Source::Tokens(s) => language::tokens(s, context(job)?, opening),
            job::Source::Jsonl(s) => language::jsonl(s, &job.data.loading, context(job)?, opening),
            job::Source::TextSynthetic(s) => Ok(generated::sequences(s, context(job)?, opening)),
        }
    }

    /// What the samples of a job are made from, by the keys that name it.
    pub fn inputs(job: &Job) -> Result<Vec<Input>, Failure> {
        match &job.data.source {
            job::Source::Idx(s) => Ok(pictures::idx_inputs(s)),
            job::Source::Images(s) => pictures::inputs(s),
            job::Source::Csv(job::Csv { files, .. }) | job::Source::Parquet(job::Parquet { files, .. }) => {
                listed(files)
            }
            job::Source::Text(s) => Ok([listed(&s.files)?, language::tokens_inputs(&s.tokens)].concat()),
            job::Source::Tokens(s) => {
                let tokenizer =
                    s.tokenizer.iter().flat_map(|file| language::tokenizer_inputs(TOKENIZER, file));
                Ok(listed(&s.files)?.into_iter().chain(tokenizer).collect())
            }
            job::Source::Jsonl(s) => {
                let more = [language::tokens_inputs(&s.tokens), language::template_inputs(&s.template)];
                Ok([listed(&s.files)?, more.concat()].concat())
            }
            // All that decides them is in the job.
            job::Source::Shapes(_) | job::Source::TextSynthetic(_) => {
                let settings = serde_json::to_string(&job.data.source).unwrap_or_default();
                let text = format!("{} {settings}", job.seed);
                Ok(vec![Input { key: "data", kind: Kind::Settings(text) }])
            }
        }
    }

    fn of(train: impl Source + 'static, valid: impl Source + 'static) -> Self {
        Self { train: Arc::new(train), valid: Arc::new(valid) }
    }
}

const TRAIN: &str = "data.train";
const VALID: &str = "data.valid";
const TOKENIZER: &str = "data.tokenizer";

/// Every file of a set, and of the validation set where that has its own.
fn listed(files: &job::Files) -> Result<Vec<Input>, Failure> {
    let mut inputs = Vec::new();
    for (key, patterns) in [(TRAIN, &files.train), (VALID, &files.valid)] {
        inputs.extend(files::find(patterns)?.into_iter().map(|file| Input::file(key, file)));
    }
    Ok(inputs)
}

/// Threads that read samples.
fn readers(job: &Job) -> usize {
    match job.data.loading.workers {
        0 => rayon::current_num_threads(),
        workers => workers,
    }
}

/// Tokens in a sample, which text takes from the model.
fn context(job: &Job) -> Result<usize, Failure> {
    let refuse =
        || ModelError::Data { kind: job.model.kind(), needs: "numbers or pictures", got: "text".into() };
    Ok(job.model.context().ok_or_else(refuse)?)
}
