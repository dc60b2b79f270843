//! The weights of a model with layers factorized and weights zeroed, as a file of its own.

use std::path::Path;

use super::error::ExportError;
use super::safetensors_file::{self, TensorHeader};
use super::weights::{SavedWeights, WeightDtype, all_specs};
use crate::inference::trained_model::TrainedModel;
use crate::job::{Ranks, Reductions};
use crate::kernels::low_rank::{Factors, Matrix, factorize};
use crate::models;
use crate::params::{MatrixLayer, TensorSpec, TensorUse};

/// Writes the parameters and statistics of `model` with layers factorized at `ranks`, which include those of the layers
/// that have factors already, and a fraction `sparsity` of each matrix, the smallest weights, zero. One tensor and its
/// factors are in memory at a time.
pub fn write_variant(
    model: &TrainedModel,
    ranks: &Ranks,
    sparsity: f64,
    path: &Path,
) -> Result<(), ExportError> {
    let own = Reductions::of_job(&model.job);
    let reductions = Reductions { ranks: ranks.clone(), kept: own.kept };
    let layout = models::build_reduced(&model.job.model, model.features(), &reductions)?.layout;
    let files = SavedWeights::open(&model.weights, &model.statistics)?;
    let specs: Vec<&TensorSpec> = all_specs(&layout).collect();
    let headers: Vec<TensorHeader> =
        specs.iter().map(|spec| TensorHeader { name: &spec.name, shape: &spec.shape }).collect();
    // Both factors of a layer come from one decomposition.
    let mut last: Option<(&str, Factors)> = None;
    let mut values = |index: usize| {
        let spec = specs[index];
        let mut values = match source(&layout.matrices, &own.ranks, &spec.name) {
            ValueSource::Same => files.read(&spec.name, &spec.shape)?,
            ValueSource::Bias(whole) => files.read(whole, &spec.shape)?,
            ValueSource::Factor { layer, rank, is_left } => {
                if last.as_ref().is_none_or(|(name, _)| *name != layer.name) {
                    let values = files.read(&layer.weight.name, &layer.weight.shape)?;
                    let (rows, columns) = layer.dims();
                    last = Some((&layer.name, factorize(Matrix { values: &values, rows, columns }, rank)));
                }
                let factors = last.as_ref().map(|(_, factors)| factors);
                factors.map(|f| if is_left { f.left.clone() } else { f.right.clone() }).unwrap_or_default()
            }
        };
        if spec.shape.len() >= 2 && spec.usage != TensorUse::Table {
            zero_smallest(&mut values, sparsity);
        }
        Ok(values)
    };
    safetensors_file::write(path, &headers, WeightDtype::F32, &mut values)
}

/// Where the values of a parameter come from.
enum ValueSource<'a> {
    Same,
    /// The bias of the whole layer.
    Bias(&'a str),
    Factor {
        layer: &'a MatrixLayer,
        rank: usize,
        is_left: bool,
    },
}

/// `own` has the ranks of the layers that are factors in the model too.
fn source<'a>(layers: &'a [MatrixLayer], own: &Ranks, name: &str) -> ValueSource<'a> {
    let found = layers.iter().find_map(|layer| {
        let rank = layer.rank.filter(|_| !own.contains_key(&layer.name))?;
        let [left, right] = layer.factor_weights();
        if let Some((bias, whole)) = layer.factor_bias()
            && bias == name
        {
            return Some(ValueSource::Bias(whole));
        }
        (left == name || right == name).then(|| ValueSource::Factor { layer, rank, is_left: left == name })
    });
    found.unwrap_or(ValueSource::Same)
}

/// Sets the fraction `sparsity` of smallest magnitude to zero; of equal ones the first.
fn zero_smallest(values: &mut [f32], sparsity: f64) {
    let count = ((sparsity * values.len() as f64).round() as usize).min(values.len().saturating_sub(1));
    if count == 0 {
        return;
    }
    let mut magnitudes: Vec<f32> = values.iter().map(|value| value.abs()).collect();
    let (smaller, threshold, _) = magnitudes.select_nth_unstable_by(count - 1, f32::total_cmp);
    let threshold = *threshold;
    let mut ties = count - smaller.iter().filter(|value| **value < threshold).count();
    for value in values {
        let tie = value.abs() == threshold && ties > 0;
        ties -= usize::from(tie);
        if tie || value.abs() < threshold {
            *value = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_asked_for_are_zero() {
        let zeroed = |sparsity: f64| {
            let mut values = [1.0, -2.0, 0.5, -0.5, 0.5, 3.0];
            zero_smallest(&mut values, sparsity);
            values
        };
        assert_eq!(zeroed(0.0), [1.0, -2.0, 0.5, -0.5, 0.5, 3.0]);
        assert_eq!(zeroed(1.0 / 3.0), [1.0, -2.0, 0.0, 0.0, 0.5, 3.0]);
        assert_eq!(zeroed(2.0 / 3.0), [0.0, -2.0, 0.0, 0.0, 0.0, 3.0]);
        assert_eq!(zeroed(1.0), [0.0, 0.0, 0.0, 0.0, 0.0, 3.0]);
    }
}
