//! Metrics of predictions, one sample at a time: pure arithmetic on logits and targets, in f64.
//!
//! Values are those of scikit-learn on the same predictions. Takes rows, gives numbers; knows neither models nor files,
//! except that scores beyond a limit of memory are kept in a temporary file ([`scores`]).

pub mod classification;
pub mod detail;
pub mod histogram;
pub mod multi_label;
pub mod regression;
pub mod residuals;
pub mod scores;
pub mod task;

/// `values` as probabilities: their softmax, in f64.
pub fn softmax(values: &[f32], into: &mut Vec<f64>) {
    let largest = values.iter().fold(f32::NEG_INFINITY, |most, value| most.max(*value)) as f64;
    into.clear();
    into.extend(values.iter().map(|value| (f64::from(*value) - largest).exp()));
    let sum: f64 = into.iter().sum();
    into.iter_mut().for_each(|value| *value /= sum);
}

/// The probability that a logit stands for.
pub fn sigmoid(logit: f64) -> f64 {
    if logit < 0.0 { logit.exp() / (1.0 + logit.exp()) } else { 1.0 / (1.0 + (-logit).exp()) }
}

/// Index of the largest value, the first of equals.
pub fn argmax(values: &[f32]) -> usize {
    values
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (i, &v)| if v > best.1 { (i, v) } else { best })
        .0
}
