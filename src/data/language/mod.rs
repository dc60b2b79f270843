//! Text and tokens in files, for language models: what a token is, ids mapped from files, and samples of them.
//!
//! Text is tokenised once, in pieces and in parallel, into files of ids in the cache; from then on ids are mapped,
//! so that a set takes no memory whatever its size.

pub mod bins;
pub mod jsonl;
mod pieces;
pub mod text;
pub mod tokenizer;
pub mod tokens;
pub mod windows;

use super::{DataError, Features, Input, Key, Lengths, Row, Source, Target};
