//! Fingerprint of the data a run was trained on: a content hash of every file that samples come from.
//!
//! Each file is read once. The cache keeps its hash with its size and modification time, and the hash is trusted as
//! long as both are unchanged; otherwise the content is hashed again. Copied data is therefore recognized as the same,
//! and changed files are reported by name. The hash is 128-bit XXH3, which detects any accidental change and is faster
//! than any disk. Memory is bounded: image folders are walked, not listed.

mod file_records;
mod inputs;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use self::file_records::{FileRecords, printable, write_record};
use super::cache::{Cache, CacheKey};
use super::{DataError, ProgressObserver};
use crate::base::units::counted;
pub use inputs::{FingerprintInput, InputKind};

/// The data of a run, as its checkpoints record it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFingerprint {
    pub sources: Vec<SourceFingerprint>,
    /// Class names by class id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// Vocabulary size of text data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// Hash of the tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
}

/// Fingerprint of one source: a file, an image folder, an image table, many files of one key, or generator settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFingerprint {
    /// Key of the job that names the source.
    pub key: String,
    pub path: String,
    pub files: u64,
    pub bytes: u64,
    /// Hash of the path, size and modification time of every file; `content` is trusted while it is unchanged.
    pub stat: String,
    /// Hash of the content of every file, and of its name if the name decides the class.
    pub content: String,
    /// Files that were changed, added or removed since they were last hashed; the first few.
    #[serde(skip)]
    changed: Vec<String>,
}

/// Files of one key that get a fingerprint each; beyond this, all files of the key share one.
const MAX_SEPARATE_FILES: usize = 100;
/// Files hashed in parallel per batch.
const HASH_BATCH_FILES: usize = 256;
/// Bytes between two progress reports.
const PROGRESS_STEP_BYTES: u64 = 16 << 20;
/// Changed files that are reported by name.
const MAX_REPORTED_CHANGES: usize = 3;

/// Fingerprints the data. `known` comes from a checkpoint; it is trusted where sizes and modification times are
/// unchanged, even if the cache was deleted.
pub fn fingerprint_sources(
    inputs: Vec<FingerprintInput>,
    known: Option<&DataFingerprint>,
    cache: &Cache,
    observer: &dyn ProgressObserver,
) -> Result<Vec<SourceFingerprint>, DataError> {
    let mut groups: Vec<FingerprintInput> = Vec::new();
    let many = |key: &str| inputs.iter().filter(|input| input.key == key).count() > MAX_SEPARATE_FILES;
    let joined: BTreeSet<&str> = inputs.iter().map(|input| input.key).filter(|key| many(key)).collect();
    for input in inputs.clone() {
        match (groups.iter_mut().find(|group| group.key == input.key), &input.kind) {
            (Some(group), InputKind::Files(files)) if joined.contains(input.key) => match &mut group.kind {
                InputKind::Files(all) => all.extend(files.iter().cloned()),
                _ => groups.push(input),
            },
            _ => groups.push(input),
        }
    }
    let mut found = Vec::with_capacity(groups.len());
    for group in &groups {
        found.push(fingerprint_source(group, known, cache, observer)?);
    }
    Ok(found)
}

fn fingerprint_source(
    input: &FingerprintInput,
    known: Option<&DataFingerprint>,
    cache: &Cache,
    observer: &dyn ProgressObserver,
) -> Result<SourceFingerprint, DataError> {
    let (key, path) = (input.key.to_owned(), input.name());
    if let InputKind::Settings(text) = &input.kind {
        let content = hex(XxHash3_128::oneshot(text.as_bytes()));
        return Ok(SourceFingerprint { key, path, content, ..SourceFingerprint::default() });
    }
    // Stat every file first. If nothing changed, that is the only cost.
    let (mut stat, mut files, mut bytes) = (XxHash3_128::new(), 0, 0);
    input.walk(&mut |_, path| {
        let file_stat = FileStat::of(path)?;
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        for part in [whole.as_os_str().as_encoded_bytes(), &[0]] {
            stat.write(part);
        }
        stat.write(&file_stat.size.to_le_bytes());
        stat.write(&file_stat.modified.to_le_bytes());
        files += 1;
        bytes += if file_stat.exists() { file_stat.size } else { 0 };
        Ok(())
    })?;
    let stat = hex(stat.finish_128());
    let source = SourceFingerprint { key, path, files, bytes, stat, ..SourceFingerprint::default() };
    let as_before = |s: &&SourceFingerprint| s.key == source.key && s.stat == source.stat;
    if let Some(before) = known.and_then(|known| known.sources.iter().find(as_before)) {
        return Ok(SourceFingerprint { content: before.content.clone(), ..source });
    }
    // Next, the hash that an earlier run cached for the same sizes and modification times.
    let cache_key = CacheKey::new(&[], &format!("content {} {}", source.key, source.stat))?;
    let kept = cache.find("content", cache_key).and_then(|path| fs::read_to_string(path).ok());
    if let Some(content) = kept {
        return Ok(SourceFingerprint { content, ..source });
    }
    let (content, changed) = hash_contents(input, bytes, cache, observer)?;
    // A failed cache write is not an error: the next run hashes the content again.
    drop(cache.put("content", cache_key, |out| {
        out.write_all(content.as_bytes()).map_err(DataError::write(input.path()))
    }));
    Ok(SourceFingerprint { content, changed, ..source })
}

/// Hash of all content, and the first files that differ from their cached hashes.
fn hash_contents(
    input: &FingerprintInput,
    bytes: u64,
    cache: &Cache,
    observer: &dyn ProgressObserver,
) -> Result<(String, Vec<String>), DataError> {
    let whole = std::path::absolute(input.path()).unwrap_or_else(|_| input.path().to_owned());
    let cache_key = CacheKey::new(&[], &format!("file records {} {}", input.key, whole.display()))?;
    let before = || cache.find("files", cache_key).and_then(|path| FileRecords::open(&path).ok());
    let mut found = None;
    let kept = cache.put("files", cache_key, |out| {
        found = Some(hash_all(input, bytes, before(), out, observer)?);
        Ok(())
    });
    match (found, kept) {
        (Some(found), _) => Ok(found),
        // The cache cannot be written, for example because the disk is full: hash without it.
        (None, Err(DataError::Write { .. })) => {
            hash_all(input, bytes, before(), &mut std::io::sink(), observer)
        }
        (None, kept) => Err(kept.err().unwrap_or(DataError::OutOfMemory { bytes })),
    }
}

/// As [`hash_contents`]; writes the record of every file to `out`.
fn hash_all(
    input: &FingerprintInput,
    bytes: u64,
    mut previous_records: Option<FileRecords>,
    out: &mut dyn Write,
    observer: &dyn ProgressObserver,
) -> Result<(String, Vec<String>), DataError> {
    let has_previous = previous_records.is_some();
    let (mut all, done) = (XxHash3_128::new(), AtomicU64::new(0));
    let changed = RefCell::new(Vec::new());
    let report = |name: String| {
        if changed.borrow().len() < MAX_REPORTED_CHANGES {
            changed.borrow_mut().push(name);
        }
    };
    // Images of a table are not reported as added or removed: the table itself changed, and its rows may be in any
    // order.
    let lists_names = !matches!(input.kind, InputKind::Table(..));
    let mut gone = |name: &[u8]| {
        if lists_names {
            report(format!("`{}`, which is gone", printable(name)));
        }
    };
    let activity = format!("hashing {}", input.name());
    let read = |more: u64| {
        let before = done.fetch_add(more, Ordering::Relaxed);
        if (before + more) / PROGRESS_STEP_BYTES > before / PROGRESS_STEP_BYTES {
            observer.report(&activity, (before + more).min(bytes), bytes);
        }
    };
    let mut batch: Vec<FileRecord> = Vec::new();
    let mut flush = |batch: &mut Vec<FileRecord>| -> Result<(), DataError> {
        batch.par_iter_mut().filter(|record| record.hash.is_none()).try_for_each(|record| {
            record.hash = Some(if record.stat.exists() { hash_file(&record.path, &read)? } else { 0 });
            Ok::<_, DataError>(())
        })?;
        for record in batch.drain(..) {
            let (hash, name) = (record.hash.unwrap_or(0), record.hashed_name());
            all.write(name);
            all.write(&[0]);
            all.write(&record.stat.size.to_le_bytes());
            all.write(&hash.to_le_bytes());
            write_record(out, &record.name, record.stat, hash).map_err(DataError::write(input.path()))?;
            let name = match record.name.as_os_str().as_encoded_bytes() {
                [] => input.path().as_os_str().as_encoded_bytes(),
                name => name,
            };
            match record.previous_hash {
                Some(before) if before != hash => report(format!("`{}`", printable(name))),
                None if has_previous && lists_names => report(format!("`{}`, which is new", printable(name))),
                _ => {}
            }
        }
        Ok(())
    };
    input.walk(&mut |name, path| {
        let stat = FileStat::of(path)?;
        let known =
            previous_records.as_mut().and_then(|records| records.take(name, input.is_sorted(), &mut gone));
        let hash = known.and_then(|(then, hash)| (then == stat).then_some(hash));
        if hash.is_some() && stat.exists() {
            read(stat.size);
        }
        let previous_hash = known.map(|(_, hash)| hash);
        let hash_name = input.hashes_names();
        batch.push(FileRecord {
            name: name.to_owned(),
            path: path.to_owned(),
            hash_name,
            stat,
            hash,
            previous_hash,
        });
        if batch.len() < HASH_BATCH_FILES {
            return Ok(());
        }
        flush(&mut batch)
    })?;
    flush(&mut batch)?;
    if let Some(records) = previous_records {
        records.finish(&mut gone);
    }
    observer.report(&activity, bytes, bytes);
    Ok((hex(all.finish_128()), changed.into_inner()))
}

/// A file and its known hashes.
struct FileRecord {
    name: PathBuf,
    path: PathBuf,
    /// Whether the file name is part of the hash.
    hash_name: bool,
    stat: FileStat,
    hash: Option<u128>,
    /// Hash from the previous run.
    previous_hash: Option<u128>,
}

impl FileRecord {
    fn hashed_name(&self) -> &[u8] {
        if self.hash_name { self.name.as_os_str().as_encoded_bytes() } else { &[] }
    }
}

/// Size in bytes and modification time in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStat {
    size: u64,
    modified: u64,
}

impl FileStat {
    /// Stands for a path that does not exist or is not a regular file. Such a file is one bad record.
    const MISSING: FileStat = FileStat { size: u64::MAX, modified: 0 };

    fn of(path: &Path) -> Result<Self, DataError> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => {
                let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                let modified = modified.map_or(0, |time| time.as_nanos() as u64);
                Ok(Self { size: metadata.len(), modified })
            }
            Ok(_) => Ok(Self::MISSING),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::MISSING),
            Err(error) => Err(DataError::io(path)(error)),
        }
    }

    fn exists(self) -> bool {
        self != Self::MISSING
    }
}

/// Calls `on_read` with the byte count of every chunk read.
fn hash_file(path: &Path, on_read: &(dyn Fn(u64) + Sync)) -> Result<u128, DataError> {
    let read = || {
        let (mut file, mut buffer, mut hasher) =
            (crate::base::regular_file::open(path)?, vec![0; 1 << 18], XxHash3_128::new());
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(hasher.finish_128()),
                Ok(n) => {
                    hasher.write(&buffer[..n]);
                    on_read(n as u64);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    };
    read().map_err(DataError::io(path))
}

fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

/// Hash of `bytes` in the format of the fingerprints.
pub fn hash_bytes(bytes: &[u8]) -> String {
    hex(XxHash3_128::oneshot(bytes))
}

impl DataFingerprint {
    /// Lists how `now` differs from this fingerprint; empty if the data is the same, wherever it is stored.
    pub fn changes(&self, now: &DataFingerprint) -> Vec<String> {
        let (was, is) = (by_key(&self.sources), by_key(&now.sources));
        let keys: BTreeSet<&str> = was.keys().chain(is.keys()).copied().collect();
        let none = Vec::new();
        let mut changes = Vec::new();
        for key in keys {
            let (was, is) = (was.get(key).unwrap_or(&none), is.get(key).unwrap_or(&none));
            if was.len() != is.len() {
                changes.push(format!("`{key}` was {} and is {}", format_paths(was), format_paths(is)));
                continue;
            }
            changes.extend(was.iter().zip(is).filter_map(|(was, is)| describe_change(was, is)));
        }
        if self.classes != now.classes {
            changes.push(format!(
                "the classes were {} and are {}",
                format_names(&self.classes),
                format_names(&now.classes)
            ));
        }
        if self.vocabulary != now.vocabulary {
            let size = |n: &Option<usize>| n.map_or("none".into(), |n| n.to_string());
            let (was, is) = (size(&self.vocabulary), size(&now.vocabulary));
            changes.push(format!("the vocabulary size was {was} and is {is}"));
        } else if self.tokenizer != now.tokenizer {
            changes.push("the vocabulary changed".into());
        }
        changes
    }
}

fn describe_change(was: &SourceFingerprint, is: &SourceFingerprint) -> Option<String> {
    if was.content == is.content {
        return None;
    }
    let SourceFingerprint { key, path, .. } = is;
    let size = |s: &SourceFingerprint| match s.files {
        0 | 1 => counted(s.bytes, "byte"),
        n => format!("{n} files of {}", counted(s.bytes, "byte")),
    };
    let files = match was.files.max(is.files) {
        0 | 1 => String::new(),
        _ if is.changed.is_empty() => String::new(),
        _ => format!(", such as {}", is.changed.join(", ")),
    };
    let sizes = match size(was) == size(is) {
        true => format!("{} with different content", size(is)),
        false => format!("{} were {}", size(is), size(was)),
    };
    Some(format!("`{path}` of `{key}` changed: {sizes}{files}"))
}

fn by_key(sources: &[SourceFingerprint]) -> BTreeMap<&str, Vec<&SourceFingerprint>> {
    let mut keys = BTreeMap::<&str, Vec<_>>::new();
    sources.iter().for_each(|source| keys.entry(&source.key).or_default().push(source));
    keys
}

fn format_paths(sources: &[&SourceFingerprint]) -> String {
    match sources {
        [] => "absent".into(),
        [one] => format!("`{}`", one.path),
        [first, ..] => format!("{} files from `{}` on", sources.len(), first.path),
    }
}

fn format_names(names: &[String]) -> String {
    match names.len() {
        0..=8 => format!("[{}]", names.join(", ")),
        n => format!("{n} names from `{}` on", names[0]),
    }
}

#[cfg(test)]
mod tests;
