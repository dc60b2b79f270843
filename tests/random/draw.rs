//! Draws determined by a seed: the same seed gives the same job on every machine.

use std::ops::RangeInclusive;

use trainer::base::random::{CounterRng, RngKey, stream_id};

/// A stream of draws.
pub struct Draw(CounterRng);

impl Draw {
    /// The draws of one purpose (`what`) of a seed; purposes do not shift each other's draws.
    pub fn new(seed: u64, what: &str) -> Self {
        Self(RngKey::new(seed, stream_id("random jobs")).fold_in(stream_id(what)).rng())
    }

    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0.below(n as u64) as usize
    }

    /// Uniform in the range.
    pub fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Log-uniform: small and odd sizes are as likely as large ones.
    pub fn log_uniform(&mut self, range: RangeInclusive<usize>) -> usize {
        let (low, high) = (*range.start() as f64, *range.end() as f64 + 1.0);
        let drawn = (low.ln() + (high.ln() - low.ln()) * self.unit()).exp() as usize;
        drawn.clamp(*range.start(), *range.end())
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    /// Uniform in `[low, high)`, to four decimals so that a job reads well.
    pub fn float(&mut self, low: f64, high: f64) -> f64 {
        ((low + (high - low) * self.unit()) * 1e4).round() / 1e4
    }

    /// A subset of the choices, in order; may be empty.
    pub fn subset<T: Clone>(&mut self, of: &[T]) -> Vec<T> {
        of.iter().filter(|_| self.chance(0.5)).cloned().collect()
    }

    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}
