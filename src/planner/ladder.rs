//! Plans how a job runs within a budget: a pure function.
//!
//! Samples per update never change. If the job as written does not fit, the planner shrinks the micro-batch and
//! accumulates more of them, recomputes blocks, uses 8-bit optimizer state if the job allows it, and offloads to host
//! memory. Among the execution plans that fit it takes the one predicted to be fastest.

use super::advice;
use super::estimate::MemoryPredictor;
use super::execution_plan::{BatchSplit, ExecutionPlan};
use super::plan::{Budget, CandidateSummary, Disk, MemoryPlan, PlanAdjustment, PlanKey, PlanVerdict};
use super::search::{Candidate, PlanRequest, Search};
use crate::base::units::Bytes;

pub use super::search::split;

/// Chooses the fastest execution plan that fits.
pub fn plan(request: &PlanRequest, predictor: &dyn MemoryPredictor) -> MemoryPlan {
    let mut search = Search::new(request, predictor);
    let found = search.fastest();
    let picked = found.unwrap_or_else(|| search.leanest());
    let mut plan = build_plan(request, predictor, &search, picked, &|_| None);
    if found.is_none() {
        plan.verdict = PlanVerdict::DoesNotFit;
        plan.advice = Some(advice::smallest_change(request, predictor, &search));
    }
    plan
}

/// The memory plan for the candidate picked from a search. `measured_time` is that of a candidate relative to the job
/// as written, if it was measured.
pub fn build_plan(
    request: &PlanRequest,
    predictor: &dyn MemoryPredictor,
    search: &Search,
    picked: Candidate,
    measured_time: &dyn Fn(&Candidate) -> Option<f64>,
) -> MemoryPlan {
    let r = request;
    let as_written = search.as_written();
    let exec_plan = ExecutionPlan {
        eval_micro_batch: largest_free_eval_batch(r, picked.exec_plan, predictor),
        ..picked.exec_plan
    };
    let estimate = predictor.estimate(exec_plan);
    let mut candidates: Vec<&Candidate> = search.candidates.iter().collect();
    candidates.sort_by_key(|candidate| {
        let exec_plan = candidate.exec_plan;
        (
            std::cmp::Reverse(exec_plan.micro_batch),
            exec_plan.recompute,
            exec_plan.optimizer != r.optimizer,
            exec_plan.offload.len(),
        )
    });
    let summary = |candidate: &Candidate| CandidateSummary {
        change: if *candidate == as_written {
            String::new()
        } else {
            describe_candidate(r, candidate.exec_plan)
        },
        vram_bytes: candidate.vram,
        ram_bytes: candidate.ram,
        relative_time: candidate.update_seconds / as_written.update_seconds,
        measured_time: measured_time(candidate),
        fits: search.fits(candidate),
    };
    MemoryPlan {
        verdict: if picked == as_written { PlanVerdict::Fits } else { PlanVerdict::FitsAfterShrink },
        device: r.device.clone(),
        budget: Budget { vram_bytes: r.vram, ram_bytes: r.ram },
        peak: estimate.peak,
        requested: r.split,
        chosen: exec_plan,
        samples_per_update: r.samples_per_update,
        parameters: 0,
        trained_parameters: 0,
        context_bytes: r.context_bytes,
        parts: predictor.peak_breakdown(exec_plan),
        candidates: candidates.into_iter().map(summary).collect(),
        advice: None,
        shrunk: adjustments(r, predictor, as_written.exec_plan, picked.exec_plan),
        phases: estimate.phases,
        pruned: None,
        prediction: None,
        disk: Disk::default(),
    }
}

/// Describes a batch split and its recomputed blocks in the terms of the job file.
pub fn describe_split(exec_plan: ExecutionPlan) -> String {
    let recomputed = match exec_plan.recompute {
        0 => String::new(),
        1 => ", 1 block recomputed".into(),
        n => format!(", {n} blocks recomputed"),
    };
    let BatchSplit { micro_batch, accumulation_steps } = exec_plan.split();
    let steps = if accumulation_steps == 1 { "step" } else { "steps" };
    format!("micro-batch {micro_batch}, {accumulation_steps} accumulation {steps}{recomputed}")
}

/// Describes the change of a run from one plan to another.
pub fn describe_change(from: ExecutionPlan, to: ExecutionPlan) -> String {
    if from.split() != to.split() || from.recompute != to.recompute {
        describe_split(to)
    } else if from.eval_micro_batch != to.eval_micro_batch {
        format!("evaluation micro-batch {}", to.eval_micro_batch)
    } else if to.prefetch < from.prefetch {
        "read ahead one micro-batch".into()
    } else {
        "read ahead as planned".into()
    }
}

/// Describes a candidate in the terms of the job file.
pub fn describe_candidate(r: &PlanRequest, exec_plan: ExecutionPlan) -> String {
    describe_execution(exec_plan, exec_plan.optimizer != r.optimizer)
}

/// Describes the chosen execution plan like its entry in `candidates`: empty for the job as written.
pub fn describe_chosen(plan: &MemoryPlan) -> String {
    if plan.shrunk.is_empty() {
        String::new()
    } else {
        describe_execution(plan.chosen, plan.shrunk.iter().any(|change| change.key == PlanKey::Optimizer))
    }
}

fn describe_execution(exec_plan: ExecutionPlan, other_optimizer: bool) -> String {
    let state = if other_optimizer { format!(", {}", exec_plan.optimizer) } else { String::new() };
    let offloaded = match exec_plan.offload {
        [] => String::new(),
        _ => format!(", {} offloaded", exec_plan.offload_names()),
    };
    describe_split(exec_plan) + &state + &offloaded
}

/// The adjustments from the job as written to the picked candidate, each with the memory use without it.
fn adjustments(
    r: &PlanRequest,
    predictor: &dyn MemoryPredictor,
    from: ExecutionPlan,
    to: ExecutionPlan,
) -> Vec<PlanAdjustment> {
    let split = |plan: ExecutionPlan| format!("{} x {}", plan.micro_batch, plan.accumulation_steps);
    let with_split = ExecutionPlan { eval_micro_batch: to.eval_micro_batch, ..from.with_split(to.split()) };
    let with_recompute = ExecutionPlan { recompute: to.recompute, ..with_split };
    let with_state = ExecutionPlan { optimizer: to.optimizer, ..with_recompute };
    let changes = [
        (PlanKey::MicroBatch, split(from), split(to), from),
        (PlanKey::Recompute, block_count(from.recompute), block_count(to.recompute), with_split),
        (PlanKey::Optimizer, from.optimizer.to_string(), to.optimizer.to_string(), with_recompute),
        (PlanKey::Offload, from.offload_names(), to.offload_names(), with_state),
    ];
    let mut out: Vec<PlanAdjustment> = Vec::new();
    for (key, from, to, before) in changes.into_iter().filter(|(_, from, to, _)| from != to) {
        let who = if out.is_empty() { "as written it" } else { "with that alone it" };
        let why = format!("{who} takes {}", describe_usage(r, predictor, before));
        out.push(PlanAdjustment { key, from, to, why });
    }
    out
}

fn block_count(n: usize) -> String {
    if n == 1 { "1 block".into() } else { format!("{n} blocks") }
}

/// Describes the use of the budgets by an execution plan; only the exceeded budgets, if any.
fn describe_usage(r: &PlanRequest, predictor: &dyn MemoryPredictor, exec_plan: ExecutionPlan) -> String {
    let peak = predictor.estimate(exec_plan).peak;
    let places = [("vram", peak.vram_bytes, r.vram), ("ram", peak.ram_bytes, r.ram)];
    let here = places.into_iter().filter(|(place, ..)| r.on_device() || *place == "ram");
    let over = |(_, takes, budget): &(&str, u64, u64)| takes > budget;
    let all: Vec<_> = here.collect();
    let shown: Vec<_> = all.iter().filter(|one| over(one) || !all.iter().any(over)).collect();
    let text = |(place, takes, budget): &&(&str, u64, u64)| {
        format!("{} of {} {place}", Bytes(*takes), Bytes(*budget))
    };
    shown.iter().map(text).collect::<Vec<_>>().join(" and ")
}

/// The largest evaluation micro-batch that is free: the peak is no higher than with the training micro-batch.
fn largest_free_eval_batch(
    r: &PlanRequest,
    exec_plan: ExecutionPlan,
    predictor: &dyn MemoryPredictor,
) -> usize {
    if let Some(stated) = r.eval_micro_batch {
        return stated;
    }
    let requested = r.requested_split().micro_batch;
    let sizes = std::iter::successors(Some(requested * 4), |n| Some(n / 2))
        .take_while(|n| *n > exec_plan.micro_batch);
    let peak = |eval_micro_batch| predictor.estimate(ExecutionPlan { eval_micro_batch, ..exec_plan }).peak;
    let as_training = peak(exec_plan.micro_batch);
    let free = |n: &usize| {
        let peak = peak(*n);
        peak.vram_bytes <= as_training.vram_bytes && peak.ram_bytes <= as_training.ram_bytes
    };
    sizes.into_iter().find(free).unwrap_or(exec_plan.micro_batch)
}

/// A memory predictor small enough to reason about.
#[cfg(test)]
pub mod toy {
    use super::*;
    use crate::base::Phase;
    use crate::job::{self, OptimizerKind};
    use crate::planner::cost_model::CostModel;
    use crate::planner::estimate::Estimate;
    use crate::planner::execution_plan::Offload;
    use crate::planner::plan::{MemoryPart, PhasePeak};

    /// Four blocks: 60 bytes fixed and 40 of optimizer state, and per sample 2 bytes plus 2 per block that is not
    /// recomputed. 8-bit state takes a tenth. With a device, the host uses 10 bytes.
    pub struct ToyPredictor {
        pub on_device: bool,
    }

    impl MemoryPredictor for ToyPredictor {
        fn estimate(&self, exec_plan: ExecutionPlan) -> Estimate {
            let state = if exec_plan.optimizer == OptimizerKind::Adamw8bit { 4 } else { 40 };
            let samples = exec_plan.micro_batch as u64;
            let saved = 2 * (4 - exec_plan.recompute as u64) * samples;
            let offloaded_bytes = |what, bytes| if exec_plan.offloads(what) { bytes } else { 0 };
            let (state_offloaded, saved_offloaded) = (
                offloaded_bytes(Offload::OptimizerState, state),
                offloaded_bytes(Offload::Activations, saved),
            );
            let phase = |name, bytes: u64| match self.on_device {
                true => PhasePeak {
                    name,
                    vram_bytes: 60 + state - state_offloaded + bytes - saved_offloaded,
                    ram_bytes: 10 + state_offloaded + saved_offloaded,
                },
                false => PhasePeak { name, vram_bytes: 0, ram_bytes: 60 + state + bytes },
            };
            let eval = saved_offloaded + 2 * exec_plan.eval_micro_batch as u64;
            let phases = vec![phase(Phase::Backward, 2 * samples + saved), phase(Phase::Eval, eval)];
            Estimate::new(phases, 2 * saved_offloaded)
        }

        fn peak_breakdown(&self, _: ExecutionPlan) -> Vec<MemoryPart> {
            Vec::new()
        }
    }

    pub fn request(batch: usize, accumulation: usize, ram: u64) -> PlanRequest {
        PlanRequest {
            device: "cpu".into(),
            ram,
            vram: 0,
            max_ram: u64::MAX,
            context_bytes: 0,
            split: BatchSplit { micro_batch: batch, accumulation_steps: accumulation },
            samples_per_update: batch * accumulation,
            micro_batch_multiple: 1,
            optimizer: OptimizerKind::Adamw,
            optimizer_8bit: Some(OptimizerKind::Adamw8bit),
            eval_micro_batch: None,
            prefetch: 0,
            allowed: vec![job::OomAction::Shrink],
            offloads: vec![Offload::OptimizerState, Offload::Activations],
            include_alternatives: false,
            cost: CostModel {
                block_forward: vec![0.1; 4],
                loss_forward: 0.05,
                micro_batch_overhead: 0.01,
                update: 0.02,
                update_8bit: 0.03,
                state_transfer: 0.08,
                state_transfer_8bit: 0.008,
                host_bandwidth: 1000.0,
                samples: (batch * accumulation) as f64,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::toy::{ToyPredictor, request};
    use super::*;
    use crate::job::{OomAction as May, OptimizerKind};
    use crate::planner::execution_plan::Offload;
    use proptest::prelude::*;

    const HOST: ToyPredictor = ToyPredictor { on_device: false };
    const DEVICE: ToyPredictor = ToyPredictor { on_device: true };

    #[test]
    fn a_job_that_fits_is_left_as_it_is() {
        let plan = plan(&request(32, 2, 420), &HOST);
        assert_eq!(plan.verdict, PlanVerdict::Fits);
        assert_eq!((plan.chosen.micro_batch, plan.chosen.accumulation_steps), (32, 2));
        assert_eq!(plan.chosen.eval_micro_batch, 128, "evaluation may be larger for nothing");
        assert_eq!(plan.peak.ram_bytes, 420);
        assert!(plan.shrunk.is_empty() && plan.candidates.len() == 1);
    }

    #[test]
    fn the_fewest_micro_batches_that_fit_are_chosen() {
        let plan = plan(&request(32, 2, 300), &HOST);
        assert_eq!(plan.verdict, PlanVerdict::FitsAfterShrink);
        assert_eq!((plan.chosen.micro_batch, plan.chosen.accumulation_steps), (16, 4));
        assert!(plan.candidates.iter().any(|r| r.change.is_empty() && !r.fits));
        let [only] = &plan.shrunk[..] else { panic!("{:?}", plan.shrunk) };
        assert_eq!(
            (only.key, only.from.as_str(), only.to.as_str()),
            (PlanKey::MicroBatch, "32 x 2", "16 x 4")
        );
        assert_eq!(only.why, "as written it takes 420 B of 300 B ram");
    }

    #[test]
    fn the_fastest_plan_is_chosen_and_not_the_first() {
        let may = |overhead: f64, ram: u64| {
            let mut r = PlanRequest { allowed: vec![May::Shrink, May::Recompute], ..request(32, 1, ram) };
            r.cost.micro_batch_overhead = overhead;
            let chosen = plan(&r, &HOST).chosen;
            (chosen.micro_batch, chosen.recompute)
        };
        assert_eq!(may(0.001, 300), (16, 0), "cheap micro-batches are split");
        assert_eq!(may(10.0, 300), (32, 2), "expensive ones are kept and blocks recomputed");
        assert_eq!(may(0.001, 105), (1, 3), "and where only both fit, both are done");
    }

    #[test]
    fn state_in_bytes_is_taken_only_where_the_job_allows_it() {
        let r = PlanRequest { allowed: vec![May::Optimizer8bit], ..request(4, 1, 110) };
        let made = plan(&r, &HOST);
        assert_eq!(
            (made.verdict, made.chosen.optimizer),
            (PlanVerdict::FitsAfterShrink, OptimizerKind::Adamw8bit)
        );
        assert_eq!(made.shrunk[0].key, PlanKey::Optimizer);
        let none = PlanRequest { allowed: vec![], ..r };
        assert_eq!(plan(&none, &HOST).verdict, PlanVerdict::DoesNotFit);
        let sgd = PlanRequest { allowed: vec![May::Optimizer8bit], optimizer_8bit: None, ..none };
        assert_eq!(plan(&sgd, &HOST).verdict, PlanVerdict::DoesNotFit);
    }

    #[test]
    fn a_device_offloads_to_a_host_that_has_room() {
        let r = PlanRequest { vram: 110, allowed: vec![May::Offload], ..request(4, 1, 1000) };
        let found = plan(&r, &DEVICE);
        assert_eq!(found.chosen.offload, [Offload::Activations], "moves while blocks compute");
        assert_eq!((found.peak.vram_bytes, found.peak.ram_bytes), (108, 42));
        let r = PlanRequest { vram: 70, ..r };
        assert_eq!(plan(&r, &DEVICE).chosen.offload, [Offload::OptimizerState, Offload::Activations]);
        assert_eq!(plan(&PlanRequest { ram: 40, ..r }, &DEVICE).verdict, PlanVerdict::DoesNotFit);
        let host = PlanRequest { allowed: vec![May::Offload], ..request(4, 1, 110) };
        assert_eq!(
            plan(&host, &HOST).verdict,
            PlanVerdict::DoesNotFit,
            "the host is nowhere else than itself"
        );
    }

    proptest! {
        #[test]
        fn a_plan_keeps_the_samples_and_the_budget(
            batch in 1usize..200,
            accumulation in 1usize..20,
            ram in 0u64..3000,
            group in 1usize..9,
        ) {
            let r = PlanRequest { micro_batch_multiple: group, ..request(batch, accumulation, ram) };
            let plan = plan(&r, &HOST);
            let c = &plan.chosen;
            prop_assert_eq!(plan.samples_per_update, batch * accumulation);
            prop_assert_eq!(c.micro_batch % group, 0);
            prop_assert!(c.micro_batch * c.accumulation_steps >= batch * accumulation, "no sample is left out");
            prop_assert!(c.micro_batch * (c.accumulation_steps - 1) < batch * accumulation, "no micro-batch is empty");
            if plan.verdict != PlanVerdict::DoesNotFit {
                prop_assert!(plan.peak.ram_bytes <= ram);
                // One micro-batch fewer would not have fitted.
                if plan.verdict == PlanVerdict::FitsAfterShrink && c.accumulation_steps > 1 {
                    let larger = split(batch * accumulation, c.accumulation_steps - 1, group);
                    prop_assert!(100 + 10 * larger.micro_batch as u64 > ram);
                }
            } else {
                prop_assert!(100 + 10 * group as u64 > ram);
            }
        }
    }
}
