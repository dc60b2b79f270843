//! Settings of the data loader.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base::units::{Bytes, MemorySize};

/// How samples are brought to the model; the same keys for every kind of data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LoaderConfig {
    /// Visit the training samples in a new order each epoch, drawn from the seed.
    pub shuffle: bool,
    /// Threads that prepare samples; 0 means as many as the machine has cores. No result depends on it.
    #[schemars(range(max = 1024))]
    pub workers: usize,
    /// Host memory that prepared samples may take while they wait; a percentage is of `memory.ram`.
    pub prefetch: MemorySize,
    /// Memory in which samples are mixed where the files can only be read forward: compressed tables, packed
    /// archives. Other files are read in any order and need none. It is part of the experiment.
    #[schemars(extend("format" = "bytes"))]
    pub shuffle_buffer: MemorySize,
    /// What happens to a record that cannot be used.
    pub on_bad_record: OnBadRecord,
    /// With `skip`, more bad records than this end the run all the same.
    #[schemars(range(max = 1_000_000_000_000u64))]
    pub max_bad_records: u64,
}

/// What happens to a record that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRecord {
    /// The run ends and says which record it is and what is wrong with it.
    #[default]
    Fail,
    /// It is left out, counted and, the first few, told.
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
