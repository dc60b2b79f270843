//! SwiGLU: a gate through SiLU times what it lets through, both halves of one packed projection.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::swiglu::{backward, forward};

pub struct Swiglu {
    pub name: String,
    /// Shape of a sample's output; the input's last dimension is twice its last.
    pub shape: Vec<usize>,
}

impl Layer for Swiglu {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        Ok((forward(x)?, Saved(vec![x.clone()])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, _: &Pass, want: bool) -> Result<Option<Tensor>> {
        want.then(|| backward(&saved.0[0], &dy)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let len: usize = self.shape.iter().product();
        Cost {
            input: at.bytes(2 * len),
            output: at.bytes(len),
            keeps_input: true,
            flops: (6 * at.batch * len) as u64,
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
    use crate::kernels::swiglu::reference;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, t in 1usize..6, n in 1usize..40) {
            let build = |_: &mut crate::params::Declared| Box::new(Swiglu { name: "s".into(), shape: vec![t, n] }) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, t, 2 * n], 1);
            differences_agree(&build, &input(batch));
            autograd_agrees(&build, &input(batch), &|x, _| reference(x));
            cost_is_exact(&build, &input);
        }
    }
}
