//! `[optimizer]` and `[schedule]`: the update rule, and the learning rate over the run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How weights follow gradients. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OptimizerConfig {
    Adamw(AdamwConfig),
    Sgd(SgdConfig),
    Lion(LionConfig),
    Adafactor(AdafactorConfig),
    /// AdamW whose two means take a byte a value each instead of four.
    #[serde(rename = "adamw8bit")]
    Adamw8bit(AdamwConfig),
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::Adamw(AdamwConfig::default())
    }
}

impl OptimizerConfig {
    /// The peak learning rate, before the schedule.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adamw(AdamwConfig { lr, .. }) | Self::Adamw8bit(AdamwConfig { lr, .. }) => *lr,
            Self::Sgd(SgdConfig { lr, .. })
            | Self::Lion(LionConfig { lr, .. })
            | Self::Adafactor(AdafactorConfig { lr, .. }) => *lr,
        }
    }

    /// The same rule with its state in bytes, where there is one.
    pub fn eight_bit(&self) -> Option<Self> {
        match self {
            Self::Adamw(rule) => Some(Self::Adamw8bit(rule.clone())),
            _ => None,
        }
    }

    /// This rule, or its variant with state in bytes if that is the kind asked for.
    pub fn of_kind(&self, kind: OptimizerKind) -> Self {
        self.eight_bit().filter(|rule| rule.kind() == kind).unwrap_or_else(|| self.clone())
    }

    pub fn kind(&self) -> OptimizerKind {
        match self {
            Self::Adamw(_) => OptimizerKind::Adamw,
            Self::Sgd(_) => OptimizerKind::Sgd,
            Self::Lion(_) => OptimizerKind::Lion,
            Self::Adafactor(_) => OptimizerKind::Adafactor,
            Self::Adamw8bit(_) => OptimizerKind::Adamw8bit,
        }
    }
}

/// The `kind` of an optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    #[default]
    Adamw,
    Sgd,
    Lion,
    Adafactor,
    Adamw8bit,
}

impl std::fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Self::Adamw => "adamw",
            Self::Sgd => "sgd",
            Self::Lion => "lion",
            Self::Adafactor => "adafactor",
            Self::Adamw8bit => "adamw8bit",
        })
    }
}

/// Adam with decoupled weight decay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdamwConfig {
    /// Learning rate at its highest; `[schedule]` scales it.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Decay of the running means of the gradient and of its square.
    #[schemars(inner(range(min = 0.0)), transform = each_below_one)]
    pub betas: [f64; 2],
    /// Keeps the division by the root of the second mean finite.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub eps: f64,
    /// Fraction of each matrix weight taken off in an update, times the learning rate.
    #[schemars(range(min = 0.0))]
    pub weight_decay: f64,
}

fn each_below_one(schema: &mut schemars::Schema) {
    if let Some(items) = schema.get_mut("items").and_then(serde_json::Value::as_object_mut) {
        items.insert("exclusiveMaximum".into(), serde_json::json!(1.0));
    }
}

impl Default for AdamwConfig {
    fn default() -> Self {
        Self { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Stochastic gradient descent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SgdConfig {
    /// Learning rate at its highest; `[schedule]` scales it.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Fraction of the last update's direction kept in the next; 0 means none.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub momentum: f64,
    /// Look ahead along the momentum, which must then be above 0.
    pub nesterov: bool,
    /// Fraction of each matrix weight added to its gradient.
    #[schemars(range(min = 0.0))]
    pub weight_decay: f64,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 0.1, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

/// Steps of one size along the sign of a mixture of momentum and gradient: half the state of AdamW.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LionConfig {
    /// Learning rate at its highest; a third to a tenth of what AdamW wants.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Fraction of the momentum in the step, and in the next momentum.
    #[schemars(inner(range(min = 0.0)), transform = each_below_one)]
    pub betas: [f64; 2],
    /// Fraction of each matrix weight taken off in an update, times the learning rate.
    #[schemars(range(min = 0.0))]
    pub weight_decay: f64,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: [0.9, 0.99], weight_decay: 0.1 }
    }
}

/// The second mean of a matrix kept as one number a row and one a column: almost no state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdafactorConfig {
    /// Step at its highest, in proportion to the size of the weights.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// The second mean forgets at the rate of the update's number to this power.
    #[schemars(range(min = -1.0), extend("exclusiveMaximum" = 0.0))]
    pub decay: f64,
    /// The least size of weights that a step is in proportion to.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub eps: f64,
    /// Root mean square at which a step is cut.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub clip: f64,
    /// Fraction of each matrix weight taken off in an update, times the learning rate.
    #[schemars(range(min = 0.0))]
    pub weight_decay: f64,
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self { lr: 1e-2, decay: -0.8, eps: 1e-3, clip: 1.0, weight_decay: 0.0 }
    }
}

/// The learning rate over the run, as a fraction of `optimizer.lr`. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ScheduleConfig {
    Constant(ConstantSchedule),
    /// A straight line down to the end of the run.
    Linear(DecaySchedule),
    /// Half a cosine wave down to the end of the run.
    Cosine(DecaySchedule),
    Step(StepSchedule),
    Onecycle(OnecycleSchedule),
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self::Constant(ConstantSchedule::default())
    }
}

impl ScheduleConfig {
    /// Updates over which the rate climbs from 0; `onecycle` states a fraction of the run instead.
    pub fn warmup_steps(&self) -> u64 {
        match self {
            Self::Constant(ConstantSchedule { warmup_steps }) => *warmup_steps,
            Self::Linear(decay) | Self::Cosine(decay) => decay.warmup_steps,
            Self::Step(step) => step.warmup_steps,
            Self::Onecycle(_) => 0,
        }
    }
}

/// The same rate from the warm-up to the end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ConstantSchedule {
    /// Updates over which the rate climbs from 0 in a straight line.
    #[schemars(range(max = 1_000_000_000))]
    pub warmup_steps: u64,
}

/// Down to the end of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DecaySchedule {
    /// Updates over which the rate climbs from 0 in a straight line.
    #[schemars(range(max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Rate at the end, as a fraction of `optimizer.lr`.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub final_lr_ratio: f64,
}

/// A fall by a factor every so many updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepSchedule {
    /// Updates over which the rate climbs from 0 in a straight line.
    #[serde(default)]
    #[schemars(range(max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Updates from one fall to the next.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_steps: u64,
    /// The factor of a fall.
    #[serde(default = "gamma")]
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub gamma: f64,
}

fn gamma() -> f64 {
    0.1
}

/// One climb from a low rate to `optimizer.lr` and one fall far below, both half cosine waves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OnecycleSchedule {
    /// Fraction of the run spent warming up.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub warmup_fraction: f64,
    /// `optimizer.lr` over the rate at the start.
    #[schemars(range(min = 1.0))]
    pub div: f64,
    /// The rate at the start over the rate at the end.
    #[schemars(range(min = 1.0))]
    pub final_div: f64,
}

impl Default for OnecycleSchedule {
    fn default() -> Self {
        Self { warmup_fraction: 0.3, div: 25.0, final_div: 1e4 }
    }
}
