//! Reads the lines of files in chunks of many lines; the records of an array are its lines.

use std::{
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use super::super::DataError;
use super::super::pieces::{BYTE_ORDER_MARK, FileProgress, PIECE_BYTES, parallel_in_order};
use super::super::text_memory::{TextError, TextMemory};
use super::array_lines::{self, ArrayLines};
use crate::files;

/// Maximum line length in bytes; a longer line is not a record.
const MAX_LINE_BYTES: usize = 64 << 20;

/// Where a line is, and how many bytes of memory converting it may take.
#[derive(Clone, Copy)]
pub struct LineContext<'a> {
    pub file: &'a Path,
    /// What `number` counts: lines, or the records of an array.
    pub unit: &'static str,
    pub number: u64,
    pub limit: u64,
}

impl LineContext<'_> {
    pub fn error(self, error: TextError) -> DataError {
        error.at(self.file, format!("{} {}", self.unit, self.number))
    }
}

/// Calls `convert` with every line of `files`, on any thread, and `take` with the results in order. From the first line
/// of a chunk that needs more memory than one of several threads has, or whose result (`bytes_of`) makes the results of
/// the chunk too large to keep, lines are converted just before they are taken, while no other thread works.
pub fn convert_lines<T: Send>(
    files: &[PathBuf],
    progress: &FileProgress,
    memory: TextMemory,
    convert: impl Fn(&[u8], LineContext) -> Result<T, DataError> + Sync,
    bytes_of: fn(&T) -> u64,
    mut take: impl FnMut(Result<T, DataError>, LineContext) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut reader = LineReader::new(files, progress, memory.line);
    let work = |chunk: &LineChunk| {
        let mut held = 0;
        let one = |(number, line)| {
            let done = convert(
                line,
                LineContext { file: chunk.file, unit: chunk.unit, number, limit: memory.parallel },
            );
            held += done.as_ref().map_or(0, bytes_of);
            let fits = held <= memory.results && !matches!(done, Err(DataError::RecordMemory { .. }));
            fits.then_some((done, number))
        };
        Ok(chunk.lines().map_while(one).collect::<Vec<_>>())
    };
    parallel_in_order(
        progress,
        || reader.next(),
        work,
        |chunk, done| {
            let rest = chunk.lines().skip(done.len());
            let at = |number| LineContext { file: chunk.file, unit: chunk.unit, number, limit: memory.alone };
            done.into_iter().try_for_each(|(done, number)| take(done, at(number)))?;
            for (number, line) in rest {
                let at = at(number);
                take(convert(line, at), at)?;
            }
            Ok(())
        },
    )
}

/// Whole lines of one file.
struct LineChunk<'a> {
    file: &'a Path,
    unit: &'static str,
    /// Number of the first line, from 1.
    first_line: u64,
    bytes: Vec<u8>,
}

impl LineChunk<'_> {
    /// Lines with their numbers and without line endings; blank lines are skipped.
    fn lines(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let numbered = (self.first_line..).zip(self.bytes.split(|&byte| byte == b'\n'));
        numbered.map(|(number, line)| (number, line.trim_ascii())).filter(|(_, line)| !line.is_empty())
    }
}

/// Reads files in chunks of lines.
struct LineReader<'a> {
    files: std::slice::Iter<'a, PathBuf>,
    progress: &'a FileProgress<'a>,
    /// Maximum bytes of a line by the memory that is left.
    max_line_bytes: u64,
    open: Option<OpenFile<'a>>,
}

struct OpenFile<'a> {
    file: &'a Path,
    unit: &'static str,
    reader: Box<dyn Read + Send>,
    /// Bytes read but not returned yet; they start at line `line`.
    pending: Vec<u8>,
    line: u64,
    saw_data: bool,
}

impl<'a> LineReader<'a> {
    fn new(files: &'a [PathBuf], progress: &'a FileProgress<'a>, max_line_bytes: u64) -> Self {
        Self { files: files.iter(), progress, max_line_bytes, open: None }
    }

    /// The next chunk; `None` at the end.
    fn next(&mut self) -> Result<Option<LineChunk<'a>>, DataError> {
        loop {
            let Some(open) = &mut self.open else {
                let Some(file) = self.files.next() else { return Ok(None) };
                let mut reader =
                    BufReader::new(files::open_counting(file, self.progress.bytes_read.clone())?);
                let start = reader.fill_buf().map_err(|error| files::read_error(file, error))?;
                let mark = if start.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
                let (is_array, is_empty) = (array_lines::is_array(&start[mark..]), start.is_empty());
                reader.consume(mark);
                let (unit, reader): (_, Box<dyn Read + Send>) = match is_array {
                    true => ("record", Box::new(ArrayLines::new(reader))),
                    false => ("line", Box::new(reader)),
                };
                let pending = Vec::new();
                self.open = Some(OpenFile { file, unit, reader, pending, line: 1, saw_data: !is_empty });
                continue;
            };
            if let Some(chunk) = open.next(self.max_line_bytes)? {
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
    fn next(&mut self, max_line_bytes: u64) -> Result<Option<LineChunk<'a>>, DataError> {
        loop {
            let before = self.pending.len();
            let read = self.reader.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut self.pending);
            let ended = read.map_err(|error| files::read_error(self.file, error))? < PIECE_BYTES;
            let whole = match memchr::memrchr(b'\n', &self.pending[before..]) {
                _ if ended => self.pending.len(),
                Some(last) => before + last + 1,
                None if self.pending.len() > MAX_LINE_BYTES => {
                    let problem = format!("it is longer than {MAX_LINE_BYTES} bytes");
                    return Err(
                        TextError::Invalid(problem).at(self.file, format!("{} {}", self.unit, self.line))
                    );
                }
                None if self.pending.len() as u64 > max_line_bytes.max(PIECE_BYTES as u64) => {
                    let error = TextError::Memory { what: "reading it", limit: max_line_bytes };
                    return Err(error.at(self.file, format!("{} {}", self.unit, self.line)));
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
            return Ok(Some(LineChunk { file: self.file, unit: self.unit, first_line: first, bytes }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoProgress;

    fn numbered(texts: &[&[u8]]) -> Result<Vec<(u64, String)>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(i.to_string())).collect();
        files.iter().zip(texts).for_each(|(file, text)| std::fs::write(file, text).unwrap());
        let progress = FileProgress::new(&files, &NoProgress, "")?;
        let (mut lines, mut all) = (LineReader::new(&files, &progress, u64::MAX), Vec::new());
        while let Some(chunk) = lines.next()? {
            all.extend(chunk.lines().map(|(number, line)| (number, String::from_utf8(line.into()).unwrap())));
        }
        Ok(all)
    }

    #[test]
    fn lines_are_numbered_through_chunks_and_blank_ones_left_out() {
        let long = "x".repeat(700_000);
        let text = format!("a\r\n\n{long}\nb\n  \nc");
        let all = numbered(&[text.as_bytes(), b"\xef\xbb\xbfd\n"]).unwrap();
        let expected = [(1, "a"), (3, &*long), (4, "b"), (6, "c"), (1, "d")];
        assert_eq!(all, expected.map(|(n, line)| (n, line.to_owned())));
        assert!(matches!(numbered(&[b""]).unwrap_err(), DataError::EmptyFile { .. }));
    }

    /// Converts lines `1`, `22`, `333` and so on; a line takes as many bytes of memory as it has letters.
    fn converted(memory: TextMemory) -> Result<Vec<(u64, usize, u64)>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        let lines: Vec<String> = (1..60usize).map(|n| "x".repeat(n)).collect();
        std::fs::write(&file, lines.join("\n")).unwrap();
        let (files, mut all) = ([file], Vec::new());
        let convert = |line: &[u8], at: LineContext| match line.len() as u64 <= at.limit {
            true => Ok((line.len(), at.limit)),
            false => Err(at.error(TextError::Memory { what: "it", limit: at.limit })),
        };
        let take = |done: Result<(usize, u64), DataError>, at: LineContext| {
            let (len, limit) = done?;
            all.push((at.number, len, limit));
            Ok(())
        };
        let progress = FileProgress::new(&files, &NoProgress, "")?;
        convert_lines(&files, &progress, memory, convert, |(len, _)| *len as u64, take)?;
        Ok(all)
    }

    #[test]
    fn lines_that_need_more_memory_are_converted_alone_and_in_order() {
        let memory = TextMemory { parallel: 1000, alone: 2000, line: 1000, results: u64::MAX };
        let all = converted(memory).unwrap();
        assert!(all.iter().zip(1..60).all(|(got, n)| *got == (n, n as usize, 1000)) && all.len() == 59);
        // A line that needs more than a thread has, and results that are too large to keep.
        for (parallel, results, last) in [(30, u64::MAX, 30), (1000, 10, 4)] {
            let all = converted(TextMemory { parallel, results, ..memory }).unwrap();
            let limit = |n: u64| if n <= last { parallel } else { 2000 };
            assert!(all.iter().zip(1..60).all(|(got, n)| *got == (n, n as usize, limit(n))), "{all:?}");
            assert_eq!(all.len(), 59);
        }
        let error = converted(TextMemory { parallel: 30, alone: 50, ..memory }).unwrap_err();
        assert!(error.is_out_of_memory() && !error.is_bad_record());
        let expected = "line 51: it takes more than 50 B, the limit under `memory.ram`";
        assert!(error.to_string().ends_with(expected), "{error}");
    }

    #[test]
    fn a_line_is_read_within_the_memory_that_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        std::fs::write(&file, vec![b'x'; 3 << 20]).unwrap();
        let files = [file];
        let progress = FileProgress::new(&files, &NoProgress, "").unwrap();
        let next = |most: u64| LineReader::new(&files, &progress, most).next().map(|chunk| chunk.is_some());
        assert!(matches!(next(4 << 20), Ok(true)));
        assert!(next(1 << 20).is_err_and(|error| error.is_out_of_memory()));
    }
}
