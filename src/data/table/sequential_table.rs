//! Tables that are read sequentially: compressed text, UTF-16, and records of other formats; one file is one shard. A
//! record is its line number, eight bytes, followed by the raw row.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::arrow_file::ArrowFile;
use super::columns::Column;
use super::csv::{CsvRow, TableHeader};
use super::dialect::{Dialect, RowFields, RowFormat};
use super::encoding::RowEncoder;
use super::rows::{RowReader, open_rows};
use super::schema::TableSchema;
use super::{RowCells, RowVisitor, TableReader};
use crate::cache::CacheKey;
use crate::streaming::{self, BLOCK_BYTES, RecordBlock, ShardReader, ShardedDataset};
use crate::{BatchRow, DataError, DatasetContext, Features, SampleKey, files};

/// Bytes of a record before its row.
const LINE_PREFIX_BYTES: usize = 8;
/// Readers and rows of up to this many bytes are covered by the reserve of the plan and not counted.
const SMALL_READER_BYTES: u64 = 1 << 20;

/// Files with the same columns, of which at least one can only be read from its beginning.
pub struct SequentialTable {
    files: Vec<SequentialFile>,
    dialect: Dialect,
    width: usize,
    blocks: Vec<RecordBlock>,
    rows: u64,
    /// Bytes that decompressing one of the files and reading its rows takes at most.
    reader_bytes: u64,
    /// Bytes that splitting the longest row takes, and the threads that do so at the same time.
    fields_bytes: u64,
    workers: u64,
}

/// What counting the rows of a file finds.
#[derive(Serialize, Deserialize)]
struct CountedRows {
    /// Records and bytes of each block.
    blocks: Vec<(u64, u64)>,
    longest_row: u64,
    /// Bytes that reading the rows took at most, beside what decompresses them.
    reader_bytes: u64,
}

struct SequentialFile {
    path: PathBuf,
    /// Number of rows in the files before it.
    first_row: u64,
    /// Size on disk in bytes.
    bytes: u64,
}

impl SequentialTable {
    /// Counts the rows of `paths`, or loads the cached counts.
    pub fn open(
        paths: &[PathBuf],
        headers: &[TableHeader],
        dialect: Dialect,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let width = headers.first().map_or(0, |head| head.names.len());
        let count = |path: &PathBuf| {
            let (_, bytes) = files::compression(path)?;
            Ok((bytes, count_rows(path, bytes, dialect, ctx)?))
        };
        let counted: Result<Vec<_>, DataError> = paths.par_iter().map(count).collect();
        let (mut reader_bytes, mut longest_row) = (0, 0);
        let mut table = Self {
            files: Vec::new(),
            dialect,
            width,
            blocks: Vec::new(),
            rows: 0,
            reader_bytes: 0,
            fields_bytes: 0,
            workers: ctx.workers.max(1) as u64,
        };
        for (shard, (path, (bytes, counted))) in (0..).zip(paths.iter().zip(counted?)) {
            let decoder = match dialect.rows {
                RowFormat::Arrow => ArrowFile::open(path)?.reader_bytes()?,
                _ => files::decoder_bytes(path)?,
            };
            reader_bytes = reader_bytes.max(decoder + if_large(counted.reader_bytes));
            longest_row = longest_row.max(counted.longest_row);
            let block = |(records, bytes)| RecordBlock { shard, records, bytes };
            let blocks: Vec<RecordBlock> = counted.blocks.into_iter().map(block).collect();
            table.files.push(SequentialFile { path: path.clone(), first_row: table.rows, bytes });
            table.rows += blocks.iter().map(|block| block.records).sum::<u64>();
            table.blocks.extend(blocks);
        }
        table.reader_bytes = reader_bytes;
        table.fields_bytes = if_large(RowFields::max_bytes(width, longest_row, true));
        Ok(table)
    }
}

/// 0 for a few buffers.
fn if_large(bytes: u64) -> u64 {
    if bytes < SMALL_READER_BYTES { 0 } else { bytes }
}

/// Counts the rows of one file, or loads the cached counts.
fn count_rows(
    path: &Path,
    bytes: u64,
    dialect: Dialect,
    ctx: &DatasetContext,
) -> Result<CountedRows, DataError> {
    use std::io::Write;
    let cache_key = CacheKey::new(&[path.to_owned()], &format!("{dialect:?} {BLOCK_BYTES} 2"))?;
    let kept = ctx.cache.find("csv-blocks", cache_key).and_then(|path| std::fs::read(path).ok());
    if let Some(kept) = kept.and_then(|kept| serde_json::from_slice::<CountedRows>(&kept).ok()) {
        return Ok(kept);
    }
    let activity = format!("counting the rows of {}", path.display());
    ctx.observer.report(&activity, 0, bytes);
    let mut reader = open_rows(path, dialect)?;
    reader.read_names()?;
    let (mut failed, mut longest_row) = (None, 0);
    let sizes = std::iter::from_fn(|| match reader.next() {
        Ok(row) => row.map(|(_, row)| {
            longest_row = longest_row.max(row.len() as u64);
            (LINE_PREFIX_BYTES + row.len()) as u64
        }),
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    let blocks = streaming::cut_into_blocks(0, sizes, BLOCK_BYTES);
    if let Some(error) = failed {
        return Err(error);
    }
    ctx.observer.report(&activity, bytes, bytes);
    let blocks = blocks.iter().map(|block| (block.records, block.bytes)).collect();
    let counted = CountedRows { blocks, longest_row, reader_bytes: reader.peak_bytes() };
    let keep = serde_json::to_vec(&counted).unwrap_or_default();
    // A failed cache write costs time only.
    drop(
        ctx.cache.get_or_create("csv-blocks", cache_key, |out| {
            out.write_all(&keep).map_err(DataError::write(path))
        }),
    );
    Ok(counted)
}

impl TableReader for SequentialTable {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn partitions(&self) -> usize {
        self.files.len()
    }

    fn partition_bytes(&self, part: usize) -> u64 {
        self.files[part].bytes
    }

    fn scan_bytes(&self) -> u64 {
        self.reader_bytes + self.fields_bytes
    }

    fn scan(&self, part: usize, columns: &[Column], see: &mut RowVisitor<'_>) -> Result<(), DataError> {
        let SequentialFile { path, first_row: first, .. } = &self.files[part];
        let mut reader = open_rows(path, self.dialect)?;
        reader.read_names()?;
        let (mut number, mut fields) = (*first, RowFields::default());
        while let Some((line, row)) = reader.next()? {
            let line = || line;
            let form = (self.dialect, self.width);
            let cells = CsvRow::new(row, &mut fields, form, columns, path, &line);
            see(number, cells.as_ref().map(|cells| cells as &dyn RowCells).map_err(Clone::clone))?;
            number += 1;
        }
        Ok(())
    }
}

/// Such files as a dataset.
pub struct SequentialDataset {
    pub table: SequentialTable,
    pub encoder: Arc<RowEncoder>,
    /// Number of rows per class, if counted.
    pub class_counts: Option<Vec<u64>>,
}

struct RowShard(Box<dyn RowReader>);

impl ShardReader for RowShard {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let Some((line, row)) = self.0.next()? else { return Ok(false) };
        into.extend_from_slice(&line.to_le_bytes());
        into.extend_from_slice(row);
        Ok(true)
    }
}

impl ShardedDataset for SequentialDataset {
    fn features(&self) -> &Features {
        &self.encoder.features
    }

    fn blocks(&self) -> &[RecordBlock] {
        &self.table.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError> {
        let mut reader = open_rows(&self.table.files[shard as usize].path, self.table.dialect)?;
        reader.read_names()?;
        Ok(Box::new(RowShard(reader)))
    }

    fn name(&self, shard: u32) -> String {
        format!("`{}`", self.table.files[shard as usize].path.display())
    }

    fn decode(
        &self,
        record: &[u8],
        index: u64,
        _: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        thread_local! {
            static FIELDS: std::cell::RefCell<RowFields> = std::cell::RefCell::default();
        }
        let table = &self.table;
        let file = table.files.partition_point(|file| file.first_row <= index) - 1;
        let (line, row) =
            record.split_first_chunk::<LINE_PREFIX_BYTES>().unwrap_or((&[0; LINE_PREFIX_BYTES], record));
        let line = || u64::from_le_bytes(*line);
        FIELDS.with_borrow_mut(|fields| {
            let (form, path) = ((table.dialect, table.width), &table.files[file].path);
            let cells = CsvRow::new(row, fields, form, &self.encoder.schema.columns, path, &line)?;
            self.encoder.encode_row(&cells, into)
        })
    }

    fn reader_bytes(&self) -> u64 {
        self.table.reader_bytes
    }

    fn resident_bytes(&self) -> u64 {
        let blocks = (self.table.blocks.capacity() * size_of::<RecordBlock>()) as u64;
        blocks + self.table.workers * self.table.fields_bytes + self.encoder.resident_bytes()
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
