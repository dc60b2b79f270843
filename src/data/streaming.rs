//! Sets that can only be read forward: what such a reader is, and how it is cut into blocks.
//!
//! A shard is read from its beginning to its end (a compressed table, a packed archive, a row group); shards
//! can be opened in any order. A block is a run of records of one shard that is small enough to be held.

mod dataset;

use super::{BatchRow, DataError, Features, LengthStats, SampleKey};

pub use dataset::StreamingDataset;

/// Bytes that a block should have at most: small against a shuffle buffer, large against a read.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Bytes of a window where a set is read in its own order: as much as several workers have in hand.
pub const SEQUENTIAL_WINDOW_BYTES: u64 = 16 << 20;

/// Records in shards. Records are numbered through all shards, in the order of the shards.
pub trait ShardedDataset: Send + Sync {
    fn features(&self) -> &Features;

    /// Every block, in the order of the records; those of a shard are neighbours. None is empty.
    fn blocks(&self) -> &[RecordBlock];

    /// The records of a shard, from its first.
    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError>;

    /// What a shard is called in messages: its file, and its part of it.
    fn name(&self, shard: u32) -> String {
        format!("shard {shard}")
    }

    /// Makes a sample of the bytes of record `index`; as [`Source::read`](super::Source::read).
    fn decode(
        &self,
        record: &[u8],
        index: u64,
        key: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError>;

    fn resident_bytes(&self) -> u64 {
        0
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        None
    }

    fn length_stats(&self) -> Option<LengthStats> {
        None
    }

    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        let _ = tokens;
        None
    }

    fn input_names(&self) -> Vec<String> {
        Vec::new()
    }

    fn describe(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A shard that is being read.
pub trait ShardReader: Send {
    /// Appends the bytes of the next record to `into`; false after the last one. An error of one record
    /// ([`DataError::is_bad_record`]) stands in its place: the next call gives the record after it.
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError>;

    /// Passes over the next record; false after the last one. `scratch` is empty, and may be written to.
    fn skip(&mut self, scratch: &mut Vec<u8>) -> Result<bool, DataError> {
        match self.next(scratch) {
            Err(error) if error.is_bad_record() => Ok(true),
            other => other,
        }
    }
}

/// A run of records of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordBlock {
    pub shard: u32,
    pub records: u64,
    /// Bytes of its records, as [`ShardReader::next`] gives them, or more.
    pub bytes: u64,
}

impl RecordBlock {
    /// Bytes it takes while it is held: its records, and where each one ends.
    fn held_bytes(&self) -> u64 {
        self.bytes.saturating_add(size_of::<u32>() as u64 * self.records)
    }
}

/// Cuts a shard whose records have these `sizes` in bytes into blocks of at most `max_bytes` bytes; a record that
/// is larger is a block of its own.
pub fn cut_into_blocks(shard: u32, sizes: impl IntoIterator<Item = u64>, max_bytes: u64) -> Vec<RecordBlock> {
    let mut blocks: Vec<RecordBlock> = Vec::new();
    for size in sizes {
        match blocks.last_mut() {
            Some(block) if block.bytes.saturating_add(size) <= max_bytes => {
                block.records += 1;
                block.bytes += size;
            }
            _ => blocks.push(RecordBlock { shard, records: 1, bytes: size }),
        }
    }
    blocks
}

#[cfg(test)]
mod tests;
