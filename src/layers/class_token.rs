//! A picture's patches as a sequence: a learned class token before them, learned positions on all.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::class_token::ClassToken as Kernel;
use crate::params::{Declared, Init, ParamId};

pub struct ClassToken {
    name: String,
    class: ParamId,
    positions: ParamId,
    /// Shape of a sample before it: (rows, columns, width), or (length, width).
    shape: Vec<usize>,
    width: usize,
    /// Positions after it.
    length: usize,
}

impl ClassToken {
    /// `class` and `positions` are the parameters' names; their shapes have leading ones, as torchvision's.
    pub fn new(
        declared: &mut Declared,
        name: &str,
        (class, positions): (&str, &str),
        shape: &[usize],
    ) -> Self {
        let width = shape.last().copied().unwrap_or(1);
        let length = shape.iter().product::<usize>() / width + 1;
        Self {
            name: name.into(),
            class: declared.param(class, [1, 1, width], Init::Constant(0.0)),
            positions: declared.param(positions, [1, length, width], Init::Normal(0.02)),
            shape: shape.to_vec(),
            width,
            length,
        }
    }

    fn kernel<'a>(&self, of: impl Fn(ParamId) -> &'a Tensor) -> Kernel<'a> {
        Kernel { class: of(self.class), positions: of(self.positions) }
    }
}

impl Layer for ClassToken {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.length, self.width]
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        Ok((self.kernel(|id| pass.weight(id)).forward(x)?, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let shape = [&[dy.dim(0)?], self.shape.as_slice()].concat();
        let grads = self.kernel(|id| pass.grad(id));
        self.kernel(|id| pass.weight(id)).backward(&dy, &grads, want.then_some(&shape))
    }

    fn cost(&self, at: At) -> Cost {
        let len = self.length * self.width;
        Cost {
            input: at.bytes(len - self.width),
            output: at.bytes(len),
            flops: (at.batch * len) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        (self.length + 1) * self.width
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
        fn gradients_are_right(batch in 1usize..5, h in 1usize..4, w in 1usize..4, n in 1usize..20) {
            let build = |d: &mut Declared| Box::new(ClassToken::new(d, "c", ("class_token", "positions"), &[h, w, n])) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, h, w, n], 1);
            differences_agree(&build, &input(batch));
            autograd_agrees(&build, &input(batch), &|x, p| Kernel { class: &p[0], positions: &p[1] }.reference(x));
            cost_is_exact(&build, &input);
        }
    }
}
