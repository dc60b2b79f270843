//! Tables of plain text, read at any row: an [`Index`] of each file says where, and a block of about 4 KiB is read.
//!
//! Files are read and not mapped, so that what is resident is bounded and a file that is cut short while it is
//! read is an error and not the end of the process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::columns::{Column, Look, Reading, SAMPLE_ROWS};
use super::dialect::{Breaks, Dialect, Fields, MAX_ROW};
use super::encoding::Encoding;
use super::index::{self, Block, Index, Scan};
use super::rows::RowReader;
use super::{Cell, Cells, Raw, See};
use crate::data::cache::Fingerprint;
use crate::data::{DataError, Features, Key, Opening, Row, Source};
use crate::regular;

/// The beginning of a file of text.
pub struct Head {
    pub names: Vec<String>,
    /// The first byte of the first row of data.
    body: u64,
}

impl Head {
    pub fn read(file: &Path, dialect: Dialect) -> Result<Self, DataError> {
        let mut reader = RowReader::open(file, dialect)?;
        let names = reader.names()?;
        if let [only] = &names[..] {
            let others = [(',', "`,`"), (';', "`;`"), ('\t', "a tab"), ('|', "`|`"), (' ', "a space")];
            let other = others.into_iter().find(|(delimiter, _)| only.contains(*delimiter));
            let other = other.map(|(_, name)| format!(", which has {name} in it")).unwrap_or_default();
            let only = if dialect.header {
                format!(", `{}`{other}", super::shown(only.as_bytes()))
            } else {
                String::new()
            };
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: format!("there is one column only{only}"),
                hint: "a table needs inputs and a target: check `delimiter` and `skip_lines`",
            });
        }
        Ok(Self { names, body: reader.offset })
    }

    /// What the first rows of `file` have in each column.
    pub fn looks(
        &self,
        file: &Path,
        dialect: Dialect,
        reading: &Reading,
        targets: &[String],
    ) -> Result<Vec<Look>, DataError> {
        let mut reader = RowReader::open(file, dialect)?;
        let mut looks = vec![Look::default(); self.names.len()];
        let of_targets = looks.iter_mut().zip(&self.names).filter(|(_, name)| targets.contains(name));
        of_targets.for_each(|(look, _)| look.counted());
        reader.names()?;
        let mut fields = Fields::default();
        for _ in 0..SAMPLE_ROWS {
            let Some((_, row)) = reader.next()? else { break };
            fields.split(row, dialect.delimiter);
            // A row with other columns is told when it is read.
            if fields.len() == looks.len() {
                let cells = (0..fields.len()).map(|i| Cell::Text(fields.get(row, i)));
                looks.iter_mut().zip(cells).for_each(|(look, cell)| look.see(cell, reading));
            }
        }
        Ok(looks)
    }
}

/// A row of text and where it stands.
pub struct TextRow<'a> {
    row: &'a [u8],
    fields: &'a Fields,
    columns: &'a [Column],
    file: &'a Path,
    /// The line, from 1, which may take long to find.
    line: &'a dyn Fn() -> u64,
}

impl<'a> TextRow<'a> {
    /// Splits `row`; it must have as many fields as the table has columns, `width`.
    pub fn new(
        row: &'a [u8],
        fields: &'a mut Fields,
        (dialect, width): (Dialect, usize),
        columns: &'a [Column],
        file: &'a Path,
        line: &'a dyn Fn() -> u64,
    ) -> Result<Self, DataError> {
        fields.split(row, dialect.delimiter);
        if fields.len() != width {
            let found = fields.len();
            return Err(DataError::Record {
                file: file.to_owned(),
                place: format!("line {}", line()),
                problem: format!("the row has {found} fields, and the table has {width} columns"),
            });
        }
        Ok(Self { row, fields, columns, file, line })
    }
}

impl Cells for TextRow<'_> {
    fn cell(&self, i: usize) -> Cell<'_> {
        Cell::Text(self.fields.get(self.row, self.columns[i].at))
    }

    fn fault(&self, i: usize, wanted: String) -> DataError {
        let column = &self.columns[i];
        DataError::Cell {
            file: self.file.to_owned(),
            line: (self.line)(),
            column: column.name.clone(),
            value: super::shown(self.fields.get(self.row, column.at)),
            wanted,
        }
    }
}

/// Plain files with the same columns.
pub struct Text {
    files: Vec<TextFile>,
    dialect: Dialect,
    /// Columns of the table.
    width: usize,
    rows: u64,
    /// What threads go through: a file, its blocks together, one past the last row.
    runs: Vec<(usize, Block, u64)>,
    /// Tells the blocks that threads hold apart; not 0.
    id: u64,
}

struct TextFile {
    path: PathBuf,
    file: File,
    index: Index,
    /// Rows of the files before.
    first: u64,
    /// The lines of bytes that were asked for: the next one is counted from the nearest before it.
    lines: Mutex<BTreeMap<u64, u64>>,
}

impl Text {
    /// `heads` are of `paths`.
    pub fn open(
        paths: &[PathBuf],
        heads: &[Head],
        dialect: Dialect,
        opening: &Opening,
    ) -> Result<Self, DataError> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let width = heads.first().map_or(0, |head| head.names.len());
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let mut text = Self { files: Vec::new(), dialect, width, rows: 0, runs: Vec::new(), id };
        for (i, (path, head)) in paths.iter().zip(heads).enumerate() {
            let file = regular::open(path).map_err(DataError::io(path))?;
            let index = find_rows(path, &file, head.body, dialect, opening)?;
            text.runs.extend(index.runs().into_iter().map(|(block, end)| (i, block, end)));
            let first = text.rows;
            text.rows += index.rows;
            let (bytes, limit) = (text.index_bytes() + index.bytes(), opening.max_bytes);
            if bytes > limit {
                return Err(DataError::TooLarge { file: path.clone(), bytes, limit });
            }
            text.files.push(TextFile { path: path.clone(), file, index, first, lines: Mutex::default() });
        }
        Ok(text)
    }

    /// Reads the block that row `index` is in.
    fn hold(&self, held: &mut Held, index: u64) -> Result<(), DataError> {
        held.set = 0;
        held.file = self.files.partition_point(|file| file.first <= index) - 1;
        let file = &self.files[held.file];
        let (block, end) = file.index.block(index - file.first);
        file.block(block, &mut held.text)?;
        (held.set, held.start, held.at) = (self.id, block.start, 0);
        held.rows = file.first + block.row..file.first + end;
        held.row = held.rows.start;
        Ok(())
    }

    pub fn index_bytes(&self) -> u64 {
        let runs = self.runs.capacity() * size_of::<(usize, Block, u64)>();
        self.files.iter().map(|file| file.index.bytes()).sum::<u64>() + runs as u64
    }
}

impl TextFile {
    /// Reads a block over what `into` holds.
    fn block(&self, block: Block, into: &mut Vec<u8>) -> Result<(), DataError> {
        let length = block.end - block.start;
        // A run of blocks is no longer than a chunk or a row.
        if length > (MAX_ROW + (4 << 20)) as u64 {
            return Err(super::too_long(&self.path, self.line(block.start)));
        }
        index::read_into(&self.path, &self.file, block.start, length as usize, into)?;
        if into.len() as u64 != length {
            return Err(self.changed());
        }
        Ok(())
    }

    /// The number, from 1, of the line that begins at a byte. Where the file cannot be read any more it is that of
    /// an earlier one: that is not the error being told.
    fn line(&self, offset: u64) -> u64 {
        /// Places that are remembered.
        const MOST: usize = 10_000;
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let (from, before) = lines.range(..=offset).next_back().map_or((0, 1), |(from, line)| (*from, *line));
        let line = before + index::line_feeds(&self.path, &self.file, from..offset).unwrap_or(0);
        if lines.len() < MOST {
            lines.insert(offset, line);
        }
        line
    }

    fn changed(&self) -> DataError {
        let found = "its rows lie elsewhere".into();
        DataError::Changed { what: format!("`{}`", self.path.display()), found }
    }
}

/// The rows of a file, from the cache where they were found before. A cache that cannot be written costs time only.
fn find_rows(
    path: &Path,
    file: &File,
    from: u64,
    dialect: Dialect,
    opening: &Opening,
) -> Result<Index, DataError> {
    use std::io::Write;
    let of = Fingerprint::of(&[path.to_owned()], &format!("{dialect:?} {from}"))?;
    let kept = opening.cache.find("csv-rows", of).and_then(|path| std::fs::read(path).ok());
    if let Some(index) = kept.and_then(|bytes| Index::from_bytes(&bytes)) {
        return Ok(index);
    }
    let index = Index::make(&Scan { path, file, from, delimiter: dialect.delimiter }, &*opening.watch)?;
    let bytes = index.to_bytes();
    drop(opening.cache.get("csv-rows", of, |out| out.write_all(&bytes).map_err(DataError::writing(path))));
    Ok(index)
}

/// The end of the row that begins at `at`, or of the text.
fn row_end(text: &[u8], at: usize, dialect: Dialect) -> usize {
    Breaks::new(&text[at..], false, dialect.delimiter).next().map_or(text.len(), |length| at + length)
}

impl Raw for Text {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn parts(&self) -> usize {
        self.runs.len()
    }

    fn part_bytes(&self, part: usize) -> u64 {
        self.runs[part].1.end - self.runs[part].1.start
    }

    fn pass(&self, part: usize, columns: &[Column], see: &mut See<'_>) -> Result<(), DataError> {
        let (file, block, last) = self.runs[part];
        let file = &self.files[file];
        let (mut text, mut fields) = (Vec::new(), Fields::default());
        file.block(block, &mut text)?;
        let (mut at, mut row) = (0, block.row);
        while at < text.len() {
            let end = row_end(&text, at, self.dialect);
            if !self.dialect.delimiter.blank(&text[at..end]) {
                let line = || file.line(block.start + at as u64);
                let form = (self.dialect, self.width);
                let cells = TextRow::new(&text[at..end], &mut fields, form, columns, &file.path, &line);
                see(file.first + row, cells.as_ref().map(|cells| cells as &dyn Cells).map_err(Clone::clone))?;
                row += 1;
            }
            at = end;
        }
        if row == last { Ok(()) } else { Err(file.changed()) }
    }
}

/// The block that a thread read last: rows that follow each other are found in it.
#[derive(Default)]
struct Held {
    /// Of which set, and which of its rows; none until all of the block is read.
    set: u64,
    rows: Range<u64>,
    /// Its file, and its first byte there.
    file: usize,
    start: u64,
    text: Vec<u8>,
    /// Where row `row` begins.
    at: usize,
    row: u64,
    fields: Fields,
}

thread_local! {
    static HELD: RefCell<Held> = RefCell::default();
}

/// Plain files as samples.
pub struct Csv {
    pub text: Text,
    pub encoding: Arc<Encoding>,
    /// Rows of each class, where they were counted.
    pub balance: Option<Vec<u64>>,
}

impl Source for Csv {
    fn len(&self) -> u64 {
        self.text.rows
    }

    fn features(&self) -> &Features {
        &self.encoding.features
    }

    fn read(&self, index: u64, _: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        let text = &self.text;
        HELD.with_borrow_mut(|held| {
            if held.set != text.id || !held.rows.contains(&index) {
                text.hold(held, index)?;
            } else if index < held.row {
                (held.at, held.row) = (0, held.rows.start);
            }
            let file = &text.files[held.file];
            loop {
                let (at, dialect) = (held.at, text.dialect);
                if at == held.text.len() {
                    held.set = 0;
                    return Err(file.changed());
                }
                held.at = row_end(&held.text, at, dialect);
                let row = &held.text[at..held.at];
                if dialect.delimiter.blank(row) {
                    continue;
                }
                held.row += 1;
                if held.row > index {
                    let line = || file.line(held.start + at as u64);
                    let (form, columns) = ((dialect, text.width), &self.encoding.columns);
                    let cells = TextRow::new(row, &mut held.fields, form, columns, &file.path, &line)?;
                    return self.encoding.write(&cells, into);
                }
            }
        })
    }

    fn resident_bytes(&self) -> u64 {
        self.text.index_bytes() + self.encoding.bytes()
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
