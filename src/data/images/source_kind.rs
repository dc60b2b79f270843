//! The kind of an image source, from its name: folders, a table or an archive.

use std::path::{Path, PathBuf};

use super::LabelColumns;
use crate::{DataError, files, fingerprint};

/// What a job names as images.
pub enum ImageSourceKind {
    Folders,
    Table,
    Tar,
    Zip,
}

impl ImageSourceKind {
    /// Kind of a file, from its name: the content may be compressed.
    pub fn of(file: &Path) -> Result<Self, DataError> {
        if file.is_dir() {
            return Ok(ImageSourceKind::Folders);
        }
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let bare = [".gz", ".zst", ".bz2", ".xz"]
            .iter()
            .find_map(|packed| name.strip_suffix(packed))
            .unwrap_or(&name);
        match bare.rsplit('.').next() {
            Some("csv" | "tsv") => Ok(ImageSourceKind::Table),
            Some("tar" | "tgz" | "tzst") => Ok(ImageSourceKind::Tar),
            Some("zip") => Ok(ImageSourceKind::Zip),
            _ => {
                // A path that does not exist gets its own error.
                std::fs::metadata(file).map_err(DataError::io(file))?;
                Err(DataError::Table {
                    file: file.to_owned(),
                    place: String::new(),
                    problem: "expected a folder, or a file named .csv, .tsv, .tar, .tar.gz, .tar.zst or .zip"
                        .into(),
                    hint: "name a folder with a folder of images for each class, a table of paths and labels, \
                           or an archive",
                })
            }
        }
    }
}

/// Files that a job names, as inputs of the fingerprint.
pub fn fingerprint_inputs(
    key: &'static str,
    files: &[PathBuf],
    columns: &LabelColumns,
) -> Result<Vec<fingerprint::FingerprintInput>, DataError> {
    let kind = |file: PathBuf| {
        Ok(match ImageSourceKind::of(&file)? {
            ImageSourceKind::Folders => fingerprint::InputKind::Folder(file),
            ImageSourceKind::Table => fingerprint::InputKind::Table(file, columns.clone()),
            ImageSourceKind::Tar | ImageSourceKind::Zip => fingerprint::InputKind::Files(vec![file]),
        })
    };
    let inputs = files::resolve_patterns(files)?
        .into_iter()
        .map(|file| Ok(fingerprint::FingerprintInput { key, kind: kind(file)? }));
    inputs.collect()
}
