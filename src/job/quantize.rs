//! `[quantize]`: values that training rounds to 8-bit integers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Quantization-aware training: the model learns with the rounding of the 8-bit integers that `trainer export --quantize int8`
/// writes. From `begin_step` on, weights are rounded to a grid per output and activations to one per tensor, whose range
/// follows the values that training sees; gradients pass as if nothing was rounded, but not where a value is clipped. Batch
/// norm is folded into the layer before it. Evaluations round too, and an export takes the ranges from training. For models
/// of kind `mlp`, `cnn`, `resnet` and `mobilenet`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct QuantizeConfig {
    /// Round in training.
    pub training: bool,
    /// The update after which values are rounded; before it, the model learns in floats. If absent, the first of a run with
    /// `train.init`, and half of the updates of others.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub begin_step: Option<u64>,
}

/// The models that have a form in 8-bit integers, activations included.
pub const INT8_KINDS: [&str; 4] = ["mlp", "cnn", "resnet", "mobilenet"];

/// The least part of the way that a range moves towards the values of an update, as in PyTorch.
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

    /// The part of the way that ranges move towards the values of update `step`: that of a mean over all updates at first,
    /// later of an exponential moving average. `None` before values are rounded.
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
