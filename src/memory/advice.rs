//! What to change in a job that does not fit: the smallest change that makes it fit, as a key and a value.
//!
//! Everything advised was planned with the change made and fits. First what the job forbids and costs only time,
//! then a smaller evaluation, then a larger budget where the machine has it, then what changes numbers a little.

use super::estimate::Predict;
use super::ladder;
use super::plan::Offload;
use super::search::{Considered, Request, Search};
use crate::job::Rung;
use crate::units::Bytes;

const MIB: u64 = 1 << 20;

/// The smallest change that makes the job of a search that found nothing fit, for people to read: it holds
/// `key = value` between backticks.
pub fn smallest_change(r: &Request, predict: &dyn Predict, search: &Search) -> String {
    let leanest = search.leanest();
    allowed(r, predict)
        .or_else(|| evaluation(r, predict))
        .or_else(|| budget(r, predict, leanest))
        .or_else(|| eight_bit(r, predict))
        .unwrap_or_else(|| machine(r, leanest))
}

fn fits(r: &Request, predict: &dyn Predict) -> Option<Considered> {
    Search::new(r, predict).fastest()
}

/// What the job does not allow but could without another result: the fewest that make it fit.
fn allowed(r: &Request, predict: &dyn Predict) -> Option<String> {
    let exact = [Rung::Shrink, Rung::Recompute, Rung::Offload];
    let possible = |rung: &Rung| !r.may(*rung) && (*rung != Rung::Offload || !r.offloads.is_empty());
    let forbidden: Vec<Rung> = exact.into_iter().filter(possible).collect();
    let mut some: Vec<Vec<Rung>> = (1usize..1 << forbidden.len())
        .map(|set| forbidden.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, r)| *r).collect())
        .collect();
    some.sort_by_key(Vec::len);
    let with = |added: &Vec<Rung>| Request { may: [&r.may[..], added].concat(), ..r.clone() };
    let added = some.iter().find(|added| fits(&with(added), predict).is_some())?;
    let what = added.iter().map(|rung| match rung {
        Rung::Shrink => "smaller micro-batches",
        Rung::Recompute => "recomputation",
        Rung::Offload => "offload to host memory",
        Rung::Optimizer8bit => "optimizer state in bytes",
    });
    let what = what.collect::<Vec<_>>().join(" and ");
    Some(format!("allow {what} with `{}`: the result stays the same", on_oom(&with(added))))
}

fn on_oom(r: &Request) -> String {
    let names: Vec<String> = r.may.iter().map(|rung| format!("\"{}\"", rung.name())).collect();
    format!("memory.on_oom = [{}]", names.join(", "))
}

/// A smaller evaluation, where the job states a size and that is what does not fit.
fn evaluation(r: &Request, predict: &dyn Predict) -> Option<String> {
    r.eval_micro_batch?;
    let free = Request { eval_micro_batch: None, ..r.clone() };
    let found = fits(&free, predict)?;
    Some(format!("evaluate fewer samples at a time with `eval.batch_size = {}`", found.split.micro_batch))
}

/// A larger budget for the way that comes nearest, if the machine has it.
fn budget(r: &Request, predict: &dyn Predict, leanest: Considered) -> Option<String> {
    let ram = enough(predict, leanest);
    if ram.max(leanest.ram) > r.most_ram.max(r.ram) {
        return None;
    }
    let keys = [
        ("memory.vram", leanest.vram.next_multiple_of(MIB), r.vram, r.on_device()),
        ("memory.ram", ram, r.ram, leanest.ram > r.ram),
    ];
    let short = keys.into_iter().filter(|(_, needs, budget, counts)| *counts && needs > budget);
    let give = short.map(|(key, needs, budget, _)| {
        format!("`{key} = \"{}MiB\"` ({} more)", needs / MIB, Bytes(needs - budget))
    });
    let give = give.collect::<Vec<_>>().join(" and ");
    Some(format!(
        "give it {give}, or make the model smaller: with {} it needs {}",
        ladder::changed(r, &leanest),
        needs(r, leanest)
    ))
}

/// Host bytes, in whole MiB, within which a way fits. Some buffers grow with the budget, up to a size that is
/// useful, so the budget is raised until they fit too.
fn enough(predict: &dyn Predict, one: Considered) -> u64 {
    let mut ram = one.ram.next_multiple_of(MIB);
    loop {
        match predict.within(one.way, ram).ram {
            needs if needs <= ram => return ram,
            needs => ram = needs.next_multiple_of(MIB),
        }
    }
}

fn needs(r: &Request, one: Considered) -> String {
    match r.on_device() {
        true => format!("{} of vram and {} of ram", Bytes(one.vram), Bytes(one.ram)),
        false => Bytes(one.ram).to_string(),
    }
}

/// Optimizer state in bytes, with all else that may be done.
fn eight_bit(r: &Request, predict: &dyn Predict) -> Option<String> {
    r.optimizer_8bit.as_ref().filter(|_| !r.may(Rung::Optimizer8bit))?;
    let with = Request { may: [&r.may[..], &[Rung::Optimizer8bit]].concat(), ..r.clone() };
    fits(&with, predict)?;
    Some(format!("keep optimizer state in bytes with `{}`: the numbers differ a little", on_oom(&with)))
}

/// Nothing but another machine or another model.
fn machine(r: &Request, leanest: Considered) -> String {
    let moved = if leanest.way.offloads(Offload::Activations) { ", all that can be offloaded" } else { "" };
    format!(
        "it needs a machine with {} (`memory.ram = \"{}MiB\"`; here are {}), or a smaller model: that is with {}{moved}",
        needs(r, leanest),
        leanest.ram.div_ceil(MIB),
        Bytes(r.most_ram),
        ladder::changed(r, &leanest),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ladder::plan;
    use crate::memory::ladder::toy::{Toy, request};
    use crate::memory::plan::Verdict;
    use proptest::prelude::*;

    const HOST: Toy = Toy { on_device: false };

    fn advice(r: &Request, toy: &Toy) -> String {
        let plan = plan(r, toy);
        assert_eq!(plan.verdict, Verdict::DoesNotFit);
        plan.advice.unwrap()
    }

    #[test]
    fn what_is_forbidden_and_harmless_comes_first() {
        let none = Request { may: vec![], ..request(32, 1, 300) };
        let text = advice(&none, &HOST);
        assert!(text.contains("`memory.on_oom = [\"shrink\"]`"), "{text}");
        let both = advice(&Request { ram: 103, ..none.clone() }, &HOST);
        assert!(both.contains("`memory.on_oom = [\"shrink\", \"recompute\"]`"), "{both}");
        let kept = advice(&Request { may: vec![Rung::Shrink], ram: 103, ..none }, &HOST);
        assert!(kept.contains("recomputation with `memory.on_oom = [\"shrink\", \"recompute\"]`"), "{kept}");
    }

    #[test]
    fn an_evaluation_that_alone_does_not_fit_is_made_smaller() {
        let r = Request { eval_micro_batch: Some(900), ..request(32, 1, 450) };
        let text = advice(&r, &HOST);
        assert!(text.contains("`eval.batch_size = 32`"), "{text}");
        assert_eq!(plan(&Request { eval_micro_batch: Some(32), ..r }, &HOST).verdict, Verdict::Fits);
    }

    #[test]
    fn a_budget_is_raised_no_further_than_the_machine_goes() {
        let all = vec![Rung::Shrink, Rung::Recompute, Rung::Offload];
        let r = Request { may: all.clone(), ..request(32, 1, 90) };
        let text = advice(&r, &HOST);
        assert!(text.starts_with("give it `memory.ram = \"1MiB\"`"), "{text}");
        let text = advice(&Request { most_ram: 95, ..r.clone() }, &HOST);
        assert!(text.contains("\"optimizer-8bit\"]`"), "{text}");
        let text = advice(&Request { most_ram: 20, ram: 20, ..r }, &HOST);
        assert!(text.starts_with("it needs a machine with 102 B"), "{text}");
    }

    proptest! {
        /// What is said to be enough is enough, on the host and on a device.
        #[test]
        fn the_advice_makes_it_fit(batch in 1usize..60, ram in 0u64..140, vram in prop_oneof![Just(0u64), 1u64..140]) {
            let toy = Toy { on_device: vram > 0 };
            let may = vec![Rung::Shrink, Rung::Recompute, Rung::Offload];
            let r = Request { may, vram, ..request(batch, 1, ram) };
            let planned = plan(&r, &toy);
            if planned.verdict == Verdict::DoesNotFit {
                let text = planned.advice.unwrap();
                let stated = |key: &str, now: u64| {
                    let value = text.split(&format!("`{key} = \"")).nth(1).and_then(|t| t.split("MiB").next());
                    value.map_or(now, |mib| mib.parse::<u64>().unwrap() * MIB)
                };
                let given = Request { vram: stated("memory.vram", vram), ram: stated("memory.ram", ram), ..r };
                prop_assert_ne!(plan(&given, &toy).verdict, Verdict::DoesNotFit, "{}", text);
            }
        }
    }
}
