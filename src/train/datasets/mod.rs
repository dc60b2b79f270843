//! Opens the training, the validation and the test set that a job's `[data]` describes. One file per family of source
//! kinds; `source_of` is the only list of them.

mod generated;
pub mod images;
pub mod inference;
mod language;
pub mod tables;

use std::path::PathBuf;
use std::sync::Arc;

use self::inference::{Samples, TrainedModelData};
use super::Failure;
use crate::data::fingerprint::{FingerprintInput, InputKind};
use crate::data::language::tokenizer::settings_files;
use crate::data::split::{FoldIndex, SplitMethod, SplitSettings, ValidSet};
use crate::data::transforms::Augmentation;
use crate::data::{DataError, Dataset, DatasetContext, Datasets, files};
use crate::job::{self, Job, SplitKind};
use crate::models::ModelError;

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

/// A kind of `[data]`, implemented by its keys.
trait Source {
    /// Opens all sets.
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure>;

    /// Everything the samples are made from, for the data fingerprint; each input carries the job key that names it.
    fn inputs(&self, job: &Job) -> Result<Vec<FingerprintInput>, Failure>;

    /// Opens samples for a trained model, encoded as its training samples were. A set whose samples are all of its
    /// files comes as [`Samples::Labelled`]. Only images are augmented.
    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure>;
}

fn source_of(job: &Job) -> &dyn Source {
    match &job.data.source {
        job::SourceConfig::Shapes(s) => s,
        job::SourceConfig::Idx(s) => s,
        job::SourceConfig::Images(s) => s,
        job::SourceConfig::Csv(s) => s,
        job::SourceConfig::Json(s) => s,
        job::SourceConfig::Parquet(s) => s,
        job::SourceConfig::Text(s) => s,
        job::SourceConfig::Tokens(s) => s,
        job::SourceConfig::Jsonl(s) => s,
        job::SourceConfig::TextSynthetic(s) => s,
    }
}

/// Opens all sets.
pub fn open(job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
    source_of(job).open(job, &DatasetContext { workers: readers(job), ..opening.clone() })
}

/// Everything the samples are made from, for the data fingerprint; each input carries the job key that names it.
pub fn inputs(job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
    source_of(job).inputs(job)
}

/// How the job splits the samples of its training files.
fn split_settings(job: &Job, files: &job::FilesConfig) -> SplitSettings {
    let valid = match files.fold {
        Some(fold) => ValidSet::Fold(FoldIndex { index: fold.number - 1, folds: fold.of }),
        None if files.valid.is_empty() => ValidSet::Fraction(files.valid_fraction()),
        None => ValidSet::OwnFiles,
    };
    let method = match job.data.source.split() {
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

/// Of generated data, which depends only on these settings and the seed.
fn generated_inputs(job: &Job) -> Vec<FingerprintInput> {
    let settings = serde_json::to_string(&job.data.source).unwrap_or_default();
    let text = format!("{} {settings}", job.seed);
    vec![FingerprintInput { key: "data", kind: InputKind::Settings(text) }]
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
        || ModelError::Data { kind: job.model.kind(), needs: "numbers or images", got: "text".into() };
    Ok(job.model.context().ok_or_else(no_context)?)
}
