//! Tabular datasets from files: csv, JSON and Parquet.

use std::path::PathBuf;
use std::sync::Arc;

use super::inference::Samples;
use super::{Datasets, Failure};
use crate::data::split::SplitSettings;
use crate::data::table::{
    self, CommentSetting, DateOrder, DecimalMark, DialectSettings, FieldDelimiter, MissingPolicy,
    TableFileFormat, TableFiles, TableSchema, TableSettings, TableTask, TextEncoding, UnknownPolicy,
};
use crate::data::{Dataset, DatasetContext};
use crate::job::{self, FilesConfig, Job, LoaderConfig, OnBadRecord, SourceConfig};
use crate::metrics::task::TargetScale;

/// The table of a job: its files, their format, and what the job says of the columns.
pub struct TableSource<'a> {
    pub files: &'a FilesConfig,
    pub split: SplitSettings,
    pub format: TableFileFormat,
    pub settings: TableSettings,
}

impl<'a> TableSource<'a> {
    /// `None` if the job's data is no table.
    pub fn of(job: &'a Job) -> Option<Self> {
        let loading = &job.data.loader;
        let split = |files| super::split_settings(&job.data.source, files);
        match &job.data.source {
            SourceConfig::Csv(s) => Some(Self {
                files: &s.files,
                split: split(&s.files),
                format: TableFileFormat::Csv(csv_dialect(s)),
                settings: csv_settings(s, loading),
            }),
            SourceConfig::Json(s) => Some(Self {
                files: &s.files,
                split: split(&s.files),
                format: TableFileFormat::Json,
                settings: settings(&s.columns, loading),
            }),
            SourceConfig::Parquet(s) => Some(Self {
                files: &s.files,
                split: split(&s.files),
                format: TableFileFormat::Parquet,
                settings: settings(&s.columns, loading),
            }),
            _ => None,
        }
    }

    pub(super) fn open(&self, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let files = TableFiles {
            train: self.files.train.clone(),
            valid: self.files.valid.clone(),
            test: self.files.test.clone(),
            split: self.split.clone(),
        };
        Ok(table::open(&files, self.format, &self.settings, opening)?)
    }

    /// Rows for a trained model, encoded by its schema.
    pub(super) fn open_trained(
        &self,
        schema: &TableSchema,
        samples: Samples,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let schema = &schema.without_weight();
        let open = |files: &[PathBuf], schema: &TableSchema, part| {
            table::open_with_schema(files, self.format, &self.settings, schema, part, opening)
        };
        Ok(match samples {
            Samples::Labelled(files) => open(files, schema, None)?,
            Samples::Unlabelled(files) => open(files, &schema.inputs(), None)?,
            Samples::Set(set) => open(&self.files.train, schema, Some((&self.split, set)))?,
        })
    }
}

fn csv_dialect(s: &job::CsvConfig) -> DialectSettings {
    let delimiter = match s.delimiter {
        job::Delimiter::Auto => None,
        job::Delimiter::Comma => Some(FieldDelimiter::Byte(b',')),
        job::Delimiter::Semicolon => Some(FieldDelimiter::Byte(b';')),
        job::Delimiter::Bar => Some(FieldDelimiter::Byte(b'|')),
        job::Delimiter::Tab => Some(FieldDelimiter::Byte(b'\t')),
        job::Delimiter::Space => Some(FieldDelimiter::Whitespace),
    };
    DialectSettings {
        delimiter,
        header: s.header,
        skip_lines: s.skip_lines,
        quote: match s.quote {
            job::Quote::Auto => None,
            job::Quote::Double => Some(b'"'),
            job::Quote::Single => Some(b'\''),
        },
        comment: match s.comment {
            job::Comment::Auto => CommentSetting::Auto,
            job::Comment::None => CommentSetting::None,
            job::Comment::Hash => CommentSetting::Byte(b'#'),
            job::Comment::Percent => CommentSetting::Byte(b'%'),
        },
        encoding: match s.encoding {
            job::Encoding::Auto => None,
            job::Encoding::Utf8 => Some(TextEncoding::Utf8),
            job::Encoding::Latin1 => Some(TextEncoding::Latin1),
            job::Encoding::Utf16 => Some(TextEncoding::Utf16 { big_endian: false }),
        },
    }
}

fn csv_settings(s: &job::CsvConfig, loading: &LoaderConfig) -> TableSettings {
    TableSettings {
        decimal: match s.decimal {
            job::Decimal::Auto => None,
            job::Decimal::Point => Some(DecimalMark::Point),
            job::Decimal::Comma => Some(DecimalMark::Comma),
        },
        dates: match s.dates {
            job::Dates::Auto => None,
            job::Dates::DayFirst => Some(DateOrder::DayFirst),
            job::Dates::MonthFirst => Some(DateOrder::MonthFirst),
        },
        ..settings(&s.columns, loading)
    }
}

fn settings(columns: &job::ColumnsConfig, loading: &LoaderConfig) -> TableSettings {
    TableSettings {
        target: columns.target.to_vec(),
        weight: columns.weight.clone(),
        label_separator: columns.label_separator.clone(),
        columns: columns.columns.clone(),
        ignore: columns.ignore.clone(),
        group: columns.group.clone(),
        categorical: columns.categorical.clone(),
        numeric: columns.numeric.clone(),
        task: match columns.task {
            job::Task::Auto => TableTask::Auto,
            job::Task::Classes => TableTask::Classification,
            job::Task::Labels => TableTask::MultiLabel,
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
        ..TableSettings::default()
    }
}

/// Name, mean and standard deviation of each of `len` regression targets.
pub fn target_scales(job: &Job, schema: Option<&TableSchema>, len: usize) -> Vec<TargetScale> {
    match (schema, TableSource::of(job)) {
        (Some(schema), Some(source)) => {
            let predicted = schema.columns.iter().filter(|column| column.target && !column.weight);
            let scales = schema.target_scales(&source.settings).into_iter();
            let scale = |(name, (mean, std))| TargetScale { name, mean, std };
            predicted.map(|column| column.name.clone()).zip(scales).map(scale).collect()
        }
        _ => (0..len).map(|i| TargetScale { name: format!("target {i}"), mean: 0.0, std: 1.0 }).collect(),
    }
}
