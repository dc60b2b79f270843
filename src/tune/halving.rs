//! Successive halving: every trial runs for a part of its updates, the best of them for more, the best of those to the
//! end.
//!
//! Pure functions of the scores. A rung is decided when all of its trials have ended, so that which trials go on does
//! not depend on the order in which they ended.

/// A rung has at least this many updates: fewer say nothing about a trial.
const MIN_RUNG_STEPS: u64 = 10;

/// The rungs of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halving {
    /// One of this many trials goes on; 1: all run to the end.
    factor: u64,
    /// Rungs before the last, which runs to the end.
    levels: u32,
}

impl Halving {
    /// For this many trials, the shortest of which has `min_steps` updates.
    pub fn new(factor: u64, trials: usize, min_steps: u64) -> Self {
        let worth = |levels: &u32| {
            let parts = factor.saturating_pow(*levels);
            factor > 1 && trials as u64 >= parts && min_steps / parts >= MIN_RUNG_STEPS
        };
        Self { factor, levels: (1..64).take_while(worth).count() as u32 }
    }

    pub fn rungs(self) -> u32 {
        self.levels + 1
    }

    /// Updates after which rung `rung` (from 0) of a trial of `total` updates ends.
    pub fn steps(self, rung: u32, total: u64) -> u64 {
        total.div_ceil(self.factor.saturating_pow(self.levels.saturating_sub(rung)))
    }

    /// The trials of a rung that go on to the next: the best, in the order of their numbers. `scores` has the numbers
    /// of the trials. One without a score never goes on.
    pub fn promoted(self, scores: &[(usize, Option<f64>)], lower_is_better: bool) -> Vec<usize> {
        let keep = scores.len().div_ceil(self.factor.max(1) as usize);
        let mut best: Vec<usize> = ranked(scores, lower_is_better).into_iter().take(keep).collect();
        best.sort_unstable();
        best
    }
}

/// The trials that have a score, best first; equal ones by their number.
pub fn ranked(scores: &[(usize, Option<f64>)], lower_is_better: bool) -> Vec<usize> {
    let mut scored: Vec<(usize, f64)> = scores
        .iter()
        .filter_map(|(trial, score)| Some((*trial, score.filter(|score| !score.is_nan())?)))
        .collect();
    scored.sort_by(|(trial, a), (other, b)| {
        let order = if lower_is_better { a.total_cmp(b) } else { b.total_cmp(a) };
        order.then(trial.cmp(other))
    });
    scored.into_iter().map(|(trial, _)| trial).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rungs_grow_by_the_factor() {
        let halving = Halving::new(3, 20, 900);
        assert_eq!(halving.rungs(), 3);
        assert_eq!([0, 1, 2].map(|rung| halving.steps(rung, 900)), [100, 300, 900]);
        assert_eq!([0, 1, 2].map(|rung| halving.steps(rung, 1000)), [112, 334, 1000]);
        assert_eq!(Halving::new(1, 20, 900).rungs(), 1);
        assert_eq!(Halving::new(3, 2, 900).rungs(), 1, "nothing to choose from");
        assert_eq!(Halving::new(3, 20, 40).rungs(), 2, "a rung of 4 updates says nothing");
    }

    #[test]
    fn the_best_go_on() {
        let halving = Halving::new(3, 7, 900);
        let scores = [(0, Some(0.5)), (1, None), (2, Some(0.1)), (3, Some(0.5)), (4, Some(f64::NAN))];
        assert_eq!(halving.promoted(&scores, true), [0, 2]);
        assert_eq!(halving.promoted(&scores, false), [0, 3]);
        assert_eq!(halving.promoted(&[(3, None), (5, None)], true), [0; 0]);
        assert_eq!(ranked(&scores, true), [2, 0, 3]);
    }

    proptest! {
        /// Which trials go on does not depend on the order in which they ended.
        #[test]
        fn promotion_ignores_the_order(
            scores in prop::collection::vec(prop::option::of(0u8..5), 1..40),
            turn in 0usize..40,
        ) {
            let mut scores: Vec<(usize, Option<f64>)> =
                scores.into_iter().enumerate().map(|(i, s)| (i, s.map(f64::from))).collect();
            let halving = Halving::new(3, scores.len(), 10_000);
            let kept = halving.promoted(&scores, true);
            prop_assert!(kept.len() <= scores.len().div_ceil(3));
            let turn = turn % scores.len();
            scores.rotate_left(turn);
            prop_assert_eq!(kept, halving.promoted(&scores, true));
        }
    }
}
