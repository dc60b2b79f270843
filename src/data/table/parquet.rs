//! Tables in Parquet files: a row group is a shard, and only the columns used are decoded. A record is one code
//! of eight bytes a column; see [`encoding`](super::encoding).

use std::io::{BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;

use parquet::basic::{ConvertedType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::ColumnDescriptor;

use super::columns::{Column, Look, Reading, SAMPLE_ROWS};
use super::encoding::Encoding;
use super::{Cell, Cells, Raw, See, pages};
use crate::data::stream::{BLOCK, Block, Records, Shards};
use crate::data::{DataError, Features, Key, Row, files};
use crate::regular;

/// Cells decoded at once at most, so that many columns take few rows at a time: 16 MB.
const MOST_CELLS: usize = 1 << 20;
/// Rows decoded at once.
const BATCH: usize = 1024;
/// Bytes of a code.
const CODE: usize = 8;
/// The most rows of a row group; a file that says more is damaged.
const MOST_ROWS: i64 = i32::MAX as i64;

/// Files with the same columns.
pub struct Parquet {
    files: Vec<(PathBuf, ParquetMetaData)>,
    pub names: Vec<String>,
    groups: Vec<Group>,
    rows: u64,
}

#[derive(Clone, Copy)]
struct Group {
    file: usize,
    group: usize,
    /// Rows before it in the set, and in its file.
    first: u64,
    first_in_file: u64,
    rows: u64,
    bytes: u64,
}

impl Parquet {
    pub fn open(paths: &[PathBuf]) -> Result<Self, DataError> {
        let mut table = Self { files: Vec::new(), names: Vec::new(), groups: Vec::new(), rows: 0 };
        for (number, path) in paths.iter().enumerate() {
            // An empty file is told as such.
            files::packing(path)?;
            let file = regular::open(path).map_err(DataError::io(path))?;
            let mut start = Vec::new();
            (&file).take(4).read_to_end(&mut start).map_err(DataError::io(path))?;
            if start != b"PAR1" {
                let found = format!("`{}`", start.escape_ascii());
                return Err(DataError::Format { file: path.clone(), wanted: "a Parquet file", found });
            }
            let wrong = |error| damaged(path, error);
            let mut footer = BufReader::with_capacity(1 << 12, &file);
            pages::check_schema(&mut footer).map_err(|error| wrong(error.into()))?;
            let metadata = caught(|| ParquetMetaDataReader::new().parse_and_finish(&file)).map_err(wrong)?;
            let columns = metadata.file_metadata().schema_descr().columns();
            let names: Vec<String> = columns.iter().map(|column| column.path().string()).collect();
            if number == 0 {
                table.names = names;
            } else {
                super::opened::same_columns(&paths[0], &table.names, path, &names)?;
            }
            let mut first_in_file = 0;
            for (group, about) in metadata.row_groups().iter().enumerate() {
                let rows = about.num_rows();
                if !(0..=MOST_ROWS).contains(&rows) {
                    let error = ParquetError::General(format!("row group {group} has {rows} rows"));
                    return Err(wrong(error));
                }
                let (rows, bytes) = (rows as u64, about.compressed_size().max(0) as u64);
                if rows > 0 {
                    table.groups.push(Group {
                        file: number,
                        group,
                        first: table.rows,
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

    /// What the first rows have in each column.
    pub fn looks(&self, reading: &Reading, targets: &[String]) -> Result<Vec<Look>, DataError> {
        let descriptors = self.files[0].1.file_metadata().schema_descr().columns();
        let look = |column: &Arc<ColumnDescriptor>| {
            Look::declared(column.physical_type() == Type::BYTE_ARRAY, unusable(column))
        };
        let mut looks: Vec<Look> = descriptors.iter().map(look).collect();
        let of_targets = looks.iter_mut().zip(&self.names).filter(|(_, name)| targets.contains(name));
        of_targets.for_each(|(look, _)| look.counted());
        if let Some(&group) = self.groups.first() {
            let usable: Vec<usize> =
                (0..looks.len()).filter(|i| unusable(&descriptors[*i]).is_none()).collect();
            let mut rows = self.rows_of(group, usable.iter().copied())?;
            let mut left = SAMPLE_ROWS;
            while left > 0 && rows.left > 0 {
                rows.fill(left)?;
                for row in 0..rows.count {
                    usable.iter().enumerate().for_each(|(i, &at)| looks[at].see(rows.cell(row, i), reading));
                }
                left -= rows.count;
            }
        }
        Ok(looks)
    }

    /// A row group's columns `at`, to be decoded from its first row.
    fn rows_of(&self, group: Group, at: impl Iterator<Item = usize>) -> Result<GroupRows, DataError> {
        let (path, metadata) = &self.files[group.file];
        let about = metadata.row_group(group.group);
        let open = || {
            // A file of its own for each reader: the library moves its place before every read.
            let file = Arc::new(regular::open(path)?);
            let mut headers = BufReader::with_capacity(1 << 12, regular::open(path)?);
            let column = |at: usize| {
                let chunk = about.column(at);
                let (start, length) = chunk.byte_range();
                pages::check(&mut headers, start, length)?;
                let pages = SerializedPageReader::new(file.clone(), chunk, group.rows as usize, None)?;
                let reader = get_column_reader(chunk.column_descr_ptr(), Box::new(pages));
                Ok(Chunk {
                    reader,
                    form: Form::of(chunk.column_descr()),
                    values: Values::Numbers(Vec::new()),
                })
            };
            at.map(column).collect::<Result<Vec<_>, ParquetError>>()
        };
        let chunks = caught(open).map_err(|error| damaged(path, error))?;
        Ok(GroupRows { chunks, left: group.rows, count: 0, at: 0, path: path.clone() })
    }
}

/// Why a column cannot be made numbers or categories.
fn unusable(column: &ColumnDescriptor) -> Option<&'static str> {
    match column.physical_type() {
        _ if column.max_rep_level() > 0 => Some("lists"),
        Type::INT96 => Some("time stamps of 96 bits"),
        Type::FIXED_LEN_BYTE_ARRAY => Some("bytes of fixed length"),
        Type::BYTE_ARRAY if column.converted_type() == ConvertedType::DECIMAL => Some("decimals in bytes"),
        _ => None,
    }
}

/// Runs the library, which panics on some damaged files, and makes that an error like any other.
fn caught<T>(run: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    crate::caught::caught(run)
        .unwrap_or_else(|_| Err(ParquetError::General("its bytes make no sense to the decoder".into())))
}

fn damaged(path: &std::path::Path, error: ParquetError) -> DataError {
    DataError::Damaged { file: path.to_owned(), source: Arc::new(std::io::Error::other(error.to_string())) }
}

/// How the values of a column are read as numbers.
#[derive(Clone, Copy)]
struct Form {
    unsigned: bool,
    scale: f64,
    /// The definition level of a value that is there.
    present: i16,
}

impl Form {
    fn of(column: &ColumnDescriptor) -> Self {
        let decimal = column.converted_type() == ConvertedType::DECIMAL;
        let unsigned =
            [ConvertedType::UINT_8, ConvertedType::UINT_16, ConvertedType::UINT_32, ConvertedType::UINT_64];
        Self {
            unsigned: unsigned.contains(&column.converted_type()),
            scale: if decimal { 10f64.powi(-column.type_scale()) } else { 1.0 },
            present: column.max_def_level(),
        }
    }

    fn int(&self, value: i64, unsigned: u64) -> f64 {
        (if self.unsigned { unsigned as f64 } else { value as f64 }) * self.scale
    }
}

/// One column of a row group, and the values decoded last.
struct Chunk {
    reader: ColumnReader,
    form: Form,
    values: Values,
}

enum Values {
    /// NaN where there is none.
    Numbers(Vec<f64>),
    Texts(Vec<Option<ByteArray>>),
}

impl Chunk {
    fn fill(&mut self, count: usize) -> Result<(), ParquetError> {
        let form = self.form;
        let numbers = |values: Vec<Option<f64>>| {
            Values::Numbers(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
        };
        self.values = match &mut self.reader {
            ColumnReader::BoolColumnReader(reader) => {
                numbers(decode(reader, form, count, |v| f64::from(*v))?)
            }
            ColumnReader::Int32ColumnReader(reader) => {
                numbers(decode(reader, form, count, |v| form.int((*v).into(), (*v as u32).into()))?)
            }
            ColumnReader::Int64ColumnReader(reader) => {
                numbers(decode(reader, form, count, |v| form.int(*v, *v as u64))?)
            }
            ColumnReader::FloatColumnReader(reader) => {
                numbers(decode(reader, form, count, |v| f64::from(*v))?)
            }
            ColumnReader::DoubleColumnReader(reader) => numbers(decode(reader, form, count, |v| *v)?),
            ColumnReader::ByteArrayColumnReader(reader) => {
                Values::Texts(decode(reader, form, count, Clone::clone)?)
            }
            _ => return Err(ParquetError::General("a column of a kind that is not read".into())),
        };
        Ok(())
    }
}

/// The next `count` values of a column, each made by `make`; `None` where there is none.
fn decode<T: DataType, V>(
    reader: &mut ColumnReaderImpl<T>,
    form: Form,
    count: usize,
    make: impl Fn(&T::T) -> V,
) -> Result<Vec<Option<V>>, ParquetError> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    let mut found = 0;
    while found < count {
        let (rows, ..) = reader.read_records(count - found, Some(&mut levels), None, &mut values)?;
        if rows == 0 {
            return Err(ParquetError::EOF("a column has fewer values than its row group has rows".into()));
        }
        found += rows;
    }
    if form.present == 0 {
        return Ok(values.iter().map(|value| Some(make(value))).collect());
    }
    let mut values = values.iter();
    Ok(levels
        .iter()
        .map(|level| if *level == form.present { values.next().map(&make) } else { None })
        .collect())
}

/// Rows of a row group, a batch at a time.
struct GroupRows {
    chunks: Vec<Chunk>,
    /// Rows not yet decoded.
    left: u64,
    /// Rows decoded, and how many of them were taken.
    count: usize,
    at: usize,
    path: PathBuf,
}

impl GroupRows {
    /// Decodes the next rows, at most `most`; none where there are no more, or after a failure.
    fn fill(&mut self, most: usize) -> Result<(), DataError> {
        let left = std::mem::take(&mut self.left);
        let most = most.min(MOST_CELLS / self.chunks.len().max(1)).max(1);
        let count = left.min(most as u64) as usize;
        (self.count, self.at) = (0, 0);
        for chunk in &mut self.chunks {
            caught(|| chunk.fill(count)).map_err(|error| damaged(&self.path, error))?;
            let found = match &chunk.values {
                Values::Numbers(values) => values.len(),
                Values::Texts(values) => values.len(),
            };
            if found != count {
                let error = ParquetError::General(format!("{found} values where {count} were asked for"));
                return Err(damaged(&self.path, error));
            }
        }
        (self.count, self.left) = (count, left - count as u64);
        Ok(())
    }

    fn cell(&self, row: usize, i: usize) -> Cell<'_> {
        match &self.chunks[i].values {
            Values::Numbers(values) => Cell::Number(values[row]),
            Values::Texts(values) => {
                values[row].as_ref().map_or(Cell::Missing, |text| Cell::Text(text.data()))
            }
        }
    }
}

/// A row that was decoded.
struct GroupRow<'a> {
    rows: &'a GroupRows,
    row: usize,
    columns: &'a [Column],
    /// Its number in its file.
    record: u64,
}

impl Cells for GroupRow<'_> {
    fn cell(&self, i: usize) -> Cell<'_> {
        self.rows.cell(self.row, i)
    }

    fn fault(&self, i: usize, wanted: String) -> DataError {
        let value = match self.cell(i) {
            Cell::Missing => String::new(),
            Cell::Number(x) if x.is_nan() => String::new(),
            Cell::Number(x) => x.to_string(),
            Cell::Text(text) => super::shown(text),
        };
        let column = Some(self.columns[i].name.clone());
        DataError::Value { file: self.rows.path.clone(), record: self.record, column, value, wanted }
    }
}

impl Raw for Parquet {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn parts(&self) -> usize {
        self.groups.len()
    }

    fn part_bytes(&self, part: usize) -> u64 {
        self.groups[part].bytes
    }

    fn pass(&self, part: usize, columns: &[Column], see: &mut See<'_>) -> Result<(), DataError> {
        let group = self.groups[part];
        let mut rows = self.rows_of(group, columns.iter().map(|column| column.at))?;
        let mut number = 0;
        while rows.left > 0 {
            rows.fill(BATCH)?;
            for row in 0..rows.count {
                let record = group.first_in_file + number;
                see(group.first + number, Ok(&GroupRow { rows: &rows, row, columns, record }))?;
                number += 1;
            }
        }
        Ok(())
    }
}

/// Parquet files as samples.
pub struct ParquetTable {
    table: Parquet,
    encoding: Arc<Encoding>,
    balance: Option<Vec<u64>>,
    blocks: Vec<Block>,
}

impl ParquetTable {
    pub fn new(table: Parquet, encoding: Arc<Encoding>, balance: Option<Vec<u64>>) -> Self {
        let width = (encoding.columns.len() * CODE) as u64;
        let most = (BLOCK / width).max(1);
        let cut = |(shard, group): (usize, &Group)| {
            let rows = group.rows;
            (0..rows.div_ceil(most)).map(move |i| {
                let records = most.min(rows - i * most);
                Block { shard: shard as u32, records, bytes: records * width }
            })
        };
        let blocks = table.groups.iter().enumerate().flat_map(cut).collect();
        Self { table, encoding, balance, blocks }
    }
}

/// The records of a row group.
struct GroupRecords {
    rows: GroupRows,
    encoding: Arc<Encoding>,
    /// Number of the next row in its file.
    record: u64,
}

impl Records for GroupRecords {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let rows = &mut self.rows;
        if rows.at == rows.count {
            rows.fill(BATCH)?;
            if rows.count == 0 {
                return Ok(false);
            }
        }
        let columns = &self.encoding.columns;
        let row = GroupRow { rows, row: rows.at, columns, record: self.record };
        let start = into.len();
        let mut wrong = None;
        for i in 0..columns.len() {
            let code = self.encoding.code(i, row.cell(i));
            // Here the value is still known.
            if let Some(wanted) = self.encoding.wrong(i, code) {
                wrong = Some(row.fault(i, wanted));
                break;
            }
            into.extend_from_slice(&code.to_bits().to_le_bytes());
        }
        rows.at += 1;
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

impl Shards for ParquetTable {
    fn features(&self) -> &Features {
        &self.encoding.features
    }

    fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn Records>, DataError> {
        let group = self.table.groups[shard as usize];
        let rows = self.table.rows_of(group, self.encoding.columns.iter().map(|column| column.at))?;
        Ok(Box::new(GroupRecords { rows, encoding: self.encoding.clone(), record: group.first_in_file }))
    }

    fn name(&self, shard: u32) -> String {
        let Group { file, group, .. } = self.table.groups[shard as usize];
        format!("row group {group} of `{}`", self.table.files[file].0.display())
    }

    fn decode(&self, record: &[u8], index: u64, _: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        into.input.f32().fill(0.0);
        for (i, code) in record.as_chunks::<CODE>().0.iter().enumerate() {
            let code = f64::from_bits(u64::from_le_bytes(*code));
            self.encoding.put(i, code, into).map_err(|wanted| {
                let group = self.table.groups.partition_point(|group| group.first <= index) - 1;
                let group = self.table.groups[group];
                DataError::Value {
                    file: self.table.files[group.file].0.clone(),
                    record: group.first_in_file + index - group.first,
                    column: Some(self.encoding.columns[i].name.clone()),
                    value: code.to_string(),
                    wanted,
                }
            })?;
        }
        Ok(())
    }

    fn resident_bytes(&self) -> u64 {
        let metadata = |(_, metadata): &(PathBuf, ParquetMetaData)| metadata.memory_size() as u64;
        let own =
            self.blocks.capacity() * size_of::<Block>() + self.table.groups.capacity() * size_of::<Group>();
        self.table.files.iter().map(metadata).sum::<u64>() + own as u64 + self.encoding.bytes()
    }

    fn balance(&self) -> Option<Vec<u64>> {
        self.balance.clone()
    }

    fn columns(&self) -> Vec<String> {
        self.encoding.inputs()
    }

    fn about(&self) -> Vec<(String, String)> {
        self.encoding.about()
    }
}
