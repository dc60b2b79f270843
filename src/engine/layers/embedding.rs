//! Token embeddings, plus learned positions and token types if the model has them. Always the first layer, so it
//! computes no input gradient.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::embedding::{EmbeddingGrads, EmbeddingKernel as Kernel, cuda_workspace, workspace};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct Embedding {
    name: String,
    pub token_table: ParamId,
    pub position_table: Option<ParamId>,
    pub token_type_table: Option<ParamId>,
    /// Tokens per sample.
    length: usize,
    vocab: usize,
    width: usize,
}

impl Embedding {
    /// A table of `vocab` rows named `weight`, for samples of `length` tokens.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        weight: &str,
        (vocab, length, width): (usize, usize, usize),
        init: ParamInit,
    ) -> Self {
        let token_table = registry.table(weight, [vocab, width], init);
        Self {
            name: name.into(),
            token_table,
            position_table: None,
            token_type_table: None,
            length,
            vocab,
            width,
        }
    }

    /// Adds a learned row per position; `context` is at least the number of tokens per sample.
    pub fn with_positions(
        mut self,
        registry: &mut ParamRegistry,
        weight: &str,
        context: usize,
        init: ParamInit,
    ) -> Self {
        self.position_table = Some(registry.table(weight, [context, self.width], init));
        self
    }

    /// Adds the first of `token_types` rows to every token.
    pub fn with_token_types(
        mut self,
        registry: &mut ParamRegistry,
        weight: &str,
        token_types: usize,
        init: ParamInit,
    ) -> Self {
        self.token_type_table = Some(registry.table(weight, [token_types, self.width], init));
        self
    }

    /// The token table, for a head with tied weights.
    pub fn token_weight(&self) -> ParamId {
        self.token_table
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        let weight = |id: Option<ParamId>| id.map(|id| pass.weight(id));
        Kernel {
            tokens: pass.weight(self.token_table),
            positions: weight(self.position_table),
            token_types: weight(self.token_type_table),
            starts: pass.cache.map(|pass| pass.rows.starts),
        }
    }
}

impl Layer for Embedding {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.length, self.width]
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        Ok((self.kernel(pass).forward(x)?, SavedTensors(vec![x.clone()])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        _: bool,
    ) -> Result<Option<Tensor>> {
        let grad = |id: Option<ParamId>| id.and_then(|id| pass.grad(id));
        let grads = EmbeddingGrads {
            tokens: pass.grad(self.token_table),
            positions: grad(self.position_table),
            token_types: grad(self.token_type_table),
        };
        self.kernel(pass).backward(&saved.0[0], &dy, &grads)?;
        Ok(None)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let is_trained = |id: Option<ParamId>| id.is_some_and(|id| id.trained);
        let rows = spec.batch * self.length;
        let (tokens, token_types) = (self.token_table.trained, is_trained(self.token_type_table));
        Cost {
            output: spec.bytes(self.length * self.width),
            saves_input: true,
            trains: tokens || token_types || is_trained(self.position_table),
            backward_workspace: match spec.backend {
                Backend::Cpu { .. } => workspace(spec.dtype, rows, self.width, (tokens, token_types)),
                Backend::Reference { .. } => 0,
                Backend::Cuda { .. } => {
                    cuda_workspace(spec.dtype, rows, (self.vocab, self.width), (tokens, token_types))
                }
            },
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        [Some(self.token_table), self.position_table, self.token_type_table].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Mode;
    use super::super::gradcheck::{
        TestContext, check_against_autograd, check_cost, check_finite_differences, test_device, to_f64_vec,
    };
    use super::*;
    use candle_core::DType;
    use proptest::prelude::*;

    const INIT: ParamInit = ParamInit::Normal(1.0);

    fn ids(batch: usize, length: usize, vocab: usize) -> Tensor {
        let of = |i: usize| (i * i * 7 % 13 % vocab) as u32;
        let ids = (0..batch * length).map(of).collect::<Vec<u32>>();
        Tensor::from_vec(ids, (batch, length), &test_device()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            batch in 1usize..5,
            length in 1usize..9,
            vocab in 1usize..150,
            width in 1usize..20,
            positions: bool,
            kinds: bool,
        ) {
            let build = |d: &mut ParamRegistry| {
                let mut layer = Embedding::new(d, "e", "e.weight", (vocab, length, width), INIT);
                if positions {
                    layer = layer.with_positions(d, "p.weight", length + 2, INIT);
                }
                if kinds {
                    layer = layer.with_token_types(d, "k.weight", 2, INIT);
                }
                Box::new(layer) as Box<dyn Layer>
            };
            let x = ids(batch, length, vocab);
            check_finite_differences(&build, &x);
            check_against_autograd(&build, &x, &|x, p| {
                let kinds = if kinds { p.last() } else { None };
                let positions = positions.then(|| &p[1]);
                Kernel { tokens: &p[0], positions, token_types: kinds, starts: None }.reference(x)
            });
            check_cost(&build, &|batch| ids(batch, length, vocab));
        }
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named() {
        let mut registry = ParamRegistry::default();
        let layer = Embedding::new(&mut registry, "e", "e.weight", (10, 3, 4), INIT);
        let subject = TestContext::new(registry, DType::F32, 1);
        let x = Tensor::new(&[[3u32, 17, 9]], &test_device()).unwrap();
        let made = layer.forward(&x, &subject.pass(Mode::Train));
        // The GPU kernel cannot fail: it embeds an invalid token as NaN.
        if !test_device().is_cpu() {
            let values = to_f64_vec(&made.unwrap().0);
            return (0..12).for_each(|i| assert_eq!(values[i].is_nan(), i / 4 == 1));
        }
        let error = made.err().unwrap().to_string();
        assert!(error.contains("token 17 is not in the vocabulary, which has 10"), "{error}");
    }
}
