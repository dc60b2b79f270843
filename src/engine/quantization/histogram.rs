//! The distribution of an activation over the samples of a calibration, and the range that represents it best.

use std::str::FromStr;

use super::AffineQuantization;
use crate::base::words::{UnknownWord, by_name};

/// How the range of an activation is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClipMethod {
    /// The range with the smallest mean squared error.
    Mse,
    /// Without the outermost 0.01 % of the values.
    Percentile,
    /// From the smallest value to the largest.
    MinMax,
}

impl ClipMethod {
    pub const ALL: [Self; 3] = [Self::Mse, Self::Percentile, Self::MinMax];

    pub fn name(self) -> &'static str {
        match self {
            Self::Mse => "mse",
            Self::Percentile => "percentile",
            Self::MinMax => "minmax",
        }
    }
}

impl FromStr for ClipMethod {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        by_name(word, &Self::ALL, Self::name)
    }
}

const BINS: usize = 4096;
/// Fraction of the values that `Percentile` leaves out.
const TAIL: f64 = 1e-4;
/// The ranges that `Mse` tries are these fractions of the whole, for both ends and then for each.
const FRACTIONS: u32 = 100;

/// Counts of values between `-bound` and `bound`, a power of two that doubles when a value is larger: the counts do
/// not depend on the order of the values.
#[derive(Clone, Debug)]
pub(super) struct RangeHistogram {
    bound: f32,
    counts: Vec<u64>,
    low: f32,
    high: f32,
}

impl RangeHistogram {
    /// Bytes that one takes.
    pub(super) const BYTES: u64 = (BINS * size_of::<u64>()) as u64;

    pub(super) fn new() -> Self {
        Self { bound: 2f32.powi(-40), counts: vec![0; BINS], low: 0.0, high: 0.0 }
    }

    /// Counts values. Returns false if one is not finite, which counts none.
    pub(super) fn add(&mut self, values: &[f32]) -> bool {
        if values.iter().any(|value| !value.is_finite()) {
            return false;
        }
        self.low = values.iter().fold(self.low, |low, value| low.min(*value));
        self.high = values.iter().fold(self.high, |high, value| high.max(*value));
        while self.bound <= self.high.max(-self.low) && self.bound.is_finite() {
            self.double();
        }
        // A power of two, so that the product is exact.
        let per_unit = BINS as f32 / 2.0 / self.bound;
        for value in values {
            let bin = (value * per_unit).floor() as isize + BINS as isize / 2;
            self.counts[bin.clamp(0, BINS as isize - 1) as usize] += 1;
        }
        true
    }

    /// Two neighbouring bins become one.
    fn double(&mut self) {
        let mut counts = vec![0; BINS];
        for (bin, count) in self.counts.iter().enumerate() {
            counts[BINS / 4 + bin / 2] += count;
        }
        (self.counts, self.bound) = (counts, 2.0 * self.bound);
    }

    /// The middle of a bin.
    fn center(&self, bin: usize) -> f32 {
        ((bin as f32 + 0.5) / (BINS as f32 / 2.0) - 1.0) * self.bound
    }

    pub(super) fn quantization(&self, method: ClipMethod) -> AffineQuantization {
        let (low, high) = match method {
            ClipMethod::MinMax => (self.low, self.high),
            ClipMethod::Percentile => self.without_tails(),
            ClipMethod::Mse => self.least_error(),
        };
        AffineQuantization::of_range(low, high)
    }

    fn without_tails(&self) -> (f32, f32) {
        let total: u64 = self.counts.iter().sum();
        let outside = (total as f64 * TAIL / 2.0) as u64;
        let end = |bin_of: fn(usize) -> usize| {
            let mut seen = 0;
            let found = (0..BINS).map(bin_of).find(|bin| {
                seen += self.counts[*bin];
                seen > outside
            });
            found.map_or(0.0, |bin| self.center(bin))
        };
        let (low, high) = (end(|bin| bin), end(|bin| BINS - 1 - bin));
        (low.max(self.low), high.min(self.high))
    }

    fn least_error(&self) -> (f32, f32) {
        let fractions = || (FRACTIONS / 4..=FRACTIONS).rev().map(|n| n as f32 / FRACTIONS as f32);
        let best = |ranges: &mut dyn Iterator<Item = (f32, f32)>| {
            let errors = ranges.map(|range| (self.error(range), range));
            errors.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or((self.low, self.high), |(_, range)| range)
        };
        let (low, high) = best(&mut fractions().map(|f| (f * self.low, f * self.high)));
        let (low, _) = best(&mut fractions().map(|f| (f * self.low, high)).chain([(low, high)]));
        best(&mut fractions().map(|f| (low, f * self.high)).chain([(low, high)]))
    }

    /// The squared error of the values in a range.
    fn error(&self, (low, high): (f32, f32)) -> f64 {
        let quantization = AffineQuantization::of_range(low, high);
        let bins = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        bins.map(|(bin, count)| {
            let center = self.center(bin);
            let error = f64::from(quantization.rounded(center) - center);
            *count as f64 * error * error
        })
        .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::{RngKey, stream_id};

    /// Normal values, and one far outside.
    fn values() -> Vec<f32> {
        let key = RngKey::new(1, stream_id("histogram"));
        let normal = (0..20_000u64).map(|i| {
            let sum: f64 = (0..12).map(|j| key.f64(12 * i + j)).sum();
            (sum - 6.0) as f32
        });
        normal.chain([40.0]).collect()
    }

    #[test]
    fn an_outlier_is_clipped_by_what_clips() {
        let mut histogram = RangeHistogram::new();
        assert!(histogram.add(&values()));
        let scale = |method| histogram.quantization(method).scale;
        assert!((scale(ClipMethod::MinMax) - 44.0 / 255.0).abs() < 0.01);
        assert!(scale(ClipMethod::Percentile) < 9.0 / 255.0);
        assert!(scale(ClipMethod::Mse) < scale(ClipMethod::MinMax));
        // What it minimizes is smaller than for the others.
        let error = |method| {
            let quantization = histogram.quantization(method);
            values().iter().map(|v| f64::from(quantization.rounded(*v) - v).powi(2)).sum::<f64>()
        };
        assert!(error(ClipMethod::Mse) <= 1.02 * error(ClipMethod::MinMax));
        assert!(error(ClipMethod::Mse) <= 1.02 * error(ClipMethod::Percentile));
    }

    #[test]
    fn the_order_of_values_does_not_matter() {
        let mut values = values();
        let (mut a, mut b) = (RangeHistogram::new(), RangeHistogram::new());
        values.chunks(37).for_each(|chunk| assert!(a.add(chunk)));
        values.reverse();
        assert!(b.add(&values));
        assert_eq!((a.bound, a.low, a.high), (b.bound, b.low, b.high));
        assert!(a.counts == b.counts);
        assert!(!RangeHistogram::new().add(&[1.0, f32::NAN]));
        assert_eq!(RangeHistogram::new().quantization(ClipMethod::Mse).scale, 1.0 / 255.0);
    }
}
