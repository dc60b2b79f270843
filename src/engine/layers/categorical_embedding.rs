//! Embeds the categories of a table row and appends the vectors to its numeric columns. Always the first layer, so it
//! computes no input gradient.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::categorical_embedding::{CategoricalEmbeddingKernel as Kernel, cuda_workspace};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct CategoricalEmbedding {
    name: String,
    /// Numeric columns of a sample, which precede the categories.
    pub num_numeric: usize,
    pub tables: Vec<ParamId>,
    /// (rows, columns) of each table.
    pub table_shapes: Vec<(usize, usize)>,
    /// Values per sample in the output.
    output_width: usize,
}

/// Embedding dimension for a categorical column: half its cardinality, rounded up, at most 50.
pub fn embedding_dim(cardinality: usize) -> usize {
    cardinality.div_ceil(2).clamp(1, 50)
}

impl CategoricalEmbedding {
    /// One table per cardinality, named `NAME.0.weight`, `NAME.1.weight` and so on, initialized like
    /// `torch.nn.Embedding`.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        num_numeric: usize,
        cardinalities: &[usize],
    ) -> Self {
        let table = |(i, cardinality): (usize, &usize)| {
            registry.table(
                format!("{name}.{i}.weight"),
                [*cardinality, embedding_dim(*cardinality)],
                ParamInit::Normal(1.0),
            )
        };
        Self {
            name: name.into(),
            num_numeric,
            tables: cardinalities.iter().enumerate().map(table).collect(),
            table_shapes: cardinalities.iter().map(|rows| (*rows, embedding_dim(*rows))).collect(),
            output_width: num_numeric + cardinalities.iter().map(|rows| embedding_dim(*rows)).sum::<usize>(),
        }
    }

    fn kernel<'a>(&self, view_of: impl Fn(ParamId) -> &'a Tensor) -> Kernel<'a> {
        Kernel { num_numeric: self.num_numeric, tables: self.tables.iter().map(|id| view_of(*id)).collect() }
    }
}

impl Layer for CategoricalEmbedding {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.output_width]
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        Ok((self.kernel(|id| pass.weight(id)).forward(x)?, SavedTensors(vec![x.clone()])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        _: bool,
    ) -> Result<Option<Tensor>> {
        let grads: Vec<_> = self.tables.iter().map(|id| pass.grad(*id)).collect();
        self.kernel(|id| pass.weight(id)).backward(&saved.0[0], &dy, &grads)?;
        Ok(None)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let (forward, backward) = match spec.backend {
            Backend::Cpu { .. } | Backend::Reference { .. } => (0, 0),
            Backend::Cuda { .. } => {
                cuda_workspace(spec.dtype, spec.batch, self.num_numeric, &self.table_shapes)
            }
        };
        Cost {
            output: spec.bytes(self.output_width),
            saves_input: true,
            trains: self.tables.iter().any(|table| table.trained),
            forward_workspace: forward,
            backward_workspace: backward,
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        self.tables.clone()
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

    /// Numeric values, then per table a valid index or the unknown index, one past the last row.
    fn samples(batch: usize, numbers: usize, rows: &[usize]) -> Tensor {
        let value = |b: usize, i: usize| match i.checked_sub(numbers) {
            None => (b * 7 + i * 3) as f32 / 5.0 - 1.0,
            Some(table) => ((b * b * 5 + b + table) % (rows[table] + 1)) as f32,
        };
        let inputs = numbers + rows.len();
        let values: Vec<f32> = (0..batch * inputs).map(|i| value(i / inputs, i % inputs)).collect();
        Tensor::from_vec(values, (batch, inputs), &test_device()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            batch in 1usize..9,
            numbers in 0usize..5,
            rows in prop::collection::vec(1usize..140, 1..4),
        ) {
            let build = |d: &mut ParamRegistry| {
                Box::new(CategoricalEmbedding::new(d, "embeddings", numbers, &rows)) as Box<dyn Layer>
            };
            let x = samples(batch, numbers, &rows);
            check_finite_differences(&build, &x);
            check_against_autograd(&build, &x, &|x, p| {
                Kernel { num_numeric: numbers, tables: p.iter().collect() }.reference(x)
            });
            check_cost(&build, &|batch| samples(batch, numbers, &rows));
        }
    }

    #[test]
    fn unknown_category_embeds_to_zeros_and_invalid_index_is_reported() {
        let mut registry = ParamRegistry::default();
        let layer = CategoricalEmbedding::new(&mut registry, "embeddings", 1, &[4]);
        let subject = TestContext::new(registry, DType::F32, 1);
        let pass = subject.pass(Mode::Train);
        let (y, saved) =
            layer.forward(&Tensor::new(&[[0.5f32, 4.0]], &test_device()).unwrap(), &pass).unwrap();
        assert_eq!(to_f64_vec(&y), [0.5, 0.0, 0.0]);
        layer.backward(saved, y.ones_like().unwrap(), &pass, false).unwrap();
        assert!(to_f64_vec(&subject.store.grads).iter().all(|g| *g == 0.0), "no row learns from it");
        // The GPU kernel does not validate indices.
        let invalid_indices: &[f32] = if test_device().is_cpu() { &[5.0, -1.0, 0.5, f32::NAN] } else { &[] };
        for index in invalid_indices {
            let x = Tensor::new(&[[0.5f32, *index]], &test_device()).unwrap();
            let error = layer.forward(&x, &pass).err().unwrap().to_string();
            assert!(error.contains(&format!("index {index} is not in table 0, which has 4 rows")), "{error}");
        }
    }

    #[test]
    fn widths_follow_the_rule() {
        assert_eq!([1, 2, 3, 16, 99, 100, 5000].map(embedding_dim), [1, 1, 2, 8, 50, 50, 50]);
    }
}
