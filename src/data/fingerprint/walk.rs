//! The files that samples are made from, one after the other, in the order that decides their numbers.

use std::path::{Path, PathBuf};

use crate::data::DataError;
use crate::data::images::{Columns, each_in_folder, each_in_table};

/// What a key of the job names.
#[derive(Clone, Debug)]
pub struct Input {
    pub key: &'static str,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub enum Kind {
    /// Files whose content alone counts.
    Files(Vec<PathBuf>),
    /// A folder of folders of images.
    Folder(PathBuf),
    /// A table of paths and labels.
    Table(PathBuf, Columns),
    /// Samples that are drawn, from these settings.
    Settings(String),
}

impl Input {
    pub fn file(key: &'static str, path: impl Into<PathBuf>) -> Self {
        Self { key, kind: Kind::Files(vec![path.into()]) }
    }

    /// How it is told.
    pub fn name(&self) -> String {
        match &self.kind {
            Kind::Files(files) if files.len() > 1 => {
                format!("{} and {} more", files[0].display(), files.len() - 1)
            }
            Kind::Settings(_) => "generated samples".into(),
            _ => self.path().display().to_string(),
        }
    }

    /// The first file, the folder or the table.
    pub fn path(&self) -> &Path {
        match &self.kind {
            Kind::Files(files) => files.first().map_or(Path::new(""), |file| file),
            Kind::Folder(path) | Kind::Table(path, _) => path,
            Kind::Settings(_) => Path::new(""),
        }
    }

    /// Whether the names of files, below the folder, are part of the data: they give the classes and the order.
    pub fn names_decide(&self) -> bool {
        matches!(self.kind, Kind::Folder(_) | Kind::Table(..))
    }

    /// Whether files come in the order of their names.
    pub fn is_sorted(&self) -> bool {
        matches!(self.kind, Kind::Folder(_))
    }

    /// Calls `visit` with the name and the path of every file.
    pub fn walk(
        &self,
        visit: &mut dyn FnMut(&Path, &Path) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match &self.kind {
            Kind::Files(files) => files.iter().try_for_each(|file| visit(file, file)),
            Kind::Folder(root) => each_in_folder(root, &mut |name| visit(name, &root.join(name))),
            Kind::Table(file, columns) => {
                visit(Path::new(""), file)?;
                let folder = file.parent().unwrap_or(Path::new(""));
                each_in_table(file, columns, &mut |name| visit(name, &folder.join(name)))
            }
            Kind::Settings(_) => Ok(()),
        }
    }
}
