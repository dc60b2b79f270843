//! Dropout: each value is dropped with a chance that depends on (seed, epoch, sample, layer) alone.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Mode, Pass, Saved};
use crate::kernels::dropout::apply;
use crate::random::stream;

pub struct Dropout {
    pub name: String,
    /// Shape of a sample.
    pub shape: Vec<usize>,
    /// Chance that a value is dropped.
    pub p: f64,
}

impl Dropout {
    fn apply(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let layer = stream(&self.name);
        apply(x, self.p, |row| pass.random(layer, row))
    }
}

impl Layer for Dropout {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let y = if pass.mode == Mode::Eval { x.copy()? } else { self.apply(x, pass)? };
        Ok((y, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        want.then(|| self.apply(&dy, pass)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let len: usize = self.shape.iter().product();
        Cost { input: at.bytes(len), output: at.bytes(len), flops: (at.batch * len) as u64, ..Cost::default() }
    }

    fn parameters(&self) -> usize {
        0
    }
}
