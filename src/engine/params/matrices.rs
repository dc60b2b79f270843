//! Layers whose weight is one matrix, and their factors: `[lowrank]` replaces such a layer by two.

use super::{MemoryFormat, ParamInit, ParamRegistry, TensorSpec, TensorUse};

/// A linear layer, or a convolution of one group.
#[derive(Clone, Debug)]
pub struct MatrixLayer {
    pub name: String,
    /// The whole weight. It is a parameter only if `rank` is `None`.
    pub weight: TensorSpec,
    /// The bias of the whole layer.
    pub bias: Option<String>,
    /// The rank of the two layers that replace it.
    pub rank: Option<usize>,
}

impl MatrixLayer {
    /// Rows and columns of the weight as it is stored; its leading dimension are the rows.
    pub fn dims(&self) -> (usize, usize) {
        let rows = self.weight.shape.first().copied().unwrap_or(1);
        (rows, self.weight.len() / rows.max(1))
    }

    /// Values of two factors of this rank.
    pub fn factors_len(&self, rank: usize) -> usize {
        let (rows, columns) = self.dims();
        rank * (rows + columns)
    }

    /// The largest rank whose factors have fewer values than the weight.
    pub fn max_rank(&self) -> usize {
        let (rows, columns) = self.dims();
        (rows * columns).saturating_sub(1) / (rows + columns)
    }

    /// The name of the first of the two layers, (inputs, rank), and of the second, (rank, outputs).
    pub fn factor_names(layer: &str) -> [String; 2] {
        [format!("{layer}.0"), format!("{layer}.1")]
    }

    /// The weights of the two layers as a product of stored matrices, (rows, rank) and (rank, columns).
    pub fn factor_weights(&self) -> [String; 2] {
        let [first, second] = Self::factor_names(&self.name).map(|name| format!("{name}.weight"));
        match self.weight.usage {
            TensorUse::TransposedWeight => [first, second],
            TensorUse::Weight | TensorUse::Table => [second, first],
        }
    }

    /// The bias of the second layer, and the one it has the values of.
    pub fn factor_bias(&self) -> Option<(String, &str)> {
        let [_, second] = Self::factor_names(&self.name);
        Some((format!("{second}.bias"), self.bias.as_deref()?))
    }
}

impl ParamInit {
    /// The initialization of both factors with which their product has the variance of this one.
    pub fn of_factors(self, rank: usize) -> Self {
        let root = (rank.max(1) as f64).sqrt();
        match self {
            Self::Constant(value) => Self::Constant((value.abs() / rank.max(1) as f64).sqrt()),
            Self::Uniform(bound) => Self::Uniform((bound * 3f64.sqrt() / root).sqrt()),
            Self::Normal(deviation) => Self::Normal((deviation / root).sqrt()),
        }
    }
}

impl ParamRegistry {
    /// Declares a layer whose weight is a matrix; returns the rank of its factors, if it has any.
    pub fn matrix_layer(
        &mut self,
        name: &str,
        [weight, bias]: [String; 2],
        shape: Vec<usize>,
        usage: TensorUse,
        has_bias: bool,
    ) -> Option<usize> {
        let memory_format = match shape.len() {
            4 => MemoryFormat::ChannelsLast,
            _ => MemoryFormat::Contiguous,
        };
        let init = ParamInit::Constant(0.0);
        let weight = TensorSpec { name: weight, shape, init, memory_format, usage };
        let rank = self.rules.rank_of(name);
        let bias = has_bias.then_some(bias);
        self.matrices.push(MatrixLayer { name: name.to_owned(), weight, bias, rank });
        rank
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(shape: &[usize], usage: TensorUse) -> MatrixLayer {
        let mut registry = ParamRegistry::default();
        let names = ["l.weight", "l.bias"].map(str::to_owned);
        assert_eq!(registry.matrix_layer("l", names, shape.to_vec(), usage, true), None);
        registry.into_layout().unwrap().matrices.remove(0)
    }

    #[test]
    fn factors_are_smaller_up_to_the_largest_rank() {
        for shape in [[40, 30].as_slice(), &[8, 3, 3, 3], &[10, 10], &[1, 9]] {
            let layer = layer(shape, TensorUse::Weight);
            let most = layer.max_rank();
            assert!(layer.factors_len(most) < layer.weight.len());
            assert!(layer.factors_len(most + 1) >= layer.weight.len());
        }
    }

    #[test]
    fn the_first_layer_has_the_inputs() {
        let names = |usage| layer(&[4, 6], usage).factor_weights();
        assert_eq!(names(TensorUse::Weight), ["l.1.weight", "l.0.weight"]);
        assert_eq!(names(TensorUse::TransposedWeight), ["l.0.weight", "l.1.weight"]);
        assert_eq!(layer(&[4, 6], TensorUse::Weight).factor_bias(), Some(("l.1.bias".to_owned(), "l.bias")));
    }

    /// The variance of a product of `rank` pairs is that of the weight it replaces.
    #[test]
    fn factors_start_with_the_variance_of_their_product() {
        for rank in [1, 7, 64] {
            let variance = |init: ParamInit| match init {
                ParamInit::Uniform(bound) => bound * bound / 3.0,
                ParamInit::Normal(deviation) => deviation * deviation,
                ParamInit::Constant(_) => unreachable!(),
            };
            for init in [ParamInit::Uniform(0.1), ParamInit::Normal(0.02)] {
                let factor = variance(init.of_factors(rank));
                assert!((factor * factor * rank as f64 / variance(init) - 1.0).abs() < 1e-12);
            }
        }
    }
}
