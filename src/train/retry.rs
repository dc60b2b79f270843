//! Backs off after an out-of-memory error (OOM) and grows back later: pure functions from what happened to the next
//! plan.
//!
//! Down: the estimator says that each next plan needs less, so the descent ends. Up: after enough updates without
//! trouble, more after every failure, the run retries the last larger plan. It never exceeds the plan it began with.

use serde::{Deserialize, Serialize};

use crate::planner::{ExecutionPlan, search};

/// What a shrinking run may change, and within what bounds.
#[derive(Clone, Copy, Debug)]
pub struct ShrinkLimits {
    pub may_shrink: bool,
    pub may_recompute: bool,
    /// Blocks that can be recomputed.
    pub blocks: usize,
    pub samples_per_update: usize,
    /// Every micro-batch is a multiple of this.
    pub micro_batch_multiple: usize,
}

/// The plan to try after an update under `current` ran out of memory by `shortfall` bytes. `peak` estimates the peak
/// bytes of an update. Returns the first plan whose peak is lower by at least the shortfall: smaller micro-batches
/// come first, then recomputation. If none saves enough, returns the one with the lowest peak; `None` if none needs
/// less.
pub fn next_smaller(
    limits: &ShrinkLimits,
    current: ExecutionPlan,
    shortfall: u64,
    peak: &dyn Fn(ExecutionPlan) -> u64,
) -> Option<ExecutionPlan> {
    let splits = |from: ExecutionPlan| {
        let halved = move |plan: &ExecutionPlan| {
            let steps = (plan.accumulation_steps * 2).min(limits.samples_per_update);
            let split = search::split(limits.samples_per_update, steps, limits.micro_batch_multiple);
            let smaller = limits.may_shrink && split.micro_batch < plan.micro_batch;
            smaller.then(|| plan.with_split(split))
        };
        std::iter::successors(Some(from), halved)
    };
    let can_recompute = limits.may_recompute && current.recompute < limits.blocks;
    let recomputed = can_recompute.then_some(ExecutionPlan { recompute: limits.blocks, ..current });
    first_sufficient(
        splits(current).skip(1).chain(recomputed.into_iter().flat_map(splits)),
        current,
        shortfall,
        peak,
    )
}

/// As [`next_smaller`], for an evaluation: only its micro-batch can shrink.
pub fn next_smaller_eval(
    current: ExecutionPlan,
    shortfall: u64,
    peak: &dyn Fn(ExecutionPlan) -> u64,
) -> Option<ExecutionPlan> {
    let halved = |plan: &ExecutionPlan| {
        let half = plan.eval_micro_batch.div_ceil(2);
        (half < plan.eval_micro_batch).then_some(ExecutionPlan { eval_micro_batch: half, ..*plan })
    };
    first_sufficient(std::iter::successors(halved(&current), halved), current, shortfall, peak)
}

fn first_sufficient(
    plans: impl Iterator<Item = ExecutionPlan>,
    current: ExecutionPlan,
    shortfall: u64,
    peak: &dyn Fn(ExecutionPlan) -> u64,
) -> Option<ExecutionPlan> {
    let needs = peak(current);
    let mut leanest: Option<(u64, ExecutionPlan)> = None;
    for plan in plans {
        let bytes = peak(plan);
        if bytes < needs && bytes <= needs.saturating_sub(shortfall) {
            return Some(plan);
        }
        if bytes < leanest.map_or(needs, |(least, _)| least) {
            leanest = Some((bytes, plan));
        }
    }
    leanest.map(|(_, plan)| plan)
}

/// Updates without trouble before a larger plan is retried, after this many failures.
pub fn updates_before_growth(failures: u32) -> u64 {
    16 << failures.saturating_sub(1).min(20)
}

/// How far a run is below the plan it began with. Saved in checkpoints, so that a resumed run grows at the same
/// update as an uninterrupted one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    /// Plans given up and not resumed since, largest first.
    pub larger: Vec<ExecutionPlan>,
    /// Plans given up since the run began.
    pub failures: u32,
    /// Updates since the last change of plan.
    pub quiet: u64,
}

impl Backoff {
    /// Records that the run gave up plan `from`.
    pub fn record_shrink(&mut self, from: ExecutionPlan) {
        self.larger.push(from);
        self.failures += 1;
        self.quiet = 0;
    }

    /// Records an update without trouble.
    pub fn record_update(&mut self) {
        self.quiet += 1;
    }

    /// The larger plan to retry, if one is due. The caller then calls [`Self::record_growth`] or
    /// [`Self::postpone_growth`].
    pub fn growth_due(&self) -> Option<ExecutionPlan> {
        self.larger.last().copied().filter(|_| self.quiet >= updates_before_growth(self.failures))
    }

    pub fn record_growth(&mut self) {
        self.larger.pop();
        self.quiet = 0;
    }

    pub fn postpone_growth(&mut self) {
        self.quiet = 0;
    }

    /// The plan and backoff of a resumed run: no larger than when it was saved, nor than its memory plan allows now.
    pub fn resumed(self, saved: ExecutionPlan, chosen: ExecutionPlan) -> (ExecutionPlan, Self) {
        // The read-ahead depends on this machine, not on the saved one. If no plan was given up, only the split has
        // to stay for sums to be bitwise identical.
        let limited =
            |plan: ExecutionPlan| ExecutionPlan { prefetch: chosen.prefetch, ..plan }.clamped_to(chosen);
        let current = match self.larger.is_empty() {
            true => limited(chosen.with_split(saved.split())),
            false => limited(saved),
        };
        let mut larger: Vec<ExecutionPlan> = self.larger.into_iter().map(limited).collect();
        larger.dedup();
        if larger.last() == Some(&current) {
            larger.pop();
        }
        (current, Self { larger, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::OptimizerKind;
    use crate::planner::execution_plan::BatchSplit;
    use proptest::prelude::*;

    fn plan_for(samples: usize, steps: usize, micro_batch_multiple: usize) -> ExecutionPlan {
        let BatchSplit { micro_batch, accumulation_steps } =
            search::split(samples, steps, micro_batch_multiple);
        ExecutionPlan {
            micro_batch,
            accumulation_steps,
            recompute: 0,
            offload: &[],
            optimizer: OptimizerKind::Adamw,
            eval_micro_batch: micro_batch,
            prefetch: 9,
        }
    }

    /// 100 bytes plus 10 per sample; 5 per sample when all four blocks are recomputed.
    fn toy_peak(plan: ExecutionPlan) -> u64 {
        100 + (plan.micro_batch * if plan.recompute == 4 { 5 } else { 10 }) as u64
    }

    fn limits(samples_per_update: usize, micro_batch_multiple: usize) -> ShrinkLimits {
        ShrinkLimits {
            may_shrink: true,
            may_recompute: true,
            blocks: 4,
            samples_per_update,
            micro_batch_multiple,
        }
    }

    proptest! {
        #[test]
        fn the_way_down_has_an_end_and_keeps_every_sample(
            samples in 1usize..500,
            steps in 1usize..50,
            group in 1usize..8,
            short in 0u64..600,
        ) {
            let limits = limits(samples, group);
            let mut now = plan_for(samples, steps.min(samples), group);
            while let Some(next) = next_smaller(&limits, now, short, &toy_peak) {
                prop_assert!(toy_peak(next) < toy_peak(now), "each needs less than the one before");
                prop_assert!(next.micro_batch * next.accumulation_steps >= samples);
                prop_assert!(next.micro_batch * (next.accumulation_steps - 1) < samples);
                prop_assert_eq!(next.micro_batch % group, 0);
                now = next;
            }
            // The descent ends at the leanest plan.
            prop_assert_eq!((now.micro_batch, now.recompute), (plan_for(samples, samples, group).micro_batch, 4));
        }

        /// One step covers the whole shortfall if any plan can, however many halvings that takes.
        #[test]
        fn a_large_lack_takes_a_large_step(samples in 2usize..500, short in 0u64..2500) {
            let now = plan_for(samples, 1, 1);
            let least = 105;
            match next_smaller(&limits(samples, 1), now, short, &toy_peak) {
                Some(next) => prop_assert!(toy_peak(next) <= toy_peak(now) - short.min(toy_peak(now) - least)),
                None => prop_assert!(false, "two samples can be split"),
            }
        }

        #[test]
        fn evaluation_ends_at_one_sample(eval_micro_batch in 1usize..5000, short in 0u64..100) {
            let peak = |plan: ExecutionPlan| 10 * plan.eval_micro_batch as u64;
            let mut now = ExecutionPlan { eval_micro_batch, ..plan_for(8, 1, 1) };
            while let Some(next) = next_smaller_eval(now, short, &peak) {
                prop_assert!(next.eval_micro_batch < now.eval_micro_batch);
                now = next;
            }
            prop_assert_eq!(now.eval_micro_batch, 1);
        }

        #[test]
        fn patience_grows_and_never_ends(failures in 0u32..100) {
            prop_assert!(
                updates_before_growth(failures) >= 16
                    && updates_before_growth(failures + 1) >= updates_before_growth(failures)
            );
        }

        /// Available memory varies. The run never exceeds its plan, retries a larger one only after a quiet period
        /// and less and less often, and returns to the full plan once memory is ample for good.
        #[test]
        fn what_comes_back_is_used_again(room in prop::collection::vec((100u64..500, 1u64..200), 0..6)) {
            let (limits, chosen) = (limits(32, 1), plan_for(32, 1, 1));
            let (mut now, mut descent) = (chosen, Backoff::default());
            let ample = [(1000, 40 * updates_before_growth(12))];
            for (room, updates) in room.into_iter().map(|(r, n)| (r.max(105), n)).chain(ample) {
                for _ in 0..updates {
                    while toy_peak(now) > room {
                        let smaller = next_smaller(&limits, now, toy_peak(now) - room, &toy_peak);
                        let Some(smaller) = smaller else { prop_assert!(false, "105 bytes are enough"); return Ok(()) };
                        descent.record_shrink(now);
                        now = smaller;
                    }
                    descent.record_update();
                    if let Some(larger) = descent.growth_due() {
                        prop_assert!(descent.quiet >= updates_before_growth(descent.failures));
                        prop_assert!(toy_peak(larger) > toy_peak(now) && toy_peak(larger) <= toy_peak(chosen));
                        descent.record_growth();
                        now = larger;
                    }
                }
            }
            prop_assert_eq!(now, chosen);
            prop_assert_eq!(descent.larger, vec![]);
        }

        /// While memory stays short, the number of failures grows with the logarithm of the updates.
        #[test]
        fn trying_in_vain_costs_little(updates in 1u64..100_000) {
            let (limits, mut now, mut descent) = (limits(32, 1), plan_for(32, 1, 1), Backoff::default());
            for _ in 0..updates {
                while let Some(smaller) =
                (toy_peak(now) > 300).then(|| next_smaller(&limits, now, 0, &toy_peak)).flatten()
            {
                    descent.record_shrink(now);
                    now = smaller;
                }
                descent.record_update();
                if let Some(larger) = descent.growth_due() {
                    descent.record_growth();
                    now = larger;
                }
            }
            prop_assert!(descent.failures as u64 <= 2 + updates.ilog2() as u64, "{} failures", descent.failures);
        }
    }

    #[test]
    fn a_job_that_forbids_it_is_not_shrunk() {
        let (now, no) =
            (plan_for(8, 1, 1), ShrinkLimits { may_shrink: false, may_recompute: false, ..limits(8, 1) });
        assert_eq!(next_smaller(&no, now, 0, &toy_peak), None);
        let recompute = ShrinkLimits { may_recompute: true, ..no };
        assert_eq!(next_smaller(&recompute, now, 0, &toy_peak), Some(ExecutionPlan { recompute: 4, ..now }));
        let shrink = ShrinkLimits { may_shrink: true, ..no };
        assert_eq!(next_smaller(&shrink, now, 0, &toy_peak).map(|plan| plan.micro_batch), Some(4));
        assert_eq!(next_smaller(&shrink, now, 70, &toy_peak).map(|plan| plan.micro_batch), Some(1));
    }

    #[test]
    fn a_resumed_run_stands_where_it_stood_within_its_new_plan() {
        let (a, b, c) = (plan_for(32, 1, 1), plan_for(32, 2, 1), plan_for(32, 4, 1));
        let descent = Backoff { larger: vec![a, b], failures: 2, quiet: 5 };
        assert_eq!(descent.clone().resumed(c, a), (c, descent.clone()));
        // The memory plan is smaller now: one level of growth is gone, and none exceeds the plan.
        let (stood, kept) = descent.clone().resumed(c, b);
        assert_eq!((stood, kept.larger), (c, vec![b]));
        let (stood, kept) = descent.resumed(c, plan_for(32, 8, 1));
        assert_eq!((stood, kept.larger), (plan_for(32, 8, 1), vec![]));
    }
}
