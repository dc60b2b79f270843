//! Images in zip files: stored or deflated members, each read at random from its own bytes.
//!
//! Classes come from folders or from members beside the images, as in [tar archives](super::tar).

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use flate2::read::DeflateDecoder;
use zip::{CompressionMethod, ZipArchive};

use super::listing::{Extent, ImageListing};
use super::tar::MemberScan;
use crate::base::regular_file;
use crate::{DataError, files};

impl ImageListing {
    /// Adds the images of the zip file `file`. Returns whether classes come from folders.
    pub fn add_zip(&mut self, file: &Path) -> Result<bool, DataError> {
        let raw = regular_file::open(file).map_err(DataError::io(file))?;
        let corrupt = |error: zip::result::ZipError| DataError::Corrupt {
            file: file.to_owned(),
            source: io::Error::other(error).into(),
        };
        let refuse = |member: &Path, problem: &str| DataError::Table {
            file: file.to_owned(),
            place: format!("member {}", member.display()),
            problem: problem.into(),
            hint: "unpack the zip file, and name the folder",
        };
        let length = raw.metadata().map_err(DataError::io(file))?.len();
        let directory = BufReader::new(raw.try_clone().map_err(DataError::io(file))?);
        let mut archive = ZipArchive::new(directory).map_err(corrupt)?;
        let mut found = MemberScan::default();
        for i in 0..archive.len() {
            let entry = archive.by_index_raw(i).map_err(corrupt)?;
            if !entry.is_file() {
                continue;
            }
            let path = PathBuf::from(String::from_utf8_lossy(entry.name_raw()).into_owned());
            let inflated = match entry.compression() {
                _ if entry.encrypted() => return Err(refuse(&path, "it is encrypted")),
                CompressionMethod::Stored => None,
                CompressionMethod::DEFLATE => NonZeroU64::new(entry.size()),
                other => {
                    return Err(refuse(&path, &format!("it is compressed by {other}, which is not read")));
                }
            };
            let (start, len) = (entry.data_start(), entry.compressed_size());
            let start = start.ok_or_else(|| refuse(&path, "the directory points to no file"))?;
            if start.saturating_add(len) > length {
                let declared = start.saturating_add(len);
                return Err(DataError::Truncated { file: file.to_owned(), declared, found: length });
            }
            drop(entry);
            let extent = Extent { start, len, inflated };
            found.add_member(path, extent, None, &mut member_reader(&raw, extent), file)?;
        }
        self.add_members(file, &found.into_index(file)?)
    }
}

/// The bytes of a member, inflated as they are read.
pub fn member_reader(file: &File, extent: Extent) -> Box<dyn Read + '_> {
    let range = FileRange { file, at: extent.start, end: extent.start.saturating_add(extent.len) };
    match extent.inflated {
        Some(bytes) => Box::new(DeflateDecoder::new(range).take(bytes.get())),
        None => Box::new(range),
    }
}

/// A part of a file, read by position, so that several threads can.
struct FileRange<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for FileRange<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        files::read_exact_at(self.file, &mut into[..count], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use super::*;

    /// Builds a zip file of names and contents, every other member deflated.
    pub fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut out, mut directory) = (Vec::new(), Vec::new());
        for (i, (name, content)) in members.iter().enumerate() {
            let mut crc = flate2::Crc::new();
            crc.update(content);
            let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
            deflate.write_all(content).unwrap();
            let (method, data) =
                if i % 2 == 1 { (8u16, deflate.finish().unwrap()) } else { (0, content.to_vec()) };
            // Version, flags, method, time and date, checksum and sizes, which both headers have.
            let mut shared = [20u16, 0, method, 0, 0].map(u16::to_le_bytes).concat();
            shared
                .extend([crc.sum(), data.len() as u32, content.len() as u32].map(u32::to_le_bytes).concat());
            shared.extend([name.len() as u16, 0].map(u16::to_le_bytes).concat());
            directory.extend(b"PK\x01\x02\x14\0");
            directory.extend(&shared);
            directory.extend([0; 10]);
            directory.extend((out.len() as u32).to_le_bytes());
            directory.extend(name.as_bytes());
            out.extend(b"PK\x03\x04");
            out.extend(&shared);
            out.extend(name.as_bytes());
            out.extend(&data);
        }
        let (start, bytes, count) = (out.len() as u32, directory.len() as u32, members.len() as u16);
        out.extend(directory);
        out.extend(b"PK\x05\x06\0\0\0\0");
        out.extend([count, count].map(u16::to_le_bytes).concat());
        out.extend([bytes, start].map(u32::to_le_bytes).concat());
        out.extend([0; 2]);
        out
    }

    fn listed(bytes: &[u8]) -> Result<(ImageListing, Vec<Vec<u8>>), DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.zip");
        std::fs::write(&path, bytes).unwrap();
        let mut listing = ImageListing::default();
        listing.add_zip(&path)?;
        let (file, mut contents) = (File::open(&path).unwrap(), Vec::new());
        for extent in &listing.extents {
            let mut content = Vec::new();
            member_reader(&file, *extent).read_to_end(&mut content).unwrap();
            assert_eq!(content.len() as u64, extent.image_bytes());
            contents.push(content);
        }
        Ok((listing, contents))
    }

    #[test]
    fn members_are_listed_and_inflated() {
        let long: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
        let members: [(&str, &[u8]); 8] = [
            ("photos/cat/1.jpg", b"one"),
            ("photos/cat/2.jpg", &long),
            ("photos/dog/1.jpg", b"three"),
            ("0001.cls", b"7"),
            ("0001.png", b"four"),
            ("__MACOSX/photos/cat/._1.jpg", b"no"),
            ("photos/notes.md", b"no"),
            ("photos/dog/2.jpg", b"five"),
        ];
        let (listing, contents) = listed(&zip(&members)).unwrap();
        assert_eq!(contents, [&b"one"[..], &long, b"three", b"four", b"five"]);
        let name = |i| listing.class_names.as_slice()[listing.class(i) as usize].as_str();
        assert_eq!([0, 1, 2, 3, 4].map(name), ["cat", "cat", "dog", "7", "dog"]);
        assert_eq!(listing.ignored.0, 1);
    }

    #[test]
    fn faults_are_reported() {
        let whole = zip(&[("a/1.jpg", &[7; 2000]), ("a/2.jpg", &[7; 2000])]);
        assert!(matches!(listed(&whole[..2100]).unwrap_err(), DataError::Corrupt { .. }));
        let error = listed(&zip(&[("notes.md", b"x")])).unwrap_err().to_string();
        assert!(error.contains("no member has an image extension"), "{error}");
        let mut encrypted = whole.clone();
        let at = encrypted.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
        encrypted[at + 8] |= 1;
        let error = listed(&encrypted).unwrap_err().to_string();
        assert!(error.contains("member a/1.jpg: it is encrypted"), "{error}");
    }
}
