//! Two-dimensional convolution over (height, width, channels) pictures, with bias and activation.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::conv::{Conv as Kernel, workspace};
use crate::kernels::linear::Grads;
use crate::kernels::windows::Geometry;
use crate::kernels::{Activation, Reads};
use crate::params::{Declared, Init, ParamId};

pub struct Conv {
    name: String,
    weight: ParamId,
    bias: Option<ParamId>,
    geometry: Geometry,
    act: Activation,
}

impl Conv {
    /// Begins as `torch.nn.Conv2d` does: uniform within one over the root of a window's values.
    pub fn new(declared: &mut Declared, name: &str, geometry: Geometry, bias: bool, act: Activation) -> Self {
        let fan_in = (geometry.inputs / geometry.groups * geometry.kernel * geometry.kernel) as f64;
        Self::with_init(declared, name, geometry, bias, act, Init::Uniform(1.0 / fan_in.sqrt()))
    }

    pub fn with_init(
        declared: &mut Declared,
        name: &str,
        geometry: Geometry,
        bias: bool,
        act: Activation,
        init: Init,
    ) -> Self {
        let g = geometry;
        let weight = declared.filter(
            format!("{name}.weight"),
            [g.outputs, g.inputs / g.groups, g.kernel, g.kernel],
            init,
        );
        let bias = bias.then(|| declared.param(format!("{name}.bias"), [g.outputs], init));
        Self { name: name.into(), weight, bias, geometry, act }
    }

    fn kernel<'a>(&self, pass: &'a Pass) -> Kernel<'a> {
        let bias = self.bias.map(|id| pass.weight(id));
        Kernel { geometry: self.geometry, weight: pass.weight(self.weight), bias, act: self.act }
    }
}

impl Layer for Conv {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        let (h, w) = self.geometry.output();
        vec![h, w, self.geometry.outputs]
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let (y, pre) = self.kernel(pass).forward(x)?;
        let saved = Saved::around(x, &y, pre, self.act);
        Ok((y, saved))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let grads = Grads { weight: pass.grad(self.weight), bias: self.bias.map(|id| pass.grad(id)) };
        self.kernel(pass).backward(&saved.0[0], saved.0.get(1), dy, &grads, want)
    }

    fn backward_onto(&self, saved: Saved, dy: Tensor, pass: &Pass, onto: &Tensor) -> Result<Option<Tensor>> {
        let grads = Grads { weight: pass.grad(self.weight), bias: self.bias.map(|id| pass.grad(id)) };
        self.kernel(pass).backward_onto(&saved.0[0], saved.0.get(1), dy, &grads, onto).map(Some)
    }

    fn overwrites(&self) -> bool {
        self.act != Activation::Identity
    }

    fn cost(&self, at: At) -> Cost {
        let g = &self.geometry;
        let output = at.bytes(self.output().iter().product());
        let (forward, backward) = workspace(g, self.bias.is_some(), self.act, at);
        let reads = self.act.reads();
        Cost {
            input: at.bytes(g.height * g.width * g.inputs),
            output,
            keeps_input: true,
            keeps_output: reads == Reads::Output,
            saved: if reads == Reads::Input { output } else { 0 },
            forward,
            backward,
            flops: g.flops(at.batch),
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        let g = &self.geometry;
        g.outputs * g.kernel * g.kernel * g.inputs / g.groups + self.bias.map_or(0, |_| g.outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, bf16_follows, cost_is_exact, differences_agree, random};
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> impl Strategy<Value = Geometry> {
        (1usize..4, 1usize..4, 1usize..4, 1usize..3, 0usize..3, 1usize..3, 1usize..3, 0usize..6, 0usize..6)
            .prop_map(|(inputs, outputs, kernel, stride, padding, dilation, groups, dh, dw)| {
                let reach = dilation * (kernel - 1) + 1;
                Geometry {
                    height: reach + dh,
                    width: reach + dw,
                    inputs: inputs * groups,
                    outputs: outputs * groups,
                    kernel,
                    stride,
                    padding,
                    dilation,
                    groups,
                }
            })
    }

    fn depthwise() -> impl Strategy<Value = Geometry> {
        (geometry(), 2usize..70).prop_map(|(g, channels)| Geometry {
            inputs: channels,
            outputs: channels,
            groups: channels,
            ..g
        })
    }

    /// Shapes of the models there are: first layers, windows of one pixel, groups, and channels that see
    /// themselves alone.
    #[test]
    fn bf16_follows_f64() {
        let plain = Geometry {
            height: 9,
            width: 8,
            inputs: 16,
            outputs: 24,
            kernel: 3,
            stride: 1,
            padding: 1,
            dilation: 1,
            groups: 1,
        };
        let depthwise = Geometry { inputs: 40, outputs: 40, groups: 40, ..plain };
        for g in [
            plain,
            Geometry { stride: 2, ..plain },
            Geometry { kernel: 1, padding: 0, ..plain },
            Geometry { kernel: 1, padding: 0, stride: 2, ..plain },
            Geometry { inputs: 3, kernel: 7, stride: 2, padding: 3, height: 20, width: 18, ..plain },
            Geometry { dilation: 2, padding: 2, groups: 2, ..plain },
            depthwise,
            Geometry { stride: 2, ..depthwise },
            Geometry { kernel: 5, padding: 2, ..depthwise },
            Geometry { kernel: 5, padding: 2, stride: 2, ..depthwise },
            Geometry { kernel: 7, padding: 3, ..depthwise },
        ] {
            let x = random(&[3, g.height, g.width, g.inputs], 1);
            for act in [Activation::Identity, Activation::Silu] {
                bf16_follows(&|d| Box::new(Conv::new(d, "c", g, act != Activation::Identity, act)), &x);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn gradients_are_right_where_a_channel_sees_itself_alone(g in depthwise(), batch in 1usize..4, act in prop::sample::select(vec![Activation::Identity, Activation::Silu])) {
            let build = |d: &mut Declared| Box::new(Conv::new(d, "c", g, true, act)) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, g.height, g.width, g.inputs], 1);
            differences_agree(&build, &input(batch));
            autograd_agrees(&build, &input(batch), &|x, p| Kernel { geometry: g, weight: &p[0], bias: p.get(1), act }.reference(x));
        }

        #[test]
        fn gradients_are_right(g in geometry(), batch in 1usize..4, bias: bool, act in prop::sample::select(vec![Activation::Identity, Activation::Relu, Activation::Gelu])) {
            let build = |d: &mut Declared| Box::new(Conv::new(d, "c", g, bias, act)) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, g.height, g.width, g.inputs], 1);
            // A difference across the corner of a clip is no slope: autograd judges that one.
            if act != Activation::Relu {
                differences_agree(&build, &input(batch));
            }
            autograd_agrees(&build, &input(batch), &|x, p| Kernel { geometry: g, weight: &p[0], bias: p.get(1), act }.reference(x));
            cost_is_exact(&build, &input);
        }
    }
}
