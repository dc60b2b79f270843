//! Reads the rows of a text file sequentially, with any compression, in memory bounded by the longest row.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::arrow_file;
use super::arrow_rows::ArrowRows;
use super::dialect::{Dialect, MAX_ROW_BYTES, RowEnds, RowFields, RowFormat};
use super::index_evidence::is_unnamed;
use super::json_rows::JsonRows;
use crate::DataError;
use crate::error::ENCODING_HINT;
use crate::files::{self, read_error};

/// Bytes per read.
const READ_BYTES: usize = 256 << 10;

/// The columns of a file.
#[derive(Clone, Debug, Default)]
pub struct ColumnNames {
    pub names: Vec<String>,
    /// Columns that the header leaves without a name.
    pub unnamed: Vec<usize>,
    /// Columns that hold lists of texts.
    pub text_lists: Vec<usize>,
}

/// Reads the rows of a file.
pub trait RowReader: Send {
    /// The columns. Call it before [`next`](Self::next): a header is a row too.
    fn read_names(&mut self) -> Result<ColumnNames, DataError>;

    /// The next row, and the number of its first line, from 1.
    fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError>;

    /// Bytes that reading the rows up to here took at most, beside what decompresses them. It is the same each time
    /// that the file is read. 0 if the file declares them.
    fn peak_bytes(&self) -> u64;

    /// Bytes of the uncompressed text before the next row; 0 if the rows are not text in the file.
    fn offset(&self) -> u64 {
        0
    }
}

/// Opens `file` at its first row, after the skipped lines.
pub fn open_rows(file: &Path, dialect: Dialect) -> Result<Box<dyn RowReader>, DataError> {
    Ok(match dialect.rows {
        RowFormat::Delimited => Box::new(TextRows::open(file, dialect)?),
        RowFormat::Json => Box::new(JsonRows::open(file)?),
        RowFormat::Arrow => Box::new(ArrowRows::open(file)?),
    })
}

/// Reads rows of delimited text.
struct TextRows {
    file: PathBuf,
    body: Box<dyn Read + Send>,
    dialect: Dialect,
    buffer: Vec<u8>,
    /// Offset of the next line in `buffer`.
    position: usize,
    eof: bool,
    /// Bytes at most so far of the buffer while it grows: the old one and the new one.
    fill_bytes: u64,
    /// Bytes of the uncompressed file before `position`, and line breaks among them.
    offset: u64,
    line_breaks: u64,
}

impl TextRows {
    fn open(file: &Path, dialect: Dialect) -> Result<Self, DataError> {
        let body = dialect.encoding.reader(files::open(file)?);
        let buffer = Vec::new();
        let mut reader = Self {
            file: file.to_owned(),
            body,
            dialect,
            buffer,
            position: 0,
            eof: false,
            fill_bytes: 0,
            offset: 0,
            line_breaks: 0,
        };
        reader.fill()?;
        if arrow_file::is_arrow(&reader.buffer) || reader.buffer.starts_with(b"PAR1") {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: "it is a Parquet or an Arrow file, not text".into(),
                hint: "set `data.kind = \"parquet\"`, which reads both",
            });
        }
        if starts_as_json(&reader.buffer) {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: "it is JSON, not a table of delimited text".into(),
                hint: "set `data.kind = \"json\"`",
            });
        }
        if memchr::memchr(0, &reader.buffer).is_some() {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: "it contains NUL bytes".into(),
                hint: "if it is UTF-16, set `encoding = \"utf-16\"`; otherwise check that it is a text table",
            });
        }
        if reader.buffer.starts_with(b"\xef\xbb\xbf") {
            reader.advance(3);
        }
        for _ in 0..dialect.skip_lines {
            let length = reader.find_end(|rest| memchr::memchr(b'\n', rest).map(|i| i + 1))?;
            reader.advance(length);
        }
        Ok(reader)
    }

    fn advance(&mut self, length: usize) {
        self.line_breaks +=
            memchr::memchr_iter(b'\n', &self.buffer[self.position..self.position + length]).count() as u64;
        self.position += length;
        self.offset += length as u64;
    }

    /// Returns the length that `end` finds in the bytes from `position`, reading more until it finds one; at the
    /// end of the file, all remaining bytes.
    fn find_end(&mut self, end: impl Fn(&[u8]) -> Option<usize>) -> Result<usize, DataError> {
        loop {
            if let Some(length) = end(&self.buffer[self.position..]) {
                return Ok(length);
            }
            let buffered = self.buffer.len() - self.position;
            if self.eof {
                return Ok(buffered);
            }
            if buffered > MAX_ROW_BYTES {
                return Err(super::row_too_long(&self.file, self.line_breaks + 1));
            }
            self.fill()?;
        }
    }

    /// Reads more: `READ_BYTES`, or as much as is buffered already. Doubling keeps the rescans of a long row linear in
    /// its length.
    fn fill(&mut self) -> Result<(), DataError> {
        self.buffer.drain(..std::mem::take(&mut self.position));
        let more = self.buffer.len().max(READ_BYTES);
        if self.buffer.capacity() - self.buffer.len() < more {
            let before = self.buffer.capacity();
            self.buffer.reserve_exact(more);
            self.fill_bytes = self.fill_bytes.max((before + self.buffer.capacity()) as u64);
        }
        let more = more as u64;
        let read = (&mut self.body).take(more).read_to_end(&mut self.buffer);
        let read = read.map_err(|error| read_error(&self.file, error))?;
        self.eof = (read as u64) < more;
        Ok(())
    }
}

impl RowReader for TextRows {
    /// The row comes with its line break; blank lines are skipped.
    fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError> {
        loop {
            let dialect = self.dialect;
            let length = self.find_end(|rest| RowEnds::new(rest, false, dialect).next())?;
            if length == 0 {
                return Ok(None);
            }
            let row = self.position..self.position + length;
            if dialect.skips_line(&self.buffer[row.clone()]) {
                self.advance(length);
                continue;
            }
            let line = self.line_breaks + 1;
            if self.eof && row.end == self.buffer.len() {
                let mut breaks = RowEnds::new(&self.buffer[row.clone()], false, dialect);
                if breaks.next().is_none() && breaks.quoted {
                    return Err(super::unterminated_quote(&self.file, line));
                }
            }
            self.advance(length);
            return Ok(Some((line, &self.buffer[row])));
        }
    }

    fn peak_bytes(&self) -> u64 {
        (self.buffer.capacity() as u64).max(self.fill_bytes)
    }

    /// Column names: the first row if the dialect has a header; otherwise the column numbers from 0, and the row is
    /// not consumed. A column without a name is called by its number too.
    fn read_names(&mut self) -> Result<ColumnNames, DataError> {
        let dialect = self.dialect;
        let file = self.file.clone();
        let Some((line, row)) = self.next()? else {
            let set = format!("`{}`", file.display());
            return Err(DataError::NoSamples { set, why: "it has no rows".into() });
        };
        let mut fields = RowFields::default();
        fields.split(row, dialect);
        let mut found = ColumnNames::default();
        for i in 0..fields.len() {
            let field = fields.get(row, i);
            if !dialect.header {
                found.names.push(i.to_string());
                continue;
            }
            let Some(name) = dialect.encoding.decode(field) else {
                return Err(DataError::Table {
                    file,
                    place: format!("line {line}"),
                    problem: format!("the column name `{}` is not UTF-8 text", super::display_value(field)),
                    hint: ENCODING_HINT,
                });
            };
            // pandas calls a column so that it read without a name.
            if name.is_empty() || is_unnamed(&name) {
                found.unnamed.push(i);
            }
            found.names.push(if name.is_empty() { i.to_string() } else { name.into_owned() });
        }
        let length = row.len();
        if !dialect.header {
            // The last row is still in the buffer, right before `position`, so it can be put back.
            self.position -= length;
            self.offset -= length as u64;
            self.line_breaks = line - 1;
        }
        Ok(found)
    }

    fn offset(&self) -> u64 {
        self.offset
    }
}

/// Whether a file starts as an object of JSON, or a list of them.
fn starts_as_json(bytes: &[u8]) -> bool {
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).trim_ascii_start();
    let text = text.strip_prefix(b"[").map_or(text, <[u8]>::trim_ascii_start);
    text.strip_prefix(b"{").is_some_and(|text| text.trim_ascii_start().starts_with(b"\""))
}
