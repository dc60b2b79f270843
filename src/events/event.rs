//! The events of a run: one typed value for everything people or programs see.
//!
//! `events.jsonl` holds one [`EventRecord`] per line and is the source of truth about a run. The terminal, the JSON
//! stream, `metrics.jsonl`, TensorBoard and the summary are renderings of it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base::Phase;
use crate::planner::MemoryPlan;

/// An [`Event`] and when it happened.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct EventRecord {
    /// Seconds since the Unix epoch.
    pub t: f64,
    #[serde(flatten)]
    pub event: Event,
}

/// Bytes of host memory (`ram`) and of device memory (`vram`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryBytes {
    pub ram: u64,
    pub vram: u64,
}

fn one() -> f64 {
    1.0
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A session of the run began, the first or one that goes on: what it is and where.
    Started {
        /// The job's `name`.
        name: String,
        /// Folder of the run.
        run: String,
        /// Version of the program.
        version: String,
        /// The job's `seed`, which decides all randomness.
        seed: u64,
        /// `cpu`, `cuda:0`, ...
        device: String,
        /// Threads the CPU kernels use.
        threads: usize,
        /// Trainable values of the model.
        parameters: u64,
        /// Samples in the training set.
        train_samples: u64,
        /// Samples in the validation set.
        valid_samples: u64,
        /// Updates the whole run will make.
        total_steps: u64,
        /// Updates in an epoch; its last may be smaller than the others.
        steps_per_epoch: u64,
    },
    /// The memory plan in force from here on.
    Planned { plan: MemoryPlan },
    /// A run went on from a checkpoint, or began anew because there was none (`step` 0).
    Resumed {
        /// Updates already made.
        step: u64,
        /// The checkpoint's folder; `null` when there was none.
        checkpoint: Option<String>,
        /// What was passed over, each with the reason: checkpoints, lines of `events.jsonl`, a run to resume that
        /// was not there.
        skipped: Vec<String>,
    },
    /// One update.
    Step {
        /// Updates made, this one included.
        step: u64,
        /// Epochs finished before this update's first sample.
        epoch: u64,
        /// Mean training loss over the update's samples; `null` when not finite.
        #[serde(deserialize_with = "nullable::number")]
        #[schemars(with = "Option<f64>")]
        loss: f64,
        /// Learning rate of the update.
        lr: f64,
        /// Norm of the whole gradient before clipping; `null` when not finite.
        #[serde(deserialize_with = "nullable::number")]
        #[schemars(with = "Option<f64>")]
        grad_norm: f64,
        /// Samples seen in the run, this update's included.
        samples: u64,
        /// Samples in a micro-batch.
        micro_batch: usize,
        /// Micro-batches in the update.
        accumulation_steps: usize,
        /// Wall-clock seconds of the update, waiting included.
        step_s: f64,
        /// Of these, seconds spent waiting for data.
        data_wait_s: f64,
        /// Host bytes in use by the run, highest since the last `step` event.
        ram_bytes: u64,
        /// Device bytes in use by the run, highest since the last `step` event.
        vram_bytes: u64,
        /// Resident bytes of the worker process, highest since it started (`VmHWM`); 0 where unknown.
        #[serde(default)]
        resident_bytes: u64,
        /// Digest of the ids of every sample so far, in order.
        samples_digest: String,
        /// What the loss is multiplied with in f16; 1 in other types.
        #[serde(default = "one")]
        loss_scale: f64,
        /// Updates skipped in the run because their gradient overflowed in f16.
        #[serde(default)]
        skipped_updates: u64,
    },
    /// An evaluation over the validation set.
    Eval {
        /// Updates made before it.
        step: u64,
        /// Epochs finished before it.
        epoch: u64,
        /// `valid.loss`, `valid.accuracy`, ...; `null` when not finite.
        #[serde(deserialize_with = "nullable::numbers")]
        #[schemars(with = "BTreeMap<String, Option<f64>>")]
        metrics: BTreeMap<String, f64>,
        /// Samples evaluated.
        samples: u64,
        /// Wall-clock seconds of the evaluation.
        eval_s: f64,
    },
    /// A checkpoint is whole on disk.
    Checkpoint {
        /// Updates it holds.
        step: u64,
        /// Its folder.
        path: String,
        /// Size on disk.
        bytes: u64,
        /// Seconds from its beginning until it was whole.
        write_s: f64,
    },
    /// The evaluation found the checkpoint of its step to be the best so far.
    Best {
        /// Updates it holds.
        step: u64,
        /// Its folder.
        path: String,
        /// The job's `checkpoint.best`.
        metric: String,
        /// Its value.
        value: f64,
    },
    /// An allocation did not fit.
    Oom {
        /// Updates made before it.
        step: u64,
        /// The phase it happened in.
        phase: Phase,
        /// Who asked.
        asker: String,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that were left of the budget.
        left: u64,
    },
    /// Others took memory during the run until little was left; a `shrunk` follows.
    Pressure {
        /// Updates made before it.
        step: u64,
        /// Bytes left for this process.
        left: u64,
        /// Fewer bytes than this are too few.
        low: u64,
        /// Fraction of the last ten seconds in which all work waited for memory; `null` where the kernel does
        /// not say.
        stalled: Option<f64>,
    },
    /// More memory was measured than had been asked for: the budget in force is lowered by the difference.
    Corrected {
        /// Updates made before it.
        step: u64,
        /// The most bytes that were asked for at once.
        asked: u64,
        /// The most bytes that were measured.
        measured: u64,
        /// Bytes that may be asked for from here on.
        budget: u64,
    },
    /// The process that worked on the run was killed, or ended by a failed allocation, and its supervisor started
    /// another one; a `resumed` follows.
    Restarted {
        /// Processes lost since `trainer fit` was typed.
        restarts: u32,
        /// What happened.
        cause: String,
        /// Bytes the run may use from here on.
        budget: u64,
    },
    /// The plan went down a rung after an `oom`, a `pressure` or a `corrected`.
    Shrunk {
        /// Updates made before it.
        step: u64,
        /// What differs from the plan before.
        change: String,
        /// Samples in a micro-batch from here on.
        micro_batch: usize,
        /// Micro-batches in an update from here on.
        accumulation_steps: usize,
    },
    /// Memory came back and the plan went up a rung.
    Grown {
        /// Updates made before it.
        step: u64,
        /// What differs from the plan before.
        change: String,
        /// Samples in a micro-batch from here on.
        micro_batch: usize,
        /// Micro-batches in an update from here on.
        accumulation_steps: usize,
    },
    /// The launches of a micro-batch were captured as a CUDA graph, which is replayed from here on where the micro-batch is
    /// of the same kind; reported once.
    CudaGraphCaptured {
        /// Updates made before it.
        step: u64,
        /// Launches of the graph.
        launches: usize,
        /// Bytes of the arena that its tensors are placed in.
        arena_bytes: u64,
        /// Bytes of it beyond the most that its tensors have at once.
        arena_waste_bytes: u64,
    },
    /// The launches of a micro-batch are not captured as a CUDA graph; reported once, at the end of a run that never got
    /// as far as capturing one.
    CudaGraphDisabled {
        /// Updates made before it.
        step: u64,
        /// What keeps it from being captured.
        reason: String,
    },
    /// cuDNN failed in an evaluation, for lack of memory for example, and evaluations use the program's own kernels from
    /// here on; reported once.
    CudnnDisabled {
        /// Updates made before it.
        step: u64,
        /// The error.
        reason: String,
    },
    /// What it took to serve the allocations of a GPU, at the end of a run.
    DeviceHeap {
        /// Updates made.
        step: u64,
        /// How often the device was waited for to move free memory together.
        synchronizes: u64,
        /// Passes over a micro-batch whose tensors were placed in an arena.
        arena_passes: u64,
        /// Those whose allocations were not as expected.
        diverged_passes: u64,
        /// Bytes of the largest arena.
        arena_bytes: u64,
        /// Bytes of it beyond the most that its tensors have at once.
        arena_waste_bytes: u64,
        /// Bytes of the GPU allocated outside the heap since the budget was set, by the driver and by other processes.
        #[serde(default)]
        outside_heap_bytes: u64,
    },
    /// Records that cannot be used were left out.
    BadRecords {
        /// Updates made before it.
        step: u64,
        /// Bad records found so far, in the training and the validation set.
        count: u64,
        /// The first few, as they appear: where they are and what is wrong with them.
        records: Vec<String>,
    },
    /// Updates wait too long for their data; told once.
    SlowData {
        /// Updates made.
        step: u64,
        /// Fraction of the time of updates that was waited, 0 to 1.
        share: f64,
        /// What is too slow.
        cause: String,
        /// What to change.
        advice: String,
    },
    /// A signal stopped the run after its checkpoint was written.
    Interrupted {
        /// Updates made.
        step: u64,
        /// `SIGINT` or `SIGTERM`.
        signal: String,
        /// Folder of the checkpoint; `null` when there is none.
        checkpoint: Option<String>,
    },
    /// The loss or the gradient was not finite; the run stopped.
    Diverged {
        /// The update that was not applied.
        step: u64,
        /// Epochs finished before it.
        epoch: u64,
        /// `NaN`, `inf` or `-inf`; where the update was applied and made weights that are not finite, their name.
        loss: String,
        /// Ids of the update's samples.
        sample_ids: Vec<u64>,
        /// Last checkpoint, all of whose values are finite; `null` when there is none.
        checkpoint: Option<String>,
    },
    /// The run failed for another reason.
    Failed {
        /// Updates made.
        step: u64,
        /// The message, causes included.
        error: String,
    },
    /// The run is done.
    Finished {
        /// Updates made.
        steps: u64,
        /// Epochs begun.
        epochs: u64,
        /// Samples seen.
        samples: u64,
        /// Last value of every metric, and `best.NAME` for the one that chose the best checkpoint.
        #[serde(deserialize_with = "nullable::numbers")]
        #[schemars(with = "BTreeMap<String, Option<f64>>")]
        metrics: BTreeMap<String, f64>,
        /// Step of the best checkpoint; `null` when there is none.
        best_step: Option<u64>,
        /// What the plan predicted.
        planned_peak_bytes: MemoryBytes,
        /// What was measured: the heap on the host, allocated memory on the device.
        measured_peak_bytes: MemoryBytes,
        /// The peak of the worker process's resident host memory (`VmHWM`): what the kernel kills by. 0 where
        /// unknown.
        #[serde(default)]
        resident_peak_bytes: u64,
        /// What was allowed.
        budget_bytes: MemoryBytes,
        /// Seconds of the run, those before a resume included.
        elapsed_s: f64,
        /// Of these, seconds spent waiting for data.
        data_wait_s: f64,
        /// That of the last `step`.
        samples_digest: String,
        /// Records that were left out because they cannot be used.
        #[serde(default)]
        bad_records: u64,
    },
}

/// JSON has no `NaN`: serde writes a non-finite number as `null`. It must read back, because the events of a diverged
/// run have to stay readable.
pub(crate) mod nullable {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer};

    pub fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }

    pub fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
        let values = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
        Ok(values.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record with a non-finite metric survives a round trip through JSON.
    #[test]
    fn numbers_that_are_not_finite_read_back() {
        let metrics = BTreeMap::from([("valid.accuracy".into(), 0.1), ("valid.loss".into(), f64::INFINITY)]);
        let record = EventRecord {
            t: 1.5,
            event: Event::Eval { step: 7, epoch: 1, metrics, samples: 3, eval_s: 0.25 },
        };
        let line = serde_json::to_string(&record).unwrap();
        assert_eq!(
            line,
            r#"{"t":1.5,"event":"eval","step":7,"epoch":1,"metrics":{"valid.accuracy":0.1,"valid.loss":null},"samples":3,"eval_s":0.25}"#
        );
        match serde_json::from_str::<EventRecord>(&line).unwrap() {
            EventRecord { t: 1.5, event: Event::Eval { step: 7, metrics, .. } } => {
                assert_eq!(metrics["valid.accuracy"], 0.1);
                assert!(metrics["valid.loss"].is_nan());
            }
            other => panic!("{other:?}"),
        }
    }
}
