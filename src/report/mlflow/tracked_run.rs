//! A run as MLflow tracks it: what a store of MLflow takes, and the file that remembers which of its runs is ours.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::train::run_dir::write_atomic;

/// Where MLflow keeps runs. An error is a sentence that names the store.
pub trait TrackingStore: Send {
    /// Creates a run of this id in this experiment, which is created if absent. A run that an earlier process created
    /// with this id, and was killed before it could know, is used instead.
    fn create_run(&self, run: &mut TrackedRun, experiment: &str, name: &str) -> Result<(), String>;
    fn log_parameters(&self, run: &TrackedRun, parameters: &[(String, String)]) -> Result<(), String>;
    fn log_metrics(&self, run: &TrackedRun, points: &[MetricPoint]) -> Result<(), String>;
    fn update_run(&self, run: &TrackedRun, status: RunStatus) -> Result<(), String>;
}

/// One value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricPoint {
    pub key: String,
    pub value: f64,
    pub step: u64,
    /// Seconds since the Unix epoch.
    pub t: f64,
    /// From an evaluation, which follows the update of the same step.
    pub is_eval: bool,
}

impl MetricPoint {
    pub fn timestamp_ms(&self) -> u64 {
        (self.t * 1e3) as u64
    }
}

/// The state of a run as MLflow names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStatus {
    Running,
    Finished,
    Failed,
    Killed,
}

impl RunStatus {
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Finished => "FINISHED",
            Self::Failed => "FAILED",
            Self::Killed => "KILLED",
        }
    }
}

/// `mlflow.json`: the MLflow run of a run, and what it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrackedRun {
    pub uri: String,
    pub experiment_id: String,
    /// Ours until the store has created the run; a server then chooses its own.
    pub run_id: String,
    /// No answer of the store has said that it has the run.
    #[serde(default)]
    pub is_new: bool,
    pub has_parameters: bool,
    /// The last update and the last evaluation that were sent.
    pub last_step: Option<u64>,
    pub last_eval: Option<u64>,
}

impl TrackedRun {
    /// A run of a random id that no store has yet. It is written to disk before a store creates it: whenever the
    /// process is killed, its successor finds the same run.
    pub fn new(uri: &str) -> Self {
        let run_id = [(); 2].map(|()| format!("{:016x}", RandomState::new().hash_one(0))).concat();
        Self {
            uri: uri.to_owned(),
            experiment_id: String::new(),
            run_id,
            is_new: true,
            has_parameters: false,
            last_step: None,
            last_eval: None,
        }
    }

    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    pub fn write(&self, path: &Path) -> Result<(), String> {
        let text = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        write_atomic(path, &text).map_err(|error| error.to_string())
    }

    /// Whether a point was sent before; a resumed run repeats it with the same value.
    pub fn has(&self, point: &MetricPoint) -> bool {
        let last = if point.is_eval { self.last_eval } else { self.last_step };
        last.is_some_and(|last| point.step <= last)
    }

    pub fn note(&mut self, point: &MetricPoint) {
        let last = if point.is_eval { &mut self.last_eval } else { &mut self.last_step };
        *last = (*last).max(Some(point.step));
    }
}

/// The tags of every run.
pub fn tags() -> [(&'static str, &'static str); 2] {
    [("mlflow.source.name", "trainer"), ("trainer.version", env!("CARGO_PKG_VERSION"))]
}

/// MLflow takes letters, digits, `_`, `-`, `.`, `/`, `:` and spaces.
pub fn allowed_key(key: &str) -> String {
    key.chars().map(|c| if c.is_alphanumeric() || "_-./: ".contains(c) { c } else { '_' }).collect()
}

pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_not_sent_again() {
        let mut run = TrackedRun::new("http://x");
        assert_ne!(run.run_id, TrackedRun::new("http://x").run_id);
        let point = |step, is_eval| MetricPoint { key: "k".into(), value: 1.0, step, t: 0.0, is_eval };
        assert!(!run.has(&point(0, false)));
        run.note(&point(20, false));
        assert!(run.has(&point(20, false)) && !run.has(&point(21, false)));
        assert!(!run.has(&point(20, true)), "the evaluation of a step follows its update");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mlflow.json");
        assert_eq!(TrackedRun::read(&path), None);
        run.write(&path).unwrap();
        assert_eq!(TrackedRun::read(&path), Some(run));
    }

    #[test]
    fn keys_have_the_characters_that_mlflow_takes() {
        assert_eq!(allowed_key("valid.f1.a+b c"), "valid.f1.a_b c");
    }
}
