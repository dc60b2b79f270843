//! What a run does about memory: smaller ways after an out of memory or under pressure, larger ones when it
//! comes back, and a budget that learns from what is measured.

use super::{Failure, Feed, Run, Setup, Tried, record};
use crate::data::DataError;
use crate::data::loader::{self, Loader};
use crate::job::Rung;
use crate::memory::estimate::{self, Estimator, Predict, Subject};
use crate::memory::pressure::{self, Action};
use crate::memory::{Oom, Role, correction, ladder, measure, search};
use crate::train::event::Event;
use crate::train::postmortem::{Attempt, Leanest, PostMortem};
use crate::train::retry::{self, Limits, Way};

/// Updates after which what is measured is typical.
const TYPICAL: u64 = 3;

impl Run<'_> {
    /// The loader that stands ready, or one that starts at the cursor.
    pub(super) fn feed(&mut self) -> Result<Feed, Tried> {
        if let Some(feed) = self.feed.take() {
            return Ok(feed);
        }
        let setup = self.setup;
        let micro_batch = self.way.micro_batch.min(setup.sets.train.len() as usize);
        self.engine.host.phase("start");
        let ahead = self.pipeline(self.way, micro_batch);
        let hold = self.engine.host.reserve(Role::DataPipeline, "prefetch", ahead).map_err(Tried::Oom)?;
        let (source, cursor, until) = (setup.sets.train.clone(), self.cursor, self.until);
        let reading = setup.reading(micro_batch, self.way.prefetch);
        let loader = Loader::start(source, setup.order.clone(), cursor, until, reading);
        Ok(Feed { loader: loader.map_err(Failure::from)?, hold })
    }

    /// Bytes the loader holds for micro-batches of this size.
    pub(super) fn pipeline(&self, way: Way, micro_batch: usize) -> u64 {
        loader::holds(self.setup.features(), micro_batch, way.prefetch, self.setup.workers)
    }

    /// A loader to which the system refused a buffer lacks memory like any other.
    pub(super) fn lacking(&self, error: DataError) -> Tried {
        match error {
            DataError::OutOfMemory { bytes } => {
                Tried::Oom(self.engine.host.refusal(Role::DataPipeline, "prefetch", bytes))
            }
            error => Tried::Failed(error.into()),
        }
    }

    /// Takes a way for updates that needs less, or gives up.
    pub(super) fn shrink(&mut self, oom: Oom) -> Result<(), Failure> {
        let next = self.smaller(oom.short());
        self.give_way(oom, next)
    }

    /// Takes a way for evaluations that needs less, or gives up.
    pub(super) fn shrink_evaluation(&mut self, oom: Oom) -> Result<(), Failure> {
        let peak = |way| peak(self.setup, way, Some(&["eval"]));
        let next = retry::next_evaluation(self.way, oom.short(), &peak);
        self.give_way(oom, next)
    }

    fn smaller(&self, short: u64) -> Option<Way> {
        let training = |way| peak(self.setup, way, Some(&["forward", "backward"]));
        retry::next(&limits(self.setup), self.way, short, &training)
    }

    fn give_way(&mut self, oom: Oom, next: Option<Way>) -> Result<(), Failure> {
        self.report.record(record::oom(self.step, &oom))?;
        // The plan has room for what the device refused: no reason for a smaller one before the same was tried again
        // without graphs and arenas.
        if oom.by_device && !std::mem::replace(&mut self.released, true) {
            self.engine.release();
            return Ok(());
        }
        let next = next.filter(|_| self.tried.len() < self.setup.job.memory.max_retries as usize);
        self.tried.push(Attempt::new(self.step, &oom, next.map(|next| change(self.way, next))));
        let first = self.first_oom.get_or_insert(oom);
        match next {
            Some(next) => self.go_down(next),
            None => {
                let (first, tried) = (Box::new(first.clone()), std::mem::take(&mut self.tried));
                Err(Failure::OutOfMemory { first, tried })
            }
        }
    }

    /// What was asked for was there: retries are counted anew.
    pub(super) fn recovered(&mut self) {
        self.tried.clear();
        self.first_oom = None;
        self.released = false;
    }

    fn go_down(&mut self, next: Way) -> Result<(), Failure> {
        let (step, change) = (self.step, change(self.way, next));
        self.descent.down(self.way);
        let (micro_batch, accumulation_steps) = self.take(next);
        // Buffers of the larger way's sizes would wait in vain.
        pressure::give_back();
        Ok(self.report.record(Event::Shrunk { step, change, micro_batch, accumulation_steps })?)
    }

    /// Runs this way from here on. Where only less is read ahead, the loader goes on with what it has.
    fn take(&mut self, way: Way) -> (usize, usize) {
        let less_ahead =
            way == Way { prefetch: way.prefetch, ..self.way } && way.prefetch < self.way.prefetch;
        match &mut self.feed {
            Some(feed) if less_ahead => feed.hold.keep(feed.loader.give_back(way.prefetch)),
            feed => *feed = None,
        }
        if self.setup.card.is_none() {
            let beside = self.setup.process.beside_heap;
            measure::set_planned(peak(self.setup, way, None).saturating_sub(beside));
        }
        self.way = way;
        self.engine.recompute = way.recompute;
        self.engine.staging.clear();
        (way.micro_batch, way.accumulation_steps)
    }

    /// Takes back the last way given up, after a quiet while and where there seems to be room for it.
    pub(super) fn grow(&mut self) -> Result<(), Failure> {
        let Some(larger) = self.descent.due() else { return Ok(()) };
        let (now, then) = (peak(self.setup, self.way, None), peak(self.setup, larger, None));
        let room = |r: pressure::Reading| r.left >= r.low() + then.saturating_sub(now);
        // A card's pool is the run's own; only the host's memory is shared with others.
        let crowded = self.setup.card.is_none() && !self.reading.is_none_or(room);
        if then > self.engine.ledger.budget() || crowded {
            self.descent.wait();
            return Ok(());
        }
        let (step, change) = (self.step, change(self.way, larger));
        self.descent.up();
        let (micro_batch, accumulation_steps) = self.take(larger);
        Ok(self.report.record(Event::Grown { step, change, micro_batch, accumulation_steps })?)
    }

    /// Looks at what others leave of the host's memory, and makes room before the kernel does.
    pub(super) fn heed_pressure(&mut self) -> Result<(), Failure> {
        let Some(reading) = self.watch.look() else { return Ok(()) };
        self.reading = Some(reading);
        if !reading.is_low() {
            return Ok(());
        }
        let less_ahead = Way { prefetch: 0, ..self.way };
        let ahead = |way: Way| self.pipeline(way, way.micro_batch);
        // Smaller micro-batches free a card's memory, not the host's.
        let smaller = self.smaller(0).filter(|_| self.setup.card.is_none());
        let next = match pressure::act(reading, ahead(less_ahead) < ahead(self.way), smaller.is_some()) {
            Action::Nothing => None,
            Action::ShrinkPrefetch => Some(less_ahead),
            Action::ShrinkMicroBatch => smaller,
        };
        let Some(next) = next else { return Ok(()) };
        let (left, low, stalled) = (reading.left, reading.low(), reading.stalled);
        self.report.record(Event::Pressure { step: self.step, left, low, stalled })?;
        self.go_down(next)
    }

    /// Lowers the budget by what is measured and nobody asked for, and goes down if it no longer suffices.
    pub(super) fn correct(&mut self) -> Result<(), Failure> {
        let budget = &self.plan.budget;
        let whole = if self.setup.card.is_some() { budget.vram_bytes } else { budget.ram_bytes };
        let ledger = &self.engine.ledger;
        let (now, asked, measured) = (ledger.budget(), ledger.peak(), self.measured);
        if self.updates < TYPICAL || measured <= asked {
            return Ok(());
        }
        let least = leanest(self.setup).1;
        let Some(budget) = correction::corrected(whole, now, asked, measured, least) else { return Ok(()) };
        ledger.set_budget(budget);
        self.report.record(Event::Corrected { step: self.step, asked, measured, budget })?;
        let needs = peak(self.setup, self.way, None);
        match self.smaller(needs.saturating_sub(budget)) {
            Some(next) if needs > budget => self.go_down(next),
            _ => Ok(()),
        }
    }
}

/// What differs between two ways, in people's words.
fn change(from: Way, to: Way) -> String {
    if from.split() != to.split() || from.recompute != to.recompute {
        ladder::change(to.split(), to.recompute)
    } else if from.eval_micro_batch != to.eval_micro_batch {
        format!("evaluation micro-batch {}", to.eval_micro_batch)
    } else if to.prefetch < from.prefetch {
        "read ahead one micro-batch".into()
    } else {
        "read ahead as planned".into()
    }
}

fn limits(setup: &Setup) -> Limits {
    Limits {
        may_shrink: setup.may(Rung::Shrink),
        may_recompute: setup.may(Rung::Recompute),
        blocks: setup.network.blocks.len(),
        samples_per_update: setup.job.train.samples_per_update(),
        group: setup.network.group(),
    }
}

/// Estimated bytes at the highest moment of these phases, or of all.
fn peak(setup: &Setup, way: Way, phases: Option<&[&str]>) -> u64 {
    let pipeline = |micro_batch, _| loader::holds(setup.features(), micro_batch, way.prefetch, setup.workers);
    let Way { micro_batch, recompute, eval_micro_batch, .. } = way;
    // The optimizer that was chosen is in force, whatever its state is kept in, and so is what is offloaded.
    let offload = setup.offload;
    let way = estimate::Way { micro_batch, recompute, eval_micro_batch, eight_bit: false, offload };
    let estimate =
        setup.with_subject(|s| Estimator::new(Subject { pipeline: &pipeline, ..*s }).estimate(way));
    // The preparation of the data is over.
    let named = |name: &str| phases.map_or(name != estimate::PREPARATION, |names| names.contains(&name));
    let of = estimate.phases.iter().filter(|(name, _)| named(name));
    of.map(|(_, held)| if setup.card.is_some() { held.vram } else { held.ram }).max().unwrap_or(0)
}

/// The way that needs the least of those the job allows, and its bytes.
fn leanest(setup: &Setup) -> (Way, u64) {
    let limits = limits(setup);
    let train = &setup.job.train;
    let steps = if limits.may_shrink { limits.samples_per_update } else { train.accumulation_steps };
    let split = search::split(limits.samples_per_update, steps, limits.group);
    let way = |recompute| Way {
        micro_batch: split.micro_batch,
        accumulation_steps: split.accumulation_steps,
        recompute,
        eval_micro_batch: 1,
        prefetch: 0,
    };
    let ways = [way(0), way(if limits.may_recompute { limits.blocks } else { 0 })];
    let [kept, again] = ways.map(|way| (way, peak(setup, way, None)));
    if again.1 < kept.1 { again } else { kept }
}

/// What is to be learned from a run that ran out of memory for good.
pub(super) fn postmortem(setup: &Setup, failure: &Failure, budget_bytes: u64) -> Option<PostMortem> {
    let Failure::OutOfMemory { first, tried } = failure else { return None };
    let (way, ram_bytes) = leanest(setup);
    let step = tried.first().map_or(0, |attempt| attempt.step);
    let then = tried.first().and_then(|attempt| attempt.then.clone());
    Some(PostMortem {
        error: super::describe(failure),
        budget_bytes,
        first: Some(Attempt::new(step, first, then)),
        live: first.live.clone(),
        tried: tried.clone(),
        deaths: Vec::new(),
        would_fit: Some(Leanest { change: ladder::change(way.split(), way.recompute), ram_bytes }),
    })
}
