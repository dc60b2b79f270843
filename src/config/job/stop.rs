//! `[stop]`: when a run ends before its last update.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::progress::BestMetric;

/// Ends a run early. Decided after each evaluation, and by the clock; exact across resumes. `patience` and `target` go
/// by evaluations of the model that `prune` and `quantize.training` ask for: those before the last selection of `prune`,
/// or before values are rounded, do not count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StopConfig {
    /// The metric that `patience` and `target` watch; by default `checkpoint.best`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metric: Option<BestMetric>,
    /// Evaluations in a row without an improvement after which the run stops; never if absent.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Least change of the metric that counts as an improvement.
    #[schemars(range(min = 0.0))]
    pub min_delta: f64,
    /// Value of the metric at which the run stops; never if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
    /// Minutes of training after which the run stops, over all its resumes; never if absent.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
}

impl StopConfig {
    /// Whether nothing can stop the run.
    pub fn is_off(&self) -> bool {
        self.patience.is_none() && self.target.is_none() && self.max_minutes.is_none()
    }
}
