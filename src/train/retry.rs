//! What to do after an out of memory, and when to undo it: pure functions from what happened to what
//! comes next.
//!
//! Down: the next plan is one that the estimate says needs less, so there is an end. Up: after a while
//! without trouble, longer after every failure, the last larger plan is tried again, never one larger than
//! the run began with.

use serde::{Deserialize, Serialize};

use crate::memory::plan::{Plan, Split};
use crate::memory::search;

/// A way of running an update and an evaluation. None changes what is computed but the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    pub micro_batch: usize,
    pub accumulation_steps: usize,
    /// Blocks that keep only their input and run forward again.
    pub recompute: usize,
    pub eval_micro_batch: usize,
    /// Bytes the loader may hold.
    pub prefetch: u64,
}

impl Way {
    /// What the plan chose.
    pub fn chosen(plan: &Plan, prefetch: u64) -> Self {
        let c = &plan.chosen;
        Self {
            micro_batch: c.micro_batch,
            accumulation_steps: c.accumulation_steps,
            recompute: c.recompute,
            eval_micro_batch: c.eval_micro_batch,
            prefetch,
        }
    }

    pub fn split(&self) -> Split {
        Split { micro_batch: self.micro_batch, accumulation_steps: self.accumulation_steps }
    }

    /// This way, made no larger than `most` in any respect.
    pub fn within(self, most: Way) -> Self {
        let larger = self.micro_batch > most.micro_batch;
        Self {
            micro_batch: self.micro_batch.min(most.micro_batch),
            accumulation_steps: if larger { most.accumulation_steps } else { self.accumulation_steps },
            recompute: self.recompute.max(most.recompute),
            eval_micro_batch: self.eval_micro_batch.min(most.eval_micro_batch),
            prefetch: self.prefetch.min(most.prefetch),
        }
    }
}

/// What is fixed in a run's way down.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub may_shrink: bool,
    pub may_recompute: bool,
    /// Blocks that can be recomputed.
    pub blocks: usize,
    pub samples_per_update: usize,
    /// A micro-batch is a multiple of this.
    pub group: usize,
}

/// The way to try after an update ran out of memory in `way` with `short` bytes lacking. `peak` estimates the
/// highest moment of an update. Of the ways that need at least so much less, the first is taken: smaller
/// micro-batches, then recomputation; where none needs so little, the leanest of those that need less.
pub fn next(limits: &Limits, way: Way, short: u64, peak: &dyn Fn(Way) -> u64) -> Option<Way> {
    let splits = |from: Way| {
        let halved = move |way: &Way| {
            let steps = (way.accumulation_steps * 2).min(limits.samples_per_update);
            let split = search::split(limits.samples_per_update, steps, limits.group);
            let smaller = limits.may_shrink && split.micro_batch < way.micro_batch;
            let Split { micro_batch, accumulation_steps } = split;
            smaller.then_some(Way { micro_batch, accumulation_steps, ..*way })
        };
        std::iter::successors(Some(from), halved)
    };
    let again = limits.may_recompute && way.recompute < limits.blocks;
    let again = again.then_some(Way { recompute: limits.blocks, ..way });
    smaller(splits(way).skip(1).chain(again.into_iter().flat_map(splits)), way, short, peak)
}

/// The same for an evaluation, which has micro-batches only.
pub fn next_evaluation(way: Way, short: u64, peak: &dyn Fn(Way) -> u64) -> Option<Way> {
    let halved = |way: &Way| {
        let half = way.eval_micro_batch.div_ceil(2);
        (half < way.eval_micro_batch).then_some(Way { eval_micro_batch: half, ..*way })
    };
    smaller(std::iter::successors(halved(&way), halved), way, short, peak)
}

fn smaller(ways: impl Iterator<Item = Way>, now: Way, short: u64, peak: &dyn Fn(Way) -> u64) -> Option<Way> {
    let needs = peak(now);
    let mut leanest: Option<(u64, Way)> = None;
    for way in ways {
        let bytes = peak(way);
        if bytes < needs && bytes <= needs.saturating_sub(short) {
            return Some(way);
        }
        if bytes < leanest.map_or(needs, |(least, _)| least) {
            leanest = Some((bytes, way));
        }
    }
    leanest.map(|(_, way)| way)
}

/// Updates without trouble before a larger way is tried, after so many failures.
pub fn patience(failures: u32) -> u64 {
    16 << failures.saturating_sub(1).min(20)
}

/// Where a run stands below what its plan chose. Kept in checkpoints, so that a resumed run goes up at the
/// same update as one that was never stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descent {
    /// The ways given up and not taken again, the largest first.
    pub larger: Vec<Way>,
    /// Ways given up since the run began.
    pub failures: u32,
    /// Updates made since the last change.
    pub quiet: u64,
}

impl Descent {
    /// `from` was given up.
    pub fn down(&mut self, from: Way) {
        self.larger.push(from);
        self.failures += 1;
        self.quiet = 0;
    }

    /// An update was made without trouble.
    pub fn made_update(&mut self) {
        self.quiet += 1;
    }

    /// The larger way to try, if it is time. It is taken with [`Self::up`], or put off with [`Self::wait`].
    pub fn due(&self) -> Option<Way> {
        self.larger.last().copied().filter(|_| self.quiet >= patience(self.failures))
    }

    pub fn up(&mut self) {
        self.larger.pop();
        self.quiet = 0;
    }

    pub fn wait(&mut self) {
        self.quiet = 0;
    }

    /// Where a resumed run stands: no larger than it was, nor than its plan allows now.
    pub fn resumed(self, stood: Way, chosen: Way) -> (Way, Self) {
        // How much is read ahead is a matter of the machine as it is now; and where nothing was given up,
        // only the split has to stay for the sums to be the same.
        let here = |way: Way| Way { prefetch: chosen.prefetch, ..way }.within(chosen);
        let stood = match self.larger.is_empty() {
            true => {
                let Split { micro_batch, accumulation_steps } = stood.split();
                here(Way { micro_batch, accumulation_steps, ..chosen })
            }
            false => here(stood),
        };
        let mut larger: Vec<Way> = self.larger.into_iter().map(here).collect();
        larger.dedup();
        if larger.last() == Some(&stood) {
            larger.pop();
        }
        (stood, Self { larger, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn way(samples: usize, steps: usize, group: usize) -> Way {
        let Split { micro_batch, accumulation_steps } = search::split(samples, steps, group);
        Way { micro_batch, accumulation_steps, recompute: 0, eval_micro_batch: micro_batch, prefetch: 9 }
    }

    /// Ten bytes a sample beside a hundred, and half of that where all of four blocks are recomputed.
    fn toy(way: Way) -> u64 {
        100 + (way.micro_batch * if way.recompute == 4 { 5 } else { 10 }) as u64
    }

    fn limits(samples_per_update: usize, group: usize) -> Limits {
        Limits { may_shrink: true, may_recompute: true, blocks: 4, samples_per_update, group }
    }

    proptest! {
        #[test]
        fn the_way_down_has_an_end_and_keeps_every_sample(samples in 1usize..500, steps in 1usize..50, group in 1usize..8, short in 0u64..600) {
            let limits = limits(samples, group);
            let mut now = way(samples, steps.min(samples), group);
            while let Some(next) = next(&limits, now, short, &toy) {
                prop_assert!(toy(next) < toy(now), "each needs less than the one before");
                prop_assert!(next.micro_batch * next.accumulation_steps >= samples);
                prop_assert!(next.micro_batch * (next.accumulation_steps - 1) < samples);
                prop_assert_eq!(next.micro_batch % group, 0);
                now = next;
            }
            // At the end nothing leaner is left.
            prop_assert_eq!((now.micro_batch, now.recompute), (way(samples, samples, group).micro_batch, 4));
        }

        /// What lacks is made up for at once where a way can, however many halves that takes.
        #[test]
        fn a_large_lack_takes_a_large_step(samples in 2usize..500, short in 0u64..2500) {
            let now = way(samples, 1, 1);
            let least = 105;
            match next(&limits(samples, 1), now, short, &toy) {
                Some(next) => prop_assert!(toy(next) <= toy(now) - short.min(toy(now) - least)),
                None => prop_assert!(false, "two samples can be split"),
            }
        }

        #[test]
        fn evaluation_ends_at_one_sample(eval_micro_batch in 1usize..5000, short in 0u64..100) {
            let peak = |way: Way| 10 * way.eval_micro_batch as u64;
            let mut now = Way { eval_micro_batch, ..way(8, 1, 1) };
            while let Some(next) = next_evaluation(now, short, &peak) {
                prop_assert!(next.eval_micro_batch < now.eval_micro_batch);
                now = next;
            }
            prop_assert_eq!(now.eval_micro_batch, 1);
        }

        #[test]
        fn patience_grows_and_never_ends(failures in 0u32..100) {
            prop_assert!(patience(failures) >= 16 && patience(failures + 1) >= patience(failures));
        }

        /// A machine whose memory comes and goes: the run never exceeds its plan, tries a larger way only
        /// after a while, less and less often, and comes back all the way once memory is there for good.
        #[test]
        fn what_comes_back_is_used_again(room in prop::collection::vec((100u64..500, 1u64..200), 0..6)) {
            let (limits, chosen) = (limits(32, 1), way(32, 1, 1));
            let (mut now, mut descent) = (chosen, Descent::default());
            let ample = [(1000, 40 * patience(12))];
            for (room, updates) in room.into_iter().map(|(r, n)| (r.max(105), n)).chain(ample) {
                for _ in 0..updates {
                    while toy(now) > room {
                        let smaller = next(&limits, now, toy(now) - room, &toy);
                        let Some(smaller) = smaller else { prop_assert!(false, "105 bytes are enough"); return Ok(()) };
                        descent.down(now);
                        now = smaller;
                    }
                    descent.made_update();
                    if let Some(larger) = descent.due() {
                        prop_assert!(descent.quiet >= patience(descent.failures));
                        prop_assert!(toy(larger) > toy(now) && toy(larger) <= toy(chosen));
                        descent.up();
                        now = larger;
                    }
                }
            }
            prop_assert_eq!(now, chosen);
            prop_assert_eq!(descent.larger, vec![]);
        }

        /// While memory stays short, failures are few: their number grows like the logarithm of the updates.
        #[test]
        fn trying_in_vain_costs_little(updates in 1u64..100_000) {
            let (limits, mut now, mut descent) = (limits(32, 1), way(32, 1, 1), Descent::default());
            for _ in 0..updates {
                while let Some(smaller) = (toy(now) > 300).then(|| next(&limits, now, 0, &toy)).flatten() {
                    descent.down(now);
                    now = smaller;
                }
                descent.made_update();
                if let Some(larger) = descent.due() {
                    descent.up();
                    now = larger;
                }
            }
            prop_assert!(descent.failures as u64 <= 2 + updates.ilog2() as u64, "{} failures", descent.failures);
        }
    }

    #[test]
    fn a_job_that_forbids_it_is_not_shrunk() {
        let (now, no) = (way(8, 1, 1), Limits { may_shrink: false, may_recompute: false, ..limits(8, 1) });
        assert_eq!(next(&no, now, 0, &toy), None);
        let recompute = Limits { may_recompute: true, ..no };
        assert_eq!(next(&recompute, now, 0, &toy), Some(Way { recompute: 4, ..now }));
        let shrink = Limits { may_shrink: true, ..no };
        assert_eq!(next(&shrink, now, 0, &toy).map(|way| way.micro_batch), Some(4));
        assert_eq!(next(&shrink, now, 70, &toy).map(|way| way.micro_batch), Some(1));
    }

    #[test]
    fn a_resumed_run_stands_where_it_stood_within_its_new_plan() {
        let (a, b, c) = (way(32, 1, 1), way(32, 2, 1), way(32, 4, 1));
        let descent = Descent { larger: vec![a, b], failures: 2, quiet: 5 };
        assert_eq!(descent.clone().resumed(c, a), (c, descent.clone()));
        // The plan is smaller now: there is one way up less, and none above the plan.
        let (stood, kept) = descent.clone().resumed(c, b);
        assert_eq!((stood, kept.larger), (c, vec![b]));
        let (stood, kept) = descent.resumed(c, way(32, 8, 1));
        assert_eq!((stood, kept.larger), (way(32, 8, 1), vec![]));
    }
}
