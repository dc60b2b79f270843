//! When a run ends before its last update: a pure function of what its evaluations found and of the time it took.

use serde::{Deserialize, Serialize};

use crate::base::units::counted;
use crate::job::{BestMetric, StopConfig};

/// What the evaluations of a run found so far; part of its checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StopProgress {
    /// Best value of the watched metric, by at least `min_delta` each time.
    best: Option<f64>,
    /// Last value of the metric.
    last: Option<f64>,
    /// Evaluations in a row that did not improve it.
    evaluations_without: u64,
}

/// Why a run stops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StopReason {
    /// This many evaluations in a row did not improve the metric.
    Patience(u64),
    /// The metric has this value.
    Target(f64),
    /// It took this many minutes.
    Time(f64),
}

impl StopProgress {
    /// Counts an evaluation whose metric has this value. A value that is not a number is no improvement.
    pub fn count(&mut self, value: f64, metric: BestMetric, config: &StopConfig) {
        let least = |best: f64| {
            if metric.is_lower_better() { best - config.min_delta } else { best + config.min_delta }
        };
        let improved = match self.best {
            None => !value.is_nan(),
            Some(best) => {
                metric.improves(value, least(best)) || (config.min_delta > 0.0 && value == least(best))
            }
        };
        self.last = Some(value);
        if improved {
            (self.best, self.evaluations_without) = (Some(value), 0);
        } else {
            self.evaluations_without += 1;
        }
    }

    /// Why the run stops now; `None` if it continues.
    pub fn reason(&self, metric: BestMetric, config: &StopConfig, elapsed_s: f64) -> Option<StopReason> {
        let reached = |target: f64| {
            let value = self.last.filter(|value| *value == target || metric.improves(*value, target))?;
            Some(StopReason::Target(value))
        };
        let out_of_patience = |patience: u64| {
            (self.evaluations_without >= patience).then_some(StopReason::Patience(self.evaluations_without))
        };
        let out_of_time =
            |minutes: f64| (elapsed_s >= 60.0 * minutes).then_some(StopReason::Time(elapsed_s / 60.0));
        let target = config.target.and_then(reached);
        target.or(config.patience.and_then(out_of_patience)).or(config.max_minutes.and_then(out_of_time))
    }
}

impl StopReason {
    /// The key of the job that decides it.
    pub fn key(self) -> &'static str {
        match self {
            StopReason::Patience(_) => "stop.patience",
            StopReason::Target(_) => "stop.target",
            StopReason::Time(_) => "stop.max_minutes",
        }
    }

    /// For people: `valid.loss has not improved in 5 evaluations`.
    pub fn describe(self, metric: BestMetric) -> String {
        match self {
            StopReason::Patience(n) => {
                format!("{} has not improved in {}", metric.name(), counted(n, "evaluation"))
            }
            StopReason::Target(value) => format!("{} has reached {value}", metric.name()),
            StopReason::Time(minutes) => format!("it has trained for {minutes:.1} minutes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Metric;

    fn stop(text: &str) -> StopConfig {
        toml::from_str(text).unwrap()
    }

    /// The evaluation, from 1, at which a run with these values stops.
    fn stops_at(values: &[f64], metric: BestMetric, config: &StopConfig) -> Option<usize> {
        let mut progress = StopProgress::default();
        (1..=values.len()).find(|i| {
            progress.count(values[i - 1], metric, config);
            progress.reason(metric, config, 0.0).is_some()
        })
    }

    #[test]
    fn patience_counts_evaluations_in_a_row() {
        let config = stop("patience = 2");
        assert_eq!(stops_at(&[3.0, 2.0, 2.5, 1.0, 1.0, 1.5], BestMetric::LOSS, &config), Some(6));
        assert_eq!(stops_at(&[3.0, 2.0, 1.0, 0.5], BestMetric::LOSS, &config), None);
        assert_eq!(stops_at(&[0.5, 0.6, 0.6, 0.6], BestMetric::of(Metric::Accuracy), &config), Some(4));
        assert_eq!(stops_at(&[1.0, f64::NAN, f64::NAN], BestMetric::LOSS, &config), Some(3));
    }

    #[test]
    fn small_changes_are_no_improvement() {
        let config = stop("patience = 2\nmin_delta = 0.5");
        assert_eq!(stops_at(&[3.0, 2.8, 2.6], BestMetric::LOSS, &config), Some(3));
        assert_eq!(stops_at(&[3.0, 2.8, 2.5, 2.4, 2.2], BestMetric::LOSS, &config), Some(5));
    }

    #[test]
    fn a_target_and_the_time_stop_too() {
        assert_eq!(
            stops_at(&[0.5, 0.9, 0.95], BestMetric::of(Metric::Accuracy), &stop("target = 0.9")),
            Some(2)
        );
        assert_eq!(stops_at(&[3.0, 0.9], BestMetric::LOSS, &stop("target = 1.0")), Some(2));
        let timed = stop("max_minutes = 0.5");
        assert_eq!(StopProgress::default().reason(BestMetric::LOSS, &timed, 29.0), None);
        assert_eq!(
            StopProgress::default().reason(BestMetric::LOSS, &timed, 30.0),
            Some(StopReason::Time(0.5))
        );
    }
}
