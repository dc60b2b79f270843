//! A model without the channels or heads that its run pruned.

use std::collections::BTreeMap;

use super::check_largest;
use super::error::ExportError;
use super::safetensors_file::{self, TensorHeader};
use super::weights::{SavedWeights, WeightDtype, all_specs};
use crate::inference::trained_model::TrainedModel;
use crate::job::{Reductions, UnitCounts};
use crate::models::{self, LossOptions};
use crate::params::units::{ValueOrder, gather_kept};
use crate::params::{ParamLayout, ParamRules, TensorSpec, UnitGroup};
use crate::planner::plan::RemovedUnits;
use crate::quantization::ActivationPoints;
use crate::train::Failure;

/// A model without its pruned units.
pub struct ShrunkModel {
    /// Its weights are in a temporary file.
    pub model: TrainedModel,
    pub removed: RemovedUnits,
}

/// The model that computes the same without its pruned units; `None` if it has none. One tensor is in memory at a
/// time, and refused if it takes more than `max_bytes`.
pub fn shrink(model: &TrainedModel, max_bytes: u64) -> Result<Option<ShrunkModel>, ExportError> {
    let job = &model.job;
    let Some(prune) = job.pruning().filter(|prune| prune.structure.has_units()) else { return Ok(None) };
    let rules = ParamRules::of_job(job);
    let whole = models::build_with(&job.model, model.features(), &LossOptions::default(), &rules)?.layout;
    check_largest(&whole, 0, max_bytes)?;
    let files = SavedWeights::open(&model.weights, &model.statistics)?;
    let kept = kept_units(&whole, &files)?;
    let counts = counts(&whole.units, &kept);
    if counts.is_empty() {
        return Ok(None);
    }
    let all = kept.iter().flatten();
    let (structure, removed) = (prune.structure, all.clone().filter(|kept| !**kept).count() as u64);
    let removed = RemovedUnits { structure, removed, units: all.count() as u64 };
    let reduced = models::without_pruned(job, counts);
    // With the ranges of its activations, if training has found them.
    let rules =
        ParamRules::of_reductions(&Reductions::of_job(&reduced)).quantized(model.has_trained_ranges());
    let layout =
        models::build_with(&reduced.model, model.features(), &LossOptions::default(), &rules)?.layout;
    let file = tempfile::Builder::new()
        .prefix("trainer-weights-")
        .tempfile()
        .map_err(Failure::io("create a temporary file in", std::env::temp_dir()))?
        .into_temp_path();
    let specs: Vec<&TensorSpec> = all_specs(&layout).collect();
    let headers: Vec<TensorHeader> =
        specs.iter().map(|spec| TensorHeader { name: &spec.name, shape: &spec.shape }).collect();
    let whole_specs: BTreeMap<&str, &TensorSpec> =
        all_specs(&whole).map(|spec| (spec.name.as_str(), spec)).collect();
    let mut values = |index: usize| {
        let spec = specs[index];
        let missing = || ExportError::read_back(&model.weights, format!("it has no `{}`", spec.name));
        let from = *whole_specs.get(spec.name.as_str()).ok_or_else(missing)?;
        let values = gather_kept(
            from,
            files.read(&from.name, &from.shape)?,
            &whole.units,
            &kept,
            ValueOrder::Declared,
        );
        match values.len() == spec.len() {
            true => Ok(values),
            false => Err(ExportError::read_back(
                &model.weights,
                format!("`{}` has {} values left, not {}", spec.name, values.len(), spec.len()),
            )),
        }
    };
    safetensors_file::write(&file, &headers, WeightDtype::F32, &mut values)?;
    let model = TrainedModel {
        job: reduced,
        preprocessing: model.preprocessing.clone(),
        origin: model.origin,
        folder: model.folder.clone(),
        weights: file.to_path_buf(),
        statistics: file.to_path_buf(),
        step: model.step,
        is_best: model.is_best,
        uses_ema: model.uses_ema,
        points: ActivationPoints::None,
        converted: Some(file),
    };
    Ok(Some(ShrunkModel { model, removed }))
}

/// Which units have a value that is not zero, group by group; of a layer without one, the first.
fn kept_units(layout: &ParamLayout, files: &SavedWeights) -> Result<Vec<Vec<bool>>, ExportError> {
    let mut sums: Vec<Vec<f64>> = layout.units.iter().map(|group| vec![0.0; group.units]).collect();
    for (spec, _) in layout.params.pruned() {
        let values = files.read(&spec.name, &spec.shape)?;
        for (group, sums) in layout.units.iter().zip(&mut sums) {
            let strides = group.strides_in(spec, ValueOrder::Declared);
            // The square of an f32 is not 0 in f64 unless it is.
            strides.for_each(|strides| strides.add_squares(&values, sums));
        }
    }
    let kept = |sums: Vec<f64>| {
        let mut kept: Vec<bool> = sums.into_iter().map(|sum| sum != 0.0).collect();
        if let (false, Some(first)) = (kept.contains(&true), kept.first_mut()) {
            *first = true;
        }
        kept
    };
    Ok(sums.into_iter().map(kept).collect())
}

/// How many units the layers keep that do not keep all.
fn counts(groups: &[UnitGroup], kept: &[Vec<bool>]) -> UnitCounts {
    let count = |(group, kept): (&UnitGroup, &Vec<bool>)| {
        let count = kept.iter().filter(|kept| **kept).count();
        (count < group.units).then(|| (group.name.clone(), count))
    };
    groups.iter().zip(kept).filter_map(count).collect()
}
