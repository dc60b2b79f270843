//! Advice for a job that does not fit: the smallest change that makes it fit, as a key and a value.
//!
//! Every suggestion was planned with the change applied, and fits. In order: actions that the job forbids and that cost
//! only time; a smaller evaluation batch; a larger budget, if the machine has the memory; actions that change the
//! numerics slightly.

use super::estimate::MemoryPredictor;
use super::execution_plan::Offload;
use super::ladder;
use super::search::{Candidate, PlanRequest, Search};
use crate::base::units::Bytes;
use crate::job::OomAction;

const MIB: u64 = 1 << 20;

/// Describes the smallest change that makes the job fit, after a search that found nothing. The text contains
/// `key = value` in backticks.
pub fn smallest_change(r: &PlanRequest, predictor: &dyn MemoryPredictor, search: &Search) -> String {
    let leanest = search.leanest();
    advise_allowing(r, predictor)
        .or_else(|| advise_eval_batch(r, predictor))
        .or_else(|| advise_budget(r, predictor, leanest))
        .or_else(|| advise_8bit_optimizer(r, predictor))
        .unwrap_or_else(|| advise_machine(r, leanest))
}

fn fastest_fit(r: &PlanRequest, predictor: &dyn MemoryPredictor) -> Option<Candidate> {
    Search::new(r, predictor).fastest()
}

/// The fewest actions that the job forbids, that leave the result unchanged and that make it fit.
fn advise_allowing(r: &PlanRequest, predictor: &dyn MemoryPredictor) -> Option<String> {
    let exact = [OomAction::Shrink, OomAction::Recompute, OomAction::Offload];
    let possible =
        |rung: &OomAction| !r.allows(*rung) && (*rung != OomAction::Offload || !r.offloads.is_empty());
    let forbidden: Vec<OomAction> = exact.into_iter().filter(possible).collect();
    let mut subsets: Vec<Vec<OomAction>> = (1usize..1 << forbidden.len())
        .map(|set| forbidden.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, r)| *r).collect())
        .collect();
    subsets.sort_by_key(Vec::len);
    let with =
        |added: &Vec<OomAction>| PlanRequest { allowed: [&r.allowed[..], added].concat(), ..r.clone() };
    let added = subsets.iter().find(|added| fastest_fit(&with(added), predictor).is_some())?;
    let what = added.iter().map(|rung| match rung {
        OomAction::Shrink => "smaller micro-batches",
        OomAction::Recompute => "recomputation",
        OomAction::Offload => "offload to host memory",
        OomAction::Optimizer8bit => "optimizer state in bytes",
    });
    let what = what.collect::<Vec<_>>().join(" and ");
    Some(format!("allow {what} with `{}`: the result stays the same", on_oom(&with(added))))
}

fn on_oom(r: &PlanRequest) -> String {
    let names: Vec<String> = r.allowed.iter().map(|rung| format!("\"{}\"", rung.name())).collect();
    format!("memory.on_oom = [{}]", names.join(", "))
}

/// A smaller evaluation batch, if the job sets one and it is what does not fit.
fn advise_eval_batch(r: &PlanRequest, predictor: &dyn MemoryPredictor) -> Option<String> {
    r.eval_micro_batch?;
    let free = PlanRequest { eval_micro_batch: None, ..r.clone() };
    let found = fastest_fit(&free, predictor)?;
    Some(format!("evaluate fewer samples at a time with `eval.batch_size = {}`", found.exec_plan.micro_batch))
}

/// A larger budget for the candidate with the smallest shortfall, if the machine has the memory.
fn advise_budget(r: &PlanRequest, predictor: &dyn MemoryPredictor, leanest: Candidate) -> Option<String> {
    let ram = sufficient_ram(predictor, leanest);
    if ram.max(leanest.ram) > r.max_ram.max(r.ram) {
        return None;
    }
    let keys = [
        ("memory.vram", leanest.vram.next_multiple_of(MIB), r.vram, r.on_device()),
        ("memory.ram", ram, r.ram, leanest.ram > r.ram),
    ];
    let exceeded = keys.into_iter().filter(|(_, needs, budget, counts)| *counts && needs > budget);
    let give = exceeded.map(|(key, needs, budget, _)| {
        format!("`{key} = \"{}MiB\"` ({} more)", needs / MIB, Bytes(needs - budget))
    });
    let give = give.collect::<Vec<_>>().join(" and ");
    Some(format!(
        "give it {give}, or make the model smaller: with {} it needs {}",
        ladder::describe_candidate(r, leanest.exec_plan),
        describe_needs(r, leanest)
    ))
}

/// Host bytes, in whole MiB, within which a candidate fits. Some buffers grow with the budget up to a useful size, so
/// the budget is raised until they fit too.
fn sufficient_ram(predictor: &dyn MemoryPredictor, candidate: Candidate) -> u64 {
    let mut ram = candidate.ram.next_multiple_of(MIB);
    loop {
        match predictor.estimate_within(candidate.exec_plan, ram).peak.ram_bytes {
            needs if needs <= ram => return ram,
            needs => ram = needs.next_multiple_of(MIB),
        }
    }
}

fn describe_needs(r: &PlanRequest, candidate: Candidate) -> String {
    match r.on_device() {
        true => format!("{} of vram and {} of ram", Bytes(candidate.vram), Bytes(candidate.ram)),
        false => Bytes(candidate.ram).to_string(),
    }
}

/// 8-bit optimizer state, on top of everything that the job allows.
fn advise_8bit_optimizer(r: &PlanRequest, predictor: &dyn MemoryPredictor) -> Option<String> {
    r.optimizer_8bit.as_ref().filter(|_| !r.allows(OomAction::Optimizer8bit))?;
    let with = PlanRequest { allowed: [&r.allowed[..], &[OomAction::Optimizer8bit]].concat(), ..r.clone() };
    fastest_fit(&with, predictor)?;
    Some(format!("keep optimizer state in bytes with `{}`: the numbers differ a little", on_oom(&with)))
}

/// Nothing helps except another machine or another model.
fn advise_machine(r: &PlanRequest, leanest: Candidate) -> String {
    let offloaded =
        if leanest.exec_plan.offloads(Offload::Activations) { ", all that can be offloaded" } else { "" };
    format!(
        "it needs a machine with {} (`memory.ram = \"{}MiB\"`; here are {}), or a smaller model: that is \
         with {}{offloaded}",
        describe_needs(r, leanest),
        leanest.ram.div_ceil(MIB),
        Bytes(r.max_ram),
        ladder::describe_candidate(r, leanest.exec_plan),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::ladder::plan;
    use crate::planner::ladder::toy::{ToyPredictor, request};
    use crate::planner::plan::PlanVerdict;
    use proptest::prelude::*;

    const HOST: ToyPredictor = ToyPredictor { on_device: false };

    fn advice(r: &PlanRequest, toy: &ToyPredictor) -> String {
        let plan = plan(r, toy);
        assert_eq!(plan.verdict, PlanVerdict::DoesNotFit);
        plan.advice.unwrap()
    }

    #[test]
    fn what_is_forbidden_and_harmless_comes_first() {
        let none = PlanRequest { allowed: vec![], ..request(32, 1, 300) };
        let text = advice(&none, &HOST);
        assert!(text.contains("`memory.on_oom = [\"shrink\"]`"), "{text}");
        let both = advice(&PlanRequest { ram: 103, ..none.clone() }, &HOST);
        assert!(both.contains("`memory.on_oom = [\"shrink\", \"recompute\"]`"), "{both}");
        let kept = advice(&PlanRequest { allowed: vec![OomAction::Shrink], ram: 103, ..none }, &HOST);
        assert!(kept.contains("recomputation with `memory.on_oom = [\"shrink\", \"recompute\"]`"), "{kept}");
    }

    #[test]
    fn an_evaluation_that_alone_does_not_fit_is_made_smaller() {
        let r = PlanRequest { eval_micro_batch: Some(900), ..request(32, 1, 450) };
        let text = advice(&r, &HOST);
        assert!(text.contains("`eval.batch_size = 32`"), "{text}");
        assert_eq!(plan(&PlanRequest { eval_micro_batch: Some(32), ..r }, &HOST).verdict, PlanVerdict::Fits);
    }

    #[test]
    fn a_budget_is_raised_no_further_than_the_machine_goes() {
        let all = vec![OomAction::Shrink, OomAction::Recompute, OomAction::Offload];
        let r = PlanRequest { allowed: all.clone(), ..request(32, 1, 90) };
        let text = advice(&r, &HOST);
        assert!(text.starts_with("give it `memory.ram = \"1MiB\"`"), "{text}");
        let text = advice(&PlanRequest { max_ram: 95, ..r.clone() }, &HOST);
        assert!(text.contains("\"optimizer-8bit\"]`"), "{text}");
        let text = advice(&PlanRequest { max_ram: 20, ram: 20, ..r }, &HOST);
        assert!(text.starts_with("it needs a machine with 102 B"), "{text}");
    }

    proptest! {
        /// The advised value is sufficient, on the host and on a device.
        #[test]
        fn the_advice_makes_it_fit(batch in 1usize..60, ram in 0u64..140, vram in prop_oneof![Just(0u64), 1u64..140]) {
            let toy = ToyPredictor { on_device: vram > 0 };
            let may = vec![OomAction::Shrink, OomAction::Recompute, OomAction::Offload];
            let r = PlanRequest { allowed: may, vram, ..request(batch, 1, ram) };
            let planned = plan(&r, &toy);
            if planned.verdict == PlanVerdict::DoesNotFit {
                let text = planned.advice.unwrap();
                let stated = |key: &str, now: u64| {
                    let value = text.split(&format!("`{key} = \"")).nth(1).and_then(|t| t.split("MiB").next());
                    value.map_or(now, |mib| mib.parse::<u64>().unwrap() * MIB)
                };
                let given = PlanRequest { vram: stated("memory.vram", vram), ram: stated("memory.ram", ram), ..r };
                prop_assert_ne!(plan(&given, &toy).verdict, PlanVerdict::DoesNotFit, "{}", text);
            }
        }
    }
}
