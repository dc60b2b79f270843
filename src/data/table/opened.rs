//! From files and settings to a training and a validation set.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::columns::{self, Column, Kind, Look, Reading};
use super::csv::{Csv, Head, Text};
use super::dialect::Dialect;
use super::encoding::Encoding;
use super::packed::{Packed, PackedCsv};
use super::parquet::{Parquet, ParquetTable};
use super::statistics::{Pass, Statistics};
use super::{OnMissing, Raw, Settings};
use crate::data::cache::Fingerprint;
use crate::data::files::{self, Packing};
use crate::data::split::{self, Plan};
use crate::data::stream::{Shards, Streamed};
use crate::data::{DataError, Opening, Source};

/// Where the rows lie.
#[derive(Clone, Debug)]
pub struct Files {
    /// Names or patterns.
    pub train: Vec<PathBuf>,
    /// Where empty, `valid_share` of the rows of `train` is measured on.
    pub valid: Vec<PathBuf>,
    pub valid_share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Csv(Dialect),
    Parquet,
}

/// A set: the training one, or the one measured on.
pub type Set = Arc<dyn Source>;

/// Opens a table: the training and the validation set.
pub fn open(
    files: &Files,
    format: Format,
    settings: &Settings,
    opening: &Opening,
) -> Result<(Set, Set), DataError> {
    let paths = files::find(&files.train)?;
    let train = Table::open(&paths, format, opening)?;
    let reading = Reading::new(&settings.missing, &settings.trim);
    let columns = columns::choose(
        &paths[0],
        &train.names,
        &train.looks(&paths[0], format, &reading, settings)?,
        settings,
    )?;
    let valid = match &files.valid[..] {
        [] => None,
        patterns => {
            let valid_paths = files::find(patterns)?;
            let valid = Table::open(&valid_paths, format, opening)?;
            same_columns(&paths[0], &train.names, &valid_paths[0], &valid.names)?;
            Some(valid)
        }
    };
    let plan = match valid {
        None => Some(Plan::new(train.raw().rows(), files.valid_share, opening.seed)?),
        Some(_) => None,
    };
    let statistics = if needed(settings, &columns) {
        let pass = Pass {
            file: &paths[0],
            columns: &columns,
            reading: &reading,
            settings,
            plan,
            watch: &*opening.watch,
        };
        Some(gathered(&pass, &paths, format, train.raw(), opening)?)
    } else {
        None
    };
    let encoding = Arc::new(Encoding::new(&paths[0], &columns, reading, settings, statistics.as_ref())?);
    // Classes were counted in the training rows, which are all of these only where others are measured on.
    let balance = encoding.balance.clone().filter(|_| valid.is_some());
    let train = train.source(&encoding, balance, Some(opening.shuffle_buffer));
    match valid {
        Some(valid) => Ok((train, valid.source(&encoding, None, None))),
        None => {
            let (train, valid) = split::split(train, files.valid_share, opening.seed)?;
            Ok((Arc::new(train), Arc::new(valid)))
        }
    }
}

/// Whether the training rows must be read before the first sample can be made.
fn needed(settings: &Settings, columns: &[Column]) -> bool {
    columns.iter().any(|column| match (column.kind, column.target) {
        (Kind::Number, _) if settings.standardise => true,
        (Kind::Number, false) => settings.on_missing == OnMissing::Mean || settings.missing_flags,
        (Kind::Number, true) => false,
        (Kind::Category, false) => true,
        (Kind::Category, true) => settings.classes.is_empty(),
    })
}

/// The statistics of the training rows, from the cache where they were found before. A cache that cannot be
/// written costs time only.
fn gathered(
    pass: &Pass<'_>,
    paths: &[PathBuf],
    format: Format,
    raw: &dyn Raw,
    opening: &Opening,
) -> Result<Statistics, DataError> {
    let how = format!("{format:?} {:?} {:?} {:?}", pass.columns, pass.settings, pass.plan);
    let of = Fingerprint::of(paths, &how)?;
    let kept = opening.cache.find("table-statistics", of).and_then(|path| std::fs::read(path).ok());
    if let Some(kept) = kept.and_then(|kept| serde_json::from_slice::<Statistics>(&kept).ok()) {
        return Ok(kept);
    }
    let statistics = pass.over(raw)?;
    if statistics.rows == 0 {
        let (set, why) =
            (format!("`{}`", pass.file.display()), format!("{} rows cannot be used", statistics.left_out));
        return Err(DataError::NoSamples { set, why });
    }
    let keep = serde_json::to_vec(&statistics).unwrap_or_default();
    drop(
        opening
            .cache
            .get("table-statistics", of, |out| out.write_all(&keep).map_err(DataError::writing(pass.file))),
    );
    Ok(statistics)
}

/// That two files have the same columns in the same order.
pub fn same_columns(
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
            let (a, b) = (super::shown(names[i].as_bytes()), super::shown(other_names[i].as_bytes()));
            format!("its column {} is `{b}`, and that of `{}` is `{a}`", i + 1, first.display())
        }
        None => {
            format!("it has {} columns, and `{}` has {}", other_names.len(), first.display(), names.len())
        }
    };
    Err(DataError::Table {
        file: other.to_owned(),
        place: String::new(),
        problem,
        hint: "all files of a set, those measured on too, must have the same columns in the same order",
    })
}

/// Files that were opened, but for what their cells mean.
struct Table {
    names: Vec<String>,
    reader: Reader,
}

enum Reader {
    Text { text: Text, head: Head },
    Packed { packed: Packed, head: Head },
    Parquet(Parquet),
}

impl Table {
    fn open(paths: &[PathBuf], format: Format, opening: &Opening) -> Result<Self, DataError> {
        let table = match format {
            Format::Parquet => {
                let parquet = Parquet::open(paths)?;
                Self { names: parquet.names.clone(), reader: Reader::Parquet(parquet) }
            }
            Format::Csv(dialect) => Self::csv(paths, dialect, opening)?,
        };
        if table.raw().rows() == 0 {
            let why = match format {
                Format::Csv(Dialect { header: true, .. }) => "it has a header and no rows",
                _ => "it has no rows",
            };
            return Err(DataError::NoSamples { set: format!("`{}`", paths[0].display()), why: why.into() });
        }
        Ok(table)
    }

    fn csv(paths: &[PathBuf], dialect: Dialect, opening: &Opening) -> Result<Self, DataError> {
        let mut heads: Vec<Head> = Vec::new();
        let mut packed = false;
        for path in paths {
            let head = Head::read(path, dialect)?;
            if let Some(first) = heads.first() {
                same_columns(&paths[0], &first.names, path, &head.names)?;
            }
            packed |= files::packing(path)?.0 != Packing::Plain;
            heads.push(head);
        }
        let names = heads[0].names.clone();
        let reader = if packed {
            let packed = Packed::open(paths, &heads, dialect, opening)?;
            Reader::Packed { packed, head: heads.swap_remove(0) }
        } else {
            let text = Text::open(paths, &heads, dialect, opening)?;
            Reader::Text { text, head: heads.swap_remove(0) }
        };
        Ok(Self { names, reader })
    }

    fn raw(&self) -> &dyn Raw {
        match &self.reader {
            Reader::Text { text, .. } => text,
            Reader::Packed { packed, .. } => packed,
            Reader::Parquet(parquet) => parquet,
        }
    }

    fn looks(
        &self,
        first: &Path,
        format: Format,
        reading: &Reading,
        settings: &Settings,
    ) -> Result<Vec<Look>, DataError> {
        match (&self.reader, format) {
            (Reader::Text { head, .. } | Reader::Packed { head, .. }, Format::Csv(dialect)) => {
                head.looks(first, dialect, reading, &settings.target)
            }
            (Reader::Parquet(parquet), _) => parquet.looks(reading, &settings.target),
            (_, Format::Parquet) => unreachable!("a reader is made by its format"),
        }
    }

    /// `buffer` is the memory in which rows are mixed, where they are.
    fn source(self, encoding: &Arc<Encoding>, balance: Option<Vec<u64>>, buffer: Option<u64>) -> Set {
        let encoding = encoding.clone();
        match self.reader {
            Reader::Text { text, .. } => Arc::new(Csv { text, encoding, balance }),
            Reader::Packed { packed, .. } => streamed(PackedCsv { packed, encoding, balance }, buffer),
            Reader::Parquet(parquet) => streamed(ParquetTable::new(parquet, encoding, balance), buffer),
        }
    }
}

fn streamed(shards: impl Shards + 'static, buffer: Option<u64>) -> Set {
    let shards = Arc::new(shards);
    Arc::new(match buffer {
        Some(buffer) => Streamed::new(shards, buffer),
        None => Streamed::in_order(shards),
    })
}
