//! Row index of an uncompressed text file: an offset about every 4 KiB, found by parallel threads.
//!
//! The file is cut into chunks at line feeds, and each chunk is scanned as if it started with a row. If that turns out
//! to be wrong, because a quoted field spans the cut, the chunk is scanned again. An entry holds the offset and the
//! number of a row; a block is the data between two entries. An entry takes 16 bytes, so 1 GB of text takes at most
//! about 4 MB, whatever its rows.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use memchr::memchr;
use rayon::prelude::*;

use super::dialect::{Dialect, MAX_ROW_BYTES, RowEnds};
use crate::{DataError, ProgressObserver};

/// Bytes that a thread scans at once.
pub const CHUNK_BYTES: u64 = 2 << 20;
/// Minimum bytes between two entries; a longer row has an entry of its own.
const BLOCK_BYTES: u64 = 4 << 10;
/// Blocks and rows longer than this are counted in the plan individually.
pub const LONG_ROW_BYTES: u64 = 64 << 10;

/// Row offsets of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowIndex {
    /// Ascending.
    offsets: Vec<RowOffset>,
    pub rows: u64,
    /// File size in bytes.
    file_bytes: u64,
    /// Some row of more than [`LONG_ROW_BYTES`] bytes has a quote, or may have one.
    pub long_quotes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowOffset {
    offset: u64,
    row: u64,
}

/// Consecutive rows: bytes `start..end` of the file; the first row has the number `first_row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlock {
    pub start: u64,
    pub end: u64,
    pub first_row: u64,
}

/// Result of scanning a chunk.
#[derive(Default)]
struct ScannedChunk {
    /// Offsets are relative to the file, row numbers to the chunk.
    offsets: Vec<RowOffset>,
    rows: u64,
    /// Offset of the last row.
    last_row_offset: u64,
    quoted: bool,
    /// A long row has a quote, or a row continues inside quotes after the chunk.
    long_quotes: bool,
}

/// A file to scan from byte `body_offset`, where its first row starts.
pub struct RowScan<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    pub body_offset: u64,
    pub dialect: Dialect,
}

impl RowIndex {
    pub fn build(scan: &RowScan, observer: &dyn ProgressObserver) -> Result<Self, DataError> {
        Self::build_with_chunk_size(CHUNK_BYTES, scan, observer)
    }

    /// As [`RowIndex::build`], with chunks of `size` bytes.
    fn build_with_chunk_size(
        size: u64,
        scan: &RowScan,
        observer: &dyn ProgressObserver,
    ) -> Result<Self, DataError> {
        let RowScan { path, file, body_offset: from, .. } = *scan;
        let length = file.metadata().map_err(DataError::io(path))?.len();
        let chunks = length.saturating_sub(from).div_ceil(size);
        let (done, activity) = (AtomicU64::new(from), format!("indexing the rows of {}", path.display()));
        let mut index = Self { file_bytes: length, ..Self::default() };
        let (mut quoted, mut last) = (false, from);
        // Scan a batch of chunks at a time, so that results do not pile up in memory.
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
                index.long_quotes |= found.long_quotes;
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

    /// The block that contains row `row`, and one past its last row.
    pub fn block_of_row(&self, row: u64) -> (RowBlock, u64) {
        self.block_at(self.offsets.partition_point(|mark| mark.row <= row) - 1)
    }

    /// Runs of blocks of about [`CHUNK_BYTES`] bytes for a parallel scan, each with one past its last row.
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

    /// Bytes of the longest block, which a reader holds: those of the longest row, or a few more.
    pub fn longest_block(&self) -> u64 {
        let blocks = (0..self.offsets.len()).map(|i| self.block_at(i).0);
        blocks.map(|block| block.end - block.start).max().unwrap_or(0)
    }

    pub fn resident_bytes(&self) -> u64 {
        (self.offsets.capacity() * size_of::<RowOffset>()) as u64
    }

    /// Encoding for the cache: rows, file size, whether long rows have quotes, then the entries.
    pub fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.rows, self.file_bytes, self.long_quotes.into()].into_iter();
        let marks = self.offsets.iter().flat_map(|mark| [mark.offset, mark.row]);
        numbers.chain(marks).flat_map(u64::to_le_bytes).collect()
    }

    /// Decodes a cached index; `None` if it is corrupt.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let (rows, length, quotes) = (numbers.next()?, numbers.next()?, numbers.next()?);
        let mut marks = Vec::with_capacity(numbers.len() / 2);
        while let Some(offset) = numbers.next() {
            marks.push(RowOffset { offset, row: numbers.next()? });
        }
        let ascending = marks.is_sorted_by(|a, b| a.offset < b.offset && a.row < b.row);
        let fits = marks.last().is_none_or(|last| last.offset < length && last.row < rows);
        let whole =
            rest.is_empty() && ascending && fits && marks.first().map_or(rows == 0, |first| first.row == 0);
        let long_quotes = quotes == 1;
        (whole && quotes <= 1).then_some(Self { offsets: marks, rows, file_bytes: length, long_quotes })
    }
}

impl RowScan<'_> {
    /// Scans a chunk, from after the first line feed at or after byte `start - 1` to the corresponding point of the
    /// chunk at `end`. `None` if no line starts in it.
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
        Ok(Some(scan_text(&text[skip..], start + skip as u64, quoted, self.dialect)))
    }
}

/// Scans text at byte `start` of the file that starts with a row or, with `quoted`, inside quotes.
fn scan_text(text: &[u8], start: u64, quoted: bool, dialect: Dialect) -> ScannedChunk {
    let mut chunk = ScannedChunk::default();
    let mut row = (!quoted).then_some(0);
    let has_long_quotes =
        |row: &[u8]| row.len() as u64 > LONG_ROW_BYTES && memchr(dialect.quote, row).is_some();
    let mut long_quotes = false;
    let mut add_row = |row: usize| {
        let offset = start + row as u64;
        if chunk.offsets.last().is_none_or(|mark| offset - mark.offset >= BLOCK_BYTES) {
            chunk.offsets.push(RowOffset { offset, row: chunk.rows });
        }
        chunk.rows += 1;
        chunk.last_row_offset = offset;
    };
    let mut breaks = RowEnds::new(text, quoted, dialect);
    for end in breaks.by_ref() {
        if let Some(row) = row
            && !dialect.skips_line(&text[row..end])
        {
            add_row(row);
            long_quotes |= has_long_quotes(&text[row..end]);
        }
        row = Some(end);
    }
    // The last row of the file may lack its line feed, and a row that ends inside quotes continues in the next chunk.
    if let Some(row) = row
        && !dialect.skips_line(&text[row..])
    {
        add_row(row);
        long_quotes |= has_long_quotes(&text[row..]);
    }
    chunk.quoted = breaks.quoted;
    chunk.long_quotes = long_quotes || breaks.quoted;
    chunk
}

/// Line number, from 1, of the line at byte `offset`.
fn line_number(path: &Path, file: &File, offset: u64) -> Result<u64, DataError> {
    line_feeds(path, file, 0..offset).map(|count| count + 1)
}

/// Counts line feeds in a byte range by reading it; for error messages.
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

/// Reads up to `length` bytes at `offset`; fewer only at the end of the file.
fn read_range(path: &Path, file: &File, offset: u64, length: usize) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    read_into(path, file, offset, length, &mut bytes)?;
    Ok(bytes)
}

/// As [`read_range`], into `bytes`, replacing its content.
pub fn read_into(
    path: &Path,
    file: &File,
    offset: u64,
    length: usize,
    bytes: &mut Vec<u8>,
) -> Result<(), DataError> {
    if bytes.capacity() < length {
        // What is planned: no more than `length`, and not the old buffer beside the new one.
        *bytes = Vec::new();
        bytes.reserve_exact(length);
    }
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
    use crate::NoProgress;

    fn index(text: &[u8], size: u64) -> Result<RowIndex, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, text).unwrap();
        let file = File::open(&path).unwrap();
        RowIndex::build_with_chunk_size(
            size,
            &RowScan { path: &path, file: &file, body_offset: 0, dialect: Dialect::default() },
            &NoProgress,
        )
    }

    /// Offset of every row from one sequential scan, and whether the text ends inside quotes.
    fn starts(text: &[u8]) -> (Vec<u64>, bool) {
        let mut breaks = RowEnds::new(text, false, Dialect::default());
        let (mut starts, mut start) = (Vec::new(), 0);
        for end in breaks.by_ref().chain([text.len()]) {
            if !Dialect::default().skips_line(&text[start..end]) {
                starts.push(start as u64);
            }
            start = end;
        }
        (starts, breaks.quoted)
    }

    proptest! {
        /// The chunk size changes neither the rows found nor the detection of an unterminated quote.
        #[test]
        fn chunks_do_not_matter(text in "[a\",\n ]{0,80}", size in 1u64..30) {
            let (expected, unended) = starts(text.as_bytes());
            let found = index(text.as_bytes(), size);
            prop_assert_eq!(found.is_err(), unended);
            if let Ok(found) = found {
                prop_assert_eq!(found.rows, expected.len() as u64);
                for (row, start) in expected.iter().enumerate() {
                    let (block, end) = found.block_of_row(row as u64);
                    prop_assert!(block.first_row <= row as u64 && (row as u64) < end);
                    prop_assert!(block.start <= *start && *start < block.end);
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
            let skipped =
                RowEnds::new(text, false, Dialect::default()).nth((row - block.first_row) as usize).unwrap();
            let before = &text[..skipped];
            assert!(before.ends_with(format!("{row},\"x\ny\"\n").as_bytes()));
        }
    }

    /// A reader holds the longest block; whether it also holds a copy without quotes depends on long rows only.
    #[test]
    fn the_longest_row_and_its_quotes_are_known() {
        let long = "x".repeat(3 << 20);
        let short: String = (0..2000).map(|i| format!("{i},\"a\"\n")).collect();
        for (row, quotes) in [(format!("1,{long}\n"), false), (format!("1,\"{long}\n{long}\"\n"), true)] {
            let text = format!("{short}{row}{short}");
            let found = index(text.as_bytes(), CHUNK_BYTES).unwrap();
            let (longest, row) = (found.longest_block(), row.len() as u64);
            assert!((row..row + 2 * BLOCK_BYTES).contains(&longest), "{longest} {row}");
            assert_eq!(found.long_quotes, quotes);
            assert_eq!(RowIndex::from_bytes(&found.to_bytes()), Some(found));
        }
        let found = index(short.as_bytes(), CHUNK_BYTES).unwrap();
        assert!(found.longest_block() < 2 * BLOCK_BYTES && !found.long_quotes);
    }

    #[test]
    fn a_corrupt_index_is_rejected() {
        let good = index(b"a\nb\n", CHUNK_BYTES).unwrap().to_bytes();
        assert!(RowIndex::from_bytes(&good).is_some());
        assert!(RowIndex::from_bytes(&good[..good.len() - 1]).is_none());
        assert!(RowIndex::from_bytes(&good[..good.len() - 8]).is_none());
        assert!(RowIndex::from_bytes(&[good.clone(), good[24..].to_vec()].concat()).is_none());
    }
}
