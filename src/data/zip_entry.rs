//! The file inside a zip file: where its bytes are and how they are compressed.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::Path;

use zip::{CompressionMethod, ZipArchive};

use super::DataError;

/// The only file of a zip file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZipEntry {
    pub method: ZipMethod,
    /// Compressed bytes.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZipMethod {
    Stored,
    Deflated,
}

impl ZipEntry {
    /// Reads the directory of `raw` and seeks to the first byte of its only file. Folders and what macOS adds do not
    /// count.
    pub fn locate(file: &Path, raw: &mut File) -> Result<Self, DataError> {
        let corrupt = |error: zip::result::ZipError| DataError::Corrupt {
            file: file.to_owned(),
            source: io::Error::other(error).into(),
        };
        let refuse = |problem: String, hint| DataError::Table {
            file: file.to_owned(),
            place: String::new(),
            problem,
            hint,
        };
        let mut archive = ZipArchive::new(raw.try_clone().map_err(DataError::io(file))?).map_err(corrupt)?;
        let names: Vec<(usize, String)> = archive
            .file_names_raw()
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .enumerate()
            .filter(|(_, name)| !name.ends_with('/') && !name.starts_with("__MACOSX/"))
            .collect();
        if names.iter().any(|(_, name)| name == "[Content_Types].xml") {
            let hint = "save it as CSV, or convert it with `pandas.read_excel(...).to_csv(...)`";
            return Err(refuse("it is an Office document, not a table in text".into(), hint));
        }
        let [(only, _)] = names[..] else {
            let first: Vec<String> = names.iter().take(3).map(|(_, name)| format!("`{name}`")).collect();
            let problem = match names.len() {
                0 => "the zip file is empty".into(),
                n => format!("the zip file has {n} files, the first of which are {}", first.join(", ")),
            };
            return Err(refuse(
                problem,
                "a zip file must hold one file: unpack it, and name the files themselves",
            ));
        };
        let entry = archive.by_index_raw(only).map_err(corrupt)?;
        let method = match entry.compression() {
            _ if entry.encrypted() => {
                return Err(refuse("the zip file is encrypted".into(), "unpack it with its password"));
            }
            CompressionMethod::Stored => ZipMethod::Stored,
            CompressionMethod::DEFLATE => ZipMethod::Deflated,
            other => return Err(refuse(format!("the zip file is compressed by {other}"), "unpack it")),
        };
        let (start, bytes) = (entry.data_start(), entry.compressed_size());
        drop(entry);
        let Some(start) = start else {
            let error = io::Error::other("its directory points to no file");
            return Err(DataError::Corrupt { file: file.to_owned(), source: error.into() });
        };
        raw.seek(SeekFrom::Start(start)).map_err(DataError::io(file))?;
        Ok(Self { method, bytes })
    }
}
