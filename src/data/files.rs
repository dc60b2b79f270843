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
    let RawFile { compression, start, .. } = open_raw(file)?;
    Ok(match compression {
        FileCompression::Uncompressed
        | FileCompression::Gzip
        | FileCompression::Zip
        | FileCompression::Zstd => 0,
        // A block of 900 kB, four bytes each, and its text.
        FileCompression::Bzip2 => 5 << 20,
        FileCompression::Xz => u64::from(xz_memory_kib(&start)) << 10,
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
    let raw = BufReader::with_capacity(1 << 16, CountingReader { raw, bytes_read });
    Ok(match compression {
        FileCompression::Uncompressed => Box::new(raw),
        FileCompression::Gzip => Box::new(MultiGzDecoder::new(raw)),
        FileCompression::Zstd => Box::new(zstd::Decoder::with_buffer(raw).map_err(DataError::io(file))?),
        FileCompression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(raw)),
        FileCompression::Xz => {
            Box::new(lzma_rust2::XzReader::new_mem_limit(raw, true, xz_memory_kib(&start)))
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
