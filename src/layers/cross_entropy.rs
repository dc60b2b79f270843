//! Cross-entropy over classes, together with the linear map that scores them.

use candle_core::{Result, Tensor};

use super::loss::{Loss, Tally};
use super::{At, Cost, Pass};
use crate::kernels::cross_entropy::{Head, workspace};
use crate::kernels::linear::Grads;
use crate::params::ParamId;

pub struct CrossEntropy {
    pub name: String,
    /// (classes, width); may be a parameter of another layer, as in a tied language model.
    pub weight: ParamId,
    /// The weight belongs to another layer.
    pub tied: bool,
    pub bias: Option<ParamId>,
    /// Rows a sample has: 1, or the positions of a sequence.
    pub positions: usize,
    pub width: usize,
    pub classes: usize,
    /// Share of each target that is spread over all classes.
    pub smoothing: f64,
    pub class_weights: Option<Vec<f32>>,
}

impl CrossEntropy {
    fn head<'a>(&'a self, pass: &'a Pass) -> Head<'a> {
        Head {
            weight: pass.weight(self.weight),
            bias: self.bias.map(|id| pass.weight(id)),
            smoothing: self.smoothing,
            class_weights: self.class_weights.as_deref(),
        }
    }
}

impl Loss for CrossEntropy {
    fn name(&self) -> &str {
        &self.name
    }

    fn learn(&self, x: &Tensor, targets: &Tensor, pass: &Pass) -> Result<(Tally, Tensor)> {
        let grads = Grads { weight: pass.grad(self.weight), bias: self.bias.map(|id| pass.grad(id)) };
        self.head(pass).learn(x, targets, pass.scale, &grads)
    }

    fn judge(&self, x: &Tensor, targets: &Tensor, pass: &Pass) -> Result<Tally> {
        self.head(pass).judge(x, targets)
    }

    fn cost(&self, at: At) -> Cost {
        let rows = at.batch * self.positions;
        let (forward, backward) = workspace(at.dtype, rows, self.classes, self.width, self.bias.is_some());
        Cost {
            input: at.bytes(self.positions * self.width),
            forward,
            backward,
            flops: 2 * (rows * self.width * self.classes) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        let weight = if self.tied { 0 } else { self.width * self.classes };
        weight + self.bias.map_or(0, |_| self.classes)
    }
}
