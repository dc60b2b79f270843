//! Group normalization of images, per sample over groups of channels, with a fused clamp activation.

use candle_core::{DType, Result, Tensor};

use super::{Cost, Layer, Mode, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::ClampActivation;
use crate::kernels::channels::ChannelLayout;
use crate::kernels::group_norm::{GroupNormKernel as Kernel, workspace};
use crate::params::{ParamId, ParamInit, ParamRegistry};

/// PyTorch's default.
pub const EPS: f64 = 1e-5;

pub struct GroupNorm {
    name: String,
    pub weight: ParamId,
    pub bias: ParamId,
    /// (height, width, channels), or (channels).
    pub shape: Vec<usize>,
    pub groups: usize,
    pub act: ClampActivation,
}

impl GroupNorm {
    /// `shape` is the shape of one sample; its last dimension, the channels, is a multiple of `groups`.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        shape: &[usize],
        groups: usize,
        act: ClampActivation,
    ) -> Self {
        let channels = shape.last().copied().unwrap_or(1);
        Self {
            name: name.into(),
            weight: registry.param(format!("{name}.weight"), [channels], ParamInit::Constant(1.0)),
            bias: registry.param(format!("{name}.bias"), [channels], ParamInit::Constant(0.0)),
            shape: shape.to_vec(),
            groups,
            act,
        }
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        let (weight, bias) = (pass.weight(self.weight), pass.weight(self.bias));
        Kernel { weight, bias, act: self.act, eps: EPS, groups: self.groups }
    }

    fn channels(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl Layer for GroupNorm {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let (y, saved_stats) = self.kernel(pass).forward(x)?;
        let saved = if pass.mode == Mode::Eval { Vec::new() } else { vec![x.clone(), saved_stats] };
        Ok((y, SavedTensors(saved)))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let grads = pass.weight_bias_grads(self.weight, Some(self.bias));
        self.kernel(pass).backward(&saved.0[0], &saved.0[1], &dy, &grads, needs_input_grad)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let (len, channels) = (self.shape.iter().product::<usize>(), self.channels());
        let pixels = len / channels;
        let (forward, backward) = workspace(
            spec,
            &ChannelLayout { channels, rows: spec.batch * pixels, rows_per_unit: pixels },
            self.groups,
        );
        let acc = if spec.dtype == DType::F64 { 8 } else { 4 };
        Cost {
            input_grad: spec.bytes(len),
            output: spec.bytes(len),
            saves_input: true,
            saved: (spec.batch * 2 * self.groups * acc) as u64,
            forward_workspace: forward,
            backward_workspace: backward,
            flops: (8 * spec.batch * len) as u64,
            trains: self.weight.trained || self.bias.trained,
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        vec![self.weight, self.bias]
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_bf16, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bf16_follows_f64() {
        for (groups, c) in [(8, 64), (4, 20), (1, 3)] {
            let x = random_tensor(&[5, 9, 7, c], 1);
            check_bf16(
                &|d| Box::new(GroupNorm::new(d, "n", &[9, 7, c], groups, ClampActivation::Identity)),
                &x,
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            batch in 1usize..4,
            groups in 1usize..4,
            size in 1usize..8,
            h in 2usize..5,
            w in 3usize..6,
            act in prop::sample::select(vec![ClampActivation::Identity, ClampActivation::Relu, ClampActivation::Relu6]),
        ) {
            let shape = [h, w, groups * size];
            let build = |d: &mut ParamRegistry| Box::new(GroupNorm::new(d, "n", &shape, groups, act)) as Box<dyn Layer>;
            let input = |batch: usize| random_tensor(&[batch, h, w, groups * size], 1);
            // Finite differences are invalid across the kink of a clamp; autograd checks those.
            if act == ClampActivation::Identity {
                check_finite_differences(&build, &input(batch));
            }
            check_against_autograd(&build, &input(batch), &|x, p| {
                Kernel { weight: &p[0], bias: &p[1], act, eps: EPS, groups }.reference(x)
            });
            check_cost(&build, &input);
        }
    }
}
