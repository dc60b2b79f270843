//! `[optimizer]` and `[schedule]`: the update rule, and the learning rate over the run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The optimizer. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OptimizerConfig {
    Adamw(AdamwConfig),
    Sgd(SgdConfig),
    Lion(LionConfig),
    Adafactor(AdafactorConfig),
    /// AdamW with its two moments in 8 bits per value instead of 32.
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

    /// The same rule with 8-bit state, if there is one.
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
        self.serialize(f)
    }
}

/// Adam with decoupled weight decay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdamwConfig {
    /// Peak learning rate; `[schedule]` scales it.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of its square.
    #[schemars(inner(range(min = 0.0)), transform = each_below_one)]
    pub betas: [f64; 2],
    /// Added to the denominator for numerical stability.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub eps: f64,
    /// Decoupled weight decay: each update subtracts this fraction of a weight times the learning rate. Applies to
    /// matrices, not to biases and norms.
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
    /// Peak learning rate; `[schedule]` scales it.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Momentum; 0 means none.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub momentum: f64,
    /// Use Nesterov momentum; requires `momentum` above 0.
    pub nesterov: bool,
    /// L2 penalty: this fraction of a weight is added to its gradient. Applies to matrices, not to biases and norms.
    #[schemars(range(min = 0.0))]
    pub weight_decay: f64,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 0.1, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

/// Lion: steps by the sign of an interpolation of momentum and gradient; half the state of AdamW.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LionConfig {
    /// Peak learning rate; usually a third to a tenth of AdamW's.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Weight of the momentum in the step, and its decay rate.
    #[schemars(inner(range(min = 0.0)), transform = each_below_one)]
    pub betas: [f64; 2],
    /// Decoupled weight decay: each update subtracts this fraction of a weight times the learning rate. Applies to
    /// matrices, not to biases and norms.
    #[schemars(range(min = 0.0))]
    pub weight_decay: f64,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: [0.9, 0.99], weight_decay: 0.1 }
    }
}

/// Adafactor: stores the second moment of a matrix as one number per row and one per column; almost no state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdafactorConfig {
    /// Peak relative step size: the step is proportional to the RMS of the weights.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lr: f64,
    /// Exponent of the second moment's decay: at update t its decay rate is 1 - t^`decay`.
    #[schemars(range(min = -1.0), extend("exclusiveMaximum" = 0.0))]
    pub decay: f64,
    /// Lower bound of the RMS of the weights that scales a step.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub eps: f64,
    /// RMS above which a step is clipped.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub clip: f64,
    /// Decoupled weight decay: each update subtracts this fraction of a weight times the learning rate. Applies to
    /// matrices, not to biases and norms.
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
    /// Linear decay to the end of the run.
    Linear(DecaySchedule),
    /// Cosine decay to the end of the run.
    Cosine(DecaySchedule),
    Step(StepSchedule),
    Exponential(ExponentialSchedule),
    Onecycle(OnecycleSchedule),
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self::Constant(ConstantSchedule::default())
    }
}

impl ScheduleConfig {
    /// Updates of linear warm-up from 0; `onecycle` has a fraction of the run instead, `exponential` none.
    pub fn warmup_steps(&self) -> u64 {
        match self {
            Self::Constant(ConstantSchedule { warmup_steps }) => *warmup_steps,
            Self::Linear(decay) | Self::Cosine(decay) => decay.warmup_steps,
            Self::Step(step) => step.warmup_steps,
            Self::Exponential(_) | Self::Onecycle(_) => 0,
        }
    }
}

/// A constant rate after the warm-up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ConstantSchedule {
    /// Updates of linear warm-up from 0.
    #[schemars(range(max = 1_000_000_000))]
    pub warmup_steps: u64,
}

/// Decay to the end of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DecaySchedule {
    /// Updates of linear warm-up from 0.
    #[schemars(range(max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Learning rate at the end, as a fraction of `optimizer.lr`.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub final_lr_ratio: f64,
}

/// Multiplies the rate by `gamma` every `every_steps` updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepSchedule {
    /// Updates of linear warm-up from 0.
    #[serde(default)]
    #[schemars(range(max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Updates between two changes of the rate.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_steps: u64,
    /// The factor.
    #[serde(default = "gamma")]
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub gamma: f64,
}

fn gamma() -> f64 {
    0.1
}

/// Multiplies the rate by the same factor after every update, from one fraction of `optimizer.lr` to another. It may
/// grow: the learning-rate range test of `trainer tune --lr` is such a schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ExponentialSchedule {
    /// Learning rate of the first update, as a fraction of `optimizer.lr`.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub initial_lr_ratio: f64,
    /// Learning rate of the last update, as a fraction of `optimizer.lr`.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub final_lr_ratio: f64,
}

impl Default for ExponentialSchedule {
    fn default() -> Self {
        Self { initial_lr_ratio: 1.0, final_lr_ratio: 0.01 }
    }
}

/// The 1cycle policy: a cosine warm-up from a low rate to `optimizer.lr`, then cosine decay far below it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OnecycleSchedule {
    /// Fraction of the run that is warm-up.
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
    pub warmup_fraction: f64,
    /// `optimizer.lr` divided by the rate at the start.
    #[schemars(range(min = 1.0))]
    pub div: f64,
    /// The rate at the start divided by the rate at the end.
    #[schemars(range(min = 1.0))]
    pub final_div: f64,
}

impl Default for OnecycleSchedule {
    fn default() -> Self {
        Self { warmup_fraction: 0.3, div: 25.0, final_div: 1e4 }
    }
}
