//! Parquet tables: a row group is a shard, and only the columns in use are decoded. A record is one 8-byte code per
//! column; see [`encoding`](super::encoding).

use std::collections::HashSet;
use std::io::{BufReader, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::schema::types::ColumnDescriptor;
use rayon::prelude::*;

use super::columns::{CellParser, Column};
use super::encoding::RowEncoder;
use super::index_evidence::{is_index_name, is_unnamed, names_rows};
use super::inference::{ColumnInference, MAX_WATCHED_COLUMNS, SAMPLE_ROWS};
use super::parquet_groups::{
    self, BATCH_ROWS, CODE_BYTES, DecodedRow, LeafSelection, RowGroupDecoder, catch_panic, corrupt_file,
};
use super::parquet_values::ValueFormat;
use super::parquet_zones::{self, LeafZones};
use super::schema::TableSchema;
use super::{
    CellValue, RowCells, RowVisitor, TableReader, parquet_pages, parquet_partitions, parquet_values,
};
use crate::base::regular_file;
use crate::cache::CacheKey;
use crate::streaming::{BLOCK_BYTES, RecordBlock, ShardReader, ShardedDataset};
use crate::{BatchRow, DataError, DatasetContext, Features, SampleKey, files};

/// Bytes of the parsed metadata per byte in the file.
const BYTES_PER_METADATA_BYTE: u64 = 12;
/// Maximum rows of a row group; a file that declares more is corrupt.
const MAX_ROW_GROUP_ROWS: i64 = i32::MAX as i64;

/// Files with the same columns.
pub struct ParquetFiles {
    files: Vec<ParquetFile>,
    /// The columns in the files, then those in their paths.
    pub names: Vec<String>,
    leaf_count: usize,
    row_groups: Vec<RowGroup>,
    rows: u64,
    /// Bytes that the open columns of a row group take at most; 0 before [`ParquetFiles::measure_readers`].
    reader_bytes: u64,
}

struct ParquetFile {
    path: PathBuf,
    metadata: ParquetMetaData,
    partitions: Arc<[Option<String>]>,
    zones: LeafZones,
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
        let mut table = Self {
            files: Vec::new(),
            names: Vec::new(),
            leaf_count: 0,
            row_groups: Vec::new(),
            rows: 0,
            reader_bytes: 0,
        };
        for (number, path) in paths.iter().enumerate() {
            // An empty file gets its own error.
            files::compression(path)?;
            let file = regular_file::open(path).map_err(DataError::io(path))?;
            let mut start = Vec::new();
            (&file).take(4).read_to_end(&mut start).map_err(DataError::io(path))?;
            if start == b"FEA1" {
                return Err(DataError::Table {
                    file: path.clone(),
                    place: String::new(),
                    problem: "it is a Feather file of version 1, which pandas wrote until 2020".into(),
                    hint: "write it again: `pandas.read_feather(f).to_parquet(\"table.parquet\")`",
                });
            }
            if start != b"PAR1" {
                let found = format!("`{}`", start.escape_ascii());
                return Err(DataError::WrongFormat {
                    file: path.clone(),
                    expected: "a Parquet or an Arrow file",
                    found,
                });
            }
            let wrong = |error| corrupt_file(path, error);
            let mut footer = BufReader::with_capacity(1 << 12, &file);
            let bytes = parquet_pages::check_schema(&mut footer).map_err(|error| wrong(error.into()))?;
            ctx.check_memory(path, BYTES_PER_METADATA_BYTE * bytes)?;
            let metadata =
                catch_panic(|| ParquetMetaDataReader::new().parse_and_finish(&file)).map_err(wrong)?;
            let columns = metadata.file_metadata().schema_descr().columns();
            let mut names: Vec<String> = columns.iter().map(|column| leaf_name(column)).collect();
            table.leaf_count = names.len();
            let (keys, values): (Vec<_>, Vec<_>) = parquet_partitions::partitions(path).into_iter().unzip();
            names.extend(keys);
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
            let zones = parquet_zones::find_zones(path, metadata.file_metadata())?;
            table.files.push(ParquetFile { path: path.clone(), metadata, partitions: values.into(), zones });
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
        let descriptors = self.files[0].metadata.file_metadata().schema_descr().columns();
        let look = |column: &Arc<ColumnDescriptor>| {
            let text = ValueFormat::of(column, None).is_text();
            let mut look = ColumnInference::declared(text, parquet_values::unsupported_reason(column));
            look.stamp = parquet_values::stamp_kind(column);
            look.text_list = parquet_values::is_text_list(column);
            if is_index_name(column.name()) {
                look.mark_as_index();
            }
            if names_rows(column.name()) || is_unnamed(column.name()) {
                look.watch_for_index();
            }
            look
        };
        let mut inferred: Vec<ColumnInference> = descriptors.iter().map(look).collect();
        inferred.resize(self.names.len(), ColumnInference::default());
        let of_targets = inferred.iter_mut().zip(&self.names).filter(|(_, name)| targets.contains(name));
        of_targets.for_each(|(look, _)| look.count_distinct());
        for (at, look) in inferred.iter_mut().enumerate().skip(self.leaf_count) {
            for file in &self.files {
                let value = file.partitions[at - self.leaf_count].as_deref();
                let cell = value.map_or(CellValue::Missing, |text| CellValue::Text(text.as_bytes()));
                look.observe(cell, parser, 0);
            }
        }
        if let Some(&group) = self.row_groups.first() {
            let usable = |i: &usize| parquet_values::unsupported_reason(&descriptors[*i]).is_none();
            let (lists, single): (Vec<usize>, Vec<usize>) =
                (0..self.leaf_count).filter(usable).partition(|i| descriptors[*i].max_rep_level() > 0);
            let all = lists.iter().chain(&single).map(|i| (*i, None));
            let file = &self.files[group.file];
            let all = LeafSelection::new(self.leaf_count, all);
            ctx.check_memory(&file.path, self.group_reader_bytes(group, &all)?)?;
            for at in lists {
                let length = self.list_length(group, at)?;
                inferred[at].list = length;
                if length.is_none() {
                    inferred[at].unsupported = Some("lists of different lengths");
                }
            }
            let only_target =
                single.iter().position(|i| targets.len() == 1 && targets.contains(&self.names[*i]));
            inferred.iter_mut().take(MAX_WATCHED_COLUMNS).for_each(ColumnInference::watch);
            let selection = LeafSelection::new(self.leaf_count, single.iter().map(|i| (*i, None)));
            let mut rows = self.open_row_group(group, selection)?;
            let mut left = SAMPLE_ROWS;
            while left > 0 && rows.remaining > 0 {
                rows.decode_batch(left)?;
                for row in 0..rows.count {
                    for (i, &at) in single.iter().enumerate() {
                        inferred[at].observe(rows.cell(row, i), parser, row as u64);
                        if let Some(target) = only_target {
                            inferred[at].compare_with_target(rows.cell(row, i), rows.cell(row, target));
                        }
                    }
                }
                left = left.saturating_sub(rows.count);
            }
        }
        Ok(inferred)
    }

    /// Length of the lists of a column, if the first rows agree.
    fn list_length(&self, group: RowGroup, leaf: usize) -> Result<Option<usize>, DataError> {
        let ParquetFile { path, metadata, .. } = &self.files[group.file];
        let chunk = metadata.row_group(group.row_group).column(leaf);
        let find = || {
            let mut reader = parquet_groups::open_column(path, chunk, group.rows)?;
            let rows = (group.rows as usize).min(SAMPLE_ROWS);
            parquet_values::list_length(&mut reader, chunk.column_descr(), rows)
        };
        catch_panic(find).map_err(|error| corrupt_file(path, error))
    }

    /// Finds what reading these columns takes: reads the headers of their pages, unless the result is cached.
    pub fn measure_readers(&mut self, columns: &[Column], ctx: &DatasetContext) -> Result<(), DataError> {
        let paths: Vec<PathBuf> = self.files.iter().map(|file| file.path.clone()).collect();
        let selection = LeafSelection::of_columns(self.leaf_count, columns);
        let leaves = selection.leaves.iter().map(|leaf| (leaf.index, leaf.list));
        let cache_key =
            CacheKey::new(&paths, &format!("{:?} {}", leaves.collect::<Vec<_>>(), selection.cells.len()))?;
        let kept = ctx.cache.find("parquet-readers", cache_key).and_then(|path| std::fs::read(path).ok());
        if let Some(Ok(kept)) = kept.map(|kept| <[u8; 8]>::try_from(&kept[..])) {
            self.reader_bytes = u64::from_le_bytes(kept);
            return Ok(());
        }
        let groups = self.row_groups.par_iter().map(|group| self.group_reader_bytes(*group, &selection));
        let bytes = groups.try_reduce(|| 0, |a, b| Ok(a.max(b)))?;
        drop(ctx.cache.get_or_create("parquet-readers", cache_key, |out| {
            out.write_all(&bytes.to_le_bytes()).map_err(DataError::write(&paths[0]))
        }));
        self.reader_bytes = bytes;
        Ok(())
    }

    /// Bytes that a [`RowGroupDecoder`] of these columns takes at most.
    fn group_reader_bytes(&self, group: RowGroup, selection: &LeafSelection) -> Result<u64, DataError> {
        let file = &self.files[group.file];
        parquet_groups::reader_bytes(
            &file.path,
            file.metadata.row_group(group.row_group),
            group.rows,
            selection,
        )
    }

    /// Opens the columns of a row group at its first row.
    fn open_row_group(
        &self,
        group: RowGroup,
        selection: LeafSelection,
    ) -> Result<RowGroupDecoder, DataError> {
        let file = &self.files[group.file];
        let about = file.metadata.row_group(group.row_group);
        RowGroupDecoder::open(
            &file.path,
            about,
            group.rows,
            selection,
            (file.partitions.clone(), &file.zones),
        )
    }
}

/// The name of a column. That of a list lacks the levels that the format adds, which depend on the writer.
fn leaf_name(column: &ColumnDescriptor) -> String {
    const LIST_LEVELS: [&str; 5] =
        [".list.element", ".list.item", ".list.array_element", ".bag.array_element", ".array"];
    let path = column.path().string();
    let level = LIST_LEVELS.iter().find(|level| column.max_rep_level() > 0 && path.ends_with(**level));
    path[..path.len() - level.map_or(0, |level| level.len())].to_owned()
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
        let mut rows = self.open_row_group(group, LeafSelection::of_columns(self.leaf_count, columns))?;
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
        let width = (encoder.codes() * CODE_BYTES) as u64;
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
        for number in 0..self.encoder.codes() {
            let (i, _) = self.encoder.column_of(number);
            let code = self.encoder.encode_cell(number, row.cell(i));
            // Report the error here, while the original value is available.
            if let Some(expected) = self.encoder.expected_instead(number, code) {
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
        let selection = LeafSelection::of_columns(self.table.leaf_count, &self.encoder.schema.columns);
        let rows = self.table.open_row_group(group, selection)?;
        Ok(Box::new(RowGroupReader { rows, encoder: self.encoder.clone(), record: group.first_in_file }))
    }

    fn name(&self, shard: u32) -> String {
        let RowGroup { file, row_group: group, .. } = self.table.row_groups[shard as usize];
        format!("row group {group} of `{}`", self.table.files[file].path.display())
    }

    fn decode(
        &self,
        record: &[u8],
        index: u64,
        _: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        into.input.as_f32_mut().fill(0.0);
        for (number, code) in record.as_chunks::<CODE_BYTES>().0.iter().enumerate() {
            let code = f64::from_bits(u64::from_le_bytes(*code));
            self.encoder.write_cell(number, code, into).map_err(|expected| {
                let (i, _) = self.encoder.column_of(number);
                let group = self.table.row_groups.partition_point(|group| group.first_row <= index) - 1;
                let group = self.table.row_groups[group];
                DataError::Value {
                    file: self.table.files[group.file].path.clone(),
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
        let metadata = |file: &ParquetFile| file.metadata.memory_size() as u64;
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
