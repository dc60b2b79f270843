//! Squeeze and excite: every channel of a picture scaled by a gate that is computed from the picture's
//! means, `y = x sigmoid(fc2(act(fc1(mean(x)))))`.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Mode, On, Pass, Saved};
use crate::kernels::linear::{Grads, Lies, Linear as Kernel, card_workspace, workspace};
use crate::kernels::{Activation, Reads, average, scale};
use crate::params::{Declared, Init, ParamId};

pub struct SqueezeExcite {
    name: String,
    /// (height, width, channels)
    shape: [usize; 3],
    hidden: usize,
    act: Activation,
    down: [ParamId; 2],
    up: [ParamId; 2],
}

impl SqueezeExcite {
    /// The two maps are named `fc1` and `fc2` and shaped as windows of one pixel, as torchvision has them.
    pub fn new(
        declared: &mut Declared,
        name: &str,
        shape: [usize; 3],
        hidden: usize,
        act: Activation,
    ) -> Self {
        let mut map = |layer: &str, inputs: usize, outputs: usize| {
            let init = Init::Uniform(1.0 / (inputs as f64).sqrt());
            let weight = declared.filter(format!("{name}.{layer}.weight"), [outputs, inputs, 1, 1], init);
            [weight, declared.param(format!("{name}.{layer}.bias"), [outputs], init)]
        };
        let (down, up) = (map("fc1", shape[2], hidden), map("fc2", hidden, shape[2]));
        Self { name: name.into(), shape, hidden, act, down, up }
    }

    fn maps<R>(&self, pass: &Pass, body: impl FnOnce(&Kernel, &Kernel) -> Result<R>) -> Result<R> {
        let (c, s) = (self.shape[2], self.hidden);
        let down = pass.weight(self.down[0]).reshape((s, c))?;
        let up = pass.weight(self.up[0]).reshape((c, s))?;
        let (a, b) = (pass.weight(self.down[1]), pass.weight(self.up[1]));
        body(
            &Kernel { weight: &down, lies: Lies::OutIn, bias: Some(a), act: self.act },
            &Kernel { weight: &up, lies: Lies::OutIn, bias: Some(b), act: Activation::Sigmoid },
        )
    }
}

impl Layer for SqueezeExcite {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.to_vec()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let means = average::whole(x)?;
        let (hidden, pre, gate) = self.maps(pass, |down, up| {
            let (hidden, pre) = down.forward(&means)?;
            let gate = up.forward(&hidden)?.0;
            Ok((hidden, pre, gate))
        })?;
        let y = scale::forward(x, &gate)?;
        if pass.mode == Mode::Eval {
            return Ok((y, Saved::default()));
        }
        let mut saved = vec![x.clone(), means, hidden, gate];
        saved.extend(pre.filter(|_| self.act.reads() == Reads::Input));
        Ok((y, Saved(saved)))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let [x, means, hidden, gate] = &saved.0[..4] else {
            candle_core::bail!("squeeze-excite `{}` was given what another layer saved", self.name)
        };
        let before = match self.act.reads() {
            Reads::Nothing => None,
            Reads::Output => Some(hidden),
            Reads::Input => saved.0.get(4),
        };
        let (c, s) = (self.shape[2], self.hidden);
        let (down_grad, up_grad) =
            (pass.grad(self.down[0]).reshape((s, c))?, pass.grad(self.up[0]).reshape((c, s))?);
        let of_gate = scale::of_factors(x, &dy)?;
        let of_means = self.maps(pass, |down, up| {
            let grads = Grads { weight: &up_grad, bias: Some(pass.grad(self.up[1])) };
            let of_hidden = match up.backward(hidden, Some(gate), of_gate, &grads, true)? {
                Some(d) => d,
                None => candle_core::bail!("a wanted gradient was not made"),
            };
            let grads = Grads { weight: &down_grad, bias: Some(pass.grad(self.down[1])) };
            down.backward(means, before, of_hidden, &grads, want)
        })?;
        of_means.map(|m| scale::backward_with_means(&dy, gate, &m)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let ([h, w, c], s) = (self.shape, self.hidden);
        let pre = if self.act.reads() == Reads::Input { s } else { 0 };
        let (forward, backward) = match at.on {
            On::Cpu { threads } => {
                let sums = (threads * c * at.dtype.size_in_bytes().max(4)) as u64;
                let down = workspace(at.dtype, Lies::OutIn, at.batch, c, s);
                let up = workspace(at.dtype, Lies::OutIn, at.batch, s, c);
                (sums.max(down.0).max(up.0), sums.max(down.1).max(up.1))
            }
            // The sums of the biases' gradients.
            On::Cuda { .. } => {
                (0, card_workspace(at.dtype, at.batch, c).max(card_workspace(at.dtype, at.batch, s)))
            }
        };
        Cost {
            input: at.bytes(h * w * c),
            output: at.bytes(h * w * c),
            keeps_input: true,
            saved: at.bytes(2 * c + s + pre),
            forward,
            backward: backward + at.bytes(2 * c + s),
            flops: (at.batch * (2 * h * w * c + 4 * s * c)) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        2 * self.shape[2] * self.hidden + self.shape[2] + self.hidden
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, cost_is_exact, differences_agree, random};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(h in 1usize..5, w in 1usize..5, c in 2usize..9, s in 3usize..6, act in prop::sample::select(vec![Activation::Relu, Activation::Silu])) {
            let build = |d: &mut Declared| Box::new(SqueezeExcite::new(d, "se", [h, w, c], s, act)) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, h, w, c], 1);
            // A difference across the corner of a clip is no slope: autograd judges that one.
            if act != Activation::Relu {
                differences_agree(&build, &input(3));
            }
            cost_is_exact(&build, &input);
            autograd_agrees(&build, &input(3), &|x, p| {
                let map = |x: &Tensor, i: usize, act| {
                    let weight = p[i].flatten_from(1)?;
                    Kernel { weight: &weight, lies: Lies::OutIn, bias: Some(&p[i + 1]), act }.reference(x)
                };
                let gate = map(&map(&average::reference_whole(x)?, 0, act)?, 2, Activation::Sigmoid)?;
                scale::reference(x, &gate)
            });
        }
    }
}
