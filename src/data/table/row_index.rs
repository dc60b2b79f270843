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

use super::dialect::{FieldDelimiter, MAX_ROW_BYTES, RowEnds};
use crate::data::{DataError, ProgressObserver};

/// Bytes a thread looks through at once.
const CHUNK_BYTES: u64 = 2 << 20;
/// Bytes between marks, at least; rows that are longer have a mark each.
const BLOCK_BYTES: u64 = 4 << 10;

/// The rows of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowIndex {
    /// Ascending.
    offsets: Vec<RowOffset>,
    pub rows: u64,
    /// Bytes of the file.
    file_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowOffset {
    offset: u64,
    row: u64,
}

/// Rows that lie together: bytes `start..end` of the file, the first of them number `first_row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlock {
    pub start: u64,
    pub end: u64,
    pub first_row: u64,
}

/// What a chunk holds.
#[derive(Default)]
struct ScannedChunk {
    /// Offsets in the file, rows counted from the chunk's first.
    offsets: Vec<RowOffset>,
    rows: u64,
    /// Where the last row begins.
    last_row_offset: u64,
    quoted: bool,
}

/// A file that is looked through from byte `body_offset`, where its first row begins.
pub struct RowScan<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    pub body_offset: u64,
    pub delimiter: FieldDelimiter,
}

impl RowIndex {
    pub fn build(scan: &RowScan, observer: &dyn ProgressObserver) -> Result<Self, DataError> {
        Self::build_with_chunk_size(CHUNK_BYTES, scan, observer)
    }

    /// As [`RowIndex::build`], in chunks of `size` bytes.
    fn build_with_chunk_size(
        size: u64,
        scan: &RowScan,
        observer: &dyn ProgressObserver,
    ) -> Result<Self, DataError> {
        let RowScan { path, file, body_offset: from, .. } = *scan;
        let length = file.metadata().map_err(DataError::io(path))?.len();
        let chunks = length.saturating_sub(from).div_ceil(size);
        let (done, activity) = (AtomicU64::new(from), format!("finding the rows of {}", path.display()));
        let mut index = Self { file_bytes: length, ..Self::default() };
        let (mut quoted, mut last) = (false, from);
        // A batch of chunks at a time, so that what threads found does not pile up.
        let batch = 64 * rayon::current_num_threads() as u64;
        for first in (0..chunks).step_by(batch as usize) {
            let scan_one = |chunk: u64| {
                let start = from + chunk * size;
                let found = scan.scan_chunk(start, (start + size).min(length), length, false);
                let bytes = size.min(length - start);
                observer.report(&activity, done.fetch_add(bytes, Ordering::Relaxed) + bytes, length);
                found
            };
            let found: Vec<_> = (first..chunks.min(first + batch)).into_par_iter().map(scan_one).collect();
            for (chunk, found) in (first..).zip(found) {
                let Some(mut found) = found? else { continue };
                if quoted {
                    let start = from + chunk * size;
                    let rescanned = scan.scan_chunk(start, (start + size).min(length), length, true)?;
                    found = rescanned.unwrap_or(found);
                }
                let row = index.rows;
                index
                    .offsets
                    .extend(found.offsets.iter().map(|mark| RowOffset { row: mark.row + row, ..*mark }));
                index.rows += found.rows;
                quoted = found.quoted;
                if found.rows > 0 {
                    last = found.last_row_offset;
                }
            }
        }
        observer.report(&activity, length, length);
        if quoted {
            return Err(super::unterminated_quote(path, line_number(path, file, last)?));
        }
        Ok(index)
    }

    /// The block that holds row `first_row`, below `rows`, and one past its last row.
    pub fn block_of_row(&self, row: u64) -> (RowBlock, u64) {
        self.block_at(self.offsets.partition_point(|mark| mark.row <= row) - 1)
    }

    /// Runs of blocks of about [`CHUNK_BYTES`] bytes, for threads that go through all rows: each with one past its
    /// last row.
    pub fn partitions(&self) -> Vec<(RowBlock, u64)> {
        let mut runs: Vec<(RowBlock, u64)> = Vec::new();
        for i in 0..self.offsets.len() {
            let (block, end) = self.block_at(i);
            match runs.last_mut() {
                Some((run, rows)) if block.end - run.start <= CHUNK_BYTES => {
                    (run.end, *rows) = (block.end, end)
                }
                _ => runs.push((block, end)),
            }
        }
        runs
    }

    fn block_at(&self, i: usize) -> (RowBlock, u64) {
        let mark = self.offsets[i];
        let (end, rows) =
            self.offsets.get(i + 1).map_or((self.file_bytes, self.rows), |next| (next.offset, next.row));
        (RowBlock { start: mark.offset, end, first_row: mark.row }, rows)
    }

    pub fn resident_bytes(&self) -> u64 {
        (self.offsets.capacity() * size_of::<RowOffset>()) as u64
    }

    /// As it is kept in a cache: rows, length, then the marks.
    pub fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.rows, self.file_bytes].into_iter();
        let marks = self.offsets.iter().flat_map(|mark| [mark.offset, mark.row]);
        numbers.chain(marks).flat_map(u64::to_le_bytes).collect()
    }

    /// What was kept, unless it is damaged.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let (rows, length) = (numbers.next()?, numbers.next()?);
        let mut marks = Vec::with_capacity(numbers.len() / 2);
        while let Some(offset) = numbers.next() {
            marks.push(RowOffset { offset, row: numbers.next()? });
        }
        let ascending = marks.is_sorted_by(|a, b| a.offset < b.offset && a.row < b.row);
        let fits = marks.last().is_none_or(|last| last.offset < length && last.row < rows);
        let whole =
            rest.is_empty() && ascending && fits && marks.first().map_or(rows == 0, |first| first.row == 0);
        whole.then_some(Self { offsets: marks, rows, file_bytes: length })
    }
}

impl RowScan<'_> {
    /// Looks through a chunk: from behind the first line feed at or after the byte before `start`, to the same
    /// place of the chunk that is to start at `end`. None where no line begins in it.
    fn scan_chunk(
        &self,
        start: u64,
        end: u64,
        length: u64,
        quoted: bool,
    ) -> Result<Option<ScannedChunk>, DataError> {
        let (path, file, first) = (self.path, self.file, start == self.body_offset);
        let start = start - u64::from(!first);
        let end = if end == length { end } else { end - 1 };
        let mut text = read_range(path, file, start, (end - start) as usize)?;
        let skip = if first { Some(0) } else { memchr(b'\n', &text).map(|i| i + 1) };
        let Some(skip) = skip else { return Ok(None) };
        let mut looked = text.len();
        while start + (text.len() as u64) < length {
            let more = read_range(path, file, start + text.len() as u64, 64 << 10)?;
            if more.is_empty() {
                break;
            }
            text.extend_from_slice(&more);
            if let Some(i) = memchr(b'\n', &text[looked..]) {
                text.truncate(looked + i + 1);
                break;
            }
            looked = text.len();
            if looked > CHUNK_BYTES as usize + MAX_ROW_BYTES {
                return Err(super::row_too_long(path, line_number(path, file, start)?));
            }
        }
        Ok(Some(scan_text(&text[skip..], start + skip as u64, quoted, self.delimiter)))
    }
}

/// The marks of a text that begins at byte `start` of the file with a row, or inside quotes.
fn scan_text(text: &[u8], start: u64, quoted: bool, delimiter: FieldDelimiter) -> ScannedChunk {
    let mut chunk = ScannedChunk::default();
    let mut row = (!quoted).then_some(0);
    let mut add_row = |row: usize| {
        let offset = start + row as u64;
        if chunk.offsets.last().is_none_or(|mark| offset - mark.offset >= BLOCK_BYTES) {
            chunk.offsets.push(RowOffset { offset, row: chunk.rows });
        }
        chunk.rows += 1;
        chunk.last_row_offset = offset;
    };
    let mut breaks = RowEnds::new(text, quoted, delimiter);
    for end in breaks.by_ref() {
        if let Some(row) = row
            && !delimiter.is_blank_line(&text[row..end])
        {
            add_row(row);
        }
        row = Some(end);
    }
    // The last row of the file may lack its line feed, and one that stops inside quotes goes on in another chunk.
    if let Some(row) = row
        && !delimiter.is_blank_line(&text[row..])
    {
        add_row(row);
    }
    chunk.quoted = breaks.quoted;
    chunk
}

/// The number, from 1, of the line that begins at byte `offset`.
fn line_number(path: &Path, file: &File, offset: u64) -> Result<u64, DataError> {
    line_feeds(path, file, 0..offset).map(|count| count + 1)
}

/// Line feeds in a range of bytes, which is read for it: for errors.
pub fn line_feeds(path: &Path, file: &File, bytes: Range<u64>) -> Result<u64, DataError> {
    let (mut at, mut count) = (bytes.start, 0);
    while at < bytes.end {
        let piece = read_range(path, file, at, (bytes.end - at).min(CHUNK_BYTES) as usize)?;
        if piece.is_empty() {
            break;
        }
        count += memchr::memchr_iter(b'\n', &piece).count() as u64;
        at += piece.len() as u64;
    }
    Ok(count)
}

/// Up to `file_bytes` bytes from `offset`, fewer only at the end of the file.
fn read_range(path: &Path, file: &File, offset: u64, length: usize) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    read_into(path, file, offset, length, &mut bytes)?;
    Ok(bytes)
}

/// As [`read_range`], over what `resident_bytes` holds.
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
    use crate::data::NoProgress;

    const COMMA: FieldDelimiter = FieldDelimiter::Byte(b',');

    fn index(text: &[u8], size: u64) -> Result<RowIndex, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, text).unwrap();
        let file = File::open(&path).unwrap();
        RowIndex::build_with_chunk_size(
            size,
            &RowScan { path: &path, file: &file, body_offset: 0, delimiter: COMMA },
            &NoProgress,
        )
    }

    /// The first byte of every row by one look from the beginning, and whether the text ends inside quotes.
    fn starts(text: &[u8]) -> (Vec<u64>, bool) {
        let mut breaks = RowEnds::new(text, false, COMMA);
        let (mut starts, mut start) = (Vec::new(), 0);
        for end in breaks.by_ref().chain([text.len()]) {
            if !COMMA.is_blank_line(&text[start..end]) {
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
                    let (block, end) = found.block_of_row(row as u64);
                    prop_assert!(block.first_row <= row as u64 && (row as u64) < end && block.start <= *start && *start < block.end);
                }
                prop_assert_eq!(RowIndex::from_bytes(&found.to_bytes()), Some(found));
            }
        }
    }

    #[test]
    fn offsets_are_a_block_apart_and_partitions_hold_every_row() {
        let text: Vec<u8> = (0..40_000).flat_map(|i| format!("{i},\"x\ny\"\n").into_bytes()).collect();
        let found = index(&text, 10_000).unwrap();
        assert_eq!(found.rows, 40_000);
        assert!(found.resident_bytes() < 4 * text.len() as u64 / 100, "{}", found.resident_bytes());
        let runs = found.partitions();
        assert_eq!((runs[0].0.first_row, runs.last().unwrap().1), (0, 40_000));
        for row in [0, 1, 777, 39_999] {
            let (block, _) = found.block_of_row(row);
            let text = &text[block.start as usize..block.end as usize];
            let skipped = RowEnds::new(text, false, COMMA).nth((row - block.first_row) as usize).unwrap();
            let before = &text[..skipped];
            assert!(before.ends_with(format!("{row},\"x\ny\"\n").as_bytes()));
        }
    }

    #[test]
    fn a_corrupt_index_is_rejected() {
        let good = index(b"a\nb\n", CHUNK_BYTES).unwrap().to_bytes();
        assert!(RowIndex::from_bytes(&good).is_some());
        assert!(RowIndex::from_bytes(&good[..good.len() - 1]).is_none());
        assert!(RowIndex::from_bytes(&good[..good.len() - 8]).is_none());
        assert!(RowIndex::from_bytes(&[good.clone(), good[16..].to_vec()].concat()).is_none());
    }
}
