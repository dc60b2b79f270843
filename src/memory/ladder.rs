//! From a job and a budget to the way it will be run: a pure function.
//!
//! Samples per update never change. When the job as written does not fit, the micro-batch shrinks and more are
//! accumulated, blocks keep only their input and run forward again, optimizer state is kept in bytes where the
//! job allows it, and what a device need not have at hand waits in host memory; of the ways that fit the one
//! predicted to be the fastest is taken.

use super::advice;
use super::estimate::{Predict, Way};
use super::plan::{Budget, Chosen, Disk, Offload, Peak, Plan, Rung, Shrunk, Split, Verdict};
use super::search::{Considered, Request, Search};
use crate::units::Bytes;

pub use super::search::split;

/// Chooses the fastest way that fits.
pub fn plan(request: &Request, predict: &dyn Predict) -> Plan {
    let mut search = Search::new(request, predict);
    let found = search.fastest();
    let mut plan = describe(request, predict, &search, found.unwrap_or_else(|| search.leanest()));
    if found.is_none() {
        plan.verdict = Verdict::DoesNotFit;
        plan.advice = Some(advice::smallest_change(request, predict, &search));
    }
    plan
}

/// The plan of running in the way that was picked from a search.
pub fn describe(request: &Request, predict: &dyn Predict, search: &Search, picked: Considered) -> Plan {
    let r = request;
    let as_written = search.as_written();
    let way = Way { eval_micro_batch: evaluation(r, picked.way, predict), ..picked.way };
    let estimate = predict.estimate(way);
    let mut seen: Vec<&Considered> = search.seen.iter().collect();
    seen.sort_by_key(|one| {
        let way = one.way;
        (std::cmp::Reverse(one.split.micro_batch), way.recompute, way.eight_bit, way.offload.len())
    });
    let rung = |one: &Considered| Rung {
        change: if *one == as_written { String::new() } else { changed(r, one) },
        vram_bytes: one.vram,
        ram_bytes: one.ram,
        relative_time: one.time / as_written.time,
        measured_time: None,
        fits: search.fits(one),
    };
    Plan {
        verdict: if picked == as_written { Verdict::Fits } else { Verdict::FitsAfterShrink },
        device: r.device.clone(),
        budget: Budget { vram_bytes: r.vram, ram_bytes: r.ram },
        peak: Peak { vram_bytes: estimate.vram, ram_bytes: estimate.ram, phase: estimate.phase.into() },
        requested: r.split,
        chosen: Chosen {
            micro_batch: picked.split.micro_batch,
            accumulation_steps: picked.split.accumulation_steps,
            recompute: way.recompute,
            offload: way.offload.to_vec(),
            optimizer: optimizer(r, way).into(),
            eval_micro_batch: way.eval_micro_batch,
        },
        samples_per_update: r.samples_per_update,
        context_bytes: r.context,
        parts: predict.parts(way),
        rungs: seen.into_iter().map(rung).collect(),
        advice: None,
        shrunk: shrunk(r, predict, as_written, picked),
        phases: estimate.phases(),
        disk: Disk::default(),
    }
}

fn optimizer(r: &Request, way: Way) -> &str {
    r.optimizer_8bit.as_deref().filter(|_| way.eight_bit).unwrap_or(&r.optimizer)
}

/// A split and the blocks recomputed with it, in the job's words.
pub fn change(split: Split, recompute: usize) -> String {
    let again = match recompute {
        0 => String::new(),
        1 => ", 1 block recomputed".into(),
        n => format!(", {n} blocks recomputed"),
    };
    let steps = if split.accumulation_steps == 1 { "step" } else { "steps" };
    format!("micro-batch {}, {} accumulation {steps}{again}", split.micro_batch, split.accumulation_steps)
}

/// A way of running, in the job's words.
pub fn changed(r: &Request, one: &Considered) -> String {
    let state = one.way.eight_bit.then(|| optimizer(r, one.way));
    words(one.split, one.way.recompute, state, one.way.offload)
}

/// The way a plan has chosen, as its rung says it: empty for the job as written.
pub fn chosen(plan: &Plan) -> String {
    let c = &plan.chosen;
    let state = plan.shrunk.iter().any(|rung| rung.rung == "optimizer").then_some(c.optimizer.as_str());
    if plan.shrunk.is_empty() { String::new() } else { words(c.split(), c.recompute, state, &c.offload) }
}

fn words(split: Split, recompute: usize, state: Option<&str>, offload: &[Offload]) -> String {
    let state = state.map_or_else(String::new, |kind| format!(", {kind}"));
    let away = match offload {
        [] => String::new(),
        offload => format!(", {} offloaded", list(offload)),
    };
    change(split, recompute) + &state + &away
}

fn list(offload: &[Offload]) -> String {
    let names: Vec<String> = offload.iter().map(ToString::to_string).collect();
    if names.is_empty() { "nothing".into() } else { names.join(" and ") }
}

/// From the job as written to what was picked, rung by rung: each with what it would take without it.
fn shrunk(r: &Request, predict: &dyn Predict, as_written: Considered, picked: Considered) -> Vec<Shrunk> {
    let (from, to) = (as_written.way, picked.way);
    let (was, is) = (as_written.split, picked.split);
    let shown = |split: Split| format!("{} x {}", split.micro_batch, split.accumulation_steps);
    let sizes = Way { micro_batch: to.micro_batch, eval_micro_batch: to.eval_micro_batch, ..from };
    let again = Way { recompute: to.recompute, ..sizes };
    let state = Way { eight_bit: to.eight_bit, ..again };
    let rungs = [
        ("micro_batch", shown(was), shown(is), from),
        ("recompute", blocks(from.recompute), blocks(to.recompute), sizes),
        ("optimizer", optimizer(r, from).into(), optimizer(r, to).into(), again),
        ("offload", list(from.offload), list(to.offload), state),
    ];
    let mut out: Vec<Shrunk> = Vec::new();
    for (rung, from, to, before) in rungs.into_iter().filter(|(_, from, to, _)| from != to) {
        let who = if out.is_empty() { "as written it" } else { "with that alone it" };
        let why = format!("{who} takes {}", taken(r, predict, before));
        out.push(Shrunk { rung: rung.into(), from, to, why });
    }
    out
}

fn blocks(n: usize) -> String {
    if n == 1 { "1 block".into() } else { format!("{n} blocks") }
}

/// What a way takes of the budgets, those it goes beyond where it does.
fn taken(r: &Request, predict: &dyn Predict, way: Way) -> String {
    let estimate = predict.estimate(way);
    let places = [("vram", estimate.vram, r.vram), ("ram", estimate.ram, r.ram)];
    let here = places.into_iter().filter(|(place, ..)| r.on_device() || *place == "ram");
    let over = |(_, takes, budget): &(&str, u64, u64)| takes > budget;
    let all: Vec<_> = here.collect();
    let shown: Vec<_> = all.iter().filter(|one| over(one) || !all.iter().any(over)).collect();
    let text = |(place, takes, budget): &&(&str, u64, u64)| {
        format!("{} of {} {place}", Bytes(*takes), Bytes(*budget))
    };
    shown.iter().map(text).collect::<Vec<_>>().join(" and ")
}

/// The largest evaluation micro-batch that costs no memory: the peak is no higher than with that of training.
fn evaluation(r: &Request, way: Way, predict: &dyn Predict) -> usize {
    if let Some(stated) = r.eval_micro_batch {
        return stated;
    }
    let asked = r.asked().micro_batch;
    let sizes = std::iter::successors(Some(asked * 4), |n| Some(n / 2)).take_while(|n| *n > way.micro_batch);
    let as_training = predict.estimate(Way { eval_micro_batch: way.micro_batch, ..way });
    let free = |n: &usize| {
        let all = predict.estimate(Way { eval_micro_batch: *n, ..way });
        all.vram <= as_training.vram && all.ram <= as_training.ram
    };
    sizes.into_iter().find(free).unwrap_or(way.micro_batch)
}

/// A step small enough to reason about.
#[cfg(test)]
pub mod toy {
    use super::*;
    use crate::job;
    use crate::memory::estimate::{Estimate, Held};
    use crate::memory::plan::Part;
    use crate::memory::time::Times;

    /// A step of four blocks that holds 60 bytes and 40 of optimizer state, and for each sample 2 and 2 a block
    /// that is kept. A tenth of the state is enough in bytes; the host of a device has 10 bytes in use.
    pub struct Toy {
        pub on_device: bool,
    }

    impl Predict for Toy {
        fn estimate(&self, way: Way) -> Estimate {
            let state = if way.eight_bit { 4 } else { 40 };
            let samples = way.micro_batch as u64;
            let saved = 2 * (4 - way.recompute as u64) * samples;
            let moved = |what, bytes| if way.offload.contains(&what) { bytes } else { 0 };
            let (state_away, saved_away) =
                (moved(Offload::OptimizerState, state), moved(Offload::Activations, saved));
            let on = |bytes: u64| match self.on_device {
                true => Held {
                    vram: 60 + state - state_away + bytes - saved_away,
                    ram: 10 + state_away + saved_away,
                },
                false => Held { vram: 0, ram: 60 + state + bytes },
            };
            let eval = Held { ..on(saved_away + 2 * way.eval_micro_batch as u64) };
            let phases = vec![("backward", on(2 * samples + saved)), ("eval", eval)];
            Estimate::new(phases, 2 * saved_away)
        }

        fn parts(&self, _: Way) -> Vec<Part> {
            Vec::new()
        }
    }

    pub fn request(batch: usize, accumulation: usize, ram: u64) -> Request {
        Request {
            device: "cpu".into(),
            ram,
            vram: 0,
            most_ram: u64::MAX,
            context: 0,
            split: Split { micro_batch: batch, accumulation_steps: accumulation },
            samples_per_update: batch * accumulation,
            group: 1,
            optimizer: "adamw".into(),
            optimizer_8bit: Some("adamw8bit".into()),
            eval_micro_batch: None,
            may: vec![job::Rung::Shrink],
            offloads: vec![Offload::OptimizerState, Offload::Activations],
            more: false,
            times: Times {
                blocks: vec![0.1; 4],
                loss: 0.05,
                micro_batch: 0.01,
                update: 0.02,
                update_8bit: 0.03,
                state: 0.08,
                state_8bit: 0.008,
                link: 1000.0,
                samples: (batch * accumulation) as f64,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::toy::{Toy, request};
    use super::*;
    use crate::job::Rung as May;
    use proptest::prelude::*;

    const HOST: Toy = Toy { on_device: false };
    const DEVICE: Toy = Toy { on_device: true };

    #[test]
    fn a_job_that_fits_is_left_as_it_is() {
        let plan = plan(&request(32, 2, 420), &HOST);
        assert_eq!(plan.verdict, Verdict::Fits);
        assert_eq!((plan.chosen.micro_batch, plan.chosen.accumulation_steps), (32, 2));
        assert_eq!(plan.chosen.eval_micro_batch, 128, "evaluation may be larger for nothing");
        assert_eq!(plan.peak.ram_bytes, 420);
        assert!(plan.shrunk.is_empty() && plan.rungs.len() == 1);
    }

    #[test]
    fn the_fewest_micro_batches_that_fit_are_chosen() {
        let plan = plan(&request(32, 2, 300), &HOST);
        assert_eq!(plan.verdict, Verdict::FitsAfterShrink);
        assert_eq!((plan.chosen.micro_batch, plan.chosen.accumulation_steps), (16, 4));
        assert!(plan.rungs.iter().any(|r| r.change.is_empty() && !r.fits));
        let [only] = &plan.shrunk[..] else { panic!("{:?}", plan.shrunk) };
        assert_eq!(
            (only.rung.as_str(), only.from.as_str(), only.to.as_str()),
            ("micro_batch", "32 x 2", "16 x 4")
        );
        assert_eq!(only.why, "as written it takes 420 B of 300 B ram");
    }

    #[test]
    fn the_fastest_way_is_taken_and_not_the_first() {
        let may = |overhead: f64, ram: u64| {
            let mut r = Request { may: vec![May::Shrink, May::Recompute], ..request(32, 1, ram) };
            r.times.micro_batch = overhead;
            let chosen = plan(&r, &HOST).chosen;
            (chosen.micro_batch, chosen.recompute)
        };
        assert_eq!(may(0.001, 300), (16, 0), "cheap micro-batches are split");
        assert_eq!(may(10.0, 300), (32, 2), "dear ones are kept and blocks run again");
        assert_eq!(may(0.001, 105), (1, 3), "and where only both fit, both are done");
    }

    #[test]
    fn state_in_bytes_is_taken_only_where_the_job_allows_it() {
        let r = Request { may: vec![May::Optimizer8bit], ..request(4, 1, 110) };
        let plan = plan(&r, &HOST);
        assert_eq!((plan.verdict, plan.chosen.optimizer.as_str()), (Verdict::FitsAfterShrink, "adamw8bit"));
        assert_eq!(plan.shrunk[0].rung, "optimizer");
        let none = Request { may: vec![], ..r };
        assert_eq!(super::plan(&none, &HOST).verdict, Verdict::DoesNotFit);
        let sgd = Request { may: vec![May::Optimizer8bit], optimizer_8bit: None, ..none };
        assert_eq!(super::plan(&sgd, &HOST).verdict, Verdict::DoesNotFit);
    }

    #[test]
    fn a_device_offloads_to_a_host_that_has_room() {
        let r = Request { vram: 110, may: vec![May::Offload], ..request(4, 1, 1000) };
        let found = plan(&r, &DEVICE);
        assert_eq!(found.chosen.offload, [Offload::Activations], "moves while blocks compute");
        assert_eq!((found.peak.vram_bytes, found.peak.ram_bytes), (108, 42));
        let r = Request { vram: 70, ..r };
        assert_eq!(plan(&r, &DEVICE).chosen.offload, [Offload::OptimizerState, Offload::Activations]);
        assert_eq!(plan(&Request { ram: 40, ..r }, &DEVICE).verdict, Verdict::DoesNotFit);
        let host = Request { may: vec![May::Offload], ..request(4, 1, 110) };
        assert_eq!(plan(&host, &HOST).verdict, Verdict::DoesNotFit, "the host is nowhere else than itself");
    }

    proptest! {
        #[test]
        fn a_plan_keeps_the_samples_and_the_budget(batch in 1usize..200, accumulation in 1usize..20, ram in 0u64..3000, group in 1usize..9) {
            let r = Request { group, ..request(batch, accumulation, ram) };
            let plan = plan(&r, &HOST);
            let c = &plan.chosen;
            prop_assert_eq!(plan.samples_per_update, batch * accumulation);
            prop_assert_eq!(c.micro_batch % group, 0);
            prop_assert!(c.micro_batch * c.accumulation_steps >= batch * accumulation, "no sample is left out");
            prop_assert!(c.micro_batch * (c.accumulation_steps - 1) < batch * accumulation, "no micro-batch is empty");
            if plan.verdict != Verdict::DoesNotFit {
                prop_assert!(plan.peak.ram_bytes <= ram);
                // One micro-batch fewer would not have fitted.
                if plan.verdict == Verdict::FitsAfterShrink && c.accumulation_steps > 1 {
                    let larger = split(batch * accumulation, c.accumulation_steps - 1, group);
                    prop_assert!(100 + 10 * larger.micro_batch as u64 > ram);
                }
            } else {
                prop_assert!(100 + 10 * group as u64 > ram);
            }
        }
    }
}
