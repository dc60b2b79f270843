//! Bounds the memory of converting a text to token ids: parsing the JSON of its record, rendering its chat template,
//! and tokenizing the result.
//!
//! All threads convert texts at the same time, each within its part of the memory budget. A text that needs more is
//! converted again while no other is, with half of what is left. One that needs even more is refused, and not skipped
//! as a bad record: which records a job trains on does not depend on the memory it has.

use std::path::Path;

use super::DataError;
use super::tokenizer::Tokenizer;
use crate::DatasetContext;

/// Bytes that the parts of a pass over texts may take. Together they are what the budget leaves: half for converting
/// texts, a quarter for lines, and a quarter for the results of two chunks per thread.
#[derive(Clone, Copy, Debug)]
pub struct TextMemory {
    /// For converting one text while every thread converts one.
    pub parallel: u64,
    /// For converting one text while the other threads wait.
    pub alone: u64,
    /// Of a line. Its buffer may be twice as large.
    pub line: u64,
    /// Of the results of a chunk of lines.
    pub results: u64,
}

impl TextMemory {
    pub fn of(tokenizer: &Tokenizer, ctx: &DatasetContext) -> Self {
        let threads = rayon::current_num_threads().max(1) as u64;
        let left = ctx.available_bytes().saturating_sub(tokenizer.cache_bytes());
        Self {
            parallel: left / (2 * threads),
            alone: left / 2,
            line: left / (16 * threads),
            results: left / (8 * threads),
        }
    }
}

/// Why a text was not converted.
#[derive(Debug, PartialEq, Eq)]
pub enum TextError {
    /// The text or its record is not usable.
    Invalid(String),
    /// The record lacks a field that the job names.
    MissingField(String),
    /// `what` takes more than `limit` bytes, which are left for it.
    Memory { what: &'static str, limit: u64 },
}

impl From<String> for TextError {
    fn from(problem: String) -> Self {
        TextError::Invalid(problem)
    }
}

impl TextError {
    /// The error with the place of the text, such as "line 7".
    pub fn at(self, file: &Path, place: String) -> DataError {
        let file = file.to_owned();
        match self {
            TextError::Invalid(problem) => DataError::Record { file, place, problem },
            TextError::MissingField(problem) => DataError::MissingField { file, place, problem },
            TextError::Memory { what, limit } => DataError::RecordMemory { file, place, what, limit },
        }
    }
}

/// Bytes of the parsed form of a JSON text, at most: its strings, and a value and its key for each element.
pub fn json_bytes(text: &[u8]) -> u64 {
    // A list grows by doubling; a key is a string with its own allocation.
    const ELEMENT_BYTES: usize = 2 * size_of::<serde_json::Value>() + 64;
    let elements = 1 + memchr::memchr3_iter(b',', b'[', b'{', text).count();
    (text.len() + elements * ELEMENT_BYTES) as u64
}

/// Refuses `what`, which takes `bytes`, if that is more than `limit`.
pub fn check_bytes(what: &'static str, bytes: u64, limit: u64) -> Result<(), TextError> {
    if bytes <= limit { Ok(()) } else { Err(TextError::Memory { what, limit }) }
}
