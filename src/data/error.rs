//! Errors of data and of reading it: the location, the value, and a hint for the user.

use std::{io, path::PathBuf, sync::Arc};

use crate::base::units::Bytes;

/// An error in the data or in reading it. The message states what was found, [`DataError::hint`] what to do about it.
/// `Clone`, because a failed loader returns the same error again.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DataError {
    #[error("cannot read `{}`", file.display())]
    Io { file: PathBuf, source: Arc<io::Error> },

    #[error("cannot write `{}`", file.display())]
    Write { file: PathBuf, source: Arc<io::Error> },

    #[error("`{pattern}` names no file: {why}")]
    NoMatchingFile { pattern: String, why: String },

    #[error("`{}` is empty", file.display())]
    EmptyFile { file: PathBuf },

    #[error("{set} gives no samples: {why}")]
    NoSamples { set: String, why: String },

    #[error("cannot decompress `{}`", file.display())]
    Corrupt { file: PathBuf, source: Arc<io::Error> },

    #[error("byte {offset} of `{}`, {byte:#04x}, is not UTF-8 text", file.display())]
    InvalidUtf8 { file: PathBuf, offset: u64, byte: u8 },

    #[error("`{}` is not {wanted}: it begins with {found}", file.display())]
    WrongFormat { file: PathBuf, wanted: &'static str, found: String },

    #[error("`{}` ends too early: its header promises {promised} bytes, it has at most {found}", file.display())]
    Truncated { file: PathBuf, promised: u64, found: u64 },

    #[error("`{}` goes on after the {promised} bytes its header promises", file.display())]
    TrailingBytes { file: PathBuf, promised: u64 },

    #[error("`{}` has {images} pictures, but `{}` has {labels} labels", images_file.display(), labels_file.display())]
    CountMismatch { images_file: PathBuf, images: u64, labels_file: PathBuf, labels: u64 },

    /// One bad value. `record` counts from 0; `column` is `None` if records have no columns.
    #[error("`{}`, record {record}{}: `{value}` is not {wanted}", file.display(), in_column(column))]
    Value { file: PathBuf, record: u64, column: Option<String>, value: String, wanted: String },

    /// One bad value in a text table. `line` counts from 1.
    #[error("`{}`, line {line}, column `{column}`: `{value}` is not {wanted}", file.display())]
    Cell { file: PathBuf, line: u64, column: String, value: String, wanted: String },

    /// A table that does not match its declaration.
    #[error("`{}`{}: {problem}", file.display(), at(place))]
    Table { file: PathBuf, place: String, problem: String, hint: &'static str },

    /// A record that is unusable as a whole. `place` locates it: "line 7", "record 12", "member a/b.jpg".
    #[error("`{}`{}: {problem}", file.display(), at(place))]
    Record { file: PathBuf, place: String, problem: String },

    #[error("{count} bad records, more than the {most} that may be left out; the first: {}", first.join("; "))]
    TooManyBad { count: u64, most: u64, first: Vec<String> },

    #[error("{what} is not as it was when it was opened: {found}")]
    ChangedSinceOpen { what: String, found: String },

    #[error("`{}` cannot be used as a tokenizer: {problem}", file.display())]
    Tokenizer { file: PathBuf, problem: String },

    #[error("the chat template `{template}` cannot be used: {problem}")]
    Template { template: String, problem: String },

    #[error("`{}` holds {bytes} bytes of samples, more than the {limit} allowed", file.display())]
    TooLarge { file: PathBuf, bytes: u64, limit: u64 },

    #[error("decoding `{}` takes {}, and {} were planned for a picture", image.display(), Bytes(*bytes), Bytes(*limit))]
    DecodeMemory { image: PathBuf, bytes: u64, limit: u64 },

    #[error("preparing the data with `{}` takes {}, and {} are left for it", what.display(), Bytes(*bytes), Bytes(*limit))]
    PrepareMemory { what: PathBuf, bytes: u64, limit: u64 },

    #[error("no host memory for {bytes} bytes of samples")]
    OutOfMemory { bytes: u64 },

    #[error("`{name}` cannot be {value}: {wanted}")]
    InvalidSetting { name: &'static str, value: String, wanted: &'static str },

    #[error("cannot start a loader thread")]
    ThreadSpawn { source: Arc<io::Error> },

    #[error("reading sample {sample} panicked: {message}")]
    Panicked { sample: u64, message: String },

    #[error("all {bytes} bytes the loader may hold are in batches that were not dropped")]
    BuffersExhausted { bytes: u64 },
}

impl DataError {
    /// What the user can do about the error.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            DataError::Io { .. } => "check that the path is right and the file may be read",
            DataError::EmptyFile { .. } | DataError::Truncated { .. } | DataError::Corrupt { .. } => {
                "copy or download the file again"
            }
            DataError::Write { .. } => "check that the folder may be written to and the disk is not full",
            DataError::NoMatchingFile { .. } => "check the pattern; it starts at the job's folder",
            DataError::Table { hint, .. } => hint,
            DataError::Cell { .. } => {
                "correct the value or declare the column otherwise, or set `on_bad_record = \"skip\"` to train without the row"
            }
            DataError::Record { .. } => {
                "correct or remove the record, or set `on_bad_record = \"skip\"` to train without it"
            }
            DataError::TooManyBad { .. } => {
                "correct the files, or raise `data.max_bad_records` if so many are expected"
            }
            DataError::ChangedSinceOpen { .. } => {
                "files must stay as they are while they are read: start the run again"
            }
            DataError::InvalidUtf8 { .. } => "convert the file to UTF-8, or take it out of the set",
            DataError::NoSamples { .. } => "give the set more data, or a smaller share to the other one",
            DataError::WrongFormat { .. } => "check that `kind` and the path belong together",
            DataError::TrailingBytes { .. } => {
                "the file is damaged or two were joined: copy or download it again"
            }
            DataError::Tokenizer { .. } => {
                "give a `tokenizer.json` as Hugging Face's tokenizers saves it, or \"characters\" or \"bytes\""
            }
            DataError::Template { .. } => {
                "name a template such as \"chatml\", or give a Jinja text or the path of a file that holds one"
            }
            DataError::CountMismatch { .. } => "check that both files belong to the same set",
            DataError::Value { .. } => {
                "correct the record or the declared shape, or set `on_bad_record = \"skip\"` to train without it"
            }
            DataError::TooLarge { .. } | DataError::OutOfMemory { .. } => {
                "raise the host memory budget or use a smaller set"
            }
            DataError::PrepareMemory { .. } => {
                "raise `memory.ram`, or prepare the data where there is more memory: it is kept in `runs/.data`"
            }
            DataError::DecodeMemory { .. } => {
                "raise `memory.ram`, or set `data.max_pixels` below its size, which makes it a bad record"
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
        )
    }

    /// Whether a single record is at fault, so that the rest of the dataset is usable.
    pub fn is_bad_record(&self) -> bool {
        matches!(self, DataError::Value { .. } | DataError::Cell { .. } | DataError::Record { .. })
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
