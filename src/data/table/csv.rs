//! Uncompressed text tables with random access by row: a [`RowIndex`] per file locates the row, and a block of about 4
//! KiB is read.
//!
//! Files are read and not memory-mapped, so resident memory stays bounded, and a file that is truncated while it is
//! read is an error and not a SIGBUS.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::columns::{CellParser, Column};
use super::dialect::{Dialect, MAX_ROW_BYTES, RowEnds, RowFields};
use super::encoding::RowEncoder;
use super::index_evidence::{is_index_name, names_rows};
use super::inference::{ColumnInference, MAX_WATCHED_COLUMNS, SAMPLE_ROWS};
use super::row_index::{self, LONG_ROW_BYTES, RowBlock, RowIndex, RowScan};
use super::rows::{ColumnNames, open_rows};
use super::schema::TableSchema;
use super::text_encoding::TextEncoding;
use super::{CellValue, RowCells, RowVisitor, TableReader};
use crate::base::regular_file;
use crate::cache::CacheKey;
use crate::{BatchRow, DataError, Dataset, DatasetContext, Features, SampleKey};

/// Header of a text file.
pub struct TableHeader {
    pub names: Vec<String>,
    /// Columns without a name.
    unnamed: Vec<usize>,
    /// Columns that hold lists of texts.
    text_lists: Vec<usize>,
    /// Byte offset of the first data row.
    body_offset: u64,
}

impl TableHeader {
    pub fn read(file: &Path, dialect: Dialect) -> Result<Self, DataError> {
        let mut reader = open_rows(file, dialect)?;
        let ColumnNames { names, unnamed, text_lists } = reader.read_names()?;
        Ok(Self { names, unnamed, text_lists, body_offset: reader.offset() })
    }

    /// Refuses a table that has no room for inputs and a target.
    pub fn check_width(&self, file: &Path, dialect: Dialect) -> Result<(), DataError> {
        if let [only] = &self.names[..] {
            let others = [(',', "`,`"), (';', "`;`"), ('\t', "a tab"), ('|', "`|`"), (' ', "a space")];
            let other = others.into_iter().find(|(delimiter, _)| only.contains(*delimiter));
            let other = other.map(|(_, name)| format!(", which contains {name}")).unwrap_or_default();
            let only = if dialect.header {
                format!(", `{}`{other}", super::display_value(only.as_bytes()))
            } else {
                String::new()
            };
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: format!("it has only one column{only}"),
                hint: "a table needs inputs and a target: check `delimiter` and `skip_lines`",
            });
        }
        Ok(())
    }

    /// Infers each column from the first rows of `file`.
    pub fn infer_columns(
        &self,
        file: &Path,
        dialect: Dialect,
        parser: &CellParser,
        targets: &[String],
    ) -> Result<Vec<ColumnInference>, DataError> {
        let mut reader = open_rows(file, dialect)?;
        let mut inferred = vec![ColumnInference::default(); self.names.len()];
        // A table may have very many columns and targets.
        let targets: HashSet<&String> = targets.iter().collect();
        let of_targets = inferred.iter_mut().zip(&self.names).filter(|(_, name)| targets.contains(name));
        of_targets.for_each(|(look, _)| look.count_distinct());
        self.unnamed.iter().for_each(|i| inferred[*i].watch_for_index());
        let of_rows = inferred.iter_mut().zip(&self.names).filter(|(_, name)| names_rows(name));
        of_rows.for_each(|(look, _)| look.watch_for_index());
        let of_indices = inferred.iter_mut().zip(&self.names).filter(|(_, name)| is_index_name(name));
        of_indices.for_each(|(look, _)| look.mark_as_index());
        self.text_lists.iter().for_each(|i| inferred[*i].text_list = true);
        inferred.iter_mut().take(MAX_WATCHED_COLUMNS).for_each(ColumnInference::watch);
        let only_target = self.names.iter().position(|name| targets.len() == 1 && targets.contains(name));
        reader.read_names()?;
        let mut fields = RowFields::default();
        for _ in 0..SAMPLE_ROWS {
            let Some((line, row)) = reader.next()? else { break };
            fields.split(row, dialect);
            // A row with the wrong number of columns is reported when it is read.
            if fields.len() == inferred.len() {
                let cells = (0..fields.len()).map(|i| CellValue::Text(fields.get(row, i)));
                let target = only_target.map(|i| CellValue::Text(fields.get(row, i)));
                for (look, cell) in inferred.iter_mut().zip(cells) {
                    look.observe(cell, parser, line);
                    if let Some(target) = target {
                        look.compare_with_target(cell, target);
                    }
                }
            }
        }
        Ok(inferred)
    }
}

/// A row of text and its location.
pub struct CsvRow<'a> {
    row: &'a [u8],
    fields: &'a RowFields,
    columns: &'a [Column],
    file: &'a Path,
    encoding: TextEncoding,
    /// Computes the line number, from 1. Expensive: called for errors only.
    line: &'a dyn Fn() -> u64,
}

impl<'a> CsvRow<'a> {
    /// Splits `row`, which must have `width` fields, one per column of the table.
    pub fn new(
        row: &'a [u8],
        fields: &'a mut RowFields,
        (dialect, width): (Dialect, usize),
        columns: &'a [Column],
        file: &'a Path,
        line: &'a dyn Fn() -> u64,
    ) -> Result<Self, DataError> {
        fields.split(row, dialect);
        if fields.len() != width {
            let found = fields.len();
            return Err(DataError::Record {
                file: file.to_owned(),
                place: format!("line {}", line()),
                problem: format!("expected {width} fields, got {found}"),
            });
        }
        Ok(Self { row, fields, columns, file, encoding: dialect.encoding, line })
    }
}

fn display_field(field: &[u8], encoding: TextEncoding) -> String {
    match encoding.decode(field) {
        Some(text) => super::display_value(text.as_bytes()),
        None => super::display_value(field),
    }
}

impl RowCells for CsvRow<'_> {
    fn cell(&self, i: usize) -> CellValue<'_> {
        CellValue::Text(self.fields.get(self.row, self.columns[i].index))
    }

    fn cell_error(&self, i: usize, expected: String) -> DataError {
        let column = &self.columns[i];
        DataError::Cell {
            file: self.file.to_owned(),
            line: (self.line)(),
            column: column.name.clone(),
            value: display_field(self.fields.get(self.row, column.index), self.encoding),
            expected,
        }
    }
}

/// Uncompressed files with the same columns.
pub struct CsvTable {
    files: Vec<CsvFile>,
    dialect: Dialect,
    /// Number of columns of the table.
    width: usize,
    rows: u64,
    /// Units of a parallel scan: file, a run of its blocks, and one past the last row.
    partitions: Vec<(usize, RowBlock, u64)>,
    /// Identifies the table in the per-thread block buffers; never 0.
    id: u64,
    /// Bytes that all threads that read it hold of its longest rows.
    buffer_bytes: u64,
}

struct CsvFile {
    path: PathBuf,
    file: File,
    index: RowIndex,
    /// Number of rows in the files before it.
    first_row: u64,
    /// Line numbers computed so far, by byte offset; the next count starts at the closest one before it.
    line_numbers: Mutex<BTreeMap<u64, u64>>,
}

impl CsvTable {
    /// `headers` are those of `paths`, in order.
    pub fn open(
        paths: &[PathBuf],
        headers: &[TableHeader],
        dialect: Dialect,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let width = headers.first().map_or(0, |head| head.names.len());
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let mut text =
            Self { files: Vec::new(), dialect, width, rows: 0, partitions: Vec::new(), id, buffer_bytes: 0 };
        for (i, (path, head)) in paths.iter().zip(headers).enumerate() {
            let file = regular_file::open(path).map_err(DataError::io(path))?;
            let index = load_row_index(path, &file, head.body_offset, dialect, ctx)?;
            text.partitions.extend(index.partitions().into_iter().map(|(block, end)| (i, block, end)));
            let first = text.rows;
            text.rows += index.rows;
            let (bytes, limit) = (text.index_bytes() + index.resident_bytes(), ctx.max_bytes);
            if bytes > limit {
                return Err(DataError::TooLarge { file: path.clone(), bytes, limit });
            }
            text.files.push(CsvFile {
                path: path.clone(),
                file,
                index,
                first_row: first,
                line_numbers: Mutex::default(),
            });
        }
        let longest = text.files.iter().map(|file| file.index.longest_block()).max().unwrap_or(0);
        // The thread that opens a table has read some of it too.
        text.buffer_bytes = (ctx.workers.max(1) as u64 + 1) * text.reading_bytes(longest);
        Ok(text)
    }

    /// Bytes that reading `bytes` of text at once takes, with the fields of its longest row; 0 if it is little, which
    /// the plan covers for every thread.
    fn reading_bytes(&self, bytes: u64) -> u64 {
        let quoted = self.files.iter().any(|file| file.index.long_quotes);
        match bytes <= LONG_ROW_BYTES {
            true => 0,
            false => bytes + RowFields::max_bytes(self.width, bytes, quoted),
        }
    }

    /// Reads the block that contains row `index`.
    fn load_block(&self, buffer: &mut BlockBuffer, index: u64) -> Result<(), DataError> {
        buffer.table_id = 0;
        buffer.file = self.files.partition_point(|file| file.first_row <= index) - 1;
        let file = &self.files[buffer.file];
        let (block, end) = file.index.block_of_row(index - file.first_row);
        file.read_block(block, &mut buffer.text)?;
        (buffer.table_id, buffer.start, buffer.next_row_offset) = (self.id, block.start, 0);
        buffer.rows = file.first_row + block.first_row..file.first_row + end;
        buffer.next_row = buffer.rows.start;
        Ok(())
    }

    pub fn index_bytes(&self) -> u64 {
        let runs = self.partitions.capacity() * size_of::<(usize, RowBlock, u64)>();
        self.files.iter().map(|file| file.index.resident_bytes()).sum::<u64>() + runs as u64
    }
}

impl CsvFile {
    /// Reads a block into `into`, replacing its content.
    fn read_block(&self, block: RowBlock, into: &mut Vec<u8>) -> Result<(), DataError> {
        let length = block.end - block.start;
        // A run of blocks is at most one chunk or one row long.
        if length > (MAX_ROW_BYTES + (4 << 20)) as u64 {
            return Err(super::row_too_long(&self.path, self.line_number(block.start)));
        }
        row_index::read_into(&self.path, &self.file, block.start, length as usize, into)?;
        if into.len() as u64 != length {
            return Err(self.changed_error());
        }
        Ok(())
    }

    /// Line number, from 1, of the line at byte `offset`. If the file can no longer be read, an earlier line number is
    /// returned: the caller is already reporting another error.
    fn line_number(&self, offset: u64) -> u64 {
        /// Maximum number of remembered offsets.
        const MAX_REMEMBERED: usize = 10_000;
        let mut lines = self.line_numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let (from, before) = lines.range(..=offset).next_back().map_or((0, 1), |(from, line)| (*from, *line));
        let line = before + row_index::line_feeds(&self.path, &self.file, from..offset).unwrap_or(0);
        if lines.len() < MAX_REMEMBERED {
            lines.insert(offset, line);
        }
        line
    }

    fn changed_error(&self) -> DataError {
        let found = "its row offsets changed".into();
        DataError::ChangedSinceOpen { what: format!("`{}`", self.path.display()), found }
    }
}

/// Row index of a file, from the cache if possible. A failed cache write costs time only.
fn load_row_index(
    path: &Path,
    file: &File,
    from: u64,
    dialect: Dialect,
    ctx: &DatasetContext,
) -> Result<RowIndex, DataError> {
    use std::io::Write;
    let cache_key = CacheKey::new(&[path.to_owned()], &format!("{dialect:?} {from} 2"))?;
    let kept = ctx.cache.find("csv-rows", cache_key).and_then(|path| std::fs::read(path).ok());
    if let Some(index) = kept.and_then(|bytes| RowIndex::from_bytes(&bytes)) {
        return Ok(index);
    }
    let index = RowIndex::build(&RowScan { path, file, body_offset: from, dialect }, &*ctx.observer)?;
    let bytes = index.to_bytes();
    drop(
        ctx.cache.get_or_create("csv-rows", cache_key, |out| {
            out.write_all(&bytes).map_err(DataError::write(path))
        }),
    );
    Ok(index)
}

/// End of the row that starts at `at`, or the end of the text.
fn row_end(text: &[u8], at: usize, dialect: Dialect) -> usize {
    RowEnds::new(&text[at..], false, dialect).next().map_or(text.len(), |length| at + length)
}

impl TableReader for CsvTable {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn partitions(&self) -> usize {
        self.partitions.len()
    }

    fn partition_bytes(&self, part: usize) -> u64 {
        self.partitions[part].1.end - self.partitions[part].1.start
    }

    fn scan_bytes(&self) -> u64 {
        let largest = (0..self.partitions()).map(|part| self.partition_bytes(part)).max().unwrap_or(0);
        if largest > row_index::CHUNK_BYTES { self.reading_bytes(largest) } else { 0 }
    }

    fn scan(&self, part: usize, columns: &[Column], see: &mut RowVisitor<'_>) -> Result<(), DataError> {
        let (file, block, last) = self.partitions[part];
        let file = &self.files[file];
        let (mut text, mut fields) = (Vec::new(), RowFields::default());
        file.read_block(block, &mut text)?;
        let (mut at, mut row) = (0, block.first_row);
        while at < text.len() {
            let end = row_end(&text, at, self.dialect);
            if !self.dialect.skips_line(&text[at..end]) {
                let line = || file.line_number(block.start + at as u64);
                let form = (self.dialect, self.width);
                let cells = CsvRow::new(&text[at..end], &mut fields, form, columns, &file.path, &line);
                see(
                    file.first_row + row,
                    cells.as_ref().map(|cells| cells as &dyn RowCells).map_err(Clone::clone),
                )?;
                row += 1;
            }
            at = end;
        }
        if row == last { Ok(()) } else { Err(file.changed_error()) }
    }
}

/// The block a thread read last; consecutive rows are served from it.
#[derive(Default)]
struct BlockBuffer {
    /// The table it belongs to, and its rows there; empty until the whole block is read.
    table_id: u64,
    rows: Range<u64>,
    /// Its file, and its byte offset there.
    file: usize,
    start: u64,
    text: Vec<u8>,
    /// Offset of row `next_row` in `text`.
    next_row_offset: usize,
    next_row: u64,
    fields: RowFields,
}

thread_local! {
    static BLOCK_BUFFER: RefCell<BlockBuffer> = RefCell::default();
}

/// Uncompressed files as a dataset.
pub struct CsvDataset {
    pub table: CsvTable,
    pub encoder: Arc<RowEncoder>,
    /// Number of rows per class, if counted.
    pub class_counts: Option<Vec<u64>>,
}

impl Dataset for CsvDataset {
    fn len(&self) -> u64 {
        self.table.rows
    }

    fn features(&self) -> &Features {
        &self.encoder.features
    }

    fn read(&self, index: u64, _: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let text = &self.table;
        BLOCK_BUFFER.with_borrow_mut(|buffer| {
            if buffer.table_id != text.id || !buffer.rows.contains(&index) {
                text.load_block(buffer, index)?;
            } else if index < buffer.next_row {
                (buffer.next_row_offset, buffer.next_row) = (0, buffer.rows.start);
            }
            let file = &text.files[buffer.file];
            loop {
                let (at, dialect) = (buffer.next_row_offset, text.dialect);
                if at == buffer.text.len() {
                    buffer.table_id = 0;
                    return Err(file.changed_error());
                }
                buffer.next_row_offset = row_end(&buffer.text, at, dialect);
                let row = &buffer.text[at..buffer.next_row_offset];
                if dialect.skips_line(row) {
                    continue;
                }
                buffer.next_row += 1;
                if buffer.next_row > index {
                    let line = || file.line_number(buffer.start + at as u64);
                    let (form, columns) = ((dialect, text.width), &self.encoder.schema.columns);
                    let cells = CsvRow::new(row, &mut buffer.fields, form, columns, &file.path, &line)?;
                    return self.encoder.encode_row(&cells, into);
                }
            }
        })
    }

    fn resident_bytes(&self) -> u64 {
        self.table.index_bytes() + self.table.buffer_bytes + self.encoder.resident_bytes()
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
