//! The learning-rate range test: the rate grows exponentially from update to update, and the loss says which rates
//! train.
//!
//! Takes the rate and the loss of every update; gives the smoothed curve, where it diverges, and the suggested rate.
//! Pure functions.

use serde::Serialize;

/// Weight of the past in the smoothed loss.
const SMOOTHING: f64 = 0.9;

/// The loss has diverged where its smoothed value exceeds this many times its minimum so far.
const DIVERGED_FACTOR: f64 = 4.0;

/// The first updates, whose smoothed loss is a mean of few.
const FIRST_UPDATES: usize = 5;

/// One part in this many of a test has rates that hardly train: what falls there is an outlier among the first losses.
const START_PARTS: usize = 10;

/// A slope is measured over this many updates on either side, more than a noisy loss needs to turn.
const SLOPE_SPAN: usize = 4;

/// A fall of the smoothed loss by less than this fraction is noise.
const MIN_DESCENT: f64 = 0.01;

/// One update of the test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LrPoint {
    pub step: u64,
    pub lr: f64,
    pub loss: f64,
    /// Exponential moving average of the loss, corrected for its start.
    pub smoothed: f64,
}

/// What the curve says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// The rate at which the smoothed loss falls fastest per factor of the rate.
    pub lr: f64,
    /// The rate at its minimum: too high to train with.
    pub lr_at_minimum: f64,
    pub loss_at_minimum: f64,
}

/// The updates of a test, up to and including the one at which the loss diverges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LrCurve {
    pub points: Vec<LrPoint>,
    pub diverged: bool,
}

/// The curve of these updates, each with its step, rate and loss.
pub fn curve(updates: impl IntoIterator<Item = (u64, f64, f64)>) -> LrCurve {
    let (mut curve, mut mean, mut lowest) = (LrCurve::default(), 0.0, f64::INFINITY);
    for (step, lr, loss) in updates {
        mean = SMOOTHING * mean + (1.0 - SMOOTHING) * loss;
        let smoothed = mean / (1.0 - SMOOTHING.powi(curve.points.len() as i32 + 1));
        curve.points.push(LrPoint { step, lr, loss, smoothed });
        lowest = f64::min(lowest, smoothed);
        let is_high = curve.points.len() > FIRST_UPDATES && smoothed > DIVERGED_FACTOR * lowest;
        if is_high || !smoothed.is_finite() {
            curve.diverged = true;
            break;
        }
    }
    curve
}

/// The suggested rate; `None` if no rate lowered the loss.
pub fn suggest(points: &[LrPoint]) -> Option<Suggestion> {
    let finite = points.iter().position(|point| !point.smoothed.is_finite()).unwrap_or(points.len());
    let points = points.get(FIRST_UPDATES.max(finite / START_PARTS)..finite)?;
    let (at, minimum) = points.iter().enumerate().min_by(|a, b| a.1.smoothed.total_cmp(&b.1.smoothed))?;
    let start = points.first()?.smoothed;
    if start - minimum.smoothed < MIN_DESCENT * start.abs() {
        return None;
    }
    // The rates grow by one factor, so that differences of neighbours are slopes over the logarithm of the rate.
    let slope = |i: &usize| {
        let (from, to) = (i.saturating_sub(SLOPE_SPAN), (i + SLOPE_SPAN).min(at));
        (points[to].smoothed - points[from].smoothed) / (to - from) as f64
    };
    let steepest = (1..at).min_by(|a, b| slope(a).total_cmp(&slope(b))).unwrap_or(at);
    Some(Suggestion { lr: points[steepest].lr, lr_at_minimum: minimum.lr, loss_at_minimum: minimum.smoothed })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(i: usize) -> f64 {
        1e-6 * 10f64.powf(i as f64 / 10.0)
    }

    /// Flat, then a fall that is steepest at 1e-3, a minimum at 1e-2, then divergence.
    fn loss(lr: f64) -> f64 {
        let x = lr.log10();
        if x < -2.0 { 2.3 - 1.8 / (1.0 + (-(x + 3.0) * 4.0).exp()) } else { 0.5 + (x + 2.0) * 5.0 }
    }

    #[test]
    fn the_rate_of_steepest_descent_is_suggested() {
        let updates = (0..80).map(|i| (i as u64 + 1, rate(i), loss(rate(i))));
        let curve = curve(updates);
        assert!(curve.points.len() < 80 && curve.diverged);
        let suggestion = suggest(&curve.points).unwrap();
        // Smoothing delays the curve by less than a factor of 4.
        assert!((1e-3..4e-3).contains(&suggestion.lr), "{suggestion:?}");
        assert!(suggestion.lr_at_minimum > suggestion.lr);
    }

    /// The same, with noise and a first loss far above the second.
    #[test]
    fn an_outlier_at_the_start_is_not_a_descent() {
        let rate = |i: usize| 1e-5 * 10f64.powf(i as f64 / 40.0);
        let noise = |i: usize| 0.05 * ((i * 7919 % 13) as f64 / 6.0 - 1.0);
        let first = |i: usize| if i == 0 { 1.5 } else { 0.0 };
        let curve = curve((0..200).map(|i| (i as u64 + 1, rate(i), loss(rate(i)) + noise(i) + first(i))));
        let suggestion = suggest(&curve.points).unwrap();
        assert!((5e-4..4e-3).contains(&suggestion.lr), "{suggestion:?}");
    }

    #[test]
    fn a_loss_that_is_not_finite_ends_the_curve() {
        let losses = [2.0, 2.0, f64::NAN, 1.0];
        let curve = curve(losses.iter().enumerate().map(|(i, loss)| (i as u64, rate(i), *loss)));
        assert!(curve.points.len() == 3 && curve.diverged);
        assert_eq!(suggest(&curve.points), None);
    }

    #[test]
    fn nothing_is_suggested_where_no_rate_trains() {
        let flat = curve((0..60).map(|i| (i as u64, rate(i), 2.3)));
        assert!(!flat.diverged && suggest(&flat.points).is_none());
        let rising = curve((0..60).map(|i| (i as u64, rate(i), 1.0 + i as f64 / 10.0)));
        assert_eq!(suggest(&rising.points), None);
        assert_eq!(suggest(&[]), None);
    }
}
