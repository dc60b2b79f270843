//! `[quantize]`: values that training rounds to 8-bit integers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Quantization-aware training: the model trains with the rounding of the 8-bit integers that `trainer export
/// --quantize int8` writes. From `begin_step` on, weights are rounded per output, with batch norm folded into them, and
/// activations per tensor, within a range that follows the values of training. Gradients are straight-through, and 0
/// where an activation is clipped. Evaluations round too, and an export takes the ranges from training. For models of
/// kind `mlp`, `cnn`, `resnet` and `mobilenet`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct QuantizeConfig {
    /// Round in training.
    pub training: bool,
    /// The update after which values are rounded; before it, the model trains in floats. If absent, the first one with
    /// `train.init`, and half of the run's updates without.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub begin_step: Option<u64>,
}

/// The models that have a form in 8-bit integers, activations included.
pub const INT8_KINDS: [&str; 4] = ["mlp", "cnn", "resnet", "mobilenet"];

/// The least fraction of the way that a range moves towards the extremes of an update: that of PyTorch.
const LEAST_FRACTION: f64 = 0.01;

impl QuantizeConfig {
    /// Fills in `begin_step`, for a run of this many updates, if it rounds.
    pub fn resolve(&mut self, total_steps: u64, has_weights: bool) {
        if self.training {
            self.begin_step.get_or_insert(if has_weights { 1 } else { (total_steps / 2).max(1) });
        }
    }

    /// Whether values are rounded after this many updates.
    pub fn rounds_after(&self, step: u64) -> bool {
        self.training && self.begin_step.is_some_and(|begin| step >= begin)
    }

    /// The fraction of the way that ranges move towards the extremes of update `step`: that of a mean over all updates
    /// at first, later that of an exponential moving average. `None` before values are rounded.
    pub fn range_fraction(&self, step: u64) -> Option<f64> {
        let updates = step - self.begin_step.filter(|begin| self.training && step >= *begin)?;
        Some((1.0 / (updates + 1) as f64).max(LEAST_FRACTION))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_begins_half_way_or_with_the_weights_of_a_trained_model() {
        let resolved = |text: &str, has_weights| {
            let mut config: QuantizeConfig = toml::from_str(text).unwrap();
            config.resolve(101, has_weights);
            config
        };
        assert_eq!(resolved("training = true", false).begin_step, Some(50));
        assert_eq!(resolved("training = true", true).begin_step, Some(1));
        let given = resolved("training = true\nbegin_step = 7", true);
        assert_eq!((6..9).map(|step| given.rounds_after(step)).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!(given.range_fraction(6), None);
        let fractions = [7, 8, 10, 1000].map(|step| given.range_fraction(step).unwrap());
        assert_eq!(fractions, [1.0, 0.5, 0.25, 0.01]);
        assert_eq!(resolved("", false), QuantizeConfig::default());
    }
}
