//! Lines of files, in chunks of many.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use super::super::DataError;
use super::super::pieces::{PIECE, Progress};
use crate::data::files;

/// Bytes of a line, at most: what is longer is no record.
const LONGEST: usize = 64 << 20;

/// Whole lines of a file.
pub struct Chunk<'a> {
    pub file: &'a Path,
    /// The number of its first line, from 1.
    first: u64,
    bytes: Vec<u8>,
}

impl Chunk<'_> {
    /// Each line with its number, without its end; those that are blank are left out.
    pub fn lines(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let numbered = (self.first..).zip(self.bytes.split(|&byte| byte == b'\n'));
        numbered.map(|(number, line)| (number, line.trim_ascii())).filter(|(_, line)| !line.is_empty())
    }
}

/// Reads files line by line.
pub struct Lines<'a> {
    files: std::slice::Iter<'a, PathBuf>,
    progress: &'a Progress<'a>,
    open: Option<Open<'a>>,
}

struct Open<'a> {
    file: &'a Path,
    reader: Box<dyn Read + Send>,
    /// Bytes read and not given yet, which begin line `line`.
    kept: Vec<u8>,
    line: u64,
    any: bool,
}

impl<'a> Lines<'a> {
    pub fn new(files: &'a [PathBuf], progress: &'a Progress<'a>) -> Self {
        Self { files: files.iter(), progress, open: None }
    }

    /// The next lines; `None` after the last.
    pub fn next(&mut self) -> Result<Option<Chunk<'a>>, DataError> {
        loop {
            let Some(open) = &mut self.open else {
                let Some(file) = self.files.next() else { return Ok(None) };
                let reader = files::open_counted(file, self.progress.read.clone())?;
                self.open = Some(Open { file, reader, kept: Vec::new(), line: 1, any: false });
                continue;
            };
            if let Some(chunk) = open.next()? {
                return Ok(Some(chunk));
            }
            if !open.any {
                return Err(DataError::EmptyFile { file: open.file.to_owned() });
            }
            self.open = None;
        }
    }
}

impl<'a> Open<'a> {
    fn next(&mut self) -> Result<Option<Chunk<'a>>, DataError> {
        loop {
            let before = self.kept.len();
            let read = self.reader.by_ref().take(PIECE as u64).read_to_end(&mut self.kept);
            let ended = read.map_err(|error| files::fault(self.file, error))? < PIECE;
            self.any |= !self.kept.is_empty();
            let whole = match memchr::memrchr(b'\n', &self.kept[before..]) {
                _ if ended => self.kept.len(),
                Some(last) => before + last + 1,
                None if self.kept.len() > LONGEST => {
                    let (file, place) = (self.file.to_owned(), format!("line {}", self.line));
                    let problem = format!("it is longer than {LONGEST} bytes");
                    return Err(DataError::Record { file, place, problem });
                }
                None => continue,
            };
            if whole == 0 {
                return Ok(None);
            }
            let rest = self.kept.split_off(whole);
            let bytes = std::mem::replace(&mut self.kept, rest);
            let first = self.line;
            self.line += memchr::memchr_iter(b'\n', &bytes).count() as u64;
            return Ok(Some(Chunk { file: self.file, first, bytes }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Unwatched;

    fn numbered(texts: &[&[u8]]) -> Result<Vec<(u64, String)>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(i.to_string())).collect();
        files.iter().zip(texts).for_each(|(file, text)| std::fs::write(file, text).unwrap());
        let progress = Progress::new(&files, &Unwatched, "")?;
        let (mut lines, mut all) = (Lines::new(&files, &progress), Vec::new());
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
