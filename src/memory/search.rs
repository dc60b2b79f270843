//! The ways a job can be run within its memory, and the fastest of them.
//!
//! Every combination of micro-batch, recomputed blocks, optimizer state and offload is in the space; what is
//! known to be slower than something found is not looked at, and along one axis the first that fits is found
//! by halves, because less of anything never needs more memory. What is chosen was always looked at.

use super::estimate::{Predict, Way};
use super::plan::{Offload, Split};
use super::time::Times;
use crate::job::Rung;

/// What the job asks for, and of which machine.
#[derive(Clone, Debug)]
pub struct Request {
    pub device: String,
    /// Host bytes, which on the CPU hold the tensors.
    pub ram: u64,
    /// Device bytes; 0 on the CPU.
    pub vram: u64,
    /// Host bytes a larger budget could have at most.
    pub most_ram: u64,
    /// Device bytes that the context takes beside the budget, where that is known.
    pub context: u64,
    pub split: Split,
    pub samples_per_update: usize,
    /// A micro-batch is a multiple of this many samples: the model's normalisation group.
    pub group: usize,
    /// The optimizer's kind, and the one that keeps the same state in bytes where there is one.
    pub optimizer: String,
    pub optimizer_8bit: Option<String>,
    /// The evaluation micro-batch, where the job states it.
    pub eval_micro_batch: Option<usize>,
    /// What the job allows.
    pub may: Vec<Rung>,
    /// What the device can move to the host while it waits.
    pub offloads: Vec<Offload>,
    /// Look at some ways beside the job as written even if that fits.
    pub more: bool,
    pub times: Times,
}

impl Request {
    pub fn may(&self, rung: Rung) -> bool {
        self.may.contains(&rung)
    }

    /// Tensors are in the memory of a device that is not the host.
    pub fn on_device(&self) -> bool {
        self.vram > 0
    }

    /// The job's own split, in whole groups.
    pub fn asked(&self) -> Split {
        let most = self.samples_per_update.next_multiple_of(self.group);
        Split {
            micro_batch: self.split.micro_batch.next_multiple_of(self.group).min(most),
            ..split(self.samples_per_update, self.split.accumulation_steps, self.group)
        }
    }

    /// Bytes missing for something that takes this much.
    pub fn missing(&self, vram: u64, ram: u64) -> u64 {
        let vram = if self.on_device() { vram.saturating_sub(self.vram) } else { 0 };
        vram + ram.saturating_sub(self.ram)
    }

    fn way(&self, split: Split, recompute: usize, keep: Keep) -> Way {
        Way {
            micro_batch: split.micro_batch,
            recompute,
            eval_micro_batch: self.eval_micro_batch.unwrap_or(split.micro_batch),
            eight_bit: keep.eight_bit,
            offload: keep.offload,
        }
    }

    fn split_into(&self, accumulation_steps: usize) -> Split {
        match self.asked() {
            asked if asked.accumulation_steps == accumulation_steps => asked,
            _ => split(self.samples_per_update, accumulation_steps, self.group),
        }
    }
}

/// The split of an update into `accumulation_steps` micro-batches or fewer, as even as the group allows.
pub fn split(samples_per_update: usize, accumulation_steps: usize, group: usize) -> Split {
    let micro_batch = samples_per_update.div_ceil(accumulation_steps).next_multiple_of(group);
    Split { micro_batch, accumulation_steps: samples_per_update.div_ceil(micro_batch) }
}

/// A way of running that was looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Considered {
    pub split: Split,
    pub way: Way,
    pub vram: u64,
    pub ram: u64,
    /// Predicted seconds of an update.
    pub time: f64,
}

/// What is decided beside the split and the blocks recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Keep {
    eight_bit: bool,
    offload: &'static [Offload],
}

/// What may wait in host memory together.
pub const OFFLOADS: [&[Offload]; 4] = [
    &[],
    &[Offload::OptimizerState],
    &[Offload::Activations],
    &[Offload::OptimizerState, Offload::Activations],
];

pub struct Search<'a> {
    request: &'a Request,
    predict: &'a dyn Predict,
    /// Everything looked at, the job as written first.
    pub seen: Vec<Considered>,
}

impl<'a> Search<'a> {
    /// Looks at the job as written.
    pub fn new(request: &'a Request, predict: &'a dyn Predict) -> Self {
        let mut search = Self { request, predict, seen: Vec::new() };
        let steps = request.asked().accumulation_steps;
        search.look(steps, 0, Keep { eight_bit: false, offload: OFFLOADS[0] });
        search
    }

    pub fn as_written(&self) -> Considered {
        self.seen[0]
    }

    pub fn fits(&self, one: &Considered) -> bool {
        self.request.missing(one.vram, one.ram) == 0
    }

    /// The way that comes nearest to fitting.
    pub fn leanest(&self) -> Considered {
        let missing = |one: &&Considered| self.request.missing(one.vram, one.ram);
        *self.seen.iter().min_by_key(missing).unwrap_or(&self.seen[0])
    }

    /// The fastest way that fits.
    pub fn fastest(&mut self) -> Option<Considered> {
        let r = self.request;
        let first = r.asked().accumulation_steps;
        let last = match r.may(Rung::Shrink) {
            true => split(r.samples_per_update, r.samples_per_update, r.group).accumulation_steps.max(first),
            false => first,
        };
        let blocks = if r.may(Rung::Recompute) { r.times.blocks.len() } else { 0 };
        if self.fits(&self.as_written()) {
            if r.more {
                let plain = Keep { eight_bit: false, offload: OFFLOADS[0] };
                [2, 4].map(|n| n * first).iter().filter(|n| **n <= last).for_each(|n| {
                    self.look(*n, 0, plain);
                });
            }
            return Some(self.as_written());
        }
        let mut best: Option<Considered> = None;
        for keep in self.keeps(first) {
            let beaten = |steps: usize, k: usize, best: Option<Considered>| {
                let floor = r.times.floor(steps, r.way(r.split_into(steps), k, keep));
                best.is_some_and(|best| floor >= best.time)
            };
            if beaten(first, 0, best) {
                continue;
            }
            let Some(fewest_blocks) = least(0, blocks, |k| self.tries(last, k, keep)) else { continue };
            let mut most = last;
            for k in fewest_blocks..=blocks {
                if beaten(first, k, best) {
                    break;
                }
                // The most micro-batches that could still be faster than what was found.
                let bound =
                    least(first, most, |steps| beaten(steps, k, best)).map_or(most, |steps| steps - 1);
                let Some(steps) = least(first, bound, |steps| self.tries(steps, k, keep)) else { continue };
                let found = self.look(steps, k, keep);
                if best.is_none_or(|best| found.time < best.time) {
                    best = Some(found);
                }
                most = steps;
                // More blocks only take longer, unless they spare the moving of what they save.
                if steps == first && !keep.offload.contains(&Offload::Activations) {
                    break;
                }
            }
        }
        best
    }

    /// What may be kept where and how, the fastest at best first.
    fn keeps(&self, steps: usize) -> Vec<Keep> {
        let r = self.request;
        let eight_bit = r.may(Rung::Optimizer8bit) && r.optimizer_8bit.is_some();
        let states = if eight_bit { vec![false, true] } else { vec![false] };
        let offload = r.on_device() && r.may(Rung::Offload);
        // State in bytes has scales of blocks beside it, and is small: it stays.
        let moves = |keep: &Keep| {
            keep.offload.iter().all(|what| {
                offload && r.offloads.contains(what) && !(keep.eight_bit && *what == Offload::OptimizerState)
            })
        };
        let all =
            states.into_iter().flat_map(|eight_bit| OFFLOADS.map(|offload| Keep { eight_bit, offload }));
        let mut keeps: Vec<Keep> = all.filter(moves).collect();
        let floor = |keep: &Keep| r.times.floor(steps, r.way(r.split_into(steps), 0, *keep));
        keeps.sort_by(|a, b| floor(a).total_cmp(&floor(b)).then(a.offload.len().cmp(&b.offload.len())));
        keeps
    }

    fn tries(&mut self, accumulation_steps: usize, recompute: usize, keep: Keep) -> bool {
        let one = self.look(accumulation_steps, recompute, keep);
        self.fits(&one)
    }

    fn look(&mut self, accumulation_steps: usize, recompute: usize, keep: Keep) -> Considered {
        let split = self.request.split_into(accumulation_steps);
        let way = self.request.way(split, recompute, keep);
        if let Some(seen) = self.seen.iter().find(|one| one.way == way) {
            return *seen;
        }
        let estimate = self.predict.estimate(way);
        let time = self.request.times.of(split.accumulation_steps, way, &estimate);
        let one = Considered { split, way, vram: estimate.vram, ram: estimate.ram, time };
        self.seen.push(one);
        one
    }
}

/// The least of `low..=high` that passes a test which all above it pass too, if any does.
fn least(low: usize, high: usize, mut passes: impl FnMut(usize) -> bool) -> Option<usize> {
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
    use crate::memory::ladder::toy::{Toy, request};
    use proptest::prelude::*;

    proptest! {
        /// Against trying everything: what is found is as fast as the fastest that fits.
        #[test]
        fn nothing_that_fits_is_faster(
            batch in 1usize..40, accumulation in 1usize..4, group in 1usize..5,
            ram in 100u64..600, vram in prop_oneof![Just(0u64), 60u64..500],
            overhead in 0.0f64..0.2, may in proptest::sample::subsequence(
                vec![Rung::Shrink, Rung::Recompute, Rung::Offload, Rung::Optimizer8bit], 0..=4),
        ) {
            let mut r = Request { group, vram, may, ..request(batch, accumulation, ram) };
            r.times.micro_batch = overhead;
            let toy = Toy { on_device: vram > 0 };
            let found = Search::new(&r, &toy).fastest();
            let mut all = Search::new(&r, &toy);
            if !all.fits(&all.as_written()) {
                let first = r.asked().accumulation_steps;
                let last = if r.may(Rung::Shrink) { r.samples_per_update } else { first };
                let blocks = if r.may(Rung::Recompute) { 4 } else { 0 };
                for keep in all.keeps(first) {
                    for steps in first..=last.max(first) {
                        for k in 0..=blocks {
                            all.look(steps, k, keep);
                        }
                    }
                }
            }
            let fitting = all.seen.iter().filter(|one| all.fits(one)).map(|one| one.time);
            let fastest = fitting.min_by(f64::total_cmp);
            prop_assert_eq!(found.map(|one| one.time), fastest);
        }

        #[test]
        fn the_least_is_found_and_nothing_below_it(low in 0usize..50, more in 0usize..50, from in 0usize..120) {
            let found = least(low, low + more, |x| x >= from);
            let wanted = (low..=low + more).find(|x| *x >= from);
            prop_assert_eq!(found, wanted);
        }
    }
}
