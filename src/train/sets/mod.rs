//! From a job's `[data]` to the opened training and validation set: one file for each family of kinds.

mod generated;
mod language;
mod pictures;

use std::sync::Arc;

use super::Failure;
use crate::data::{Opening, Source};
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
            job::Source::Text(s) => language::text(s, context(job)?, opening),
            job::Source::Tokens(s) => language::tokens(s, context(job)?, opening),
            job::Source::Jsonl(s) => language::jsonl(s, &job.data.loading, context(job)?, opening),
            job::Source::TextSynthetic(s) => Ok(generated::sequences(s, context(job)?, opening)),
        }
    }

    fn of(train: impl Source + 'static, valid: impl Source + 'static) -> Self {
        Self { train: Arc::new(train), valid: Arc::new(valid) }
    }
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
