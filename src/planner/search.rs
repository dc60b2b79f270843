//! Searches for the fastest execution plan of a job that fits its memory.
//!
//! The space is every combination of micro-batch, recomputed blocks, optimizer state and offload. The search skips
//! plans whose lower bound is slower than the best found, and bisects along one axis for the first plan that fits,
//! because more splitting, recompute or offload never needs more memory. It estimates every plan that it returns.

use super::cost_model::CostModel;
use super::estimate::MemoryPredictor;
use super::execution_plan::{BatchSplit, ExecutionPlan, OFFLOAD_SETS, Offload};
use super::plan::Peak;
use crate::job::{OomAction, OptimizerKind};

/// What the job requests, and on which machine.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    pub device: String,
    /// Host budget in bytes; on the CPU it also holds the tensors.
    pub ram: u64,
    /// Device budget in bytes; 0 on the CPU.
    pub vram: u64,
    /// The largest host budget that the machine allows.
    pub max_ram: u64,
    /// Device bytes that the CUDA context takes besides the budget, if known.
    pub context_bytes: u64,
    pub split: BatchSplit,
    pub samples_per_update: usize,
    /// A micro-batch is a multiple of this many samples: the model's normalization group.
    pub micro_batch_multiple: usize,
    /// The optimizer's kind, and its 8-bit variant if there is one.
    pub optimizer: OptimizerKind,
    pub optimizer_8bit: Option<OptimizerKind>,
    /// The evaluation micro-batch, if the job sets it.
    pub eval_micro_batch: Option<usize>,
    /// Limit of the loader's buffers, in bytes.
    pub prefetch: u64,
    /// The actions that the job allows.
    pub allowed: Vec<OomAction>,
    /// What the device can offload to the host.
    pub offloads: Vec<Offload>,
    /// Also consider some alternatives if the job fits as written.
    pub include_alternatives: bool,
    pub cost: CostModel,
}

impl PlanRequest {
    pub fn allows(&self, action: OomAction) -> bool {
        self.allowed.contains(&action)
    }

    /// Whether tensors reside in device memory rather than host memory.
    pub fn on_device(&self) -> bool {
        self.vram > 0
    }

    /// The job's own split, in whole normalization groups.
    pub fn requested_split(&self) -> BatchSplit {
        let max = self.samples_per_update.next_multiple_of(self.micro_batch_multiple);
        BatchSplit {
            micro_batch: self.split.micro_batch.next_multiple_of(self.micro_batch_multiple).min(max),
            ..split(self.samples_per_update, self.split.accumulation_steps, self.micro_batch_multiple)
        }
    }

    /// Bytes by which such a use exceeds the budgets.
    pub fn shortfall(&self, vram: u64, ram: u64) -> u64 {
        let vram = if self.on_device() { vram.saturating_sub(self.vram) } else { 0 };
        vram + ram.saturating_sub(self.ram)
    }

    /// The job as written.
    fn as_written(&self) -> ExecutionPlan {
        let BatchSplit { micro_batch, accumulation_steps } = self.requested_split();
        ExecutionPlan {
            micro_batch,
            accumulation_steps,
            recompute: 0,
            offload: OFFLOAD_SETS[0],
            optimizer: self.optimizer,
            eval_micro_batch: self.eval_micro_batch.unwrap_or(micro_batch),
            prefetch: self.prefetch,
        }
    }

    /// `base_plan` with another split and other recomputed blocks.
    fn varied(&self, accumulation_steps: usize, recompute: usize, base_plan: ExecutionPlan) -> ExecutionPlan {
        let plan = base_plan.with_split(self.split_into(accumulation_steps));
        let eval_micro_batch = self.eval_micro_batch.unwrap_or(plan.micro_batch);
        ExecutionPlan { recompute, eval_micro_batch, ..plan }
    }

    fn split_into(&self, accumulation_steps: usize) -> BatchSplit {
        match self.requested_split() {
            asked if asked.accumulation_steps == accumulation_steps => asked,
            _ => split(self.samples_per_update, accumulation_steps, self.micro_batch_multiple),
        }
    }
}

/// Splits an update into at most `accumulation_steps` micro-batches, as evenly as the group size allows.
pub fn split(
    samples_per_update: usize,
    accumulation_steps: usize,
    micro_batch_multiple: usize,
) -> BatchSplit {
    let micro_batch = samples_per_update.div_ceil(accumulation_steps).next_multiple_of(micro_batch_multiple);
    BatchSplit { micro_batch, accumulation_steps: samples_per_update.div_ceil(micro_batch) }
}

/// An execution plan that was estimated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub exec_plan: ExecutionPlan,
    pub vram: u64,
    pub ram: u64,
    /// Predicted seconds per update.
    pub update_seconds: f64,
}

pub struct Search<'a> {
    request: &'a PlanRequest,
    predictor: &'a dyn MemoryPredictor,
    /// Every plan estimated, the job as written first.
    pub candidates: Vec<Candidate>,
}

impl<'a> Search<'a> {
    /// Estimates the job as written.
    pub fn new(request: &'a PlanRequest, predictor: &'a dyn MemoryPredictor) -> Self {
        let mut search = Self { request, predictor, candidates: Vec::new() };
        search.consider(request.as_written());
        search
    }

    pub fn as_written(&self) -> Candidate {
        self.candidates[0]
    }

    pub fn fits(&self, candidate: &Candidate) -> bool {
        self.request.shortfall(candidate.vram, candidate.ram) == 0
    }

    /// The candidate with the smallest shortfall.
    pub fn leanest(&self) -> Candidate {
        let missing = |candidate: &&Candidate| self.request.shortfall(candidate.vram, candidate.ram);
        *self.candidates.iter().min_by_key(missing).unwrap_or(&self.candidates[0])
    }

    /// The fastest candidate that fits.
    pub fn fastest(&mut self) -> Option<Candidate> {
        let r = self.request;
        let first = r.requested_split().accumulation_steps;
        let last = match r.allows(OomAction::Shrink) {
            true => split(r.samples_per_update, r.samples_per_update, r.micro_batch_multiple)
                .accumulation_steps
                .max(first),
            false => first,
        };
        let blocks = if r.allows(OomAction::Recompute) { r.cost.block_forward.len() } else { 0 };
        if self.fits(&self.as_written()) {
            if r.include_alternatives {
                [2, 4].map(|n| n * first).iter().filter(|n| **n <= last).for_each(|n| {
                    self.consider(r.varied(*n, 0, r.as_written()));
                });
            }
            return Some(self.as_written());
        }
        let mut best: Option<Candidate> = None;
        for base_plan in self.state_options() {
            let cannot_beat_best = |steps: usize, k: usize, best: Option<Candidate>| {
                let plan = ExecutionPlan { accumulation_steps: steps, ..r.varied(steps, k, base_plan) };
                best.is_some_and(|best| r.cost.lower_bound(plan) >= best.update_seconds)
            };
            if cannot_beat_best(first, 0, best) {
                continue;
            }
            let Some(fewest_blocks) =
                first_passing(0, blocks, |k| self.consider_fits(r.varied(last, k, base_plan)))
            else {
                continue;
            };
            let mut max_steps = last;
            for k in fewest_blocks..=blocks {
                if cannot_beat_best(first, k, best) {
                    break;
                }
                // The most micro-batches that could still beat the best found.
                let bound = first_passing(first, max_steps, |steps| cannot_beat_best(steps, k, best))
                    .map_or(max_steps, |steps| steps - 1);
                let fits = |steps| self.consider_fits(r.varied(steps, k, base_plan));
                let Some(steps) = first_passing(first, bound, fits) else {
                    continue;
                };
                let found = self.consider(r.varied(steps, k, base_plan));
                if best.is_none_or(|best| found.update_seconds < best.update_seconds) {
                    best = Some(found);
                }
                max_steps = steps;
                // More recomputed blocks only take longer, unless they save activation transfers.
                if steps == first && !base_plan.offloads(Offload::Activations) {
                    break;
                }
            }
        }
        best
    }

    /// The job as written with every possible optimizer state and offload, the lowest bound on time first.
    fn state_options(&self) -> Vec<ExecutionPlan> {
        let r = self.request;
        let eight_bit = r.optimizer_8bit.filter(|_| r.allows(OomAction::Optimizer8bit));
        let offload = r.on_device() && r.allows(OomAction::Offload);
        // 8-bit state has per-block scales beside it and is small: it is never offloaded.
        let possible = |base_plan: &ExecutionPlan| {
            base_plan.offload.iter().all(|what| {
                offload
                    && r.offloads.contains(what)
                    && !(Some(base_plan.optimizer) == eight_bit && *what == Offload::OptimizerState)
            })
        };
        let all = std::iter::once(r.optimizer).chain(eight_bit).flat_map(|optimizer| {
            OFFLOAD_SETS.map(|offload| ExecutionPlan { optimizer, offload, ..r.as_written() })
        });
        let mut options: Vec<ExecutionPlan> = all.filter(possible).collect();
        let floor = |base_plan: &ExecutionPlan| r.cost.lower_bound(*base_plan);
        options.sort_by(|a, b| floor(a).total_cmp(&floor(b)).then(a.offload.len().cmp(&b.offload.len())));
        options
    }

    fn consider_fits(&mut self, exec_plan: ExecutionPlan) -> bool {
        let candidate = self.consider(exec_plan);
        self.fits(&candidate)
    }

    fn consider(&mut self, exec_plan: ExecutionPlan) -> Candidate {
        if let Some(known) = self.candidates.iter().find(|candidate| candidate.exec_plan == exec_plan) {
            return *known;
        }
        let estimate = self.predictor.estimate(exec_plan);
        let update_seconds = self.request.cost.update_seconds(exec_plan, &estimate);
        let Peak { vram_bytes: vram, ram_bytes: ram, .. } = estimate.peak;
        let candidate = Candidate { exec_plan, vram, ram, update_seconds };
        self.candidates.push(candidate);
        candidate
    }
}

/// The least value in `low..=high` that passes a monotonic test, if any does.
fn first_passing(low: usize, high: usize, mut passes: impl FnMut(usize) -> bool) -> Option<usize> {
    if high < low {
        return None;
    }
    if passes(low) {
        return Some(low);
    }
    if high == low || !passes(high) {
        return None;
    }
    let (mut fails, mut found) = (low, high);
    while found - fails > 1 {
        let middle = fails + (found - fails) / 2;
        if passes(middle) { found = middle } else { fails = middle }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::ladder::toy::{ToyPredictor, request};
    use proptest::prelude::*;

    proptest! {
        /// Against brute force: the plan found is as fast as the fastest that fits.
        #[test]
        fn nothing_that_fits_is_faster(
            batch in 1usize..40, accumulation in 1usize..4, group in 1usize..5,
            ram in 100u64..600, vram in prop_oneof![Just(0u64), 60u64..500],
            overhead in 0.0f64..0.2, may in proptest::sample::subsequence(
                vec![OomAction::Shrink, OomAction::Recompute, OomAction::Offload, OomAction::Optimizer8bit], 0..=4),
        ) {
            let mut r = PlanRequest {
                micro_batch_multiple: group,
                vram,
                allowed: may,
                ..request(batch, accumulation, ram)
            };
            r.cost.micro_batch_overhead = overhead;
            let toy = ToyPredictor { on_device: vram > 0 };
            let found = Search::new(&r, &toy).fastest();
            let mut all = Search::new(&r, &toy);
            if !all.fits(&all.as_written()) {
                let first = r.requested_split().accumulation_steps;
                let last = if r.allows(OomAction::Shrink) { r.samples_per_update } else { first };
                let blocks = if r.allows(OomAction::Recompute) { 4 } else { 0 };
                for keep in all.state_options() {
                    for steps in first..=last.max(first) {
                        for k in 0..=blocks {
                            all.consider(r.varied(steps, k, keep));
                        }
                    }
                }
            }
            let fitting = all.candidates.iter().filter(|one| all.fits(one)).map(|one| one.update_seconds);
            let fastest = fitting.min_by(f64::total_cmp);
            prop_assert_eq!(found.map(|one| one.update_seconds), fastest);
        }

        #[test]
        fn the_least_is_found_and_nothing_below_it(low in 0usize..50, more in 0usize..50, from in 0usize..120) {
            let found = first_passing(low, low + more, |x| x >= from);
            let wanted = (low..=low + more).find(|x| *x >= from);
            prop_assert_eq!(found, wanted);
        }
    }
}
