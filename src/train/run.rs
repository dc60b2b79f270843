//! A run, top to bottom: plan, folder, tensors, the loop, the end.

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
use super::event::Event;
use super::fault_injection::FaultHooks;
use super::postmortem::OomAttempt;
use super::retry::{Backoff, RuntimePlan};
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
use crate::job::{Interval, Job};
use crate::kernels::grad_stats::GradStats;
use crate::layers::network::StepError;
use crate::memory::MemoryPlan;
use crate::memory::gpu::GpuDevice;
use crate::memory::measure;
use crate::memory::pressure::{PressureMonitor, PressureReading};
use crate::memory::{InjectedOom, Oom, Reservation};
use crate::optim::grad_scaler::{self, GradScaler};
use crate::optim::schedule;
use crate::params::ParamStore;
use crate::report::Reporter;

use update_error::UpdateError;

/// How a run is to be run, beside its job.
#[derive(Default)]
pub struct RunOptions {
    pub requested: RequestedRun,
    /// Where runs without a folder of their own go.
    pub runs: PathBuf,
    /// Names a new run.
    pub stamp: String,
    /// Stop after this many updates.
    pub max_steps: Option<u64>,
    /// Host bytes the run may use.
    pub ram: u64,
    /// The card that computes, if it is not the CPU.
    pub gpu: Option<Arc<GpuDevice>>,
    /// The process is the run's alone: what it takes beside its heap is measured and planned.
    pub own_process: bool,
    /// The means to open data.
    pub opening: DatasetContext,
    /// Asks for memory that fail, for tests of recovery.
    pub injected_oom: Option<InjectedOom>,
    pub signals: Signals,
    /// Sees what others do to the host's memory.
    pub pressure_monitor: PressureMonitor,
    /// Another process worked on this run and was lost.
    pub restart: Option<RestartInfo>,
    pub fault_hooks: FaultHooks,
    /// The data, where it was looked at.
    pub data: Option<DataFingerprint>,
    /// Resume on other data than the run was trained on.
    pub allow_changed_data: bool,
    /// Looks at the run from inside; a run that is observed judges no validation set.
    pub observer: Option<Arc<dyn Observer>>,
}

/// Looks at every update of a run: how `verify` sees more of it than its events.
pub trait Observer: Send + Sync {
    /// The gradients of update `step` (from 1) are whole and the weights have not moved. `loss` is the mean, and
    /// `factor` turns what is in the store into the gradient of the mean. `requests` of the ledger so far.
    fn on_gradients(
        &self,
        step: u64,
        loss: f64,
        store: &ParamStore,
        factor: f64,
        requests: u64,
    ) -> Result<(), Failure>;

    /// Update `step` was made, of the samples up to `digest`.
    fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure>;
}

/// How a run ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    Done,
    Stopped(Signal),
}

/// Trains a job. `report` is asked for a reporter once the folder is there, with whether the run goes on
/// from an earlier one.
pub fn fit(
    job: Job,
    options: RunOptions,
    report: impl FnOnce(&RunDir, bool) -> Result<Reporter, Failure>,
) -> Result<RunOutcome, Failure> {
    let (folder, resumed) = RunDir::resolve(&options.requested, &job, &options.runs, &options.stamp)?;
    if resumed {
        // What a killed process left half-replaced is whole again before anyone looks for the newest.
        folder.clean()?;
    }
    let before = resumed.then(|| Checkpoints::new(folder.checkpoints()).newest_state()).flatten();
    let startup::PlannedRun { setup, plan, ram, data } = startup::plan_run(job, &options, before.as_ref())?;
    run_plan(&setup, plan, RunOptions { ram, data: Some(data), ..options }, report)
}

/// As [`fit`], in the way the plan says.
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
    // A resumed run keeps the split it had where that fits, so that it equals the undisturbed one to the bit.
    let chosen = RuntimePlan::from_plan(&plan, setup.prefetch);
    let (runtime_plan, backoff) = match found {
        Some((state, _)) => state.descent.clone().resumed(state.way, chosen),
        None => (chosen, Backoff::default()),
    };
    plan.chosen.micro_batch = runtime_plan.micro_batch;
    plan.chosen.accumulation_steps = runtime_plan.accumulation_steps;
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
                // Whoever observes the run sees every reservation of every pass.
                () if options.observer.is_some() => Some("the run is observed"),
                () if !setup.job.memory.graphs => Some("memory.graphs is false"),
                () if !setup.offload.is_empty() => Some("offloaded memory is copied by streams of its own"),
                () => None,
            };
            if let Some(reason) = reason {
                let step = newest.found.as_ref().map_or(0, |(state, _)| state.step);
                report.record(Event::CudaGraphDisabled { step, reason: reason.into() })?;
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
        // The failure itself is the caller's to tell; that it is in the folder is best effort.
        Err(failure) => {
            drop(report.record(Event::Failed { step, error: error_chain(failure) }));
            drop(memory::postmortem(setup, failure, options.ram).map(|post| post.write(&folder)));
        }
    }
    report.finish()?;
    let summary = crate::report::Summary::from_events(&folder.events())?;
    summary.write(&folder.summary())?;
    result
}

/// The message of a failure, its causes included.
pub fn error_chain(failure: &Failure) -> String {
    let causes = std::iter::successors(std::error::Error::source(failure), |e| e.source());
    std::iter::once(failure.to_string()).chain(causes.map(|e| e.to_string())).collect::<Vec<_>>().join(": ")
}

/// A run under way.
struct Run<'a> {
    setup: &'a Setup,
    options: &'a RunOptions,
    plan: MemoryPlan,
    report: &'a mut Reporter,
    engine: Engine<'a>,
    checkpoints: Checkpoints,
    /// How updates and evaluations are run now, and what larger ways were given up.
    runtime_plan: RuntimePlan,
    backoff: Backoff,
    /// Where samples come from; absent until it is asked for again, in another way.
    train_loader: Option<TrainLoader>,
    /// What failed since the last update or evaluation that did not, and the first of it.
    failed_attempts: Vec<OomAttempt>,
    first_oom: Option<Oom>,
    /// Graphs and arenas were let go of for what the device refused.
    graphs_released: bool,
    pressure_monitor: PressureMonitor,
    last_pressure: Option<PressureReading>,
    /// The most bytes measured where tensors are, and updates made, by this process.
    measured: u64,
    vram_peak: u64,
    updates: u64,
    step: u64,
    /// The updates of the run, or as many as were wished for.
    last_step: u64,
    cursor: Cursor,
    samples: u64,
    digest: Digest,
    /// Records that could not be used, and how many of them were told.
    skipped_records: SkippedRecords,
    reported_bad: u64,
    metrics: BTreeMap<String, f64>,
    best: Option<(f64, u64)>,
    grad_scaler: GradScaler,
    last_checkpoint: Option<(u64, PathBuf)>,
    /// The file that gives tokens their meaning, where the data is text.
    tokenizer: Option<PathBuf>,
    /// The weights are at a step whose evaluation is due.
    evaluation_due: bool,
    /// What waits for an update that does not overflow.
    deferred: DeferredWork,
    /// The update made last overflowed in f16 and was skipped.
    overflowed: bool,
    /// The last update whose loss and gradient were finite; the weights before it are good.
    last_finite: u64,
    /// The step of a checkpoint whose next update is not yet known to be finite: until then older ones stay.
    unproven_checkpoint: Option<u64>,
    clock: RunClock,
    data_wait: DataWaitMonitor,
    /// The update made last, where a card has yet to tell what came of it.
    pending_update: Option<PendingUpdate>,
}

/// A loader of training samples, and the right to what it holds.
struct TrainLoader {
    loader: Loader,
    reservation: Reservation,
}

/// What is done after the next update that does not overflow: one that does leaves the weights as they are, and
/// a checkpoint of them would push a good one out.
#[derive(Clone, Copy, Debug, Default)]
struct DeferredWork {
    evaluation: bool,
    checkpoint: bool,
}

/// Time spent, that before a resume included.
struct RunClock {
    started: Instant,
    previous_s: f64,
    data_wait_s: f64,
    last_checkpoint: Instant,
    /// When the last update was over, or what came between it and the next.
    step_started: Instant,
}

/// An update that was made, and what the run was right after it.
struct PendingUpdate {
    grad_stats: UpdateGradStats,
    lr: f64,
    epoch: u64,
    ids: Vec<u64>,
    step: u64,
    samples: u64,
    digest: Digest,
    runtime_plan: RuntimePlan,
    wait_s: f64,
}

impl<'a> Run<'a> {
    fn new(
        setup: &'a Setup,
        options: &'a RunOptions,
        folder: &RunDir,
        plan: MemoryPlan,
        (runtime_plan, backoff): (RuntimePlan, Backoff),
        (ledgers, graphs): (Ledgers, bool),
        report: &'a mut Reporter,
    ) -> Result<Self, Failure> {
        let engine = match Engine::new(setup, ledgers.clone(), runtime_plan.recompute, graphs) {
            // Nothing is smaller than the weights: all there is to do is to ask once more.
            Err(StepError::Oom(oom)) => {
                report.record(record::oom_event(0, &oom))?;
                Engine::new(setup, ledgers, runtime_plan.recompute, graphs)?
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
            // While a card works on this one, what came of the one before is told.
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
                // Before the evaluation, so that one that fails costs nothing.
                self.evaluation_due = deferred.evaluation;
                self.checkpoint()?;
                if deferred.evaluation {
                    self.evaluate()?;
                }
            }
        }
        self.finish()
    }

    /// Whether something that happens every so often happens after the update just made.
    fn due(&self, every: Interval) -> bool {
        self.due_at(every, self.step)
    }

    /// As [`due`](Self::due), after an earlier one.
    fn due_at(&self, every: Interval, step: u64) -> bool {
        match every {
            Interval::Steps(n) => step.is_multiple_of(n),
            Interval::Epochs(n) => {
                step.is_multiple_of(n.saturating_mul(self.setup.order.updates_per_epoch()))
            }
            Interval::Minutes(n) => self.clock.last_checkpoint.elapsed().as_secs() >= 60 * n,
        }
    }

    /// Makes one update, in as many tries as memory makes necessary: each runs the same samples from the
    /// same state, in a way that needs less.
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
                    // Best effort: this failure is the one to tell.
                    drop(self.settle_pending_update());
                    return Err(failure);
                }
            }
        }
    }

    /// `train_loader` is kept if the update is made.
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
        // Who looks at gradients, or lets their scale follow from them, has to see them before the next update.
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
            // A card that finds them not finite leaves the weights as they are.
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

    /// What is to be done with gradients that are known; whoever observes the run is shown them.
    fn check_gradients(&mut self, stats: &GradStats) -> Result<grad_scaler::StepDecision, Failure> {
        // Where all records were left out there is nothing to learn: the weights stay, and the update counts.
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

    /// Waits for what came of the update made last, and tells it.
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

/// The order says how many samples there are, so a loader that ends before them is at fault.
fn ended_early() -> DataError {
    DataError::NoSamples { set: "the loader".into(), why: "it ended before the last sample".into() }
}
