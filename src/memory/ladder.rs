//! From a job and a budget to the way it will be run: a pure function.
//!
//! Samples per update never change. When the job as written does not fit, the micro-batch shrinks and
//! more are accumulated, blocks keep only their input and run forward again, or both; of the ways that fit
//! the one predicted to be the fastest is taken.

use super::estimate::{Estimate, Way};
use super::plan::{Budget, Chosen, Part, Peak, Place, Plan, Rung, Split, Verdict};
use crate::units::Bytes;

/// What the job asks for.
#[derive(Clone, Debug)]
pub struct Request {
    pub device: String,
    /// Host bytes, which on the CPU hold the tensors.
    pub ram: u64,
    /// Device bytes; 0 on the CPU.
    pub vram: u64,
    pub split: Split,
    pub samples_per_update: usize,
    /// A micro-batch is a multiple of this many samples: the model's normalisation group.
    pub group: usize,
    pub optimizer: String,
    /// The evaluation micro-batch, where the job states it.
    pub eval_micro_batch: Option<usize>,
    /// The job allows smaller micro-batches.
    pub may_shrink: bool,
    /// The job allows blocks to run forward again instead of keeping their activations.
    pub may_recompute: bool,
    /// Predicted seconds of an update's forward pass, block by block; the backward pass takes twice that.
    pub forward_s: Vec<f64>,
    /// Predicted seconds of the fixed work of one micro-batch.
    pub overhead_s: f64,
}

impl Request {
    /// Predicted seconds of an update.
    fn time(&self, rung: Considered) -> f64 {
        let again: f64 = self.forward_s[..rung.recompute.min(self.forward_s.len())].iter().sum();
        let fixed = rung.split.accumulation_steps as f64 * self.overhead_s;
        3.0 * self.forward_s.iter().sum::<f64>() + again + fixed
    }
}

/// A way of running that was looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Considered {
    split: Split,
    recompute: usize,
    peak: u64,
}

/// The split of an update into `accumulation_steps` micro-batches or fewer, as even as the group allows.
pub fn split(samples_per_update: usize, accumulation_steps: usize, group: usize) -> Split {
    let micro_batch = samples_per_update.div_ceil(accumulation_steps).next_multiple_of(group);
    Split { micro_batch, accumulation_steps: samples_per_update.div_ceil(micro_batch) }
}

/// Chooses the fastest way that fits.
pub fn plan(request: &Request, estimate: &dyn Fn(Way) -> Estimate) -> Plan {
    let r = request;
    let most = r.samples_per_update.next_multiple_of(r.group);
    let asked = Split {
        micro_batch: r.split.micro_batch.next_multiple_of(r.group).min(most),
        ..split(r.samples_per_update, r.split.accumulation_steps, r.group)
    };
    let smallest = split(r.samples_per_update, r.samples_per_update, r.group);
    let way = |split: Split, recompute: usize| {
        let eval_micro_batch = r.eval_micro_batch.unwrap_or(split.micro_batch);
        Way { micro_batch: split.micro_batch, recompute, eval_micro_batch }
    };
    let mut seen: Vec<Considered> = Vec::new();
    let mut look = |split: Split, recompute: usize| {
        let one = Considered { split, recompute, peak: estimate(way(split, recompute)).peak };
        seen.push(one);
        one
    };
    let fits = |one: Considered| one.peak <= r.ram;
    let as_written = look(asked, 0);
    let mut found: Vec<Considered> = Vec::new();
    if !fits(as_written) {
        let blocks = r.forward_s.len();
        let halves = [0, blocks.div_ceil(2), blocks];
        let allowed = halves.into_iter().take(if r.may_recompute { 3 } else { 1 });
        for recompute in allowed {
            let largest = if recompute == 0 { as_written } else { look(asked, recompute) };
            if fits(largest) {
                found.push(largest);
            } else if r.may_shrink {
                found.extend(fewest(r, asked, smallest, &mut |split| look(split, recompute)));
            }
        }
    }
    let chosen = match fits(as_written) {
        true => Some(as_written),
        false => found.into_iter().min_by(|a, b| r.time(*a).total_cmp(&r.time(*b))),
    };
    let verdict = match chosen {
        Some(_) if fits(as_written) => Verdict::Fits,
        Some(_) => Verdict::FitsAfterShrink,
        None => Verdict::DoesNotFit,
    };
    let leanest = *seen.iter().min_by_key(|one| one.peak).unwrap_or(&as_written);
    let shown = chosen.unwrap_or(leanest);
    let mut final_way = way(shown.split, shown.recompute);
    if r.eval_micro_batch.is_none() {
        final_way.eval_micro_batch = evaluation(final_way, asked.micro_batch, estimate);
    }
    let best = estimate(final_way);
    seen.sort_by_key(|one| (std::cmp::Reverse(one.split.micro_batch), one.recompute));
    seen.dedup();
    let on_host = r.vram == 0;
    let place = |bytes: u64| if on_host { (0, bytes) } else { (bytes, 0) };
    Plan {
        verdict,
        device: r.device.clone(),
        budget: Budget { vram_bytes: r.vram, ram_bytes: r.ram },
        peak: Peak {
            vram_bytes: place(best.peak).0,
            ram_bytes: place(best.peak).1,
            phase: best.phase.into(),
        },
        requested: r.split,
        chosen: Chosen {
            micro_batch: shown.split.micro_batch,
            accumulation_steps: shown.split.accumulation_steps,
            recompute: shown.recompute,
            offload: false,
            optimizer: r.optimizer.clone(),
            eval_micro_batch: final_way.eval_micro_batch,
        },
        samples_per_update: r.samples_per_update,
        parts: best
            .parts
            .iter()
            .map(|(role, name, bytes)| Part {
                name: name.to_string(),
                role: *role,
                bytes: *bytes,
                r#where: if on_host { Place::Ram } else { Place::Vram },
            })
            .collect(),
        rungs: seen
            .iter()
            .map(|one| Rung {
                change: if *one == as_written { String::new() } else { change(one.split, one.recompute) },
                vram_bytes: place(one.peak).0,
                ram_bytes: place(one.peak).1,
                relative_time: r.time(*one) / r.time(as_written),
                fits: fits(*one),
            })
            .collect(),
        advice: (verdict == Verdict::DoesNotFit)
            .then(|| advice(r, as_written, estimate(way(smallest, 0)).peak, leanest)),
    }
}

/// The split into the fewest micro-batches that fits. Fewer samples never need more memory, so it is found
/// by halves.
fn fewest(
    r: &Request,
    asked: Split,
    smallest: Split,
    look: &mut dyn FnMut(Split) -> Considered,
) -> Option<Considered> {
    let mut best = look(smallest);
    if best.peak > r.ram {
        return None;
    }
    let (mut too_few, mut enough) = (asked.accumulation_steps, smallest.accumulation_steps);
    while enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        let one = look(split(r.samples_per_update, middle, r.group));
        match one.peak <= r.ram {
            true => (enough, best) = (middle, one),
            false => too_few = middle,
        }
    }
    Some(best)
}

/// What a rung changes, in the job's words.
pub fn change(split: Split, recompute: usize) -> String {
    let again = match recompute {
        0 => String::new(),
        1 => ", 1 block recomputed".into(),
        n => format!(", {n} blocks recomputed"),
    };
    format!("micro-batch {}, {} accumulation steps{again}", split.micro_batch, split.accumulation_steps)
}

/// The largest evaluation micro-batch that costs no memory: its peak stays below that of training.
fn evaluation(way: Way, asked: usize, estimate: &dyn Fn(Way) -> Estimate) -> usize {
    let training =
        |e: &Estimate| e.phases.iter().filter(|(p, _)| *p != "eval").map(|(_, b)| *b).max().unwrap_or(0);
    let sizes = std::iter::successors(Some(asked * 4), |n| Some(n / 2)).take_while(|n| *n > way.micro_batch);
    let free = |n: &usize| {
        let e = estimate(Way { eval_micro_batch: *n, ..way });
        e.peak <= training(&e)
    };
    sizes.into_iter().find(free).unwrap_or(way.micro_batch)
}

/// The smallest change that would make the job fit, as a key and a value. `shrunk` is the peak at the
/// smallest split, `leanest` the least that was found with what the job allows.
fn advice(r: &Request, as_written: Considered, shrunk: u64, leanest: Considered) -> String {
    if !r.may_shrink && shrunk <= r.ram {
        return "allow smaller micro-batches with `memory.on_oom = [\"shrink\"]`".into();
    }
    let key = if r.vram == 0 { "memory.ram" } else { "memory.vram" };
    let needed = leanest.peak.min(as_written.peak);
    format!(
        "give it `{key} = \"{}MiB\"` ({} more), or make the model smaller: with {} it needs {}",
        needed.div_ceil(1 << 20),
        Bytes(needed.saturating_sub(r.ram)),
        change(leanest.split, leanest.recompute),
        Bytes(needed),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A step of four blocks that holds 100 bytes, and for each sample 2 and 2 a block that is kept.
    fn toy(way: Way) -> Estimate {
        let training = 100 + (2 + 2 * (4 - way.recompute as u64)) * way.micro_batch as u64;
        let eval = 100 + 2 * way.eval_micro_batch as u64;
        Estimate {
            peak: training.max(eval),
            phase: "backward",
            phases: vec![("backward", training), ("eval", eval)],
            parts: Vec::new(),
        }
    }

    fn request(batch: usize, accumulation: usize, ram: u64) -> Request {
        Request {
            device: "cpu".into(),
            ram,
            vram: 0,
            split: Split { micro_batch: batch, accumulation_steps: accumulation },
            samples_per_update: batch * accumulation,
            group: 1,
            optimizer: "adamw".into(),
            eval_micro_batch: None,
            may_shrink: true,
            may_recompute: false,
            forward_s: vec![0.1; 4],
            overhead_s: 0.01,
        }
    }

    #[test]
    fn a_job_that_fits_is_left_as_it_is() {
        let plan = plan(&request(32, 2, 420), &toy);
        assert_eq!(plan.verdict, Verdict::Fits);
        assert_eq!((plan.chosen.micro_batch, plan.chosen.accumulation_steps), (32, 2));
        assert_eq!(plan.chosen.eval_micro_batch, 128, "evaluation may be larger for nothing");
        assert_eq!(plan.peak.ram_bytes, 420);
    }

    #[test]
    fn the_fewest_micro_batches_that_fit_are_chosen() {
        let plan = plan(&request(32, 2, 300), &toy);
        assert_eq!(plan.verdict, Verdict::FitsAfterShrink);
        assert_eq!((plan.chosen.micro_batch, plan.chosen.accumulation_steps), (16, 4));
        assert!(plan.rungs.iter().any(|r| r.change.is_empty() && !r.fits));
    }

    #[test]
    fn what_cannot_fit_says_what_would() {
        let none = plan(&request(32, 1, 105), &toy);
        assert_eq!(none.verdict, Verdict::DoesNotFit);
        assert!(none.advice.unwrap().contains("memory.ram = \"1MiB\""));
        let forbidden = plan(&Request { may_shrink: false, ..request(32, 1, 300) }, &toy);
        assert_eq!(forbidden.verdict, Verdict::DoesNotFit);
        assert!(forbidden.advice.unwrap().contains("on_oom"));
    }

    #[test]
    fn the_fastest_way_is_taken_and_not_the_first() {
        let may = |overhead_s: f64, ram: u64| {
            let r = Request { may_recompute: true, overhead_s, ..request(32, 1, ram) };
            let chosen = plan(&r, &toy).chosen;
            (chosen.micro_batch, chosen.recompute)
        };
        assert_eq!(may(0.001, 300), (16, 0), "cheap micro-batches are split");
        assert_eq!(may(10.0, 300), (32, 2), "dear ones are kept and blocks run again");
        assert_eq!(may(0.001, 105), (2, 4), "and where only both fit, both are done");
    }

    proptest! {
        #[test]
        fn a_plan_keeps_the_samples_and_the_budget(batch in 1usize..200, accumulation in 1usize..20, ram in 0u64..3000, group in 1usize..9) {
            let r = Request { group, ..request(batch, accumulation, ram) };
            let plan = plan(&r, &toy);
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
