//! A folder of Parquet files: `year=2021/part-0.parquet` has the column `year` in its path, as Hive, Spark and pyarrow
//! write partitioned tables.

use std::path::{Path, PathBuf};

use crate::{DataError, files};

/// What Hive writes for null.
const NULL: &str = "__HIVE_DEFAULT_PARTITION__";
/// Folders below a folder; more are a loop or not a table.
const MAX_DEPTH: usize = 32;

/// The Parquet files that patterns and folders name. The files of a folder are sorted by path; names that start with
/// `_` or `.` are not part of the table.
pub fn resolve_files(patterns: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for path in files::resolve_patterns(patterns)? {
        if !path.is_dir() {
            found.push(path);
            continue;
        }
        let before = found.len();
        list_folder(&path, 0, &mut found)?;
        if found.len() == before {
            let why = "no file below this folder is named .parquet".into();
            return Err(DataError::NoMatchingFile { pattern: path.display().to_string(), why });
        }
        found[before..].sort();
    }
    Ok(found)
}

fn list_folder(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    for entry in std::fs::read_dir(folder).map_err(DataError::io(folder))? {
        let path = entry.map_err(DataError::io(folder))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with(['_', '.']) {
            continue;
        }
        if path.is_dir() {
            if depth < MAX_DEPTH {
                list_folder(&path, depth + 1, found)?;
            }
        } else if [".parquet", ".parq", ".pq"].iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
    Ok(())
}

/// The columns in the path of a file: the folders `key=value` right above it.
pub fn partitions(file: &Path) -> Vec<(String, Option<String>)> {
    let folders = file.ancestors().skip(1).map_while(|folder| {
        let name = folder.file_name()?.to_str()?;
        let (key, value) = name.split_once('=').filter(|(key, _)| !key.is_empty())?;
        Some((unescape(key), (value != NULL && !value.is_empty()).then(|| unescape(value))))
    });
    let mut found: Vec<_> = folders.collect();
    found.reverse();
    found
}

/// Replaces `%2F` and the like.
fn unescape(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                plain.push(byte);
                at += 3;
            }
            None => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_with_an_equals_sign_are_columns() {
        let found = partitions(Path::new("/a=b/data/year=2021/city=S%C3%A3o%20Paulo/x.parquet"));
        assert_eq!(found, [("year".into(), Some("2021".into())), ("city".into(), Some("São Paulo".into()))]);
        assert_eq!(partitions(Path::new("k=__HIVE_DEFAULT_PARTITION__/x.parquet")), [("k".into(), None)]);
        assert!(partitions(Path::new("data/x.parquet")).is_empty());
    }
}
