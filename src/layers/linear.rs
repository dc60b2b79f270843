//! `y = act(x W' + b)` over the last dimension.

use candle_core::{Result, Tensor};

use super::{At, Cost, Early, Layer, On, Pass, Remakes, Saved};
use crate::kernels::linear::{
    Before, Grads, Lies, Linear as Kernel, card_workspace, hopper_fits, hopper_sums, workspace,
};
use crate::kernels::{Activation, Reads, activation};
use crate::params::{Declared, Init, ParamId};

pub struct Linear {
    name: String,
    weight: ParamId,
    bias: Option<ParamId>,
    lies: Lies,
    act: Activation,
    /// Shape of a sample without the last dimension: () for a vector, (T) for a sequence.
    leading: Vec<usize>,
    inputs: usize,
    outputs: usize,
}

/// What a [`Linear`] is made with beside its sizes.
#[derive(Clone, Copy)]
pub struct Options {
    pub bias: bool,
    pub act: Activation,
    pub lies: Lies,
    pub init: Init,
    /// How the bias begins.
    pub bias_init: Init,
}

impl Options {
    /// As `torch.nn.Linear` begins: both uniform within one over the root of the inputs.
    pub fn torch(inputs: usize, act: Activation) -> Self {
        let init = Init::Uniform(1.0 / (inputs as f64).sqrt());
        Self { bias: true, act, lies: Lies::OutIn, init, bias_init: init }
    }
}

impl Linear {
    /// `input` is the shape of a sample, its last dimension is mapped to `outputs`.
    pub fn new(
        declared: &mut Declared,
        name: &str,
        input: &[usize],
        outputs: usize,
        options: Options,
    ) -> Self {
        let names = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        Self::named(declared, name, names, input, outputs, options)
    }

    /// As `new`, with the names of its weight and its bias.
    pub fn named(
        declared: &mut Declared,
        name: &str,
        [weight, bias]: [String; 2],
        input: &[usize],
        outputs: usize,
        options: Options,
    ) -> Self {
        let (inputs, leading) = match input.split_last() {
            Some((last, leading)) => (*last, leading.to_vec()),
            None => (1, Vec::new()),
        };
        let shape = match options.lies {
            Lies::OutIn => [outputs, inputs],
            Lies::InOut => [inputs, outputs],
        };
        let weight = declared.param(weight, shape, options.init);
        let bias = options.bias.then(|| declared.param(bias, [outputs], options.bias_init));
        Self {
            name: name.into(),
            weight,
            bias,
            lies: options.lies,
            act: options.act,
            leading,
            inputs,
            outputs,
        }
    }

    fn kernel<'a>(&self, pass: &'a Pass) -> Kernel<'a> {
        let bias = self.bias.map(|id| pass.weight(id));
        Kernel { weight: pass.weight(self.weight), lies: self.lies, bias, act: self.act }
    }

    fn grads<'a>(&self, pass: &'a Pass) -> Grads<'a> {
        let bias = self.bias.filter(|_| !pass.along.summed);
        Grads { weight: pass.grad(self.weight), bias: bias.map(|id| pass.grad(id)) }
    }

    fn rows(&self) -> usize {
        self.leading.iter().product()
    }
}

impl Layer for Linear {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        [self.leading.as_slice(), &[self.outputs]].concat()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let (y, pre) = self.kernel(pass).forward(x)?;
        let saved = Saved::around(x, &y, pre, self.act);
        Ok((y, saved))
    }

    fn forward_onto(
        &self,
        x: &Tensor,
        onto: &Tensor,
        act: Activation,
        pass: &Pass,
    ) -> Result<(Tensor, Saved)> {
        let (y, pre) = self.kernel(pass).forward_onto(x, onto, act)?;
        let saved = Saved::around(x, &y, pre, self.act);
        Ok((y, saved))
    }

    fn again(&self, saved: &Saved, _: &Pass) -> Result<Option<Tensor>> {
        match (self.act.reads(), saved.0.last()) {
            (Reads::Input, Some(pre)) if !pre.device().is_cpu() => {
                activation::forward(pre, self.act).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn remakes(&self, on: On) -> Remakes {
        match self.act.reads() {
            Reads::Input if on.is_cuda() => Remakes::Alone,
            _ => Remakes::Never,
        }
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        self.kernel(pass).backward(&saved.0[0], saved.0.get(1), dy, &self.grads(pass), want)
    }

    fn remakes_on_the_way(&self, on: On) -> bool {
        self.remakes(on) == Remakes::Alone
    }

    fn met<'a>(&self, saved: &'a Saved, pass: &'a Pass) -> Option<Before<'a>> {
        let v = saved.0.last().filter(|_| self.act.reads() == Reads::Input)?;
        Some(Before { act: self.act, v, bias: self.bias.map(|id| pass.grad(id)) })
    }

    fn waits(&self, on: On) -> bool {
        on.is_cuda()
    }

    fn adds_rows(&self) -> Option<ParamId> {
        self.bias.filter(|_| self.act == Activation::Identity)
    }

    fn backward_early(
        &self,
        saved: Saved,
        dy: &Tensor,
        pass: &Pass,
        (want, onto): (bool, Option<&Tensor>),
        again: bool,
    ) -> Result<Early> {
        let (kernel, grads) = (self.kernel(pass), self.grads(pass));
        // Its input, unless that is waited for, and what the activation reads.
        let reads = (self.act != Activation::Identity) as usize;
        let (x, v) = saved.0.split_at(saved.0.len() - reads);
        let met = v.first().filter(|_| !pass.along.through);
        let (dx, through) =
            kernel.backward_input(met, dy, grads.bias, (want, onto), (again, pass.along.before))?;
        if let [x] = x {
            kernel.backward_weight(x, dy, grads.weight)?;
        }
        Ok(Early { dx, y: v.first().filter(|_| again).cloned(), through })
    }

    fn backward_late(&self, x: &Tensor, dy: &Tensor, pass: &Pass) -> Result<()> {
        self.kernel(pass).backward_weight(x, dy, pass.grad(self.weight))
    }

    fn overwrites(&self) -> bool {
        self.act != Activation::Identity
    }

    fn cost(&self, at: At) -> Cost {
        let (rows, k, n) = (at.batch * self.rows(), self.inputs, self.outputs);
        let output = at.bytes(self.rows() * n);
        let (forward, backward) = match at.on {
            On::Cpu { .. } => workspace(at.dtype, self.lies, rows, k, n),
            On::Cuda { .. } => {
                let bias = self.bias.map_or(0, |_| card_workspace(at.dtype, rows, n));
                let fused = at.on.is_hopper() && hopper_fits(at.dtype, rows, k, n);
                let fused = if fused { hopper_sums(rows, k) as u64 } else { 0 };
                (0, bias.max(fused))
            }
        };
        let reads = self.act.reads();
        Cost {
            input: at.bytes(self.rows() * k),
            output,
            keeps_input: true,
            keeps_output: reads == Reads::Output,
            saved: if reads == Reads::Input { output } else { 0 },
            forward,
            backward,
            flops: 2 * (rows * k * n) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        self.inputs * self.outputs + self.bias.map_or(0, |_| self.outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, bf16_follows, cost_is_exact, differences_agree, random};
    use super::*;
    use proptest::prelude::*;

    fn activation() -> impl Strategy<Value = Activation> {
        use Activation::*;
        prop::sample::select(vec![Identity, Relu, Relu6, Gelu, GeluTanh, Silu, Sigmoid, Tanh])
    }

    fn lies() -> impl Strategy<Value = Lies> {
        prop::sample::select(vec![Lies::OutIn, Lies::InOut])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, t in 1usize..4, k in 1usize..20, n in 1usize..20, act in activation(), lies in lies(), bias: bool) {
            let options = Options { bias, lies, ..Options::torch(k, act) };
            let build = |d: &mut Declared| Box::new(Linear::new(d, "l", &[t, k], n, options)) as Box<dyn Layer>;
            let x = random(&[batch, t, k], 1);
            // A difference across the corner of a clip is no slope: autograd judges those.
            if !matches!(act, Activation::Relu | Activation::Relu6) {
                differences_agree(&build, &x);
            }
            autograd_agrees(&build, &x, &|x, p| Kernel { weight: &p[0], lies, bias: p.get(1), act }.reference(x));
            cost_is_exact(&build, &|batch| random(&[batch, t, k], 1));
        }
    }

    #[test]
    fn bf16_follows_f64() {
        for act in [Activation::Identity, Activation::GeluTanh, Activation::Silu] {
            for lies in [Lies::OutIn, Lies::InOut] {
                let options = Options { lies, ..Options::torch(64, act) };
                let build = |d: &mut Declared| {
                    Box::new(Linear::new(d, "l", &[9, 64], 128, options)) as Box<dyn Layer>
                };
                bf16_follows(&build, &random(&[3, 9, 64], 1));
            }
        }
    }
}
