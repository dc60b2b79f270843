//! Parquet tables: a row group is a shard, and only the columns in use are decoded. A record is one 8-byte code per
//! column; see [`encoding`](super::encoding).

use std::collections::HashSet;
use std::io::{BufReader, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use parquet::basic::{Compression, ConvertedType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::ColumnDescriptor;
use rayon::prelude::*;

use super::columns::{CellParser, Column, ColumnInference, SAMPLE_ROWS};
use super::encoding::{RowEncoder, TableSchema};
use super::{CellValue, RowCells, RowVisitor, TableReader, parquet_pages};
use crate::base::regular_file;
use crate::data::cache::CacheKey;
use crate::data::streaming::{BLOCK_BYTES, RecordBlock, ShardReader, ShardedDataset};
use crate::data::{BatchRow, DataError, DatasetContext, Features, SampleKey, files};

/// Maximum cells decoded at once, so that wide tables decode fewer rows at a time: 16 MB.
const MAX_BATCH_CELLS: usize = 1 << 20;
/// Rows decoded at once.
const BATCH_ROWS: usize = 1024;
/// Bytes of a code.
const CODE_BYTES: usize = 8;
/// A row group of at most this many rows is decoded column by column when it is opened: its values take less memory than
/// as many open columns do.
const WHOLE_GROUP_ROWS: u64 = 512;
/// Bytes of an open column besides its pages and values: the library's reader, its decoders and their buffers.
const OPEN_COLUMN_BYTES: u64 = 6 << 10;
/// Bytes of the parsed metadata per byte in the file.
const BYTES_PER_METADATA_BYTE: u64 = 12;
/// Maximum rows of a row group; a file that declares more is corrupt.
const MAX_ROW_GROUP_ROWS: i64 = i32::MAX as i64;

/// Files with the same columns.
pub struct ParquetFiles {
    files: Vec<(PathBuf, ParquetMetaData)>,
    pub names: Vec<String>,
    row_groups: Vec<RowGroup>,
    rows: u64,
    /// Bytes that the open columns of a row group take at most; 0 before [`ParquetFiles::measure_readers`].
    reader_bytes: u64,
}

#[derive(Clone, Copy)]
struct RowGroup {
    file: usize,
    row_group: usize,
    /// Number of rows before it in the dataset, and in its file.
    first_row: u64,
    first_in_file: u64,
    rows: u64,
    bytes: u64,
}

impl ParquetFiles {
    pub fn open(paths: &[PathBuf], ctx: &DatasetContext) -> Result<Self, DataError> {
        let mut table =
            Self { files: Vec::new(), names: Vec::new(), row_groups: Vec::new(), rows: 0, reader_bytes: 0 };
        for (number, path) in paths.iter().enumerate() {
            // An empty file gets its own error.
            files::compression(path)?;
            let file = regular_file::open(path).map_err(DataError::io(path))?;
            let mut start = Vec::new();
            (&file).take(4).read_to_end(&mut start).map_err(DataError::io(path))?;
            if start != b"PAR1" {
                let found = format!("`{}`", start.escape_ascii());
                return Err(DataError::WrongFormat { file: path.clone(), expected: "a Parquet file", found });
            }
            let wrong = |error| corrupt_file(path, error);
            let mut footer = BufReader::with_capacity(1 << 12, &file);
            let bytes = parquet_pages::check_schema(&mut footer).map_err(|error| wrong(error.into()))?;
            ctx.check_memory(path, BYTES_PER_METADATA_BYTE * bytes)?;
            let metadata =
                catch_panic(|| ParquetMetaDataReader::new().parse_and_finish(&file)).map_err(wrong)?;
            let columns = metadata.file_metadata().schema_descr().columns();
            let names: Vec<String> = columns.iter().map(|column| column.path().string()).collect();
            if number == 0 {
                table.names = names;
            } else {
                super::dataset::check_same_columns(&paths[0], &table.names, path, &names)?;
            }
            let mut first_in_file = 0;
            for (group, about) in metadata.row_groups().iter().enumerate() {
                let rows = about.num_rows();
                if !(0..=MAX_ROW_GROUP_ROWS).contains(&rows) {
                    let error = ParquetError::General(format!("row group {group} has {rows} rows"));
                    return Err(wrong(error));
                }
                let (rows, bytes) = (rows as u64, about.compressed_size().max(0) as u64);
                if rows > 0 {
                    table.row_groups.push(RowGroup {
                        file: number,
                        row_group: group,
                        first_row: table.rows,
                        first_in_file,
                        rows,
                        bytes,
                    });
                }
                first_in_file += rows;
                table.rows += rows;
            }
            table.files.push((path.clone(), metadata));
        }
        Ok(table)
    }

    /// Infers each column from the first rows.
    pub fn infer_columns(
        &self,
        parser: &CellParser,
        targets: &[String],
        ctx: &DatasetContext,
    ) -> Result<Vec<ColumnInference>, DataError> {
        // A table may have very many columns and targets.
        let targets: HashSet<&String> = targets.iter().collect();
        let descriptors = self.files[0].1.file_metadata().schema_descr().columns();
        let look = |column: &Arc<ColumnDescriptor>| {
            ColumnInference::declared(column.physical_type() == Type::BYTE_ARRAY, unsupported_reason(column))
        };
        let mut inferred: Vec<ColumnInference> = descriptors.iter().map(look).collect();
        let of_targets = inferred.iter_mut().zip(&self.names).filter(|(_, name)| targets.contains(name));
        of_targets.for_each(|(look, _)| look.count_distinct());
        if let Some(&group) = self.row_groups.first() {
            let usable: Vec<usize> =
                (0..inferred.len()).filter(|i| unsupported_reason(&descriptors[*i]).is_none()).collect();
            ctx.check_memory(&self.files[group.file].0, self.group_reader_bytes(group, &usable)?)?;
            let mut rows = self.open_row_group(group, usable.iter().copied())?;
            let mut left = SAMPLE_ROWS;
            while left > 0 && rows.remaining > 0 {
                rows.decode_batch(left)?;
                for row in 0..rows.count {
                    usable
                        .iter()
                        .enumerate()
                        .for_each(|(i, &at)| inferred[at].observe(rows.cell(row, i), parser));
                }
                left = left.saturating_sub(rows.count);
            }
        }
        Ok(inferred)
    }

    /// Finds what reading these columns takes: reads the headers of their pages, unless the result is cached.
    pub fn measure_readers(&mut self, columns: &[Column], ctx: &DatasetContext) -> Result<(), DataError> {
        let paths: Vec<PathBuf> = self.files.iter().map(|(path, _)| path.clone()).collect();
        let columns: Vec<usize> = columns.iter().map(|column| column.index).collect();
        let cache_key = CacheKey::new(&paths, &format!("{columns:?}"))?;
        let kept = ctx.cache.find("parquet-readers", cache_key).and_then(|path| std::fs::read(path).ok());
        if let Some(Ok(kept)) = kept.map(|kept| <[u8; 8]>::try_from(&kept[..])) {
            self.reader_bytes = u64::from_le_bytes(kept);
            return Ok(());
        }
        let groups = self.row_groups.par_iter().map(|group| self.group_reader_bytes(*group, &columns));
        let bytes = groups.try_reduce(|| 0, |a, b| Ok(a.max(b)))?;
        drop(ctx.cache.get_or_create("parquet-readers", cache_key, |out| {
            out.write_all(&bytes.to_le_bytes()).map_err(DataError::write(&paths[0]))
        }));
        self.reader_bytes = bytes;
        Ok(())
    }

    /// Bytes that a [`RowGroupDecoder`] of these columns takes at most.
    fn group_reader_bytes(&self, group: RowGroup, columns: &[usize]) -> Result<u64, DataError> {
        let (path, metadata) = &self.files[group.file];
        let about = metadata.row_group(group.row_group);
        let whole = group.rows <= WHOLE_GROUP_ROWS;
        let batch = if whole { group.rows } else { batch_rows(columns.len(), BATCH_ROWS) as u64 };
        let measure = || {
            let mut headers = BufReader::with_capacity(1 << 12, regular_file::open(path)?);
            // What the columns hold together, and what one of them takes besides.
            let (mut held, mut one) = ((columns.len() * size_of::<ColumnChunk>()) as u64, 0);
            for &at in columns {
                let chunk = about.column(at);
                let (start, length) = chunk.byte_range();
                let pages = parquet_pages::check_pages(&mut headers, start, length)?;
                let is_text = chunk.column_descr().physical_type() == Type::BYTE_ARRAY;
                let value = if is_text { size_of::<Option<ByteArray>>() } else { CODE_BYTES } as u64;
                let dictionary = pages.dictionary + pages.dictionary_values * size_of::<ByteArray>() as u64;
                // Texts are parts of their pages, which live as long as they do.
                held += match (whole, is_text) {
                    (true, false) => batch * value,
                    (true, true) => batch * value + pages.total + dictionary,
                    (false, false) => batch * value + OPEN_COLUMN_BYTES + pages.largest + dictionary,
                    (false, true) => batch * value + OPEN_COLUMN_BYTES + 2 * pages.largest + dictionary,
                };
                // While a column is decoded: a compressed page, and its values in the types of the library.
                let compressed =
                    if chunk.compression() == Compression::UNCOMPRESSED { 0 } else { pages.compressed };
                let decoding = compressed + 3 * batch * size_of::<Option<ByteArray>>() as u64;
                let open = if whole { OPEN_COLUMN_BYTES + pages.largest + dictionary } else { 0 };
                one = one.max(decoding + open);
            }
            Ok(held + one)
        };
        catch_panic(measure).map_err(|error| corrupt_file(path, error))
    }

    /// Opens the columns `at` of a row group at its first row.
    fn open_row_group(
        &self,
        group: RowGroup,
        at: impl ExactSizeIterator<Item = usize>,
    ) -> Result<RowGroupDecoder, DataError> {
        let (path, metadata) = &self.files[group.file];
        let about = metadata.row_group(group.row_group);
        let open = || {
            // A separate file handle per reader: the library seeks before every read.
            let file = Arc::new(regular_file::open(path)?);
            let mut headers = BufReader::with_capacity(1 << 12, regular_file::open(path)?);
            // Collecting results would grow the list by doubling.
            let mut chunks = Vec::with_capacity(at.len());
            for at in at {
                let chunk = about.column(at);
                let (start, length) = chunk.byte_range();
                parquet_pages::check_pages(&mut headers, start, length)?;
                let pages = SerializedPageReader::new(file.clone(), chunk, group.rows as usize, None)?;
                let reader = get_column_reader(chunk.column_descr_ptr(), Box::new(pages));
                let mut chunk = ColumnChunk {
                    reader: Some(Box::new(reader)),
                    format: NumberFormat::of(chunk.column_descr()),
                    values: ColumnValues::Numbers(Vec::new()),
                };
                if group.rows <= WHOLE_GROUP_ROWS {
                    chunk.decode_batch(group.rows as usize)?;
                    chunk.reader = None;
                }
                chunks.push(chunk);
            }
            Ok(chunks)
        };
        let chunks = catch_panic(open).map_err(|error| corrupt_file(path, error))?;
        Ok(RowGroupDecoder { chunks, remaining: group.rows, count: 0, next_row: 0, path: path.clone() })
    }
}

/// Why a column cannot be converted to numbers or categories.
fn unsupported_reason(column: &ColumnDescriptor) -> Option<&'static str> {
    match column.physical_type() {
        _ if column.max_rep_level() > 0 => Some("lists"),
        Type::INT96 => Some("96-bit timestamps"),
        Type::FIXED_LEN_BYTE_ARRAY => Some("byte arrays of fixed length"),
        Type::BYTE_ARRAY if column.converted_type() == ConvertedType::DECIMAL => {
            Some("decimals as byte arrays")
        }
        _ => None,
    }
}

/// Calls the library, which panics on some corrupt files, and turns a panic into an error.
fn catch_panic<T>(run: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    crate::base::panics::catch_panic(run)
        .unwrap_or_else(|_| Err(ParquetError::General("the decoder panicked".into())))
}

fn corrupt_file(path: &std::path::Path, error: ParquetError) -> DataError {
    DataError::Corrupt { file: path.to_owned(), source: Arc::new(std::io::Error::other(error.to_string())) }
}

/// How the values of a column convert to numbers.
#[derive(Clone, Copy)]
struct NumberFormat {
    unsigned: bool,
    scale: f64,
    /// Definition level of a non-null value.
    present_level: i16,
}

impl NumberFormat {
    fn of(column: &ColumnDescriptor) -> Self {
        let decimal = column.converted_type() == ConvertedType::DECIMAL;
        let unsigned =
            [ConvertedType::UINT_8, ConvertedType::UINT_16, ConvertedType::UINT_32, ConvertedType::UINT_64];
        Self {
            unsigned: unsigned.contains(&column.converted_type()),
            scale: if decimal { 10f64.powi(-column.type_scale()) } else { 1.0 },
            present_level: column.max_def_level(),
        }
    }

    fn int(&self, value: i64, unsigned: u64) -> f64 {
        (if self.unsigned { unsigned as f64 } else { value as f64 }) * self.scale
    }
}

/// One column of a row group, and the values decoded last.
struct ColumnChunk {
    /// `None` once all values are decoded. Boxed: of very many columns that are decoded, only the values remain.
    reader: Option<Box<ColumnReader>>,
    format: NumberFormat,
    values: ColumnValues,
}

enum ColumnValues {
    /// NaN for null.
    Numbers(Vec<f64>),
    Texts(Vec<Option<ByteArray>>),
}

impl ColumnChunk {
    fn decode_batch(&mut self, count: usize) -> Result<(), ParquetError> {
        let format = self.format;
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let numbers = match &mut **reader {
            ColumnReader::ByteArrayColumnReader(reader) => {
                let text = |value: Option<&ByteArray>| value.cloned();
                self.values = ColumnValues::Texts(decode_column(reader, format, count, text)?);
                return Ok(());
            }
            ColumnReader::BoolColumnReader(reader) => {
                decode_column(reader, format, count, |v| v.map_or(f64::NAN, |v| f64::from(*v)))
            }
            ColumnReader::Int32ColumnReader(reader) => decode_column(reader, format, count, |v| {
                v.map_or(f64::NAN, |v| format.int((*v).into(), (*v as u32).into()))
            }),
            ColumnReader::Int64ColumnReader(reader) => {
                decode_column(reader, format, count, |v| v.map_or(f64::NAN, |v| format.int(*v, *v as u64)))
            }
            ColumnReader::FloatColumnReader(reader) => {
                decode_column(reader, format, count, |v| v.map_or(f64::NAN, |v| f64::from(*v)))
            }
            ColumnReader::DoubleColumnReader(reader) => {
                decode_column(reader, format, count, |v| v.map_or(f64::NAN, |v| *v))
            }
            _ => return Err(ParquetError::General("a column of an unsupported type".into())),
        };
        self.values = ColumnValues::Numbers(numbers?);
        Ok(())
    }
}

/// Decodes the next `count` values of a column and converts each with `make`; `None` is null. The result has no spare
/// capacity, which very many columns would add up.
fn decode_column<T: DataType, V>(
    reader: &mut ColumnReaderImpl<T>,
    format: NumberFormat,
    count: usize,
    make: impl Fn(Option<&T::T>) -> V,
) -> Result<Vec<V>, ParquetError> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    let mut found = 0;
    while found < count {
        let (rows, ..) = reader.read_records(count - found, Some(&mut levels), None, &mut values)?;
        if rows == 0 {
            return Err(ParquetError::EOF("a column has fewer values than its row group has rows".into()));
        }
        found += rows;
    }
    if format.present_level == 0 {
        return Ok(values.iter().map(|value| make(Some(value))).collect());
    }
    let mut values = values.iter();
    Ok(levels
        .iter()
        .map(|level| make(if *level == format.present_level { values.next() } else { None }))
        .collect())
}

/// Rows to decode at once, at most `most`.
fn batch_rows(columns: usize, most: usize) -> usize {
    most.min(MAX_BATCH_CELLS / columns.max(1)).max(1)
}

/// Decodes the rows of a row group in batches, or all of a small one at once.
struct RowGroupDecoder {
    chunks: Vec<ColumnChunk>,
    /// Rows not decoded yet.
    remaining: u64,
    /// Rows in the decoded batch, and how many of them were consumed.
    count: usize,
    next_row: usize,
    path: PathBuf,
}

impl RowGroupDecoder {
    /// Decodes the next rows: at most `most`, or all of a small row group. None at the end or after a failure.
    fn decode_batch(&mut self, most: usize) -> Result<(), DataError> {
        let left = std::mem::take(&mut self.remaining);
        let whole = self.chunks.iter().all(|chunk| chunk.reader.is_none());
        let most = if whole { left } else { batch_rows(self.chunks.len(), most) as u64 };
        let count = left.min(most) as usize;
        (self.count, self.next_row) = (0, 0);
        if count == 0 {
            return Ok(());
        }
        for chunk in &mut self.chunks {
            catch_panic(|| chunk.decode_batch(count)).map_err(|error| corrupt_file(&self.path, error))?;
            let found = match &chunk.values {
                ColumnValues::Numbers(values) => values.len(),
                ColumnValues::Texts(values) => values.len(),
            };
            if found != count {
                let error = ParquetError::General(format!("expected {count} values, got {found}"));
                return Err(corrupt_file(&self.path, error));
            }
        }
        (self.count, self.remaining) = (count, left - count as u64);
        Ok(())
    }

    fn cell(&self, row: usize, i: usize) -> CellValue<'_> {
        match &self.chunks[i].values {
            ColumnValues::Numbers(values) => CellValue::Number(values[row]),
            ColumnValues::Texts(values) => {
                values[row].as_ref().map_or(CellValue::Missing, |text| CellValue::Text(text.data()))
            }
        }
    }
}

/// A decoded row.
struct DecodedRow<'a> {
    rows: &'a RowGroupDecoder,
    row: usize,
    columns: &'a [Column],
    /// Row number in its file.
    record: u64,
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
        };
        let column = Some(self.columns[i].name.clone());
        DataError::Value { file: self.rows.path.clone(), record: self.record, column, value, expected }
    }
}

impl TableReader for ParquetFiles {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn partitions(&self) -> usize {
        self.row_groups.len()
    }

    fn partition_bytes(&self, part: usize) -> u64 {
        self.row_groups[part].bytes
    }

    fn scan_bytes(&self) -> u64 {
        self.reader_bytes
    }

    fn scan(&self, part: usize, columns: &[Column], see: &mut RowVisitor<'_>) -> Result<(), DataError> {
        let group = self.row_groups[part];
        let mut rows = self.open_row_group(group, columns.iter().map(|column| column.index))?;
        let mut number = 0;
        while rows.remaining > 0 {
            rows.decode_batch(BATCH_ROWS)?;
            for row in 0..rows.count {
                let record = group.first_in_file + number;
                see(group.first_row + number, Ok(&DecodedRow { rows: &rows, row, columns, record }))?;
                number += 1;
            }
        }
        Ok(())
    }
}

/// Parquet files as a dataset.
pub struct ParquetDataset {
    table: ParquetFiles,
    encoder: Arc<RowEncoder>,
    class_counts: Option<Vec<u64>>,
    blocks: Vec<RecordBlock>,
}

impl ParquetDataset {
    pub fn new(table: ParquetFiles, encoder: Arc<RowEncoder>, class_counts: Option<Vec<u64>>) -> Self {
        let width = (encoder.schema.columns.len() * CODE_BYTES) as u64;
        let most = (BLOCK_BYTES / width).max(1);
        let cut = |(shard, group): (usize, &RowGroup)| {
            let rows = group.rows;
            (0..rows.div_ceil(most)).map(move |i| {
                let records = most.min(rows - i * most);
                RecordBlock { shard: shard as u32, records, bytes: records * width }
            })
        };
        let blocks = table.row_groups.iter().enumerate().flat_map(cut).collect();
        Self { table, encoder, class_counts, blocks }
    }
}

/// Reads the records of a row group.
struct RowGroupReader {
    rows: RowGroupDecoder,
    encoder: Arc<RowEncoder>,
    /// Number of the next row in its file.
    record: u64,
}

impl ShardReader for RowGroupReader {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let rows = &mut self.rows;
        if rows.next_row == rows.count {
            rows.decode_batch(BATCH_ROWS)?;
            if rows.count == 0 {
                return Ok(false);
            }
        }
        let columns = &self.encoder.schema.columns;
        let row = DecodedRow { rows, row: rows.next_row, columns, record: self.record };
        let start = into.len();
        let mut wrong = None;
        for i in 0..columns.len() {
            let code = self.encoder.encode_cell(i, row.cell(i));
            // Report the error here, while the original value is available.
            if let Some(expected) = self.encoder.expected_instead(i, code) {
                wrong = Some(row.cell_error(i, expected));
                break;
            }
            into.extend_from_slice(&code.to_bits().to_le_bytes());
        }
        rows.next_row += 1;
        self.record += 1;
        match wrong {
            None => Ok(true),
            Some(error) => {
                into.truncate(start);
                Err(error)
            }
        }
    }
}

impl ShardedDataset for ParquetDataset {
    fn features(&self) -> &Features {
        &self.encoder.features
    }

    fn blocks(&self) -> &[RecordBlock] {
        &self.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError> {
        let group = self.table.row_groups[shard as usize];
        let rows = self
            .table
            .open_row_group(group, self.encoder.schema.columns.iter().map(|column| column.index))?;
        Ok(Box::new(RowGroupReader { rows, encoder: self.encoder.clone(), record: group.first_in_file }))
    }

    fn name(&self, shard: u32) -> String {
        let RowGroup { file, row_group: group, .. } = self.table.row_groups[shard as usize];
        format!("row group {group} of `{}`", self.table.files[file].0.display())
    }

    fn decode(
        &self,
        record: &[u8],
        index: u64,
        _: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        into.input.as_f32_mut().fill(0.0);
        for (i, code) in record.as_chunks::<CODE_BYTES>().0.iter().enumerate() {
            let code = f64::from_bits(u64::from_le_bytes(*code));
            self.encoder.write_cell(i, code, into).map_err(|expected| {
                let group = self.table.row_groups.partition_point(|group| group.first_row <= index) - 1;
                let group = self.table.row_groups[group];
                DataError::Value {
                    file: self.table.files[group.file].0.clone(),
                    record: group.first_in_file + index - group.first_row,
                    column: Some(self.encoder.schema.columns[i].name.clone()),
                    value: code.to_string(),
                    expected,
                }
            })?;
        }
        Ok(())
    }

    fn reader_bytes(&self) -> u64 {
        self.table.reader_bytes
    }

    fn resident_bytes(&self) -> u64 {
        let metadata = |(_, metadata): &(PathBuf, ParquetMetaData)| metadata.memory_size() as u64;
        let own = self.blocks.capacity() * size_of::<RecordBlock>()
            + self.table.row_groups.capacity() * size_of::<RowGroup>();
        let metadata = self.table.files.iter().map(metadata).sum::<u64>();
        metadata + own as u64 + super::strings_bytes(&self.table.names) + self.encoder.resident_bytes()
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        self.class_counts.clone()
    }

    fn input_names(&self) -> Vec<String> {
        self.encoder.input_names()
    }

    fn table_schema(&self) -> Option<&TableSchema> {
        Some(&self.encoder.schema)
    }

    fn unseen_categories(&self) -> Vec<(String, u64)> {
        self.encoder.unseen_categories()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.encoder.describe()
    }
}
