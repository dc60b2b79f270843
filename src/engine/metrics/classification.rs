//! Metrics of single-label classification.

use std::io;

use serde::{Deserialize, Serialize, Serializer};

use super::scores::ClassScores;
use super::{argmax, softmax};

/// Bins of the confidence, equally wide, for the calibration error.
const CALIBRATION_BINS: usize = 15;

/// Counts and sums over samples, from which every metric but the ROC AUC follows.
pub struct ClassificationSums {
    classes: usize,
    samples: u64,
    top5: u64,
    log_loss: f64,
    /// `classes` rows of the true class, `classes` columns of the predicted one.
    confusion: Vec<u64>,
    bins: [ConfidenceSums; CALIBRATION_BINS],
    scores: Option<ClassScores>,
    probabilities: Vec<f64>,
}

#[derive(Clone, Copy, Default)]
struct ConfidenceSums {
    samples: u64,
    correct: u64,
    confidence: f64,
}

/// The samples whose confidence, the probability of the predicted class, lies in one of 15 equal intervals of (0, 1].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationBin {
    pub samples: u64,
    /// Mean of the confidence; 0 without samples.
    pub confidence: f64,
    /// Fraction predicted correctly; 0 without samples.
    pub accuracy: f64,
}

/// Samples by true class (rows) and predicted class (columns).
#[derive(Clone, Debug, PartialEq)]
pub struct Confusion {
    classes: usize,
    counts: Vec<u64>,
}

impl Confusion {
    pub fn rows(&self) -> impl Iterator<Item = &[u64]> {
        self.counts.chunks(self.classes.max(1))
    }
}

impl Serialize for Confusion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.rows())
    }
}

/// Metrics of one class against the rest; a quotient without samples is 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassMetrics {
    pub precision: f64,
    pub recall: f64,
    pub f1: f64,
    /// Samples of this class.
    pub samples: u64,
    /// `None` if all samples, or none, are of this class.
    pub roc_auc: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassificationMetrics {
    pub samples: u64,
    pub accuracy: f64,
    /// With fewer than six classes it is 1.
    pub top5: f64,
    /// Mean of `-ln(probability of the true class)`.
    pub log_loss: f64,
    /// Expected calibration error: the mean distance of confidence and accuracy over 15 bins of the confidence.
    pub calibration_error: f64,
    pub macro_precision: f64,
    pub macro_recall: f64,
    pub macro_f1: f64,
    /// Mean over the classes that have one, each against the rest.
    pub roc_auc: Option<f64>,
    pub classes: Vec<ClassMetrics>,
    pub confusion: Confusion,
    /// By confidence, lowest first.
    pub calibration: Vec<CalibrationBin>,
}

impl ClassificationSums {
    /// With `scores`, the ROC AUC is computed too.
    pub fn new(classes: usize, scores: Option<ClassScores>) -> Self {
        Self {
            classes,
            samples: 0,
            top5: 0,
            log_loss: 0.0,
            confusion: vec![0; classes * classes],
            bins: Default::default(),
            scores,
            probabilities: Vec::new(),
        }
    }

    /// Adds a sample of class `truth` with these logits, one per class.
    pub fn push(&mut self, logits: &[f32], truth: u32) -> io::Result<()> {
        let truth = truth as usize;
        let predicted = argmax(logits);
        softmax(logits, &mut self.probabilities);
        self.samples += 1;
        self.confusion[truth * self.classes + predicted] += 1;
        // As in the training metrics: classes with a larger logit come before it, and equal ones of a lower index.
        let before =
            |(i, logit): (usize, &f32)| *logit > logits[truth] || (*logit == logits[truth] && i < truth);
        self.top5 += u64::from(logits.iter().enumerate().filter(|at| before(*at)).count() < 5);
        self.log_loss -= self.probabilities[truth].max(f64::MIN_POSITIVE).ln();
        let confidence = self.probabilities[predicted];
        let bin = ((confidence * CALIBRATION_BINS as f64).ceil() as usize).clamp(1, CALIBRATION_BINS) - 1;
        let bin = &mut self.bins[bin];
        bin.samples += 1;
        bin.correct += u64::from(predicted == truth);
        bin.confidence += confidence;
        match &mut self.scores {
            Some(scores) => scores.push(&self.probabilities, truth as u32),
            None => Ok(()),
        }
    }

    pub fn finish(mut self) -> io::Result<ClassificationMetrics> {
        let n = self.classes;
        let aucs = match self.scores.take() {
            Some(scores) => scores.roc_aucs()?,
            None => vec![None; n],
        };
        let count = |truth: usize, predicted: usize| self.confusion[truth * n + predicted];
        let ratio = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        let class = |c: usize| {
            let hits = count(c, c);
            let (of_class, as_class) = ((0..n).map(|p| count(c, p)).sum(), (0..n).map(|t| count(t, c)).sum());
            ClassMetrics {
                precision: ratio(hits, as_class),
                recall: ratio(hits, of_class),
                f1: ratio(2 * hits, of_class + as_class),
                samples: of_class,
                roc_auc: aucs[c],
            }
        };
        let classes: Vec<ClassMetrics> = (0..n).map(class).collect();
        // As scikit-learn: over the classes that occur, as truth or as prediction.
        let occurs = |c: &usize| (0..n).any(|other| count(*c, other) + count(other, *c) > 0);
        let present: Vec<usize> = (0..n).filter(occurs).collect();
        let mean = |of: fn(&ClassMetrics) -> f64| {
            present.iter().map(|c| of(&classes[*c])).sum::<f64>() / present.len().max(1) as f64
        };
        let known: Vec<f64> = aucs.iter().flatten().copied().collect();
        let samples = self.samples as f64;
        let correct: u64 = (0..n).map(|c| count(c, c)).sum();
        let gap = |bin: &ConfidenceSums| (bin.correct as f64 - bin.confidence).abs();
        let bin = |bin: &ConfidenceSums| CalibrationBin {
            samples: bin.samples,
            confidence: bin.confidence / bin.samples.max(1) as f64,
            accuracy: ratio(bin.correct, bin.samples),
        };
        Ok(ClassificationMetrics {
            samples: self.samples,
            accuracy: correct as f64 / samples,
            top5: self.top5 as f64 / samples,
            log_loss: self.log_loss / samples,
            calibration_error: self.bins.iter().map(gap).sum::<f64>() / samples,
            macro_precision: mean(|class| class.precision),
            macro_recall: mean(|class| class.recall),
            macro_f1: mean(|class| class.f1),
            roc_auc: (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64),
            classes,
            calibration: self.bins.iter().map(bin).collect(),
            // Moved, because that of many classes is large.
            confusion: Confusion { classes: n, counts: self.confusion },
        })
    }
}
