//! Sets of tables in files.

use super::{Failure, Sets};
use crate::data::Opening;
use crate::data::table::{self, Delimiter, Dialect, Files, Format, OnMissing, OnUnknown, Settings, Task};
use crate::job::{self, Loading, OnBadRecord};

pub(super) fn csv(s: &job::Csv, loading: &Loading, opening: &Opening) -> Result<Sets, Failure> {
    let delimiter = match s.delimiter {
        job::Delimiter::Comma => Delimiter::Byte(b','),
        job::Delimiter::Semicolon => Delimiter::Byte(b';'),
        job::Delimiter::Bar => Delimiter::Byte(b'|'),
        job::Delimiter::Tab => Delimiter::Byte(b'\t'),
        job::Delimiter::Space => Delimiter::Spaces,
    };
    let dialect = Dialect { delimiter, header: s.header, skip_lines: s.skip_lines };
    open(&s.files, Format::Csv(dialect), &s.columns, loading, opening)
}

pub(super) fn parquet(s: &job::Parquet, loading: &Loading, opening: &Opening) -> Result<Sets, Failure> {
    open(&s.files, Format::Parquet, &s.columns, loading, opening)
}

fn open(
    files: &job::Files,
    format: Format,
    columns: &job::Columns,
    loading: &Loading,
    opening: &Opening,
) -> Result<Sets, Failure> {
    let files =
        Files { train: files.train.clone(), valid: files.valid.clone(), valid_share: files.valid_share };
    let settings = Settings {
        target: columns.target.list(),
        columns: columns.columns.clone(),
        ignore: columns.ignore.clone(),
        categorical: columns.categorical.clone(),
        numeric: columns.numeric.clone(),
        task: match columns.task {
            job::Task::Auto => Task::Auto,
            job::Task::Classes => Task::Classes,
            job::Task::Values => Task::Values,
        },
        classes: columns.classes.clone(),
        embed: columns.encode == job::Encode::Embed,
        missing: columns.missing.clone(),
        on_missing: match columns.on_missing {
            job::OnMissing::Error => OnMissing::Error,
            job::OnMissing::Mean => OnMissing::Mean,
            job::OnMissing::Zero => OnMissing::Zero,
        },
        missing_flags: columns.missing_flags,
        on_unknown: match columns.on_unknown {
            job::OnUnknown::Zeros => OnUnknown::Zeros,
            job::OnUnknown::Error => OnUnknown::Error,
        },
        max_categories: columns.max_categories,
        trim: columns.trim.clone(),
        standardise: columns.standardise,
        skip_bad: loading.on_bad_record == OnBadRecord::Skip,
    };
    let (train, valid) = table::open(&files, format, &settings, opening)?;
    Ok(Sets { train, valid })
}
