//! Opens the training, the validation and the test set that a job's `[data]` describes. One file per family of source
//! kinds.

mod generated;
pub mod images;
pub mod inference;
mod language;
pub mod tables;

use std::path::PathBuf;
use std::sync::Arc;

use super::Failure;
use crate::data::fingerprint::{FingerprintInput, InputKind};
use crate::data::language::tokenizer::settings_files;
use crate::data::split::{Fold, SplitMethod, SplitSettings, ValidSet};
use crate::data::{DataError, Dataset, DatasetContext, TestSet, files, table};
use crate::job::{self, Job, SplitKind};
use crate::models::ModelError;

pub use crate::data::Datasets;

/// Source of the job's chat template, if its data are chats.
pub fn chat_template(job: &Job) -> Result<Option<String>, Failure> {
    match &job.data.source {
        job::SourceConfig::Jsonl(s) if s.messages.is_some() || s.chat.is_some() => {
            Ok(language::template_source(s)?)
        }
        _ => Ok(None),
    }
}

/// The files of settings that were published beside the job's tokenizer.
pub fn tokenizer_settings(job: &Job) -> Vec<PathBuf> {
    let tokenizer = match &job.data.source {
        job::SourceConfig::Text(s) => language::tokenizer_file(&s.tokens),
        job::SourceConfig::Jsonl(s) => language::tokenizer_file(&s.tokens),
        job::SourceConfig::Tokens(s) => s.tokenizer.clone(),
        _ => None,
    };
    tokenizer.iter().flat_map(|file| settings_files(file)).collect()
}

impl Datasets {
    /// Opens all sets.
    pub fn open(job: &Job, opening: &DatasetContext) -> Result<Self, Failure> {
        if let Some(table) = tables::TableSource::of(job) {
            return table.open(opening);
        }
        let split = |files| split_settings(&job.data.source, files);
        match &job.data.source {
            job::SourceConfig::Csv(_) | job::SourceConfig::Json(_) | job::SourceConfig::Parquet(_) => {
                unreachable!("a table was opened above")
            }
            job::SourceConfig::Shapes(s) => generated::shapes(s, readers(job), opening),
            job::SourceConfig::Idx(s) => images::idx(s, readers(job), opening),
            job::SourceConfig::Images(s) => images::images(s, &split(&s.files), readers(job), opening),
            job::SourceConfig::Text(s) => language::text(s, split(&s.files), context(job)?, opening),
            job::SourceConfig::Tokens(s) => language::tokens(s, split(&s.files), context(job)?, opening),
            job::SourceConfig::Jsonl(s) => {
                language::jsonl(s, split(&s.files), &job.data.loader, context(job)?, opening)
            }
            job::SourceConfig::TextSynthetic(s) => Ok(generated::sequences(s, context(job)?, opening)),
        }
    }

    /// Everything the samples are made from, for the data fingerprint; each input carries the job key that names it.
    pub fn inputs(job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        match &job.data.source {
            job::SourceConfig::Idx(s) => Ok(images::idx_inputs(s)),
            job::SourceConfig::Images(s) => images::inputs(s),
            job::SourceConfig::Csv(job::CsvConfig { files, .. })
            | job::SourceConfig::Json(job::JsonConfig { files, .. }) => file_inputs(files),
            job::SourceConfig::Parquet(s) => inputs_of(&s.files, table::resolve_parquet_files),
            job::SourceConfig::Text(s) => {
                Ok([file_inputs(&s.files)?, language::tokens_inputs(&s.tokens)].concat())
            }
            job::SourceConfig::Tokens(s) => {
                let tokenizer =
                    s.tokenizer.iter().flat_map(|file| language::tokenizer_inputs(TOKENIZER, file));
                Ok(file_inputs(&s.files)?.into_iter().chain(tokenizer).collect())
            }
            job::SourceConfig::Jsonl(s) => {
                let more = [language::tokens_inputs(&s.tokens), language::template_inputs(&s.template)];
                Ok([file_inputs(&s.files)?, more.concat()].concat())
            }
            // Generated data depends only on these settings and the seed.
            job::SourceConfig::Shapes(_) | job::SourceConfig::TextSynthetic(_) => {
                let settings = serde_json::to_string(&job.data.source).unwrap_or_default();
                let text = format!("{} {settings}", job.seed);
                Ok(vec![FingerprintInput { key: "data", kind: InputKind::Settings(text) }])
            }
        }
    }

    fn new<T: Dataset + 'static>(train: impl Dataset + 'static, valid: T, test: Option<T>) -> Self {
        let test = test.map(|test| TestSet::Open(Arc::new(test)));
        Self { train: Arc::new(train), valid: Arc::new(valid), test }
    }
}

/// How the job splits the samples of its training files.
fn split_settings(source: &job::SourceConfig, files: &job::FilesConfig) -> SplitSettings {
    let valid = match files.fold {
        Some(fold) => ValidSet::Fold(Fold { index: fold.number - 1, folds: fold.of }),
        None if files.valid.is_empty() => ValidSet::Fraction(files.valid_fraction()),
        None => ValidSet::OwnFiles,
    };
    let method = match source.split() {
        (_, Some(group)) => SplitMethod::Grouped(group.to_owned()),
        (SplitKind::Random, None) => SplitMethod::Random,
        (SplitKind::Stratified, None) => SplitMethod::Stratified,
        (SplitKind::Last, None) => SplitMethod::Last,
    };
    SplitSettings { test_fraction: files.test_fraction.unwrap_or(0.0), valid, method }
}

const TRAIN: &str = "data.train";
const VALID: &str = "data.valid";
const TEST: &str = "data.test";
const TOKENIZER: &str = "data.tokenizer";

/// Every training file, and every validation and test file that the job lists.
fn file_inputs(files: &job::FilesConfig) -> Result<Vec<FingerprintInput>, Failure> {
    inputs_of(files, files::resolve_patterns)
}

fn inputs_of(
    files: &job::FilesConfig,
    resolve: fn(&[PathBuf]) -> Result<Vec<PathBuf>, DataError>,
) -> Result<Vec<FingerprintInput>, Failure> {
    let mut inputs = Vec::new();
    for (key, patterns) in [(TRAIN, &files.train), (VALID, &files.valid), (TEST, &files.test)] {
        inputs.extend(resolve(patterns)?.into_iter().map(|file| FingerprintInput::file(key, file)));
    }
    Ok(inputs)
}

/// Number of reader threads.
fn readers(job: &Job) -> usize {
    match job.data.loader.workers {
        0 => rayon::current_num_threads(),
        workers => workers,
    }
}

/// Tokens per sample. Text takes it from the model's context length.
fn context(job: &Job) -> Result<usize, Failure> {
    let no_context =
        || ModelError::Data { kind: job.model.kind(), needs: "numbers or pictures", got: "text".into() };
    Ok(job.model.context().ok_or_else(no_context)?)
}
