//! An activation by itself, where no layer before it takes it in.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::{Activation as Act, Reads, activation};

pub struct Activation {
    pub name: String,
    /// Shape of a sample.
    pub shape: Vec<usize>,
    pub act: Act,
}

impl Layer for Activation {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        if self.act == Act::Identity {
            return Ok((x.clone(), Saved::default()));
        }
        let y = activation::forward(x, self.act)?;
        let kept = if self.act.reads() == Reads::Output { y.clone() } else { x.clone() };
        Ok((y, Saved(vec![kept])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, _: &Pass, want: bool) -> Result<Option<Tensor>> {
        match saved.0.first() {
            Some(v) => want.then(|| activation::backward(v, &dy, self.act)).transpose(),
            None => Ok(Some(dy)),
        }
    }

    fn cost(&self, at: At) -> Cost {
        if self.act == Act::Identity {
            return Cost { view: true, ..Cost::default() };
        }
        let len: usize = self.shape.iter().product();
        Cost {
            input: at.bytes(len),
            output: at.bytes(len),
            keeps_input: self.act.reads() == Reads::Input,
            keeps_output: self.act.reads() == Reads::Output,
            flops: (at.batch * len) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, cost_is_exact, differences_agree, random};
    use super::*;

    #[test]
    fn gradients_are_right() {
        use Act::*;
        for act in [Relu, Relu6, Gelu, GeluTanh, Silu, Sigmoid, Tanh, Identity] {
            let build = |_: &mut crate::params::Declared| {
                Box::new(Activation { name: "a".into(), shape: vec![5, 7], act }) as Box<dyn Layer>
            };
            let input = |batch: usize| random(&[batch, 5, 7], 1);
            differences_agree(&build, &input(3));
            cost_is_exact(&build, &input);
            autograd_agrees(&build, &input(3), &|x, _| {
                activation::reference::forward(&x.affine(1.0, 0.0)?, act)
            });
        }
    }
}
