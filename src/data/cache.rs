//! On-disk cache of data that is expensive to derive from data files: row offsets, statistics, token ids.
//!
//! An entry is one file. Its name holds the entry kind and a key: a hash of the source files and of the settings that
//! shaped the entry. An entry is complete or absent: the writer writes a temporary file and renames it, and stores a
//! checksum and a version in a second file. Readers ignore an entry that does not match its checksum, and the caller
//! rebuilds it. Deleting the cache costs time only.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::UNIX_EPOCH,
};

use serde::{Deserialize, Serialize};

use super::DataError;
use crate::base::random::{mix, stream_id};

/// A folder of entries.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    /// Bytes per entry that was used, by path.
    used_entries: Arc<Mutex<BTreeMap<PathBuf, u64>>>,
}

impl Default for Cache {
    /// `runs/.data` under the working directory, beside the runs.
    fn default() -> Self {
        Self::at("runs/.data")
    }
}

/// Identifies what an entry was built from. The key changes with the path, size or modification time of any source
/// file, and with the settings that shaped the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheKey(u64);

impl CacheKey {
    /// Key of `files` as they are now and of `settings`, which must include every setting the entry depends on.
    pub fn new(files: &[PathBuf], settings: &str) -> Result<Self, DataError> {
        let mut state = stream_id(concat!("data.cache ", env!("CARGO_PKG_VERSION")));
        let mut add = |x: u64| state = mix(state.rotate_left(17) ^ mix(x.wrapping_add(1)));
        add(stream_id(settings));
        for file in files {
            let metadata = fs::metadata(file).map_err(DataError::io(file))?;
            let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            add(stream_id(&path.to_string_lossy()));
            add(metadata.len());
            add(changed.map_or(0, |time| time.as_nanos() as u64));
        }
        Ok(Self(state))
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Format version of the entries; a bump invalidates all of them.
const VERSION: u32 = 2;

/// Checksum of an entry, stored in a `.sum` file beside it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct EntryChecksum {
    version: u32,
    bytes: u64,
    crc32c: u32,
}

impl Cache {
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), used_entries: Arc::default() }
    }

    /// Total bytes of the entries that this cache and its clones found or created.
    pub fn used_bytes(&self) -> u64 {
        self.used_entries.lock().map_or(0, |used| used.values().sum())
    }

    /// Path of the entry `name` (such as "csv-index") for `key`, if it exists and matches its checksum.
    pub fn find(&self, name: &str, key: CacheKey) -> Option<PathBuf> {
        let path = self.path(name, key);
        self.record_use(&path, verified_len(&path)?);
        Some(path)
    }

    /// As [`Cache::find`], but `make` writes the entry if it is missing.
    pub fn get_or_create(
        &self,
        name: &str,
        key: CacheKey,
        make: impl FnOnce(&mut BufWriter<File>) -> Result<(), DataError>,
    ) -> Result<PathBuf, DataError> {
        self.get_or_create_all([name], key, |[out]| make(out)).map(|[path]| path)
    }

    /// Writes an entry and replaces an existing one.
    pub fn put(
        &self,
        name: &str,
        key: CacheKey,
        make: impl FnOnce(&mut BufWriter<File>) -> Result<(), DataError>,
    ) -> Result<PathBuf, DataError> {
        self.put_all([name], key, |[out]| make(out)).map(|[path]| path)
    }

    /// As [`Cache::get_or_create`], for entries that are built together.
    pub fn get_or_create_all<const N: usize>(
        &self,
        names: [&str; N],
        key: CacheKey,
        make: impl FnOnce([&mut BufWriter<File>; N]) -> Result<(), DataError>,
    ) -> Result<[PathBuf; N], DataError> {
        if names.iter().all(|name| self.find(name, key).is_some()) {
            return Ok(names.map(|name| self.path(name, key)));
        }
        self.put_all(names, key, make)
    }

    fn put_all<const N: usize>(
        &self,
        names: [&str; N],
        key: CacheKey,
        make: impl FnOnce([&mut BufWriter<File>; N]) -> Result<(), DataError>,
    ) -> Result<[PathBuf; N], DataError> {
        let paths = names.map(|name| self.path(name, key));
        fs::create_dir_all(&self.folder).map_err(DataError::write(&self.folder))?;
        self.remove_stale_parts();
        // Another process may build the same entry at the same time. Both results are complete; the last rename wins.
        let parts = paths.each_ref().map(|path| path.with_extension(format!("{}.part", std::process::id())));
        let written = write(&parts, make).and_then(|_locks| {
            parts.iter().zip(&paths).try_for_each(|(part, path)| {
                let sum = checksum(part).map_err(DataError::write(part))?;
                self.record_use(path, sum.bytes);
                let text = serde_json::to_vec(&sum).map_err(io::Error::from);
                // An entry without a checksum is invalid. Remove the old checksum before the rename and write the new
                // one after it, so a crash in between leaves an invalid entry and never a wrong one.
                let checksum_file = checksum_path(path);
                let put = text.and_then(|text| {
                    let removed = fs::remove_file(&checksum_file);
                    if removed.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
                        return removed;
                    }
                    fs::rename(part, path)?;
                    let temporary = checksum_file.with_extension(format!("{}.part", std::process::id()));
                    fs::write(&temporary, text)?;
                    fs::rename(&temporary, &checksum_file)
                });
                put.map_err(DataError::write(path))
            })
        });
        if written.is_err() {
            // Best effort: a partial file is useless, and the caller needs the original error.
            parts.iter().for_each(|part| drop(fs::remove_file(part)));
        }
        written.map(|()| paths)
    }

    fn record_use(&self, path: &Path, bytes: u64) {
        if let Ok(mut used) = self.used_entries.lock() {
            used.insert(path.to_owned(), bytes);
        }
    }

    /// Removes partial files of processes that were killed. A live writer holds a lock on its file.
    fn remove_stale_parts(&self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().filter_map(Result::ok);
        let parts =
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "part"));
        for part in parts {
            if File::open(&part).is_ok_and(|file| file.try_lock().is_ok()) {
                let _ = fs::remove_file(&part);
            }
        }
    }

    fn path(&self, name: &str, key: CacheKey) -> PathBuf {
        self.folder.join(format!("{name}-{key}"))
    }
}

fn checksum_path(path: &Path) -> PathBuf {
    path.with_extension("sum")
}

/// Length of the entry in bytes if it matches its checksum.
fn verified_len(path: &Path) -> Option<u64> {
    let expected: EntryChecksum = serde_json::from_slice(&fs::read(checksum_path(path)).ok()?).ok()?;
    // The length check is cheap and catches most damage before the content is hashed.
    if expected.version != VERSION || fs::metadata(path).ok()?.len() != expected.bytes {
        return None;
    }
    (checksum(path).ok()? == expected).then_some(expected.bytes)
}

fn checksum(path: &Path) -> io::Result<EntryChecksum> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; 1 << 18]);
    let mut sum = EntryChecksum { version: VERSION, bytes: 0, crc32c: 0 };
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            n => {
                sum.crc32c = crc32c::crc32c_append(sum.crc32c, &buffer[..n]);
                sum.bytes += n as u64;
            }
        }
    }
}

fn write<const N: usize>(
    parts: &[PathBuf; N],
    make: impl FnOnce([&mut BufWriter<File>; N]) -> Result<(), DataError>,
) -> Result<Vec<File>, DataError> {
    let (mut outs, mut locks) = (Vec::with_capacity(N), Vec::with_capacity(N));
    for part in parts {
        let file = File::create(part).map_err(DataError::write(part))?;
        // On file systems without locks, stale partial files are left in place.
        let _ = file.try_lock();
        locks.push(file.try_clone().map_err(DataError::write(part))?);
        outs.push(BufWriter::with_capacity(1 << 18, file));
    }
    // Infallible: `outs` has one writer for each of the N parts.
    let Ok(mut outs) = <[_; N]>::try_from(outs) else { return Ok(locks) };
    make(outs.each_mut())?;
    let flush = |(out, part): (&mut BufWriter<File>, &PathBuf)| {
        out.flush().and_then(|()| out.get_ref().sync_all()).map_err(DataError::write(part))
    };
    outs.iter_mut().zip(parts).try_for_each(flush)?;
    Ok(locks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_created_once_and_recreated_when_a_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, file) = (Cache::at(folder.path().join("cache")), folder.path().join("data"));
        fs::write(&file, "one").unwrap();
        let files = [file.clone()];
        let before = CacheKey::new(&files, "plain").unwrap();
        let make = |out: &mut BufWriter<File>| out.write_all(b"made").map_err(DataError::write(&file));
        let path = cache.get_or_create("entry", before, make).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"made");
        assert_eq!(cache.get_or_create("entry", before, |_| panic!("made twice")).unwrap(), path);
        assert_ne!(CacheKey::new(&files, "otherwise").unwrap(), before);
        fs::write(&file, "four").unwrap();
        let after = CacheKey::new(&files, "plain").unwrap();
        assert_ne!(after, before);
        assert!(cache.find("entry", after).is_none());
        assert!(CacheKey::new(&["/no/such".into()], "").is_err());
    }

    #[test]
    fn an_entry_that_is_corrupt_or_of_another_version_is_recreated() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, key) = (Cache::at(folder.path()), CacheKey::new(&[], "x").unwrap());
        let make =
            |out: &mut BufWriter<File>| out.write_all(b"content").map_err(DataError::write("x".as_ref()));
        let path = cache.get_or_create("entry", key, make).unwrap();
        assert_eq!(cache.used_bytes(), 7);
        let damages: [&dyn Fn(); 6] = [
            &|| fs::write(&path, b"cOntent").unwrap(),
            &|| fs::write(&path, b"conten").unwrap(),
            &|| fs::write(&path, b"").unwrap(),
            &|| fs::remove_file(checksum_path(&path)).unwrap(),
            &|| fs::write(checksum_path(&path), b"{").unwrap(),
            &|| {
                let text = fs::read_to_string(checksum_path(&path)).unwrap();
                fs::write(checksum_path(&path), text.replace("\"version\":2", "\"version\":0")).unwrap();
            },
        ];
        for damage in damages {
            damage();
            assert!(cache.find("entry", key).is_none());
            assert_eq!(cache.get_or_create("entry", key, make).unwrap(), path);
            assert_eq!(fs::read(&path).unwrap(), b"content");
            assert!(cache.find("entry", key).is_some());
        }
        // One partial file of a killed process, and one that a live writer still locks.
        let held = File::create(folder.path().join("other.7.part")).unwrap();
        held.lock().unwrap();
        fs::write(folder.path().join("entry.8.part"), "half").unwrap();
        cache.put("entry", key, make).unwrap();
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left.len(), 3, "{left:?}");
        assert!(left[2] == "other.7.part");
    }

    #[test]
    fn an_entry_that_fails_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = CacheKey::new(&[], "").unwrap();
        let failed = cache.get_or_create("entry", key, |out| {
            out.write_all(b"half").unwrap();
            Err(DataError::OutOfMemory { bytes: 1 })
        });
        assert!(failed.is_err() && cache.find("entry", key).is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
