//! Sets that can only be read forward: what such a reader is, and how it is cut into blocks.
//!
//! A shard is read from its beginning to its end (a compressed table, a packed archive, a row group); shards
//! can be opened in any order. A block is a run of records of one shard that is small enough to be held.

use super::{DataError, Features, Key, Lengths, Row};

/// Records in shards. Records are numbered through all shards, in the order of the shards.
pub trait Shards: Send + Sync {
    fn features(&self) -> &Features;

    /// Every block, in the order of the records; those of a shard are neighbours. None is empty.
    fn blocks(&self) -> &[Block];

    /// The records of a shard, from its first.
    fn open(&self, shard: u32) -> Result<Box<dyn Records>, DataError>;

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

    fn about(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A shard that is being read.
pub trait Records: Send {
    /// Appends the bytes of the next record to `into`; false after the last one.
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError>;
}

/// A run of records of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub shard: u32,
    pub records: u64,
    /// Bytes of its records, as [`Records::next`] gives them.
    pub bytes: u64,
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
