//! `[prune]`: weights that training sets to zero.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::data::one_or_many::{list_of_one_or_many, one_or_list};

/// Channels or attention heads, by the name of the layer that has them.
pub type UnitCounts = BTreeMap<String, usize>;

/// Magnitude pruning: the smallest weights of linear layers and convolutions are set to zero, more of them as training
/// goes on, and stay zero. Biases, norms, embeddings and frozen parameters are not pruned. A file of pruned weights is
/// smaller once it is compressed: `trainer plan` estimates by how much. With a `structure` of channels or heads, whole
/// units are set to zero with their biases and norms, and `trainer export` writes a smaller model without them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PruneConfig {
    /// How sparsity, the fraction of weights that are zero, grows.
    #[serde(default)]
    pub schedule: PruneSchedule,
    /// Sparsity at `begin_step`; 0 if absent. Only with `schedule = "polynomial"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub initial: Option<f64>,
    /// Sparsity that pruning ends with: the fraction of weights, channels or heads. Required, but not with
    /// `structure = "2:4"`, which has 0.5, nor with `kept`.
    #[serde(default, rename = "final", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    pub final_sparsity: Option<f64>,
    /// The update after which the first weights are pruned.
    #[serde(default = "begin_step")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub begin_step: u64,
    /// The update after which the last weights are pruned. Required with `schedule = "polynomial"`, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub end_step: Option<u64>,
    /// Updates between two selections of the weights to prune.
    #[serde(default = "every_steps")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_steps: u64,
    /// Exponent of the polynomial: sparsity is final + (initial - final) (1 - progress)^power.
    #[serde(default = "power")]
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub power: f64,
    /// What has the given sparsity.
    #[serde(default)]
    pub scope: PruneScope,
    /// Which weights are zero together.
    #[serde(default)]
    pub structure: PruneStructure,
    /// Parameters that are not pruned: patterns as in `train.freeze`, without exceptions.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(transform = one_or_list)]
    pub skip: Vec<String>,
    /// The channels or heads that layers have left, by the name of the layer. An export has here what its run pruned:
    /// the model is built with as many. Without `final`, no more are pruned.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kept: UnitCounts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PruneSchedule {
    /// From `initial` at `begin_step` to `final` at `end_step`, fast at first and ever slower.
    #[default]
    Polynomial,
    /// All at once, at `begin_step`.
    Constant,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PruneScope {
    /// Each tensor; with channels or heads, each layer.
    #[default]
    Tensor,
    /// All tensors together: one threshold for all weights or channels. Heads have none: every layer keeps as many.
    Global,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PruneStructure {
    /// Any weights.
    #[default]
    #[serde(rename = "weights")]
    Weights,
    /// Two of each four neighbours along the inputs, which the sparse tensor cores of NVIDIA GPUs since Ampere skip;
    /// only with `schedule = "constant"`. Weights whose inputs, or input channels, are no multiple of four are not
    /// pruned.
    #[serde(rename = "2:4")]
    TwoOfFour,
    /// Whole hidden units of an `mlp`, channels of a `cnn`, inner channels of the blocks of a `resnet` or `mobilenet`,
    /// or units of a transformer's feed-forward layers: those whose weights in and out, bias and norm are the smallest
    /// together. A unit with a frozen or skipped parameter stays, and so do channels before a group norm.
    #[serde(rename = "channels")]
    Channels,
    /// Whole attention heads of a `gpt`, `llama`, `bert` or `vit`; query heads that share a key head go together.
    #[serde(rename = "heads")]
    Heads,
}

impl PruneStructure {
    /// Whether units of several tensors are pruned together, and an export is without them.
    pub fn has_units(self) -> bool {
        matches!(self, Self::Channels | Self::Heads)
    }

    /// What is pruned, in plural.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Weights | Self::TwoOfFour => "weights",
            Self::Channels => "channels",
            Self::Heads => "heads",
        }
    }

    /// The kinds of models that have such units; `None` if all do.
    pub fn kinds(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Weights | Self::TwoOfFour => None,
            Self::Channels => Some(&["mlp", "cnn", "resnet", "mobilenet", "gpt", "llama", "bert", "vit"]),
            Self::Heads => Some(&["gpt", "llama", "bert", "vit"]),
        }
    }
}

fn begin_step() -> u64 {
    1
}

fn every_steps() -> u64 {
    100
}

fn power() -> f64 {
    3.0
}

impl PruneConfig {
    /// Of a model that has these units left, and is not pruned further.
    pub fn keeping(kept: UnitCounts) -> Self {
        Self {
            schedule: PruneSchedule::default(),
            initial: None,
            final_sparsity: None,
            begin_step: begin_step(),
            end_step: None,
            every_steps: every_steps(),
            power: power(),
            scope: PruneScope::default(),
            structure: PruneStructure::default(),
            skip: Vec::new(),
            kept,
        }
    }

    /// Whether training sets anything to zero.
    pub fn is_active(&self) -> bool {
        self.final_sparsity.is_some() || self.structure == PruneStructure::TwoOfFour
    }

    /// The sparsity that pruning ends with.
    pub fn target(&self) -> f64 {
        match self.structure {
            PruneStructure::TwoOfFour => 0.5,
            _ => self.final_sparsity.unwrap_or(0.0),
        }
    }

    /// The update of the last selection.
    pub fn last_step(&self) -> u64 {
        self.end_step.unwrap_or(self.begin_step)
    }

    /// Sparsity after this many updates; 0 before pruning begins.
    pub fn sparsity(&self, step: u64) -> f64 {
        if step < self.begin_step {
            return 0.0;
        }
        if step >= self.last_step() {
            return self.target();
        }
        let progress = (step - self.begin_step) as f64 / (self.last_step() - self.begin_step) as f64;
        let (initial, target) = (self.initial.unwrap_or(0.0), self.target());
        target + (initial - target) * (1.0 - progress).powf(self.power)
    }

    /// Whether weights are selected after this many updates.
    pub fn is_due(&self, step: u64) -> bool {
        let (begin, end) = (self.begin_step, self.last_step());
        step == end || (begin..end).contains(&step) && (step - begin).is_multiple_of(self.every_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> PruneConfig {
        toml::from_str(text).unwrap()
    }

    /// The schedule of TensorFlow's model optimization toolkit.
    #[test]
    fn sparsity_follows_the_polynomial() {
        let c = config("initial = 0.5\nfinal = 0.8\nbegin_step = 1000\nend_step = 10000");
        assert_eq!(c.sparsity(999), 0.0);
        assert_eq!(c.sparsity(1000), 0.5);
        assert!((c.sparsity(5500) - (0.8 - 0.3 * 0.125)).abs() < 1e-12);
        assert_eq!(c.sparsity(10000), 0.8);
        assert_eq!(c.sparsity(20000), 0.8);
        let due: Vec<u64> = (0..20000).filter(|step| c.is_due(*step)).collect();
        assert_eq!((due[0], due[1], due.len()), (1000, 1100, 91));
        assert_eq!(*due.last().unwrap(), 10000);
    }

    #[test]
    fn the_last_selection_is_at_the_end_whatever_the_interval() {
        let c = config("final = 0.9\nend_step = 10\nevery_steps = 4");
        assert_eq!((0..30).filter(|step| c.is_due(*step)).collect::<Vec<_>>(), [1, 5, 9, 10]);
    }

    #[test]
    fn a_constant_schedule_selects_once() {
        let c = config("schedule = 'constant'\nfinal = 0.6\nbegin_step = 7");
        assert_eq!((0..30).filter(|step| c.is_due(*step)).collect::<Vec<_>>(), [7]);
        assert_eq!((c.sparsity(6), c.sparsity(7)), (0.0, 0.6));
        let c = config("schedule = 'constant'\nstructure = '2:4'");
        assert_eq!((c.sparsity(0), c.sparsity(1)), (0.0, 0.5));
    }
}
