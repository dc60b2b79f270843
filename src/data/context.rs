//! What opening a set may use, and whom it tells of work that takes long.

use std::path::Path;
use std::sync::Arc;

use super::DataError;
use super::cache::Cache;
use super::transforms::LargeImages;
use crate::memory::probe;

/// The means at hand when a set is opened.
#[derive(Clone)]
pub struct DatasetContext {
    /// Host bytes the set may keep for as long as it lives.
    pub max_bytes: u64,
    /// The job's seed.
    pub seed: u64,
    /// Bytes within which a set that is read forward is mixed; see [`StreamingDataset`](super::stream::Streamed).
    pub shuffle_buffer: u64,
    /// Where what was found out about files is kept for the next time.
    pub cache: Cache,
    pub observer: Arc<dyn ProgressObserver>,
    /// Pictures that are decoded one at a time because of their size.
    pub large_images: Arc<LargeImages>,
}

impl Default for DatasetContext {
    fn default() -> Self {
        Self {
            max_bytes: u64::MAX,
            seed: 0,
            shuffle_buffer: 64 << 20,
            cache: Cache::default(),
            observer: Arc::new(NoProgress),
            large_images: Arc::default(),
        }
    }
}

impl DatasetContext {
    /// Before `what` is prepared, which takes so many bytes: refuses what does not fit in the memory there is for it.
    pub fn check_memory(&self, what: &Path, bytes: u64) -> Result<(), DataError> {
        let limit = self.max_bytes.saturating_sub(probe::proc_status("VmRSS:").unwrap_or(0));
        match bytes <= limit {
            true => Ok(()),
            false => Err(DataError::PrepareMemory { what: what.to_owned(), bytes, limit }),
        }
    }
}

/// Sees the progress of a pass over files that must end before the first sample can be read.
pub trait ProgressObserver: Send + Sync {
    /// The pass that is `activity` something (as in "counting records of train.csv.gz") is at `done` of `total`
    /// bytes. Called at least once at the end, with `done` equal to `total`; often, so it must be cheap.
    fn report(&self, activity: &str, done: u64, total: u64);
}

/// Looks away.
pub struct NoProgress;

impl ProgressObserver for NoProgress {
    fn report(&self, _: &str, _: u64, _: u64) {}
}
