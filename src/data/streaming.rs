//! Datasets that can only be read sequentially: the reader interface, and how shards are cut into blocks.
//!
//! A shard (a compressed table, a compressed archive, a row group) is read from start to end; shards can be opened in
//! any order. A block is a run of consecutive records of one shard that is small enough to keep in memory.

mod dataset;

use super::table::TableSchema;
use super::{BatchRow, DataError, Features, LengthStats, SampleKey};

pub use dataset::StreamingDataset;

/// Target maximum of a block in bytes: small compared to a shuffle buffer, large compared to a read.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Window size in bytes for reading in file order: about what several workers have in flight.
pub const SEQUENTIAL_WINDOW_BYTES: u64 = 16 << 20;

/// Records in shards. Record indices run through all shards, in shard order.
pub trait ShardedDataset: Send + Sync {
    fn features(&self) -> &Features;

    /// All blocks in record order, so the blocks of a shard are adjacent. No block is empty.
    fn blocks(&self) -> &[RecordBlock];

    /// Opens a shard at its first record.
    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError>;

    /// Name of a shard in messages: its file, and its part of the file.
    fn name(&self, shard: u32) -> String {
        format!("shard {shard}")
    }

    /// Decodes the bytes of record `index` into a sample; same contract as [`Dataset::read`](super::Dataset::read).
    fn decode(
        &self,
        record: &[u8],
        index: u64,
        key: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError>;

    /// Bytes besides the readers.
    fn resident_bytes(&self) -> u64 {
        0
    }

    /// Bytes that the reader of an open shard takes at most.
    fn reader_bytes(&self) -> u64 {
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

    fn table_schema(&self) -> Option<&TableSchema> {
        None
    }

    fn unseen_categories(&self) -> Vec<(String, u64)> {
        Vec::new()
    }

    fn describe(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Reads one shard sequentially.
pub trait ShardReader: Send {
    /// Appends the bytes of the next record to `into`; false after the last one. An error of a single record
    /// ([`DataError::is_bad_record`]) takes the place of that record: the next call returns the one after it.
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError>;

    /// Skips the next record; false after the last one. `scratch` is empty and may be overwritten.
    fn skip(&mut self, scratch: &mut Vec<u8>) -> Result<bool, DataError> {
        match self.next(scratch) {
            Err(error) if error.is_bad_record() => Ok(true),
            other => other,
        }
    }
}

/// A run of consecutive records of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordBlock {
    pub shard: u32,
    pub records: u64,
    /// Upper bound on the bytes of its records, as [`ShardReader::next`] returns them.
    pub bytes: u64,
}

impl RecordBlock {
    /// Bytes in memory: the records, and the end offset of each.
    fn held_bytes(&self) -> u64 {
        self.bytes.saturating_add(size_of::<u32>() as u64 * self.records)
    }
}

/// Cuts a shard whose records have these `sizes` in bytes into blocks of at most `max_bytes` bytes; a larger record
/// becomes a block of its own.
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
