//! Resolves file names and glob patterns, and reads plain and compressed files: gzip, zstd, bzip2, xz, and a zip file
//! with one file in it.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use flate2::read::{DeflateDecoder, MultiGzDecoder};

use super::DataError;
use super::zip_entry::{ZipEntry, ZipMethod};
use crate::base::regular_file;

/// Compression of a file, detected from its magic bytes and not from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileCompression {
    Uncompressed,
    Gzip,
    Zstd,
    Bzip2,
    Xz,
    Zip,
}

/// KiB that the decoder of an xz file may take: `xz -9` needs 64 MiB for its dictionary.
const MAX_XZ_MEMORY_KIB: u32 = 66 << 10;
/// KiB besides the dictionary.
const XZ_TABLES_KIB: u32 = 1 << 10;

/// Files matched by `patterns`, in the order of the patterns; the matches of a pattern such as `data/*.csv` are sorted
/// by name. A name that exists is taken literally, whatever characters it contains.
pub fn resolve_patterns(patterns: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for pattern in patterns {
        let text = pattern.to_string_lossy();
        if !text.contains(['*', '?', '[']) || pattern.exists() {
            files.push(pattern.clone());
            continue;
        }
        let wrong = |why: String| DataError::NoMatchingFile { pattern: text.to_string(), why };
        let before = files.len();
        for found in glob::glob(&text).map_err(|error| wrong(error.msg.into()))? {
            let found = found.map_err(|error| {
                let file = error.path().to_owned();
                DataError::io(&file)(error.into())
            })?;
            // Special files are kept: opening them fails with an error that names them.
            if !found.is_dir() {
                files.push(found);
            }
        }
        if files.len() == before {
            return Err(wrong("no such file".into()));
        }
    }
    Ok(files)
}

/// Compression and size on disk, in bytes. Refuses an empty file.
pub fn compression(file: &Path) -> Result<(FileCompression, u64), DataError> {
    open_raw(file).map(|file| (file.compression, file.length))
}

/// Bytes of memory that decompressing the file takes at most, if that is more than a few buffers.
pub fn decoder_bytes(file: &Path) -> Result<u64, DataError> {
    let RawFile { mut raw, compression, start, .. } = open_raw(file)?;
    Ok(match compression {
        FileCompression::Uncompressed
        | FileCompression::Gzip
        | FileCompression::Zip
        | FileCompression::Zstd => 0,
        // A block of 900 kB, four bytes each, and its text.
        FileCompression::Bzip2 => 5 << 20,
        // The window of the decoder doubles as content needs it, up to the dictionary.
        FileCompression::Xz => {
            let window = 2u64.saturating_mul(xz_content_bytes(&mut raw));
            let most = window.saturating_add(u64::from(XZ_TABLES_KIB) << 10);
            most.min(u64::from(xz_memory_kib(&start)) << 10)
        }
    })
}

/// KiB that the decoder takes for the dictionary that the first block of an xz file declares; the most that is allowed
/// if its header has more than the usual fields.
fn xz_memory_kib(start: &[u8]) -> u32 {
    match start.get(12..17) {
        Some([_, 0, 0x21, 1, bits @ 0..=40]) => {
            let dictionary = (2 | u64::from(bits & 1)) << (bits / 2 + 11);
            let kib = (dictionary >> 10) + u64::from(XZ_TABLES_KIB);
            kib.min(MAX_XZ_MEMORY_KIB.into()) as u32
        }
        _ => MAX_XZ_MEMORY_KIB,
    }
}

/// Bytes of content that the indexes of an xz file declare; the most if they are damaged.
fn xz_content_bytes(file: &mut File) -> u64 {
    lzma_rust2::xz_uncompressed_size(file).unwrap_or(u64::MAX)
}

/// Content of the file, decompressed as it is read. Convert read errors with [`read_error`].
pub fn open(file: &Path) -> Result<Box<dyn Read + Send>, DataError> {
    open_counting(file, Arc::default())
}

/// As [`open`]; adds the compressed bytes read from disk to `bytes_read`.
pub fn open_counting(file: &Path, bytes_read: Arc<AtomicU64>) -> Result<Box<dyn Read + Send>, DataError> {
    let RawFile { mut raw, compression, start, .. } = open_raw(file)?;
    let entry = match compression {
        FileCompression::Zip => Some(ZipEntry::locate(file, &mut raw)?),
        _ => None,
    };
    let mut declared = 0;
    if compression == FileCompression::Xz {
        declared = xz_content_bytes(&mut raw);
        raw.rewind().map_err(DataError::io(file))?;
    }
    let raw = BufReader::with_capacity(1 << 16, CountingReader { raw, bytes_read });
    Ok(match compression {
        FileCompression::Uncompressed => Box::new(raw),
        FileCompression::Gzip => Box::new(MultiGzDecoder::new(raw)),
        FileCompression::Zstd => Box::new(zstd::Decoder::with_buffer(raw).map_err(DataError::io(file))?),
        FileCompression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(raw)),
        FileCompression::Xz => {
            let content = lzma_rust2::XzReader::new_mem_limit(raw, true, xz_memory_kib(&start));
            Box::new(XzContent { content, left: declared })
        }
        FileCompression::Zip => match entry {
            Some(ZipEntry { method: ZipMethod::Deflated, bytes }) => {
                Box::new(DeflateDecoder::new(raw.take(bytes)))
            }
            Some(ZipEntry { method: ZipMethod::Stored, bytes }) => Box::new(raw.take(bytes)),
            None => unreachable!("the entry of a zip file was located above"),
        },
    })
}

/// Refuses content beyond what the indexes of an xz file declare: its memory is planned for no more.
struct XzContent<R> {
    content: R,
    /// Bytes that are declared and not read yet.
    left: u64,
}

impl<R: Read> Read for XzContent<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.content.read(into)?;
        let more =
            || io::Error::new(io::ErrorKind::InvalidData, "it has more content than its index declares");
        self.left = self.left.checked_sub(n as u64).ok_or_else(more)?;
        Ok(n)
    }
}

struct CountingReader {
    raw: File,
    bytes_read: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.raw.read(into)?;
        self.bytes_read.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// A file before decompression.
struct RawFile {
    raw: File,
    compression: FileCompression,
    /// Bytes on disk.
    length: u64,
    /// The first bytes.
    start: Vec<u8>,
}

fn open_raw(file: &Path) -> Result<RawFile, DataError> {
    let mut raw = regular_file::open(file).map_err(DataError::io(file))?;
    let length = raw.metadata().map_err(DataError::io(file))?.len();
    if length == 0 {
        return Err(DataError::EmptyFile { file: file.to_owned() });
    }
    let mut start = Vec::new();
    raw.by_ref().take(24).read_to_end(&mut start).map_err(DataError::io(file))?;
    raw.rewind().map_err(DataError::io(file))?;
    let compression = match start[..] {
        [0x1f, 0x8b, ..] => FileCompression::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => FileCompression::Zstd,
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => FileCompression::Bzip2,
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => FileCompression::Xz,
        [b'P', b'K', 3, 4, ..] => FileCompression::Zip,
        _ => FileCompression::Uncompressed,
    };
    Ok(RawFile { raw, compression, length, start })
}

/// Positioned read (`pread`) that fills `into`; safe to call concurrently on one file.
#[cfg(unix)]
pub fn read_exact_at(file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, at)
}

/// Without `pread`, a handle opened for this call has a file position of its own.
#[cfg(not(unix))]
pub fn read_exact_at(file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
    let mut file = file.try_clone()?;
    file.seek(io::SeekFrom::Start(at))?;
    file.read_exact(into)
}

/// Converts an error of reading an opened file. Decompressors report a corrupt stream as invalid data, as invalid input
/// or as an unexpected end of file.
pub fn read_error(file: &Path, error: io::Error) -> DataError {
    match error.kind() {
        io::ErrorKind::InvalidData
        | io::ErrorKind::InvalidInput
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::Other => DataError::Corrupt { file: file.to_owned(), source: error.into() },
        _ => DataError::io(file)(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn patterns_find_files_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["b.csv", "a.csv", "c.txt", "odd[1].csv"] {
            std::fs::write(path(name), "x").unwrap();
        }
        let names = |patterns: &[PathBuf]| -> Vec<String> {
            let found = resolve_patterns(patterns).unwrap();
            found.iter().map(|f| f.file_name().unwrap().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(names(&[path("c.txt"), path("[ab].csv")]), ["c.txt", "a.csv", "b.csv"]);
        assert_eq!(names(&[path("odd[1].csv")]), ["odd[1].csv"]);
        let none = resolve_patterns(&[path("*.json")]).unwrap_err().to_string();
        assert!(none.contains("*.json") && none.contains("no such file"), "{none}");
        assert!(resolve_patterns(&[path("a***b")]).is_err());
    }

    #[test]
    fn the_dictionary_of_an_xz_file_bounds_its_memory() {
        let start = |bits: u8| [&b"\xfd7zXZ\0\0\x04----"[..], &[2, 0, 0x21, 1, bits]].concat();
        // `xz -6` has 8 MiB, `xz -9` 64 MiB.
        assert_eq!(xz_memory_kib(&start(22)), (8 << 10) + (1 << 10));
        assert_eq!(xz_memory_kib(&start(28)), (64 << 10) + (1 << 10));
        assert_eq!(xz_memory_kib(&start(40)), MAX_XZ_MEMORY_KIB);
        assert_eq!(xz_memory_kib(b"short"), MAX_XZ_MEMORY_KIB);
    }

    /// What Python's `lzma.compress` makes of 6,000 bytes, with a dictionary of 8 MiB: blocks, index and footer.
    const XZ_BLOCKS: [u8; 80] = [
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x04, 0xe6, 0xd6, 0xb4, 0x46, 0x02, 0x00, 0x21, 0x01, 0x16,
        0x00, 0x00, 0x00, 0x74, 0x2f, 0xe5, 0xa3, 0xe0, 0x17, 0x6f, 0x00, 0x27, 0x5d, 0x00, 0x34, 0x19, 0x49,
        0xee, 0x8d, 0xe9, 0x5f, 0xc1, 0xf0, 0xf7, 0x17, 0x44, 0x50, 0x85, 0x62, 0xc3, 0x08, 0x82, 0xdc, 0x61,
        0x13, 0x60, 0x33, 0xe1, 0x91, 0xb5, 0x69, 0x53, 0x25, 0x1e, 0xba, 0x71, 0x4f, 0xab, 0xeb, 0xfb, 0x64,
        0x8c, 0x00, 0x00, 0x00, 0xa4, 0x38, 0x67, 0x3c, 0xb4, 0x40, 0xa3, 0xe8,
    ];
    const XZ_INDEX: [u8; 12] = [0x00, 0x01, 0x43, 0xf0, 0x2e, 0x00, 0x00, 0x00, 0x4f, 0x24, 0x40, 0x42];
    /// The same index with 1,000 bytes of content.
    const XZ_SMALLER_INDEX: [u8; 12] =
        [0x00, 0x01, 0x43, 0xe8, 0x07, 0x00, 0x00, 0x00, 0xb8, 0x18, 0xea, 0xcf];
    const XZ_FOOTER: [u8; 12] = [0xb1, 0xc4, 0x67, 0xfb, 0x02, 0x00, 0x00, 0x00, 0x00, 0x04, 0x59, 0x5a];

    /// The window of the decoder follows the content, not the dictionary, and the content is what the index declares.
    #[test]
    fn the_content_of_an_xz_file_bounds_its_memory() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data");
        let write =
            |index: &[u8]| std::fs::write(&file, [&XZ_BLOCKS[..], index, &XZ_FOOTER].concat()).unwrap();
        let read = || {
            let mut content = Vec::new();
            open(&file).unwrap().read_to_end(&mut content).map(|_| content)
        };
        write(&XZ_INDEX);
        assert_eq!(decoder_bytes(&file).unwrap(), (1 << 20) + 2 * 6000);
        assert_eq!(read().unwrap(), b"hello ".repeat(1000));
        write(&XZ_SMALLER_INDEX);
        assert_eq!(decoder_bytes(&file).unwrap(), (1 << 20) + 2 * 1000);
        assert!(matches!(read_error(&file, read().unwrap_err()), DataError::Corrupt { .. }));
        write(&[]);
        assert_eq!(decoder_bytes(&file).unwrap(), 9 << 20, "the dictionary, where no index can be read");
        assert!(matches!(read_error(&file, read().unwrap_err()), DataError::Corrupt { .. }));
    }

    #[test]
    fn every_compression_reads_the_same_and_corruption_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data");
        let text = b"hello ".repeat(1000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).unwrap();
        let mut bzip2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
        bzip2.write_all(&text).unwrap();
        let packed = [
            (FileCompression::Uncompressed, text.clone()),
            (FileCompression::Gzip, gzip.finish().unwrap()),
            (FileCompression::Zstd, zstd::encode_all(&text[..], 1).unwrap()),
            (FileCompression::Bzip2, bzip2.finish().unwrap()),
        ];
        for (kind, bytes) in packed {
            std::fs::write(&file, &bytes).unwrap();
            assert_eq!(compression(&file).unwrap(), (kind, bytes.len() as u64));
            let mut read = Vec::new();
            open(&file).unwrap().read_to_end(&mut read).unwrap();
            assert_eq!(read, text, "{kind:?}");
            std::fs::write(&file, &bytes[..bytes.len() - 5]).unwrap();
            let cut = open(&file).unwrap().read_to_end(&mut Vec::new());
            match kind {
                FileCompression::Uncompressed => assert!(cut.is_ok()),
                _ => assert!(matches!(read_error(&file, cut.unwrap_err()), DataError::Corrupt { .. })),
            }
        }
        std::fs::write(&file, "").unwrap();
        assert!(matches!(open(&file).err().unwrap(), DataError::EmptyFile { .. }));
    }
}
