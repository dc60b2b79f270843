//! What people look at in an evaluation besides its metrics: which classes are confused, how well confidences are
//! calibrated, how far predictions are off. Bounded in size, whatever the number of classes and samples.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::{Deserialize, Serialize};

use super::classification::{CalibrationBin, ClassMetrics, ClassificationMetrics};
use super::multi_label::{LabelMetrics, MultiLabelMetrics};
use super::regression::RegressionMetrics;
use super::residuals::{ResidualSums, Residuals};
use super::task::TaskMetrics;
use crate::base::features::{Features, TargetSpec};

/// Classes whose confusion matrix is kept whole; of more, the worst classes and the most confused pairs.
pub const MAX_LISTED: usize = 64;
/// Pairs of classes that are kept.
const MAX_PAIRS: usize = 50;
/// Classes above which a matrix of all pairs would cost too much memory during a run: 8 MiB.
const MAX_CLASSES: usize = 1024;
/// Targets of a regression whose residuals are kept.
pub const MAX_TARGETS: usize = 8;

/// The detail of one evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub enum TaskDetail {
    Classification(ClassificationDetail),
    MultiLabel(MultiLabelDetail),
    Regression(RegressionDetail),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassificationDetail {
    pub samples: u64,
    pub accuracy: f64,
    pub calibration_error: f64,
    pub num_classes: usize,
    /// All classes in their order; of more than 64, those with the lowest F1, lowest first.
    pub classes: Vec<Named<ClassMetrics>>,
    /// Rows are true classes, columns predicted ones; absent with more than 64 classes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Vec<Vec<u64>>>,
    /// The most frequent errors, most frequent first.
    pub confused: Vec<ConfusedPair>,
    pub calibration: Vec<CalibrationBin>,
}

/// Samples of one class that were predicted as another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfusedPair {
    pub truth: String,
    pub predicted: String,
    pub samples: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MultiLabelDetail {
    pub samples: u64,
    pub num_labels: usize,
    /// All labels in their order; of more than 64, those with the lowest F1, lowest first.
    pub labels: Vec<Named<LabelMetrics>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegressionDetail {
    pub num_targets: usize,
    /// The first eight at most.
    pub targets: Vec<TargetDetail>,
}

/// The metrics and the errors of one target, in its units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetDetail {
    pub name: String,
    #[serde(flatten)]
    pub metrics: RegressionMetrics,
    pub residuals: Residuals,
}

/// The metrics of a class or a label, and its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Named<T> {
    pub name: String,
    #[serde(flatten)]
    pub metrics: T,
}

impl TaskDetail {
    /// Whether evaluations during a run have a detail for this target.
    pub fn exists_for(target: &TargetSpec) -> bool {
        match target {
            TargetSpec::Class { names } | TargetSpec::MixedClass { names } => names.len() <= MAX_CLASSES,
            TargetSpec::MultiLabel { .. } | TargetSpec::Values { .. } => true,
            TargetSpec::Tokens => false,
        }
    }

    /// Bytes that a detail, its text and the one it replaces take at most.
    pub fn bytes(features: &Features) -> u64 {
        let names: usize = features.target.names().iter().map(String::len).sum();
        // Two of them as values, and their text: counts are few digits, numbers seventeen.
        let document = match &features.target {
            TargetSpec::Values { len } => len.min(&MAX_TARGETS) * (48 << 10),
            target => {
                let listed = target.names().len().min(MAX_LISTED);
                40 * listed * listed + 1024 * listed
            }
        };
        (document + 8 * names + (16 << 10)) as u64
    }

    /// The detail behind these metrics; `None` if there were no samples, if a value is not finite, or for text.
    pub fn of(metrics: &TaskMetrics) -> Option<Self> {
        match metrics {
            TaskMetrics::Classification { names, metrics } => {
                let is_finite = metrics.accuracy.is_finite() && metrics.calibration_error.is_finite();
                is_finite.then(|| Self::Classification(classification(names, metrics)))
            }
            TaskMetrics::MultiLabel { names, metrics } if metrics.samples > 0 => {
                Some(Self::MultiLabel(multi_label(names, metrics)))
            }
            TaskMetrics::Regression { targets, residuals, .. } => {
                let detail = |((name, metrics), residuals): (&(String, RegressionMetrics), &Residuals)| {
                    TargetDetail { name: name.clone(), metrics: *metrics, residuals: residuals.clone() }
                };
                let is_finite = targets.iter().all(|(_, metrics)| metrics.rmse.is_finite());
                is_finite.then(|| {
                    let listed = targets.iter().zip(residuals).map(detail).collect();
                    Self::Regression(RegressionDetail { num_targets: targets.len(), targets: listed })
                })
            }
            TaskMetrics::MultiLabel { .. } | TaskMetrics::Language { .. } => None,
        }
    }
}

/// The sums of the targets whose residuals are kept.
pub fn residual_sums(targets: usize, samples: u64) -> Vec<ResidualSums> {
    vec![ResidualSums::new(samples); targets.min(MAX_TARGETS)]
}

/// All in their order if they are few; else those with samples that score lowest.
fn listed<T: Clone>(names: &[String], all: &[T], f1: fn(&T) -> f64, samples: fn(&T) -> u64) -> Vec<Named<T>> {
    let mut order: Vec<usize> = (0..all.len()).collect();
    if order.len() > MAX_LISTED {
        order.retain(|i| samples(&all[*i]) > 0);
        order.sort_by(|a, b| f1(&all[*a]).total_cmp(&f1(&all[*b])).then(a.cmp(b)));
        order.truncate(MAX_LISTED);
    }
    order.into_iter().map(|i| Named { name: names[i].clone(), metrics: all[i].clone() }).collect()
}

fn classification(names: &[String], metrics: &ClassificationMetrics) -> ClassificationDetail {
    let is_whole = names.len() <= MAX_LISTED;
    ClassificationDetail {
        samples: metrics.samples,
        accuracy: metrics.accuracy,
        calibration_error: metrics.calibration_error,
        num_classes: names.len(),
        classes: listed(names, &metrics.classes, |class| class.f1, |class| class.samples),
        confusion: is_whole.then(|| metrics.confusion.rows().map(<[u64]>::to_vec).collect()),
        confused: confused(names, metrics),
        calibration: metrics.calibration.clone(),
    }
}

fn confused(names: &[String], metrics: &ClassificationMetrics) -> Vec<ConfusedPair> {
    let mut most = BinaryHeap::new();
    for (truth, row) in metrics.confusion.rows().enumerate() {
        let errors = row.iter().enumerate().filter(|(predicted, count)| *predicted != truth && **count > 0);
        for (predicted, count) in errors {
            // The rarest is on top, and of equals the last.
            most.push((Reverse(*count), truth, predicted));
            if most.len() > MAX_PAIRS {
                most.pop();
            }
        }
    }
    let pair = |(Reverse(samples), truth, predicted): (Reverse<u64>, usize, usize)| ConfusedPair {
        truth: names[truth].clone(),
        predicted: names[predicted].clone(),
        samples,
    };
    most.into_sorted_vec().into_iter().map(pair).collect()
}

fn multi_label(names: &[String], metrics: &MultiLabelMetrics) -> MultiLabelDetail {
    MultiLabelDetail {
        samples: metrics.samples,
        num_labels: names.len(),
        labels: listed(names, &metrics.labels, |label| label.f1, |label| label.samples),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::classification::ClassificationSums;

    /// Each class has one sample, predicted as the next class but for those in `right`.
    fn detail(classes: usize, right: impl Fn(usize) -> bool) -> ClassificationDetail {
        let mut sums = ClassificationSums::new(classes, None);
        for class in 0..classes {
            let mut logits = vec![0.0; classes];
            logits[if right(class) { class } else { (class + 1) % classes }] = 9.0;
            sums.push(&logits, class as u32).unwrap();
        }
        let names = (0..classes).map(|class| format!("c{class}")).collect();
        let metrics = TaskMetrics::Classification { names, metrics: sums.finish().unwrap() };
        match TaskDetail::of(&metrics) {
            Some(TaskDetail::Classification(detail)) => detail,
            _ => panic!("no detail"),
        }
    }

    #[test]
    fn few_classes_are_kept_whole_and_in_order() {
        let found = detail(3, |class| class != 1);
        assert_eq!(found.confusion, Some(vec![vec![1, 0, 0], vec![0, 0, 1], vec![0, 0, 1]]));
        let pair = ConfusedPair { truth: "c1".into(), predicted: "c2".into(), samples: 1 };
        assert_eq!(found.confused, [pair]);
        assert_eq!(
            found.classes.iter().map(|class| class.metrics.f1).collect::<Vec<_>>(),
            [1.0, 0.0, 2.0 / 3.0]
        );
        assert_eq!((found.calibration.len(), found.calibration[14].samples), (15, 3));
        assert!((found.calibration[14].accuracy - 2.0 / 3.0).abs() < 1e-12);
    }

    /// A thousand classes are as small as a hundred, and the worst are among those that are kept.
    #[test]
    fn many_classes_are_cut_to_the_worst() {
        let found = detail(1000, |class| class != 990);
        assert_eq!((found.num_classes, found.classes.len(), found.confusion.as_ref()), (1000, 64, None));
        assert_eq!((found.classes[0].name.as_str(), found.classes[1].name.as_str()), ("c990", "c991"));
        let all_wrong = detail(1000, |_| false);
        assert_eq!(all_wrong.confused.len(), 50);
        assert_eq!(all_wrong.confused[49].truth, "c49", "the first of equals");
        let text = serde_json::to_string(&TaskDetail::Classification(all_wrong)).unwrap();
        assert!(text.len() < 16_000, "{}", text.len());
    }

    #[test]
    fn a_detail_is_read_as_it_was_written() {
        let written = TaskDetail::Classification(detail(70, |class| class % 3 > 0));
        let text = serde_json::to_string(&written).unwrap();
        assert_eq!(serde_json::from_str::<TaskDetail>(&text).unwrap(), written);
    }
}
