//! Test-time augmentation: every sample several times in a row, once per view.

use std::sync::Arc;

use super::streaming::RecordBlock;
use super::{BatchRow, DataError, Dataset, Features, SampleKey};

/// Sample `i` is view `i % views` of sample `i / views` of a dataset whose augmentation takes the epoch as the view.
pub struct TestTimeViews {
    inner: Arc<dyn Dataset>,
    views: u64,
}

impl TestTimeViews {
    /// `views` is at least 1.
    pub fn new(inner: Arc<dyn Dataset>, views: u64) -> Self {
        Self { inner, views }
    }
}

impl Dataset for TestTimeViews {
    fn len(&self) -> u64 {
        self.inner.len() * self.views
    }

    fn features(&self) -> &Features {
        self.inner.features()
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let sample = index / self.views;
        self.inner.read(sample, SampleKey { epoch: index % self.views, sample, ..key }, into)
    }

    fn views(&self) -> u64 {
        self.views
    }

    fn resident_bytes(&self) -> u64 {
        self.inner.resident_bytes()
    }

    fn blocks(&self) -> Option<Vec<RecordBlock>> {
        let repeated = |block: RecordBlock| RecordBlock { records: block.records * self.views, ..block };
        Some(self.inner.blocks()?.into_iter().map(repeated).collect())
    }

    fn prefetch(&self, blocks: Vec<u32>) {
        self.inner.prefetch(blocks);
    }

    fn sample_name(&self, index: u64) -> Option<String> {
        self.inner.sample_name(index / self.views)
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.inner.describe()
    }
}
