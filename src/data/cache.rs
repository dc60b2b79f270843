//! What was found out about files at some cost, kept for the next time: row offsets, statistics, tokens.
//!
//! An entry is a file named by what it is and by a fingerprint of the files and settings it was made from.
//! It is whole or absent: it is written beside its place and renamed. Deleting any of it costs time only.

use std::{
    fmt,
    fs::{self, File},
    io::{BufWriter, Write},
    path::PathBuf,
    time::UNIX_EPOCH,
};

use super::DataError;
use crate::random::{mix, stream};

/// A folder of entries.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Default for Cache {
    /// Beside the runs of the folder that the program was started in.
    fn default() -> Self {
        Self::at("runs/.data")
    }
}

/// What an entry was made from: any change of a file's path, size or time of change, or of the settings
/// that shaped the entry, gives another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// Of `files` as they are now and of `how`, which states every setting the entry depends on.
    pub fn of(files: &[PathBuf], how: &str) -> Result<Self, DataError> {
        let mut state = stream(concat!("data.cache ", env!("CARGO_PKG_VERSION")));
        let mut add = |x: u64| state = mix(state.rotate_left(17) ^ mix(x.wrapping_add(1)));
        add(stream(how));
        for file in files {
            let about = fs::metadata(file).map_err(DataError::io(file))?;
            let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            let changed = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            add(stream(&path.to_string_lossy()));
            add(about.len());
            add(changed.map_or(0, |time| time.as_nanos() as u64));
        }
        Ok(Self(state))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Cache {
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The file of the entry `name` (a word such as "csv-index") of `of`, if it was made before.
    pub fn find(&self, name: &str, of: Fingerprint) -> Option<PathBuf> {
        let path = self.path(name, of);
        path.is_file().then_some(path)
    }

    /// As [`Cache::find`]; what was not made before is written by `make` now.
    pub fn get(
        &self,
        name: &str,
        of: Fingerprint,
        make: impl FnOnce(&mut BufWriter<File>) -> Result<(), DataError>,
    ) -> Result<PathBuf, DataError> {
        self.get_all([name], of, |[out]| make(out)).map(|[path]| path)
    }

    /// As [`Cache::get`], for entries that are made together.
    pub fn get_all<const N: usize>(
        &self,
        names: [&str; N],
        of: Fingerprint,
        make: impl FnOnce([&mut BufWriter<File>; N]) -> Result<(), DataError>,
    ) -> Result<[PathBuf; N], DataError> {
        let paths = names.map(|name| self.path(name, of));
        if paths.iter().all(|path| path.is_file()) {
            return Ok(paths);
        }
        fs::create_dir_all(&self.folder).map_err(DataError::writing(&self.folder))?;
        // Another process may make the same entry at the same time; both are whole, and the last one stays.
        let parts = paths.each_ref().map(|path| path.with_extension(format!("{}.part", std::process::id())));
        let written = write(&parts, make).and_then(|()| {
            let mut both = parts.iter().zip(&paths);
            both.try_for_each(|(part, path)| fs::rename(part, path).map_err(DataError::writing(path)))
        });
        if written.is_err() {
            // Best effort: what is left of it is of no use, and the error is what matters.
            parts.iter().for_each(|part| drop(fs::remove_file(part)));
        }
        written.map(|()| paths)
    }

    fn path(&self, name: &str, of: Fingerprint) -> PathBuf {
        self.folder.join(format!("{name}-{of}"))
    }
}

fn write<const N: usize>(
    parts: &[PathBuf; N],
    make: impl FnOnce([&mut BufWriter<File>; N]) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut outs = Vec::with_capacity(N);
    for part in parts {
        let file = File::create(part).map_err(DataError::writing(part))?;
        outs.push(BufWriter::with_capacity(1 << 18, file));
    }
    // One was made for each of the N parts.
    let Ok(mut outs) = <[_; N]>::try_from(outs) else { return Ok(()) };
    make(outs.each_mut())?;
    let flush = |(out, part): (&mut BufWriter<File>, &PathBuf)| {
        out.flush().and_then(|()| out.get_ref().sync_all()).map_err(DataError::writing(part))
    };
    outs.iter_mut().zip(parts).try_for_each(flush)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_made_once_and_again_when_a_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, file) = (Cache::at(folder.path().join("cache")), folder.path().join("data"));
        fs::write(&file, "one").unwrap();
        let files = [file.clone()];
        let before = Fingerprint::of(&files, "plain").unwrap();
        let make = |out: &mut BufWriter<File>| out.write_all(b"made").map_err(DataError::writing(&file));
        let path = cache.get("entry", before, make).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"made");
        assert_eq!(cache.get("entry", before, |_| panic!("made twice")).unwrap(), path);
        assert_ne!(Fingerprint::of(&files, "otherwise").unwrap(), before);
        fs::write(&file, "four").unwrap();
        let after = Fingerprint::of(&files, "plain").unwrap();
        assert_ne!(after, before);
        assert!(cache.find("entry", after).is_none());
        assert!(Fingerprint::of(&["/no/such".into()], "").is_err());
    }

    #[test]
    fn an_entry_that_fails_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let of = Fingerprint::of(&[], "").unwrap();
        let failed = cache.get("entry", of, |out| {
            out.write_all(b"half").unwrap();
            Err(DataError::OutOfMemory { bytes: 1 })
        });
        assert!(failed.is_err() && cache.find("entry", of).is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
