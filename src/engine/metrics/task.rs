//! The metrics of a task, from the outputs of a model and the targets of its samples, batch by batch.

use std::io;

use super::classification::{ClassificationMetrics, ClassificationSums};
use super::detail::{self, MAX_TARGETS};
use super::multi_label::{MultiLabelMetrics, MultiLabelSums};
use super::regression::{RegressionMetrics, RegressionSums};
use super::residuals::{ResidualSums, Residuals};
use super::scores::{self, ClassScores};
use crate::base::features::{Features, TargetSpec};

/// What turns a prediction back into the units of its target.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetScale {
    pub name: String,
    pub mean: f64,
    pub std: f64,
}

impl TargetScale {
    /// A value as the model predicts it, in the units of the target.
    pub fn restore(&self, value: f32) -> f64 {
        f64::from(value) * self.std + self.mean
    }
}

/// The targets of a batch, row-major; a sample weight may follow those of each sample, which metrics do not read.
#[derive(Clone, Copy, Debug)]
pub enum TargetRows<'a> {
    Classes(&'a [u32]),
    Values(&'a [f32]),
}

impl TargetRows<'_> {
    /// The targets of sample `i` of `rows`.
    pub fn row(&self, i: usize, rows: usize) -> Self {
        match self {
            Self::Classes(all) => Self::Classes(&all[i * (all.len() / rows)..][..all.len() / rows]),
            Self::Values(all) => Self::Values(&all[i * (all.len() / rows)..][..all.len() / rows]),
        }
    }
}

/// What the metrics of a task are computed from.
pub enum TaskSums {
    Classification {
        names: Vec<String>,
        sums: Box<ClassificationSums>,
    },
    MultiLabel {
        names: Vec<String>,
        sums: MultiLabelSums,
    },
    Regression {
        targets: Vec<TargetScale>,
        sums: Vec<RegressionSums>,
        /// Of the first targets.
        residuals: Vec<ResidualSums>,
        squared: f64,
        values: u64,
    },
}

/// Memory for scores; samples beyond it go to a temporary file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreMemory {
    /// No metric needs them.
    None,
    Bytes(usize),
}

impl TaskSums {
    /// For `samples` samples of these features; `None` if the target is text, whose metrics follow from the loss.
    /// `scales` are those of a regression's targets.
    pub fn new(
        features: &Features,
        scales: Vec<TargetScale>,
        samples: u64,
        memory: ScoreMemory,
    ) -> Option<Self> {
        let names = features.target.names();
        let scores = match memory {
            ScoreMemory::None => None,
            ScoreMemory::Bytes(bytes) => Some(ClassScores::new(names.len(), samples, bytes)),
        };
        match features.target {
            TargetSpec::Class { .. } | TargetSpec::MixedClass { .. } => Some(Self::Classification {
                names: names.to_vec(),
                sums: Box::new(ClassificationSums::new(names.len(), scores)),
            }),
            TargetSpec::MultiLabel { .. } => Some(Self::MultiLabel {
                names: names.to_vec(),
                sums: MultiLabelSums::new(names.len(), scores),
            }),
            TargetSpec::Values { len } => Some(Self::Regression {
                targets: scales,
                sums: vec![RegressionSums::default(); len],
                residuals: detail::residual_sums(len, samples),
                squared: 0.0,
                values: 0,
            }),
            TargetSpec::Tokens => None,
        }
    }

    /// Bytes that the sums take at most, for `samples` samples.
    pub fn bytes(features: &Features, samples: u64, memory: ScoreMemory) -> u64 {
        let outputs = features.target.names().len().max(features.unweighted_target_len());
        let counts = match features.target {
            TargetSpec::Class { .. } | TargetSpec::MixedClass { .. } => 8 * outputs * outputs,
            TargetSpec::Values { len } => len.min(MAX_TARGETS) * ResidualSums::BYTES,
            _ => 0,
        };
        let names: usize = features.target.names().iter().map(|name| name.len() + size_of::<String>()).sum();
        let scores = match memory {
            ScoreMemory::None => 0,
            ScoreMemory::Bytes(bytes) => scores::held_bytes(outputs, samples, bytes),
        };
        (counts + names + 160 * outputs + (16 << 10)) as u64 + scores
    }

    /// Adds the samples of a batch.
    pub fn push(&mut self, outputs: &[f32], targets: TargetRows) -> io::Result<()> {
        match (self, targets) {
            (Self::Classification { names, sums }, TargetRows::Classes(classes)) => {
                let rows = outputs.chunks_exact(names.len());
                let per_row = classes.len() / rows.len().max(1);
                let mut rows = rows.zip(classes.chunks_exact(per_row.max(1)));
                rows.try_for_each(|(row, target)| sums.push(row, target[0]))
            }
            (Self::MultiLabel { names, sums }, TargetRows::Values(truths)) => {
                let rows = outputs.chunks_exact(names.len());
                let per_row = truths.len() / rows.len().max(1);
                let mut rows = rows.zip(truths.chunks_exact(per_row.max(1)));
                rows.try_for_each(|(row, truths)| sums.push(row, truths))
            }
            (Self::Regression { targets, sums, residuals, squared, values }, TargetRows::Values(truths)) => {
                let rows = outputs.chunks_exact(sums.len());
                let per_row = truths.len() / rows.len().max(1);
                for (row, truths) in rows.zip(truths.chunks_exact(per_row.max(1))) {
                    let mut residuals = residuals.iter_mut();
                    for (((predicted, truth), scale), sums) in
                        row.iter().zip(truths).zip(&*targets).zip(&mut *sums)
                    {
                        *squared += (f64::from(*predicted) - f64::from(*truth)).powi(2);
                        *values += 1;
                        let (predicted, truth) = (scale.restore(*predicted), scale.restore(*truth));
                        sums.push(predicted, truth);
                        residuals.next().into_iter().for_each(|sums| sums.push(predicted, truth));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub fn finish(self) -> io::Result<TaskMetrics> {
        Ok(match self {
            Self::Classification { names, sums } => {
                TaskMetrics::Classification { names, metrics: sums.finish()? }
            }
            Self::MultiLabel { names, sums } => TaskMetrics::MultiLabel { names, metrics: sums.finish()? },
            Self::Regression { targets, sums, residuals, squared, values } => TaskMetrics::Regression {
                targets: targets
                    .into_iter()
                    .map(|target| target.name)
                    .zip(sums.iter().map(RegressionSums::finish))
                    .collect(),
                residuals: residuals.into_iter().map(ResidualSums::finish).collect(),
                loss: squared / values as f64,
            },
        })
    }
}

/// The metrics of an evaluation.
pub enum TaskMetrics {
    Classification {
        names: Vec<String>,
        metrics: ClassificationMetrics,
    },
    MultiLabel {
        names: Vec<String>,
        metrics: MultiLabelMetrics,
    },
    /// Per target: its name and its metrics; the residuals of the first targets; and the mean squared error of
    /// standardized values, as trained on.
    Regression {
        targets: Vec<(String, RegressionMetrics)>,
        residuals: Vec<Residuals>,
        loss: f64,
    },
    Language {
        loss: f64,
        tokens: f64,
        bytes: u64,
        accuracy: f64,
    },
}

impl TaskMetrics {
    /// The metrics by name, as in the job's `[eval] metrics`. Those of several regression targets are means over them,
    /// as in scikit-learn, followed by those of each target, called `rmse.NAME`.
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
            TaskMetrics::MultiLabel { metrics: m, .. } => named(&[
                ("loss", Some(m.loss)),
                ("accuracy", Some(m.accuracy)),
                ("f1_micro", Some(m.f1_micro)),
                ("f1_macro", Some(m.f1_macro)),
                ("average_precision", m.average_precision),
            ]),
            TaskMetrics::Regression { targets, loss, .. } => {
                let several = targets.len() > 1;
                let of = |m: &RegressionMetrics| [("rmse", Some(m.rmse)), ("mae", Some(m.mae)), ("r2", m.r2)];
                let mean = |i: usize| {
                    let values = targets.iter().filter_map(|(_, m)| of(m)[i].1);
                    let count = values.clone().count();
                    (count == targets.len()).then(|| values.sum::<f64>() / count as f64)
                };
                let mut values = vec![("loss".to_owned(), *loss)];
                let means = ["rmse", "mae", "r2"].into_iter().enumerate();
                values.extend(means.filter_map(|(i, name)| Some((name.to_owned(), mean(i)?))));
                let each = targets.iter().filter(|_| several).flat_map(|(target, m)| {
                    of(m).map(|(metric, value)| (format!("{metric}.{target}"), value))
                });
                values.extend(each.filter_map(|(name, value)| Some((name, value?))));
                values
            }
            TaskMetrics::Language { loss, tokens, bytes, accuracy } => named(&[
                ("loss", Some(*loss)),
                ("perplexity", Some(loss.exp())),
                ("bits_per_byte", bits_per_byte(loss * tokens, *bytes)),
                ("accuracy", Some(*accuracy)),
            ]),
        }
    }
}

/// Bits per byte of text with this summed loss; `None` if the tokens stand for no text.
pub fn bits_per_byte(loss: f64, bytes: u64) -> Option<f64> {
    (bytes > 0).then(|| loss / bytes as f64 / std::f64::consts::LN_2)
}
