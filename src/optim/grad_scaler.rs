//! Loss scaling for f16: gradients are computed times a factor that keeps them above the smallest numbers.
//!
//! An update whose gradient overflowed is skipped and the factor halved; after a long time without, it is
//! doubled. A pure value: what happens to it follows from what happened to the updates.

use serde::{Deserialize, Serialize};

/// Updates without an overflow after which the factor is doubled.
const GROWTH_INTERVAL: u32 = 2000;
const MAX_SCALE: f64 = 16_777_216.0;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    pub factor: f64,
    /// Updates since the last overflow or doubling.
    quiet: u32,
    /// Updates skipped in the run.
    pub skipped: u64,
    /// Whether the factor moves at all.
    dynamic: bool,
}

/// What to do with a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepDecision {
    Apply,
    /// It overflowed; the next try is with a smaller factor.
    Skip,
    /// It is not finite, and no factor is to blame.
    Diverged,
}

impl GradScaler {
    /// No scaling: a gradient that is not finite is a divergence.
    pub fn disabled() -> Self {
        Self { factor: 1.0, quiet: 0, skipped: 0, dynamic: false }
    }

    pub fn dynamic() -> Self {
        Self { factor: 65_536.0, quiet: 0, skipped: 0, dynamic: true }
    }

    /// Whether the next factor follows from what becomes of an update.
    pub fn is_dynamic(&self) -> bool {
        self.dynamic
    }

    /// Takes in whether an update's loss and gradient were finite.
    pub fn update(&mut self, finite: bool) -> StepDecision {
        match (finite, self.dynamic) {
            (true, false) => StepDecision::Apply,
            (true, true) => {
                self.quiet += 1;
                if self.quiet == GROWTH_INTERVAL {
                    (self.factor, self.quiet) = ((2.0 * self.factor).min(MAX_SCALE), 0);
                }
                StepDecision::Apply
            }
            // Below one the gradients themselves are too large for the type.
            (false, true) if self.factor > 1.0 => {
                (self.factor, self.quiet) = (self.factor / 2.0, 0);
                self.skipped += 1;
                StepDecision::Skip
            }
            (false, _) => StepDecision::Diverged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_halves_and_quiet_doubles() {
        let mut s = GradScaler::dynamic();
        assert_eq!(s.update(false), StepDecision::Skip);
        assert_eq!((s.factor, s.skipped), (32_768.0, 1));
        (0..GROWTH_INTERVAL).for_each(|_| assert_eq!(s.update(true), StepDecision::Apply));
        assert_eq!(s.factor, 65_536.0);
        for _ in 0..16 {
            assert_eq!(s.update(false), StepDecision::Skip);
        }
        assert_eq!((s.factor, s.update(false)), (1.0, StepDecision::Diverged));
    }

    #[test]
    fn without_scaling_what_is_not_finite_is_a_divergence() {
        let mut s = GradScaler::disabled();
        assert_eq!(
            (s.update(true), s.update(false), s.factor),
            (StepDecision::Apply, StepDecision::Diverged, 1.0)
        );
    }
}
