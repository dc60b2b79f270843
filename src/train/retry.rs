//! What to do after an out of memory: a pure function from what happened to what comes next.

use crate::memory::ladder;
use crate::memory::plan::Split;

/// What is known when an ask failed.
#[derive(Clone, Copy, Debug)]
pub struct Happened {
    /// Plans already given up in this run.
    pub attempts: u32,
    pub max_retries: u32,
    pub may_shrink: bool,
    pub may_recompute: bool,
    pub split: Split,
    /// Blocks recomputed, and all there are.
    pub recompute: usize,
    pub blocks: usize,
    pub samples_per_update: usize,
    pub group: usize,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The same samples again in smaller micro-batches.
    Shrink(Split),
    /// The same samples again, with every block recomputed.
    Recompute,
    GiveUp,
}

/// Twice the micro-batches; then recomputation; then nothing: every retry is strictly smaller, so there is
/// an end.
pub fn next(h: &Happened) -> Next {
    if h.attempts >= h.max_retries {
        return Next::GiveUp;
    }
    let wanted = (h.split.accumulation_steps * 2).min(h.samples_per_update);
    let smaller = ladder::split(h.samples_per_update, wanted, h.group);
    if h.may_shrink && smaller.micro_batch < h.split.micro_batch {
        Next::Shrink(smaller)
    } else if h.may_recompute && h.recompute < h.blocks {
        Next::Recompute
    } else {
        Next::GiveUp
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn retries_end_and_keep_every_sample(samples in 1usize..500, steps in 1usize..50, group in 1usize..8, max_retries in 0u32..20) {
            let mut h = Happened {
                attempts: 0, max_retries, may_shrink: true, may_recompute: true, samples_per_update: samples, group,
                recompute: 0, blocks: 3,
                split: ladder::split(samples, steps.min(samples), group),
            };
            loop {
                match next(&h) {
                    Next::Shrink(split) => {
                        prop_assert!(split.micro_batch < h.split.micro_batch);
                        prop_assert!(split.micro_batch * split.accumulation_steps >= samples);
                        prop_assert_eq!(split.micro_batch % group, 0);
                        h.split = split;
                    }
                    Next::Recompute => {
                        prop_assert_eq!(h.recompute, 0);
                        h.recompute = h.blocks;
                    }
                    Next::GiveUp => break,
                }
                h.attempts += 1;
                prop_assert!(h.attempts <= max_retries);
            }
        }
    }

    #[test]
    fn a_job_that_forbids_it_is_not_shrunk() {
        let split = Split { micro_batch: 8, accumulation_steps: 1 };
        let h = Happened {
            attempts: 0,
            max_retries: 8,
            may_shrink: false,
            may_recompute: false,
            recompute: 0,
            blocks: 3,
            split,
            samples_per_update: 8,
            group: 1,
        };
        assert_eq!(next(&h), Next::GiveUp);
        assert_eq!(next(&Happened { may_recompute: true, ..h }), Next::Recompute);
        assert_eq!(
            next(&Happened { may_shrink: true, ..h }),
            Next::Shrink(Split { micro_batch: 4, accumulation_steps: 2 })
        );
    }
}
