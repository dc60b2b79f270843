//! Tokens as vectors, with learned positions where the model has them. Always the first layer: there is
//! no gradient of its input.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, On, Pass, Saved};
use crate::kernels::embedding::{Embedding as Kernel, Grads, card_workspace, workspace};
use crate::params::{Declared, Init, ParamId};

pub struct Embedding {
    name: String,
    tokens: ParamId,
    positions: Option<ParamId>,
    kinds: Option<ParamId>,
    /// Tokens of a sample.
    length: usize,
    vocab: usize,
    width: usize,
    parameters: usize,
}

impl Embedding {
    /// A table of `vocab` rows called `weight`, for samples of `length` tokens.
    pub fn new(
        declared: &mut Declared,
        name: &str,
        weight: &str,
        (vocab, length, width): (usize, usize, usize),
        init: Init,
    ) -> Self {
        let tokens = declared.param(weight, [vocab, width], init);
        let parameters = vocab * width;
        Self { name: name.into(), tokens, positions: None, kinds: None, length, vocab, width, parameters }
    }

    /// Adds a learned row for each of `context` positions, which are at least as many as the tokens.
    pub fn positions(mut self, declared: &mut Declared, weight: &str, context: usize, init: Init) -> Self {
        self.positions = Some(declared.param(weight, [context, self.width], init));
        self.parameters += context * self.width;
        self
    }

    /// Adds the first of `kinds` rows to every token.
    pub fn kinds(mut self, declared: &mut Declared, weight: &str, kinds: usize, init: Init) -> Self {
        self.kinds = Some(declared.param(weight, [kinds, self.width], init));
        self.parameters += kinds * self.width;
        self
    }

    /// The token table, for a head that shares it.
    pub fn weight(&self) -> ParamId {
        self.tokens
    }

    fn kernel<'a>(&self, pass: &'a Pass) -> Kernel<'a> {
        let weight = |id: Option<ParamId>| id.map(|id| pass.weight(id));
        Kernel {
            tokens: pass.weight(self.tokens),
            positions: weight(self.positions),
            kinds: weight(self.kinds),
        }
    }
}

impl Layer for Embedding {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.length, self.width]
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        Ok((self.kernel(pass).forward(x)?, Saved(vec![x.clone()])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, _: bool) -> Result<Option<Tensor>> {
        let grad = |id: Option<ParamId>| id.map(|id| pass.grad(id));
        let grads = Grads {
            tokens: pass.grad(self.tokens),
            positions: grad(self.positions),
            kinds: grad(self.kinds),
        };
        self.kernel(pass).backward(&saved.0[0], &dy, &grads)?;
        Ok(None)
    }

    fn cost(&self, at: At) -> Cost {
        let (rows, kinds) = (at.batch * self.length, self.kinds.is_some());
        Cost {
            output: at.bytes(self.length * self.width),
            keeps_input: true,
            backward: match at.on {
                On::Cpu { .. } => workspace(at.dtype, rows, self.width, kinds),
                On::Cuda { .. } => card_workspace(at.dtype, rows, self.vocab, self.width, kinds),
            },
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        self.parameters
    }
}

#[cfg(test)]
mod tests {
    use super::super::Mode;
    use super::super::check::{Subject, autograd_agrees, cost_is_exact, device, differences_agree, flat};
    use super::*;
    use candle_core::DType;
    use proptest::prelude::*;

    const INIT: Init = Init::Normal(1.0);

    fn ids(batch: usize, length: usize, vocab: usize) -> Tensor {
        let of = |i: usize| (i * i * 7 % 13 % vocab) as u32;
        let ids = (0..batch * length).map(of).collect::<Vec<u32>>();
        Tensor::from_vec(ids, (batch, length), &device()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, length in 1usize..9, vocab in 1usize..150, width in 1usize..20, positions: bool, kinds: bool) {
            let build = |d: &mut Declared| {
                let mut layer = Embedding::new(d, "e", "e.weight", (vocab, length, width), INIT);
                if positions {
                    layer = layer.positions(d, "p.weight", length + 2, INIT);
                }
                if kinds {
                    layer = layer.kinds(d, "k.weight", 2, INIT);
                }
                Box::new(layer) as Box<dyn Layer>
            };
            let x = ids(batch, length, vocab);
            differences_agree(&build, &x);
            autograd_agrees(&build, &x, &|x, p| {
                let kinds = if kinds { p.last() } else { None };
                Kernel { tokens: &p[0], positions: positions.then(|| &p[1]), kinds }.reference(x)
            });
            cost_is_exact(&build, &|batch| ids(batch, length, vocab));
        }
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named() {
        let mut declared = Declared::default();
        let layer = Embedding::new(&mut declared, "e", "e.weight", (10, 3, 4), INIT);
        let subject = Subject::new(declared, DType::F32, 1);
        let x = Tensor::new(&[[3u32, 17, 9]], &device()).unwrap();
        let made = layer.forward(&x, &subject.pass(Mode::Train));
        // A card does not stop for it: what it makes of such a token is not a number.
        if !device().is_cpu() {
            let values = flat(&made.unwrap().0);
            return (0..12).for_each(|i| assert_eq!(values[i].is_nan(), i / 4 == 1));
        }
        let error = made.err().unwrap().to_string();
        assert!(error.contains("token 17 is not in the vocabulary, which has 10"), "{error}");
    }
}
