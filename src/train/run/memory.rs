//! Memory handling of a run: shrinks the plan after an OOM or under pressure, grows it back when memory returns, and
//! lowers the budget when more is measured than was reserved.

use super::{Failure, Run, Setup, TrainLoader, UpdateError, record};
use crate::base::{Phase, Role};
use crate::data::DataError;
use crate::data::loader::Loader;
use crate::events::event::Event;
use crate::job::OomAction;
use crate::memory::pressure::{self, PressureAction};
use crate::memory::{Oom, RefusedBy, measure};
use crate::planner::estimate::MemoryPredictor;
use crate::planner::plan::MemorySpace;
use crate::planner::{ExecutionPlan, correction, ladder, search};
use crate::train::postmortem::{LeanestPlan, OomAttempt, PostMortem};
use crate::train::retry::{self, ShrinkLimits};

/// Updates after which measured memory is representative.
const WARMUP_UPDATES: u64 = 3;

impl Run<'_> {
    /// The open loader, or a new one that starts at the cursor.
    pub(super) fn take_train_loader(&mut self) -> Result<TrainLoader, UpdateError> {
        if let Some(train_loader) = self.train_loader.take() {
            return Ok(train_loader);
        }
        let setup = self.setup;
        let micro_batch = self.runtime_plan.micro_batch.min(setup.datasets.train.len() as usize);
        self.engine.host_ledger.set_phase(Phase::Start);
        let prefetch_bytes = setup.loader_bytes(micro_batch, self.runtime_plan.prefetch);
        let reservation = self
            .engine
            .host_ledger
            .reserve(Role::DataPipeline, "prefetch", prefetch_bytes)
            .map_err(UpdateError::Oom)?;
        let (source, cursor, until) = (setup.datasets.train.clone(), self.cursor, self.last_step);
        let options = setup.loader_options(micro_batch, self.runtime_plan.prefetch);
        let loader = Loader::start(source, setup.order.clone(), cursor, until, options);
        Ok(TrainLoader { loader: loader.map_err(Failure::from)?, reservation })
    }

    /// Maps a buffer allocation that the system refused to an OOM.
    pub(super) fn map_data_error(&self, error: DataError) -> UpdateError {
        match error {
            DataError::OutOfMemory { bytes } => {
                UpdateError::Oom(self.engine.host_ledger.oom_error(Role::DataPipeline, "prefetch", bytes))
            }
            error => UpdateError::Failed(error.into()),
        }
    }

    /// Switches updates to a smaller plan, or gives up.
    pub(super) fn shrink_after_oom(&mut self, oom: Oom) -> Result<(), Failure> {
        let next = self.next_smaller(oom.shortfall());
        self.retry_smaller(oom, next)
    }

    /// Switches evaluations to a smaller plan, or gives up.
    pub(super) fn shrink_eval_after_oom(&mut self, oom: Oom) -> Result<(), Failure> {
        let peak = |plan| estimated_peak(self.setup, plan, Some(&[Phase::Eval]));
        let next = retry::next_smaller_eval(self.runtime_plan, oom.shortfall(), &peak);
        self.retry_smaller(oom, next)
    }

    fn next_smaller(&self, shortfall: u64) -> Option<ExecutionPlan> {
        let training = |plan| estimated_peak(self.setup, plan, Some(&[Phase::Forward, Phase::Backward]));
        retry::next_smaller(&shrink_limits(self.setup), self.runtime_plan, shortfall, &training)
    }

    fn retry_smaller(&mut self, oom: Oom, next: Option<ExecutionPlan>) -> Result<(), Failure> {
        self.report.record(record::oom_event(self.step, &oom))?;
        // A device OOM is not the plan's fault: the plan had room for it. Retry the same plan without CUDA graphs and
        // arenas before shrinking.
        let unplanned = oom.refused_by != RefusedBy::Ledger;
        let retry = unplanned && !std::mem::replace(&mut self.graphs_released, true);
        if retry {
            self.engine.release_graphs();
        }
        // What the driver loads stays loaded: from the next attempt on, the heap has what is left.
        if oom.refused_by == RefusedBy::Driver {
            self.setup.gpu.iter().for_each(|gpu| gpu.release_free_chunks());
        }
        if retry {
            return Ok(());
        }
        let next = next.filter(|_| self.failed_attempts.len() < self.setup.job.memory.max_retries as usize);
        self.failed_attempts.push(OomAttempt::new(
            self.step,
            &oom,
            next.map(|next| describe_change(self.runtime_plan, next)),
        ));
        let first = self.first_oom.get_or_insert(oom);
        match next {
            Some(next) => self.shrink_to(next),
            None => {
                let (first, tried) = (Box::new(first.clone()), std::mem::take(&mut self.failed_attempts));
                Err(Failure::OutOfMemory { first, tried })
            }
        }
    }

    /// The reservation succeeded: reset the retry count.
    pub(super) fn reset_retries(&mut self) {
        self.failed_attempts.clear();
        self.first_oom = None;
        self.graphs_released = false;
    }

    fn shrink_to(&mut self, next: ExecutionPlan) -> Result<(), Failure> {
        let (step, change) = (self.step, describe_change(self.runtime_plan, next));
        self.backoff.record_shrink(self.runtime_plan);
        let (micro_batch, accumulation_steps) = self.apply_plan(next);
        // The allocator's free lists hold buffers of the larger plan's sizes, which nothing will use.
        pressure::release_to_os();
        Ok(self.report.record(Event::Shrunk { step, change, micro_batch, accumulation_steps })?)
    }

    /// Applies a plan from here on. If only the read-ahead shrinks, the loader continues with the batches it holds.
    fn apply_plan(&mut self, plan: ExecutionPlan) -> (usize, usize) {
        let prefetch_shrinks = plan == ExecutionPlan { prefetch: plan.prefetch, ..self.runtime_plan }
            && plan.prefetch < self.runtime_plan.prefetch;
        match &mut self.train_loader {
            Some(train_loader) if prefetch_shrinks => {
                train_loader.reservation.shrink_to(train_loader.loader.shrink(plan.prefetch))
            }
            train_loader => *train_loader = None,
        }
        if self.setup.gpu.is_none() {
            let non_heap = self.setup.process.non_heap;
            measure::set_planned_peak(estimated_peak(self.setup, plan, None).saturating_sub(non_heap));
        }
        self.runtime_plan = plan;
        self.engine.set_plan(plan);
        (plan.micro_batch, plan.accumulation_steps)
    }

    /// Retries the last plan given up, after enough quiet updates and if there seems to be memory for it.
    pub(super) fn try_grow(&mut self) -> Result<(), Failure> {
        let Some(larger) = self.backoff.growth_due() else { return Ok(()) };
        let (now, larger_peak) =
            (estimated_peak(self.setup, self.runtime_plan, None), estimated_peak(self.setup, larger, None));
        let has_room =
            |r: pressure::PressureReading| r.available >= r.low_watermark() + larger_peak.saturating_sub(now);
        // The GPU heap belongs to the run; only host memory is shared with other processes.
        let crowded = self.setup.gpu.is_none() && !self.last_pressure.is_none_or(has_room);
        if larger_peak > self.engine.ledger.budget() || crowded {
            self.backoff.postpone_growth();
            return Ok(());
        }
        let (step, change) = (self.step, describe_change(self.runtime_plan, larger));
        self.backoff.record_growth();
        let (micro_batch, accumulation_steps) = self.apply_plan(larger);
        Ok(self.report.record(Event::Grown { step, change, micro_batch, accumulation_steps })?)
    }

    /// Polls how much host memory other processes leave, and frees some before the kernel's OOM killer acts.
    pub(super) fn respond_to_pressure(&mut self) -> Result<(), Failure> {
        let Some(reading) = self.pressure_monitor.poll() else { return Ok(()) };
        self.last_pressure = Some(reading);
        if !reading.is_low() {
            return Ok(());
        }
        let no_prefetch = ExecutionPlan { prefetch: 0, ..self.runtime_plan };
        let loader_bytes = |plan: ExecutionPlan| self.setup.loader_bytes(plan.micro_batch, plan.prefetch);
        // Smaller micro-batches free GPU memory, not host memory.
        let smaller = self.next_smaller(0).filter(|_| self.setup.gpu.is_none());
        let next = match pressure::choose_action(
            reading,
            loader_bytes(no_prefetch) < loader_bytes(self.runtime_plan),
            smaller.is_some(),
        ) {
            PressureAction::Nothing => None,
            PressureAction::ShrinkPrefetch => Some(no_prefetch),
            PressureAction::ShrinkMicroBatch => smaller,
        };
        let Some(next) = next else { return Ok(()) };
        let (left, low, stalled) = (reading.available, reading.low_watermark(), reading.stalled);
        self.report.record(Event::Pressure { step: self.step, left, low, stalled })?;
        self.shrink_to(next)
    }

    /// Lowers the budget by measured bytes that nobody reserved, and shrinks if the plan no longer fits.
    pub(super) fn correct_budget(&mut self) -> Result<(), Failure> {
        let budget = &self.plan.budget;
        let full = if self.setup.gpu.is_some() { budget.vram_bytes } else { budget.ram_bytes };
        let ledger = &self.engine.ledger;
        let (now, reserved, measured) = (ledger.budget(), ledger.peak(), self.measured);
        if self.updates < WARMUP_UPDATES || measured <= reserved {
            return Ok(());
        }
        let needs = estimated_peak(self.setup, self.runtime_plan, None);
        // On a GPU the plan also counts what the ledger does not: the rounding of the allocator.
        let expected = if self.setup.gpu.is_some() { reserved.max(needs) } else { reserved };
        let least = leanest(self.setup, self.runtime_plan).1;
        let Some(budget) = correction::corrected_budget(full, now, expected, measured, least) else {
            return Ok(());
        };
        ledger.set_budget(budget);
        self.report.record(Event::Corrected { step: self.step, asked: reserved, measured, budget })?;
        match self.next_smaller(needs.saturating_sub(budget)) {
            Some(next) if needs > budget => self.shrink_to(next),
            _ => Ok(()),
        }
    }
}

/// Describes the difference between two plans for people.
fn describe_change(from: ExecutionPlan, to: ExecutionPlan) -> String {
    if from.split() != to.split() || from.recompute != to.recompute {
        ladder::describe_split(to)
    } else if from.eval_micro_batch != to.eval_micro_batch {
        format!("evaluation micro-batch {}", to.eval_micro_batch)
    } else if to.prefetch < from.prefetch {
        "read ahead one micro-batch".into()
    } else {
        "read ahead as planned".into()
    }
}

fn shrink_limits(setup: &Setup) -> ShrinkLimits {
    ShrinkLimits {
        may_shrink: setup.allows(OomAction::Shrink),
        may_recompute: setup.allows(OomAction::Recompute),
        blocks: setup.network.blocks.len(),
        samples_per_update: setup.job.train.samples_per_update(),
        micro_batch_multiple: setup.network.micro_batch_multiple(),
    }
}

/// Estimated peak bytes over these phases, or over all of them: data preparation is over.
fn estimated_peak(setup: &Setup, plan: ExecutionPlan, phases: Option<&[Phase]>) -> u64 {
    let space = if setup.gpu.is_some() { MemorySpace::Vram } else { MemorySpace::Ram };
    let counts = |phase: Phase| phases.map_or(phase != Phase::Preparation, |phases| phases.contains(&phase));
    let estimate = setup.estimator().estimate(plan);
    let of = estimate.phases.iter().filter(|phase| counts(phase.name));
    of.map(|phase| phase.bytes_in(space)).max().unwrap_or(0)
}

/// The plan with the lowest peak that the job allows, and that peak in bytes.
fn leanest(setup: &Setup, current: ExecutionPlan) -> (ExecutionPlan, u64) {
    let limits = shrink_limits(setup);
    let train = &setup.job.train;
    let steps = if limits.may_shrink { limits.samples_per_update } else { train.accumulation_steps };
    let split = search::split(limits.samples_per_update, steps, limits.micro_batch_multiple);
    let plan = |recompute| ExecutionPlan {
        recompute,
        eval_micro_batch: 1,
        prefetch: 0,
        ..current.with_split(split)
    };
    let plans = [plan(0), plan(if limits.may_recompute { limits.blocks } else { 0 })];
    let [saved, recomputed] = plans.map(|plan| (plan, estimated_peak(setup, plan, None)));
    if recomputed.1 < saved.1 { recomputed } else { saved }
}

/// Post-mortem of a run that ran out of memory for good.
pub(super) fn postmortem(
    setup: &Setup,
    current: ExecutionPlan,
    failure: &Failure,
    budget_bytes: u64,
) -> Option<PostMortem> {
    let Failure::OutOfMemory { first, tried } = failure else { return None };
    let (plan, ram_bytes) = leanest(setup, current);
    let step = tried.first().map_or(0, |attempt| attempt.step);
    let then = tried.first().and_then(|attempt| attempt.then.clone());
    Some(PostMortem {
        error: super::error_chain(failure),
        budget_bytes,
        first: Some(OomAttempt::new(step, first, then)),
        live: first.live.clone(),
        tried: tried.clone(),
        deaths: Vec::new(),
        would_fit: Some(LeanestPlan { change: ladder::describe_split(plan), ram_bytes }),
    })
}
