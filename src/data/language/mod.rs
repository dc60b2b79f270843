//! Text and tokens in files, for language models: what a token is, ids mapped from files, and samples of them.
//!
//! Text is tokenised once, in pieces and in parallel, into files of ids in the cache; from then on ids are mapped,
//! so that a set takes no memory whatever its size.

pub mod jsonl;
mod pieces;
pub mod text;
pub mod token_files;
pub mod token_storage;
pub mod token_windows;
pub mod tokenizer;

use super::{BatchRow, DataError, Dataset, Features, InputSpec, LengthStats, SampleKey, TargetSpec};
