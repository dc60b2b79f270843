//! Dropout whose mask depends only on (seed, epoch, sample, layer).

use candle_core::{Result, Tensor};

use super::{Cost, Layer, Mode, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::base::random::stream_id;
use crate::kernels::dropout::apply;
use crate::kernels::sample_keys::SampleKeys;

pub struct Dropout {
    pub name: String,
    /// Shape of one sample.
    pub shape: Vec<usize>,
    /// Probability of dropping a value.
    pub p: f64,
}

impl Dropout {
    fn apply(&self, x: &Tensor, pass: &PassContext) -> Result<Tensor> {
        apply(x, self.p, &pass.sample_keys(stream_id(&self.name)))
    }
}

impl Layer for Dropout {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let y = if pass.mode == Mode::Eval { x.copy()? } else { self.apply(x, pass)? };
        Ok((y, SavedTensors::default()))
    }

    fn backward(
        &self,
        _: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        needs_input_grad.then(|| self.apply(&dy, pass)).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let len: usize = self.shape.iter().product();
        let keys = if spec.backend.is_cuda() { SampleKeys::bytes(spec.batch) } else { 0 };
        Cost {
            input_grad: spec.bytes(len),
            output: spec.bytes(len),
            forward_workspace: keys,
            backward_workspace: keys,
            flops: (spec.batch * len) as u64,
            ..Cost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        TestContext, check_cost, check_finite_differences, random_tensor, test_device, to_f64_vec,
    };
    use super::*;
    use candle_core::DType;

    fn layer(p: f64) -> Dropout {
        Dropout { name: "d".into(), shape: vec![5, 7], p }
    }

    #[test]
    fn gradients_are_right() {
        check_finite_differences(&|_| Box::new(layer(0.4)), &random_tensor(&[3, 5, 7], 1));
        check_cost(&|_| Box::new(layer(0.4)), &|batch| random_tensor(&[batch, 5, 7], 1));
    }

    #[test]
    fn mask_of_a_sample_is_independent_of_the_batch() {
        let x = random_tensor(&[4, 5, 7], 1);
        let subject = TestContext::new(Default::default(), DType::F64, 4);
        let all = subject.pass(Mode::Train);
        let last = PassContext { sample_ids: &subject.sample_ids[3..], ..all };
        let whole = layer(0.4).forward(&x, &all).unwrap().0;
        let alone = layer(0.4).forward(&x.narrow(0, 3, 1).unwrap().copy().unwrap(), &last).unwrap().0;
        assert_eq!(to_f64_vec(&whole.narrow(0, 3, 1).unwrap()), to_f64_vec(&alone));
        let next_epoch = layer(0.4).forward(&x, &PassContext { epoch: 9, ..all }).unwrap().0;
        assert_ne!(to_f64_vec(&whole), to_f64_vec(&next_epoch));
    }

    #[test]
    fn dropped_fraction_and_mean_match_p() {
        let x = Tensor::ones((64, 5, 7), DType::F64, &test_device()).unwrap();
        let subject = TestContext::new(Default::default(), DType::F64, 64);
        let y = to_f64_vec(&layer(0.25).forward(&x, &subject.pass(Mode::Train)).unwrap().0);
        let dropped = y.iter().filter(|v| **v == 0.0).count() as f64 / y.len() as f64;
        assert!((dropped - 0.25).abs() < 0.03, "{dropped}");
        assert!((y.iter().sum::<f64>() / y.len() as f64 - 1.0).abs() < 0.04);
    }
}
