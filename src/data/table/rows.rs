//! The rows of a text file read forward, whatever its packing, in memory bounded by the longest row.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::dialect::{Breaks, Dialect, Fields, MAX_ROW};
use crate::data::DataError;
use crate::data::files::{self, fault};

/// Bytes read at once.
const PIECE: usize = 256 << 10;

/// A file of rows that is being read.
pub struct RowReader {
    file: PathBuf,
    body: Box<dyn Read + Send>,
    dialect: Dialect,
    buffer: Vec<u8>,
    /// Where in `buffer` the next line begins.
    at: usize,
    ended: bool,
    /// Bytes of the unpacked file before `at`, and line breaks among them.
    pub offset: u64,
    lines: u64,
}

impl RowReader {
    /// Opens `file` at its first row, behind the lines to be skipped.
    pub fn open(file: &Path, dialect: Dialect) -> Result<Self, DataError> {
        let body = files::open(file)?;
        let buffer = Vec::new();
        let mut reader =
            Self { file: file.to_owned(), body, dialect, buffer, at: 0, ended: false, offset: 0, lines: 0 };
        reader.fill()?;
        if memchr::memchr(0, &reader.buffer).is_some() {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: "it has bytes of value 0, which no UTF-8 text has".into(),
                hint: "if it is UTF-16, convert it to UTF-8; otherwise check that it is a table of text",
            });
        }
        if reader.buffer.starts_with(b"\xef\xbb\xbf") {
            reader.advance(3);
        }
        for _ in 0..dialect.skip_lines {
            let length = reader.find(|rest| memchr::memchr(b'\n', rest).map(|i| i + 1))?;
            reader.advance(length);
        }
        Ok(reader)
    }

    /// The next row with its line break, and the number of its first line, from 1. Blank lines are passed over.
    pub fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError> {
        loop {
            let delimiter = self.dialect.delimiter;
            let length = self.find(|rest| Breaks::new(rest, false, delimiter).next())?;
            if length == 0 {
                return Ok(None);
            }
            let row = self.at..self.at + length;
            if delimiter.blank(&self.buffer[row.clone()]) {
                self.advance(length);
                continue;
            }
            let line = self.lines + 1;
            if self.ended && row.end == self.buffer.len() {
                let mut breaks = Breaks::new(&self.buffer[row.clone()], false, delimiter);
                if breaks.next().is_none() && breaks.quoted {
                    return Err(super::never_ends(&self.file, line));
                }
            }
            self.advance(length);
            return Ok(Some((line, &self.buffer[row])));
        }
    }

    /// The names of the columns: the first row where the dialect has a header; otherwise their numbers, from 0,
    /// and the row stays to be read. A column without a name is called by its number too.
    pub fn names(&mut self) -> Result<Vec<String>, DataError> {
        let (header, delimiter) = (self.dialect.header, self.dialect.delimiter);
        let file = self.file.clone();
        let Some((line, row)) = self.next()? else {
            let set = format!("`{}`", file.display());
            return Err(DataError::NoSamples { set, why: "it has no rows".into() });
        };
        let mut fields = Fields::default();
        fields.split(row, delimiter);
        let name = |i: usize| match fields.get(row, i) {
            [] => i.to_string(),
            _ if !header => i.to_string(),
            name => String::from_utf8_lossy(name).into_owned(),
        };
        let (names, length) = ((0..fields.len()).map(name).collect(), row.len());
        if !header {
            // The row that was given last still lies in the buffer, right before `at`.
            self.at -= length;
            self.offset -= length as u64;
            self.lines = line - 1;
        }
        Ok(names)
    }

    fn advance(&mut self, length: usize) {
        self.lines += memchr::memchr_iter(b'\n', &self.buffer[self.at..self.at + length]).count() as u64;
        self.at += length;
        self.offset += length as u64;
    }

    /// How long what `end` finds in the bytes from `at` is, reading on until it finds something; all that is
    /// left where it never does.
    fn find(&mut self, end: impl Fn(&[u8]) -> Option<usize>) -> Result<usize, DataError> {
        loop {
            if let Some(length) = end(&self.buffer[self.at..]) {
                return Ok(length);
            }
            let held = self.buffer.len() - self.at;
            if self.ended {
                return Ok(held);
            }
            if held > MAX_ROW {
                return Err(super::too_long(&self.file, self.lines + 1));
            }
            self.fill()?;
        }
    }

    /// Reads on: a piece, or as much as is held already, so that a long row is looked at a few times only.
    fn fill(&mut self) -> Result<(), DataError> {
        self.buffer.drain(..std::mem::take(&mut self.at));
        let more = self.buffer.len().max(PIECE) as u64;
        let read = (&mut self.body).take(more).read_to_end(&mut self.buffer);
        let read = read.map_err(|error| fault(&self.file, error))?;
        self.ended = (read as u64) < more;
        Ok(())
    }
}
