//! Errors of data and of reading it: the location, the value, and a hint for the user.

use std::{io, path::PathBuf, sync::Arc};

use crate::base::units::{Bytes, counted};

/// What is expected of a text.
pub(super) const EXPECTED_UTF8: &str = "UTF-8 text; `encoding` says what else it is";

/// What to do about a table that is not UTF-8.
pub(super) const ENCODING_HINT: &str =
    "set `encoding`: \"latin-1\" is what Excel writes in western Europe and the Americas";

/// An error in the data or in reading it. The message states what was found, [`DataError::hint`] what to do about it.
/// `Clone`, because a failed loader returns the same error again.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DataError {
    #[error("cannot read `{}`", file.display())]
    Io { file: PathBuf, source: Arc<io::Error> },

    #[error("cannot write `{}`", file.display())]
    Write { file: PathBuf, source: Arc<io::Error> },

    #[error("no file matches `{pattern}`: {why}")]
    NoMatchingFile { pattern: String, why: String },

    #[error("`{}` is empty", file.display())]
    EmptyFile { file: PathBuf },

    #[error("{set} has no samples: {why}")]
    NoSamples { set: String, why: String },

    /// A set without samples because of how the data is split, or too short for one sample.
    #[error("{set} has no samples: {why}")]
    TooSmall { set: String, why: String },

    #[error("cannot decompress `{}`", file.display())]
    Corrupt { file: PathBuf, source: Arc<io::Error> },

    #[error("byte {offset} of `{}`, {byte:#04x}, is not UTF-8 text", file.display())]
    InvalidUtf8 { file: PathBuf, offset: u64, byte: u8 },

    #[error("`{}` is not {expected}: it starts with {found}", file.display())]
    WrongFormat { file: PathBuf, expected: &'static str, found: String },

    #[error("`{}` is truncated: its header declares {declared} bytes, and it has at most {found}", file.display())]
    Truncated { file: PathBuf, declared: u64, found: u64 },

    #[error("`{}` has trailing bytes: its header declares only {declared}", file.display())]
    TrailingBytes { file: PathBuf, declared: u64 },

    #[error(
        "`{}` has {}, but `{}` has {}",
        images_file.display(),
        counted(*images, "image"),
        labels_file.display(),
        counted(*labels, "label")
    )]
    CountMismatch { images_file: PathBuf, images: u64, labels_file: PathBuf, labels: u64 },

    /// Images of another shape, (height, width, channels), than those that the model is trained on.
    #[error(
        "the images of `{}` have shape {shape:?}, but those of `{}` have shape {trained_shape:?}",
        file.display(),
        trained_file.display()
    )]
    ImageShapeMismatch { file: PathBuf, shape: Vec<usize>, trained_file: PathBuf, trained_shape: Vec<usize> },

    /// One bad value. `record` counts from 0; `column` is `None` if records have no columns.
    #[error("`{}`, record {record}{}: `{value}` is not {expected}", file.display(), in_column(column))]
    Value { file: PathBuf, record: u64, column: Option<String>, value: String, expected: String },

    /// One bad value in a text table. `line` counts from 1.
    #[error("`{}`, line {line}, column `{column}`: `{value}` is not {expected}", file.display())]
    Cell { file: PathBuf, line: u64, column: String, value: String, expected: String },

    /// A table that does not match its declaration.
    #[error("`{}`{}: {problem}", file.display(), at(place))]
    Table { file: PathBuf, place: String, problem: String, hint: &'static str },

    /// A record that is unusable as a whole. `place` locates it: "line 7", "record 12", "member a/b.jpg".
    #[error("`{}`{}: {problem}", file.display(), at(place))]
    Record { file: PathBuf, place: String, problem: String },

    /// A record without a field that a key of the job names.
    #[error("`{}`{}: {problem}", file.display(), at(place))]
    MissingField { file: PathBuf, place: String, problem: String },

    #[error("{}, more than the limit of {limit}; the first: {}", counted(*count, "bad record"), first.join("; "))]
    TooManyBad { count: u64, limit: u64, first: Vec<String> },

    #[error("{what} changed since it was opened: {found}")]
    ChangedSinceOpen { what: String, found: String },

    #[error("`{}` cannot be used as a tokenizer: {problem}", file.display())]
    Tokenizer { file: PathBuf, problem: String },

    #[error("the chat template `{template}` cannot be used: {problem}")]
    Template { template: String, problem: String },

    #[error("`{}` has {bytes} bytes of samples, more than the limit of {limit}", file.display())]
    TooLarge { file: PathBuf, bytes: u64, limit: u64 },

    #[error(
        "decoding `{}` takes {}, more than the {} planned for an image",
        image.display(),
        Bytes(*bytes),
        Bytes(*limit)
    )]
    DecodeMemory { image: PathBuf, bytes: u64, limit: u64 },

    #[error(
        "preparing the data with `{}` takes {}, more than the {} left of the budget",
        what.display(),
        Bytes(*bytes),
        Bytes(*limit)
    )]
    PrepareMemory { what: PathBuf, bytes: u64, limit: u64 },

    /// A record that takes too much memory to prepare, under a limit that depends on the memory budget.
    #[error(
        "`{}`{}: {what} takes more than {}, the limit under `memory.ram`",
        file.display(),
        at(place),
        Bytes(*limit)
    )]
    RecordMemory { file: PathBuf, place: String, what: &'static str, limit: u64 },

    #[error("cannot allocate {bytes} bytes of host memory for samples")]
    OutOfMemory { bytes: u64 },

    #[error("`{name}` cannot be {value}: {expected}")]
    InvalidSetting { name: &'static str, value: String, expected: &'static str },

    #[error("cannot start a loader thread")]
    ThreadSpawn { source: Arc<io::Error> },

    #[error("reading sample {sample} panicked: {message}")]
    Panicked { sample: u64, message: String },

    #[error("all {bytes} bytes of the loader's buffers are in batches that were not dropped")]
    BuffersExhausted { bytes: u64 },
}

impl DataError {
    /// What the user can do about the error.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            DataError::Io { source, .. } if source.kind() == io::ErrorKind::IsADirectory => {
                "name the files in the folder by a pattern, such as `folder/*.csv` or `folder/*.txt`"
            }
            DataError::Io { .. } => "check the path and the permissions of the file",
            DataError::EmptyFile { .. } | DataError::Truncated { .. } | DataError::Corrupt { .. } => {
                "copy or download the file again"
            }
            DataError::Write { .. } => "check that the folder is writable and the disk is not full",
            DataError::NoMatchingFile { .. } => "check the pattern; it is relative to the job's folder",
            DataError::Table { hint, .. } => hint,
            DataError::Cell { expected, .. } if expected == EXPECTED_UTF8 => ENCODING_HINT,
            DataError::Cell { .. } => {
                "correct the value or the declaration of the column, or set `on_bad_record = \"skip\"` to skip the row"
            }
            DataError::Record { .. } => {
                "correct the record, or the keys of `[data]` that say how to read it, or set \
                 `on_bad_record = \"skip\"` to skip it"
            }
            DataError::MissingField { .. } => {
                "set the key that names the field (`field`, `label`, `chat`, `messages`), or set \
                 `on_bad_record = \"skip\"` to skip such records"
            }
            DataError::TooManyBad { .. } => "correct the files, or raise `data.max_bad_records`",
            DataError::ChangedSinceOpen { .. } => "do not change the files during a run; restart the run",
            DataError::InvalidUtf8 { .. } => "convert the file to UTF-8, or remove it from the dataset",
            DataError::NoSamples { .. } => {
                "check that the path is the right one, that its files are complete, and that `data.kind` \
                 reads such files"
            }
            DataError::TooSmall { .. } => {
                "add data, or change how the data is split: `valid_fraction`, `test_fraction`, `fold`"
            }
            DataError::WrongFormat { .. } => "check that the file is of the job's `data.kind`",
            DataError::TrailingBytes { .. } => {
                "the file is damaged, or two files were concatenated: copy or download it again"
            }
            DataError::Tokenizer { .. } => {
                "use a `tokenizer.json` saved by Hugging Face's tokenizers, or \"characters\" or \"bytes\""
            }
            DataError::Template { .. } => {
                "use a name such as \"chatml\", a Jinja template, or the path of a file with one"
            }
            DataError::CountMismatch { .. } | DataError::ImageShapeMismatch { .. } => {
                "check that both files belong to the same dataset"
            }
            DataError::Value { .. } => {
                "correct the record or the declared shape, or set `on_bad_record = \"skip\"` to skip it"
            }
            DataError::TooLarge { .. } | DataError::OutOfMemory { .. } => {
                "raise `memory.ram`, or use a smaller dataset"
            }
            DataError::PrepareMemory { .. } | DataError::RecordMemory { .. } => {
                "raise `memory.ram`, or prepare the data on a machine with more memory and copy `runs/.data`"
            }
            DataError::DecodeMemory { .. } => {
                "raise `memory.ram`, or set `data.max_pixels` below its size, so that it counts as a bad record"
            }
            DataError::InvalidSetting { .. }
            | DataError::ThreadSpawn { .. }
            | DataError::Panicked { .. }
            | DataError::BuffersExhausted { .. } => return None,
        })
    }

    /// Whether the cause is a lack of host memory rather than the data.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            DataError::TooLarge { .. }
                | DataError::OutOfMemory { .. }
                | DataError::DecodeMemory { .. }
                | DataError::PrepareMemory { .. }
                | DataError::RecordMemory { .. }
        )
    }

    /// Whether there is no such file.
    pub fn is_not_found(&self) -> bool {
        matches!(self, DataError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Whether a single record is at fault, so that the rest of the dataset is usable.
    pub fn is_bad_record(&self) -> bool {
        matches!(
            self,
            DataError::Value { .. }
                | DataError::Cell { .. }
                | DataError::Record { .. }
                | DataError::MissingField { .. }
        )
    }

    pub(super) fn write(file: &std::path::Path) -> impl FnOnce(io::Error) -> DataError + '_ {
        move |source| DataError::Write { file: file.to_owned(), source: Arc::new(source) }
    }

    pub(super) fn io(file: &std::path::Path) -> impl FnOnce(io::Error) -> DataError + '_ {
        move |source| DataError::Io { file: file.to_owned(), source: Arc::new(source) }
    }
}

fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(", {place}") }
}

fn in_column(column: &Option<String>) -> String {
    column.as_ref().map(|name| format!(", column `{name}`")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_about_its_error() {
        let file = || PathBuf::from("a.csv");
        let io = |kind| DataError::io(&file())(io::Error::new(kind, "no")).hint().unwrap();
        assert!(io(io::ErrorKind::IsADirectory).contains("folder/*.csv"));
        assert!(io(io::ErrorKind::PermissionDenied).contains("permissions"));
        let cell = |expected: &str| DataError::Cell {
            file: file(),
            line: 2,
            column: "x".into(),
            value: "?".into(),
            expected: expected.into(),
        };
        assert!(cell(EXPECTED_UTF8).hint().unwrap().contains("latin-1"));
        assert!(cell("a finite number").hint().unwrap().contains("on_bad_record"));
        let (set, why) = ("`a.csv`".to_owned(), "it has no rows".to_owned());
        let none = DataError::NoSamples { set: set.clone(), why: why.clone() };
        let small = DataError::TooSmall { set, why };
        assert_eq!(none.to_string(), small.to_string());
        assert!(
            !none.hint().unwrap().contains("fraction") && small.hint().unwrap().contains("valid_fraction")
        );
    }
}
