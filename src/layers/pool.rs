//! Max pooling over (height, width, channels) pictures.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::pool::{Window, max, max_backward};

pub struct MaxPool {
    pub name: String,
    pub window: Window,
}

impl Layer for MaxPool {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        let (h, w) = self.window.output();
        vec![h, w, self.window.channels]
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        let (y, which) = max(x, &self.window)?;
        Ok((y, Saved(vec![which])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, _: &Pass, want: bool) -> Result<Option<Tensor>> {
        want.then(|| max_backward(&saved.0[0], &dy, &self.window)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let (w, output) = (&self.window, self.output().iter().product());
        Cost {
            input: at.bytes(w.height * w.width * w.channels),
            output: at.bytes(output),
            saved: (at.batch * output) as u64,
            flops: (at.batch * output * w.size * w.size) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        0
    }
}
