//! Settings of the data loader.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base::units::{Bytes, MemorySize};

/// Settings of the data loader; the same keys for every kind of data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LoaderConfig {
    /// Shuffle the training samples: each epoch has its own order, determined by the seed.
    pub shuffle: bool,
    /// Threads that load samples; 0 means one per core. It does not change any result.
    #[schemars(range(max = 1024))]
    pub workers: usize,
    /// Maximum host memory of prefetched samples; a percentage is of `memory.ram`.
    pub prefetch: MemorySize,
    /// Size of the shuffle buffer for files that can only be read sequentially: compressed tables and archives,
    /// Parquet. Other files have random access and need none. It determines the sample order, so a resumed run cannot
    /// change it.
    #[schemars(extend("format" = "bytes"))]
    pub shuffle_buffer: MemorySize,
    /// What to do with a bad record, one that cannot be used.
    pub on_bad_record: OnBadRecord,
    /// With `skip`, more bad records than this end the run.
    #[schemars(range(max = 1_000_000_000_000u64))]
    pub max_bad_records: u64,
}

/// What to do with a bad record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRecord {
    /// End the run with an error that names the record and what is wrong with it.
    #[default]
    Fail,
    /// Skip and count it; the first few are reported.
    Skip,
}

impl Default for LoaderConfig {
    fn default() -> Self {
        Self {
            shuffle: true,
            workers: 0,
            prefetch: MemorySize::Auto,
            shuffle_buffer: MemorySize::Bytes(Bytes(64 << 20)),
            on_bad_record: OnBadRecord::Fail,
            max_bad_records: 100,
        }
    }
}
