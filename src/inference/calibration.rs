//! Finds the ranges of a model's activations on samples of its training set.

use std::sync::Arc;

use crate::data::Dataset;
use crate::inference::session::{PassOutput, Session, SessionOptions};
use crate::inference::trained_model::TrainedModel;
use crate::job::Reductions;
use crate::kernels::fake_quantize::RANGE_LEN;
use crate::models;
use crate::params::activation_range_name;
use crate::quantization::points::{self, Observers};
use crate::quantization::{ActivationPoints, ActivationQuantization, AffineQuantization, ClipMethod};
use crate::train::Failure;
use crate::train::tensor_reader::TensorReader;

/// What a calibration found.
pub struct Calibration {
    pub activations: ActivationQuantization,
    /// Bad records among its samples, which were left out.
    pub skipped: u64,
}

/// The quantization of every point of `model`, from `samples` drawn of `dataset`, or from the range that training
/// found. `progress` is called with the samples done.
pub fn calibrate(
    model: &mut TrainedModel,
    dataset: &Arc<dyn Dataset>,
    samples: u64,
    method: ClipMethod,
    options: &SessionOptions,
    mut progress: impl FnMut(u64),
) -> Result<Calibration, Failure> {
    let built = models::build_reduced(&model.job.model, model.features(), &Reductions::of_job(&model.job))?;
    let mut network = built.network;
    let names = points::insert(&mut network, &[], &ActivationPoints::None).unwrap_or_default();
    let held_bytes = options.held_bytes + names.len() as u64 * Observers::BYTES;
    let observers = Arc::new(Observers::default());
    let own = std::mem::replace(&mut model.points, ActivationPoints::Observe(observers.clone()));
    let loaded = Session::load(
        model,
        dataset.as_ref(),
        PassOutput::Logits,
        &SessionOptions { held_bytes, ..options.clone() },
    );
    model.points = own;
    let (session, mut done) = (loaded?, 0);
    let loading = &model.job.data.loader;
    let skipped = session.for_some_batches(dataset.clone(), samples, loading, |batch| {
        if !batch.ids.is_empty() {
            session.logits(batch)?;
        }
        done += batch.consumed;
        progress(done);
        Ok(())
    })?;
    let mut activations = observers.quantization(method);
    activations.extend(trained_ranges(model, &names)?);
    Ok(Calibration { activations, skipped })
}

/// The quantization of these points by the ranges of training, which has none of the logits; empty for a model that was
/// trained in floats.
fn trained_ranges(model: &TrainedModel, names: &[String]) -> Result<ActivationQuantization, Failure> {
    let mut ranges = ActivationQuantization::new();
    if !model.rounds_to_int8() {
        return Ok(ranges);
    }
    let file = TensorReader::open_checkpoint(&model.statistics)?;
    for point in names {
        let Some(info) = file.info(&activation_range_name(point)) else { continue };
        if info.shape != [RANGE_LEN] {
            return Err(file.mismatch(format!("the range of `{point}` has shape {:?}", info.shape)));
        }
        let values = file.values(info).map_err(Failure::io("read", &model.statistics))?;
        ranges.insert(point.clone(), AffineQuantization::of_range(values[0], values[1]));
    }
    Ok(ranges)
}
