//! Rounds activations to 8-bit integers in training, by a range that follows the values that it sees.
//!
//! All micro-batches of an update are rounded by the same range, and the minimum and maximum over all its samples move
//! it afterwards, so the split of an update makes no difference. The range is a running statistic, so checkpoints and
//! rollbacks include it; evaluation rounds by it and does not move it.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, Mode, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::fake_quantize::{RANGE_LEN, backward, forward};
use crate::params::{ParamRegistry, StatId, activation_range_name};

pub struct FakeQuantize {
    name: String,
    /// Shape of one sample.
    shape: Vec<usize>,
    range: StatId,
}

impl FakeQuantize {
    pub fn new(registry: &mut ParamRegistry, name: &str, shape: &[usize]) -> Self {
        let range = registry.running_stat(activation_range_name(name), RANGE_LEN, 0.0);
        Self { name: format!("{name}.fake_quantize"), shape: shape.to_vec(), range }
    }
}

impl Layer for FakeQuantize {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let y = forward(x, pass.stat(self.range), pass.mode == Mode::Train)?;
        Ok((y, SavedTensors(vec![x.clone()])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        needs_input_grad.then(|| backward(&saved.0[0], &dy, pass.stat(self.range))).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let len: usize = self.shape.iter().product();
        Cost {
            input_grad: spec.bytes(len),
            output: spec.bytes(len),
            saves_input: true,
            flops: (4 * spec.batch * len) as u64,
            ..Cost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::super::gradcheck::{
        TestContext, check_against_autograd, check_cost, random_tensor, test_device, to_f64_vec,
    };
    use super::*;
    use crate::kernels::fake_quantize::{move_range, reference};
    use crate::kernels::update::cast_into;

    fn build(registry: &mut ParamRegistry) -> Box<dyn Layer> {
        Box::new(FakeQuantize::new(registry, "a", &[6, 7]))
    }

    #[test]
    fn memory_is_as_stated() {
        check_cost(&build, &|batch| random_tensor(&[batch, 6, 7], 1));
        check_against_autograd(&build, &random_tensor(&[3, 6, 7], 1), &|x, _| {
            reference(x, &Tensor::zeros(RANGE_LEN, DType::F32, &candle_core::Device::Cpu)?)
        });
    }

    /// The range moves in training only, and by the extremes of all micro-batches of an update.
    #[test]
    fn an_update_is_observed_as_a_whole() {
        let mut registry = ParamRegistry::default();
        let layer = build(&mut registry);
        let subject = TestContext::new(registry, DType::F32, 4);
        let x = random_tensor(&[4, 6, 7], 1).to_dtype(DType::F32).unwrap();
        let range = &subject.store.stat_views()[0];
        for mode in [Mode::Recompute, Mode::Eval] {
            layer.forward(&x, &subject.pass(mode)).unwrap();
            assert_eq!(to_f64_vec(range), [0.0; 4], "{mode:?}");
        }
        layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
        let whole = to_f64_vec(range);
        cast_into(&Tensor::zeros(4, DType::F32, &test_device()).unwrap(), range).unwrap();
        for first in [0, 3, 1] {
            let part = x.narrow(0, first, if first == 1 { 2 } else { 1 }).unwrap().contiguous().unwrap();
            layer.forward(&part, &subject.pass(Mode::Train)).unwrap();
        }
        assert_eq!(to_f64_vec(range), whole);
        move_range(range, Some(1.0)).unwrap();
        let (trained, _) = layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
        let (evaluated, _) = layer.forward(&x, &subject.pass(Mode::Eval)).unwrap();
        assert_eq!(to_f64_vec(&trained), to_f64_vec(&evaluated));
        assert_ne!(to_f64_vec(&trained), to_f64_vec(&x));
    }
}
