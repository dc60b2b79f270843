//! The part of MLflow's tracking REST API (version 2.0) that a run needs, and the file that remembers its MLflow run.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::train::run_dir::write_atomic;

/// Metrics of one request; the server takes 1000 items.
pub const MAX_BATCH: usize = 500;
const MAX_PARAMETERS: usize = 100;
/// Characters of a parameter's value.
const MAX_VALUE: usize = 500;

const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER: u64 = 1 << 20;

/// A token for servers that require one, as MLflow's own client reads it.
const TOKEN_VAR: &str = "MLFLOW_TRACKING_TOKEN";

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

/// The state of a run as MLflow names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum RunStatus {
    Running,
    Finished,
    Failed,
    Killed,
}

/// `mlflow.json`: the MLflow run of a run, and what it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrackedRun {
    pub uri: String,
    pub experiment_id: String,
    pub run_id: String,
    pub has_parameters: bool,
    /// The last update and the last evaluation that were sent.
    pub last_step: Option<u64>,
    pub last_eval: Option<u64>,
}

impl TrackedRun {
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

pub struct Client {
    agent: ureq::Agent,
    uri: String,
}

impl Client {
    pub fn new(uri: &str) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .input_buffer_size(16 << 10)
            .output_buffer_size(16 << 10)
            .build();
        Self { agent: config.into(), uri: uri.to_owned() }
    }

    /// A new run in this experiment, which is created if absent.
    pub fn create_run(&self, experiment: &str, name: &str) -> Result<TrackedRun, String> {
        let experiment_id = match self.experiment(experiment)? {
            Some(id) => id,
            None => match self.call("experiments/create", &json!({ "name": experiment })) {
                Ok(created) => text(&created["experiment_id"]),
                // Another run of this job created it meanwhile.
                Err(error) => self.experiment(experiment)?.ok_or(error)?,
            },
        };
        let tags = json!([
            { "key": "mlflow.source.name", "value": "trainer" },
            { "key": "trainer.version", "value": env!("CARGO_PKG_VERSION") },
        ]);
        let body =
            json!({ "experiment_id": experiment_id, "run_name": name, "start_time": now_ms(), "tags": tags });
        let created = self.call("runs/create", &body)?;
        let run_id = text(&created["run"]["info"]["run_id"]);
        if run_id.is_empty() {
            return Err(format!("`{}` is not an MLflow server: it created no run", self.uri));
        }
        Ok(TrackedRun {
            uri: self.uri.clone(),
            experiment_id,
            run_id,
            has_parameters: false,
            last_step: None,
            last_eval: None,
        })
    }

    fn experiment(&self, name: &str) -> Result<Option<String>, String> {
        let body = json!({ "filter": format!("name = '{}'", name.replace('\'', "")), "max_results": 1 });
        let found = self.call("experiments/search", &body)?;
        Ok(found["experiments"].as_array().and_then(|all| all.first()).map(|one| text(&one["experiment_id"])))
    }

    pub fn log_parameters(&self, run: &TrackedRun, parameters: &[(String, String)]) -> Result<(), String> {
        for part in parameters.chunks(MAX_PARAMETERS) {
            let params: Vec<Value> = part
                .iter()
                .map(|(key, value)| {
                    let value: String = value.chars().take(MAX_VALUE).collect();
                    json!({ "key": allowed_key(key), "value": value })
                })
                .collect();
            self.call("runs/log-batch", &json!({ "run_id": run.run_id, "params": params }))?;
        }
        Ok(())
    }

    pub fn log_metrics(&self, run: &TrackedRun, points: &[MetricPoint]) -> Result<(), String> {
        let metrics: Vec<Value> = points
            .iter()
            .map(|point| {
                json!({
                    "key": allowed_key(&point.key), "value": point.value, "step": point.step,
                    "timestamp": (point.t * 1e3) as u64,
                })
            })
            .collect();
        self.call("runs/log-batch", &json!({ "run_id": run.run_id, "metrics": metrics })).map(drop)
    }

    pub fn update_run(&self, run: &TrackedRun, status: RunStatus) -> Result<(), String> {
        let mut body = json!({ "run_id": run.run_id, "status": status });
        if status != RunStatus::Running {
            body["end_time"] = now_ms().into();
        }
        self.call("runs/update", &body).map(drop)
    }

    /// Posts to the API; the error names the server and what it said.
    fn call(&self, method: &str, body: &Value) -> Result<Value, String> {
        let url = format!("{}/api/2.0/mlflow/{method}", self.uri.trim_end_matches('/'));
        let failed = |error: ureq::Error| format!("{}: {error}", self.uri);
        let mut request = self.agent.post(&url).header("content-type", "application/json");
        if let Ok(token) = std::env::var(TOKEN_VAR) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request.send(body.to_string()).map_err(failed)?;
        let status = response.status();
        let answer = response.body_mut().with_config().limit(MAX_ANSWER).read_to_string().map_err(failed)?;
        let answer: Value = serde_json::from_str(&answer).unwrap_or_default();
        match status.is_success() {
            true => Ok(answer),
            false => {
                let message = answer["message"].as_str().unwrap_or("no message");
                Err(format!("{} answered {} to {method}: {message}", self.uri, status.as_u16()))
            }
        }
    }
}

/// A string, or a number that stands for one.
fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| if value.is_null() { String::new() } else { value.to_string() }, str::to_owned)
}

/// MLflow takes letters, digits, `_`, `-`, `.`, `/`, `:` and spaces.
fn allowed_key(key: &str) -> String {
    key.chars().map(|c| if c.is_alphanumeric() || "_-./: ".contains(c) { c } else { '_' }).collect()
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_not_sent_again() {
        let mut run = TrackedRun {
            uri: "http://x".into(),
            experiment_id: "1".into(),
            run_id: "a".into(),
            has_parameters: true,
            last_step: None,
            last_eval: None,
        };
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
