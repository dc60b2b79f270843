//! Squeeze-and-excitation: scales every channel of an image by a gate computed from its channel means,
//! `y = x sigmoid(fc2(act(fc1(mean(x)))))`.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, Mode, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::linear::{
    LinearKernel as Kernel, TrainedParts, WeightBiasGrads, WeightLayout, bias_gradient_workspace, workspace,
};
use crate::kernels::{Activation, SavedForBackward, avg_pool, scale};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct SqueezeExcite {
    name: String,
    /// (height, width, channels)
    shape: [usize; 3],
    hidden: usize,
    pub act: Activation,
    pub fc1: [ParamId; 2],
    pub fc2: [ParamId; 2],
}

impl SqueezeExcite {
    /// The two layers are named `fc1` and `fc2` and shaped as 1 x 1 convolutions, like torchvision's.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        shape: [usize; 3],
        hidden: usize,
        act: Activation,
    ) -> Self {
        let mut map = |layer: &str, inputs: usize, outputs: usize| {
            let init = ParamInit::Uniform(1.0 / (inputs as f64).sqrt());
            let weight =
                registry.conv_weight(format!("{name}.{layer}.weight"), [outputs, inputs, 1, 1], init);
            [weight, registry.param(format!("{name}.{layer}.bias"), [outputs], init)]
        };
        let (fc1, fc2) = (map("fc1", shape[2], hidden), map("fc2", hidden, shape[2]));
        Self { name: name.into(), shape, hidden, act, fc1, fc2 }
    }

    fn with_linears<R>(
        &self,
        pass: &PassContext,
        body: impl FnOnce(&Kernel, &Kernel) -> Result<R>,
    ) -> Result<R> {
        let (c, s) = (self.shape[2], self.hidden);
        let fc1_weight = pass.weight(self.fc1[0]).reshape((s, c))?;
        let fc2_weight = pass.weight(self.fc2[0]).reshape((c, s))?;
        let (a, b) = (pass.weight(self.fc1[1]), pass.weight(self.fc2[1]));
        body(
            &Kernel { weight: &fc1_weight, weight_layout: WeightLayout::OutIn, bias: Some(a), act: self.act },
            &Kernel {
                weight: &fc2_weight,
                weight_layout: WeightLayout::OutIn,
                bias: Some(b),
                act: Activation::Sigmoid,
            },
        )
    }
}

impl Layer for SqueezeExcite {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.to_vec()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let means = avg_pool::global_avg_pool(x)?;
        let (hidden, pre, gate) = self.with_linears(pass, |fc1, fc2| {
            let (hidden, pre) = fc1.forward(&means)?;
            let gate = fc2.forward(&hidden)?.0;
            Ok((hidden, pre, gate))
        })?;
        let y = scale::forward(x, &gate)?;
        if pass.mode == Mode::Eval {
            return Ok((y, SavedTensors::default()));
        }
        let mut saved = vec![x.clone(), means, hidden, gate];
        saved.extend(pre.filter(|_| self.act.saved_for_backward() == SavedForBackward::Input));
        Ok((y, SavedTensors(saved)))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let [x, means, hidden, gate] = &saved.0[..4] else {
            candle_core::bail!("squeeze-excite `{}` was given what another layer saved", self.name)
        };
        let act_saved = match self.act.saved_for_backward() {
            SavedForBackward::Nothing => None,
            SavedForBackward::Output => Some(hidden),
            SavedForBackward::Input => saved.0.get(4),
        };
        let (c, s) = (self.shape[2], self.hidden);
        let matrix =
            |id: ParamId, shape: (usize, usize)| pass.grad(id).map(|grad| grad.reshape(shape)).transpose();
        let (fc1_grad, fc2_grad) = (matrix(self.fc1[0], (s, c))?, matrix(self.fc2[0], (c, s))?);
        let d_gate = scale::factor_gradient(x, &dy)?;
        let d_means = self.with_linears(pass, |fc1, fc2| {
            let grads = WeightBiasGrads { weight: fc2_grad.as_ref(), bias: pass.grad(self.fc2[1]) };
            let d_hidden = match fc2.backward(Some(hidden), Some(gate), d_gate, &grads, true)? {
                Some(d) => d,
                None => candle_core::bail!("fc2 returned no input gradient"),
            };
            let grads = WeightBiasGrads { weight: fc1_grad.as_ref(), bias: pass.grad(self.fc1[1]) };
            fc1.backward(Some(means), act_saved, d_hidden, &grads, needs_input_grad)
        })?;
        d_means.map(|m| scale::backward_with_mean_gradient(&dy, gate, &m)).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let ([h, w, c], s) = (self.shape, self.hidden);
        let pre = if self.act.saved_for_backward() == SavedForBackward::Input { s } else { 0 };
        let (forward, backward) = match spec.backend {
            Backend::Cpu { threads } => {
                let sums = (threads * c * spec.dtype.size_in_bytes().max(4)) as u64;
                let linear = |sizes, [weight, bias]: [ParamId; 2]| {
                    let trained = TrainedParts { weight: weight.trained, bias: bias.trained };
                    workspace(spec.dtype, WeightLayout::OutIn, spec.batch, sizes, trained)
                };
                let (fc1, fc2) = (linear((c, s), self.fc1), linear((s, c), self.fc2));
                (sums.max(fc1.0).max(fc2.0), sums.max(fc1.1).max(fc2.1))
            }
            Backend::Reference { .. } => (0, 0),
            // Reduction of the bias gradients.
            Backend::Cuda { .. } => (
                0,
                bias_gradient_workspace(spec.dtype, spec.batch, c)
                    .max(bias_gradient_workspace(spec.dtype, spec.batch, s)),
            ),
        };
        Cost {
            input_grad: spec.bytes(h * w * c),
            output: spec.bytes(h * w * c),
            saves_input: true,
            saved: spec.bytes(2 * c + s + pre),
            forward_workspace: forward,
            backward_workspace: backward + spec.bytes(2 * c + s),
            flops: (spec.batch * (2 * h * w * c + 4 * s * c)) as u64,
            trains: self.fc1.iter().chain(&self.fc2).any(|id| id.trained),
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        [self.fc1, self.fc2].concat()
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
        fn gradients_are_right(
            h in 1usize..5,
            w in 1usize..5,
            c in 2usize..9,
            s in 3usize..6,
            act in prop::sample::select(vec![Activation::Relu, Activation::Silu]),
        ) {
            let build = |d: &mut ParamRegistry| {
                Box::new(SqueezeExcite::new(d, "se", [h, w, c], s, act)) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[batch, h, w, c], 1);
            // Finite differences are invalid across the kink of ReLU; autograd checks that one.
            if act != Activation::Relu {
                check_finite_differences(&build, &input(3));
            }
            check_cost(&build, &input);
            check_against_autograd(&build, &input(3), &|x, p| {
                let map = |x: &Tensor, i: usize, act| {
                    let weight = p[i].flatten_from(1)?;
                    let (weight_layout, bias) = (WeightLayout::OutIn, Some(&p[i + 1]));
                    Kernel { weight: &weight, weight_layout, bias, act }.reference(x)
                };
                let gate = map(&map(&avg_pool::global_avg_pool_reference(x)?, 0, act)?, 2, Activation::Sigmoid)?;
                scale::reference(x, &gate)
            });
        }
    }
}
