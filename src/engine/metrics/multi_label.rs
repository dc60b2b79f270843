//! Metrics of multi-label classification: any number of labels per sample, each predicted by a sigmoid of its own.

use std::io;

use serde::{Deserialize, Serialize};

use super::scores::ClassScores;
use super::sigmoid;

/// Counts and sums over samples.
pub struct MultiLabelSums {
    samples: u64,
    /// Samples of which every label is right.
    exact: u64,
    /// Sum over samples of the mean binary cross-entropy of their labels.
    loss: f64,
    labels: Vec<LabelCounts>,
    /// For the average precision.
    scores: Option<ClassScores>,
    probabilities: Vec<f64>,
}

#[derive(Clone, Copy, Default)]
struct LabelCounts {
    true_positives: u64,
    false_positives: u64,
    false_negatives: u64,
}

/// Metrics of one label; a quotient without samples is 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabelMetrics {
    pub precision: f64,
    pub recall: f64,
    pub f1: f64,
    /// Samples that have it.
    pub samples: u64,
    /// Area under the precision-recall curve, as steps; 0 if no sample has the label.
    pub average_precision: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MultiLabelMetrics {
    pub samples: u64,
    /// Binary cross-entropy, mean over labels and samples.
    pub loss: f64,
    /// Fraction of samples of which every label is right.
    pub accuracy: f64,
    /// Of the counts of all labels together.
    pub f1_micro: f64,
    /// Mean over labels.
    pub f1_macro: f64,
    /// Mean over labels; absent if scores were not kept.
    pub average_precision: Option<f64>,
    pub labels: Vec<LabelMetrics>,
}

impl MultiLabelSums {
    /// With `scores`, the average precision is computed too.
    pub fn new(labels: usize, scores: Option<ClassScores>) -> Self {
        Self {
            samples: 0,
            exact: 0,
            loss: 0.0,
            labels: vec![LabelCounts::default(); labels],
            scores,
            probabilities: Vec::with_capacity(labels),
        }
    }

    /// Adds a sample with these logits and truths, 1 or 0, one per label.
    pub fn push(&mut self, logits: &[f32], truths: &[f32]) -> io::Result<()> {
        let (mut loss, mut exact) = (0.0, true);
        self.probabilities.clear();
        for ((logit, truth), counts) in logits.iter().zip(truths).zip(&mut self.labels) {
            let (logit, truth, predicted) = (f64::from(*logit), *truth > 0.5, *logit > 0.0);
            // -ln(sigmoid(x)) is ln(1 + e^-x), of which the exponential must not overflow.
            let against = if truth { -logit } else { logit };
            loss += against.max(0.0) + (-against.abs()).exp().ln_1p();
            exact &= truth == predicted;
            counts.true_positives += u64::from(truth && predicted);
            counts.false_positives += u64::from(!truth && predicted);
            counts.false_negatives += u64::from(truth && !predicted);
            self.probabilities.push(sigmoid(logit));
        }
        self.samples += 1;
        self.exact += u64::from(exact);
        self.loss += loss / self.labels.len().max(1) as f64;
        match &mut self.scores {
            Some(scores) => scores.push_labels(&self.probabilities, truths),
            None => Ok(()),
        }
    }

    pub fn finish(self) -> io::Result<MultiLabelMetrics> {
        let precisions = self.scores.map(ClassScores::average_precisions).transpose()?;
        let ratio = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        let f1 = |c: &LabelCounts| {
            ratio(2 * c.true_positives, 2 * c.true_positives + c.false_positives + c.false_negatives)
        };
        let label = |(i, c): (usize, &LabelCounts)| LabelMetrics {
            precision: ratio(c.true_positives, c.true_positives + c.false_positives),
            recall: ratio(c.true_positives, c.true_positives + c.false_negatives),
            f1: f1(c),
            samples: c.true_positives + c.false_negatives,
            average_precision: precisions.as_ref().map(|precisions| precisions[i]),
        };
        let all = self.labels.iter().fold(LabelCounts::default(), |sum, c| LabelCounts {
            true_positives: sum.true_positives + c.true_positives,
            false_positives: sum.false_positives + c.false_positives,
            false_negatives: sum.false_negatives + c.false_negatives,
        });
        let (samples, count) = (self.samples as f64, self.labels.len().max(1) as f64);
        Ok(MultiLabelMetrics {
            samples: self.samples,
            loss: self.loss / samples,
            accuracy: self.exact as f64 / samples,
            f1_micro: f1(&all),
            f1_macro: self.labels.iter().map(f1).sum::<f64>() / count,
            average_precision: precisions.as_ref().map(|all| all.iter().sum::<f64>() / count),
            labels: self.labels.iter().enumerate().map(label).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From scikit-learn 1.9 with these truths and sigmoids of these logits: f1_score(average="micro"), "macro",
    /// average_precision_score(average="macro"), accuracy_score.
    #[test]
    fn values_are_those_of_scikit_learn() {
        let truths = [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]];
        let logits = [[2.0, -1.0, -0.5], [0.5, 1.0, -2.0], [1.0, -0.5, 0.25], [-1.0, -0.25, -1.0]];
        for bytes in [1 << 20, 1] {
            let scores = ClassScores::new(3, 4, bytes);
            let mut sums = MultiLabelSums::new(3, Some(scores));
            logits.iter().zip(&truths).for_each(|(logits, truths)| sums.push(logits, truths).unwrap());
            let found = sums.finish().unwrap();
            // Counts: label 0 has 2 hits and 1 false alarm, label 1 has 1 hit and 1 miss, label 2 a false alarm and a
            // miss.
            assert!((found.f1_micro - 6.0 / 10.0).abs() < 1e-12, "{found:?}");
            assert!((found.f1_macro - (0.8 + 2.0 / 3.0) / 3.0).abs() < 1e-12);
            assert_eq!(found.accuracy, 0.25);
            // Label 0: 1; label 1: 1/2 + 1/2 x 2/3; label 2: second of the ranking.
            let wanted = (1.0 + (0.5 + 0.5 * 2.0 / 3.0) + 0.5) / 3.0;
            assert!((found.average_precision.unwrap() - wanted).abs() < 1e-6, "{found:?}");
        }
    }

    #[test]
    fn the_loss_does_not_overflow() {
        let mut sums = MultiLabelSums::new(2, None);
        sums.push(&[1000.0, -1000.0], &[0.0, 0.0]).unwrap();
        let found = sums.finish().unwrap();
        assert_eq!(found.loss, 500.0);
        assert_eq!(found.average_precision, None);
    }
}
