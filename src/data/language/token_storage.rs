//! Token ids in files, read on demand: `.bin` files of nanoGPT and llm.c, and the files this program tokenizes text
//! into.
//!
//! Files are read and not memory-mapped. Mapped pages count as resident memory, up to the size of the file, and
//! truncating a mapped file kills the process with SIGBUS.
//!
//! A `.bin` file holds only ids, or llm.c's header of 256 32-bit words and then ids; all little endian. NumPy's `.npy`
//! files are read too.

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use super::DataError;
use super::npy::{NPY_MAGIC, NpyHeader};
use super::token_detection::{guess_width, has_single_bytes, is_text, unsupported_type};
pub use super::token_width::TokenWidth;
use crate::base::{file_format, regular_file};
use crate::files;

/// An open file for positioned reads from several threads.
#[derive(Debug)]
pub struct RandomAccessFile {
    path: PathBuf,
    file: File,
    /// Length in bytes.
    len: u64,
}

impl RandomAccessFile {
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = regular_file::open(path).map_err(DataError::io(path))?;
        let len = file.metadata().map_err(DataError::io(path))?.len();
        match len {
            0 => Err(DataError::EmptyFile { file: path.to_owned() }),
            len => Ok(Self { path: path.to_owned(), file, len }),
        }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `into` from offset `at`.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), DataError> {
        files::read_exact_at(&self.file, into, at).map_err(|error| match error.kind() {
            // The file was truncated after it was opened.
            std::io::ErrorKind::UnexpectedEof => DataError::Truncated {
                file: self.path.clone(),
                declared: at + into.len() as u64,
                found: self.file.metadata().map_or(0, |about| about.len()),
            },
            _ => DataError::io(&self.path)(error),
        })
    }

    /// The first bytes of the file, at most `max_bytes`.
    fn read_prefix(&self, max_bytes: usize) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; self.len.min(max_bytes as u64) as usize];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

/// The ids of one file.
#[derive(Debug)]
pub struct TokenIdFile {
    stored: RandomAccessFile,
    /// Byte offset of the first id.
    first_id_offset: u64,
    width: TokenWidth,
    len: u64,
}

/// llm.c's headers: magic number, version, and width of the ids that follow.
const HEADERS: [(u32, u32, TokenWidth); 2] =
    [(20_240_520, 1, TokenWidth::U16), (20_240_801, 7, TokenWidth::U32)];
const HEADER_BYTES: u64 = 1024;

/// Number of ids read to detect the width of a file without a header.
const SNIFFED_IDS: usize = 1 << 14;

impl TokenIdFile {
    /// Opens a `.bin` or `.npy` file. Without `width`, the header decides. Without a header, ids are 16 bits wide
    /// as nanoGPT writes them, unless the upper halves of wider ids are 0 at the start of the file: then they are
    /// 32 or 64 bits wide. A file that seems to have ids of one byte is refused.
    pub fn open(file: &Path, width: Option<TokenWidth>) -> Result<Self, DataError> {
        let stored = RandomAccessFile::open(file)?;
        let prefix = stored.read_prefix(4 * SNIFFED_IDS)?;
        let word = |i: usize| {
            prefix.get(4 * i..4 * i + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).unwrap_or(0)
        };
        if prefix.starts_with(NPY_MAGIC) {
            return Self::from_npy(stored, &prefix, width);
        }
        let known = HEADERS.iter().find(|(magic, ..)| stored.len >= HEADER_BYTES && word(0) == *magic);
        let Some(&(_, version, header_width)) = known else {
            if let Some((problem, hint)) = doubt(&prefix, stored.len).filter(|_| width.is_none()) {
                return Err(DataError::Table { file: file.to_owned(), place: String::new(), problem, hint });
            }
            let width = width.unwrap_or_else(|| guess_width(&prefix, stored.len));
            return Self::from_file(stored, 0, width);
        };
        if word(1) != version {
            let found = format!("llm.c's header of unknown version {}", word(1));
            return Err(DataError::WrongFormat {
                file: file.to_owned(),
                expected: "a file of tokens",
                found,
            });
        }
        if width.is_some_and(|width| width != header_width) {
            let (name, value) = ("dtype", format!("u{}", 8 * width.unwrap_or(header_width).bytes()));
            let expected = "the file's header declares another type; use \"auto\"";
            return Err(DataError::InvalidSetting { name, value, expected });
        }
        let declared = HEADER_BYTES + u64::from(word(2)) * header_width.bytes() as u64;
        let found = stored.len;
        let file = file.to_owned();
        match declared.cmp(&found) {
            std::cmp::Ordering::Greater => Err(DataError::Truncated { file, declared, found }),
            std::cmp::Ordering::Less => Err(DataError::TrailingBytes { file, declared }),
            std::cmp::Ordering::Equal => Self::from_file(stored, HEADER_BYTES, header_width),
        }
    }

    fn from_npy(
        stored: RandomAccessFile,
        prefix: &[u8],
        width: Option<TokenWidth>,
    ) -> Result<Self, DataError> {
        let header = NpyHeader::parse(&stored.path, prefix)?;
        if width.is_some_and(|width| width != header.width) {
            let (name, value) = ("dtype", format!("u{}", 8 * width.unwrap_or(header.width).bytes()));
            let expected = "the NumPy file declares another type; use \"auto\"";
            return Err(DataError::InvalidSetting { name, value, expected });
        }
        let declared = header.count.saturating_mul(header.width.bytes() as u64).saturating_add(header.offset);
        let (file, found) = (stored.path.clone(), stored.len);
        match declared.cmp(&found) {
            std::cmp::Ordering::Greater => Err(DataError::Truncated { file, declared, found }),
            std::cmp::Ordering::Less => Err(DataError::TrailingBytes { file, declared }),
            std::cmp::Ordering::Equal => Self::from_file(stored, header.offset, header.width),
        }
    }

    /// Opens a file that holds only ids of this width.
    pub fn open_headerless(file: &Path, width: TokenWidth) -> Result<Self, DataError> {
        Self::from_file(RandomAccessFile::open(file)?, 0, width)
    }

    fn from_file(stored: RandomAccessFile, start: u64, width: TokenWidth) -> Result<Self, DataError> {
        let (bytes, one) = (stored.len - start, width.bytes() as u64);
        let file = || stored.path.clone();
        if bytes == 0 {
            return Err(DataError::EmptyFile { file: file() });
        }
        if !bytes.is_multiple_of(one) {
            return Err(DataError::Table {
                file: file(),
                place: String::new(),
                problem: format!(
                    "its ids take {bytes} bytes, which is no multiple of {one}, the size of an id"
                ),
                hint: "copy the file again, or set `dtype` to the type of its ids",
            });
        }
        Ok(Self { stored, len: bytes / one, first_id_offset: start, width })
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn file(&self) -> &Path {
        &self.stored.path
    }

    pub fn width(&self) -> TokenWidth {
        self.width
    }

    /// Reads the ids of `range`, which must be within the file, into `into`, which must have the same length.
    pub fn read_ids(&self, range: Range<u64>, into: &mut [u32]) -> Result<(), DataError> {
        let (count, one) = (into.len(), self.width.bytes());
        if self.width == TokenWidth::U64 {
            return self.read_wide_ids(range.start, into);
        }
        // Read narrow ids into the end of the slice and widen them in place from the start: writing id i never
        // overwrites bytes of a later id.
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
        let first = (4 - one) * count;
        self.stored.read(self.first_id_offset + range.start * one as u64, &mut bytes[first..])?;
        for i in 0..count {
            let from = first + i * one;
            let id = match self.width {
                TokenWidth::U8 => bytes[from].into(),
                TokenWidth::U16 => u16::from_le_bytes([bytes[from], bytes[from + 1]]).into(),
                TokenWidth::U32 => {
                    u32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]])
                }
                TokenWidth::U64 => unreachable!("wide ids are read above"),
            };
            bytes[4 * i..4 * i + 4].copy_from_slice(&u32::to_ne_bytes(id));
        }
        Ok(())
    }

    /// Reads ids of 64 bits, which do not fit `into` before they are converted.
    fn read_wide_ids(&self, first: u64, into: &mut [u32]) -> Result<(), DataError> {
        const PIECE_IDS: usize = 1024;
        let mut buffer = [0; 8 * PIECE_IDS];
        for (piece, start) in into.chunks_mut(PIECE_IDS).zip((first..).step_by(PIECE_IDS)) {
            let bytes = &mut buffer[..8 * piece.len()];
            self.stored.read(self.first_id_offset + 8 * start, bytes)?;
            for (i, (id, bytes)) in piece.iter_mut().zip(bytes.as_chunks::<8>().0).enumerate() {
                let wide = u64::from_le_bytes(*bytes);
                *id = u32::try_from(wide).map_err(|_| DataError::Value {
                    file: self.stored.path.clone(),
                    record: start + i as u64,
                    column: None,
                    value: (wide as i64).to_string(),
                    expected: "a token id".into(),
                })?;
            }
        }
        Ok(())
    }
}

/// Why a file without a header does not seem to hold ids of two bytes or more, and what to do about it.
fn doubt(prefix: &[u8], len: u64) -> Option<(String, &'static str)> {
    if let Some(format) = file_format::name(prefix) {
        let hint = "write the ids with `ids.astype(\"uint16\").tofile(\"ids.bin\")` or `numpy.save(\"ids.npy\", ids)`; \
                    decompress what is compressed";
        return Some((format!("it is {format}, not a file of token ids"), hint));
    }
    if is_text(prefix) {
        let hint = "set `data.kind = \"text\"`, or write the ids with `numpy.array(ids, dtype=\"<u2\").tofile(...)` if it \
                    lists them, or set `dtype = \"u8\"` if each byte is an id";
        return Some(("it is text, not a file of token ids".into(), hint));
    }
    if has_single_bytes(prefix) {
        let problem = "its ids seem to have one byte each: even and odd bytes have the same small values";
        return Some((problem.into(), "set `dtype = \"u8\"`, or \"u16\" if they have two bytes"));
    }
    let hint = "write them with `ids.astype(\"<u2\").tofile(...)`, or set `dtype` if they are little-endian integers";
    unsupported_type(prefix, len).map(|found| (format!("its ids seem to be {found}"), hint))
}

/// The ids of several files as one sequence.
#[derive(Debug)]
pub struct TokenFiles {
    files: Vec<TokenIdFile>,
    /// End of each file in the sequence.
    file_ends: Vec<u64>,
}

impl TokenFiles {
    pub fn new(parts: Vec<TokenIdFile>) -> Self {
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.len();
            Some(*end)
        });
        Self { file_ends: ends.collect(), files: parts }
    }

    pub fn len(&self) -> u64 {
        self.file_ends.last().copied().unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn files(&self) -> &[TokenIdFile] {
        &self.files
    }

    /// Range of file `part` in the sequence.
    pub fn file_range(&self, part: usize) -> Range<u64> {
        self.file_ends[part] - self.files[part].len()..self.file_ends[part]
    }

    /// File that contains id `at`, and its index in that file.
    pub fn locate(&self, at: u64) -> (&Path, u64) {
        let part = self.file_ends.partition_point(|&end| end <= at).min(self.files.len() - 1);
        (self.files[part].file(), at - self.file_range(part).start)
    }

    /// Reads the ids of `range`, which must be in bounds, into the start of `into`.
    pub fn read_ids(&self, range: Range<u64>, mut into: &mut [u32]) -> Result<(), DataError> {
        let (mut at, end) = (range.start, range.end);
        let mut part = self.file_ends.partition_point(|&end| end <= at);
        while at < end {
            let whole = self.file_range(part);
            let until = end.min(whole.end);
            let (now, rest) = into.split_at_mut((until - at) as usize);
            self.files[part].read_ids(at - whole.start..until - whole.start, now)?;
            (into, at, part) = (rest, until, part + 1);
        }
        Ok(())
    }

    /// Returns an error with file and position for the first of `ids`, read from `range`, that is not below `vocab`.
    pub fn check_vocab(&self, range: Range<u64>, ids: &[u32], vocab: usize) -> Option<DataError> {
        let at = ids.iter().position(|&id| id as usize >= vocab)?;
        let (file, record) = self.locate(range.start + at as u64);
        Some(DataError::Value {
            file: file.to_owned(),
            record,
            column: None,
            value: ids[at].to_string(),
            expected: format!("a token id below {vocab}, the vocabulary size"),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn with_header(magic: u32, version: u32, count: u32, ids: &[u8]) -> Vec<u8> {
        let mut header = vec![0u32; 256];
        header[..3].copy_from_slice(&[magic, version, count]);
        [bytemuck::cast_slice::<u32, u8>(&header), ids].concat()
    }

    fn all(ids: &TokenIdFile) -> Vec<u32> {
        let mut into = vec![9; ids.len() as usize];
        ids.read_ids(0..ids.len(), &mut into).unwrap();
        into
    }

    #[test]
    fn files_of_numpy_are_read_as_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let ids: Vec<u32> = (0..3000).map(|i| i * 7 % 1000).collect();
        for (dtype, width) in [("<u2", TokenWidth::U16), ("<i4", TokenWidth::U32), ("<i8", TokenWidth::U64)] {
            let text = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': (3000,), }}\n");
            let mut bytes =
                [NPY_MAGIC, &[1, 0], &(text.len() as u16).to_le_bytes(), text.as_bytes()].concat();
            width.write_ids(&ids, &mut bytes);
            let open = |bytes: &[u8]| TokenIdFile::open(&file(folder.path(), "a.npy", bytes), None);
            assert_eq!(all(&open(&bytes).unwrap()), ids, "{dtype}");
            assert!(matches!(open(&bytes[..bytes.len() - 8]).unwrap_err(), DataError::Truncated { .. }));
        }
        // `ids.tofile(...)` of int64 has no header.
        let mut wide = Vec::new();
        TokenWidth::U64.write_ids(&ids, &mut wide);
        let raw = TokenIdFile::open(&file(folder.path(), "a.bin", &wide), None).unwrap();
        assert_eq!((raw.width(), all(&raw)), (TokenWidth::U64, ids));
        wide[8 * 20..8 * 21].copy_from_slice(&(-5i64).to_le_bytes());
        let mut into = [0; 30];
        let wide = file(folder.path(), "b.bin", &wide);
        let error = TokenIdFile::open(&wide, Some(TokenWidth::U64)).unwrap().read_ids(0..30, &mut into);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("record 20: `-5` is not a token id"), "{error}");
        // Characters of one byte each, as `numpy.uint8` stores them.
        let narrow: Vec<u8> = (0..4000u32).map(|i| (i * i % 65) as u8).collect();
        let narrow = file(folder.path(), "c.bin", &narrow);
        let error = TokenIdFile::open(&narrow, None).unwrap_err();
        assert!(
            error.to_string().contains("one byte each") && error.hint().unwrap().contains("dtype"),
            "{error}"
        );
        assert_eq!(TokenIdFile::open(&narrow, Some(TokenWidth::U8)).unwrap().len(), 4000);
    }

    #[test]
    fn what_is_no_little_endian_integer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let ids: Vec<u32> = (0..3000).map(|i| i * 7 % 500).collect();
        let of = |bytes: fn(u32) -> Vec<u8>| ids.iter().flat_map(|id| bytes(*id)).collect::<Vec<u8>>();
        let zip = [&b"PK\x03\x04"[..], &of(|id| (id as u16).to_le_bytes().into())].concat();
        for (bytes, expected) in [
            (zip, "it is a zip file, as `.npz`"),
            (of(|id| (id as f32).to_le_bytes().into()), "its ids seem to be floats of 32 bits"),
            (of(|id| f64::from(id).to_le_bytes().into()), "its ids seem to be floats of 64 bits"),
            (of(|id| (id as u16).to_be_bytes().into()), "its ids seem to be big-endian"),
            (of(|id| (id as u16 % 20).to_be_bytes().into()), "its ids seem to be big-endian"),
            (of(|id| id.to_be_bytes().into()), "its ids seem to be big-endian"),
            (of(|id| u64::from(id).to_be_bytes().into()), "its ids seem to be big-endian"),
        ] {
            let path = file(folder.path(), "a.bin", &bytes);
            let error = TokenIdFile::open(&path, None).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.hint().unwrap().contains("tofile"));
            // What the job declares is not doubted.
            assert!(TokenIdFile::open(&path, Some(TokenWidth::U16)).is_ok());
        }
        for (vocab, stride) in [(2, 1), (65, 1), (300, 1), (50_257, 7919), (65_536, 40_503)] {
            let ids: Vec<u32> = (0..4000u32).map(|i| i.wrapping_mul(stride) % vocab).collect();
            let mut bytes = Vec::new();
            TokenWidth::U16.write_ids(&ids, &mut bytes);
            let read = TokenIdFile::open(&file(folder.path(), "b.bin", &bytes), None).unwrap();
            assert_eq!(all(&read), ids, "{vocab}");
        }
        let zeros = TokenIdFile::open(&file(folder.path(), "c.bin", &[0; 4000]), None).unwrap();
        assert_eq!((zeros.width(), zeros.len()), (TokenWidth::U16, 2000));
    }

    #[test]
    fn both_tools_files_are_read_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let ids: Vec<u32> = (0..40).map(|i| i * 700).collect();
        let (mut narrow, mut wide) = (Vec::new(), Vec::new());
        TokenWidth::U16.write_ids(&ids, &mut narrow);
        TokenWidth::U32.write_ids(&ids, &mut wide);
        let cases = [
            (narrow.clone(), None, TokenWidth::U16),
            (wide.clone(), None, TokenWidth::U32),
            (wide.clone(), Some(TokenWidth::U32), TokenWidth::U32),
            (with_header(20_240_520, 1, 40, &narrow), None, TokenWidth::U16),
            (with_header(20_240_801, 7, 40, &wide), None, TokenWidth::U32),
        ];
        for (bytes, declared, width) in cases {
            let read = TokenIdFile::open(&file(folder.path(), "a.bin", &bytes), declared).unwrap();
            assert_eq!((read.width(), all(&read)), (width, ids.clone()));
        }
    }

    #[test]
    fn a_file_cut_short_while_it_is_open_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "a.bin", &[1; 64]);
        let ids = TokenIdFile::open_headerless(&path, TokenWidth::U16).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
        let error = ids.read_ids(0..32, &mut [0; 32]).unwrap_err();
        assert!(matches!(error, DataError::Truncated { declared: 64, found: 10, .. }), "{error}");
        assert!(ids.read_ids(0..5, &mut [0; 5]).is_ok());
    }

    #[test]
    fn wrong_files_are_named_with_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let open = |bytes: &[u8], width| {
            TokenIdFile::open(&file(folder.path(), "a.bin", bytes), width).unwrap_err().to_string()
        };
        let cases = [
            (open(&[1, 2, 3], None), "its ids take 3 bytes, which is no multiple of 2"),
            (open(&[], None), "is empty"),
            (open(&with_header(20_240_520, 3, 1, &[0, 0]), None), "llm.c's header of unknown version 3"),
            (
                open(&with_header(20_240_520, 1, 9, &[0, 0]), None),
                "declares 1042 bytes, and it has at most 1026",
            ),
            (
                open(&with_header(20_240_520, 1, 0, &[0, 0]), None),
                "has trailing bytes: its header declares only 1024",
            ),
            (open(&with_header(20_240_520, 1, 1, &[0, 0]), Some(TokenWidth::U32)), "`dtype` cannot be u32"),
            (open(&with_header(20_240_520, 1, 0, &[]), None), "is empty"),
        ];
        for (found, expected) in cases {
            assert!(found.contains(expected), "{found}");
        }
        assert!(matches!(TokenIdFile::open(Path::new("/no/such"), None), Err(DataError::Io { .. })));
    }

    proptest! {
        /// Arbitrary bytes are read or refused; no value of a header is trusted.
        #[test]
        fn any_file_is_read_or_refused(
            magic in prop_oneof![Just(20_240_520u32), Just(20_240_801), any::<u32>()],
            version in 0u32..9, count: u32, ids in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..1300,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let mut bytes = with_header(magic, version, count, &ids);
            bytes.truncate(cut.max(1));
            for width in [None, Some(TokenWidth::U16), Some(TokenWidth::U32)] {
                if let Ok(read) = TokenIdFile::open(&file(folder.path(), "a.bin", &bytes), width) {
                    prop_assert!(all(&read).len() <= bytes.len());
                }
            }
        }

        /// A range across several files equals their concatenation.
        #[test]
        fn joined_files_are_one(sizes in prop::collection::vec(1usize..20, 1..5), a in 0.0..1.0f64, b in 0.0..1.0f64) {
            let folder = tempfile::tempdir().unwrap();
            let total: usize = sizes.iter().sum();
            let ids: Vec<u32> = (0..total as u32).collect();
            let (mut parts, mut from) = (Vec::new(), 0);
            for (i, size) in sizes.iter().enumerate() {
                let mut bytes = Vec::new();
                TokenWidth::U16.write_ids(&ids[from..from + size], &mut bytes);
                let path = file(folder.path(), &i.to_string(), &bytes);
                parts.push(TokenIdFile::open_headerless(&path, TokenWidth::U16).unwrap());
                from += size;
            }
            let joined = TokenFiles::new(parts);
            let (a, b) = ((a * total as f64) as usize, (b * total as f64) as usize);
            let (start, end) = (a.min(b), a.max(b));
            let mut into = vec![0; end - start];
            joined.read_ids(start as u64..end as u64, &mut into).unwrap();
            prop_assert_eq!(&into, &ids[start..end]);
            prop_assert_eq!(joined.locate(total as u64 - 1).1, *sizes.last().unwrap() as u64 - 1);
            let wrong = joined.check_vocab(start as u64..end as u64, &into, start + 1);
            prop_assert_eq!(wrong.is_some(), end > start + 1);
        }
    }
}
