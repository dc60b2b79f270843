//! A run, top to bottom: plan, run directory, tensors, training loop, end.

mod checkpoints;
mod clock;
mod context;
mod evaluation;
mod finish;
mod memory;
mod options;
mod position;
mod skipped_records;
mod startup;
mod teacher_logits;
mod update;
mod update_error;
mod weight_histograms;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::DType;

use super::Failure;
use super::checkpoint::{CheckpointState, Checkpoints, FORMAT};
use super::early_stop::StopReason;
use super::evaluation_file::EvaluationFile;
use super::memory_snapshot::SnapshotReason;
use super::postmortem::PostMortem;
use super::retry::Backoff;
use super::run_dir::RunDir;
use super::setup::Setup;
use crate::data::DataError;
use crate::events::Reporter;
use crate::events::event::Event;
use crate::job::{Interval, Job};
use crate::layers::loss::MetricSums;
use crate::memory::measure;
use crate::optim::grad_scaler::GradScaler;
use crate::planner::MemoryPlan;

pub(super) use weight_histograms::BYTES as HISTOGRAM_BYTES;

pub use options::{Observer, RunOptions, RunOutcome};

use checkpoints::RunCheckpoints;
use clock::RunClock;
use context::RunContext;
use evaluation::{EvaluationOutcome, EvaluationState};
use memory::MemoryControl;
use skipped_records::SkippedRecordLog;
use teacher_logits::LogitEntry;
use update::PendingUpdate;
use update_error::UpdateError;

/// Trains a job. Calls `report` for a reporter once the run directory exists, with whether the run resumes an earlier
/// one.
pub fn fit(
    job: Job,
    options: RunOptions,
    report: impl FnOnce(&RunDir, bool) -> Result<Reporter, Failure>,
) -> Result<RunOutcome, Failure> {
    let (folder, resumed) = RunDir::resolve(&options.requested, &job, &options.runs, &options.stamp)?;
    if resumed {
        // Repair what a killed process left half-replaced before anything looks for the newest checkpoint.
        folder.clean()?;
    }
    let before = resumed.then(|| Checkpoints::new(folder.checkpoints()).newest_state()).flatten();
    let startup::PlannedRun { setup, plan, ram, data } = startup::plan_run(job, &options, before.as_ref())?;
    run_plan(&setup, plan, RunOptions { ram, data: Some(data), ..options }, report)
}

/// As [`fit`], under the given plan.
pub fn run_plan(
    setup: &Setup,
    mut plan: MemoryPlan,
    options: RunOptions,
    report: impl FnOnce(&RunDir, bool) -> Result<Reporter, Failure>,
) -> Result<RunOutcome, Failure> {
    let (folder, resumed) = RunDir::resolve(&options.requested, &setup.job, &options.runs, &options.stamp)?;
    let newest = startup::newest_checkpoint(&folder, resumed, setup, &options)?;
    // A resumed run keeps its split if that fits, so that it is bitwise identical to an uninterrupted run.
    let (exec_plan, backoff) = match &newest.found {
        Some((state, _)) => state.backoff.clone().resumed(state.plan, plan.chosen),
        None => (plan.chosen, Backoff::default()),
    };
    plan.chosen = plan.chosen.with_split(exec_plan.split());
    let logits = LogitEntry::find(setup, &options)?;
    let missing_bytes = logits.as_ref().map_or(0, |logits| logits.missing_bytes(setup));
    startup::check_disk_space(&folder, &plan, missing_bytes)?;
    startup::write_run_files(&folder, setup, &plan)?;
    let mut report = report(&folder, resumed)?;
    startup::report_start(&mut report, setup, &options, &folder, &plan)?;
    let graphs = startup::prepare_gpu(&mut report, setup, &options, &plan, &newest)?;
    measure::set_planned_peak(plan.peak.ram_bytes.saturating_sub(setup.process.non_heap));
    // Memory used while the data was prepared does not count for updates.
    measure::take_recent_peak();
    // From here on a signal lets the run finish its update.
    options.signals.begin();
    let mut step = 0;
    let logits = logits.map_or(Ok(None), |logits| logits.open(setup, &options, exec_plan, &mut report));
    let teacher_vram = if missing_bytes > 0 { teacher_logits::end_phase(setup, exec_plan) } else { 0 };
    let context = logits
        .and_then(|logits| RunContext::new(setup, &options, &folder, exec_plan, graphs, logits, &mut report));
    let result = context.and_then(|ctx| {
        let mut memory = MemoryControl::new(plan, backoff, options.pressure_monitor.clone());
        memory.vram_peak = teacher_vram;
        let mut run = Run::new(ctx, memory, &folder);
        let outcome = run.load(newest).and_then(|()| run.train());
        step = run.ctx.position.step;
        outcome
    });
    match &result {
        Ok(_) | Err(Failure::Diverged { .. } | Failure::NotFinite { .. }) => {}
        // The caller reports the failure; recording it in the run directory is best effort.
        Err(failure) => {
            drop(report.record(Event::Failed { step, error: error_chain(failure) }));
            drop(PostMortem::new(setup, exec_plan, failure, options.ram).map(|post| post.write(&folder)));
        }
    }
    report.finish()?;
    let summary = crate::events::Summary::from_events(&folder.events())?;
    summary.write(&folder.summary())?;
    result
}

/// The message of a failure, with its causes.
pub fn error_chain(failure: &Failure) -> String {
    let causes = std::iter::successors(std::error::Error::source(failure), |e| e.source());
    std::iter::once(failure.to_string()).chain(causes.map(|e| e.to_string())).collect::<Vec<_>>().join(": ")
}

/// A run in progress.
struct Run<'a> {
    ctx: RunContext<'a>,
    clock: RunClock,
    memory: MemoryControl,
    evaluation: EvaluationState,
    evaluation_file: PathBuf,
    checkpoints: RunCheckpoints,
    skipped_records: SkippedRecordLog,
    grad_scaler: GradScaler,
    /// Work that waits for an update without overflow.
    deferred: DeferredWork,
    /// The last update overflowed in f16 and was skipped.
    overflowed: bool,
    /// The last update, if the GPU has yet to report its gradient statistics.
    pending_update: Option<PendingUpdate>,
}

/// Work deferred to the next update that does not overflow. A skipped update leaves the weights unchanged, and a
/// checkpoint of them would evict a good one.
#[derive(Clone, Copy, Debug, Default)]
struct DeferredWork {
    evaluation: bool,
    checkpoint: bool,
}

impl<'a> Run<'a> {
    fn new(ctx: RunContext<'a>, memory: MemoryControl, folder: &RunDir) -> Self {
        let checkpoints = RunCheckpoints::new(folder, ctx.setup);
        let f16 = ctx.setup.dtype == DType::F16;
        Self {
            ctx,
            clock: RunClock::start(),
            memory,
            evaluation: EvaluationState::default(),
            evaluation_file: folder.evaluation(),
            checkpoints,
            skipped_records: SkippedRecordLog::default(),
            grad_scaler: if f16 { GradScaler::dynamic() } else { GradScaler::disabled() },
            deferred: DeferredWork::default(),
            overflowed: false,
            pending_update: None,
        }
    }

    fn train(&mut self) -> Result<RunOutcome, Failure> {
        let options = self.ctx.options;
        let restarts = options.restart.as_ref().map_or(0, |restart| restart.restarts);
        let _unreserved = vec![1u8; options.fault_hooks.unreserved_bytes];
        // Nothing was left to do if the run ends where it was resumed, and no evaluation was due there.
        let resumed_at =
            self.checkpoints.last.as_ref().filter(|_| !self.evaluation.due).map(|(step, _)| *step);
        if self.is_evaluated_at_start() {
            self.deferred.evaluation = true;
            self.do_deferred_work()?;
        } else if self.evaluation.due {
            self.evaluate()?;
        } else if options.observer.is_none() && !self.ctx.position.is_at_end() {
            EvaluationState::warm_up(&mut self.ctx, &mut self.memory)?;
        }
        while !self.ctx.position.is_at_end() {
            if let Some(reason) = self.stop_reason() {
                if resumed_at == Some(self.ctx.position.step) {
                    self.report_nothing_left(Some(reason))?;
                }
                return self.stop_early(reason);
            }
            if let Some(signal) = options.signals.stop_requested() {
                self.settle_pending_update()?;
                return self.stop(signal);
            }
            options.fault_hooks.crash_if_due(restarts, self.ctx.position.step);
            self.memory.respond_to_pressure(&mut self.ctx)?;
            self.memory.try_grow(&mut self.ctx)?;
            if self.pending_update.is_none() {
                self.clock.begin_step();
            }
            let update = self.update()?;
            // Report the previous update while the GPU works on this one.
            self.settle_pending_update()?;
            let is_ready = update.grad_stats.is_ready();
            self.pending_update = Some(update);
            let due = self.defer_due_work();
            if is_ready || due {
                self.settle_pending_update()?;
            }
            if due && (self.ctx.position.is_at_end() || !self.overflowed) {
                self.do_deferred_work()?;
            }
        }
        if let Some(signal) = options.signals.stop_requested().filter(|_| self.evaluation.due) {
            return self.stop(signal);
        }
        if resumed_at == Some(self.ctx.position.step) {
            self.report_nothing_left(None)?;
        }
        self.finish()
    }

    /// Reports that the run was resumed for nothing: it was complete, or was to stop.
    fn report_nothing_left(&mut self, stop: Option<StopReason>) -> Result<(), Failure> {
        let (setup, step) = (self.ctx.setup, self.ctx.position.step);
        let (reason, key) = match (stop, self.ctx.options.max_steps) {
            (Some(stop), _) => (self.describe(stop), stop.key()),
            (None, Some(max)) if max < setup.total_steps => (format!("step {step} is done"), "--max-steps"),
            (None, _) => {
                (format!("step {step} of {} is done", setup.total_steps), setup.job.train.length().key())
            }
        };
        self.ctx.record(Event::NothingLeft { step, reason, key: key.into() })
    }

    /// Why the run stops, for people.
    fn describe(&self, reason: StopReason) -> String {
        let job = &self.ctx.setup.job;
        reason.describe(job.stop.metric.unwrap_or(job.checkpoint.best))
    }

    /// Whether the initial weights are due for the evaluation that the job requests. A checkpoint of them, with or
    /// without its result, says that this was begun: a resumed run does not repeat it.
    fn is_evaluated_at_start(&self) -> bool {
        let ctx = &self.ctx;
        let is_new = ctx.position.step == 0 && self.checkpoints.last.is_none() && !ctx.position.is_at_end();
        is_new && ctx.setup.job.eval.at_start && ctx.options.observer.is_none()
    }

    /// Why the run ends before its last update; `None` if it continues.
    fn stop_reason(&self) -> Option<StopReason> {
        let job = &self.ctx.setup.job;
        let metric = job.stop.metric.unwrap_or(job.checkpoint.best);
        self.evaluation.stop.reason(metric, &job.stop, self.clock.elapsed_s())
    }

    /// Adds what is due after the last update to the deferred work; returns whether there is any.
    fn defer_due_work(&mut self) -> bool {
        let (job, step, last) = (&self.ctx.setup.job, self.ctx.position.step, self.ctx.position.is_at_end());
        let evaluates = self.ctx.options.observer.is_none();
        self.deferred.evaluation |= evaluates && (last || self.is_due(job.eval.every(), step));
        self.deferred.checkpoint |= last || self.is_due(job.checkpoint.every(), step);
        self.deferred.evaluation || self.deferred.checkpoint
    }

    fn do_deferred_work(&mut self) -> Result<(), Failure> {
        // Checkpoint before the evaluation, so that a failed evaluation loses nothing.
        self.evaluation.due = std::mem::take(&mut self.deferred).evaluation;
        self.checkpoint()?;
        if self.evaluation.due { self.evaluate() } else { Ok(()) }
    }

    /// Whether an interval is due after update `step`.
    fn is_due(&self, every: Interval, step: u64) -> bool {
        match every {
            Interval::Steps(n) => step.is_multiple_of(n),
            Interval::Epochs(n) => {
                step.is_multiple_of(n.saturating_mul(self.ctx.setup.order.updates_per_epoch()))
            }
            Interval::Minutes(n) => self.clock.minutes_since_checkpoint() >= n,
        }
    }

    /// Evaluates the validation set and adds the result to this step's checkpoint.
    fn evaluate(&mut self) -> Result<(), Failure> {
        let step = self.ctx.position.step;
        // An evaluation that is due only because `--max-steps` ends the process here does not begin a new count: a
        // resumed run reports the same as one that never stopped.
        let continued = !self.is_due(self.ctx.setup.job.eval.every(), step);
        let train_sums = self.evaluation.train_sums;
        let outcome = self.evaluation.run(&mut self.ctx, &mut self.memory, &mut self.skipped_records)?;
        if matches!(outcome, EvaluationOutcome::Abandoned) {
            return Ok(());
        }
        self.ctx.snapshot_memory(SnapshotReason::Evaluation)?;
        if continued {
            self.evaluation.train_sums = train_sums;
        }
        weight_histograms::report(&mut self.ctx)?;
        // Before the checkpoint says that the evaluation is done: a resumed run repeats it otherwise.
        if let Some(detail) = self.evaluation.detail.take() {
            let best = self.evaluation.best.map(|(_, step)| step);
            EvaluationFile::update(&self.evaluation_file, step, detail, best)?;
        }
        self.checkpoints.save_evaluation(&self.state())?;
        let metric = self.ctx.setup.job.checkpoint.best.name();
        match (outcome, &self.checkpoints.last) {
            (EvaluationOutcome::Best(value), Some((step, path))) => {
                let (step, path) = (*step, path.display().to_string());
                self.ctx.record(Event::Best { step, path, metric, value })
            }
            _ => Ok(()),
        }
    }

    fn checkpoint(&mut self) -> Result<(), Failure> {
        self.skipped_records.report(&mut self.ctx, Vec::new())?;
        let state = self.state();
        self.checkpoints.write(&mut self.ctx, state)?;
        self.clock.checkpoint_written();
        Ok(())
    }

    /// Removes checkpoints beyond those to keep.
    fn prune_checkpoints(&mut self) -> Result<(), Failure> {
        let best = self.evaluation.best.map(|(_, step)| step);
        self.checkpoints.prune(self.ctx.setup.job.checkpoint.keep, best)
    }

    /// What a checkpoint holds besides its tensors.
    fn state(&self) -> CheckpointState {
        let (setup, position, plan) = (self.ctx.setup, &self.ctx.position, self.ctx.engine.plan());
        CheckpointState {
            format: FORMAT,
            step: position.step,
            cursor: position.cursor,
            samples: position.samples,
            digest: position.digest,
            seed: setup.job.seed,
            job: setup.job.to_json(),
            data: self.ctx.options.data.clone(),
            optimizer: plan.optimizer,
            plan,
            backoff: self.memory.backoff.clone(),
            best: self.evaluation.best,
            stop: self.evaluation.stop,
            train_sums: self.evaluation.train_sums,
            evaluation_due: self.evaluation.due,
            evaluation_deferred: self.deferred.evaluation,
            grad_scaler: self.grad_scaler,
            skipped_records: self.skipped_records.records.clone(),
            metrics: self.evaluation.metrics.clone(),
            elapsed_s: self.clock.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            written: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64()),
            files: BTreeMap::new(),
        }
    }
}

/// The mean loss; `NaN` if every record was skipped.
pub(in crate::train) fn mean_loss(metric_sums: &MetricSums) -> f64 {
    if metric_sums.weight == 0.0 { f64::NAN } else { metric_sums.mean_loss() }
}

/// The sampling order fixes the number of samples, so a loader that ends early is at fault.
pub fn ended_early() -> DataError {
    DataError::NoSamples { set: "the loader".into(), why: "it ended before the last sample".into() }
}
