//! Compressed text tables, read sequentially; one file is one shard. A record is its line number, eight bytes,
//! followed by the raw row.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::arrow_file::ArrowFile;
use super::columns::Column;
use super::csv::{CsvHeader, CsvRow};
use super::dialect::{Dialect, RowFields, RowFormat};
use super::encoding::RowEncoder;
use super::rows::RowReader;
use super::schema::TableSchema;
use super::{RowCells, RowVisitor, TableReader};
use crate::cache::CacheKey;
use crate::streaming::{self, BLOCK_BYTES, RecordBlock, ShardReader, ShardedDataset};
use crate::{BatchRow, DataError, DatasetContext, Features, SampleKey, files};

/// Bytes of a record before its row.
const LINE_PREFIX_BYTES: usize = 8;

/// Files with the same columns, at least one of them compressed.
pub struct CompressedCsv {
    files: Vec<CompressedCsvFile>,
    dialect: Dialect,
    width: usize,
    blocks: Vec<RecordBlock>,
    rows: u64,
    /// Bytes that decompressing one of the files takes at most.
    decoder_bytes: u64,
}

struct CompressedCsvFile {
    path: PathBuf,
    /// Number of rows in the files before it.
    first_row: u64,
    /// Size on disk in bytes.
    bytes: u64,
}

impl CompressedCsv {
    /// Counts the rows of `paths`, or loads the cached counts.
    pub fn open(
        paths: &[PathBuf],
        headers: &[CsvHeader],
        dialect: Dialect,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let width = headers.first().map_or(0, |head| head.names.len());
        let count = |(shard, path): (usize, &PathBuf)| {
            let (_, bytes) = files::compression(path)?;
            Ok((bytes, count_blocks(shard as u32, path, bytes, dialect, ctx)?))
        };
        let counted: Result<Vec<_>, DataError> = paths.par_iter().enumerate().map(count).collect();
        let decoder_bytes = paths.iter().map(|path| match dialect.rows {
            RowFormat::Arrow => ArrowFile::open(path)?.reader_bytes(),
            RowFormat::Delimited | RowFormat::Json => files::decoder_bytes(path),
        });
        let decoder_bytes = decoder_bytes.collect::<Result<Vec<u64>, _>>()?.into_iter().max().unwrap_or(0);
        let mut packed =
            Self { files: Vec::new(), dialect, width, blocks: Vec::new(), rows: 0, decoder_bytes };
        for (path, (bytes, blocks)) in paths.iter().zip(counted?) {
            packed.files.push(CompressedCsvFile { path: path.clone(), first_row: packed.rows, bytes });
            packed.rows += blocks.iter().map(|block| block.records).sum::<u64>();
            packed.blocks.extend(blocks);
        }
        Ok(packed)
    }
}

/// Blocks of one file.
fn count_blocks(
    shard: u32,
    path: &Path,
    bytes: u64,
    dialect: Dialect,
    ctx: &DatasetContext,
) -> Result<Vec<RecordBlock>, DataError> {
    use std::io::Write;
    let cache_key = CacheKey::new(&[path.to_owned()], &format!("{dialect:?} {BLOCK_BYTES}"))?;
    let kept = ctx.cache.find("csv-blocks", cache_key).and_then(|path| std::fs::read(path).ok());
    if let Some(kept) = kept.and_then(|kept| serde_json::from_slice::<Vec<(u64, u64)>>(&kept).ok()) {
        return Ok(kept.into_iter().map(|(records, bytes)| RecordBlock { shard, records, bytes }).collect());
    }
    let activity = format!("counting the rows of {}", path.display());
    ctx.observer.report(&activity, 0, bytes);
    let mut reader = RowReader::open(path, dialect)?;
    reader.read_names()?;
    let mut failed = None;
    let sizes = std::iter::from_fn(|| match reader.next() {
        Ok(row) => row.map(|(_, row)| (LINE_PREFIX_BYTES + row.len()) as u64),
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    let blocks = streaming::cut_into_blocks(shard, sizes, BLOCK_BYTES);
    if let Some(error) = failed {
        return Err(error);
    }
    ctx.observer.report(&activity, bytes, bytes);
    let keep: Vec<(u64, u64)> = blocks.iter().map(|block| (block.records, block.bytes)).collect();
    let keep = serde_json::to_vec(&keep).unwrap_or_default();
    // A failed cache write costs time only.
    drop(
        ctx.cache.get_or_create("csv-blocks", cache_key, |out| {
            out.write_all(&keep).map_err(DataError::write(path))
        }),
    );
    Ok(blocks)
}

impl TableReader for CompressedCsv {
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
        self.decoder_bytes
    }

    fn scan(&self, part: usize, columns: &[Column], see: &mut RowVisitor<'_>) -> Result<(), DataError> {
        let CompressedCsvFile { path, first_row: first, .. } = &self.files[part];
        let mut reader = RowReader::open(path, self.dialect)?;
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

/// Compressed files as a dataset.
pub struct CompressedCsvDataset {
    pub table: CompressedCsv,
    pub encoder: Arc<RowEncoder>,
    /// Number of rows per class, if counted.
    pub class_counts: Option<Vec<u64>>,
}

struct CsvShardReader {
    reader: RowReader,
}

impl ShardReader for CsvShardReader {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let Some((line, row)) = self.reader.next()? else { return Ok(false) };
        into.extend_from_slice(&line.to_le_bytes());
        into.extend_from_slice(row);
        Ok(true)
    }
}

impl ShardedDataset for CompressedCsvDataset {
    fn features(&self) -> &Features {
        &self.encoder.features
    }

    fn blocks(&self) -> &[RecordBlock] {
        &self.table.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError> {
        let mut reader = RowReader::open(&self.table.files[shard as usize].path, self.table.dialect)?;
        reader.read_names()?;
        Ok(Box::new(CsvShardReader { reader }))
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
        let packed = &self.table;
        let file = packed.files.partition_point(|file| file.first_row <= index) - 1;
        let (line, row) =
            record.split_first_chunk::<LINE_PREFIX_BYTES>().unwrap_or((&[0; LINE_PREFIX_BYTES], record));
        let line = || u64::from_le_bytes(*line);
        FIELDS.with_borrow_mut(|fields| {
            let (form, path) = ((packed.dialect, packed.width), &packed.files[file].path);
            let cells = CsvRow::new(row, fields, form, &self.encoder.schema.columns, path, &line)?;
            self.encoder.encode_row(&cells, into)
        })
    }

    fn reader_bytes(&self) -> u64 {
        self.table.decoder_bytes
    }

    fn resident_bytes(&self) -> u64 {
        (self.table.blocks.capacity() * size_of::<RecordBlock>()) as u64 + self.encoder.resident_bytes()
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
