//! A run, top to bottom: plan, folder, tensors, the loop, the end.

mod begin;
mod evaluate;
mod memory;
mod record;
mod tried;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;

use super::Failure;
use super::checkpoint::{Checkpoints, Newest};
use super::engine::{Engine, Finding, Ledgers};
use super::event::Event;
use super::folder::{self, Folder, Wish};
use super::hooks::Hooks;
use super::postmortem::Attempt;
use super::retry::{Descent, Way};
use super::setup::Setup;
use super::signals::{Signal, Signals};
use super::supervisor::Restart;
use super::waiting::Waiting;
use crate::data::bad::{LeftOut, Set};
use crate::data::digest::Digest;
use crate::data::fingerprint::DataFingerprint;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::data::{DataError, Opening};
use crate::job::{Every, Job};
use crate::kernels::judge::Judged;
use crate::layers::network::StepError;
use crate::memory::Plan;
use crate::memory::card::Card;
use crate::memory::measure;
use crate::memory::pressure::{Reading, Watch};
use crate::memory::{Fault, Oom, Reservation};
use crate::optim::scaling::{self, Scaling};
use crate::optim::schedule;
use crate::params::Store;
use crate::report::Reporter;

use tried::Tried;

/// How a run is to be run, beside its job.
#[derive(Default)]
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
    /// The card that computes, if it is not the CPU.
    pub card: Option<Arc<Card>>,
    /// The process is the run's alone: what it takes beside its heap is measured and planned.
    pub own_process: bool,
    /// The means to open data.
    pub opening: Opening,
    /// Asks for memory that fail, for tests of recovery.
    pub fault: Option<Fault>,
    pub signals: Signals,
    /// Sees what others do to the host's memory.
    pub watch: Watch,
    /// Another process worked on this run and was lost.
    pub restart: Option<Restart>,
    pub hooks: Hooks,
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
    /// `factor` turns what is in the store into the gradient of the mean. `asks` of the ledger so far.
    fn gradients(&self, step: u64, loss: f64, store: &Store, factor: f64, asks: u64) -> Result<(), Failure>;

    /// Update `step` was made, of the samples up to `digest`.
    fn updated(&self, step: u64, store: &Store, digest: Digest) -> Result<(), Failure>;
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
    let (folder, resumed) = Folder::choose(&options.wish, &job, &options.runs, &options.stamp)?;
    if resumed {
        // What a killed process left half-replaced is whole again before anyone looks for the newest.
        folder.clean()?;
    }
    let before = resumed.then(|| Checkpoints::new(folder.checkpoints()).newest_state()).flatten();
    let begin::Planned { setup, plan, ram, data } = begin::planned(job, &options, before.as_ref())?;
    follow(&setup, plan, Options { ram, data: Some(data), ..options }, report)
}

/// As [`fit`], in the way the plan says.
pub fn follow(
    setup: &Setup,
    mut plan: Plan,
    options: Options,
    report: impl FnOnce(&Folder, bool) -> Result<Reporter, Failure>,
) -> Result<Ended, Failure> {
    let (folder, resumed) = Folder::choose(&options.wish, &setup.job, &options.runs, &options.stamp)?;
    let checkpoints = Checkpoints::new(folder.checkpoints());
    let mut newest = if resumed { checkpoints.newest() } else { Newest::default() };
    if resumed {
        if newest.found.is_none() && !newest.skipped.is_empty() {
            let skipped = newest.skipped;
            return Err(Failure::NoWholeCheckpoint { folder: folder.checkpoints(), skipped });
        }
        let found = newest.found.as_ref().map(|(state, _)| state);
        begin::refuse_another_experiment(&folder, found, &setup.job, &options)?;
        newest.skipped.extend(begin::damaged_events(&folder));
    } else if options.wish.resume.is_some() {
        newest.skipped.push(format!("{}: there is no run to resume", folder.root.display()));
    }
    let found = &newest.found;
    // A resumed run keeps the split it had where that fits, so that it equals the undisturbed one to the bit.
    let chosen = Way::chosen(&plan, setup.prefetch);
    let (way, descent) = match found {
        Some((state, _)) => state.descent.clone().resumed(state.way, chosen),
        None => (chosen, Descent::default()),
    };
    plan.chosen.micro_batch = way.micro_batch;
    plan.chosen.accumulation_steps = way.accumulation_steps;
    begin::refuse_a_full_disk(&folder, &plan, &checkpoints)?;
    folder.create(&setup.job)?;
    if let Some(tokenizer) = setup.sets.train.tokenizer() {
        folder::write(&folder.tokenizer(), &tokenizer)?;
    }
    let text = serde_json::to_vec_pretty(&plan).map_err(std::io::Error::from);
    folder::write(&folder.plan(), &text.map_err(Failure::io("write", folder.plan()))?)?;
    let mut report = report(&folder, resumed)?;
    report.record(begin::started(setup, &folder))?;
    if let Some(Restart { restarts, cause, .. }) = &options.restart {
        let (restarts, cause) = (*restarts, cause.clone());
        report.record(Event::Restarted { restarts, cause, budget: options.ram })?;
    }
    report.record(Event::Planned { plan: plan.clone() })?;

    let graphs = match &setup.card {
        Some(card) => {
            card.claim(plan.peak.vram_bytes);
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
    measure::set_planned(plan.peak.ram_bytes.saturating_sub(setup.process.beside_heap));
    let ledgers = Ledgers::new(setup, options.ram, options.fault.clone());
    let mut step = 0;
    let result = Run::new(setup, &options, &folder, plan, (way, descent), (ledgers, graphs), &mut report)
        .and_then(|mut run| {
            let begun = match options.wish.resume.is_some() {
                true => run.begin(newest.found.is_none()).and_then(|()| run.resume(newest)),
                false => run.begin(true),
            };
            let ended = begun.and_then(|()| run.train());
            step = run.step;
            ended
        });
    match &result {
        Ok(_) | Err(Failure::Diverged { .. } | Failure::NotFinite { .. }) => {}
        // The failure itself is the caller's to tell; that it is in the folder is best effort.
        Err(failure) => {
            drop(report.record(Event::Failed { step, error: describe(failure) }));
            drop(memory::postmortem(setup, failure, options.ram).map(|post| post.write(&folder)));
        }
    }
    report.finish()?;
    let summary = crate::report::Summary::from_events(&folder.events())?;
    summary.write(&folder.summary())?;
    result
}

/// The message of a failure, its causes included.
pub fn describe(failure: &Failure) -> String {
    let causes = std::iter::successors(std::error::Error::source(failure), |e| e.source());
    std::iter::once(failure.to_string()).chain(causes.map(|e| e.to_string())).collect::<Vec<_>>().join(": ")
}

/// A run under way.
struct Run<'a> {
    setup: &'a Setup,
    options: &'a Options,
    plan: Plan,
    report: &'a mut Reporter,
    engine: Engine<'a>,
    checkpoints: Checkpoints,
    /// How updates and evaluations are run now, and what larger ways were given up.
    way: Way,
    descent: Descent,
    /// Where samples come from; absent until it is asked for again, in another way.
    feed: Option<Feed>,
    /// What failed since the last update or evaluation that did not, and the first of it.
    tried: Vec<Attempt>,
    first_oom: Option<Oom>,
    /// Graphs and arenas were let go of for what the device refused.
    released: bool,
    watch: Watch,
    reading: Option<Reading>,
    /// The most bytes measured where tensors are, and updates made, by this process.
    measured: u64,
    vram_peak: u64,
    updates: u64,
    step: u64,
    /// The updates of the run, or as many as were wished for.
    until: u64,
    cursor: Cursor,
    samples: u64,
    digest: Digest,
    /// Records that could not be used, and how many of them were told.
    left_out: LeftOut,
    told_bad: u64,
    metrics: BTreeMap<String, f64>,
    best: Option<(f64, u64)>,
    scaling: Scaling,
    last_checkpoint: Option<(u64, PathBuf)>,
    /// The file that gives tokens their meaning, where the data is text.
    tokenizer: Option<PathBuf>,
    /// The weights are at a step whose evaluation is due.
    evaluation_due: bool,
    /// What waits for an update that does not overflow.
    owed: Owed,
    /// The update made last overflowed in f16 and was skipped.
    overflowed: bool,
    /// The last update whose loss and gradient were finite; the weights before it are good.
    last_finite: u64,
    /// The step of a checkpoint whose next update is not yet known to be finite: until then older ones stay.
    unproven: Option<u64>,
    clock: Clock,
    waiting: Waiting,
    /// The update made last, where a card has yet to tell what came of it.
    made: Option<Made>,
}

/// A loader of training samples, and the right to what it holds.
struct Feed {
    loader: Loader,
    hold: Reservation,
}

/// What is done after the next update that does not overflow: one that does leaves the weights as they are, and
/// a checkpoint of them would push a good one out.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    evaluation: bool,
    checkpoint: bool,
}

/// Time spent, that before a resume included.
struct Clock {
    begun: Instant,
    before_s: f64,
    data_wait_s: f64,
    last_checkpoint: Instant,
    /// When the last update was over, or what came between it and the next.
    settled: Instant,
}

/// An update that was made, and what the run was right after it.
struct Made {
    finding: Finding,
    lr: f64,
    epoch: u64,
    ids: Vec<u64>,
    step: u64,
    samples: u64,
    digest: Digest,
    way: Way,
    wait_s: f64,
}

impl<'a> Run<'a> {
    fn new(
        setup: &'a Setup,
        options: &'a Options,
        folder: &Folder,
        plan: Plan,
        (way, descent): (Way, Descent),
        (ledgers, graphs): (Ledgers, bool),
        report: &'a mut Reporter,
    ) -> Result<Self, Failure> {
        let engine = match Engine::new(setup, ledgers.clone(), way.recompute, graphs) {
            // Nothing is smaller than the weights: all there is to do is to ask once more.
            Err(StepError::Oom(oom)) => {
                report.record(record::oom(0, &oom))?;
                Engine::new(setup, ledgers, way.recompute, graphs)?
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
            way,
            descent,
            feed: None,
            tried: Vec::new(),
            first_oom: None,
            released: false,
            watch: options.watch.clone(),
            reading: None,
            measured: 0,
            vram_peak: 0,
            updates: 0,
            step: 0,
            until: setup.total_steps.min(options.max_steps.unwrap_or(u64::MAX)),
            cursor: Cursor::default(),
            samples: 0,
            digest: Digest::default(),
            left_out: LeftOut::default(),
            told_bad: 0,
            metrics: BTreeMap::new(),
            best: None,
            scaling: if setup.dtype == DType::F16 { Scaling::dynamic() } else { Scaling::fixed() },
            last_checkpoint: None,
            tokenizer: (setup.tokenizer_bytes > 0).then(|| folder.tokenizer()),
            evaluation_due: false,
            owed: Owed::default(),
            overflowed: false,
            last_finite: 0,
            unproven: None,
            clock: Clock { begun: now, before_s: 0.0, data_wait_s: 0.0, last_checkpoint: now, settled: now },
            waiting: Waiting::default(),
            made: None,
        })
    }

    fn train(&mut self) -> Result<Ended, Failure> {
        let _unasked = vec![1u8; self.options.hooks.unasked];
        if self.evaluation_due {
            self.evaluate()?;
        }
        while self.step < self.until {
            if let Some(signal) = self.options.signals.stop() {
                self.settle()?;
                return self.stop(signal);
            }
            self.options.hooks.die(self.options.restart.as_ref().map_or(0, |r| r.restarts), self.step);
            self.heed_pressure()?;
            self.grow()?;
            if self.made.is_none() {
                self.clock.settled = Instant::now();
            }
            let made = self.update()?;
            // While a card works on this one, what came of the one before is told.
            self.settle()?;
            let is_known = made.finding.is_known();
            self.made = Some(made);
            let last = self.step == self.until;
            let judged = self.options.observer.is_none();
            self.owed.evaluation |= judged && (last || self.due(self.setup.job.eval.every()));
            self.owed.checkpoint |= last || self.due(self.setup.job.checkpoint.every());
            let due = self.owed.evaluation || self.owed.checkpoint;
            if is_known || due {
                self.settle()?;
            }
            if due && (last || !self.overflowed) {
                let owed = std::mem::take(&mut self.owed);
                // Before the evaluation, so that one that fails costs nothing.
                self.evaluation_due = owed.evaluation;
                self.checkpoint()?;
                if owed.evaluation {
                    self.evaluate()?;
                }
            }
        }
        self.finish()
    }

    /// Whether something that happens every so often happens after the update just made.
    fn due(&self, every: Every) -> bool {
        self.due_at(every, self.step)
    }

    /// As [`due`](Self::due), after an earlier one.
    fn due_at(&self, every: Every, step: u64) -> bool {
        match every {
            Every::Steps(n) => step.is_multiple_of(n),
            Every::Epochs(n) => step.is_multiple_of(n.saturating_mul(self.setup.order.updates_per_epoch())),
            Every::Minutes(n) => self.clock.last_checkpoint.elapsed().as_secs() >= 60 * n,
        }
    }

    /// Makes one update, in as many tries as memory makes necessary: each runs the same samples from the
    /// same state, in a way that needs less.
    fn update(&mut self) -> Result<Made, Failure> {
        self.engine.begin()?;
        let scaling = self.scaling;
        loop {
            match self.feed().and_then(|feed| self.try_update(feed)) {
                Ok(done) => {
                    self.recovered();
                    self.descent.made_update();
                    self.updates += 1;
                    if let Some(event) = self.engine.captured(self.step - 1) {
                        self.report.record(event)?;
                    }
                    return Ok(done);
                }
                Err(Tried::Oom(oom)) => {
                    self.settle()?;
                    self.shrink(oom)?;
                    self.engine.rewind()?;
                    self.scaling = scaling;
                }
                Err(Tried::Failed(failure)) => {
                    // Best effort: this failure is the one to tell.
                    drop(self.settle());
                    return Err(failure);
                }
            }
        }
    }

    /// `feed` is kept if the update is made.
    fn try_update(&mut self, mut feed: Feed) -> Result<Made, Tried> {
        let span = self.setup.order.update(self.cursor.update);
        let (mut counted, mut ids, mut wait_s) = (Vec::new(), Vec::with_capacity(span.len() as usize), 0.0);
        let (mut taken, mut bad) = (0, Vec::new());
        while taken < span.len() {
            let batch = feed.loader.next().map_err(|error| self.lacking(error))?;
            let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
            wait_s += feed.loader.last_wait().as_secs_f64();
            taken += batch.taken;
            ids.extend_from_slice(&batch.ids);
            bad.extend_from_slice(&batch.bad);
            if !batch.ids.is_empty() {
                counted.push(self.engine.learn(&batch, self.scaling.factor)?);
            }
        }
        // Who looks at gradients, or lets their scale follow from them, has to see them before the next update.
        let now = self.options.observer.is_some() || self.scaling.is_dynamic();
        let finding = self.engine.weigh(&counted, self.scaling.factor, now)?;
        let (left_out, told) = self.counted(Set::Train, span.epoch, &bad)?;
        let lr = schedule::lr(
            &self.setup.job.schedule,
            self.setup.job.optimizer.lr(),
            self.step,
            self.setup.total_steps,
        );
        let verdict = match &finding {
            Finding::Known(judged) => self.verdict(judged)?,
            // A card that finds them not finite leaves the weights as they are.
            #[cfg(feature = "cuda")]
            Finding::Later(_) => scaling::Verdict::Apply,
        };
        match verdict {
            scaling::Verdict::Diverged => {
                let step = self.step + 1;
                return Err(self.diverged(&finding.read()?, step, span.epoch, ids).into());
            }
            scaling::Verdict::Skip => self.engine.skip()?,
            scaling::Verdict::Apply => {
                let number = self.step + 1 - self.scaling.skipped;
                self.engine.update(&finding, lr, number)?;
            }
        }
        self.feed = Some(feed);
        self.step += 1;
        self.samples += ids.len() as u64;
        self.left_out = left_out;
        self.tell_bad(&told)?;
        self.digest.extend(ids.iter().copied());
        self.cursor = Cursor { update: self.cursor.update + 1, done: 0 };
        self.clock.data_wait_s += wait_s;
        if let Some(observer) = &self.options.observer {
            observer.updated(self.step, &self.engine.store, self.digest)?;
        }
        let (epoch, step, samples, digest, way) =
            (span.epoch, self.step, self.samples, self.digest, self.way);
        Ok(Made { finding, lr, epoch, ids, step, samples, digest, way, wait_s })
    }

    /// What is to be done with gradients that are known; whoever observes the run is shown them.
    fn verdict(&mut self, judged: &Judged) -> Result<scaling::Verdict, Failure> {
        // Where all records were left out there is nothing to learn: the weights stay, and the update counts.
        if judged.tally.weight == 0.0 {
            self.overflowed = false;
            return Ok(scaling::Verdict::Skip);
        }
        if let Some(observer) = &self.options.observer {
            let (engine, loss) = (&self.engine, judged.tally.mean_loss());
            let factor = engine.terms(self.scaling.factor).mean_factor(&judged.tally);
            observer.gradients(self.step + 1, loss, &engine.store, factor, engine.ledger.asks())?;
        }
        let skipped = self.scaling.skipped;
        let verdict = self.scaling.judge(judged.is_finite());
        self.overflowed = self.scaling.skipped > skipped;
        Ok(verdict)
    }

    /// Waits for what came of the update made last, and tells it.
    fn settle(&mut self) -> Result<(), Failure> {
        let Some(made) = self.made.take() else { return Ok(()) };
        let judged = made.finding.read()?;
        let step_s = self.clock.settled.elapsed().as_secs_f64();
        self.clock.settled = Instant::now();
        if !judged.is_finite() && !self.scaling.is_dynamic() {
            return Err(self.diverged(&judged, made.step, made.epoch, made.ids));
        }
        if judged.is_finite() {
            self.last_finite = made.step;
            if self.unproven.is_some_and(|step| step < made.step) {
                self.prune()?;
            }
        }
        self.heed_waiting(step_s, made.wait_s)?;
        let (last, log) = (made.step == self.until, self.setup.job.log.every_steps);
        let evaluated =
            self.options.observer.is_none() && self.due_at(self.setup.job.eval.every(), made.step);
        if last || evaluated || made.step == 1 || made.step.is_multiple_of(log) {
            self.report_step(&made, &judged, step_s)?;
            self.correct()?;
        }
        Ok(())
    }
}

/// The order says how many samples there are, so a loader that ends before them is at fault.
fn ended_early() -> DataError {
    DataError::NoSamples { set: "the loader".into(), why: "it ended before the last sample".into() }
}
