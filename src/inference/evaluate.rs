//! Evaluates a trained model: the metrics that belong to its task.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::bad_records::BadRecords;
use super::session::{PassOutput, Session, SessionOptions};
use super::trained_model::TrainedModel;
use super::view_mean::ViewMean;
use crate::base::features::{Features, TargetSpec};
use crate::data::{Dataset, HostBatch};
use crate::layers::loss::MetricSums;
use crate::metrics::task::{ScoreMemory, TargetScale, TaskMetrics, TaskSums};
use crate::train::Failure;
use crate::train::datasets::tables;
use crate::train::validation_metrics::{score_error, target_bytes, target_rows};

/// Memory for scores; more go to a temporary file.
const SCORE_BYTES: u64 = 64 << 20;

/// The name of the data in errors.
const SET: &str = "the data to evaluate";

pub struct Evaluation {
    pub samples: u64,
    /// Records that could not be read.
    pub skipped: u64,
    pub metrics: TaskMetrics,
}

/// Evaluates `model` on `dataset`. A bad record fails it or is left out, as the job's `on_bad_record` says.
/// `progress` is called with the samples done.
pub fn evaluate(
    model: &TrainedModel,
    dataset: &Arc<dyn Dataset>,
    options: &SessionOptions,
    mut progress: impl FnMut(u64),
) -> Result<Evaluation, Failure> {
    let target = dataset.features().target.clone();
    let output = if target == TargetSpec::Tokens { PassOutput::Metrics } else { PassOutput::Logits };
    let features = Features { target: target.clone(), ..dataset.features().clone() };
    let memory = ScoreMemory::Bytes(SCORE_BYTES.min(options.ram / 16) as usize);
    let sums_bytes = match output {
        PassOutput::Metrics => 0,
        PassOutput::Logits => TaskSums::bytes(&features, dataset.len(), memory),
    };
    let options = SessionOptions { held_bytes: options.held_bytes + sums_bytes, ..options.clone() };
    let session = Session::load(model, dataset.as_ref(), output, &options)?;
    let (mut done, mut skipped, views) = (0, 0, dataset.views());
    let mut view_mean = ViewMean::new(views, &target);
    let mut bad_records = BadRecords::new(&model.job.data.loader, views);
    let mut each = |visit: &mut dyn FnMut(&HostBatch) -> Result<(), Failure>| {
        session.for_each_batch(dataset.clone(), |batch| {
            bad_records.add(&batch.bad_records)?;
            visit_rows(batch, visit)?;
            done += batch.consumed;
            skipped += batch.bad_records.len() as u64;
            progress(done / views);
            Ok(())
        })
    };
    let scales = target_scales(model, target_len(&target));
    let metrics = match TaskSums::new(&features, scales, dataset.len(), memory) {
        Some(mut sums) => {
            each(&mut |batch| {
                let (outputs, targets, rows) = (session.logits(batch)?, target_rows(batch), batch.ids.len());
                for (i, row) in outputs.chunks_exact((outputs.len() / rows).max(1)).enumerate() {
                    if let Some(row) = view_mean.push(batch.ids[i], row) {
                        sums.push(row, targets.row(i, rows)).map_err(score_error)?;
                    }
                }
                Ok(())
            })?;
            bad_records.check_usable(SET, done - skipped)?;
            sums.finish().map_err(score_error)?
        }
        None => {
            let (mut sums, mut bytes) = (MetricSums::default(), 0);
            each(&mut |batch| {
                sums += session.evaluate(batch)?;
                bytes += target_bytes(dataset.as_ref(), batch);
                Ok(())
            })?;
            bad_records.check_usable(SET, done - skipped)?;
            let accuracy = sums.top1 as f64 / sums.count as f64;
            TaskMetrics::Language { loss: sums.mean_loss(), tokens: sums.weight, bytes, accuracy }
        }
    };
    Ok(Evaluation { samples: (done - skipped) / views, skipped: skipped / views, metrics })
}

fn visit_rows(
    batch: &HostBatch,
    visit: &mut dyn FnMut(&HostBatch) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if batch.ids.is_empty() { Ok(()) } else { visit(batch) }
}

fn target_len(target: &TargetSpec) -> usize {
    if let TargetSpec::Values { len } = target { *len } else { 0 }
}

/// What turns predictions of `len` values back into the units of their targets.
pub fn target_scales(model: &TrainedModel, len: usize) -> Vec<TargetScale> {
    tables::target_scales(&model.job, model.preprocessing.table.as_ref(), len)
}

impl Evaluation {
    pub fn to_json(&self) -> Value {
        // Adding 0 leaves no negative zero.
        let mut metrics: Map<String, Value> =
            self.metrics.values().into_iter().map(|(name, value)| (name, json!(value + 0.0))).collect();
        let mut document = json!({ "samples": self.samples, "skipped": self.skipped });
        if let TaskMetrics::Classification { names, metrics: found } = &self.metrics {
            let classes: Map<String, Value> =
                names.iter().zip(&found.classes).map(|(name, class)| (name.clone(), json!(class))).collect();
            metrics.insert("classes".into(), classes.into());
            document["confusion"] = json!({ "classes": names, "matrix": found.confusion });
            document["calibration"] = json!(found.calibration);
        }
        if let TaskMetrics::MultiLabel { names, metrics: found } = &self.metrics {
            let labels: Map<String, Value> =
                names.iter().zip(&found.labels).map(|(name, label)| (name.clone(), json!(label))).collect();
            metrics.insert("labels".into(), labels.into());
        }
        document["metrics"] = metrics.into();
        document
    }
}
