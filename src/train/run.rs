//! A run, top to bottom: plan, folder, tensors, the loop, the end.

mod evaluate;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use candle_core::DType;

use super::Failure;
use super::checkpoint::{self, Checkpoints, FORMAT, State};
use super::engine::Engine;
use super::event::{Event, Memory};
use super::folder::{self, Folder, Wish};
use super::retry::{self, Happened, Next};
use super::setup::Setup;
use super::signals::{Signal, Signals};
use crate::data::DataError;
use crate::data::digest::Digest;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::job::{Every, Job, Rung};
use crate::kernels::update::round_into;
use crate::layers::loss::Tally;
use crate::layers::network::StepError;
use crate::memory::estimate::checkpoint_bytes;
use crate::memory::plan::{Plan, Split, Verdict};
use crate::memory::{Ledger, Oom, Reservation, Role, ladder, measure};
use crate::optim::scaling::{self, Scaling};
use crate::optim::schedule;
use crate::report::Reporter;

/// How a run is to be run, beside its job.
pub struct Options {
    pub wish: Wish,
    /// Where runs without a folder of their own go.
    pub runs: PathBuf,
    /// Names a new run.
    pub stamp: String,
    /// Stop after this many updates.
    pub max_steps: Option<u64>,
    /// Host bytes the run may use.
    pub ram: u64,
    /// The ask for memory that fails, counted from 1, for tests of recovery.
    pub fault: Option<u64>,
    pub signals: Signals,
}

/// How a run ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    Stopped(Signal),
}

/// Trains a job. `report` is asked for a reporter once the folder is there, with whether the run goes on
/// from an earlier one.
pub fn fit(
    job: Job,
    options: Options,
    report: impl FnOnce(&Folder, bool) -> Result<Reporter, Failure>,
) -> Result<Ended, Failure> {
    let mut setup = Setup::new(job, options.ram)?;
    let (folder, resumed) = Folder::choose(&options.wish, &setup.job, &options.runs, &options.stamp)?;
    let mut plan = setup.settle(options.ram, resumed.then(|| folder.plan()).as_deref());
    if plan.verdict == Verdict::DoesNotFit {
        return Err(Failure::DoesNotFit(Box::new(plan)));
    }
    let checkpoints = Checkpoints::new(folder.checkpoints());
    let (found, skipped) = if resumed { checkpoints.newest() } else { (None, Vec::new()) };
    if resumed {
        refuse_another_experiment(&folder, &setup.job)?;
        if found.is_none() && !skipped.is_empty() {
            return Err(Failure::NoWholeCheckpoint { folder: folder.checkpoints(), skipped });
        }
        if let Some((state, _)) = &found {
            keep_split(&mut plan, state.micro_batch);
        }
    }
    folder.create(&setup.job)?;
    let text = serde_json::to_vec_pretty(&plan).map_err(std::io::Error::from);
    folder::write(&folder.plan(), &text.map_err(Failure::io("write", folder.plan()))?)?;
    let mut report = report(&folder, resumed)?;
    report.record(started(&setup, &folder))?;
    report.record(Event::Planned { plan: plan.clone() })?;

    let ledger = Ledger::new(options.ram, options.fault);
    let mut step = 0;
    let result =
        Run::new(&setup, &options, folder.checkpoints(), plan, ledger, &mut report).and_then(|mut run| {
            let begun = match resumed {
                true => run.begin(found.is_none()).and_then(|()| run.resume(found, skipped)),
                false => run.begin(true),
            };
            let ended = begun.and_then(|()| run.train());
            step = run.step;
            ended
        });
    match &result {
        Ok(_) | Err(Failure::Diverged { .. }) => {}
        // The failure itself is the caller's to tell; that it is in the events is best effort.
        Err(failure) => drop(report.record(Event::Failed { step, error: describe(failure) })),
    }
    report.finish()?;
    let summary = crate::report::Summary::from_events(&folder.events())?;
    summary.write(&folder.summary())?;
    result
}

fn describe(failure: &Failure) -> String {
    let causes = std::iter::successors(std::error::Error::source(failure), |e| e.source());
    std::iter::once(failure.to_string()).chain(causes.map(|e| e.to_string())).collect::<Vec<_>>().join(": ")
}

fn refuse_another_experiment(folder: &Folder, job: &Job) -> Result<(), Failure> {
    let Ok(before) = Job::load(&folder.job(), &[]) else { return Ok(()) };
    match before.structural_changes(job) {
        changes if changes.is_empty() => Ok(()),
        changes => Err(Failure::Changed(changes)),
    }
}

/// A resumed run keeps the split it had where that fits, so that it equals the undisturbed one to the bit.
fn keep_split(plan: &mut Plan, micro_batch: usize) {
    if micro_batch < plan.chosen.micro_batch && micro_batch > 0 {
        plan.chosen.micro_batch = micro_batch;
        plan.chosen.accumulation_steps = plan.samples_per_update.div_ceil(micro_batch);
    }
}

fn started(setup: &Setup, folder: &Folder) -> Event {
    Event::Started {
        name: setup.job.name.clone(),
        run: folder.root.display().to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        seed: setup.job.seed,
        device: "cpu".into(),
        threads: setup.threads,
        parameters: setup.parameters(),
        train_samples: setup.sets.train.len(),
        valid_samples: setup.sets.valid.len(),
        total_steps: setup.total_steps,
        steps_per_epoch: setup.order.updates_per_epoch(),
    }
}

/// A run under way.
struct Run<'a> {
    setup: &'a Setup,
    options: &'a Options,
    plan: Plan,
    report: &'a mut Reporter,
    engine: Engine<'a>,
    checkpoints: Checkpoints,
    split: Split,
    eval_micro_batch: usize,
    /// Smaller plans taken since the start.
    attempts: u32,
    first_oom: Option<Oom>,
    step: u64,
    cursor: Cursor,
    samples: u64,
    digest: Digest,
    metrics: BTreeMap<String, f64>,
    best: Option<(f64, u64)>,
    scaling: Scaling,
    last_checkpoint: Option<(u64, PathBuf)>,
    clock: Clock,
}

/// Time spent, that before a resume included.
struct Clock {
    begun: Instant,
    before_s: f64,
    data_wait_s: f64,
    last_checkpoint: Instant,
}

/// What an update did.
struct Updated {
    tally: Tally,
    lr: f64,
    grad_norm: f64,
    epoch: u64,
    wait_s: f64,
}

impl<'a> Run<'a> {
    fn new(
        setup: &'a Setup,
        options: &'a Options,
        checkpoints: PathBuf,
        plan: Plan,
        ledger: Ledger,
        report: &'a mut Reporter,
    ) -> Result<Self, Failure> {
        let engine = match Engine::new(setup, ledger.clone(), plan.chosen.recompute) {
            // Nothing is smaller than the weights: all there is to do is to ask once more.
            Err(StepError::Oom(oom)) => {
                report.record(oom_event(0, "start", &oom))?;
                Engine::new(setup, ledger, plan.chosen.recompute)?
            }
            other => other?,
        };
        let split = Split {
            micro_batch: plan.chosen.micro_batch,
            accumulation_steps: plan.chosen.accumulation_steps,
        };
        let now = Instant::now();
        Ok(Self {
            setup,
            options,
            checkpoints: Checkpoints::new(checkpoints),
            eval_micro_batch: plan.chosen.eval_micro_batch,
            plan,
            report,
            engine,
            split,
            attempts: 0,
            first_oom: None,
            step: 0,
            cursor: Cursor::default(),
            samples: 0,
            digest: Digest::default(),
            metrics: BTreeMap::new(),
            best: None,
            scaling: if setup.dtype == DType::F16 { Scaling::dynamic() } else { Scaling::fixed() },
            last_checkpoint: None,
            clock: Clock { begun: now, before_s: 0.0, data_wait_s: 0.0, last_checkpoint: now },
        })
    }

    /// Takes the weights the job begins with, where it names some and none are there yet.
    fn begin(&self, anew: bool) -> Result<(), Failure> {
        let store = &self.engine.store;
        match &self.setup.job.train.init {
            Some(file) if anew => {
                checkpoint::load_named(file, &store.layout.params, &store.master)?;
                // Statistics that the file lacks begin as they always do.
                let _ = checkpoint::load_named(file, &store.layout.stats, &store.stats);
                if let Some(average) = &self.engine.average {
                    round_into(&store.master, average)?;
                }
                Ok(store.round()?)
            }
            _ => Ok(()),
        }
    }

    /// Goes on from a checkpoint, or from the beginning where there is none yet.
    fn resume(&mut self, found: Option<(State, PathBuf)>, skipped: Vec<String>) -> Result<(), Failure> {
        let checkpoint = found.as_ref().map(|(_, path)| path.display().to_string());
        if let Some((state, path)) = found {
            checkpoint::load(&path, &self.engine.held())?;
            self.scaling = state.scaling;
            (self.step, self.cursor, self.samples) = (state.step, state.cursor, state.samples);
            (self.digest, self.best, self.metrics) = (state.digest, state.best, state.metrics);
            (self.clock.before_s, self.clock.data_wait_s) = (state.elapsed_s, state.data_wait_s);
            self.last_checkpoint = Some((state.step, path));
        }
        self.report.record(Event::Resumed { step: self.step, checkpoint, skipped })?;
        Ok(())
    }

    fn train(&mut self) -> Result<Ended, Failure> {
        let until = self.setup.total_steps.min(self.options.max_steps.unwrap_or(u64::MAX));
        let mut loader = self.open(until)?;
        while self.step < until {
            if let Some(signal) = self.options.signals.stop() {
                return self.stop(signal);
            }
            let begun = Instant::now();
            let done = self.update(&mut loader, until)?;
            let last = self.step == until;
            let evaluate = last || self.due(self.setup.job.eval.every());
            if last || evaluate || self.step == 1 || self.step.is_multiple_of(self.setup.job.log.every_steps)
            {
                self.report_step(&done, begun.elapsed().as_secs_f64())?;
            }
            let better = if evaluate { self.evaluate()? } else { false };
            if last || better || self.due(self.setup.job.checkpoint.every()) {
                self.checkpoint(better)?;
            }
        }
        self.finish()
    }

    /// Whether something that happens every so often happens after the update just made.
    fn due(&self, every: Every) -> bool {
        match every {
            Every::Steps(n) => self.step.is_multiple_of(n),
            Every::Epochs(n) => {
                self.step.is_multiple_of(n.saturating_mul(self.setup.order.updates_per_epoch()))
            }
            Every::Minutes(n) => self.clock.last_checkpoint.elapsed().as_secs() >= 60 * n,
        }
    }

    /// Starts to load training samples from the cursor on, in smaller micro-batches where it has to.
    fn open(&mut self, until: u64) -> Result<(Loader, Reservation), Failure> {
        loop {
            match self.loader(until) {
                Ok(loader) => return Ok(loader),
                Err(Tried::Oom(oom)) => self.shrink("start", oom)?,
                Err(Tried::Failed(failure)) => return Err(failure),
            }
        }
    }

    /// The loader of training samples, and the right to what it holds.
    fn loader(&self, until: u64) -> Result<(Loader, Reservation), Tried> {
        let setup = self.setup;
        let micro_batch = self.split.micro_batch.min(setup.sets.train.len() as usize);
        let hold = self.engine.ledger.reserve(Role::DataPipeline, "prefetch", setup.pipeline(micro_batch));
        let hold = hold.map_err(Tried::Oom)?;
        let source = setup.sets.train.clone();
        let (prefetch, workers) = (setup.prefetch, setup.workers);
        let loader = Loader::start(source, setup.order, self.cursor, until, micro_batch, prefetch, workers);
        Ok((loader.map_err(Failure::from)?, hold))
    }

    /// Makes one update, in as many tries as memory makes necessary: each runs the same samples from the
    /// same state, in smaller micro-batches.
    fn update(&mut self, loader: &mut (Loader, Reservation), until: u64) -> Result<Updated, Failure> {
        self.engine.begin()?;
        loop {
            match self.try_update(&mut loader.0) {
                Ok(done) => return Ok(done),
                Err(Tried::Oom(oom)) => {
                    let phase = self.engine.ledger.current_phase();
                    self.shrink(phase, oom)?;
                    self.engine.rewind()?;
                    *loader = self.open(until)?;
                }
                Err(Tried::Failed(failure)) => return Err(failure),
            }
        }
    }

    fn try_update(&mut self, loader: &mut Loader) -> Result<Updated, Tried> {
        let span = self.setup.order.update(self.cursor.update);
        let (mut tally, mut ids, mut wait_s) =
            (Tally::default(), Vec::with_capacity(span.len() as usize), 0.0);
        while (ids.len() as u64) < span.len() {
            let batch = loader.next().map_err(Failure::from)?.ok_or_else(|| Failure::Data(ended_early()))?;
            wait_s += loader.last_wait().as_secs_f64();
            ids.extend_from_slice(&batch.ids);
            tally += self.engine.learn(&batch, self.scaling.factor)?;
        }
        let norm = self.engine.gradient_norm(&tally, self.scaling.factor)?;
        let lr = schedule::lr(
            &self.setup.job.schedule,
            self.setup.job.optimizer.lr(),
            self.step,
            self.setup.total_steps,
        );
        let factor = self.scaling.factor;
        match self.scaling.judge(tally.mean_loss().is_finite() && norm.is_finite()) {
            scaling::Verdict::Diverged => return Err(self.diverged(&tally, norm, span.epoch, ids).into()),
            scaling::Verdict::Skip => self.engine.skip()?,
            scaling::Verdict::Apply => {
                let clip = self.setup.job.train.clip_norm.map_or(1.0, |most| (most / norm).min(1.0));
                let number = self.step + 1 - self.scaling.skipped;
                self.engine.update(&tally, clip, factor, lr, number)?;
            }
        }
        self.step += 1;
        self.samples += span.len();
        self.digest.extend(ids);
        self.cursor = Cursor { update: self.cursor.update + 1, done: 0 };
        self.clock.data_wait_s += wait_s;
        Ok(Updated { tally, lr, grad_norm: norm, epoch: span.epoch, wait_s })
    }

    fn diverged(&mut self, tally: &Tally, norm: f64, epoch: u64, sample_ids: Vec<u64>) -> Failure {
        let value = if tally.mean_loss().is_finite() { norm } else { tally.mean_loss() };
        let checkpoint = self.last_checkpoint.as_ref().map(|(_, path)| path.display().to_string());
        let (step, loss) = (self.step + 1, value.to_string());
        let event =
            Event::Diverged { step, epoch, loss: loss.clone(), sample_ids, checkpoint: checkpoint.clone() };
        match self.report.record(event) {
            Ok(()) => Failure::Diverged { step, loss, checkpoint },
            Err(error) => error.into(),
        }
    }

    /// Takes the next smaller split, or gives up.
    fn shrink(&mut self, phase: &'static str, oom: Oom) -> Result<(), Failure> {
        self.report.record(oom_event(self.step, phase, &oom))?;
        let first = self.first_oom.get_or_insert(oom).clone();
        let happened = Happened {
            attempts: self.attempts,
            max_retries: self.setup.job.memory.max_retries,
            may_shrink: self.setup.may(Rung::Shrink),
            may_recompute: self.setup.may(Rung::Recompute),
            split: self.split,
            recompute: self.engine.recompute,
            blocks: self.setup.network.blocks.len(),
            samples_per_update: self.plan.samples_per_update,
            group: self.setup.network.group(),
        };
        match retry::next(&happened) {
            Next::GiveUp => {
                return Err(Failure::OutOfMemory { attempts: self.attempts, first: Box::new(first) });
            }
            Next::Shrink(split) => self.split = split,
            Next::Recompute => self.engine.recompute = happened.blocks,
        }
        self.attempts += 1;
        Ok(self.report.record(Event::Shrunk {
            step: self.step,
            change: ladder::change(self.split, self.engine.recompute),
            micro_batch: self.split.micro_batch,
            accumulation_steps: self.split.accumulation_steps,
        })?)
    }

    fn report_step(&mut self, done: &Updated, step_s: f64) -> Result<(), Failure> {
        let samples_digest = self.digest.to_string();
        Ok(self.report.record(Event::Step {
            step: self.step,
            epoch: done.epoch,
            loss: done.tally.mean_loss(),
            lr: done.lr,
            grad_norm: done.grad_norm,
            samples: self.samples,
            micro_batch: self.split.micro_batch,
            accumulation_steps: self.split.accumulation_steps,
            step_s,
            data_wait_s: done.wait_s,
            ram_bytes: measure::take_recent_peak(),
            vram_bytes: 0,
            samples_digest,
            loss_scale: self.scaling.factor,
            skipped_updates: self.scaling.skipped,
        })?)
    }

    fn checkpoint(&mut self, best: bool) -> Result<(), Failure> {
        let begun = Instant::now();
        self.engine.ledger.phase("checkpoint");
        let bytes = checkpoint_bytes(&self.setup.layout, self.setup.dtype);
        let ask = || self.engine.ledger.reserve(Role::CheckpointWriting, "checkpoint", bytes);
        let _hold = match ask() {
            Ok(hold) => hold,
            // Between updates nothing else can be given back: all there is to do is to ask once more.
            Err(oom) => {
                self.report.record(oom_event(self.step, "checkpoint", &oom))?;
                ask().map_err(StepError::Oom)?
            }
        };
        let state = State {
            format: FORMAT,
            step: self.step,
            cursor: self.cursor,
            samples: self.samples,
            digest: self.digest,
            seed: self.setup.job.seed,
            micro_batch: self.split.micro_batch,
            best: self.best,
            scaling: self.scaling,
            metrics: self.metrics.clone(),
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            files: BTreeMap::new(),
        };
        let (path, bytes) = self.checkpoints.save(state, &self.engine.held())?;
        self.report.record(Event::Checkpoint {
            step: self.step,
            path: path.display().to_string(),
            bytes,
            write_s: begun.elapsed().as_secs_f64(),
            best,
        })?;
        self.last_checkpoint = Some((self.step, path));
        self.clock.last_checkpoint = Instant::now();
        self.checkpoints.prune(self.setup.job.checkpoint.keep, self.best.map(|(_, step)| step))
    }

    fn elapsed_s(&self) -> f64 {
        self.clock.before_s + self.clock.begun.elapsed().as_secs_f64()
    }

    fn stop(&mut self, signal: Signal) -> Result<Ended, Failure> {
        if self.last_checkpoint.as_ref().is_none_or(|(step, _)| *step != self.step) {
            self.checkpoint(false)?;
        }
        let checkpoint = self.last_checkpoint.as_ref().map(|(_, path)| path.display().to_string());
        self.report.record(Event::Interrupted {
            step: self.step,
            signal: signal.name().into(),
            checkpoint,
        })?;
        Ok(Ended::Stopped(signal))
    }

    fn finish(&mut self) -> Result<Ended, Failure> {
        let mut metrics = self.metrics.clone();
        if let Some((value, _)) = self.best {
            metrics.insert(format!("best.{}", self.setup.job.checkpoint.best.name()), value);
        }
        let per_epoch = self.setup.order.updates_per_epoch();
        self.report.record(Event::Finished {
            steps: self.step,
            epochs: self.step / per_epoch,
            samples: self.samples,
            metrics,
            best_step: self.best.map(|(_, step)| step),
            planned_peak_bytes: Memory { ram: self.plan.peak.ram_bytes, vram: self.plan.peak.vram_bytes },
            measured_peak_bytes: Memory { ram: measure::peak(), vram: 0 },
            budget_bytes: Memory { ram: self.options.ram, vram: 0 },
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            samples_digest: self.digest.to_string(),
        })?;
        Ok(Ended::Done)
    }
}

/// Why an update was not made.
enum Tried {
    Oom(Oom),
    Failed(Failure),
}

impl From<StepError> for Tried {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Oom(oom) => Tried::Oom(oom),
            StepError::Tensor(error) => Tried::Failed(error.into()),
        }
    }
}

impl From<candle_core::Error> for Tried {
    fn from(error: candle_core::Error) -> Self {
        Tried::Failed(error.into())
    }
}

impl From<Failure> for Tried {
    fn from(failure: Failure) -> Self {
        Tried::Failed(failure)
    }
}

/// The order says how many samples there are, so a loader that ends before them is at fault.
fn ended_early() -> DataError {
    DataError::NoSamples { set: "the loader".into(), why: "it ended before the last sample".into() }
}

fn oom_event(step: u64, phase: &str, oom: &Oom) -> Event {
    Event::Oom { step, phase: phase.into(), asker: oom.asker.clone(), bytes: oom.bytes, left: oom.left }
}
