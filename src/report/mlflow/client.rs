//! The part of MLflow's tracking REST API (version 2.0) that a run needs.

use std::time::Duration;

use serde_json::{Value, json};

use super::tracked_run::{MetricPoint, RunStatus, TrackedRun, TrackingStore, now_ms, tags};

/// The tag with our id of a run: a server chooses its own.
const ID_TAG: &str = "trainer.run_id";

/// Parameters of one request.
const MAX_PARAMETERS: usize = 100;

const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER: u64 = 1 << 20;

/// A token for servers that require one, as MLflow's own client reads it.
const TOKEN_VAR: &str = "MLFLOW_TRACKING_TOKEN";

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

    fn experiment(&self, name: &str) -> Result<Option<String>, String> {
        let body = json!({ "filter": format!("name = '{}'", name.replace('\'', "")), "max_results": 1 });
        let found = self.call("experiments/search", &body)?;
        Ok(found["experiments"].as_array().and_then(|all| all.first()).map(|one| text(&one["experiment_id"])))
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

impl TrackingStore for Client {
    fn create_run(&self, run: &mut TrackedRun, experiment: &str, name: &str) -> Result<(), String> {
        run.experiment_id = match self.experiment(experiment)? {
            Some(id) => id,
            None => match self.call("experiments/create", &json!({ "name": experiment })) {
                Ok(created) => text(&created["experiment_id"]),
                // Another run of this job created it meanwhile.
                Err(error) => self.experiment(experiment)?.ok_or(error)?,
            },
        };
        let filter = format!("tags.\"{ID_TAG}\" = '{}'", run.run_id);
        let body = json!({ "experiment_ids": [run.experiment_id], "filter": filter, "max_results": 1 });
        let known = self.call("runs/search", &body)?;
        let known = match known["runs"].get(0) {
            Some(known) => known.clone(),
            None => {
                let tags = tags().into_iter().chain([(ID_TAG, run.run_id.as_str())]);
                let tags: Vec<Value> =
                    tags.map(|(key, value)| json!({ "key": key, "value": value })).collect();
                let body = json!({
                    "experiment_id": run.experiment_id, "run_name": name, "start_time": now_ms(), "tags": tags,
                });
                self.call("runs/create", &body)?["run"].clone()
            }
        };
        let run_id = text(&known["info"]["run_id"]);
        if run_id.is_empty() {
            return Err(format!("`{}` is not an MLflow server: it created no run", self.uri));
        }
        run.run_id = run_id;
        Ok(())
    }

    fn log_parameters(&self, run: &TrackedRun, parameters: &[(String, String)]) -> Result<(), String> {
        for part in parameters.chunks(MAX_PARAMETERS) {
            let params: Vec<Value> =
                part.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
            self.call("runs/log-batch", &json!({ "run_id": run.run_id, "params": params }))?;
        }
        Ok(())
    }

    fn log_metrics(&self, run: &TrackedRun, points: &[MetricPoint]) -> Result<(), String> {
        let metrics: Vec<Value> = points
            .iter()
            .map(|point| {
                json!({
                    "key": point.key, "value": point.value, "step": point.step,
                    "timestamp": point.timestamp_ms(),
                })
            })
            .collect();
        self.call("runs/log-batch", &json!({ "run_id": run.run_id, "metrics": metrics })).map(drop)
    }

    fn update_run(&self, run: &TrackedRun, status: RunStatus) -> Result<(), String> {
        let mut body = json!({ "run_id": run.run_id, "status": status.name() });
        if status != RunStatus::Running {
            body["end_time"] = now_ms().into();
        }
        self.call("runs/update", &body).map(drop)
    }
}

/// A string, or a number that stands for one.
fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| if value.is_null() { String::new() } else { value.to_string() }, str::to_owned)
}
