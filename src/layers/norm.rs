//! Layer norm and RMS norm over the last dimension.

use candle_core::{Result, Tensor};

use super::{At, Cost, Early, Layer, On, Pass, Remakes, Saved};
use crate::kernels::cpu::acc_bytes;
use crate::kernels::linear::Grads;
use crate::kernels::norm::{Also, Norm as Kernel, card_workspace, chunk_rows};
use crate::params::{Declared, Init, ParamId};

pub struct Norm {
    name: String,
    weight: ParamId,
    /// Layer norm has one, RMS norm has none.
    bias: Option<ParamId>,
    eps: f64,
    /// Shape of a sample.
    shape: Vec<usize>,
    width: usize,
}

impl Norm {
    /// Layer norm of samples of `shape`; `eps` is 1e-5 in PyTorch and GPT-2, 1e-12 in BERT.
    pub fn layer(declared: &mut Declared, name: &str, shape: &[usize], eps: f64) -> Self {
        let mut norm = Self::rms(declared, name, shape, eps);
        norm.bias = Some(declared.param(format!("{name}.bias"), [norm.width], Init::Constant(0.0)));
        norm
    }

    /// RMS norm of samples of `shape`; `eps` is 1e-6 in Llama.
    pub fn rms(declared: &mut Declared, name: &str, shape: &[usize], eps: f64) -> Self {
        let width = shape.last().copied().unwrap_or(1);
        let weight = declared.param(format!("{name}.weight"), [width], Init::Constant(1.0));
        Self { name: name.into(), weight, bias: None, eps, shape: shape.to_vec(), width }
    }

    fn kernel<'a>(&self, pass: &'a Pass) -> Kernel<'a> {
        Kernel {
            weight: pass.weight(self.weight),
            bias: self.bias.map(|id| pass.weight(id)),
            centred: self.bias.is_some(),
            eps: self.eps,
        }
    }

    fn gradients(
        &self,
        saved: &Saved,
        dy: &Tensor,
        pass: &Pass,
        want: bool,
        also: Also,
    ) -> Result<Option<Tensor>> {
        let grads = Grads { weight: pass.grad(self.weight), bias: self.bias.map(|id| pass.grad(id)) };
        let also = Also { sums: pass.along.sums.map(|id| pass.grad(id)), ..also };
        self.kernel(pass).backward(&saved.0[0], &saved.0[1], dy, &grads, want, also)
    }
}

impl Layer for Norm {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let (y, stats) = self.kernel(pass).forward(x)?;
        Ok((y, Saved(vec![x.clone(), stats])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        self.gradients(&saved, &dy, pass, want, Also::default())
    }

    fn backward_onto(&self, saved: Saved, dy: Tensor, pass: &Pass, onto: &Tensor) -> Result<Option<Tensor>> {
        self.gradients(&saved, &dy, pass, true, Also { onto: Some(onto), ..Also::default() })
    }

    fn again(&self, saved: &Saved, pass: &Pass) -> Result<Option<Tensor>> {
        self.kernel(pass).again(&saved.0[0], &saved.0[1])
    }

    fn sums(&self, on: On) -> bool {
        on.is_cuda()
    }

    fn remakes_on_the_way(&self, on: On) -> bool {
        on.is_cuda()
    }

    fn backward_early(
        &self,
        saved: Saved,
        dy: &Tensor,
        pass: &Pass,
        (want, onto): (bool, Option<&Tensor>),
        again: bool,
    ) -> Result<Early> {
        let dx = self.gradients(&saved, dy, pass, want, Also { onto, again, ..Also::default() })?;
        Ok(Early { dx, y: again.then(|| dy.clone()), through: false })
    }

    fn remakes(&self, on: On) -> Remakes {
        if on.is_cuda() { Remakes::WithInput } else { Remakes::Never }
    }

    fn cost(&self, at: At) -> Cost {
        let len: usize = self.shape.iter().product();
        let rows = at.batch * len / self.width;
        let (acc, vectors) = (acc_bytes(at.dtype), 1 + self.bias.is_some() as usize);
        Cost {
            input: at.bytes(len),
            output: at.bytes(len),
            keeps_input: true,
            saved: (rows * vectors * acc) as u64,
            backward: match at.on {
                On::Cpu { .. } => (rows.div_ceil(chunk_rows(self.width)) * vectors * self.width * acc) as u64,
                On::Cuda { .. } => card_workspace(at.dtype, rows, self.width, vectors),
            },
            flops: (8 * at.batch * len) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        self.width * (1 + self.bias.is_some() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, bf16_follows, cost_is_exact, differences_agree, random};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, t in 1usize..50, n in 3usize..40, centred: bool) {
            let build = |d: &mut Declared| -> Box<dyn Layer> {
                match centred {
                    true => Box::new(Norm::layer(d, "n", &[t, n], 1e-5)),
                    false => Box::new(Norm::rms(d, "n", &[t, n], 1e-6)),
                }
            };
            let x = random(&[batch, t, n], 1);
            differences_agree(&build, &x);
            autograd_agrees(&build, &x, &|x, p| Kernel { weight: &p[0], bias: p.get(1), centred, eps: if centred { 1e-5 } else { 1e-6 } }.reference(x));
            cost_is_exact(&build, &|batch| random(&[batch, t, n], 1));
        }
    }

    #[test]
    fn bf16_follows_f64() {
        // On a card: value by value, short rows of half and whole packs, full or not, and every length of middle ones.
        for (t, n) in
            [(5, 33), (7, 64), (40, 384), (11, 520), (3, 768), (5, 1024), (2, 1600), (2, 3200), (2, 2500)]
        {
            let x = random(&[3, t, n], 1);
            bf16_follows(&|d| Box::new(Norm::layer(d, "n", &[t, n], 1e-5)), &x);
            bf16_follows(&|d| Box::new(Norm::rms(d, "n", &[t, n], 1e-6)), &x);
        }
    }
}
