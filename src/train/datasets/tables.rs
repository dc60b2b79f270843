//! Tabular datasets from files: CSV and Parquet.

use std::path::PathBuf;
use std::sync::Arc;

use super::inference::Samples;
use super::{Datasets, Failure};
use crate::data::table::{
    self, Dialect, FieldDelimiter, MissingPolicy, TableFileFormat, TableFiles, TableSchema, TableSettings,
    TableTask, UnknownPolicy,
};
use crate::data::{Dataset, DatasetContext, split};
use crate::job::{self, Job, LoaderConfig, OnBadRecord};

pub(super) fn csv(
    s: &job::CsvConfig,
    loading: &LoaderConfig,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    open(&s.files, csv_format(s), &s.columns, loading, opening)
}

pub fn csv_format(s: &job::CsvConfig) -> TableFileFormat {
    let delimiter = match s.delimiter {
        job::Delimiter::Comma => FieldDelimiter::Byte(b','),
        job::Delimiter::Semicolon => FieldDelimiter::Byte(b';'),
        job::Delimiter::Bar => FieldDelimiter::Byte(b'|'),
        job::Delimiter::Tab => FieldDelimiter::Byte(b'\t'),
        job::Delimiter::Space => FieldDelimiter::Whitespace,
    };
    TableFileFormat::Csv(Dialect { delimiter, header: s.header, skip_lines: s.skip_lines })
}

pub(super) fn parquet(
    s: &job::ParquetConfig,
    loading: &LoaderConfig,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    open(&s.files, TableFileFormat::Parquet, &s.columns, loading, opening)
}

fn open(
    files: &job::FilesConfig,
    format: TableFileFormat,
    columns: &job::ColumnsConfig,
    loading: &LoaderConfig,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    let files = TableFiles {
        train: files.train.clone(),
        valid: files.valid.clone(),
        valid_fraction: files.valid_fraction,
    };
    let (train, valid) = table::open(&files, format, &table_settings(columns, loading), opening)?;
    Ok(Datasets { train, valid })
}

/// Rows for a trained model, encoded by its schema.
pub(super) fn open_trained(
    format: TableFileFormat,
    files: &job::FilesConfig,
    columns: &job::ColumnsConfig,
    job: &Job,
    schema: &TableSchema,
    samples: Samples,
    opening: &DatasetContext,
) -> Result<Arc<dyn Dataset>, Failure> {
    let settings = table_settings(columns, &job.data.loader);
    let open = |files: &[PathBuf], schema: &TableSchema| {
        table::open_with_schema(files, format, &settings, schema, opening)
    };
    Ok(match samples {
        Samples::Labelled(files) => open(files, schema)?,
        Samples::Unlabelled(files) => open(files, &schema.inputs())?,
        Samples::Valid if !files.valid.is_empty() => open(&files.valid, schema)?,
        Samples::Valid => {
            let (_, valid) =
                split::random_split(open(&files.train, schema)?, files.valid_fraction, job.seed)?;
            Arc::new(valid)
        }
    })
}

/// What the job says of the columns.
pub fn table_settings(columns: &job::ColumnsConfig, loading: &LoaderConfig) -> TableSettings {
    TableSettings {
        target: columns.target.to_vec(),
        columns: columns.columns.clone(),
        ignore: columns.ignore.clone(),
        categorical: columns.categorical.clone(),
        numeric: columns.numeric.clone(),
        task: match columns.task {
            job::Task::Auto => TableTask::Auto,
            job::Task::Classes => TableTask::Classification,
            job::Task::Values => TableTask::Regression,
        },
        classes: columns.classes.clone(),
        embed: columns.encode == job::CategoryEncoding::Embed,
        missing: columns.missing.clone(),
        on_missing: match columns.on_missing {
            job::OnMissing::Error => MissingPolicy::Error,
            job::OnMissing::Mean => MissingPolicy::Mean,
            job::OnMissing::Zero => MissingPolicy::Zero,
        },
        missing_flags: columns.missing_flags,
        on_unknown: match columns.on_unknown {
            job::OnUnknown::Zeros => UnknownPolicy::Zeros,
            job::OnUnknown::Error => UnknownPolicy::Error,
        },
        max_categories: columns.max_categories,
        trim: columns.trim.clone(),
        standardise: columns.standardise,
        skip_bad: loading.on_bad_record == OnBadRecord::Skip,
    }
}
