//! Group normalisation of pictures: each sample by itself, over groups of channels, with a clip fused.

use candle_core::{DType, Result, Tensor};

use super::{At, Cost, Layer, Mode, Pass, Saved};
use crate::kernels::Clip;
use crate::kernels::channels::Cut;
use crate::kernels::group_norm::{GroupNorm as Kernel, workspace};
use crate::kernels::linear::Grads;
use crate::params::{Declared, Init, ParamId};

/// As PyTorch has it.
const EPS: f64 = 1e-5;

pub struct GroupNorm {
    name: String,
    weight: ParamId,
    bias: ParamId,
    /// (height, width, channels), or (channels).
    shape: Vec<usize>,
    groups: usize,
    act: Clip,
}

impl GroupNorm {
    /// `shape` is a sample's, its last dimension the channels, a multiple of `groups`.
    pub fn new(declared: &mut Declared, name: &str, shape: &[usize], groups: usize, act: Clip) -> Self {
        let channels = shape.last().copied().unwrap_or(1);
        Self {
            name: name.into(),
            weight: declared.param(format!("{name}.weight"), [channels], Init::Constant(1.0)),
            bias: declared.param(format!("{name}.bias"), [channels], Init::Constant(0.0)),
            shape: shape.to_vec(),
            groups,
            act,
        }
    }

    fn kernel<'a>(&self, pass: &'a Pass) -> Kernel<'a> {
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

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let (y, kept) = self.kernel(pass).forward(x)?;
        let saved = if pass.mode == Mode::Eval { Vec::new() } else { vec![x.clone(), kept] };
        Ok((y, Saved(saved)))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let grads = Grads { weight: pass.grad(self.weight), bias: Some(pass.grad(self.bias)) };
        self.kernel(pass).backward(&saved.0[0], &saved.0[1], &dy, &grads, want)
    }

    fn cost(&self, at: At) -> Cost {
        let (len, channels) = (self.shape.iter().product::<usize>(), self.channels());
        let pixels = len / channels;
        let (forward, backward) =
            workspace(at, &Cut { channels, rows: at.batch * pixels, unit: pixels }, self.groups);
        let acc = if at.dtype == DType::F64 { 8 } else { 4 };
        Cost {
            input: at.bytes(len),
            output: at.bytes(len),
            keeps_input: true,
            saved: (at.batch * 2 * self.groups * acc) as u64,
            forward,
            backward,
            flops: (8 * at.batch * len) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        2 * self.channels()
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, bf16_follows, cost_is_exact, differences_agree, random};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bf16_follows_f64() {
        for (groups, c) in [(8, 64), (4, 20), (1, 3)] {
            let x = random(&[5, 9, 7, c], 1);
            bf16_follows(&|d| Box::new(GroupNorm::new(d, "n", &[9, 7, c], groups, Clip::Nothing)), &x);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..4, groups in 1usize..4, size in 1usize..8, h in 2usize..5, w in 3usize..6, act in prop::sample::select(vec![Clip::Nothing, Clip::Relu, Clip::Relu6])) {
            let shape = [h, w, groups * size];
            let build = |d: &mut Declared| Box::new(GroupNorm::new(d, "n", &shape, groups, act)) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, h, w, groups * size], 1);
            // A difference across the corner of a clip is no slope: autograd judges those.
            if act == Clip::Nothing {
                differences_agree(&build, &input(batch));
            }
            autograd_agrees(&build, &input(batch), &|x, p| Kernel { weight: &p[0], bias: &p[1], act, eps: EPS, groups }.reference(x));
            cost_is_exact(&build, &input);
        }
    }
}
