//! Max pooling over (height, width, channels) images.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::pool::{PoolGeometry, max, max_backward};

pub struct MaxPool {
    pub name: String,
    pub window: PoolGeometry,
}

impl Layer for MaxPool {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        let (h, w) = self.window.output();
        vec![h, w, self.window.channels]
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let (y, argmax) = max(x, &self.window)?;
        Ok((y, SavedTensors(vec![argmax])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        _: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        needs_input_grad.then(|| max_backward(&saved.0[0], &dy, &self.window)).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let (w, output) = (&self.window, self.output_shape().iter().product());
        Cost {
            input_grad: spec.bytes(w.height * w.width * w.channels),
            output: spec.bytes(output),
            saved: (spec.batch * output) as u64,
            flops: (spec.batch * output * w.size * w.size) as u64,
            ..Cost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_bf16, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use crate::kernels::pool::reference_max;
    use proptest::prelude::*;

    #[test]
    fn bf16_follows_f64() {
        for (size, stride, padding) in [(2, 2, 0), (3, 2, 1), (3, 1, 1)] {
            let window = PoolGeometry { height: 12, width: 10, channels: 24, size, stride, padding };
            let x = random_tensor(&[3, 12, 10, 24], 1);
            check_bf16(&|_| Box::new(MaxPool { name: "p".into(), window }), &x);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            size in 1usize..4,
            stride in 1usize..4,
            padding in 0usize..2,
            channels in 1usize..4,
            dh in 0usize..5,
            dw in 0usize..5,
        ) {
            let window = PoolGeometry {
                height: size + dh,
                width: size + dw,
                channels,
                size,
                stride,
                padding: padding.min(size / 2),
            };
            let build = |_: &mut crate::params::ParamRegistry| {
                Box::new(MaxPool { name: "p".into(), window }) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, window.height, window.width, channels], 1);
            check_finite_differences(&build, &input(2));
            check_cost(&build, &input);
            check_against_autograd(&build, &input(2), &|x, _| reference_max(x, &window));
        }
    }
}
