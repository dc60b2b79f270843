//! SwiGLU: `silu(gate) * up`, with both halves from one packed projection.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::swiglu::{backward, forward};

pub struct Swiglu {
    pub name: String,
    /// Output shape of one sample; the last dimension of the input is twice as long.
    pub shape: Vec<usize>,
}

impl Layer for Swiglu {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        Ok((forward(x)?, SavedTensors(vec![x.clone()])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        _: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        needs_input_grad.then(|| backward(&saved.0[0], &dy)).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let len: usize = self.shape.iter().product();
        Cost {
            input_grad: spec.bytes(2 * len),
            output: spec.bytes(len),
            saves_input: true,
            flops: (6 * spec.batch * len) as u64,
            ..Cost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use crate::kernels::swiglu::reference;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, t in 1usize..6, n in 1usize..40) {
            let build = |_: &mut crate::params::ParamRegistry| {
                Box::new(Swiglu { name: "s".into(), shape: vec![t, n] }) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, t, 2 * n], 1);
            check_finite_differences(&build, &input(batch));
            check_against_autograd(&build, &input(batch), &|x, _| reference(x));
            check_cost(&build, &input);
        }
    }
}
