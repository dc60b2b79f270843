//! Selects the first position of a sequence, where the class token aggregates the sequence.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
#[cfg(feature = "cuda")]
use crate::kernels::cuda;
use crate::kernels::on_cuda;

pub struct FirstToken {
    pub name: String,
    /// Positions per sample, and values per position.
    pub length: usize,
    pub width: usize,
}

impl Layer for FirstToken {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.width]
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        // Copies even if the sequence has one position: a view would keep the whole sequence alive.
        on_cuda!(x, |device| {
            let y = cuda::uninit(device, x.dtype(), (x.dim(0)?, self.width))?;
            cuda::copy_rows(device, x, self.length * self.width, &y, self.width, self.width)?;
            Ok((y, SavedTensors::default()))
        });
        let y = x.narrow(1, 0, 1)?.squeeze(1)?.force_contiguous()?;
        Ok((y, SavedTensors::default()))
    }

    fn backward(
        &self,
        _: SavedTensors,
        dy: Tensor,
        _: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        if !needs_input_grad {
            return Ok(None);
        }
        let dx = Tensor::zeros((dy.dim(0)?, self.length, self.width), dy.dtype(), dy.device())?;
        on_cuda!(&dy, |device| {
            cuda::copy_rows(device, &dy, self.width, &dx, self.length * self.width, self.width)?;
            Ok(Some(dx))
        });
        dx.slice_set(&dy.unsqueeze(1)?, 1, 0)?;
        Ok(Some(dx))
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let output = spec.bytes(self.width);
        Cost { input_grad: spec.bytes(self.length * self.width), output, ..Cost::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;

    #[test]
    fn gradients_are_right() {
        for length in [1, 2, 7] {
            let build = |_: &mut crate::params::ParamRegistry| {
                Box::new(FirstToken { name: "f".into(), length, width: 5 }) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, length, 5], 1);
            check_finite_differences(&build, &input(3));
            check_against_autograd(&build, &input(3), &|x, _| x.narrow(1, 0, 1)?.squeeze(1));
            check_cost(&build, &input);
        }
    }
}
