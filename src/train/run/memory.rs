//! Memory control of a run: shrinks the plan after an OOM or under pressure, grows it back when memory returns, and
//! lowers the budget when more is measured than was reserved.

use super::context::RunContext;
use crate::base::Phase;
use crate::base::proc_status::proc_status;
use crate::events::event::{Event, MemoryBytes};
use crate::memory::pressure::{self, PressureAction, PressureMonitor, PressureReading};
use crate::memory::{Oom, RefusedBy, measure};
use crate::planner::{ExecutionPlan, MemoryPlan, correction, ladder};
use crate::train::Failure;
use crate::train::postmortem::OomAttempt;
use crate::train::retry::{self, Backoff};

/// Updates after which measured memory is representative.
const WARMUP_UPDATES: u64 = 3;

pub(super) struct MemoryControl {
    /// The memory plan that the run started with.
    pub plan: MemoryPlan,
    /// The larger plans given up.
    pub backoff: Backoff,
    /// OOM attempts since the last successful update or evaluation, and the first of them.
    failed_attempts: Vec<OomAttempt>,
    first_oom: Option<Oom>,
    /// CUDA graphs and arenas were already freed in response to a device OOM.
    graphs_released: bool,
    pressure_monitor: PressureMonitor,
    last_pressure: Option<PressureReading>,
    /// Peak bytes measured on the compute device, and updates applied, by this process.
    measured: u64,
    pub vram_peak: u64,
    updates: u64,
}

impl MemoryControl {
    pub fn new(plan: MemoryPlan, backoff: Backoff, pressure_monitor: PressureMonitor) -> Self {
        Self {
            plan,
            backoff,
            failed_attempts: Vec::new(),
            first_oom: None,
            graphs_released: false,
            pressure_monitor,
            last_pressure: None,
            measured: 0,
            vram_peak: 0,
            updates: 0,
        }
    }

    /// Switches updates to a smaller plan, or gives up.
    pub fn shrink_after_oom(&mut self, ctx: &mut RunContext, oom: Oom) -> Result<(), Failure> {
        let next = next_smaller(ctx, oom.shortfall());
        self.retry_smaller(ctx, oom, next)
    }

    /// Switches evaluations to a smaller plan, or gives up.
    pub fn shrink_eval_after_oom(&mut self, ctx: &mut RunContext, oom: Oom) -> Result<(), Failure> {
        let peak = |plan| ctx.setup.peak_bytes_in(plan, &[Phase::Eval]);
        let next = retry::next_smaller_eval(ctx.engine.plan(), oom.shortfall(), &peak);
        self.retry_smaller(ctx, oom, next)
    }

    fn retry_smaller(
        &mut self,
        ctx: &mut RunContext,
        oom: Oom,
        next: Option<ExecutionPlan>,
    ) -> Result<(), Failure> {
        ctx.record_oom(&oom)?;
        // A device OOM is not the plan's fault: the plan had room for it. Retry the same plan without CUDA graphs and
        // arenas before shrinking.
        let unplanned = oom.refused_by != RefusedBy::Ledger;
        let retry = unplanned && !std::mem::replace(&mut self.graphs_released, true);
        if retry {
            ctx.engine.release_graphs();
        }
        // Return free chunks to the driver, so that it can load what it lacked; it stays loaded, and the heap maps what
        // is left.
        if oom.refused_by == RefusedBy::Driver {
            ctx.setup.gpu.iter().for_each(|gpu| gpu.release_free_chunks());
        }
        if retry {
            return Ok(());
        }
        let next = next.filter(|_| self.failed_attempts.len() < ctx.setup.job.memory.max_retries as usize);
        let change = next.map(|next| ladder::describe_change(ctx.engine.plan(), next));
        self.failed_attempts.push(OomAttempt::new(ctx.position.step, &oom, change));
        let first = self.first_oom.get_or_insert(oom);
        match next {
            Some(next) => self.shrink_to(ctx, next),
            None => {
                let (first, tried) = (Box::new(first.clone()), std::mem::take(&mut self.failed_attempts));
                Err(Failure::OutOfMemory { first, tried })
            }
        }
    }

    /// An update was applied.
    pub fn record_update(&mut self) {
        self.reset_retries();
        self.backoff.record_update();
        self.updates += 1;
    }

    /// An update or an evaluation succeeded.
    pub fn reset_retries(&mut self) {
        self.failed_attempts.clear();
        self.first_oom = None;
        self.graphs_released = false;
    }

    fn shrink_to(&mut self, ctx: &mut RunContext, next: ExecutionPlan) -> Result<(), Failure> {
        let (step, change) = (ctx.position.step, ladder::describe_change(ctx.engine.plan(), next));
        self.backoff.record_shrink(ctx.engine.plan());
        apply_plan(ctx, next);
        // The allocator's free lists hold buffers of the larger plan's sizes, which nothing will use.
        pressure::release_to_os();
        let ExecutionPlan { micro_batch, accumulation_steps, .. } = next;
        ctx.record(Event::Shrunk { step, change, micro_batch, accumulation_steps })
    }

    /// Retries the last plan given up, after enough quiet updates and if there seems to be memory for it.
    pub fn try_grow(&mut self, ctx: &mut RunContext) -> Result<(), Failure> {
        let Some(larger) = self.backoff.growth_due() else { return Ok(()) };
        let (setup, current) = (ctx.setup, ctx.engine.plan());
        let (now, larger_peak) = (setup.peak_bytes(current), setup.peak_bytes(larger));
        let has_room =
            |r: PressureReading| r.available >= r.low_watermark() + larger_peak.saturating_sub(now);
        // The GPU heap belongs to the run; only host memory is shared with other processes.
        let host_memory_is_short = setup.gpu.is_none() && !self.last_pressure.is_none_or(has_room);
        if larger_peak > ctx.engine.ledger.budget() || host_memory_is_short {
            self.backoff.postpone_growth();
            return Ok(());
        }
        let (step, change) = (ctx.position.step, ladder::describe_change(current, larger));
        self.backoff.record_growth();
        apply_plan(ctx, larger);
        let ExecutionPlan { micro_batch, accumulation_steps, .. } = larger;
        ctx.record(Event::Grown { step, change, micro_batch, accumulation_steps })
    }

    /// Polls how much host memory other processes leave, and frees some before the kernel's OOM killer acts.
    pub fn respond_to_pressure(&mut self, ctx: &mut RunContext) -> Result<(), Failure> {
        let Some(reading) = self.pressure_monitor.poll() else { return Ok(()) };
        self.last_pressure = Some(reading);
        if !reading.is_low() {
            return Ok(());
        }
        let (setup, current) = (ctx.setup, ctx.engine.plan());
        let no_prefetch = ExecutionPlan { prefetch: 0, ..current };
        let loader_bytes = |plan: ExecutionPlan| {
            setup.loader_bytes(setup.loaded_batch(plan), plan.prefetch, setup.total_steps)
        };
        // Smaller micro-batches free GPU memory, not host memory.
        let smaller = next_smaller(ctx, 0).filter(|_| setup.gpu.is_none());
        let next = match pressure::choose_action(
            reading,
            loader_bytes(no_prefetch) < loader_bytes(current),
            smaller.is_some(),
        ) {
            PressureAction::Nothing => None,
            PressureAction::ShrinkPrefetch => Some(no_prefetch),
            PressureAction::ShrinkMicroBatch => smaller,
        };
        let Some(next) = next else { return Ok(()) };
        let (left, low, stalled) = (reading.available, reading.low_watermark(), reading.stalled);
        ctx.record(Event::Pressure { step: ctx.position.step, left, low, stalled })?;
        self.shrink_to(ctx, next)
    }

    /// Measures the memory in use, highest since the last call.
    pub fn measure(&mut self, ctx: &RunContext) -> MemoryBytes {
        let (ram, gpu) = (measure::take_recent_peak(), ctx.setup.gpu.as_ref());
        let vram = gpu.map_or(0, |gpu| gpu.take_recent_peak());
        self.vram_peak = self.vram_peak.max(vram);
        self.measured = self.measured.max(if gpu.is_some() { vram } else { self.host_usage(ctx, ram) });
        MemoryBytes { ram, vram }
    }

    /// Host bytes to compare with the ledger, given the heap's peak. Resident memory counts only beyond the plan: up
    /// to the plan it may be freed buffers that the allocator keeps and nobody reserves.
    fn host_usage(&self, ctx: &RunContext, heap: u64) -> u64 {
        let non_heap = ctx.setup.process.non_heap;
        // If the process is not planned, its resident memory says nothing about the plan.
        let resident = proc_status("VmRSS:").filter(|_| non_heap > 0).unwrap_or(0);
        let unplanned = if resident > self.plan.peak.ram_bytes { resident } else { 0 };
        (heap + non_heap).max(unplanned)
    }

    /// Lowers the budget by measured bytes that nobody reserved, and shrinks if the plan no longer fits.
    pub fn correct_budget(&mut self, ctx: &mut RunContext) -> Result<(), Failure> {
        let (setup, current, ledger) = (ctx.setup, ctx.engine.plan(), &ctx.engine.ledger);
        let budget = &self.plan.budget;
        let full = if setup.gpu.is_some() { budget.vram_bytes } else { budget.ram_bytes };
        let (now, reserved, measured) = (ledger.budget(), ledger.peak(), self.measured);
        if self.updates < WARMUP_UPDATES || measured <= reserved {
            return Ok(());
        }
        let needs = setup.peak_bytes(current);
        // The plan also counts what the ledger has not seen: phases yet to come, and the rounding of a GPU's allocator.
        let expected = reserved.max(needs);
        let least = setup.leanest_plan(current).1;
        let Some(budget) = correction::corrected_budget(full, now, expected, measured, least) else {
            return Ok(());
        };
        ledger.set_budget(budget);
        ctx.record(Event::Corrected { step: ctx.position.step, reserved, measured, budget })?;
        match next_smaller(ctx, needs.saturating_sub(budget)) {
            Some(next) if needs > budget => self.shrink_to(ctx, next),
            _ => Ok(()),
        }
    }
}

/// The plan to try next for updates, if they are short by this many bytes.
fn next_smaller(ctx: &RunContext, shortfall: u64) -> Option<ExecutionPlan> {
    let training = |plan| ctx.setup.peak_bytes_in(plan, &[Phase::Forward, Phase::Backward]);
    retry::next_smaller(&ctx.setup.shrink_limits(), ctx.engine.plan(), shortfall, &training)
}

fn apply_plan(ctx: &mut RunContext, plan: ExecutionPlan) {
    ctx.set_plan(plan);
    if ctx.setup.gpu.is_none() {
        measure::set_planned_peak(ctx.setup.peak_bytes(plan).saturating_sub(ctx.setup.process.non_heap));
    }
}
