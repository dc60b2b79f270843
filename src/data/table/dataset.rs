//! Opens the sets of a table from files and settings.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::arrow_file::{self, ArrowFile};
use super::columns::{self, CellParser, Column, ColumnKind};
use super::csv::{CsvDataset, CsvTable, TableHeader};
use super::dialect::{Dialect, RowFormat};
use super::dialect_detection::DialectSettings;
use super::encoding::RowEncoder;
use super::inference::ColumnInference;
use super::parquet::{ParquetDataset, ParquetFiles};
use super::schema::TableSchema;
use super::sequential_table::{SequentialDataset, SequentialTable};
use super::split_keys::RowSplit;
use super::statistics::{ColumnStatistics, StatisticsPass, TableStatistics};
use super::text_encoding::TextEncoding;
use super::{MissingPolicy, TableReader, TableSettings, parquet_partitions};
use crate::base::regular_file;
use crate::base::units::counted;
use crate::cache::CacheKey;
use crate::files::{self, FileCompression};
use crate::split::{self, DatasetSplit, SplitPlan, SplitSettings, Subset, TrainFiles};
use crate::streaming::{ShardedDataset, StreamingDataset};
use crate::{DataError, Dataset, DatasetContext, Datasets};

/// Where the rows are.
#[derive(Clone, Debug)]
pub struct TableFiles {
    /// File names or glob patterns.
    pub train: Vec<PathBuf>,
    /// If empty, some of the rows of `train` are the validation set.
    pub valid: Vec<PathBuf>,
    /// If empty, there is no test set, or it is some of the rows of `train`.
    pub test: Vec<PathBuf>,
    /// How the rows of `train` are split.
    pub split: SplitSettings,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFileFormat {
    Csv(DialectSettings),
    Json,
    Parquet,
}

impl TableFileFormat {
    /// The files that names and patterns stand for.
    pub fn resolve(self, patterns: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
        match self {
            Self::Parquet => parquet_partitions::resolve_files(patterns),
            Self::Csv(_) | Self::Json => files::resolve_patterns(patterns),
        }
    }
}

/// A format whose dialect is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenFormat {
    /// Rows of text, or read as such.
    Rows(Dialect),
    Parquet,
}

impl OpenFormat {
    pub fn detect(format: TableFileFormat, first: &Path) -> Result<Self, DataError> {
        Ok(match format {
            TableFileFormat::Csv(settings) => Self::Rows(settings.detect(first)?),
            TableFileFormat::Json => Self::Rows(Dialect::of_records(RowFormat::Json)),
            TableFileFormat::Parquet if arrow_file::is_arrow(&first_bytes(first)?) => {
                Self::Rows(Dialect::of_records(RowFormat::Arrow))
            }
            TableFileFormat::Parquet => Self::Parquet,
        })
    }

    fn encoding(self) -> TextEncoding {
        match self {
            Self::Rows(dialect) => dialect.encoding,
            Self::Parquet => TextEncoding::Utf8,
        }
    }
}

fn first_bytes(file: &Path) -> Result<Vec<u8>, DataError> {
    let mut start = Vec::new();
    let opened = regular_file::open(file).map_err(DataError::io(file))?;
    opened.take(8).read_to_end(&mut start).map_err(DataError::io(file))?;
    Ok(start)
}

/// A set of rows.
pub type DatasetRef = Arc<dyn Dataset>;

/// Opens all sets.
pub fn open(
    files: &TableFiles,
    format: TableFileFormat,
    settings: &TableSettings,
    ctx: &DatasetContext,
) -> Result<Datasets, DataError> {
    let resolve = |patterns: &[PathBuf]| format.resolve(patterns);
    let paths = resolve(&files.train)?;
    let file_format = format;
    let format = OpenFormat::detect(file_format, &paths[0])?;
    let mut train = OpenedTable::open(&paths, format, ctx)?;
    train.check_width(&paths[0], format)?;
    let parser = CellParser::of_settings(settings, format.encoding());
    let mut selected = columns::select_columns(
        &paths[0],
        &train.names,
        &train.infer_columns(&paths[0], format, &parser, settings, ctx)?,
        settings,
    )?;
    selected.remarks.warnings.extend(train.unread_partitions(&paths[0]));
    selected.remarks.warnings.extend(train.numeric_header(format));
    let columns = &selected.columns[..];
    let split_plan = match files.split.is_whole() {
        true => None,
        false => {
            let (paths, parser, split) = (&paths[..], &parser, &files.split);
            Some(train.split_plan(&RowSplit { paths, format, columns, parser, settings, split }, ctx)?)
        }
    };
    train.measure_readers(columns, ctx)?;
    let names = train.names.clone();
    let open_other = |patterns: &[PathBuf]| {
        let paths = resolve(patterns)?;
        let format = OpenFormat::detect(file_format, &paths[0])?;
        let table = OpenedTable::open(&paths, format, ctx)?;
        Ok::<_, DataError>((table, paths, format))
    };
    let others = [&files.valid, &files.test].map(|patterns| match patterns.is_empty() {
        true => Ok(None),
        false => open_other(patterns).map(Some),
    });
    let [valid, test] = others;
    let (valid, test) = (valid?, test?);
    let statistics = if needs_statistics(settings, columns) {
        let pass = StatisticsPass {
            file: &paths[0],
            columns,
            parser: &parser,
            settings,
            split_plan: split_plan.as_ref(),
            observer: &*ctx.observer,
        };
        Some(load_statistics(&pass, &paths, format, train.reader(), ctx)?)
    } else {
        None
    };
    let schema = TableSchema::new(selected.columns, &names, statistics);
    // Other files may have their columns in another order, and others between them.
    let into_other = |(mut table, paths, format): (OpenedTable, Vec<PathBuf>, OpenFormat)| {
        let schema = schema.located(&paths[0], &table.names)?;
        table.measure_readers(&schema.columns, ctx)?;
        let parser = CellParser::of_settings(settings, format.encoding());
        let encoder = RowEncoder::new(&paths[0], schema, &selected.remarks, parser, settings)?;
        Ok::<_, DataError>(table.into_dataset(&Arc::new(encoder), None, None))
    };
    let (valid, test) = (valid.map(into_other).transpose()?, test.map(into_other).transpose()?);
    let encoder = Arc::new(RowEncoder::new(&paths[0], schema.clone(), &selected.remarks, parser, settings)?);
    // The class counts cover the training rows, which are all rows of the files only if these are not split.
    let balance = encoder.class_counts.clone().filter(|_| split_plan.is_none());
    let train = train.into_dataset(&encoder, balance, Some(ctx.shuffle_buffer));
    let files = TrainFiles { others: train.clone(), train };
    Ok(split::job_datasets(files, split_plan, valid, test))
}

/// Opens files whose rows are encoded as those of another table were, in the order of the files: all rows or, with
/// `part`, those of one set of a split.
pub fn open_with_schema(
    files: &[PathBuf],
    format: TableFileFormat,
    settings: &TableSettings,
    schema: &TableSchema,
    part: Option<(&SplitSettings, DatasetSplit)>,
    ctx: &DatasetContext,
) -> Result<DatasetRef, DataError> {
    let paths = format.resolve(files)?;
    let format = OpenFormat::detect(format, &paths[0])?;
    let mut table = OpenedTable::open(&paths, format, ctx)?;
    let schema = schema.located(&paths[0], &table.names)?;
    let parser = CellParser::of_settings(settings, format.encoding());
    let plan = match part {
        Some((split, set)) => {
            let (paths, columns, parser) = (&paths[..], &schema.columns[..], &parser);
            let rows = RowSplit { paths, format, columns, parser, settings, split };
            Some((table.split_plan(&rows, ctx)?, set))
        }
        None => None,
    };
    table.measure_readers(&schema.columns, ctx)?;
    let encoder = Arc::new(RowEncoder::new(&paths[0], schema, &Default::default(), parser, settings)?);
    let rows = table.into_dataset(&encoder, None, None);
    Ok(match plan {
        Some((plan, set)) => Arc::new(Subset::alone(rows, plan, set)),
        None => rows,
    })
}

/// Whether a pass over the training rows is needed before the first sample can be encoded.
fn needs_statistics(settings: &TableSettings, columns: &[Column]) -> bool {
    columns.iter().any(|column| match (column.kind, column.target) {
        (ColumnKind::Number, _) if settings.standardise => true,
        (ColumnKind::Number, false) => settings.on_missing == MissingPolicy::Mean || settings.missing_flags,
        (ColumnKind::Number, true) => false,
        (ColumnKind::Category, false) => true,
        (ColumnKind::Category | ColumnKind::Labels, _) => settings.classes.is_empty(),
        (ColumnKind::Flag, _) => true,
    })
}

/// Statistics of the training rows, from the cache if possible. A failed cache write costs time only.
fn load_statistics(
    pass: &StatisticsPass<'_>,
    paths: &[PathBuf],
    format: OpenFormat,
    reader: &dyn TableReader,
    ctx: &DatasetContext,
) -> Result<TableStatistics, DataError> {
    let split = pass.split_plan.map(SplitPlan::cache_settings);
    let how = format!("{format:?} {:?} {:?} {split:?}", pass.columns, pass.settings);
    let cache_key = CacheKey::new(paths, &how)?;
    let kept = ctx.cache.find("table-statistics", cache_key).and_then(|path| std::fs::read(path).ok());
    if let Some(kept) = kept.and_then(|kept| serde_json::from_slice::<TableStatistics>(&kept).ok()) {
        return Ok(kept);
    }
    ctx.check_memory(pass.file, reader.scan_bytes())?;
    let parallel = ctx.available_bytes() / reader.scan_bytes().max(1);
    let statistics = pass.run(reader, parallel.clamp(1, 1 << 16) as usize)?;
    let all_zero = |(column, found): (&Column, &ColumnStatistics)| {
        column.weight && matches!(found, ColumnStatistics::Number(moments) if moments.mean == 0.0)
    };
    if statistics.rows > 0 && pass.columns.iter().zip(&statistics.columns).any(all_zero) {
        return Err(DataError::Table {
            file: pass.file.to_owned(),
            place: String::new(),
            problem: "all sample weights are 0: there is nothing to learn from".into(),
            hint: "name another column in `weight`, or remove the key",
        });
    }
    if statistics.rows == 0 {
        let (set, why) = (
            format!("`{}`", pass.file.display()),
            format!("{} cannot be used", counted(statistics.skipped_rows, "row")),
        );
        return Err(DataError::NoSamples { set, why });
    }
    let keep = serde_json::to_vec(&statistics).unwrap_or_default();
    drop(ctx.cache.get_or_create("table-statistics", cache_key, |out| {
        out.write_all(&keep).map_err(DataError::write(pass.file))
    }));
    Ok(statistics)
}

/// Checks that two files have the same columns in the same order.
pub fn check_same_columns(
    first: &Path,
    names: &[String],
    other: &Path,
    other_names: &[String],
) -> Result<(), DataError> {
    if names == other_names {
        return Ok(());
    }
    let problem = match names.iter().zip(other_names).position(|(a, b)| a != b) {
        Some(i) => {
            let (a, b) =
                (super::display_value(names[i].as_bytes()), super::display_value(other_names[i].as_bytes()));
            format!("its column {} is `{b}`, but that of `{}` is `{a}`", i + 1, first.display())
        }
        None => {
            format!("it has {} columns, and `{}` has {}", other_names.len(), first.display(), names.len())
        }
    };
    Err(DataError::Table {
        file: other.to_owned(),
        place: String::new(),
        problem,
        hint: "all files of a job must have the same columns in the same order",
    })
}

/// Opened files, before the encoding of their cells is known.
pub(super) struct OpenedTable {
    pub(super) names: Vec<String>,
    backend: TableBackend,
}

enum TableBackend {
    Csv { text: CsvTable, header: TableHeader },
    Sequential { rows: SequentialTable, header: TableHeader },
    Parquet(ParquetFiles),
}

impl OpenedTable {
    fn open(paths: &[PathBuf], format: OpenFormat, ctx: &DatasetContext) -> Result<Self, DataError> {
        let table = match format {
            OpenFormat::Parquet => {
                let parquet = ParquetFiles::open(paths, ctx)?;
                Self { names: parquet.names.clone(), backend: TableBackend::Parquet(parquet) }
            }
            OpenFormat::Rows(dialect) => Self::csv(paths, dialect, ctx)?,
        };
        if table.reader().rows() == 0 {
            let why = match format {
                OpenFormat::Rows(Dialect { header: true, .. }) => "it has a header but no rows",
                _ => "it has no rows",
            };
            return Err(DataError::NoSamples { set: format!("`{}`", paths[0].display()), why: why.into() });
        }
        Ok(table)
    }

    fn csv(paths: &[PathBuf], dialect: Dialect, ctx: &DatasetContext) -> Result<Self, DataError> {
        if dialect.rows == RowFormat::Arrow {
            // The rows of several files are counted at once, each with a batch in memory.
            let at_once = paths.len().min(rayon::current_num_threads()) as u64;
            for path in paths {
                ctx.check_memory(path, ArrowFile::open(path)?.reader_bytes()?.saturating_mul(at_once))?;
            }
        }
        let mut headers: Vec<TableHeader> = Vec::new();
        let mut is_sequential = false;
        for path in paths {
            let head = TableHeader::read(path, dialect)?;
            if let Some(first) = headers.first() {
                check_same_columns(&paths[0], &first.names, path, &head.names)?;
            }
            is_sequential |=
                files::compression(path)?.0 != FileCompression::Uncompressed || dialect.is_sequential();
            headers.push(head);
        }
        let names = headers[0].names.clone();
        let reader = if is_sequential {
            let rows = SequentialTable::open(paths, &headers, dialect, ctx)?;
            TableBackend::Sequential { rows, header: headers.swap_remove(0) }
        } else {
            let text = CsvTable::open(paths, &headers, dialect, ctx)?;
            TableBackend::Csv { text, header: headers.swap_remove(0) }
        };
        Ok(Self { names, backend: reader })
    }

    /// Refuses a text table that has no room for inputs and a target.
    fn check_width(&self, first: &Path, format: OpenFormat) -> Result<(), DataError> {
        match (&self.backend, format) {
            (
                TableBackend::Csv { header, .. } | TableBackend::Sequential { header, .. },
                OpenFormat::Rows(dialect),
            ) => header.check_width(first, dialect),
            _ => Ok(()),
        }
    }

    /// A warning about columns in the path of a text file, which only Parquet files have.
    fn unread_partitions(&self, first: &Path) -> Option<String> {
        let is_parquet = matches!(self.backend, TableBackend::Parquet(_));
        let mut keys = parquet_partitions::partitions(first).into_iter().map(|(key, _)| key);
        let key = keys.find(|key| !is_parquet && !self.names.contains(key))?;
        Some(format!(
            "`{key}` in the path of `{}` is no column: partitions are read for Parquet files only",
            first.display()
        ))
    }

    /// A warning about a header that looks like a row.
    fn numeric_header(&self, format: OpenFormat) -> Option<String> {
        let has_header =
            matches!(format, OpenFormat::Rows(dialect) if dialect.header && !dialect.is_sequential());
        let is_number = |name: &String| name.parse::<f64>().is_ok();
        (has_header && self.names.iter().all(is_number)).then(|| {
            "all names in the header are numbers: if it is a row of the table, set `header = false`".into()
        })
    }

    pub(super) fn reader(&self) -> &dyn TableReader {
        match &self.backend {
            TableBackend::Csv { text, .. } => text,
            TableBackend::Sequential { rows, .. } => rows,
            TableBackend::Parquet(parquet) => parquet,
        }
    }

    /// Finds what reading the columns in use takes, if that depends on the files.
    pub(super) fn measure_readers(
        &mut self,
        columns: &[Column],
        ctx: &DatasetContext,
    ) -> Result<(), DataError> {
        match &mut self.backend {
            TableBackend::Parquet(parquet) => parquet.measure_readers(columns, ctx),
            TableBackend::Csv { .. } | TableBackend::Sequential { .. } => Ok(()),
        }
    }

    fn infer_columns(
        &self,
        first: &Path,
        format: OpenFormat,
        parser: &CellParser,
        settings: &TableSettings,
        ctx: &DatasetContext,
    ) -> Result<Vec<ColumnInference>, DataError> {
        match (&self.backend, format) {
            (
                TableBackend::Csv { header: head, .. } | TableBackend::Sequential { header: head, .. },
                OpenFormat::Rows(dialect),
            ) => head.infer_columns(first, dialect, parser, &settings.target),
            (TableBackend::Parquet(parquet), _) => parquet.infer_columns(parser, &settings.target, ctx),
            (_, OpenFormat::Parquet) => unreachable!("the backend matches its format"),
        }
    }

    /// `buffer_bytes` is the shuffle buffer of a dataset that is read sequentially; `None` reads in file order.
    fn into_dataset(
        self,
        encoder: &Arc<RowEncoder>,
        balance: Option<Vec<u64>>,
        buffer_bytes: Option<u64>,
    ) -> DatasetRef {
        let encoder = encoder.clone();
        match self.backend {
            TableBackend::Csv { text, .. } => {
                Arc::new(CsvDataset { table: text, encoder, class_counts: balance })
            }
            TableBackend::Sequential { rows, .. } => streaming_dataset(
                SequentialDataset { table: rows, encoder, class_counts: balance },
                buffer_bytes,
            ),
            TableBackend::Parquet(parquet) => {
                streaming_dataset(ParquetDataset::new(parquet, encoder, balance), buffer_bytes)
            }
        }
    }
}

fn streaming_dataset(shards: impl ShardedDataset + 'static, buffer: Option<u64>) -> DatasetRef {
    let shards = Arc::new(shards);
    Arc::new(match buffer {
        Some(buffer) => StreamingDataset::new(shards, buffer),
        None => StreamingDataset::sequential(shards),
    })
}
