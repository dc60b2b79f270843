//! The first position of a sequence, where a class token gathers what the sequence says.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
#[cfg(feature = "cuda")]
use crate::kernels::cuda;

pub struct First {
    pub name: String,
    /// Positions of a sample, and the values of each.
    pub length: usize,
    pub width: usize,
}

impl Layer for First {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.width]
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        // A copy even where the sequence is one long: a view would keep the whole of it alive.
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            let y = cuda::fresh(device, x.dtype(), (x.dim(0)?, self.width))?;
            cuda::copy_rows(device, x, self.length * self.width, &y, self.width, self.width)?;
            return Ok((y, Saved::default()));
        }
        let y = Tensor::zeros((x.dim(0)?, self.width), x.dtype(), x.device())?;
        y.slice_set(&x.narrow(1, 0, 1)?.contiguous()?.squeeze(1)?, 0, 0)?;
        Ok((y, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, _: &Pass, want: bool) -> Result<Option<Tensor>> {
        if !want {
            return Ok(None);
        }
        let dx = Tensor::zeros((dy.dim(0)?, self.length, self.width), dy.dtype(), dy.device())?;
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(&dy) {
            cuda::copy_rows(device, &dy, self.width, &dx, self.length * self.width, self.width)?;
            return Ok(Some(dx));
        }
        dx.slice_set(&dy.unsqueeze(1)?, 1, 0)?;
        Ok(Some(dx))
    }

    fn cost(&self, at: At) -> Cost {
        let output = at.bytes(self.width);
        // The first positions, gathered, before they are written.
        let gathered = self.length > 1 && !at.on.is_cuda();
        let forward = if gathered { output } else { 0 };
        Cost { input: at.bytes(self.length * self.width), output, forward, ..Cost::default() }
    }

    fn parameters(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, cost_is_exact, differences_agree, random};
    use super::*;

    #[test]
    fn gradients_are_right() {
        for length in [1, 2, 7] {
            let build = |_: &mut crate::params::Declared| {
                Box::new(First { name: "f".into(), length, width: 5 }) as Box<dyn Layer>
            };
            let input = |batch: usize| random(&[batch, length, 5], 1);
            differences_agree(&build, &input(3));
            autograd_agrees(&build, &input(3), &|x, _| x.narrow(1, 0, 1)?.squeeze(1));
            cost_is_exact(&build, &input);
        }
    }
}
