//! The errors of a regression as a histogram, and some of its predictions beside their truths. Bounded in size, in one
//! pass.

use serde::{Deserialize, Serialize};

/// Pairs of truth and prediction that are kept, taken evenly over the samples.
const MAX_PAIRS: u64 = 500;
/// Bins on either side of zero.
const HALF_BINS: i64 = 32;
/// The narrowest bin: the width doubles from here to that of the largest error.
const MIN_WIDTH: f64 = f64::MIN_POSITIVE;

/// Counts of one target, in its own units.
#[derive(Clone, Debug)]
pub struct ResidualSums {
    /// Samples that are expected.
    samples: u64,
    seen: u64,
    width: f64,
    /// Bin `i` has the errors from `(i - HALF_BINS) * width`.
    counts: Vec<u64>,
    not_finite: u64,
    pairs: Vec<[f32; 2]>,
}

/// The errors of the predictions of one target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Residuals {
    /// Bin `i` has the errors, prediction minus truth, from `start + i * width` to below the next.
    pub start: f64,
    pub width: f64,
    /// From the first bin that has samples to the last.
    pub counts: Vec<u64>,
    /// Samples whose error is not finite.
    pub not_finite: u64,
    /// Truth and prediction of up to 500 samples, evenly over the set.
    pub pairs: Vec<[f32; 2]>,
}

impl ResidualSums {
    /// Bytes of the sums, and of the residuals that follow from them.
    pub const BYTES: usize = 2 * (MAX_PAIRS as usize * 8 + 2 * HALF_BINS as usize * 8);

    pub fn new(samples: u64) -> Self {
        Self {
            samples,
            seen: 0,
            width: MIN_WIDTH,
            counts: vec![0; 2 * HALF_BINS as usize],
            not_finite: 0,
            pairs: Vec::with_capacity(MAX_PAIRS.min(samples) as usize),
        }
    }

    pub fn push(&mut self, predicted: f64, truth: f64) {
        let error = predicted - truth;
        let number =
            |sample: u64| u128::from(sample) * u128::from(MAX_PAIRS) / u128::from(self.samples.max(1));
        // The first sample of each of 500 equal parts of the set.
        let is_taken = self.seen == 0 || number(self.seen) > number(self.seen - 1);
        self.seen += 1;
        if !error.is_finite() {
            self.not_finite += 1;
            return;
        }
        if is_taken && self.pairs.len() < MAX_PAIRS as usize {
            self.pairs.push([truth as f32, predicted as f32]);
        }
        while error.abs() >= HALF_BINS as f64 * self.width {
            self.widen();
        }
        self.counts[((error / self.width).floor() as i64 + HALF_BINS) as usize] += 1;
    }

    /// Doubles the width. Bins are halves of the wider ones, so the result does not depend on the order of samples.
    fn widen(&mut self) {
        self.width *= 2.0;
        let narrow = std::mem::replace(&mut self.counts, vec![0; 2 * HALF_BINS as usize]);
        for (bin, count) in narrow.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let from = (bin as i64 - HALF_BINS).div_euclid(2);
            self.counts[(from + HALF_BINS) as usize] += count;
        }
    }

    pub fn finish(self) -> Residuals {
        let first = self.counts.iter().position(|count| *count > 0).unwrap_or(0);
        let end = self.counts.iter().rposition(|count| *count > 0).map_or(first, |last| last + 1);
        Residuals {
            start: (first as i64 - HALF_BINS) as f64 * self.width,
            width: self.width,
            counts: self.counts[first..end].to_vec(),
            not_finite: self.not_finite,
            pairs: self.pairs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn residuals(errors: &[f64]) -> Residuals {
        let mut sums = ResidualSums::new(errors.len() as u64);
        errors.iter().for_each(|error| sums.push(1.0 + error, 1.0));
        sums.finish()
    }

    #[test]
    fn errors_are_counted_in_bins_as_wide_as_the_largest_needs() {
        let found = residuals(&[0.0, 3.0, -2.5, 0.5, 31.0, f64::NAN]);
        assert_eq!((found.width, found.start, found.not_finite), (1.0, -3.0, 1));
        assert_eq!((found.counts.len(), found.counts[0], found.counts[3], found.counts[34]), (35, 1, 2, 1));
        assert_eq!(
            residuals(&[]),
            Residuals { width: MIN_WIDTH, start: -32.0 * MIN_WIDTH, ..Residuals::default() }
        );
    }

    #[test]
    fn pairs_are_taken_evenly() {
        let mut sums = ResidualSums::new(100_000);
        (0..100_000).for_each(|i| sums.push(f64::from(i), f64::from(i)));
        let pairs = sums.finish().pairs;
        assert_eq!(pairs.len(), 500);
        assert!(pairs.iter().enumerate().all(|(i, pair)| *pair == [i as f32 * 200.0; 2]));
        assert_eq!(residuals(&[0.5; 7]).pairs.len(), 7);
    }

    proptest! {
        /// Every finite error is in the bin that counts it, whatever came before.
        #[test]
        fn no_sample_is_lost(errors in proptest::collection::vec(-1e6f64..1e6, 1..200), scale in -300i32..300) {
            let errors: Vec<f64> = errors.iter().map(|error| error * 2f64.powi(scale)).collect();
            let mut sums = ResidualSums::new(errors.len() as u64);
            errors.iter().for_each(|error| sums.push(*error, 0.0));
            let found = sums.finish();
            let mut counts = vec![0; found.counts.len()];
            let first = (found.start / found.width) as i64;
            errors.iter().for_each(|error| counts[((error / found.width).floor() as i64 - first) as usize] += 1);
            prop_assert_eq!(&found.counts, &counts);
        }
    }
}
