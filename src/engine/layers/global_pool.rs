//! Global average pooling: reduces a (height, width, channels) image to its mean per channel.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::avg_pool::{global_avg_pool, global_avg_pool_backward};

pub struct GlobalAvgPool {
    pub name: String,
    /// (height, width, channels)
    pub shape: [usize; 3],
}

impl Layer for GlobalAvgPool {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.shape[2]]
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        Ok((global_avg_pool(x)?, SavedTensors::default()))
    }

    fn backward(
        &self,
        _: SavedTensors,
        dy: Tensor,
        _: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let [h, w, _] = self.shape;
        needs_input_grad.then(|| global_avg_pool_backward(&dy, (h, w))).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let [h, w, c] = self.shape;
        let acc = spec.dtype.size_in_bytes().max(4);
        Cost {
            input_grad: spec.bytes(h * w * c),
            output: spec.bytes(c),
            forward_workspace: (spec.threads() * c * acc) as u64,
            flops: (spec.batch * h * w * c) as u64,
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
    use crate::kernels::avg_pool::global_avg_pool_reference;

    #[test]
    fn bf16_follows_f64() {
        let x = random_tensor(&[3, 9, 7, 40], 1);
        check_bf16(&|_| Box::new(GlobalAvgPool { name: "p".into(), shape: [9, 7, 40] }), &x);
    }

    #[test]
    fn gradients_are_right() {
        for shape in [[1, 1, 5], [3, 2, 4], [7, 7, 33]] {
            let build = |_: &mut crate::params::ParamRegistry| {
                Box::new(GlobalAvgPool { name: "p".into(), shape }) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, shape[0], shape[1], shape[2]], 1);
            check_finite_differences(&build, &input(2));
            check_cost(&build, &input);
            check_against_autograd(&build, &input(2), &|x, _| global_avg_pool_reference(x));
        }
    }
}
