//! Tabular datasets from files: CSV and Parquet.

use super::{Datasets, Failure};
use crate::data::DatasetContext;
use crate::data::table::{
    self, Dialect, FieldDelimiter, MissingPolicy, TableFileFormat, TableFiles, TableSettings, TableTask,
    UnknownPolicy,
};
use crate::job::{self, LoaderConfig, OnBadRecord};

pub(super) fn csv(
    s: &job::CsvConfig,
    loading: &LoaderConfig,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    let delimiter = match s.delimiter {
        job::Delimiter::Comma => FieldDelimiter::Byte(b','),
        job::Delimiter::Semicolon => FieldDelimiter::Byte(b';'),
        job::Delimiter::Bar => FieldDelimiter::Byte(b'|'),
        job::Delimiter::Tab => FieldDelimiter::Byte(b'\t'),
        job::Delimiter::Space => FieldDelimiter::Whitespace,
    };
    let dialect = Dialect { delimiter, header: s.header, skip_lines: s.skip_lines };
    open(&s.files, TableFileFormat::Csv(dialect), &s.columns, loading, opening)
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
    let settings = TableSettings {
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
    };
    let (train, valid) = table::open(&files, format, &settings, opening)?;
    Ok(Datasets { train, valid })
}
