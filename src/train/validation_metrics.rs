//! Metrics of the validation set during training: those that the job requests, computed from the sums of the loss where
//! these suffice and otherwise from the outputs of the model, in memory that the plan counts.

use std::collections::BTreeMap;

use super::Failure;
use super::run::HISTOGRAM_BYTES;
use super::setup::Setup;
use crate::base::features::IGNORE_INDEX;
use crate::base::features::{Features, TargetSpec};
use crate::data::{BatchValues, Dataset, HostBatch};
use crate::job::{Job, Metric};
use crate::layers::loss::MetricSums;
use crate::metrics::detail::TaskDetail;
use crate::metrics::task::{ScoreMemory, TargetRows, TaskSums, bits_per_byte};
use crate::models::ModelError;

/// Bytes of prediction scores kept in memory during a run; the rest goes to a temporary file.
const SCORE_BYTES: usize = 16 << 20;

/// What an evaluation computes besides the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestedMetrics {
    pub metrics: Vec<Metric>,
    /// Whether the run keeps the detail of evaluations.
    detail: bool,
    /// Host bytes of what an evaluation computes besides the sums of the loss.
    pub bytes: u64,
}

impl RequestedMetrics {
    /// The metrics of a job for samples of these features: those it names, or the usual ones of its task.
    pub fn of(job: &Job, features: &Features, valid_samples: u64) -> Result<Self, ModelError> {
        let known = task_metrics(&features.target);
        let mut metrics = match &job.eval.metrics {
            Some(metrics) => metrics.clone(),
            None => default_metrics(&features.target).to_vec(),
        };
        let watched = [("checkpoint.best", Some(job.checkpoint.best)), ("stop.metric", job.stop.metric)];
        let watched = watched.into_iter().filter_map(|(key, best)| Some((key, best?.metric()?)));
        let named = metrics.iter().map(|metric| ("eval.metrics", *metric)).chain(watched.clone());
        if let Some((key, metric)) = named.into_iter().find(|(_, metric)| !known.contains(metric)) {
            let names: Vec<String> = known.iter().map(|metric| format!("\"{}\"", metric.name())).collect();
            return Err(ModelError::Metric {
                key,
                metric: metric.name(),
                got: crate::models::describe_target(&features.target),
                known: names.join(", "),
            });
        }
        for (_, metric) in watched {
            if !metrics.contains(&metric) {
                metrics.push(metric);
            }
        }
        let detail = TaskDetail::exists_for(&features.target);
        let mut requested = Self { metrics, detail, bytes: 0 };
        if requested.needs_outputs() {
            requested.bytes = TaskSums::bytes(features, valid_samples, requested.score_memory());
        }
        if detail {
            requested.bytes += TaskDetail::bytes(features);
        }
        if job.log.histograms {
            requested.bytes += HISTOGRAM_BYTES;
        }
        Ok(requested)
    }

    /// Whether the metrics, or the detail, need the outputs of the model.
    pub fn needs_outputs(&self) -> bool {
        self.detail || self.metrics.iter().any(|metric| metric.needs_outputs())
    }

    fn score_memory(&self) -> ScoreMemory {
        let ranked = |metric: &Metric| matches!(metric, Metric::RocAuc | Metric::AveragePrecision);
        if self.metrics.iter().any(ranked) { ScoreMemory::Bytes(SCORE_BYTES) } else { ScoreMemory::None }
    }
}

/// The metrics that a task has.
fn task_metrics(target: &TargetSpec) -> &'static [Metric] {
    match target {
        TargetSpec::Class { .. } | TargetSpec::MixedClass { .. } => &[
            Metric::Accuracy,
            Metric::Top5,
            Metric::Precision,
            Metric::Recall,
            Metric::F1,
            Metric::RocAuc,
            Metric::LogLoss,
            Metric::CalibrationError,
        ],
        TargetSpec::MultiLabel { .. } => {
            &[Metric::Accuracy, Metric::F1Micro, Metric::F1Macro, Metric::AveragePrecision]
        }
        TargetSpec::Values { .. } => &[Metric::Rmse, Metric::Mae, Metric::R2],
        TargetSpec::Tokens => &[Metric::Accuracy, Metric::Top5, Metric::Perplexity, Metric::BitsPerByte],
    }
}

/// The metrics of a job that names none.
fn default_metrics(target: &TargetSpec) -> &'static [Metric] {
    match target {
        TargetSpec::Class { .. } | TargetSpec::MixedClass { .. } | TargetSpec::Tokens => &[Metric::Accuracy],
        TargetSpec::MultiLabel { .. } => &[Metric::F1Micro, Metric::F1Macro],
        TargetSpec::Values { .. } => &[Metric::Rmse],
    }
}

/// The metrics of an evaluation in progress.
pub struct ValidationMetrics<'a> {
    requested: &'a RequestedMetrics,
    pub sums: MetricSums,
    outputs: Option<TaskSums>,
    /// Bytes of text that the targets stand for.
    bytes: u64,
}

impl<'a> ValidationMetrics<'a> {
    pub fn new(setup: &'a Setup) -> Self {
        let (requested, valid) = (&setup.metrics, &setup.datasets.valid);
        let outputs = requested.needs_outputs().then(|| {
            TaskSums::new(valid.features(), setup.target_scales(), valid.len(), requested.score_memory())
        });
        Self { requested, sums: MetricSums::default(), outputs: outputs.flatten(), bytes: 0 }
    }

    /// Adds a batch: the sums of its loss, and the outputs of the model if they are needed.
    pub fn push(
        &mut self,
        dataset: &dyn Dataset,
        batch: &HostBatch,
        sums: MetricSums,
        outputs: &[f32],
    ) -> Result<(), Failure> {
        self.sums += sums;
        if self.requested.metrics.contains(&Metric::BitsPerByte) {
            self.bytes += target_bytes(dataset, batch);
        }
        match &mut self.outputs {
            Some(metrics) => metrics.push(outputs, target_rows(batch)).map_err(score_error),
            None => Ok(()),
        }
    }

    /// The values by name, such as `valid.accuracy`, and the detail of the task, if it has one.
    pub fn finish(self) -> Result<(BTreeMap<String, f64>, Option<TaskDetail>), Failure> {
        let (sums, fraction) = (self.sums, |n: u64| n as f64 / self.sums.count as f64);
        let found = self.outputs.map(TaskSums::finish).transpose().map_err(score_error)?;
        let detail = found.as_ref().filter(|_| self.requested.detail).and_then(TaskDetail::of);
        let found = found.map_or_else(Vec::new, |found| found.values());
        let mut values = BTreeMap::from([("valid.loss".to_owned(), super::run::mean_loss(&sums))]);
        for metric in &self.requested.metrics {
            let name = metric.name();
            let value = match metric {
                Metric::Accuracy => Some(fraction(sums.top1)),
                Metric::Top5 => Some(fraction(sums.top5)),
                Metric::Perplexity => Some(super::run::mean_loss(&sums).exp()),
                Metric::BitsPerByte => Some(bits_per_byte(sums.loss, self.bytes).unwrap_or(f64::NAN)),
                _ => None,
            };
            if let Some(value) = value {
                values.insert(format!("valid.{name}"), value);
                continue;
            }
            // A metric without a value, such as the ROC AUC of one class, is not a number.
            values.insert(format!("valid.{name}"), f64::NAN);
            let of_target = format!("{name}.");
            let own = found.iter().filter(|(found, _)| found == name || found.starts_with(&of_target));
            values.extend(own.map(|(found, value)| (format!("valid.{found}"), *value)));
        }
        Ok((values, detail))
    }
}

/// The targets of a batch, for metrics.
pub fn target_rows(batch: &HostBatch) -> TargetRows<'_> {
    match &batch.targets {
        BatchValues::U32(classes) => TargetRows::Classes(classes),
        BatchValues::F32(values) => TargetRows::Values(values),
        BatchValues::U8(..) => TargetRows::Values(&[]),
    }
}

/// Bytes of the text that the targets of a batch stand for; 0 if they stand for none.
pub fn target_bytes(dataset: &dyn Dataset, batch: &HostBatch) -> u64 {
    let BatchValues::U32(targets) = &batch.targets else { return 0 };
    let row = targets.len() / batch.ids.len().max(1);
    let text = |row: &[u32]| {
        let ids: Vec<u32> = row.iter().copied().filter(|id| *id != IGNORE_INDEX).collect();
        dataset.decode_tokens(&ids).map_or(0, |text| text.len() as u64)
    };
    targets.chunks_exact(row.max(1)).map(text).sum()
}

pub fn score_error(source: std::io::Error) -> Failure {
    Failure::Io { what: "keep the scores in", path: std::env::temp_dir(), source }
}
