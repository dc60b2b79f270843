//! Event records for the tests of this module: 3 epochs of 2 updates; 100 samples per update, 50 in the last of an
//! epoch.

use std::collections::BTreeMap;

use crate::base::{MemorySpace, Phase, Role};
use crate::events::event::{BestCheckpoint, Event, EventRecord, MemoryBytes};
use crate::job::OptimizerKind;
use crate::planner::execution_plan::{BatchSplit, ExecutionPlan};
use crate::planner::plan::*;

pub fn started(t: f64) -> EventRecord {
    let event = Event::Started {
        name: "shapes".into(),
        run: "runs/shapes/1".into(),
        version: "0.1.0".into(),
        seed: 42,
        device: "cpu".into(),
        threads: 2,
        parameters: 101_770,
        trained_parameters: Some(101_770),
        train_samples: 150,
        valid_samples: 50,
        test_samples: None,
        total_steps: 6,
        steps_per_epoch: 2,
    };
    EventRecord { t, event }
}

pub fn plan() -> MemoryPlan {
    let part = |name: &str, role, mib: u64| MemoryPart {
        name: name.into(),
        role,
        bytes: mib << 20,
        r#where: MemorySpace::Ram,
    };
    let candidate = |change: &str, mib: u64, relative_time, fits| CandidateSummary {
        change: change.into(),
        vram_bytes: 0,
        ram_bytes: mib << 20,
        relative_time,
        measured_time: None,
        fits,
    };
    let phase = |name, mib: u64| PhasePeak { name, vram_bytes: 0, ram_bytes: mib << 20 };
    MemoryPlan {
        verdict: PlanVerdict::FitsAfterShrink,
        device: "cpu".into(),
        budget: Budget { vram_bytes: 0, ram_bytes: 256 << 20 },
        peak: Peak { vram_bytes: 0, ram_bytes: 212 << 20, phase: Phase::Backward },
        requested: BatchSplit { micro_batch: 100, accumulation_steps: 1 },
        chosen: ExecutionPlan {
            micro_batch: 50,
            accumulation_steps: 2,
            recompute: 0,
            offload: &[],
            optimizer: OptimizerKind::Adamw,
            eval_micro_batch: 200,
            prefetch: 0,
        },
        samples_per_update: 100,
        parameters: 101_770,
        trained_parameters: 101_770,
        context_bytes: 0,
        parts: vec![
            part("weights", Role::Weights, 20),
            part("gradients", Role::Gradients, 20),
            part("adamw m", Role::OptimizerState, 20),
            part("adamw v", Role::OptimizerState, 20),
            part("conv1", Role::Activations, 100),
            part("conv2", Role::Activations, 32),
        ],
        candidates: vec![
            candidate("", 344, 1.0, false),
            candidate("micro-batch 50, 2 accumulation steps", 212, 1.04, true),
        ],
        advice: None,
        shrunk: vec![PlanAdjustment {
            key: PlanKey::MicroBatch,
            from: "100 x 1".into(),
            to: "50 x 2".into(),
            why: "as written it takes 344.00 MiB of 256.00 MiB ram".into(),
        }],
        phases: vec![phase(Phase::Forward, 180), phase(Phase::Backward, 212), phase(Phase::Update, 80)],
        pruned: None,
        prediction: None,
        disk: Disk::default(),
    }
}

pub fn planned(t: f64) -> EventRecord {
    EventRecord { t, event: Event::Planned { plan: plan() } }
}

/// A one-second update, 1 % of it waiting; loss 1 / step.
pub fn step(t: f64, step: u64) -> EventRecord {
    let event = Event::Step {
        step,
        epoch: step.div_ceil(2),
        loss: 1.0 / step as f64,
        lr: 1e-3,
        grad_norm: 0.5,
        samples: step * 100 - step / 2 * 50,
        micro_batch: 50,
        accumulation_steps: 2,
        step_s: 1.0,
        data_wait_s: 0.01,
        ram_bytes: 206 << 20,
        vram_bytes: 0,
        resident_bytes: 209 << 20,
        samples_digest: format!("d{step}"),
        loss_scale: 1.0,
        skipped_updates: 0,
    };
    EventRecord { t, event }
}

pub fn eval(t: f64, step: u64, loss: f64) -> EventRecord {
    let metrics = BTreeMap::from([("valid.accuracy".into(), 1.0 - loss), ("valid.loss".into(), loss)]);
    EventRecord { t, event: Event::Eval { step, epoch: step.div_ceil(2), metrics, samples: 50, eval_s: 0.5 } }
}

pub fn checkpoint(t: f64, step: u64) -> EventRecord {
    let path = format!("c/{step}");
    EventRecord { t, event: Event::Checkpoint { step, path, bytes: 1 << 20, write_s: 0.1 } }
}

pub fn best(t: f64, step: u64, value: f64) -> EventRecord {
    let (path, metric) = (format!("c/{step}"), "valid.loss".into());
    EventRecord { t, event: Event::Best { step, path, metric, value } }
}

pub fn resumed(t: f64, step: u64) -> EventRecord {
    let checkpoint = (step > 0).then(|| format!("c/{step}"));
    EventRecord { t, event: Event::Resumed { step, checkpoint, skipped: vec![] } }
}

pub fn finished(t: f64) -> EventRecord {
    let peak = |mib: u64| MemoryBytes { ram: mib << 20, vram: 0 };
    let event = Event::Finished {
        steps: 6,
        epochs: 3.0,
        samples: 450,
        metrics: BTreeMap::from([
            ("train.loss".into(), 1.0 / 6.0),
            ("valid.accuracy".into(), 0.7),
            ("valid.loss".into(), 0.3),
        ]),
        stopped: None,
        best: Some(BestCheckpoint { step: 4, path: "c/4".into(), metric: "valid.loss".into(), value: 0.25 }),
        planned_peak_bytes: peak(212),
        measured_peak_bytes: peak(206),
        resident_peak_bytes: 209 << 20,
        budget_bytes: peak(256),
        elapsed_s: 9.0,
        data_wait_s: 0.08,
        samples_digest: "d6".into(),
        bad_records: 0,
    };
    EventRecord { t, event }
}

/// A complete run without interruption.
pub fn run() -> Vec<EventRecord> {
    vec![
        started(0.0),
        planned(0.1),
        step(1.0, 1),
        step(2.0, 2),
        checkpoint(2.1, 2),
        eval(2.5, 2, 0.5),
        best(2.6, 2, 0.5),
        step(3.6, 3),
        step(4.6, 4),
        checkpoint(4.7, 4),
        eval(5.1, 4, 0.25),
        best(5.2, 4, 0.25),
        step(6.2, 5),
        step(7.2, 6),
        checkpoint(7.3, 6),
        eval(7.8, 6, 0.3),
        finished(9.0),
    ]
}
