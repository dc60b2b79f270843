//! The order of runs in a list.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::{HistoryError, RunRecord};
use crate::job::BestMetric;

/// What runs are ordered by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SortKey {
    Steps,
    Time,
    /// Peak memory, of the device before that of the host.
    Peak,
    /// The best value of a metric, or the last where the run ranked its checkpoints by another.
    Metric(String),
}

impl From<&str> for SortKey {
    fn from(name: &str) -> Self {
        match name {
            "steps" => Self::Steps,
            "time" => Self::Time,
            "peak" => Self::Peak,
            metric => Self::Metric(metric.into()),
        }
    }
}

/// Sorts runs: the best metric, the most steps, the shortest time or the smallest peak first. Runs without a value come
/// last; runs with the same value keep their order. Refuses a metric that no run has.
pub fn sort(runs: &mut [RunRecord], key: &SortKey) -> Result<(), HistoryError> {
    match key {
        SortKey::Steps => runs.sort_by_key(|run| std::cmp::Reverse(run.summary.steps)),
        SortKey::Time => runs.sort_by(|a, b| a.summary.elapsed_s.total_cmp(&b.summary.elapsed_s)),
        SortKey::Peak => runs.sort_by_key(|run| {
            let peak = run.summary.measured_peak_bytes;
            (peak.vram, peak.ram.max(run.summary.resident_peak_bytes))
        }),
        SortKey::Metric(name) => {
            if !runs.iter().any(|run| run.metric(name).is_some()) {
                let known: BTreeSet<&String> =
                    runs.iter().flat_map(|run| run.summary.metrics.keys()).collect();
                let known = known.into_iter().cloned().collect();
                return Err(HistoryError::UnknownMetric { name: name.clone(), known });
            }
            let lower = is_lower_better(name);
            runs.sort_by(|a, b| match (a.metric(name), b.metric(name)) {
                (Some(a), Some(b)) if lower => a.total_cmp(&b),
                (Some(a), Some(b)) => b.total_cmp(&a),
                (a, b) => b.is_some().cmp(&a.is_some()),
            });
        }
    }
    Ok(())
}

/// Whether a lower value of this metric is better; the metrics of training rank as those of validation.
fn is_lower_better(name: &str) -> bool {
    let measured = format!("valid.{}", name.split_once('.').map_or(name, |(_, metric)| metric));
    // A metric that this version does not know ranks as most do: higher is better.
    serde_json::from_value::<BestMetric>(measured.into()).is_ok_and(BestMetric::is_lower_better)
}

impl RunRecord {
    /// The best value of a metric, or its last; `None` if the run has no finite one.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let best = self.summary.best.as_ref().filter(|best| best.metric == name).map(|best| best.value);
        best.or_else(|| self.summary.metrics.get(name).copied()).filter(|value| value.is_finite())
    }
}

/// Runs by folder: those of a job together, in the order they were started.
pub(super) fn by_folder(a: &RunRecord, b: &RunRecord) -> Ordering {
    a.folder.root.cmp(&b.folder.root)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Summary;
    use crate::events::event::BestCheckpoint;

    fn run(name: &str, loss: f64, accuracy: Option<f64>) -> RunRecord {
        let mut summary = Summary::default();
        summary.metrics.insert("valid.loss".into(), loss);
        summary.best = accuracy.map(|value| BestCheckpoint {
            step: 1,
            path: "c".into(),
            metric: "valid.accuracy".into(),
            value,
        });
        RunRecord::new(name.into(), summary)
    }

    fn sorted(key: &str) -> Vec<String> {
        let mut runs = [
            run("a", 0.5, Some(0.7)),
            run("b", f64::NAN, None),
            run("c", 0.25, Some(0.9)),
            run("d", 0.5, None),
        ];
        sort(&mut runs, &key.into()).unwrap();
        runs.iter().map(|run| run.folder.root.display().to_string()).collect()
    }

    #[test]
    fn the_best_run_comes_first_and_runs_without_a_value_last() {
        assert_eq!(sorted("valid.loss"), ["c", "a", "d", "b"]);
        assert_eq!(sorted("valid.accuracy"), ["c", "a", "b", "d"]);
        assert_eq!(sorted("steps"), ["a", "b", "c", "d"]);
    }

    #[test]
    fn an_unknown_metric_names_those_that_there_are() {
        let error = sort(&mut [run("a", 0.5, None)], &"valid.f1".into()).unwrap_err();
        assert_eq!(error.to_string(), "no run has the metric `valid.f1`");
        assert_eq!(error.hint().unwrap(), "metrics: valid.loss; or steps, time, peak");
    }

    #[test]
    fn losses_and_errors_are_better_lower() {
        assert!(["valid.loss", "train.loss", "valid.rmse"].into_iter().all(is_lower_better));
        assert!(!["valid.accuracy", "train.accuracy", "valid.new"].into_iter().any(is_lower_better));
    }
}
