//! What opening a dataset may use: memory, seed, cache, and an observer for the progress of long passes.

use std::path::Path;
use std::sync::Arc;

use super::DataError;
use super::cache::Cache;
use super::transforms::LargeImages;
use crate::base::proc_status::proc_status;

/// Resources available while a dataset is opened.
#[derive(Clone)]
pub struct DatasetContext {
    /// Host bytes the dataset may keep for its lifetime.
    pub max_bytes: u64,
    /// Threads that read the dataset at the same time.
    pub workers: usize,
    /// The job's seed.
    pub seed: u64,
    /// Whether the job shuffles its samples.
    pub shuffle: bool,
    /// Shuffle buffer, in bytes, of a dataset that can only be read sequentially; see
    /// [`StreamingDataset`](super::streaming::StreamingDataset).
    pub shuffle_buffer: u64,
    /// Cache of what was derived from the data files.
    pub cache: Cache,
    pub observer: Arc<dyn ProgressObserver>,
    /// Images that are decoded one at a time because of their size.
    pub large_images: Arc<LargeImages>,
}

impl Default for DatasetContext {
    fn default() -> Self {
        Self {
            max_bytes: u64::MAX,
            workers: 1,
            seed: 0,
            shuffle: true,
            shuffle_buffer: 64 << 20,
            cache: Cache::default(),
            observer: Arc::new(NoProgress),
            large_images: Arc::default(),
        }
    }
}

impl DatasetContext {
    /// Bytes of the memory budget that this process does not use yet.
    pub fn available_bytes(&self) -> u64 {
        self.max_bytes.saturating_sub(proc_status("VmRSS:").unwrap_or(0))
    }

    /// Call before preparing `what`, which needs `bytes` bytes: refuses what exceeds the memory budget.
    pub fn check_memory(&self, what: &Path, bytes: u64) -> Result<(), DataError> {
        let limit = self.available_bytes();
        match bytes <= limit {
            true => Ok(()),
            false => Err(DataError::PrepareMemory { what: what.to_owned(), bytes, limit }),
        }
    }
}

/// Receives the progress of a pass over files that must finish before the first sample can be read.
pub trait ProgressObserver: Send + Sync {
    /// The pass called `activity` (such as "counting records of train.csv.gz") has processed `done` of `total` bytes.
    /// The last call has `done` equal to `total`. Calls are frequent, so an implementation must be cheap.
    fn report(&self, activity: &str, done: u64, total: u64);
}

/// Ignores all progress.
pub struct NoProgress;

impl ProgressObserver for NoProgress {
    fn report(&self, _: &str, _: u64, _: u64) {}
}
