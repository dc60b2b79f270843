//! Two-dimensional convolution over (height, width, channels) images, with fused bias and activation.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::conv::{ConvKernel as Kernel, workspace};
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::{Activation, SavedForBackward};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct Conv2d {
    name: String,
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    pub geometry: ConvGeometry,
    pub act: Activation,
}

impl Conv2d {
    /// Initialized like `torch.nn.Conv2d`: uniform in ±1/sqrt(fan_in).
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        geometry: ConvGeometry,
        bias: bool,
        act: Activation,
    ) -> Self {
        let fan_in = (geometry.in_channels / geometry.groups * geometry.kernel * geometry.kernel) as f64;
        Self::with_init(registry, name, geometry, bias, act, ParamInit::Uniform(1.0 / fan_in.sqrt()))
    }

    pub fn with_init(
        registry: &mut ParamRegistry,
        name: &str,
        geometry: ConvGeometry,
        bias: bool,
        act: Activation,
        init: ParamInit,
    ) -> Self {
        let g = geometry;
        let weight = registry.conv_weight(
            format!("{name}.weight"),
            [g.out_channels, g.in_channels / g.groups, g.kernel, g.kernel],
            init,
        );
        let bias = bias.then(|| registry.param(format!("{name}.bias"), [g.out_channels], init));
        Self { name: name.into(), weight, bias, geometry, act }
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        let bias = self.bias.map(|id| pass.weight(id));
        Kernel { geometry: self.geometry, weight: pass.weight(self.weight), bias, act: self.act }
    }

    /// Like `backward`, and adds `residual_grad`, the gradient that reaches the input along another branch.
    pub fn backward_accumulate(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        residual_grad: &Tensor,
    ) -> Result<Tensor> {
        let (grads, (x, v)) = (pass.weight_bias_grads(self.weight, self.bias), self.split_saved(&saved));
        self.kernel(pass).backward_accumulate(x, v, dy, &grads, residual_grad)
    }

    /// The input, saved for the weight gradient, and what the activation's backward pass reads.
    fn split_saved<'a>(&self, saved: &'a SavedTensors) -> (Option<&'a Tensor>, Option<&'a Tensor>) {
        let reads = (self.act.saved_for_backward() != SavedForBackward::Nothing) as usize;
        let (x, v) = saved.0.split_at(saved.0.len().saturating_sub(reads));
        (x.first(), v.first())
    }
}

impl Layer for Conv2d {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        let (h, w) = self.geometry.output();
        vec![h, w, self.geometry.out_channels]
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let (y, pre) = self.kernel(pass).forward(x)?;
        let saved = SavedTensors::with_activation(Some(x).filter(|_| self.weight.trained), &y, pre, self.act);
        Ok((y, saved))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let (grads, (x, v)) = (pass.weight_bias_grads(self.weight, self.bias), self.split_saved(&saved));
        self.kernel(pass).backward(x, v, dy, &grads, needs_input_grad)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let g = &self.geometry;
        let output = spec.bytes(self.output_shape().iter().product());
        let bias_trained = self.bias.is_some_and(|bias| bias.trained);
        let workspace = workspace(g, (self.weight.trained, bias_trained), self.act, spec);
        let reads = self.act.saved_for_backward();
        Cost {
            input_grad: spec.bytes(g.height * g.width * g.in_channels),
            output,
            saves_input: self.weight.trained,
            saves_output: reads == SavedForBackward::Output,
            overwrites_dy: self.act != Activation::Identity,
            saved: if reads == SavedForBackward::Input { output } else { 0 },
            forward_workspace: workspace.forward,
            backward_workspace: workspace.backward,
            input_grad_workspace: workspace.input_grad,
            flops: g.flops(spec.batch),
            trains: self.weight.trained || bias_trained,
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_bf16, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> impl Strategy<Value = ConvGeometry> {
        (1usize..4, 1usize..4, 1usize..4, 1usize..3, 0usize..3, 1usize..3, 1usize..3, 0usize..6, 0usize..6)
            .prop_map(|(inputs, outputs, kernel, stride, padding, dilation, groups, dh, dw)| {
                let reach = dilation * (kernel - 1) + 1;
                ConvGeometry {
                    height: reach + dh,
                    width: reach + dw,
                    in_channels: inputs * groups,
                    out_channels: outputs * groups,
                    kernel,
                    stride,
                    padding,
                    dilation,
                    groups,
                }
            })
    }

    fn depthwise() -> impl Strategy<Value = ConvGeometry> {
        (geometry(), 2usize..70).prop_map(|(g, channels)| ConvGeometry {
            in_channels: channels,
            out_channels: channels,
            groups: channels,
            ..g
        })
    }

    /// The shapes that the models use: first layers, 1 x 1 kernels, grouped and depthwise convolutions.
    #[test]
    fn bf16_follows_f64() {
        let plain = ConvGeometry {
            height: 9,
            width: 8,
            in_channels: 16,
            out_channels: 24,
            kernel: 3,
            stride: 1,
            padding: 1,
            dilation: 1,
            groups: 1,
        };
        let depthwise = ConvGeometry { in_channels: 40, out_channels: 40, groups: 40, ..plain };
        for g in [
            plain,
            ConvGeometry { stride: 2, ..plain },
            ConvGeometry { kernel: 1, padding: 0, ..plain },
            ConvGeometry { kernel: 1, padding: 0, stride: 2, ..plain },
            ConvGeometry { in_channels: 3, kernel: 7, stride: 2, padding: 3, height: 20, width: 18, ..plain },
            ConvGeometry { dilation: 2, padding: 2, groups: 2, ..plain },
            depthwise,
            ConvGeometry { stride: 2, ..depthwise },
            ConvGeometry { kernel: 5, padding: 2, ..depthwise },
            ConvGeometry { kernel: 5, padding: 2, stride: 2, ..depthwise },
            ConvGeometry { kernel: 7, padding: 3, ..depthwise },
        ] {
            let x = random_tensor(&[3, g.height, g.width, g.in_channels], 1);
            for act in [Activation::Identity, Activation::Silu] {
                check_bf16(&|d| Box::new(Conv2d::new(d, "c", g, act != Activation::Identity, act)), &x);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn depthwise_gradients_are_right(
            g in depthwise(),
            batch in 1usize..4,
            act in prop::sample::select(vec![Activation::Identity, Activation::Silu]),
        ) {
            let build = |d: &mut ParamRegistry| Box::new(Conv2d::new(d, "c", g, true, act)) as Box<dyn Layer>;
            let input = |batch: usize| random_tensor(&[batch, g.height, g.width, g.in_channels], 1);
            check_finite_differences(&build, &input(batch));
            check_against_autograd(&build, &input(batch), &|x, p| {
                Kernel { geometry: g, weight: &p[0], bias: p.get(1), act }.reference(x)
            });
        }

        #[test]
        fn gradients_are_right(
            g in geometry(),
            batch in 1usize..4,
            bias: bool,
            act in prop::sample::select(vec![Activation::Identity, Activation::Relu, Activation::Gelu]),
        ) {
            let build = |d: &mut ParamRegistry| Box::new(Conv2d::new(d, "c", g, bias, act)) as Box<dyn Layer>;
            let input = |batch: usize| random_tensor(&[batch, g.height, g.width, g.in_channels], 1);
            // Finite differences are invalid across the kink of ReLU; autograd checks that one.
            if act != Activation::Relu {
                check_finite_differences(&build, &input(batch));
            }
            check_against_autograd(&build, &input(batch), &|x, p| {
                Kernel { geometry: g, weight: &p[0], bias: p.get(1), act }.reference(x)
            });
            check_cost(&build, &input);
        }
    }
}
