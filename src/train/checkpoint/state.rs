//! `state.json`: everything a checkpoint holds besides its tensors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::bad_records::SkippedRecords;
use crate::data::digest::Digest;
use crate::data::fingerprint::DataFingerprint;
use crate::data::order::Cursor;
use crate::events::nullable;
use crate::job::OptimizerKind;
use crate::layers::loss::MetricSums;
use crate::optim::grad_scaler::GradScaler;
use crate::planner::ExecutionPlan;
use crate::train::early_stop::StopProgress;
use crate::train::retry::Backoff;

/// Version of the checkpoint layout.
pub const FORMAT: u32 = 3;

/// Everything a run needs to resume, besides the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// See [`FORMAT`].
    pub format: u32,
    /// Updates applied.
    pub step: u64,
    pub cursor: Cursor,
    /// Samples seen, and the digest of their ids in order.
    pub samples: u64,
    pub digest: Digest,
    /// Seed of the run; with the cursor it determines all randomness.
    pub seed: u64,
    /// The resolved job. It identifies the experiment even if `job.toml` was edited or lost.
    pub job: serde_json::Value,
    /// Fingerprint of the training data; absent if nobody will resume the run, as in `trainer verify`.
    pub data: Option<DataFingerprint>,
    /// Kind of the optimizer in force; the saved optimizer state belongs to it.
    pub optimizer: OptimizerKind,
    /// The execution plan in force, and the larger plans given up.
    #[serde(alias = "way")]
    pub plan: ExecutionPlan,
    #[serde(alias = "descent")]
    pub backoff: Backoff,
    /// Best value of the job's `checkpoint.best` so far, and the step that reached it.
    pub best: Option<(f64, u64)>,
    /// What decides whether the run stops early.
    #[serde(default)]
    pub stop: StopProgress,
    /// Sums over the updates since the last evaluation.
    #[serde(default)]
    pub train_sums: MetricSums,
    /// These weights were due for an evaluation whose result is not in this state yet: a resumed run evaluates first.
    pub evaluation_due: bool,
    /// An evaluation waits for the next update whose gradient does not overflow.
    #[serde(alias = "evaluation_owed")]
    pub evaluation_deferred: bool,
    #[serde(alias = "scaling")]
    pub grad_scaler: GradScaler,
    /// Bad records skipped.
    #[serde(default, alias = "left_out")]
    pub skipped_records: SkippedRecords,
    /// Last values of the evaluation metrics.
    #[serde(deserialize_with = "nullable::numbers")]
    pub metrics: BTreeMap<String, f64>,
    pub elapsed_s: f64,
    pub data_wait_s: f64,
    /// Time of writing, in seconds since the Unix epoch.
    pub written: f64,
    /// CRC-32C and length of each file.
    pub files: BTreeMap<String, (u32, u64)>,
}
