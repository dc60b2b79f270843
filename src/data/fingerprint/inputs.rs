//! Enumerates the files that samples come from, in the order that defines sample indices.

use std::path::{Path, PathBuf};

use super::file_records::printable;
use crate::DataError;
use crate::images::{LabelColumns, walk_image_folder, walk_image_table};

/// What one key of the job refers to.
#[derive(Clone, Debug)]
pub struct FingerprintInput {
    pub key: &'static str,
    pub kind: InputKind,
}

#[derive(Clone, Debug)]
pub enum InputKind {
    /// Files of which only the content is hashed.
    Files(Vec<PathBuf>),
    /// A folder with one subfolder of images per class.
    Folder(PathBuf),
    /// A table of image paths and labels.
    Table(PathBuf, LabelColumns),
    /// Settings of a generated dataset.
    Settings(String),
}

impl FingerprintInput {
    pub fn file(key: &'static str, path: impl Into<PathBuf>) -> Self {
        Self { key, kind: InputKind::Files(vec![path.into()]) }
    }

    /// Name for messages.
    pub fn name(&self) -> String {
        let first = printable(self.path().as_os_str().as_encoded_bytes());
        match &self.kind {
            InputKind::Files(files) if files.len() > 1 => format!("{first} and {} more", files.len() - 1),
            InputKind::Settings(_) => "generated samples".into(),
            _ => first,
        }
    }

    /// The first file, the folder or the table.
    pub fn path(&self) -> &Path {
        match &self.kind {
            InputKind::Files(files) => files.first().map_or(Path::new(""), |file| file),
            InputKind::Folder(path) | InputKind::Table(path, _) => path,
            InputKind::Settings(_) => Path::new(""),
        }
    }

    /// Whether file names, relative to the folder, are part of the data: they define the classes and the order.
    pub fn hashes_names(&self) -> bool {
        matches!(self.kind, InputKind::Folder(_) | InputKind::Table(..))
    }

    /// Whether files are visited in name order.
    pub fn is_sorted(&self) -> bool {
        matches!(self.kind, InputKind::Folder(_))
    }

    /// Calls `visit` with the name and the path of every file.
    pub fn walk(
        &self,
        visit: &mut dyn FnMut(&Path, &Path) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match &self.kind {
            InputKind::Files(files) => files.iter().try_for_each(|file| visit(file, file)),
            InputKind::Folder(root) => walk_image_folder(root, &mut |name| visit(name, &root.join(name))),
            InputKind::Table(file, columns) => {
                visit(Path::new(""), file)?;
                let folder = file.parent().unwrap_or(Path::new(""));
                walk_image_table(file, columns, &mut |name| visit(name, &folder.join(name)))
            }
            InputKind::Settings(_) => Ok(()),
        }
    }
}
