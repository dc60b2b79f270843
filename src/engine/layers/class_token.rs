//! Turns the patches of an image into a sequence: prepends a learned class token, adds learned positions to all.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::class_token::{ClassTokenGrads, ClassTokenKernel as Kernel};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct ClassToken {
    name: String,
    pub class: ParamId,
    pub positions: ParamId,
    /// Input shape of one sample: (rows, columns, width), or (length, width).
    input_shape: Vec<usize>,
    pub width: usize,
    /// Output positions per sample, the class token included.
    length: usize,
}

impl ClassToken {
    /// `class` and `positions` name the parameters; their shapes have leading ones, like torchvision's.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        (class, positions): (&str, &str),
        input_shape: &[usize],
    ) -> Self {
        let width = input_shape.last().copied().unwrap_or(1);
        let length = input_shape.iter().product::<usize>() / width + 1;
        Self {
            name: name.into(),
            class: registry.table(class, [1, 1, width], ParamInit::Constant(0.0)),
            positions: registry.table(positions, [1, length, width], ParamInit::Normal(0.02)),
            input_shape: input_shape.to_vec(),
            width,
            length,
        }
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        Kernel { class: pass.weight(self.class), positions: pass.weight(self.positions) }
    }
}

impl Layer for ClassToken {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.length, self.width]
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        Ok((self.kernel(pass).forward(x)?, SavedTensors::default()))
    }

    fn backward(
        &self,
        _: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let shape = [&[dy.dim(0)?], self.input_shape.as_slice()].concat();
        let grads = ClassTokenGrads { class: pass.grad(self.class), positions: pass.grad(self.positions) };
        self.kernel(pass).backward(&dy, &grads, needs_input_grad.then_some(&shape))
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let len = self.length * self.width;
        Cost {
            input_grad: spec.bytes(len - self.width),
            output: spec.bytes(len),
            flops: (spec.batch * len) as u64,
            trains: self.class.trained || self.positions.trained,
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        vec![self.class, self.positions]
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, h in 1usize..4, w in 1usize..4, n in 1usize..20) {
            let build = |d: &mut ParamRegistry| {
                Box::new(ClassToken::new(d, "c", ("class_token", "positions"), &[h, w, n])) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, h, w, n], 1);
            check_finite_differences(&build, &input(batch));
            check_against_autograd(&build, &input(batch), &|x, p| {
                Kernel { class: &p[0], positions: &p[1] }.reference(x)
            });
            check_cost(&build, &input);
        }
    }
}
