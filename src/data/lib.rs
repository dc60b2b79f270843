//! Data: from files or a generator to batches in host memory, in an order fixed by the seed.
//!
//! Owns where samples come from ([`Dataset`]), in which order ([`order::Order`]), and the threads that decode them
//! ahead of the step ([`loader::Loader`]). Takes plain settings and paths, and gives [`HostBatch`]es of plain vectors;
//! it knows neither jobs nor tensors. Refuses, with a [`DataError`], whatever does not have the declared shape. A
//! sample is addressed by its global index everywhere, so nothing depends on how a batch was split or which thread
//! decoded it.

pub use trainer_config::base;

pub mod bad_records;
mod batch;
pub mod cache;
mod context;
pub mod digest;
mod error;
pub mod files;
pub mod fingerprint;
pub mod idx;
pub mod images;
pub mod labels;
pub mod language;
pub mod loader;
pub mod order;
mod prefetch_depth;
pub mod preprocessing;
pub mod sequences;
pub mod shapes;
pub mod shuffle_windows;
pub mod split;
pub mod stored_logits;
pub mod streaming;
pub mod table;
pub mod transforms;
pub mod views;
pub mod warnings;
mod zip_entry;

use std::sync::Arc;

pub use batch::{BatchValues, HostBatch};
pub use context::{DatasetContext, NoProgress, ProgressObserver};
pub use error::DataError;

pub use crate::base::features::{Features, InputSpec, PixelLut, TargetSpec};

/// The sets of a job.
pub struct Datasets {
    pub train: Arc<dyn Dataset>,
    pub valid: Arc<dyn Dataset>,
    /// `None` if the job has none.
    pub test: Option<TestSet>,
}

impl Datasets {
    pub fn new<T: Dataset + 'static>(train: impl Dataset + 'static, valid: T, test: Option<T>) -> Self {
        let test = test.map(|test| TestSet::Open(Arc::new(test)));
        Self { train: Arc::new(train), valid: Arc::new(valid), test }
    }
}

/// A test set.
pub enum TestSet {
    Open(Arc<dyn Dataset>),
    /// Files of its own with this many samples, which are opened only to be evaluated.
    Closed {
        samples: u64,
    },
}

impl TestSet {
    pub fn samples(&self) -> u64 {
        match self {
            TestSet::Open(dataset) => dataset.len(),
            TestSet::Closed { samples } => *samples,
        }
    }
}

/// What a sample's augmentation may depend on; see [`crate::base::random`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    pub seed: u64,
    pub epoch: u64,
    /// Index of the sample in the training set.
    pub sample: u64,
}

/// A map-style dataset: random access by index, from several threads at once.
pub trait Dataset: Send + Sync {
    /// Number of samples.
    fn len(&self) -> u64;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn features(&self) -> &Features;

    /// Writes sample `index`, below `len()`, over all of `into`. The result depends only on `index` and `key`. A
    /// dataset whose features have a pixel lookup table writes bytes, or the f32 values they map to, whichever `into`
    /// holds.
    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError>;

    /// Number of consecutive samples that are views of the same one, for test-time augmentation.
    fn views(&self) -> u64 {
        1
    }

    /// Bytes of host memory the dataset keeps for its lifetime. Memory-mapped files do not count: the kernel can
    /// reclaim their pages at any time.
    fn resident_bytes(&self) -> u64 {
        0
    }

    /// Block structure of a dataset that can only be read sequentially; `None` for random access. [`order::Order`]
    /// shuffles within it. Sample indices run through the blocks in order; a subset may have blocks without samples.
    /// The bytes of a block are what it takes while it is in memory.
    fn blocks(&self) -> Option<Vec<streaming::RecordBlock>> {
        None
    }

    /// Announces the blocks that will be read next, in this order; empty if there are none. A hint: it affects speed
    /// only.
    fn prefetch(&self, blocks: Vec<u32>) {
        let _ = blocks;
    }

    /// A second reader of the same samples, for reading them in order while this one is used in another order; `None`
    /// if one reader serves both.
    fn sequential_reader(&self) -> Option<Arc<dyn Dataset>> {
        None
    }

    /// Number of samples per class, if known without reading the samples.
    fn class_counts(&self) -> Option<Vec<u64>> {
        None
    }

    /// Class of a sample, if known without reading it.
    fn class(&self, index: u64) -> Option<u32> {
        let _ = index;
        None
    }

    /// Sample lengths in tokens, if they vary and are known without reading the samples.
    fn length_stats(&self) -> Option<LengthStats> {
        None
    }

    /// Decodes tokens to text, if they stand for text.
    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        let _ = tokens;
        None
    }

    /// Name of each input value, if they have names.
    fn input_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// The `tokenizer.json` of the tokens, if there is one.
    fn tokenizer_json(&self) -> Option<Vec<u8>> {
        None
    }

    /// How the cells of a table become inputs and targets, if the samples are rows of one.
    fn table_schema(&self) -> Option<&table::TableSchema> {
        None
    }

    /// Name of a sample, such as that of its image file, if it has one.
    fn sample_name(&self, index: u64) -> Option<String> {
        let _ = index;
        None
    }

    /// Per column of a table, the cells read so far whose category no training row had.
    fn unseen_categories(&self) -> Vec<(String, u64)> {
        Vec::new()
    }

    /// Other properties of the files for `trainer check` to report: (name, value) lines.
    fn describe(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Sample lengths in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LengthStats {
    /// Length of the longest sample before truncation, and its index.
    pub longest: (u64, u64),
    /// (maximum length, samples), ascending; the last bin also counts longer samples.
    pub histogram: Vec<(u64, u64)>,
}

/// One row of a batch, borrowed by a dataset to write a sample into.
pub struct BatchRow<'a> {
    pub input: SliceMut<'a>,
    pub target: SliceMut<'a>,
    /// Number of non-padding positions of the input. Only a dataset whose features have buckets must set it.
    pub length: u32,
}

pub enum SliceMut<'a> {
    /// Indices into the pixel lookup table of the features.
    U8(&'a mut [u8]),
    F32(&'a mut [f32]),
    U32(&'a mut [u32]),
}

impl SliceMut<'_> {
    pub fn len(&self) -> usize {
        match self {
            SliceMut::U8(values) => values.len(),
            SliceMut::F32(values) => values.len(),
            SliceMut::U32(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The f32 values of the row; its features must declare f32.
    pub fn as_f32_mut(&mut self) -> &mut [f32] {
        match self {
            SliceMut::F32(values) => values,
            SliceMut::U8(_) | SliceMut::U32(_) => {
                unreachable!("the row has the layout of the dataset's features")
            }
        }
    }

    /// The u32 values of the row; its features must declare u32.
    pub fn as_u32_mut(&mut self) -> &mut [u32] {
        match self {
            SliceMut::U32(values) => values,
            SliceMut::U8(_) | SliceMut::F32(_) => {
                unreachable!("the row has the layout of the dataset's features")
            }
        }
    }
}

/// Folder of a published dataset for tests; prints a note and returns `None` if it is missing.
#[cfg(test)]
fn published_dataset(name: &str) -> Option<std::path::PathBuf> {
    let default_root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data");
    let root = std::env::var_os("TRAINER_DATA").unwrap_or_else(|| default_root.into());
    let folder = std::path::Path::new(&root).join(name);
    let found = folder.exists();
    if !found {
        println!("skipped: no `{}`; TRAINER_DATA names the folder that holds `{name}`", folder.display());
    }
    found.then_some(folder)
}
