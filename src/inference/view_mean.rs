//! Averages the predictions of the views of a sample: probabilities of classes or labels, values of a regression.

use crate::base::features::TargetSpec;
use crate::metrics::softmax;

/// Takes the outputs of the views one after the other and returns the averaged outputs of the sample.
pub struct ViewMean {
    views: u64,
    averaged: Averaged,
    /// The sample whose views are summed, and how many of them.
    sample: u64,
    count: u64,
    sums: Vec<f64>,
    scratch: Vec<f64>,
    mean: Vec<f32>,
}

/// What the outputs of a network are averaged as.
#[derive(Clone, Copy)]
enum Averaged {
    /// Probabilities that sum to 1, by softmax.
    Classes,
    /// A probability per label, by the logistic function.
    Labels,
    Values,
}

impl Averaged {
    fn values_of(self, outputs: &[f32], into: &mut Vec<f64>) {
        if let Self::Classes = self {
            return softmax(outputs, into);
        }
        into.clear();
        into.extend(outputs.iter().map(|value| match self {
            Self::Labels => 1.0 / (1.0 + f64::exp(-f64::from(*value))),
            _ => f64::from(*value),
        }));
    }

    fn to_output(self, mean: f64) -> f32 {
        // A probability that underflowed keeps a finite logarithm.
        let log = |p: f64| p.max(f64::MIN_POSITIVE).ln();
        match self {
            Self::Classes => log(mean) as f32,
            Self::Labels => (log(mean) - log(1.0 - mean)) as f32,
            Self::Values => mean as f32,
        }
    }
}

impl ViewMean {
    pub fn new(views: u64, target: &TargetSpec) -> Self {
        let averaged = match target {
            TargetSpec::Class { .. } | TargetSpec::MixedClass { .. } => Averaged::Classes,
            TargetSpec::MultiLabel { .. } => Averaged::Labels,
            TargetSpec::Values { .. } | TargetSpec::Tokens => Averaged::Values,
        };
        let (sums, scratch, mean) = Default::default();
        Self { views, averaged, sample: 0, count: 0, sums, scratch, mean }
    }

    /// Adds the outputs of sample `id` of the dataset, which is a view. Returns the outputs of the sample after the
    /// last of its views: logits whose probabilities are the means of those of the views.
    pub fn push<'a>(&'a mut self, id: u64, outputs: &'a [f32]) -> Option<&'a [f32]> {
        if self.views == 1 {
            return Some(outputs);
        }
        let sample = id / self.views;
        if self.count == 0 || self.sample != sample {
            (self.sample, self.count) = (sample, 0);
            self.sums.clear();
            self.sums.resize(outputs.len(), 0.0);
        }
        self.averaged.values_of(outputs, &mut self.scratch);
        self.sums.iter_mut().zip(&self.scratch).for_each(|(sum, value)| *sum += value);
        self.count += 1;
        if self.count < self.views {
            return None;
        }
        self.count = 0;
        let means = self.sums.iter().map(|sum| sum / self.views as f64);
        self.mean.clear();
        self.mean.extend(means.map(|mean| self.averaged.to_output(mean)));
        Some(&self.mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_averaged_not_logits() {
        let names = vec!["a".into(), "b".into()];
        let mut mean = ViewMean::new(2, &TargetSpec::Class { names });
        let outputs = [[0.0, 4.0], [3.0, -2.0]];
        assert_eq!(mean.push(6, &outputs[0]), None);
        let merged = mean.push(7, &outputs[1]).unwrap().to_vec();
        let (mut ours, mut each) = (Vec::new(), [Vec::new(), Vec::new()]);
        softmax(&merged, &mut ours);
        outputs.iter().zip(&mut each).for_each(|(row, into)| softmax(row, into));
        for class in 0..2 {
            assert!((ours[class] - (each[0][class] + each[1][class]) / 2.0).abs() < 1e-6, "{ours:?}");
        }
        // A sample that lost a view to a bad record does not leak into the next.
        assert_eq!(mean.push(8, &[9.0, 9.0]), None);
        assert_eq!(mean.push(10, &outputs[0]), None);
        assert_eq!(mean.push(11, &outputs[1]).unwrap(), merged);
    }

    #[test]
    fn the_probability_of_each_label_is_averaged() {
        let names = vec!["a".into(), "b".into()];
        let mut mean = ViewMean::new(2, &TargetSpec::MultiLabel { names });
        assert_eq!(mean.push(0, &[0.0, 200.0]), None);
        let merged = mean.push(1, &[4.0, 200.0]).unwrap();
        let p = |logit: f32| 1.0 / (1.0 + (-logit).exp());
        assert!((p(merged[0]) - (0.5 + p(4.0)) / 2.0).abs() < 1e-6, "{merged:?}");
        assert!(p(merged[1]) == 1.0 && merged[1].is_finite(), "{merged:?}");
    }

    #[test]
    fn values_are_averaged() {
        let mut mean = ViewMean::new(3, &TargetSpec::Values { len: 1 });
        assert_eq!(mean.push(0, &[1.0]), None);
        assert_eq!(mean.push(1, &[2.0]), None);
        assert_eq!(mean.push(2, &[6.0]), Some(&[3.0][..]));
        assert_eq!(ViewMean::new(1, &TargetSpec::Values { len: 1 }).push(5, &[7.0]), Some(&[7.0][..]));
    }
}
