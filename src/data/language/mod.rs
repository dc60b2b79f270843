//! Text and token files for language models: tokenizers, token ids in files, and the samples cut from them.
//!
//! Text is tokenized once, in pieces and in parallel, into files of ids in the cache. From then on ids are read from
//! the files on demand, so a dataset takes almost no memory, whatever its size.

pub mod jsonl;
mod npy;
mod pieces;
pub mod text;
mod text_memory;
mod token_detection;
pub mod token_files;
pub mod token_storage;
mod token_width;
pub mod token_windows;
pub mod tokenizer;

use super::{BatchRow, DataError, Dataset, Features, InputSpec, LengthStats, SampleKey, TargetSpec};
