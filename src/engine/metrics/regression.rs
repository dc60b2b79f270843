//! Metrics of regression, per target and in the target's own units.

use serde::{Deserialize, Serialize};

/// Sums over samples of one target.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegressionSums {
    samples: u64,
    squared: f64,
    absolute: f64,
    /// Mean of the truths, and the sum of their squared deviations from it (Welford's algorithm).
    mean: f64,
    deviations: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegressionMetrics {
    pub rmse: f64,
    pub mae: f64,
    /// Coefficient of determination; `None` if all truths are equal.
    pub r2: Option<f64>,
}

impl RegressionSums {
    pub fn push(&mut self, predicted: f64, truth: f64) {
        let error = predicted - truth;
        self.samples += 1;
        self.squared += error * error;
        self.absolute += error.abs();
        let before = truth - self.mean;
        self.mean += before / self.samples as f64;
        self.deviations += before * (truth - self.mean);
    }

    pub fn finish(&self) -> RegressionMetrics {
        let samples = self.samples as f64;
        RegressionMetrics {
            rmse: (self.squared / samples).sqrt(),
            mae: self.absolute / samples,
            r2: (self.deviations > 0.0).then(|| 1.0 - self.squared / self.deviations),
        }
    }
}
