//! Tabular datasets from files: csv, JSON and Parquet.

use std::path::PathBuf;
use std::sync::Arc;

use super::inference::{Samples, TrainedModelData};
use super::{Datasets, Failure, Source, file_inputs, inputs_of, split_settings};
use crate::data::fingerprint::FingerprintInput;
use crate::data::split::SplitSettings;
use crate::data::table::{
    self, CommentSetting, DateOrder, DecimalMark, DialectSettings, FieldDelimiter, MissingPolicy,
    TableFileFormat, TableFiles, TableSchema, TableSettings, TableTask, TextEncoding, UnknownPolicy,
};
use crate::data::transforms::Augmentation;
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
    fn csv(s: &'a job::CsvConfig, job: &Job) -> Self {
        let settings = csv_settings(s, &job.data.loader);
        Self::new(job, &s.files, TableFileFormat::Csv(csv_dialect(s)), settings)
    }

    fn json(s: &'a job::JsonConfig, job: &Job) -> Self {
        Self::new(job, &s.files, TableFileFormat::Json, settings(&s.columns, &job.data.loader))
    }

    fn parquet(s: &'a job::ParquetConfig, job: &Job) -> Self {
        Self::new(job, &s.files, TableFileFormat::Parquet, settings(&s.columns, &job.data.loader))
    }

    fn new(job: &Job, files: &'a FilesConfig, format: TableFileFormat, settings: TableSettings) -> Self {
        Self { files, split: split_settings(job, files), format, settings }
    }

    fn open(&self, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let files = TableFiles {
            train: self.files.train.clone(),
            valid: self.files.valid.clone(),
            test: self.files.test.clone(),
            split: self.split.clone(),
        };
        Ok(table::open(&files, self.format, &self.settings, opening)?)
    }

    /// Rows for a trained model, encoded by its schema.
    fn open_trained(
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

/// Every kind of table opens its [`TableSource`].
macro_rules! table_kinds {
    ($($kind:ident($config:ty) => ($table:path, $inputs:expr),)*) => {
        impl<'a> TableSource<'a> {
            /// `None` if the job's data is no table.
            pub fn of(job: &'a Job) -> Option<Self> {
                match &job.data.source {
                    $(SourceConfig::$kind(s) => Some($table(s, job)),)*
                    _ => None,
                }
            }
        }
        $(
        impl Source for $config {
            fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
                $table(self, job).open(opening)
            }

            fn inputs(&self, _job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
                $inputs(&self.files)
            }

            fn open_trained(
                &self,
                trained: &TrainedModelData,
                samples: Samples,
                _augmentation: Augmentation,
                opening: &DatasetContext,
            ) -> Result<Arc<dyn Dataset>, Failure> {
                $table(self, trained.job).open_trained(trained.schema()?, samples, opening)
            }
        }
        )*
    };
}

table_kinds! {
    Csv(job::CsvConfig) => (TableSource::csv, file_inputs),
    Json(job::JsonConfig) => (TableSource::json, file_inputs),
    Parquet(job::ParquetConfig) => (TableSource::parquet, |files| inputs_of(files, table::resolve_parquet_files)),
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
