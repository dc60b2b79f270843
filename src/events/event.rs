//! The events of a run: one typed value for everything people or programs see.
//!
//! `events.jsonl` holds one [`EventRecord`] per line and is the source of truth about a run. The terminal, the JSON
//! stream, `metrics.jsonl`, TensorBoard and the summary are renderings of it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::nullable;
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

/// The best checkpoint of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BestCheckpoint {
    /// Updates applied before it was written.
    pub step: u64,
    /// Its folder.
    pub path: String,
    /// The job's `checkpoint.best`.
    pub metric: String,
    /// Its value; `null` if not finite.
    #[serde(deserialize_with = "nullable::number")]
    #[schemars(with = "Option<f64>")]
    pub value: f64,
}

fn one() -> f64 {
    1.0
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A process started to train: a new run, or a resumed one.
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
        /// Threads of the CPU kernels.
        threads: usize,
        /// Parameters of the model.
        parameters: u64,
        /// How many of them are trained: all but those that `train.freeze` names. `null` in runs of earlier versions,
        /// which train all.
        #[serde(default)]
        trained_parameters: Option<u64>,
        /// Samples in the training set.
        train_samples: u64,
        /// Samples in the validation set.
        valid_samples: u64,
        /// Samples in the test set, if the job has one; no run reads them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        test_samples: Option<u64>,
        /// Updates of the whole run.
        total_steps: u64,
        /// Updates in an epoch; its last may be smaller than the others.
        steps_per_epoch: u64,
    },
    /// The memory plan in force from now on.
    Planned { plan: MemoryPlan },
    /// The run resumed from a checkpoint, or started over because there was none (`step` 0).
    Resumed {
        /// Updates already applied.
        step: u64,
        /// The checkpoint's folder; `null` if there was none.
        checkpoint: Option<String>,
        /// What was skipped, each with the reason: damaged checkpoints, lines of `events.jsonl` that do not parse, a
        /// run to resume that does not exist.
        skipped: Vec<String>,
    },
    /// The resumed run has nothing left to train; a `finished` follows.
    NothingLeft {
        /// Updates applied.
        step: u64,
        /// Why, for people.
        reason: String,
        /// The key of the job, or the flag, to change for more updates: `train.epochs`, `train.steps`, `stop.patience`,
        /// `--max-steps`, ...
        key: String,
    },
    /// The weights start from those that the job's `train.init` names.
    Initialized {
        /// Tensors taken as they are.
        matched: usize,
        /// Parameters that start at random.
        new: Vec<String>,
        /// Parameters of which the common rows were taken.
        resized: Vec<String>,
        /// Tensors that the model does not have.
        left_over: Vec<String>,
        /// Layers whose two factors were computed from the whole weight.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        factorized: Vec<String>,
    },
    /// The teacher's logits of all training samples are stored: the job's `distill.logits` is `stored`.
    TeacherLogits {
        /// Their file.
        path: String,
        /// Samples in the training set.
        samples: u64,
        /// Size of the file.
        bytes: u64,
        /// An earlier run stored them; otherwise this one did, before its first update.
        was_stored: bool,
        /// Time it took to compute them, or to find them.
        seconds: f64,
    },
    /// One update.
    Step {
        /// Updates so far, including this one.
        step: u64,
        /// The epoch of the update, from 1.
        epoch: u64,
        /// Mean training loss over the update's samples; `null` if not finite.
        #[serde(deserialize_with = "nullable::number")]
        #[schemars(with = "Option<f64>")]
        loss: f64,
        /// Learning rate of the update.
        lr: f64,
        /// Norm of the whole gradient before clipping; `null` if not finite.
        #[serde(deserialize_with = "nullable::number")]
        #[schemars(with = "Option<f64>")]
        grad_norm: f64,
        /// Samples trained on so far, including this update's.
        samples: u64,
        /// Samples in a micro-batch.
        micro_batch: usize,
        /// Micro-batches in the update.
        accumulation_steps: usize,
        /// Wall-clock seconds of the update, including the wait for data.
        step_s: f64,
        /// Seconds of that spent waiting for data.
        data_wait_s: f64,
        /// Host bytes in use by the run: the maximum since the last `step` event.
        ram_bytes: u64,
        /// Device bytes in use by the run: the maximum since the last `step` event.
        vram_bytes: u64,
        /// Resident bytes of the worker process: the maximum since it started (`VmHWM`); 0 if unknown.
        #[serde(default)]
        resident_bytes: u64,
        /// Digest of the ids of every sample so far, in order.
        samples_digest: String,
        /// Loss scale in f16; 1 in other types.
        #[serde(default = "one")]
        loss_scale: f64,
        /// Updates skipped so far because their gradient overflowed in f16.
        #[serde(default)]
        skipped_updates: u64,
    },
    /// Weights were selected and set to zero, as the job's `[prune]` says.
    Pruned {
        /// Updates applied before it.
        step: u64,
        /// Fraction of the weights that are zero from now on.
        sparsity: f64,
        /// How many that are.
        pruned: u64,
        /// Weights that may be pruned.
        weights: u64,
        /// How many channels or heads are zero, if those are pruned as a whole.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pruned_units: Option<u64>,
        /// Channels or heads that may be pruned.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        units: Option<u64>,
    },
    /// From now on weights and activations are rounded to 8-bit integers, as the job's `[quantize]` says.
    Quantized {
        /// Updates applied before it.
        step: u64,
    },
    /// An evaluation over the validation set.
    Eval {
        /// Updates applied before it.
        step: u64,
        /// The epoch of the last update, from 1; 0 before the first.
        epoch: u64,
        /// `valid.loss`, `valid.accuracy`, ..., and `train.loss` and `train.accuracy` over the updates since the last
        /// evaluation; `null` if not finite.
        #[serde(deserialize_with = "nullable::numbers")]
        #[schemars(with = "BTreeMap<String, Option<f64>>")]
        metrics: BTreeMap<String, f64>,
        /// Samples evaluated.
        samples: u64,
        /// Wall-clock seconds of the evaluation.
        eval_s: f64,
    },
    /// A checkpoint was written completely.
    Checkpoint {
        /// Updates applied before it was written.
        step: u64,
        /// Its folder.
        path: String,
        /// Size on disk.
        bytes: u64,
        /// Seconds it took to write.
        write_s: f64,
    },
    /// The checkpoint of this step is the best so far, by its evaluation.
    Best {
        /// Updates applied before it was written.
        step: u64,
        /// Its folder.
        path: String,
        /// The job's `checkpoint.best`.
        metric: String,
        /// Its value; `null` if not finite.
        #[serde(deserialize_with = "nullable::number")]
        #[schemars(with = "Option<f64>")]
        value: f64,
    },
    /// A reservation failed: out of memory.
    Oom {
        /// Updates applied before it.
        step: u64,
        /// The phase it happened in.
        phase: Phase,
        /// What requested the memory: a layer, or another part of the run.
        #[serde(alias = "asker")]
        requester: String,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes left of the budget.
        left: u64,
    },
    /// Who held which memory was written: after an `oom` and, with `log.memory = "detailed"`, after an evaluation and
    /// at the end.
    MemorySnapshot {
        /// Updates applied before it.
        step: u64,
        /// The file; `null` if it could not be written.
        path: Option<String>,
        /// Peak of the reservations in the time that it covers, in bytes.
        peak_bytes: MemoryBytes,
        /// Why it could not be written.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// Other processes took memory and little is left on the host; a `shrunk` follows.
    Pressure {
        /// Updates applied before it.
        step: u64,
        /// Bytes left for this process.
        left: u64,
        /// Threshold: the run shrinks if fewer bytes are left.
        low: u64,
        /// Fraction of the last ten seconds in which all tasks stalled on memory (PSI); `null` if the kernel does not
        /// report it.
        stalled: Option<f64>,
    },
    /// More memory was measured than had been reserved: the budget in force is lowered by the difference.
    Corrected {
        /// Updates applied before it.
        step: u64,
        /// Peak of the reservations, in bytes.
        #[serde(alias = "asked")]
        reserved: u64,
        /// Measured peak, in bytes.
        measured: u64,
        /// Budget for reservations from now on, in bytes.
        budget: u64,
    },
    /// The worker process was killed, or aborted by a failed allocation, and its supervisor started another one; a
    /// `resumed` follows.
    Restarted {
        /// Worker processes lost since `trainer fit` started.
        restarts: u32,
        /// What happened.
        cause: String,
        /// Budget of the run from now on, in bytes.
        budget: u64,
    },
    /// The run changed to an execution plan that needs less memory, after an `oom`, a `pressure` or a `corrected`.
    Shrunk {
        /// Updates applied before it.
        step: u64,
        /// The new execution plan, in words.
        change: String,
        /// Samples in a micro-batch from now on.
        micro_batch: usize,
        /// Micro-batches in an update from now on.
        accumulation_steps: usize,
    },
    /// The run returned to an execution plan that needs more memory.
    Grown {
        /// Updates applied before it.
        step: u64,
        /// The new execution plan, in words.
        change: String,
        /// Samples in a micro-batch from now on.
        micro_batch: usize,
        /// Micro-batches in an update from now on.
        accumulation_steps: usize,
    },
    /// The launches of a micro-batch were captured as a CUDA graph, which later micro-batches of the same kind replay;
    /// reported once.
    CudaGraphCaptured {
        /// Updates applied before it.
        step: u64,
        /// Launches of the graph.
        launches: usize,
        /// Bytes of the arena of its tensors.
        arena_bytes: u64,
        /// Bytes of the arena beyond the peak of its tensors.
        arena_waste_bytes: u64,
    },
    /// The launches of a micro-batch are not captured as a CUDA graph; reported once, at the end of a run that never
    /// got as far as capturing one.
    CudaGraphDisabled {
        /// Updates applied before it.
        step: u64,
        /// Why it is not captured.
        reason: String,
    },
    /// cuDNN failed in an evaluation, for lack of memory for example, and evaluations use the program's own kernels
    /// from here on; reported once.
    CudnnDisabled {
        /// Updates made before it.
        step: u64,
        /// The error.
        reason: String,
    },
    /// What it took to serve the allocations of a GPU, at the end of a run.
    DeviceHeap {
        /// Updates applied.
        step: u64,
        /// Device synchronizes needed to remap free chunks next to each other.
        synchronizes: u64,
        /// Passes over a micro-batch that ran from an arena.
        arena_passes: u64,
        /// Passes whose allocations differed from the traced ones.
        diverged_passes: u64,
        /// Bytes of the largest arena.
        arena_bytes: u64,
        /// Bytes of the arena beyond the peak of its tensors.
        arena_waste_bytes: u64,
        /// Bytes of the GPU allocated outside the heap since the budget was set, by the driver and by other processes.
        #[serde(default)]
        outside_heap_bytes: u64,
    },
    /// Bad records were skipped.
    BadRecords {
        /// Updates applied before it.
        step: u64,
        /// Bad records found so far, in the training and the validation set.
        count: u64,
        /// The first few: each with its location and what is wrong with it.
        records: Vec<String>,
    },
    /// Updates wait too long for their data; reported once.
    SlowData {
        /// Updates applied.
        step: u64,
        /// Fraction of the update time spent waiting for data, 0 to 1.
        #[serde(alias = "share")]
        fraction: f64,
        /// The bottleneck.
        cause: String,
        /// What to change.
        advice: String,
    },
    /// The run ends before its last update, as the job's `[stop]` says.
    StoppedEarly {
        /// Updates applied.
        step: u64,
        /// Why, for people.
        reason: String,
    },
    /// A signal stopped the run after its checkpoint was written.
    Interrupted {
        /// Updates applied.
        step: u64,
        /// `SIGINT` or `SIGTERM`.
        signal: String,
        /// Folder of the checkpoint; `null` if there is none.
        checkpoint: Option<String>,
    },
    /// The loss, the gradient or the weights were not finite; the run stopped.
    Diverged {
        /// The update that was not applied.
        step: u64,
        /// The epoch of the update, from 1.
        epoch: u64,
        /// `NaN`, `inf` or `-inf`; if the update was applied and a weight became non-finite, the name of that weight.
        loss: String,
        /// Ids of the update's samples.
        sample_ids: Vec<u64>,
        /// The last checkpoint, all of whose values are finite; `null` if there is none.
        checkpoint: Option<String>,
    },
    /// The run failed for another reason.
    Failed {
        /// Updates applied.
        step: u64,
        /// The message, including its causes.
        error: String,
    },
    /// The run finished, or `--max-steps` stopped it.
    Finished {
        /// Updates applied.
        steps: u64,
        /// Why it ended before the last update of the job: `--max-steps 40 of 940`, or the reason of a `stopped_early`;
        /// `null` if the run is complete.
        #[serde(default)]
        stopped: Option<String>,
        /// Epochs trained: 1.25 is one and a quarter.
        epochs: f64,
        /// Samples trained on.
        samples: u64,
        /// Last value of every metric.
        #[serde(deserialize_with = "nullable::numbers")]
        #[schemars(with = "BTreeMap<String, Option<f64>>")]
        metrics: BTreeMap<String, f64>,
        /// The best checkpoint; `null` if there is none.
        #[serde(default)]
        best: Option<BestCheckpoint>,
        /// The planned peak.
        planned_peak_bytes: MemoryBytes,
        /// The measured peak: of the heap on the host, of allocated memory on the device.
        measured_peak_bytes: MemoryBytes,
        /// Peak resident memory of the worker process (`VmHWM`), which is what the OOM killer goes by; 0 if unknown.
        #[serde(default)]
        resident_peak_bytes: u64,
        /// The budget.
        budget_bytes: MemoryBytes,
        /// Seconds of the run, including those before a resume.
        elapsed_s: f64,
        /// Seconds of that spent waiting for data.
        data_wait_s: f64,
        /// `samples_digest` of the last update.
        samples_digest: String,
        /// Bad records skipped.
        #[serde(default)]
        bad_records: u64,
    },
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
            concat!(
                r#"{"t":1.5,"event":"eval","step":7,"epoch":1,"metrics":{"valid.accuracy":0.1,"valid.loss":null},"#,
                r#""samples":3,"eval_s":0.25}"#
            )
        );
        match serde_json::from_str::<EventRecord>(&line).unwrap() {
            EventRecord { t: 1.5, event: Event::Eval { step: 7, metrics, .. } } => {
                assert_eq!(metrics["valid.accuracy"], 0.1);
                assert!(metrics["valid.loss"].is_nan());
            }
            other => panic!("{other:?}"),
        }
    }
    /// Runs of older versions resume: their events have the old names of some fields.
    #[test]
    fn old_names_of_fields_are_accepted() {
        let read = |line: &str| serde_json::from_str::<EventRecord>(line).unwrap().event;
        let oom = r#"{"t":1.0,"event":"oom","step":3,"phase":"forward","asker":"fc1","bytes":8,"left":4}"#;
        assert!(matches!(read(oom), Event::Oom { requester, .. } if requester == "fc1"));
        let corrected = r#"{"t":1.0,"event":"corrected","step":3,"asked":5,"measured":8,"budget":9}"#;
        assert!(matches!(read(corrected), Event::Corrected { reserved: 5, .. }));
        let slow = r#"{"t":1.0,"event":"slow_data","step":3,"share":0.5,"cause":"a","advice":"b"}"#;
        assert!(matches!(read(slow), Event::SlowData { fraction: 0.5, .. }));

        let plan = crate::report::fixtures::plan();
        let new = serde_json::to_string(&Event::Planned { plan: plan.clone() }).unwrap();
        let old = new.replace("\"candidates\"", "\"rungs\"").replace("\"key\"", "\"rung\"");
        assert!(old.contains("\"rungs\"") && old.contains("\"rung\"") && old != new);
        assert!(
            matches!(read(&old.replacen('{', "{\"t\":1.0,", 1)), Event::Planned { plan: read } if read == plan)
        );
    }
}
