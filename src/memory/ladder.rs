//! From a job and a budget to the way it will be run: a pure function.
//!
//! Samples per update never change. When the job as written does not fit, the micro-batch shrinks and
//! more are accumulated; of the splits that fit, the one with the fewest micro-batches is the fastest.

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
    /// Predicted seconds of an update's arithmetic, and of the fixed work of one micro-batch.
    pub compute_s: f64,
    pub overhead_s: f64,
}

/// The split of an update into `accumulation_steps` micro-batches or fewer, as even as the group allows.
pub fn split(samples_per_update: usize, accumulation_steps: usize, group: usize) -> Split {
    let micro_batch = samples_per_update.div_ceil(accumulation_steps).next_multiple_of(group);
    Split { micro_batch, accumulation_steps: samples_per_update.div_ceil(micro_batch) }
}

/// Chooses the fastest way that fits.
pub fn plan(request: &Request, estimate: &dyn Fn(Way) -> Estimate) -> Plan {
    let r = request;
    let asked = Split {
        micro_batch: r
            .split
            .micro_batch
            .next_multiple_of(r.group)
            .min(r.samples_per_update.next_multiple_of(r.group)),
        ..split(r.samples_per_update, r.split.accumulation_steps, r.group)
    };
    let way = |split: Split| {
        let eval = r.eval_micro_batch.unwrap_or(split.micro_batch);
        Way { micro_batch: split.micro_batch, recompute: 0, eval_micro_batch: eval }
    };
    let mut rungs: Vec<(Split, u64, bool)> = Vec::new();
    let mut fits = |split: Split| {
        let peak = estimate(way(split)).peak;
        rungs.push((split, peak, peak <= r.ram));
        peak <= r.ram
    };
    let smallest = split(r.samples_per_update, r.samples_per_update, r.group);
    let as_written = fits(asked);
    let chosen = if as_written {
        Some(asked)
    } else if r.may_shrink && fits(smallest) {
        // Fewer samples never need more memory, so the fewest micro-batches that fit are found by halves.
        let (mut too_few, mut enough) = (asked.accumulation_steps, smallest.accumulation_steps);
        while enough - too_few > 1 {
            let middle = (too_few + enough) / 2;
            match fits(split(r.samples_per_update, middle, r.group)) {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        Some(split(r.samples_per_update, enough, r.group))
    } else {
        None
    };
    let verdict = match chosen {
        Some(_) if as_written => Verdict::Fits,
        Some(_) => Verdict::FitsAfterShrink,
        None => Verdict::DoesNotFit,
    };
    let shown = chosen.unwrap_or(if r.may_shrink { smallest } else { asked });
    let mut final_way = way(shown);
    if r.eval_micro_batch.is_none() {
        final_way.eval_micro_batch = evaluation(final_way, asked.micro_batch, estimate);
    }
    let best = estimate(final_way);
    rungs.sort_by_key(|(split, ..)| std::cmp::Reverse(split.micro_batch));
    rungs.dedup_by_key(|(split, ..)| *split);
    let time = |split: Split| r.compute_s + split.accumulation_steps as f64 * r.overhead_s;
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
            micro_batch: shown.micro_batch,
            accumulation_steps: shown.accumulation_steps,
            recompute: 0,
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
        rungs: rungs
            .iter()
            .map(|(split, peak, fits)| Rung {
                change: if *split == asked { String::new() } else { change(*split) },
                vram_bytes: place(*peak).0,
                ram_bytes: place(*peak).1,
                relative_time: time(*split) / time(asked),
                fits: *fits,
            })
            .collect(),
        advice: (verdict == Verdict::DoesNotFit)
            .then(|| advice(r, smallest, &rungs, estimate(way(smallest)).peak)),
    }
}

/// What a rung changes, in the job's words.
pub fn change(split: Split) -> String {
    format!("micro-batch {}, {} accumulation steps", split.micro_batch, split.accumulation_steps)
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

/// The smallest change that would make the job fit, as a key and a value.
fn advice(r: &Request, smallest: Split, rungs: &[(Split, u64, bool)], least: u64) -> String {
    let key = if r.vram == 0 { "memory.ram" } else { "memory.vram" };
    if !r.may_shrink && least <= r.ram {
        return "allow smaller micro-batches with `memory.on_oom = [\"shrink\"]`".into();
    }
    let needed = if r.may_shrink { least } else { rungs.first().map_or(least, |(_, peak, _)| *peak) };
    let mebibytes = needed.div_ceil(1 << 20);
    format!(
        "give it `{key} = \"{mebibytes}MiB\"` ({} more), or make the model smaller: at micro-batch {} it needs {}",
        Bytes(needed.saturating_sub(r.ram)),
        smallest.micro_batch,
        Bytes(least),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A step that holds 100 bytes and 10 a sample.
    fn toy(way: Way) -> Estimate {
        let training = 100 + 10 * way.micro_batch as u64;
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
            compute_s: 1.0,
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
