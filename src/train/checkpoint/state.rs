//! What a checkpoint says beside its tensors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::bad_records::SkippedRecords;
use crate::data::digest::Digest;
use crate::data::fingerprint::DataFingerprint;
use crate::data::order::Cursor;
use crate::optim::grad_scaler::GradScaler;
use crate::train::event::nullable;
use crate::train::retry::{Backoff, RuntimePlan};

/// Version of this layout of a checkpoint.
pub const FORMAT: u32 = 3;

/// Everything a run needs to continue, beside tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// See [`FORMAT`].
    pub format: u32,
    /// Updates made.
    pub step: u64,
    pub cursor: Cursor,
    /// Samples seen, and the digest of their ids in order.
    pub samples: u64,
    pub digest: Digest,
    /// All randomness follows from this and the cursor.
    pub seed: u64,
    /// The resolved job: what experiment this is, whatever became of `job.toml`.
    pub job: serde_json::Value,
    /// The data it was trained on; absent where nobody will resume it, as in `trainer verify`.
    pub data: Option<DataFingerprint>,
    /// Kind of the optimizer in force, whose state this is.
    pub optimizer: String,
    /// The way of running in force, and the larger ones given up.
    pub way: RuntimePlan,
    pub descent: Backoff,
    /// The best value of the job's `checkpoint.best` so far and the step it was reached at.
    pub best: Option<(f64, u64)>,
    /// An evaluation of these very weights was due, and its result is not in here yet: a resumed run begins with it.
    pub evaluation_due: bool,
    /// An evaluation waits for the next update whose gradient does not overflow.
    pub evaluation_owed: bool,
    pub scaling: GradScaler,
    /// Records that could not be used.
    #[serde(default)]
    pub left_out: SkippedRecords,
    /// Last values of the evaluation.
    #[serde(deserialize_with = "nullable::numbers")]
    pub metrics: BTreeMap<String, f64>,
    pub elapsed_s: f64,
    pub data_wait_s: f64,
    /// When it was written, in seconds since the Unix epoch.
    pub written: f64,
    /// Checksum and length of each file.
    pub files: BTreeMap<String, (u32, u64)>,
}
