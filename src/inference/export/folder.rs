//! An export's folder: filled under a temporary name, synced, and renamed when it is complete.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::ExportedFile;
use super::error::ExportError;

/// A folder under construction beside its final place. Dropping it before it is committed removes it.
pub struct ExportFolder {
    temporary: PathBuf,
    target: PathBuf,
    replace: bool,
}

impl ExportFolder {
    /// Refuses a target that has content, unless it may be replaced. Removes what a killed process left.
    pub fn create(target: &Path, replace: bool) -> Result<Self, ExportError> {
        let occupied = match fs::read_dir(target) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(ExportError::NotAFolder(target.to_owned()));
            }
            // A folder that cannot be read.
            Err(source) => return Err(ExportError::io("write the folder", target)(source)),
        };
        if occupied && !replace {
            return Err(ExportError::FolderTaken(target.to_owned()));
        }
        let temporary = hidden_sibling(target, "tmp");
        let _ = fs::remove_dir_all(&temporary);
        fs::create_dir_all(&temporary).map_err(ExportError::io("create", &temporary))?;
        Ok(Self { temporary, target: target.to_owned(), replace })
    }

    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes a whole file.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> Result<(), ExportError> {
        let mut file = self.file(name)?;
        file.write(content)?;
        file.finish()
    }

    /// Starts a file that is written in pieces.
    pub(super) fn file(&self, name: &str) -> Result<ExportFile, ExportError> {
        let path = self.temporary.join(name);
        let file = File::create(&path).map_err(ExportError::io("create", &path))?;
        Ok(ExportFile { path, writer: BufWriter::with_capacity(1 << 20, file), written: 0 })
    }

    /// Gives the folder its name, and returns its files with their sizes, sorted by name.
    pub(super) fn commit(self) -> Result<Vec<ExportedFile>, ExportError> {
        let whole = self.temporary.clone();
        self.commit_part(&whole)
    }

    /// The same for `part`, a folder below this one; the rest is removed.
    pub fn commit_part(self, part: &Path) -> Result<Vec<ExportedFile>, ExportError> {
        let mut files = Vec::new();
        for entry in fs::read_dir(part).map_err(ExportError::io("read", part))? {
            let entry = entry.map_err(ExportError::io("read", part))?;
            let bytes = entry.metadata().map_err(ExportError::io("read", entry.path()))?.len();
            files.push(ExportedFile { name: entry.file_name().to_string_lossy().into_owned(), bytes });
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        sync(part)?;
        let old = hidden_sibling(&self.target, "old");
        let replaces = self.replace && self.target.exists();
        if replaces {
            let _ = fs::remove_dir_all(&old);
            fs::rename(&self.target, &old).map_err(ExportError::io("replace", &self.target))?;
        }
        if let Err(source) = fs::rename(part, &self.target) {
            if replaces {
                // Best effort: what was there before comes back.
                let _ = fs::rename(&old, &self.target);
            }
            return Err(ExportError::io("write", &self.target)(source));
        }
        if replaces {
            fs::remove_dir_all(&old).map_err(ExportError::io("remove", &old))?;
        }
        if let Some(parent) = self.target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync(parent)?;
        }
        Ok(files)
    }
}

impl Drop for ExportFolder {
    fn drop(&mut self) {
        // Nothing is there after a commit of the whole folder.
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// A file of the folder that is written in pieces.
pub(super) struct ExportFile {
    path: PathBuf,
    writer: BufWriter<File>,
    written: u64,
}

impl ExportFile {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        self.written += bytes.len() as u64;
        self.writer.write_all(bytes).map_err(ExportError::io("write", &self.path))
    }

    /// Bytes written so far.
    pub(super) fn position(&self) -> u64 {
        self.written
    }

    /// Flushes and syncs the file.
    pub(super) fn finish(mut self) -> Result<(), ExportError> {
        let synced = self.writer.flush().and_then(|()| self.writer.get_ref().sync_all());
        synced.map_err(ExportError::io("write", &self.path))
    }
}

fn sync(folder: &Path) -> Result<(), ExportError> {
    File::open(folder).and_then(|file| file.sync_all()).map_err(ExportError::io("write", folder))
}

/// `.NAME.SUFFIX` beside `target`, on the same file system, so that a rename is atomic.
fn hidden_sibling(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().map_or_else(|| "export".into(), |name| name.to_string_lossy());
    let hidden = format!(".{name}.{suffix}");
    match target.parent() {
        Some(parent) => parent.join(hidden),
        None => hidden.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_appears_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        let unfinished = ExportFolder::create(&target, false).unwrap();
        unfinished.write("a", b"1").unwrap();
        drop(unfinished);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);

        let folder = ExportFolder::create(&target, false).unwrap();
        folder.write("a", b"12").unwrap();
        let files = folder.commit().unwrap();
        assert_eq!(files.iter().map(|f| (f.name.as_str(), f.bytes)).collect::<Vec<_>>(), [("a", 2)]);

        let refused = ExportFolder::create(&target, false).err().unwrap();
        assert!(matches!(refused, ExportError::FolderTaken(_)), "{refused}");
        let folder = ExportFolder::create(&target, true).unwrap();
        folder.write("b", b"3").unwrap();
        folder.commit().unwrap();
        assert!(!target.join("a").exists() && target.join("b").exists());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_part_replaces_the_folder_and_nothing_else_is_left() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("before"), b"1").unwrap();
        // A killed process left this.
        fs::create_dir_all(root.path().join(".out.tmp/part")).unwrap();
        let folder = ExportFolder::create(&target, true).unwrap();
        let part = folder.path().join("part");
        fs::create_dir(&part).unwrap();
        fs::write(part.join("after"), b"2").unwrap();
        assert!(target.join("before").exists());
        assert_eq!(folder.commit_part(&part).unwrap().len(), 1);
        assert!(!target.join("before").exists() && target.join("after").exists());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        fs::write(&target, b"1").unwrap();
        let refused = ExportFolder::create(&target, true).err().unwrap();
        assert!(matches!(refused, ExportError::NotAFolder(_)) && refused.is_usage(), "{refused}");
        assert!(refused.hint().is_some() && target.exists());
    }
}
