//! Reads the lines of files in chunks of many lines.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use super::super::DataError;
use super::super::pieces::{FileProgress, PIECE_BYTES};
use crate::data::files;

/// Maximum line length in bytes; a longer line is not a record.
const MAX_LINE_BYTES: usize = 64 << 20;

/// Whole lines of one file.
pub struct LineChunk<'a> {
    pub file: &'a Path,
    /// Number of the first line, from 1.
    first_line: u64,
    bytes: Vec<u8>,
}

impl LineChunk<'_> {
    /// Lines with their numbers and without line endings; blank lines are skipped.
    pub fn lines(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let numbered = (self.first_line..).zip(self.bytes.split(|&byte| byte == b'\n'));
        numbered.map(|(number, line)| (number, line.trim_ascii())).filter(|(_, line)| !line.is_empty())
    }
}

/// Reads files in chunks of lines.
pub struct LineReader<'a> {
    files: std::slice::Iter<'a, PathBuf>,
    progress: &'a FileProgress<'a>,
    open: Option<OpenFile<'a>>,
}

struct OpenFile<'a> {
    file: &'a Path,
    reader: Box<dyn Read + Send>,
    /// Bytes read but not returned yet; they start at line `line`.
    pending: Vec<u8>,
    line: u64,
    saw_data: bool,
}

impl<'a> LineReader<'a> {
    pub fn new(files: &'a [PathBuf], progress: &'a FileProgress<'a>) -> Self {
        Self { files: files.iter(), progress, open: None }
    }

    /// The next chunk; `None` at the end.
    pub fn next(&mut self) -> Result<Option<LineChunk<'a>>, DataError> {
        loop {
            let Some(open) = &mut self.open else {
                let Some(file) = self.files.next() else { return Ok(None) };
                let reader = files::open_counting(file, self.progress.bytes_read.clone())?;
                self.open = Some(OpenFile { file, reader, pending: Vec::new(), line: 1, saw_data: false });
                continue;
            };
            if let Some(chunk) = open.next()? {
                return Ok(Some(chunk));
            }
            if !open.saw_data {
                return Err(DataError::EmptyFile { file: open.file.to_owned() });
            }
            self.open = None;
        }
    }
}

impl<'a> OpenFile<'a> {
    fn next(&mut self) -> Result<Option<LineChunk<'a>>, DataError> {
        loop {
            let before = self.pending.len();
            let read = self.reader.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut self.pending);
            let ended = read.map_err(|error| files::read_error(self.file, error))? < PIECE_BYTES;
            self.saw_data |= !self.pending.is_empty();
            let whole = match memchr::memrchr(b'\n', &self.pending[before..]) {
                _ if ended => self.pending.len(),
                Some(last) => before + last + 1,
                None if self.pending.len() > MAX_LINE_BYTES => {
                    let (file, place) = (self.file.to_owned(), format!("line {}", self.line));
                    let problem = format!("it is longer than {MAX_LINE_BYTES} bytes");
                    return Err(DataError::Record { file, place, problem });
                }
                None => continue,
            };
            if whole == 0 {
                return Ok(None);
            }
            let rest = self.pending.split_off(whole);
            let bytes = std::mem::replace(&mut self.pending, rest);
            let first = self.line;
            self.line += memchr::memchr_iter(b'\n', &bytes).count() as u64;
            return Ok(Some(LineChunk { file: self.file, first_line: first, bytes }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::NoProgress;

    fn numbered(texts: &[&[u8]]) -> Result<Vec<(u64, String)>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(i.to_string())).collect();
        files.iter().zip(texts).for_each(|(file, text)| std::fs::write(file, text).unwrap());
        let progress = FileProgress::new(&files, &NoProgress, "")?;
        let (mut lines, mut all) = (LineReader::new(&files, &progress), Vec::new());
        while let Some(chunk) = lines.next()? {
            all.extend(chunk.lines().map(|(number, line)| (number, String::from_utf8(line.into()).unwrap())));
        }
        Ok(all)
    }

    #[test]
    fn lines_are_numbered_through_chunks_and_blank_ones_left_out() {
        let long = "x".repeat(700_000);
        let text = format!("a\r\n\n{long}\nb\n  \nc");
        let all = numbered(&[text.as_bytes(), b"d\n"]).unwrap();
        let wanted = [(1, "a"), (3, &*long), (4, "b"), (6, "c"), (1, "d")];
        assert_eq!(all, wanted.map(|(n, line)| (n, line.to_owned())));
        assert!(matches!(numbered(&[b""]).unwrap_err(), DataError::EmptyFile { .. }));
    }
}
