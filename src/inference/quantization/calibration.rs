//! Finds the ranges of a model's activations on samples of its training set.

use std::sync::Arc;

use super::points::{self, Observers};
use super::{ActivationPoints, ActivationQuantization, ClipMethod};
use crate::data::Dataset;
use crate::inference::session::{PassOutput, Session, SessionOptions};
use crate::inference::trained_model::TrainedModel;
use crate::job::Reductions;
use crate::models;
use crate::train::Failure;

/// The quantization of every point of `model`, from `samples` drawn of `dataset`. `progress` is called with the
/// samples done.
pub fn calibrate(
    model: &mut TrainedModel,
    dataset: &Arc<dyn Dataset>,
    samples: u64,
    method: ClipMethod,
    options: &SessionOptions,
    mut progress: impl FnMut(u64),
) -> Result<ActivationQuantization, Failure> {
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
    session.for_some_batches(dataset.clone(), samples, |batch| {
        if !batch.ids.is_empty() {
            session.logits(batch)?;
        }
        done += batch.consumed;
        progress(done);
        Ok(())
    })?;
    Ok(observers.quantization(method))
}
