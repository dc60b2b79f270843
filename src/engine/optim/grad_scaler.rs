//! Loss scaling for f16: multiplies the loss by a factor that keeps gradients above the smallest f16 values.
//!
//! An update whose gradients overflow is skipped and the factor halved; after a long run without overflow it is
//! doubled. A pure value: its state depends only on the outcome of the updates.

use serde::{Deserialize, Serialize};

/// Updates without overflow after which the factor doubles.
const GROWTH_INTERVAL: u32 = 2000;
const MAX_SCALE: f64 = 16_777_216.0;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    pub factor: f64,
    /// Updates since the last overflow or doubling.
    quiet: u32,
    /// Updates skipped in the run.
    pub skipped: u64,
    /// Whether the factor changes at all.
    dynamic: bool,
}

/// What to do with an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepDecision {
    Apply,
    /// The gradients overflowed; the next update uses a smaller factor.
    Skip,
    /// The gradients are not finite, and scaling is not the cause.
    Diverged,
}

impl GradScaler {
    /// No scaling: a gradient that is not finite means divergence.
    pub fn disabled() -> Self {
        Self { factor: 1.0, quiet: 0, skipped: 0, dynamic: false }
    }

    pub fn dynamic() -> Self {
        Self { factor: 65_536.0, quiet: 0, skipped: 0, dynamic: true }
    }

    /// Whether the next factor depends on the outcome of an update.
    pub fn is_dynamic(&self) -> bool {
        self.dynamic
    }

    /// Records whether an update's loss and gradients were finite.
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
            // At a factor of 1 or below, the gradients themselves overflow the type.
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
