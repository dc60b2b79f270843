//! Evaluates a trained model: the metrics that belong to its task.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::session::{PassOutput, Session, SessionOptions};
use super::trained_model::TrainedModel;
use super::view_mean::ViewMean;
use crate::base::features::TargetSpec;
use crate::data::{BatchValues, Dataset, HostBatch};
use crate::kernels::cross_entropy::IGNORE_INDEX;
use crate::layers::loss::MetricSums;
use crate::metrics::classification::{ClassificationMetrics, ClassificationSums};
use crate::metrics::regression::{RegressionMetrics, RegressionSums};
use crate::train::Failure;
use crate::train::datasets::tables::TableSource;

/// Memory for scores; more go to a temporary file.
const SCORE_BYTES: usize = 64 << 20;

/// The metrics of an evaluation.
pub enum TaskMetrics {
    Classification {
        names: Vec<String>,
        metrics: ClassificationMetrics,
    },
    /// Per target: its name and its metrics; and the mean squared error of standardized values, as trained on.
    Regression {
        targets: Vec<(String, RegressionMetrics)>,
        loss: f64,
    },
    Language {
        loss: f64,
        tokens: f64,
        bytes: u64,
        accuracy: f64,
    },
}

pub struct Evaluation {
    pub samples: u64,
    /// Records that could not be read.
    pub skipped: u64,
    pub metrics: TaskMetrics,
}

/// Evaluates `model` on `dataset`. `progress` is called with the samples done.
pub fn evaluate(
    model: &TrainedModel,
    dataset: &Arc<dyn Dataset>,
    options: &SessionOptions,
    mut progress: impl FnMut(u64),
) -> Result<Evaluation, Failure> {
    let target = dataset.features().target.clone();
    let output = if target == TargetSpec::Tokens { PassOutput::Metrics } else { PassOutput::Logits };
    let session = Session::load(model, dataset.as_ref(), output, options)?;
    let (mut done, mut skipped, views) = (0, 0, dataset.views());
    let mut view_mean = ViewMean::new(views, &target);
    let mut each = |visit: &mut dyn FnMut(&HostBatch) -> Result<(), Failure>| {
        session.for_each_batch(dataset.clone(), |batch| {
            visit_rows(batch, visit)?;
            done += batch.consumed;
            skipped += batch.bad_records.len() as u64;
            progress(done / views);
            Ok(())
        })
    };
    let metrics = match &target {
        TargetSpec::Class { names } | TargetSpec::MixedClass { names } => {
            let mut sums = ClassificationSums::new(names.len(), SCORE_BYTES);
            each(&mut |batch| {
                let BatchValues::U32(truths) = &batch.targets else { return Ok(()) };
                let logits = session.logits(batch)?;
                for ((row, truth), id) in logits.chunks_exact(names.len()).zip(truths).zip(&batch.ids) {
                    if let Some(row) = view_mean.push(*id, row) {
                        sums.push(row, *truth).map_err(score_error)?;
                    }
                }
                Ok(())
            })?;
            TaskMetrics::Classification { names: names.clone(), metrics: sums.finish().map_err(score_error)? }
        }
        TargetSpec::Values { len } => {
            let scales = target_scales(model, *len);
            let mut sums = vec![RegressionSums::default(); *len];
            let (mut squared, mut values) = (0.0, 0u64);
            each(&mut |batch| {
                let BatchValues::F32(truths) = &batch.targets else { return Ok(()) };
                let outputs = session.logits(batch)?;
                let rows = outputs.chunks_exact(*len).zip(truths.chunks_exact(*len));
                for ((row, truths), id) in rows.zip(&batch.ids) {
                    let Some(row) = view_mean.push(*id, row) else { continue };
                    for (i, (predicted, truth)) in row.iter().zip(truths).enumerate() {
                        let (_, mean, std) = &scales[i];
                        let (predicted, truth) = (f64::from(*predicted), f64::from(*truth));
                        squared += (predicted - truth).powi(2);
                        values += 1;
                        sums[i].push(predicted * std + mean, truth * std + mean);
                    }
                }
                Ok(())
            })?;
            let targets =
                scales.into_iter().zip(&sums).map(|((name, ..), sums)| (name, sums.finish())).collect();
            TaskMetrics::Regression { targets, loss: squared / values as f64 }
        }
        TargetSpec::Tokens => {
            let (mut sums, mut bytes) = (MetricSums::default(), 0);
            each(&mut |batch| {
                sums += session.evaluate(batch)?;
                bytes += target_bytes(dataset.as_ref(), batch);
                Ok(())
            })?;
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

fn score_error(source: std::io::Error) -> Failure {
    Failure::Io { what: "keep the scores in", path: std::env::temp_dir(), source }
}

/// Name, mean and standard deviation of each regression target: what turns a prediction back into the target's units.
pub fn target_scales(model: &TrainedModel, len: usize) -> Vec<(String, f64, f64)> {
    match (&model.preprocessing.table, TableSource::of(&model.job)) {
        (Some(schema), Some(source)) => {
            let names =
                schema.columns.iter().filter(|column| column.target).map(|column| column.name.clone());
            let scales = schema.target_scales(&source.settings);
            names.zip(scales).map(|(name, (mean, std))| (name, mean, std)).collect()
        }
        _ => (0..len).map(|i| (format!("target {i}"), 0.0, 1.0)).collect(),
    }
}

/// Bytes of the text that the targets of a batch stand for; 0 if they stand for none.
fn target_bytes(dataset: &dyn Dataset, batch: &HostBatch) -> u64 {
    let BatchValues::U32(targets) = &batch.targets else { return 0 };
    let row = targets.len() / batch.ids.len().max(1);
    let text = |row: &[u32]| {
        let ids: Vec<u32> = row.iter().copied().filter(|id| *id != IGNORE_INDEX).collect();
        dataset.decode_tokens(&ids).map_or(0, |text| text.len() as u64)
    };
    targets.chunks_exact(row.max(1)).map(text).sum()
}

impl TaskMetrics {
    /// The metrics by name, as in the job's `[eval] metrics`.
    pub fn values(&self) -> Vec<(String, f64)> {
        let named = |pairs: &[(&str, Option<f64>)]| {
            pairs.iter().filter_map(|(name, value)| Some(((*name).to_owned(), (*value)?))).collect()
        };
        match self {
            TaskMetrics::Classification { metrics: m, .. } => named(&[
                ("loss", Some(m.log_loss)),
                ("accuracy", Some(m.accuracy)),
                ("top5", Some(m.top5)),
                ("precision", Some(m.macro_precision)),
                ("recall", Some(m.macro_recall)),
                ("f1", Some(m.macro_f1)),
                ("roc_auc", m.roc_auc),
                ("log_loss", Some(m.log_loss)),
                ("calibration_error", Some(m.calibration_error)),
            ]),
            TaskMetrics::Regression { targets, loss } => {
                let several = targets.len() > 1;
                let of = |(name, m): &(String, RegressionMetrics)| {
                    let key =
                        |metric: &str| if several { format!("{metric}.{name}") } else { metric.to_owned() };
                    [(key("rmse"), Some(m.rmse)), (key("mae"), Some(m.mae)), (key("r2"), m.r2)]
                };
                let each = targets.iter().flat_map(of).filter_map(|(name, value)| Some((name, value?)));
                std::iter::once(("loss".to_owned(), *loss)).chain(each).collect()
            }
            TaskMetrics::Language { loss, tokens, bytes, accuracy } => named(&[
                ("loss", Some(*loss)),
                ("perplexity", Some(loss.exp())),
                (
                    "bits_per_byte",
                    (*bytes > 0).then(|| loss * tokens / *bytes as f64 / std::f64::consts::LN_2),
                ),
                ("accuracy", Some(*accuracy)),
            ]),
        }
    }
}

impl Evaluation {
    pub fn to_json(&self) -> Value {
        let mut metrics: Map<String, Value> =
            self.metrics.values().into_iter().map(|(name, value)| (name, json!(value))).collect();
        let mut document = json!({ "samples": self.samples, "skipped": self.skipped });
        if let TaskMetrics::Classification { names, metrics: found } = &self.metrics {
            let classes: Map<String, Value> =
                names.iter().zip(&found.classes).map(|(name, class)| (name.clone(), json!(class))).collect();
            metrics.insert("classes".into(), classes.into());
            document["confusion"] = json!({ "classes": names, "matrix": found.confusion });
        }
        document["metrics"] = metrics.into();
        document
    }
}
