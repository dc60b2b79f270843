//! A standalone activation layer, for where the preceding layer cannot fuse it.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::{Activation as Act, SavedForBackward, activation};

pub struct ActivationLayer {
    pub name: String,
    /// Shape of one sample.
    pub shape: Vec<usize>,
    pub act: Act,
}

impl Layer for ActivationLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        if self.act == Act::Identity {
            return Ok((x.clone(), SavedTensors::default()));
        }
        let y = activation::forward(x, self.act)?;
        let saved =
            if self.act.saved_for_backward() == SavedForBackward::Output { y.clone() } else { x.clone() };
        Ok((y, SavedTensors(vec![saved])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        _: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        match saved.0.first() {
            Some(v) => needs_input_grad.then(|| activation::backward(v, &dy, self.act)).transpose(),
            None => Ok(Some(dy)),
        }
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        if self.act == Act::Identity {
            return Cost { output_is_view: true, ..Cost::default() };
        }
        let len: usize = self.shape.iter().product();
        Cost {
            input_grad: spec.bytes(len),
            output: spec.bytes(len),
            saves_input: self.act.saved_for_backward() == SavedForBackward::Input,
            saves_output: self.act.saved_for_backward() == SavedForBackward::Output,
            flops: (spec.batch * len) as u64,
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

    #[test]
    fn gradients_are_right() {
        use Act::*;
        for act in [Relu, Relu6, Gelu, GeluTanh, Silu, Sigmoid, Tanh, Identity] {
            let build = |_: &mut crate::params::ParamRegistry| {
                Box::new(ActivationLayer { name: "a".into(), shape: vec![5, 7], act }) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, 5, 7], 1);
            check_finite_differences(&build, &input(3));
            check_cost(&build, &input);
            check_against_autograd(&build, &input(3), &|x, _| {
                activation::reference::forward(&x.affine(1.0, 0.0)?, act)
            });
        }
    }
}
