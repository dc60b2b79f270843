//! A run, top to bottom: plan, run directory, tensors, training loop, end.

mod evaluate;
mod memory;
mod record;
mod startup;
mod update_error;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;

use super::Failure;
use super::checkpoint::{Checkpoints, NewestCheckpoint};
use super::data_wait::DataWaitMonitor;
use super::engine::{Engine, Ledgers, UpdateGradStats};
use super::fault_injection::FaultHooks;
use super::no_graph::NoGraph;
use super::postmortem::OomAttempt;
use super::retry::Backoff;
use super::run_dir::{self, RequestedRun, RunDir};
use super::setup::Setup;
use super::signals::{Signal, Signals};
use super::supervisor::RestartInfo;
use crate::data::bad_records::{DatasetSplit, SkippedRecords};
use crate::data::digest::Digest;
use crate::data::fingerprint::DataFingerprint;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::data::{DataError, DatasetContext};
use crate::events::Reporter;
use crate::events::event::Event;
use crate::graph::network::StepError;
use crate::job::{Interval, Job};
use crate::kernels::grad_stats::GradStats;
use crate::memory::gpu::GpuDevice;
use crate::memory::measure;
use crate::memory::pressure::{PressureMonitor, PressureReading};
use crate::memory::{InjectedOom, Oom, RefusedBy, Reservation};
use crate::optim::grad_scaler::{self, GradScaler};
use crate::optim::schedule;
use crate::param_store::ParamStore;
use crate::planner::{ExecutionPlan, MemoryPlan};

use update_error::UpdateError;

/// Options of a run beyond its job.
#[derive(Default)]
pub struct RunOptions {
    pub requested: RequestedRun,
    /// Parent directory of runs without an explicit run directory.
    pub runs: PathBuf,
    /// Timestamp that names a new run.
    pub stamp: String,
    /// Stop after this many updates.
    pub max_steps: Option<u64>,
    /// Host memory budget, in bytes.
    pub ram: u64,
    /// The GPU that computes; `None` for the CPU.
    pub gpu: Option<Arc<GpuDevice>>,
    /// The process serves this run alone, so its memory outside the heap is measured and planned.
    pub own_process: bool,
    /// Context for opening the data.
    pub opening: DatasetContext,
    /// Reservations to fail, for tests of recovery.
    pub injected_oom: Option<InjectedOom>,
    pub signals: Signals,
    /// Watches the host memory that other processes leave.
    pub pressure_monitor: PressureMonitor,
    /// Set if a previous worker process of this run died.
    pub restart: Option<RestartInfo>,
    pub fault_hooks: FaultHooks,
    /// Fingerprint of the data, if it was computed.
    pub data: Option<DataFingerprint>,
    /// Permits resuming on data that differs from what the run was trained on.
    pub allow_changed_data: bool,
    /// Observes the run from inside. An observed run skips evaluation.
    pub observer: Option<Arc<dyn Observer>>,
}

/// Sees every update of a run: gives `verify` gradients and weights, which events do not carry.
pub trait Observer: Send + Sync {
    /// Called when the gradients of update `step` (from 1) are complete and the weights have not moved. `loss` is the
    /// mean; the stored gradients times `factor` are the gradient of that mean; `requests` counts the ledger's
    /// reservations so far.
    fn on_gradients(
        &self,
        step: u64,
        loss: f64,
        store: &ParamStore,
        factor: f64,
        requests: u64,
    ) -> Result<(), Failure>;

    /// Called after update `step`. `digest` covers the ids of all samples so far.
    fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure>;
}

/// How a run ended, other than by failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    Done,
    Stopped(Signal),
}

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
    let checkpoints = Checkpoints::new(folder.checkpoints());
    let mut newest = if resumed { checkpoints.newest() } else { NewestCheckpoint::default() };
    if resumed {
        if newest.found.is_none() && !newest.skipped.is_empty() {
            let skipped = newest.skipped;
            return Err(Failure::NoWholeCheckpoint { folder: folder.checkpoints(), skipped });
        }
        let found = newest.found.as_ref().map(|(state, _)| state);
        startup::check_same_experiment(&folder, found, &setup.job, &options)?;
        newest.skipped.extend(startup::damaged_event_lines(&folder));
    } else if options.requested.resume.is_some() {
        newest.skipped.push(format!("{}: there is no run to resume", folder.root.display()));
    }
    let found = &newest.found;
    // A resumed run keeps its split if that fits, so that it is bitwise identical to an uninterrupted run.
    let (runtime_plan, backoff) = match found {
        Some((state, _)) => state.descent.clone().resumed(state.way, plan.chosen),
        None => (plan.chosen, Backoff::default()),
    };
    plan.chosen = plan.chosen.with_split(runtime_plan.split());
    startup::check_disk_space(&folder, &plan, &checkpoints)?;
    folder.create(&setup.job)?;
    if let Some(tokenizer) = setup.datasets.train.tokenizer_json() {
        run_dir::write_atomic(&folder.tokenizer(), &tokenizer)?;
    }
    let text = serde_json::to_vec_pretty(&plan).map_err(std::io::Error::from);
    run_dir::write_atomic(&folder.plan(), &text.map_err(Failure::io("write", folder.plan()))?)?;
    let mut report = report(&folder, resumed)?;
    report.record(startup::started_event(setup, &folder))?;
    if let Some(RestartInfo { restarts, cause, .. }) = &options.restart {
        let (restarts, cause) = (*restarts, cause.clone());
        report.record(Event::Restarted { restarts, cause, budget: options.ram })?;
    }
    report.record(Event::Planned { plan: plan.clone() })?;

    let graphs = match &setup.gpu {
        Some(gpu) => {
            gpu.preallocate(plan.peak.vram_bytes);
            let reason = match () {
                // The observer must see every reservation of every pass, and a replayed graph makes none.
                () if options.observer.is_some() => Some(NoGraph::Observed),
                () if !setup.job.memory.graphs => Some(NoGraph::TurnedOff),
                () if !plan.chosen.offload.is_empty() => Some(NoGraph::Offloaded),
                () => None,
            };
            if let Some(reason) = &reason {
                let step = newest.found.as_ref().map_or(0, |(state, _)| state.step);
                report.record(Event::CudaGraphDisabled { step, reason: reason.to_string() })?;
            }
            reason.is_none()
        }
        None => false,
    };
    measure::set_planned_peak(plan.peak.ram_bytes.saturating_sub(setup.process.non_heap));
    let ledgers = Ledgers::new(setup, options.ram, options.injected_oom.clone());
    let mut step = 0;
    let result =
        Run::new(setup, &options, &folder, plan, (runtime_plan, backoff), (ledgers, graphs), &mut report)
            .and_then(|mut run| {
                let started = match options.requested.resume.is_some() {
                    true => {
                        run.load_initial_weights(newest.found.is_none()).and_then(|()| run.resume(newest))
                    }
                    false => run.load_initial_weights(true),
                };
                let outcome = started.and_then(|()| run.train());
                step = run.step;
                outcome
            });
    match &result {
        Ok(_) | Err(Failure::Diverged { .. } | Failure::NotFinite { .. }) => {}
        // The caller reports the failure; recording it in the run directory is best effort.
        Err(failure) => {
            drop(report.record(Event::Failed { step, error: error_chain(failure) }));
            drop(
                memory::postmortem(setup, runtime_plan, failure, options.ram).map(|post| post.write(&folder)),
            );
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
    setup: &'a Setup,
    options: &'a RunOptions,
    plan: MemoryPlan,
    report: &'a mut Reporter,
    engine: Engine<'a>,
    checkpoints: Checkpoints,
    /// The runtime plan in force, and the larger plans given up.
    runtime_plan: ExecutionPlan,
    backoff: Backoff,
    /// The training loader; `None` until the next update opens one, as after a change of plan.
    train_loader: Option<TrainLoader>,
    /// OOM attempts since the last successful update or evaluation, and the first of them.
    failed_attempts: Vec<OomAttempt>,
    first_oom: Option<Oom>,
    /// CUDA graphs and arenas were already freed in response to a device OOM.
    graphs_released: bool,
    pressure_monitor: PressureMonitor,
    last_pressure: Option<PressureReading>,
    /// Peak bytes measured on the compute device, and updates applied, by this process.
    measured: u64,
    vram_peak: u64,
    updates: u64,
    step: u64,
    /// The last update of the run, or of `--max-steps`.
    last_step: u64,
    cursor: Cursor,
    samples: u64,
    digest: Digest,
    /// Bad records skipped, and how many of them were reported.
    skipped_records: SkippedRecords,
    reported_bad: u64,
    metrics: BTreeMap<String, f64>,
    best: Option<(f64, u64)>,
    grad_scaler: GradScaler,
    last_checkpoint: Option<(u64, PathBuf)>,
    /// The tokenizer file, if the data is text.
    tokenizer: Option<PathBuf>,
    /// The current weights are due for an evaluation.
    evaluation_due: bool,
    /// Work that waits for an update without overflow.
    deferred: DeferredWork,
    /// The last update overflowed in f16 and was skipped.
    overflowed: bool,
    /// The last update with finite loss and gradient; the weights before it are good.
    last_finite: u64,
    /// Step of a checkpoint whose next update is not yet known to be finite. Older checkpoints stay until it is.
    unproven_checkpoint: Option<u64>,
    clock: RunClock,
    data_wait: DataWaitMonitor,
    /// The last update, if the GPU has yet to report its gradient statistics.
    pending_update: Option<PendingUpdate>,
}

/// A training loader, and the reservation of its buffers.
struct TrainLoader {
    loader: Loader,
    reservation: Reservation,
}

/// Work deferred to the next update that does not overflow. A skipped update leaves the weights unchanged, and a
/// checkpoint of them would evict a good one.
#[derive(Clone, Copy, Debug, Default)]
struct DeferredWork {
    evaluation: bool,
    checkpoint: bool,
}

/// Time spent, including sessions before a resume.
struct RunClock {
    started: Instant,
    previous_s: f64,
    data_wait_s: f64,
    last_checkpoint: Instant,
    /// End of the last update, or of what followed it.
    step_started: Instant,
}

/// An applied update, with a snapshot of the run right after it.
struct PendingUpdate {
    grad_stats: UpdateGradStats,
    lr: f64,
    epoch: u64,
    ids: Vec<u64>,
    step: u64,
    samples: u64,
    digest: Digest,
    runtime_plan: ExecutionPlan,
    wait_s: f64,
}

impl<'a> Run<'a> {
    fn new(
        setup: &'a Setup,
        options: &'a RunOptions,
        folder: &RunDir,
        plan: MemoryPlan,
        (runtime_plan, backoff): (ExecutionPlan, Backoff),
        (ledgers, graphs): (Ledgers, bool),
        report: &'a mut Reporter,
    ) -> Result<Self, Failure> {
        let engine = match Engine::new(setup, ledgers.clone(), runtime_plan, graphs) {
            // There is no smaller plan for the weights themselves: retry once as is.
            Err(StepError::Oom(oom)) => {
                report.record(record::oom_event(0, &oom))?;
                if oom.refused_by == RefusedBy::Driver {
                    setup.gpu.iter().for_each(|gpu| gpu.release_free_chunks());
                }
                Engine::new(setup, ledgers, runtime_plan, graphs)?
            }
            other => other?,
        };
        let now = Instant::now();
        Ok(Self {
            setup,
            options,
            checkpoints: Checkpoints::new(folder.checkpoints()),
            plan,
            report,
            engine,
            runtime_plan,
            backoff,
            train_loader: None,
            failed_attempts: Vec::new(),
            first_oom: None,
            graphs_released: false,
            pressure_monitor: options.pressure_monitor.clone(),
            last_pressure: None,
            measured: 0,
            vram_peak: 0,
            updates: 0,
            step: 0,
            last_step: setup.total_steps.min(options.max_steps.unwrap_or(u64::MAX)),
            cursor: Cursor::default(),
            samples: 0,
            digest: Digest::default(),
            skipped_records: SkippedRecords::default(),
            reported_bad: 0,
            metrics: BTreeMap::new(),
            best: None,
            grad_scaler: if setup.dtype == DType::F16 {
                GradScaler::dynamic()
            } else {
                GradScaler::disabled()
            },
            last_checkpoint: None,
            tokenizer: (setup.tokenizer_bytes > 0).then(|| folder.tokenizer()),
            evaluation_due: false,
            deferred: DeferredWork::default(),
            overflowed: false,
            last_finite: 0,
            unproven_checkpoint: None,
            clock: RunClock {
                started: now,
                previous_s: 0.0,
                data_wait_s: 0.0,
                last_checkpoint: now,
                step_started: now,
            },
            data_wait: DataWaitMonitor::default(),
            pending_update: None,
        })
    }

    fn train(&mut self) -> Result<RunOutcome, Failure> {
        let _unreserved = vec![1u8; self.options.fault_hooks.unreserved_bytes];
        if self.evaluation_due {
            self.evaluate()?;
        } else if self.options.observer.is_none() && self.step < self.last_step {
            self.warm_up_evaluation()?;
        }
        while self.step < self.last_step {
            if let Some(signal) = self.options.signals.stop_requested() {
                self.settle_pending_update()?;
                return self.stop(signal);
            }
            self.options
                .fault_hooks
                .crash_if_due(self.options.restart.as_ref().map_or(0, |r| r.restarts), self.step);
            self.respond_to_pressure()?;
            self.try_grow()?;
            if self.pending_update.is_none() {
                self.clock.step_started = Instant::now();
            }
            let update = self.update()?;
            // Report the previous update while the GPU works on this one.
            self.settle_pending_update()?;
            let is_ready = update.grad_stats.is_ready();
            self.pending_update = Some(update);
            let last = self.step == self.last_step;
            let evaluates = self.options.observer.is_none();
            self.deferred.evaluation |= evaluates && (last || self.due(self.setup.job.eval.every()));
            self.deferred.checkpoint |= last || self.due(self.setup.job.checkpoint.every());
            let due = self.deferred.evaluation || self.deferred.checkpoint;
            if is_ready || due {
                self.settle_pending_update()?;
            }
            if due && (last || !self.overflowed) {
                let deferred = std::mem::take(&mut self.deferred);
                // Checkpoint before the evaluation, so that a failed evaluation loses nothing.
                self.evaluation_due = deferred.evaluation;
                self.checkpoint()?;
                if deferred.evaluation {
                    self.evaluate()?;
                }
            }
        }
        self.finish()
    }

    /// Whether an interval is due after the last update.
    fn due(&self, every: Interval) -> bool {
        self.due_at(every, self.step)
    }

    /// As [`due`](Self::due), for an earlier step.
    fn due_at(&self, every: Interval, step: u64) -> bool {
        match every {
            Interval::Steps(n) => step.is_multiple_of(n),
            Interval::Epochs(n) => {
                step.is_multiple_of(n.saturating_mul(self.setup.order.updates_per_epoch()))
            }
            Interval::Minutes(n) => self.clock.last_checkpoint.elapsed().as_secs() >= 60 * n,
        }
    }

    /// Applies one update. After an OOM it retries the same samples from the same state under a smaller plan.
    fn update(&mut self) -> Result<PendingUpdate, Failure> {
        self.engine.begin_update()?;
        let grad_scaler = self.grad_scaler;
        loop {
            match self.take_train_loader().and_then(|train_loader| self.try_update(train_loader)) {
                Ok(update) => {
                    self.reset_retries();
                    self.backoff.record_update();
                    self.updates += 1;
                    if let Some(event) = self.engine.take_capture_event(self.step - 1) {
                        self.report.record(event)?;
                    }
                    return Ok(update);
                }
                Err(UpdateError::Oom(oom)) => {
                    self.settle_pending_update()?;
                    self.shrink_after_oom(oom)?;
                    self.engine.rollback_update()?;
                    self.grad_scaler = grad_scaler;
                }
                Err(UpdateError::Failed(failure)) => {
                    // Best effort: report this failure, not one from settling the previous update.
                    drop(self.settle_pending_update());
                    return Err(failure);
                }
            }
        }
    }

    /// Keeps `train_loader` for the next update on success.
    fn try_update(&mut self, mut train_loader: TrainLoader) -> Result<PendingUpdate, UpdateError> {
        let span = self.setup.order.update(self.cursor.update);
        let (mut pending_sums, mut ids, mut wait_s) =
            (Vec::new(), Vec::with_capacity(span.len() as usize), 0.0);
        let (mut taken, mut bad) = (0, Vec::new());
        while taken < span.len() {
            let batch = train_loader.loader.next().map_err(|error| self.map_data_error(error))?;
            let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
            wait_s += train_loader.loader.last_wait().as_secs_f64();
            taken += batch.consumed;
            ids.extend_from_slice(&batch.ids);
            bad.extend_from_slice(&batch.bad_records);
            if !batch.ids.is_empty() {
                pending_sums.push(self.engine.forward_backward(&batch, self.grad_scaler.factor)?);
            }
        }
        // An observer, or a dynamic loss scale, needs the statistics before the next update.
        let now = self.options.observer.is_some() || self.grad_scaler.is_dynamic();
        let grad_stats = self.engine.compute_grad_stats(&pending_sums, self.grad_scaler.factor, now)?;
        let (skipped_records, reported) = self.count_bad_records(DatasetSplit::Train, span.epoch, &bad)?;
        let lr = schedule::lr(
            &self.setup.job.schedule,
            self.setup.job.optimizer.lr(),
            self.step,
            self.setup.total_steps,
        );
        let decision = match &grad_stats {
            UpdateGradStats::Ready(stats) => self.check_gradients(stats)?,
            // The GPU kernel itself skips an update whose gradients are not finite.
            #[cfg(feature = "cuda")]
            UpdateGradStats::Pending(_) => grad_scaler::StepDecision::Apply,
        };
        match decision {
            grad_scaler::StepDecision::Diverged => {
                let step = self.step + 1;
                return Err(self.divergence_failure(&grad_stats.read()?, step, span.epoch, ids).into());
            }
            grad_scaler::StepDecision::Skip => self.engine.discard_gradients()?,
            grad_scaler::StepDecision::Apply => {
                let number = self.step + 1 - self.grad_scaler.skipped;
                self.engine.update(&grad_stats, lr, number)?;
            }
        }
        self.train_loader = Some(train_loader);
        self.step += 1;
        self.samples += ids.len() as u64;
        self.skipped_records = skipped_records;
        self.report_bad_records(&reported)?;
        self.digest.extend(ids.iter().copied());
        self.cursor = Cursor { update: self.cursor.update + 1, done: 0 };
        self.clock.data_wait_s += wait_s;
        if let Some(observer) = &self.options.observer {
            observer.on_update(self.step, &self.engine.store, self.digest)?;
        }
        let (epoch, step, samples, digest, runtime_plan) =
            (span.epoch, self.step, self.samples, self.digest, self.runtime_plan);
        Ok(PendingUpdate { grad_stats, lr, epoch, ids, step, samples, digest, runtime_plan, wait_s })
    }

    /// Decides what to do with known gradient statistics, and shows them to the observer.
    fn check_gradients(&mut self, stats: &GradStats) -> Result<grad_scaler::StepDecision, Failure> {
        // If every record was skipped there is nothing to learn: the weights stay, but the update counts.
        if stats.metrics.weight == 0.0 {
            self.overflowed = false;
            return Ok(grad_scaler::StepDecision::Skip);
        }
        if let Some(observer) = &self.options.observer {
            let (engine, loss) = (&self.engine, stats.metrics.mean_loss());
            let factor = engine.terms(self.grad_scaler.factor).mean_factor(&stats.metrics);
            observer.on_gradients(
                self.step + 1,
                loss,
                &engine.store,
                factor,
                engine.ledger.request_count(),
            )?;
        }
        let skipped = self.grad_scaler.skipped;
        let decision = self.grad_scaler.update(stats.is_finite());
        self.overflowed = self.grad_scaler.skipped > skipped;
        Ok(decision)
    }

    /// Waits for the statistics of the last update and reports it.
    fn settle_pending_update(&mut self) -> Result<(), Failure> {
        let Some(update) = self.pending_update.take() else { return Ok(()) };
        let stats = update.grad_stats.read()?;
        let step_s = self.clock.step_started.elapsed().as_secs_f64();
        self.clock.step_started = Instant::now();
        if !stats.is_finite() && !self.grad_scaler.is_dynamic() {
            return Err(self.divergence_failure(&stats, update.step, update.epoch, update.ids));
        }
        if stats.is_finite() {
            self.last_finite = update.step;
            if self.unproven_checkpoint.is_some_and(|step| step < update.step) {
                self.prune()?;
            }
        }
        self.report_data_wait(step_s, update.wait_s)?;
        let (last, log) = (update.step == self.last_step, self.setup.job.log.every_steps);
        let evaluates =
            self.options.observer.is_none() && self.due_at(self.setup.job.eval.every(), update.step);
        if last || evaluates || update.step == 1 || update.step.is_multiple_of(log) {
            self.report_step(&update, &stats, step_s)?;
            self.correct_budget()?;
        }
        Ok(())
    }
}

/// The sampling order fixes the number of samples, so a loader that ends early is at fault.
fn ended_early() -> DataError {
    DataError::NoSamples { set: "the loader".into(), why: "it ended before the last sample".into() }
}
