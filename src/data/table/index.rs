//! Where the rows of a plain text file lie: a mark about every 4 KiB, found by threads side by side.
//!
//! The file is cut into chunks at line feeds, and each chunk is looked through as if it began with a row. Where
//! that turns out wrong, because a quoted field goes on over the cut, the chunk is looked through once more. A
//! mark is the place and the number of a row; a block is what lies between two marks. About 2 MB for a file of
//! 1 GB, whatever its rows.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use memchr::memchr;
use rayon::prelude::*;

use super::dialect::{Breaks, Delimiter, MAX_ROW};
use crate::data::{DataError, Watch};

/// Bytes a thread looks through at once.
const CHUNK: u64 = 2 << 20;
/// Bytes between marks, at least; rows that are longer have a mark each.
const BLOCK: u64 = 4 << 10;

/// The rows of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Ascending.
    marks: Vec<Mark>,
    pub rows: u64,
    /// Bytes of the file.
    length: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    offset: u64,
    row: u64,
}

/// Rows that lie together: bytes `start..end` of the file, the first of them number `row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub start: u64,
    pub end: u64,
    pub row: u64,
}

/// What a chunk holds.
#[derive(Default)]
struct Chunk {
    /// Offsets in the file, rows counted from the chunk's first.
    marks: Vec<Mark>,
    rows: u64,
    /// Where the last row begins.
    last: u64,
    quoted: bool,
}

/// A file that is looked through from byte `from`, where its first row begins.
pub struct Scan<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    pub from: u64,
    pub delimiter: Delimiter,
}

impl Index {
    pub fn make(scan: &Scan, watch: &dyn Watch) -> Result<Self, DataError> {
        Self::make_by(CHUNK, scan, watch)
    }

    /// As [`Index::make`], in chunks of `size` bytes.
    fn make_by(size: u64, scan: &Scan, watch: &dyn Watch) -> Result<Self, DataError> {
        let Scan { path, file, from, .. } = *scan;
        let length = file.metadata().map_err(DataError::io(path))?.len();
        let chunks = length.saturating_sub(from).div_ceil(size);
        let (done, doing) = (AtomicU64::new(from), format!("finding the rows of {}", path.display()));
        let mut index = Self { length, ..Self::default() };
        let (mut quoted, mut last) = (false, from);
        // A batch of chunks at a time, so that what threads found does not pile up.
        let batch = 64 * rayon::current_num_threads() as u64;
        for first in (0..chunks).step_by(batch as usize) {
            let look = |chunk: u64| {
                let start = from + chunk * size;
                let found = scan.chunk(start, (start + size).min(length), length, false);
                let bytes = size.min(length - start);
                watch.pass(&doing, done.fetch_add(bytes, Ordering::Relaxed) + bytes, length);
                found
            };
            let found: Vec<_> = (first..chunks.min(first + batch)).into_par_iter().map(look).collect();
            for (chunk, found) in (first..).zip(found) {
                let Some(mut found) = found? else { continue };
                if quoted {
                    let start = from + chunk * size;
                    let again = scan.chunk(start, (start + size).min(length), length, true)?;
                    found = again.unwrap_or(found);
                }
                let row = index.rows;
                index.marks.extend(found.marks.iter().map(|mark| Mark { row: mark.row + row, ..*mark }));
                index.rows += found.rows;
                quoted = found.quoted;
                if found.rows > 0 {
                    last = found.last;
                }
            }
        }
        watch.pass(&doing, length, length);
        if quoted {
            return Err(super::never_ends(path, line(path, file, last)?));
        }
        Ok(index)
    }

    /// The block that holds row `row`, below `rows`, and one past its last row.
    pub fn block(&self, row: u64) -> (Block, u64) {
        self.at(self.marks.partition_point(|mark| mark.row <= row) - 1)
    }

    /// Runs of blocks of about [`CHUNK`] bytes, for threads that go through all rows: each with one past its
    /// last row.
    pub fn runs(&self) -> Vec<(Block, u64)> {
        let mut runs: Vec<(Block, u64)> = Vec::new();
        for i in 0..self.marks.len() {
            let (block, end) = self.at(i);
            match runs.last_mut() {
                Some((run, rows)) if block.end - run.start <= CHUNK => (run.end, *rows) = (block.end, end),
                _ => runs.push((block, end)),
            }
        }
        runs
    }

    fn at(&self, i: usize) -> (Block, u64) {
        let mark = self.marks[i];
        let (end, rows) =
            self.marks.get(i + 1).map_or((self.length, self.rows), |next| (next.offset, next.row));
        (Block { start: mark.offset, end, row: mark.row }, rows)
    }

    pub fn bytes(&self) -> u64 {
        (self.marks.capacity() * size_of::<Mark>()) as u64
    }

    /// As it is kept in a cache: rows, length, then the marks.
    pub fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.rows, self.length].into_iter();
        let marks = self.marks.iter().flat_map(|mark| [mark.offset, mark.row]);
        numbers.chain(marks).flat_map(u64::to_le_bytes).collect()
    }

    /// What was kept, unless it is damaged.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let (rows, length) = (numbers.next()?, numbers.next()?);
        let mut marks = Vec::with_capacity(numbers.len() / 2);
        while let Some(offset) = numbers.next() {
            marks.push(Mark { offset, row: numbers.next()? });
        }
        let ascending = marks.is_sorted_by(|a, b| a.offset < b.offset && a.row < b.row);
        let fits = marks.last().is_none_or(|last| last.offset < length && last.row < rows);
        let whole =
            rest.is_empty() && ascending && fits && marks.first().map_or(rows == 0, |first| first.row == 0);
        whole.then_some(Self { marks, rows, length })
    }
}

impl Scan<'_> {
    /// Looks through a chunk: from behind the first line feed at or after the byte before `start`, to the same
    /// place of the chunk that is to start at `end`. None where no line begins in it.
    fn chunk(&self, start: u64, end: u64, length: u64, quoted: bool) -> Result<Option<Chunk>, DataError> {
        let (path, file, first) = (self.path, self.file, start == self.from);
        let start = start - u64::from(!first);
        let end = if end == length { end } else { end - 1 };
        let mut text = read(path, file, start, (end - start) as usize)?;
        let skip = if first { Some(0) } else { memchr(b'\n', &text).map(|i| i + 1) };
        let Some(skip) = skip else { return Ok(None) };
        let mut looked = text.len();
        while start + (text.len() as u64) < length {
            let more = read(path, file, start + text.len() as u64, 64 << 10)?;
            if more.is_empty() {
                break;
            }
            text.extend_from_slice(&more);
            if let Some(i) = memchr(b'\n', &text[looked..]) {
                text.truncate(looked + i + 1);
                break;
            }
            looked = text.len();
            if looked > CHUNK as usize + MAX_ROW {
                return Err(super::too_long(path, line(path, file, start)?));
            }
        }
        Ok(Some(marks(&text[skip..], start + skip as u64, quoted, self.delimiter)))
    }
}

/// The marks of a text that begins at byte `start` of the file with a row, or inside quotes.
fn marks(text: &[u8], start: u64, quoted: bool, delimiter: Delimiter) -> Chunk {
    let mut chunk = Chunk::default();
    let mut row = (!quoted).then_some(0);
    let mut see = |row: usize| {
        let offset = start + row as u64;
        if chunk.marks.last().is_none_or(|mark| offset - mark.offset >= BLOCK) {
            chunk.marks.push(Mark { offset, row: chunk.rows });
        }
        chunk.rows += 1;
        chunk.last = offset;
    };
    let mut breaks = Breaks::new(text, quoted, delimiter);
    for end in breaks.by_ref() {
        if let Some(row) = row
            && !delimiter.blank(&text[row..end])
        {
            see(row);
        }
        row = Some(end);
    }
    // The last row of the file may lack its line feed, and one that stops inside quotes goes on in another chunk.
    if let Some(row) = row
        && !delimiter.blank(&text[row..])
    {
        see(row);
    }
    chunk.quoted = breaks.quoted;
    chunk
}

/// The number, from 1, of the line that begins at byte `offset`.
fn line(path: &Path, file: &File, offset: u64) -> Result<u64, DataError> {
    line_feeds(path, file, 0..offset).map(|count| count + 1)
}

/// Line feeds in a range of bytes, which is read for it: for errors.
pub fn line_feeds(path: &Path, file: &File, bytes: Range<u64>) -> Result<u64, DataError> {
    let (mut at, mut count) = (bytes.start, 0);
    while at < bytes.end {
        let piece = read(path, file, at, (bytes.end - at).min(CHUNK) as usize)?;
        if piece.is_empty() {
            break;
        }
        count += memchr::memchr_iter(b'\n', &piece).count() as u64;
        at += piece.len() as u64;
    }
    Ok(count)
}

/// Up to `length` bytes from `offset`, fewer only at the end of the file.
fn read(path: &Path, file: &File, offset: u64, length: usize) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    read_into(path, file, offset, length, &mut bytes)?;
    Ok(bytes)
}

/// As [`read`], over what `bytes` holds.
pub fn read_into(
    path: &Path,
    file: &File,
    offset: u64,
    length: usize,
    bytes: &mut Vec<u8>,
) -> Result<(), DataError> {
    bytes.resize(length, 0);
    let mut done = 0;
    while done < length {
        match read_at(file, &mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(DataError::io(path)(error)),
        }
    }
    bytes.truncate(done);
    Ok(())
}

#[cfg(unix)]
fn read_at(file: &File, into: &mut [u8], offset: u64) -> std::io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, into, offset)
}

#[cfg(windows)]
fn read_at(file: &File, into: &mut [u8], offset: u64) -> std::io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, into, offset)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::Unwatched;

    const COMMA: Delimiter = Delimiter::Byte(b',');

    fn index(text: &[u8], size: u64) -> Result<Index, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, text).unwrap();
        let file = File::open(&path).unwrap();
        Index::make_by(size, &Scan { path: &path, file: &file, from: 0, delimiter: COMMA }, &Unwatched)
    }

    /// The first byte of every row by one look from the beginning, and whether the text ends inside quotes.
    fn starts(text: &[u8]) -> (Vec<u64>, bool) {
        let mut breaks = Breaks::new(text, false, COMMA);
        let (mut starts, mut start) = (Vec::new(), 0);
        for end in breaks.by_ref().chain([text.len()]) {
            if !COMMA.blank(&text[start..end]) {
                starts.push(start as u64);
            }
            start = end;
        }
        (starts, breaks.quoted)
    }

    proptest! {
        /// However the text is cut into chunks, the same rows are found, and a quote that never ends is told.
        #[test]
        fn chunks_do_not_matter(text in "[a\",\n ]{0,80}", size in 1u64..30) {
            let (expected, unended) = starts(text.as_bytes());
            let found = index(text.as_bytes(), size);
            prop_assert_eq!(found.is_err(), unended);
            if let Ok(found) = found {
                prop_assert_eq!(found.rows, expected.len() as u64);
                for (row, start) in expected.iter().enumerate() {
                    let (block, end) = found.block(row as u64);
                    prop_assert!(block.row <= row as u64 && (row as u64) < end && block.start <= *start && *start < block.end);
                }
                prop_assert_eq!(Index::from_bytes(&found.to_bytes()), Some(found));
            }
        }
    }

    #[test]
    fn marks_are_as_far_apart_as_blocks_and_runs_hold_every_row() {
        let text: Vec<u8> = (0..40_000).flat_map(|i| format!("{i},\"x\ny\"\n").into_bytes()).collect();
        let found = index(&text, 10_000).unwrap();
        assert_eq!(found.rows, 40_000);
        assert!(found.bytes() < 4 * text.len() as u64 / 100, "{}", found.bytes());
        let runs = found.runs();
        assert_eq!((runs[0].0.row, runs.last().unwrap().1), (0, 40_000));
        for row in [0, 1, 777, 39_999] {
            let (block, _) = found.block(row);
            let text = &text[block.start as usize..block.end as usize];
            let skipped = Breaks::new(text, false, COMMA).nth((row - block.row) as usize).unwrap();
            let before = &text[..skipped];
            assert!(before.ends_with(format!("{row},\"x\ny\"\n").as_bytes()));
        }
    }

    #[test]
    fn a_damaged_index_is_not_believed() {
        let good = index(b"a\nb\n", CHUNK).unwrap().to_bytes();
        assert!(Index::from_bytes(&good).is_some());
        assert!(Index::from_bytes(&good[..good.len() - 1]).is_none());
        assert!(Index::from_bytes(&good[..good.len() - 8]).is_none());
        assert!(Index::from_bytes(&[good.clone(), good[16..].to_vec()].concat()).is_none());
    }
}
