//! Sets that can only be read forward: what such a reader is, and how it is cut into blocks.
//!
//! A shard is read from its beginning to its end (a compressed table, a packed archive, a row group); shards
//! can be opened in any order. A block is a run of records of one shard that is small enough to be held.

mod streamed;

use super::{DataError, Features, Key, Lengths, Row};

pub use streamed::Streamed;

/// Bytes that a block should have at most: small against a shuffle buffer, large against a read.
pub const BLOCK: u64 = 1 << 20;

/// Bytes of a window where a set is read in its own order: as much as several workers have in hand.
pub const IN_ORDER: u64 = 16 << 20;

/// Records in shards. Records are numbered through all shards, in the order of the shards.
pub trait Shards: Send + Sync {
    fn features(&self) -> &Features;

    /// Every block, in the order of the records; those of a shard are neighbours. None is empty.
    fn blocks(&self) -> &[Block];

    /// The records of a shard, from its first.
    fn open(&self, shard: u32) -> Result<Box<dyn Records>, DataError>;

    /// What a shard is called in messages: its file, and its part of it.
    fn name(&self, shard: u32) -> String {
        format!("shard {shard}")
    }

    /// Makes a sample of the bytes of record `index`; as [`Source::read`](super::Source::read).
    fn decode(&self, record: &[u8], index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError>;

    fn resident_bytes(&self) -> u64 {
        0
    }

    fn balance(&self) -> Option<Vec<u64>> {
        None
    }

    fn lengths(&self) -> Option<Lengths> {
        None
    }

    fn text(&self, tokens: &[u32]) -> Option<String> {
        let _ = tokens;
        None
    }

    fn columns(&self) -> Vec<String> {
        Vec::new()
    }

    fn about(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A shard that is being read.
pub trait Records: Send {
    /// Appends the bytes of the next record to `into`; false after the last one. An error of one record
    /// ([`DataError::is_record`]) stands in its place: the next call gives the record after it.
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError>;

    /// Passes over the next record; false after the last one. `spare` is empty, and may be written to.
    fn skip(&mut self, spare: &mut Vec<u8>) -> Result<bool, DataError> {
        match self.next(spare) {
            Err(error) if error.is_record() => Ok(true),
            other => other,
        }
    }
}

/// A run of records of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub shard: u32,
    pub records: u64,
    /// Bytes of its records, as [`Records::next`] gives them, or more.
    pub bytes: u64,
}

impl Block {
    /// Bytes it takes while it is held: its records, and where each one ends.
    fn held_bytes(&self) -> u64 {
        self.bytes.saturating_add(size_of::<u32>() as u64 * self.records)
    }
}

/// Cuts a shard whose records have these `sizes` in bytes into blocks of at most `most` bytes; a record that
/// is larger is a block of its own.
pub fn cut(shard: u32, sizes: impl IntoIterator<Item = u64>, most: u64) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for size in sizes {
        match blocks.last_mut() {
            Some(block) if block.bytes.saturating_add(size) <= most => {
                block.records += 1;
                block.bytes += size;
            }
            _ => blocks.push(Block { shard, records: 1, bytes: size }),
        }
    }
    blocks
}

#[cfg(test)]
mod tests;
