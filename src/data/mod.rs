//! Data: from files or a generator to batches of host memory, in an order fixed by the seed.
//!
//! Owns where samples come from ([`Dataset`]), in which order
//! ([`order::Order`]), and the threads that decode them ahead of the step ([`loader::Loader`]). Takes
//! plain settings and paths, gives [`Batch`]es of plain vectors; it knows neither jobs nor tensors.
//! Refuses, with a [`DataError`], whatever does not have the declared shape. A sample is addressed by
//! its global index everywhere, so nothing depends on how a batch was split or who decoded it.

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
pub mod language;
pub mod loader;
pub mod order;
mod prefetch_depth;
pub mod sequences;
pub mod shapes;
pub mod shuffle_windows;
pub mod split;
pub mod streaming;
pub mod table;
pub mod transforms;

use std::sync::Arc;

pub use batch::{BatchValues, HostBatch};
pub use context::{DatasetContext, NoProgress, ProgressObserver};
pub use error::DataError;

pub use crate::features::{Features, InputSpec, PixelLut, TargetSpec};

/// What a sample's augmentation may depend on; see [`crate::random`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    pub seed: u64,
    pub epoch: u64,
    /// The sample's index in the set as trained on.
    pub sample: u64,
}

/// A set of samples that can be read in any order, from several threads at once.
pub trait Dataset: Send + Sync {
    /// Samples in the set.
    fn len(&self) -> u64;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn features(&self) -> &Features;

    /// Writes sample `index`, below `len()`, over the whole of `into`. The result depends on nothing
    /// but `index` and `key`. A source whose features have a palette writes the bytes, or the f32 values they stand
    /// for, as `into` has room for.
    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError>;

    /// Bytes of host memory the set keeps for as long as it lives. Mapped files do not count: the kernel
    /// takes their pages back whenever it likes.
    fn resident_bytes(&self) -> u64 {
        0
    }

    /// How the set's samples lie in blocks, where it can only be read forward: [`order::Order`] keeps to it. Samples
    /// are numbered through the blocks; a part of a set may have blocks without samples. A block's bytes are what
    /// it takes while it is held.
    fn blocks(&self) -> Option<Vec<streaming::RecordBlock>> {
        None
    }

    /// Samples of these blocks are read from here on, in this order; empty when there are no more. It changes how
    /// fast they come and nothing else.
    fn prefetch(&self, blocks: Vec<u32>) {
        let _ = blocks;
    }

    /// Another reader of the same samples, to read them in order while this one is read otherwise; `None` where
    /// one does for both.
    fn sequential_reader(&self) -> Option<Arc<dyn Dataset>> {
        None
    }

    /// Samples of each class, where that is known without reading the samples.
    fn class_counts(&self) -> Option<Vec<u64>> {
        None
    }

    /// The class of a sample, where that is known without reading it.
    fn class(&self, index: u64) -> Option<u32> {
        let _ = index;
        None
    }

    /// How long the samples are in tokens, where they differ and that is known without reading them.
    fn length_stats(&self) -> Option<LengthStats> {
        None
    }

    /// Tokens as people read them, where they stand for text.
    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        let _ = tokens;
        None
    }

    /// The name of each value of the input, where they have names.
    fn input_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// The `tokenizer.json` that gives the tokens their meaning, where there is one.
    fn tokenizer_json(&self) -> Option<Vec<u8>> {
        None
    }

    /// What else was found out about the files that `trainer check` should tell: (name, value) lines.
    fn describe(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// How long samples are, in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LengthStats {
    /// The longest sample before anything was cut, and its index.
    pub longest: (u64, u64),
    /// (up to this length, samples), ascending; samples longer than the last are counted there.
    pub histogram: Vec<(u64, u64)>,
}

/// One row of a batch, lent to a source to write a sample into.
pub struct BatchRow<'a> {
    pub input: SliceMut<'a>,
    pub target: SliceMut<'a>,
    /// Positions of the input, from the first, that are not padding. A source whose features have buckets
    /// sets it; no other one needs to.
    pub length: u32,
}

pub enum SliceMut<'a> {
    /// Of what the features' palette says.
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

    /// The f32 values of a row whose features say that they are f32.
    pub fn as_f32_mut(&mut self) -> &mut [f32] {
        match self {
            SliceMut::F32(values) => values,
            SliceMut::U8(_) | SliceMut::U32(_) => {
                unreachable!("a row is laid out by the features of the source it is lent to")
            }
        }
    }

    /// The u32 values of a row whose features say that they are u32.
    pub fn as_u32_mut(&mut self) -> &mut [u32] {
        match self {
            SliceMut::U32(values) => values,
            SliceMut::U8(_) | SliceMut::F32(_) => {
                unreachable!("a row is laid out by the features of the source it is lent to")
            }
        }
    }
}

/// A folder of published data for tests; says so and gives `None` where it is not there.
#[cfg(test)]
fn published_dataset(name: &str) -> Option<std::path::PathBuf> {
    let default_root = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data");
    let root = std::env::var_os("TRAINER_DATA").unwrap_or_else(|| default_root.into());
    let folder = std::path::Path::new(&root).join(name);
    let found = folder.exists();
    if !found {
        println!("skipped: no `{}`; TRAINER_DATA names the folder that holds `{name}`", folder.display());
    }
    found.then_some(folder)
}
