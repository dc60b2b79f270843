//! Decodes the rows of a Parquet row group: each column in use once, in batches, as cells.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::tz::TimeZone;
use parquet::basic::Compression;
use parquet::column::reader::{ColumnReader, get_column_reader};
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};

use super::checked_pages::{CheckedPages, DeltaTextSizes};
use super::columns::{Column, ListElement};
use super::parquet_values::{ColumnValues, ValueFormat};
use super::parquet_zones::LeafZones;
use super::{CellValue, RowCells, parquet_pages, time_zone};
use crate::DataError;
use crate::base::regular_file;

/// Maximum cells decoded at once, so that wide tables decode fewer rows at a time: 16 MB.
const MAX_BATCH_CELLS: usize = 1 << 20;
/// Rows decoded at once.
pub const BATCH_ROWS: usize = 1024;
/// Bytes of a code.
pub const CODE_BYTES: usize = 8;
/// A row group of at most this many rows is decoded column by column when it is opened: its values take less memory
/// than as many open columns do.
const WHOLE_GROUP_ROWS: u64 = 512;
/// Bytes of an open column besides its pages and values: the library's reader, its decoders and their buffers.
const OPEN_COLUMN_BYTES: u64 = 6 << 10;

/// Opens columns of one file.
struct ColumnOpener {
    /// A file handle per reader of rows: the library seeks before every read.
    file: Arc<File>,
    headers: BufReader<File>,
}

impl ColumnOpener {
    fn new(path: &Path) -> Result<Self, ParquetError> {
        let headers = BufReader::with_capacity(1 << 12, regular_file::open(path)?);
        Ok(Self { file: Arc::new(regular_file::open(path)?), headers })
    }

    /// Checks the pages of a column before they are decoded.
    fn open(&mut self, chunk: &ColumnChunkMetaData, rows: u64) -> Result<ColumnReader, ParquetError> {
        let (start, length) = chunk.byte_range();
        parquet_pages::check_pages(&mut self.headers, start, length)?;
        let pages = CheckedPages::new(self.file.clone(), chunk, rows as usize)?;
        Ok(get_column_reader(chunk.column_descr_ptr(), Box::new(pages)))
    }
}

/// Opens one column of a file.
pub fn open_column(
    path: &Path,
    chunk: &ColumnChunkMetaData,
    rows: u64,
) -> Result<ColumnReader, ParquetError> {
    ColumnOpener::new(path)?.open(chunk, rows)
}

/// Calls the library, which panics on some corrupt files, and turns a panic into an error.
pub fn catch_panic<T>(run: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    crate::base::panics::catch_panic(run)
        .unwrap_or_else(|_| Err(ParquetError::General("the decoder panicked".into())))
}

pub fn corrupt_file(path: &std::path::Path, error: ParquetError) -> DataError {
    DataError::Corrupt { file: path.to_owned(), source: Arc::new(std::io::Error::other(error.to_string())) }
}

/// One column of a row group, and the values decoded last.
struct ColumnChunk {
    /// `None` once all values are decoded. Boxed: of very many columns that are decoded, only the values remain.
    reader: Option<Box<ColumnReader>>,
    format: ValueFormat,
    values: ColumnValues,
    /// Of points in time, which are then read as its clock shows them. Boxed: most of very many columns have none.
    zone: Option<Box<TimeZone>>,
}

impl ColumnChunk {
    fn decode_batch(&mut self, count: usize) -> Result<(), ParquetError> {
        if let Some(reader) = &mut self.reader {
            self.values = ColumnValues::decode(reader, self.format, count)?;
            if let (Some(zone), ColumnValues::Numbers(seconds)) = (&self.zone, &mut self.values) {
                seconds.iter_mut().for_each(|x| *x += ahead(zone, *x));
            }
        }
        Ok(())
    }
}

/// Seconds that the clock of a zone is ahead of UTC. Whole seconds that were stored as nanoseconds are a little less.
fn ahead(zone: &TimeZone, seconds: f64) -> f64 {
    time_zone::offset_seconds(zone, (seconds + 1e-3).floor() as i64) as f64
}

/// Where a cell of a row comes from.
#[derive(Clone, Copy)]
pub enum CellSource {
    Chunk {
        chunk: u32,
        element: u32,
    },
    /// The path of the file.
    Partition(u32),
}

/// The leaf columns that cells come from, each once.
pub struct LeafSelection {
    pub leaves: Vec<Leaf>,
    pub cells: Vec<CellSource>,
}

#[derive(Clone, Copy)]
pub struct Leaf {
    pub index: usize,
    /// Length of its lists.
    pub list: Option<usize>,
}

impl LeafSelection {
    /// `leaf_count` is the number of columns in the files; the columns after them are partitions.
    pub fn new(leaf_count: usize, wanted: impl Iterator<Item = (usize, Option<ListElement>)>) -> Self {
        let mut selection = Self { leaves: Vec::new(), cells: Vec::with_capacity(wanted.size_hint().0) };
        // Lookup only: never iterated.
        let mut chunks: HashMap<usize, u32> = HashMap::new();
        for (index, element) in wanted {
            if let Some(partition) = index.checked_sub(leaf_count) {
                selection.cells.push(CellSource::Partition(partition as u32));
                continue;
            }
            let chunk = *chunks.entry(index).or_insert_with(|| {
                selection.leaves.push(Leaf { index, list: element.map(|element| element.of) });
                selection.leaves.len() as u32 - 1
            });
            let element = element.map_or(0, |element| element.at as u32);
            selection.cells.push(CellSource::Chunk { chunk, element });
        }
        selection
    }

    pub fn of_columns(leaf_count: usize, columns: &[Column]) -> Self {
        Self::new(leaf_count, columns.iter().map(|column| (column.index, column.element)))
    }

    /// Values that a row is decoded into.
    fn values_per_row(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.list.unwrap_or(1)).sum()
    }
}

/// Bytes that a [`RowGroupDecoder`] of these columns takes at most.
pub fn reader_bytes(
    path: &Path,
    about: &RowGroupMetaData,
    group_rows: u64,
    selection: &LeafSelection,
) -> Result<u64, DataError> {
    let whole = group_rows <= WHOLE_GROUP_ROWS;
    let rows = if whole { group_rows } else { batch_rows(selection.values_per_row(), BATCH_ROWS) as u64 };
    let measure = || {
        let mut headers = BufReader::with_capacity(1 << 12, regular_file::open(path)?);
        // What the columns hold together, and what one of them takes besides.
        let own = selection.leaves.len() * (size_of::<ColumnChunk>() + size_of::<Leaf>())
            + selection.cells.len() * size_of::<CellSource>();
        let (mut held, mut one) = (own as u64, 0);
        for leaf in &selection.leaves {
            let chunk = about.column(leaf.index);
            let (start, length) = chunk.byte_range();
            let pages = parquet_pages::check_pages(&mut headers, start, length)?;
            let delta = match pages.delta_text {
                true => CheckedPages::new(Arc::new(regular_file::open(path)?), chunk, group_rows as usize)?
                    .delta_text_sizes()?,
                false => DeltaTextSizes::default(),
            };
            let format = ValueFormat::of(chunk.column_descr(), leaf.list);
            let batch = rows * format.values_per_row() as u64;
            let is_text = format.is_text();
            let value = if is_text { size_of::<Option<ByteArray>>() } else { CODE_BYTES } as u64;
            // Every text of a list is an allocation of its own, and rows are decoded with all of theirs.
            let listed = if format.is_text_list() { chunk.num_values().max(0) as u64 } else { 0 };
            let listed = 2 * listed * size_of::<ByteArray>() as u64;
            let dictionary = pages.dictionary + pages.dictionary_values * size_of::<ByteArray>() as u64;
            // Texts are parts of their pages, which live as long as they do, or copies of delta-encoded ones.
            held += listed
                + match (whole, is_text) {
                    (true, false) => batch * value,
                    (true, true) => batch * value + pages.total + delta.total + dictionary,
                    (false, false) => batch * value + OPEN_COLUMN_BYTES + pages.largest + dictionary,
                    (false, true) => {
                        batch * value + OPEN_COLUMN_BYTES + 2 * (pages.largest + delta.largest) + dictionary
                    }
                };
            // While a column is decoded: a compressed page, and its values in the types of the library.
            let compressed =
                if chunk.compression() == Compression::UNCOMPRESSED { 0 } else { pages.compressed };
            let decoding = compressed + 3 * batch * size_of::<Option<ByteArray>>() as u64;
            let open = if whole { OPEN_COLUMN_BYTES + pages.largest + delta.largest + dictionary } else { 0 };
            one = one.max(decoding + open);
        }
        Ok(held + one)
    };
    catch_panic(measure).map_err(|error| corrupt_file(path, error))
}

/// Rows to decode at once, at most `most`.
fn batch_rows(values_per_row: usize, most: usize) -> usize {
    most.min(MAX_BATCH_CELLS / values_per_row.max(1)).max(1)
}

/// Decodes the rows of a row group in batches, or all of a small one at once.
pub struct RowGroupDecoder {
    chunks: Vec<ColumnChunk>,
    cells: Vec<CellSource>,
    /// Columns in the path of the file.
    partitions: Arc<[Option<String>]>,
    values_per_row: usize,
    /// Rows not decoded yet.
    pub remaining: u64,
    /// Rows in the decoded batch, and how many of them were consumed.
    pub count: usize,
    pub next_row: usize,
    path: PathBuf,
}

impl RowGroupDecoder {
    /// Opens the columns of a row group at its first row.
    pub fn open(
        path: &Path,
        about: &RowGroupMetaData,
        rows: u64,
        selection: LeafSelection,
        (partitions, zones): (Arc<[Option<String>]>, &LeafZones),
    ) -> Result<Self, DataError> {
        let values_per_row = selection.values_per_row();
        let open = || {
            // Collecting results would grow the list by doubling.
            let mut chunks = Vec::with_capacity(selection.leaves.len());
            let mut opener = ColumnOpener::new(path)?;
            for leaf in &selection.leaves {
                let chunk = about.column(leaf.index);
                let mut chunk = ColumnChunk {
                    reader: Some(Box::new(opener.open(chunk, rows)?)),
                    format: ValueFormat::of(chunk.column_descr(), leaf.list),
                    values: ColumnValues::Numbers(Vec::new()),
                    zone: zones.get(&leaf.index).cloned().map(Box::new),
                };
                if rows <= WHOLE_GROUP_ROWS {
                    chunk.decode_batch(rows as usize)?;
                    chunk.reader = None;
                }
                chunks.push(chunk);
            }
            Ok(chunks)
        };
        let chunks = catch_panic(open).map_err(|error| corrupt_file(path, error))?;
        Ok(Self {
            chunks,
            cells: selection.cells,
            partitions,
            values_per_row,
            remaining: rows,
            count: 0,
            next_row: 0,
            path: path.to_owned(),
        })
    }

    /// Decodes the next rows: at most `most`, or all of a small row group. None at the end or after a failure.
    pub fn decode_batch(&mut self, most: usize) -> Result<(), DataError> {
        let left = std::mem::take(&mut self.remaining);
        let whole = self.chunks.iter().all(|chunk| chunk.reader.is_none());
        let most = if whole { left } else { batch_rows(self.values_per_row, most) as u64 };
        let count = left.min(most) as usize;
        (self.count, self.next_row) = (0, 0);
        if count == 0 {
            return Ok(());
        }
        for chunk in &mut self.chunks {
            catch_panic(|| chunk.decode_batch(count)).map_err(|error| corrupt_file(&self.path, error))?;
            let found = chunk.values.rows();
            if found != count {
                let error = ParquetError::General(format!("expected {count} values, got {found}"));
                return Err(corrupt_file(&self.path, error));
            }
        }
        (self.count, self.remaining) = (count, left - count as u64);
        Ok(())
    }

    pub fn cell(&self, row: usize, i: usize) -> CellValue<'_> {
        match self.cells[i] {
            CellSource::Chunk { chunk, element } => {
                self.chunks[chunk as usize].values.cell(row, element as usize)
            }
            CellSource::Partition(at) => match &self.partitions[at as usize] {
                Some(text) => CellValue::Text(text.as_bytes()),
                None => CellValue::Missing,
            },
        }
    }
}

/// A decoded row.
pub struct DecodedRow<'a> {
    pub rows: &'a RowGroupDecoder,
    pub row: usize,
    pub columns: &'a [Column],
    /// Row number in its file.
    pub record: u64,
}

impl RowCells for DecodedRow<'_> {
    fn cell(&self, i: usize) -> CellValue<'_> {
        self.rows.cell(self.row, i)
    }

    fn cell_error(&self, i: usize, expected: String) -> DataError {
        let value = match self.cell(i) {
            CellValue::Missing => String::new(),
            CellValue::Number(x) if x.is_nan() => String::new(),
            CellValue::Number(x) => x.to_string(),
            CellValue::Text(text) => super::display_value(text),
            CellValue::Texts(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| String::from_utf8_lossy(text.data())).collect();
                super::display_value(format!("{texts:?}").as_bytes())
            }
        };
        let column = Some(self.columns[i].name.clone());
        DataError::Value { file: self.rows.path.clone(), record: self.record, column, value, expected }
    }
}
