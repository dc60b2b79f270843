//! Sends a run to MLflow, a server or its SQLite file: its parameters, its metrics with step and time, and how it
//! ended.
//!
//! A thread of its own talks to the store, so that no update waits for it. Its queue is bounded: while the store does
//! not answer, the oldest metrics are dropped and counted. Whatever fails here is a warning, never an error of the
//! run. The id of the MLflow run is kept in the run's folder: a resumed run continues it, sends nothing twice, and
//! first what an earlier process could not send.

mod client;
mod sqlite;
mod tracked_run;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::base::units::counted;
use crate::events::Sink;
use crate::events::event::{Event, EventRecord};
use crate::events::jsonl::complete_lines;
use crate::job::{Job, job_values};
use crate::train::run_dir::RunDir;
use client::Client;
use sqlite::SqliteStore;
use tracked_run::{MetricPoint, RunStatus, TrackedRun, TrackingStore, allowed_key};

/// Maximum events queued for the thread.
const QUEUE: usize = 64;
/// Metrics sent at a time; a server takes 1000 items.
const MAX_BATCH: usize = 500;
/// Characters of a parameter's value.
const MAX_VALUE: usize = 500;
/// Metrics that wait for the store.
const MAX_PENDING: usize = 2048;
/// A batch is sent when fewer places than this are left; no event has as many metrics.
const BATCH_MARGIN: usize = 256;
/// Time between two batches, and the longest time between two attempts.
const INTERVAL: Duration = Duration::from_secs(2);
const MAX_INTERVAL: Duration = Duration::from_secs(60);
/// How long the end of a run waits for the store.
const FINISH_TIMEOUT: Duration = Duration::from_secs(15);

/// The sink.
pub struct Mlflow {
    uri: String,
    /// `None` once it is finished.
    sender: Option<SyncSender<Message>>,
    outcome: Receiver<Unsent>,
    shared: Arc<Shared>,
}

/// What the run tells the thread.
enum Message {
    Metrics(Vec<MetricPoint>),
    /// The run continues after this step: its events until there may not have been sent.
    Resumed {
        step: u64,
    },
}

/// What the run and the thread both see.
#[derive(Default)]
struct Shared {
    state: Mutex<SharedState>,
}

#[derive(Default)]
struct SharedState {
    status: Option<RunStatus>,
    warning: Option<String>,
    /// Metrics that did not fit in a queue.
    dropped: u64,
}

impl Shared {
    fn with<R>(&self, call: impl FnOnce(&mut SharedState) -> R) -> R {
        call(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What never reached the store, and why.
struct Unsent {
    metrics: u64,
    error: Option<String>,
}

impl Mlflow {
    /// Sends the run of `job` in `folder` to the store at `uri`.
    pub fn start(uri: &str, folder: &RunDir, job: &Job) -> io::Result<Self> {
        let (sender, queue) = sync_channel(QUEUE);
        let (report, outcome) = channel();
        let shared = Arc::new(Shared::default());
        let delivery = Delivery {
            uri: uri.to_owned(),
            store: open_store(uri),
            experiment: job.name.clone(),
            run_name: folder.root.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            parameters: parameters(job),
            file: folder.mlflow(),
            events: folder.events(),
            tracked: TrackedRun::read(&folder.mlflow()).filter(|tracked| tracked.uri == uri),
            is_running: false,
            pending: VecDeque::new(),
            shared: shared.clone(),
        };
        std::thread::Builder::new().name("mlflow".into()).stack_size(512 << 10).spawn(move || {
            // The receiver is gone if the run did not wait for the end.
            let _ = report.send(delivery.run(&queue));
        })?;
        Ok(Self { uri: uri.to_owned(), sender: Some(sender), outcome, shared })
    }
}

fn open_store(uri: &str) -> Box<dyn TrackingStore> {
    match sqlite::path_of(uri) {
        Some(path) => Box::new(SqliteStore::new(path)),
        None => Box::new(Client::new(uri)),
    }
}

impl Sink for Mlflow {
    fn name(&self) -> String {
        self.uri.clone()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        if let Some(status) = status(&record.event) {
            self.shared.with(|state| state.status = Some(status));
        }
        let message = match record.event {
            Event::Resumed { step, .. } => Message::Resumed { step },
            _ => Message::Metrics(points(record)),
        };
        let is_empty = matches!(&message, Message::Metrics(points) if points.is_empty());
        if let Some(sender) = self.sender.as_ref().filter(|_| !is_empty)
            && let Err(TrySendError::Full(Message::Metrics(points))) = sender.try_send(message)
        {
            self.shared.with(|state| state.dropped += points.len() as u64);
        }
        Ok(())
    }

    fn take_warning(&mut self) -> Option<String> {
        self.shared.with(|state| state.warning.take())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.sender = None;
        match self.outcome.recv_timeout(FINISH_TIMEOUT) {
            Ok(Unsent { metrics: 0, error: None }) => Ok(()),
            Ok(Unsent { metrics, error }) => {
                let why = error.map_or(String::new(), |error| format!(": {error}"));
                Err(io::Error::other(format!("{} not sent{why}", counted(metrics, "metric"))))
            }
            Err(_) => Err(io::Error::other("no answer")),
        }
    }
}

/// The resolved job by key, as MLflow shows parameters.
fn parameters(job: &Job) -> Vec<(String, String)> {
    let text = |value: String| match serde_json::from_str(&value) {
        Ok(Value::String(text)) => text,
        _ => value,
    };
    let short = |value: String| value.chars().take(MAX_VALUE).collect();
    let values = job_values(&job.to_json()).into_iter();
    values.map(|(key, value)| (allowed_key(&key), short(text(value)))).collect()
}

/// The state that MLflow shows once this event has happened.
fn status(event: &Event) -> Option<RunStatus> {
    match event {
        Event::Finished { .. } => Some(RunStatus::Finished),
        Event::Interrupted { .. } => Some(RunStatus::Killed),
        Event::Diverged { .. } | Event::Failed { .. } => Some(RunStatus::Failed),
        _ => None,
    }
}

/// The metrics of an event, under their names in `metrics.jsonl`. Values that are not finite have no form in JSON.
fn points(record: &EventRecord) -> Vec<MetricPoint> {
    let point = |step: u64, is_eval: bool| {
        move |(key, value): (String, f64)| {
            let key = allowed_key(&key);
            MetricPoint { key, value, step, t: record.t, is_eval }
        }
    };
    let named = |values: &[(&str, f64)]| -> Vec<(String, f64)> {
        values.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect()
    };
    let points: Vec<MetricPoint> = match &record.event {
        Event::Step { step, loss, lr, grad_norm, step_s, data_wait_s, ram_bytes, vram_bytes, .. } => {
            named(&[
                ("train.loss", *loss),
                ("lr", *lr),
                ("grad_norm", *grad_norm),
                ("step_s", *step_s),
                ("data_wait_s", *data_wait_s),
                ("ram_bytes", *ram_bytes as f64),
                ("vram_bytes", *vram_bytes as f64),
            ])
            .into_iter()
            .map(point(*step, false))
            .collect()
        }
        Event::Eval { step, metrics, .. } => {
            // The step events have the training loss.
            let others = metrics.iter().filter(|(name, _)| *name != "train.loss");
            others.map(|(name, value)| (name.clone(), *value)).map(point(*step, true)).collect()
        }
        _ => Vec::new(),
    };
    points.into_iter().filter(|point| point.value.is_finite()).collect()
}

/// The thread's side.
struct Delivery {
    uri: String,
    store: Box<dyn TrackingStore>,
    experiment: String,
    run_name: String,
    parameters: Vec<(String, String)>,
    /// Where the id of the MLflow run is kept.
    file: PathBuf,
    /// The events of the run, earlier processes included.
    events: PathBuf,
    tracked: Option<TrackedRun>,
    /// The store knows that this process trains the run.
    is_running: bool,
    pending: VecDeque<MetricPoint>,
    shared: Arc<Shared>,
}

impl Delivery {
    fn run(mut self, queue: &Receiver<Message>) -> Unsent {
        let (mut interval, mut warned, mut next) = (INTERVAL, false, Instant::now());
        loop {
            match queue.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Message::Metrics(points)) => self.push(points),
                Ok(Message::Resumed { step }) => self.push_unsent(step),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    interval = match self.deliver() {
                        Ok(()) => INTERVAL,
                        Err(error) => {
                            if !std::mem::replace(&mut warned, true) {
                                let warning = format!("mlflow: {error}; training continues without it");
                                self.shared.with(|state| state.warning = Some(warning));
                            }
                            (interval * 2).min(MAX_INTERVAL)
                        }
                    };
                    next = Instant::now() + interval;
                }
            }
        }
        let status = self.shared.with(|state| state.status);
        let error = self.deliver().and_then(|()| self.end(status)).err();
        let dropped = self.shared.with(|state| state.dropped);
        Unsent { metrics: dropped + self.pending.len() as u64, error }
    }

    fn push(&mut self, points: Vec<MetricPoint>) {
        let tracked = self.tracked.as_ref();
        self.pending.extend(points.into_iter().filter(|point| !tracked.is_some_and(|t| t.has(point))));
        let excess = self.pending.len().saturating_sub(MAX_PENDING);
        self.pending.drain(..excess);
        self.shared.with(|state| state.dropped += excess as u64);
    }

    /// Adds the metrics up to `step` that earlier processes recorded and did not send. Best effort: the file is the
    /// record.
    fn push_unsent(&mut self, step: u64) {
        let (mut last_step, mut last_eval, mut is_reachable) = (None, None, true);
        for line in complete_lines(&self.events).into_iter().flatten().map_while(Result::ok) {
            let Ok(record) = serde_json::from_str::<EventRecord>(&line) else { continue };
            let (at, last) = match record.event {
                Event::Step { step, .. } => (step, &mut last_step),
                Event::Eval { step, .. } => (step, &mut last_eval),
                _ => continue,
            };
            // A step that was repeated after a resume stands there twice, with the same values.
            if at <= step && Some(at) > *last {
                *last = Some(at);
                self.push(points(&record));
            }
            if is_reachable && self.pending.len() + BATCH_MARGIN > MAX_PENDING {
                // What fails stays pending, and the oldest of it is dropped.
                is_reachable = self.deliver().is_ok();
            }
        }
    }

    /// Sends everything that waits. What fails stays pending.
    fn deliver(&mut self) -> Result<(), String> {
        let mut tracked = match self.tracked.take() {
            Some(tracked) => tracked,
            None => TrackedRun::new(&self.uri),
        };
        let sent = self.deliver_to(&mut tracked);
        self.tracked = Some(tracked);
        sent
    }

    fn deliver_to(&mut self, tracked: &mut TrackedRun) -> Result<(), String> {
        if tracked.is_new {
            tracked.write(&self.file)?;
            self.store.create_run(tracked, &self.experiment, &self.run_name)?;
            tracked.is_new = false;
            tracked.write(&self.file)?;
        }
        if !self.is_running {
            self.store.update_run(tracked, RunStatus::Running)?;
            self.is_running = true;
        }
        if !tracked.has_parameters {
            self.store.log_parameters(tracked, &self.parameters)?;
            tracked.has_parameters = true;
            tracked.write(&self.file)?;
        }
        while !self.pending.is_empty() {
            let count = self.pending.len().min(MAX_BATCH);
            let batch: Vec<MetricPoint> = self.pending.iter().take(count).cloned().collect();
            self.store.log_metrics(tracked, &batch)?;
            self.pending.drain(..count);
            batch.iter().for_each(|point| tracked.note(point));
            tracked.write(&self.file)?;
        }
        Ok(())
    }

    fn end(&mut self, status: Option<RunStatus>) -> Result<(), String> {
        match (&self.tracked, status) {
            (Some(tracked), Some(status)) => self.store.update_run(tracked, status),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    #[test]
    fn metrics_have_the_names_of_metrics_jsonl() {
        let keys = |record: &EventRecord| -> Vec<String> {
            points(record).into_iter().map(|point| point.key).collect()
        };
        let names = ["train.loss", "lr", "grad_norm", "step_s", "data_wait_s", "ram_bytes", "vram_bytes"];
        assert_eq!(keys(&fixtures::step(1.0, 1)), names);
        assert!(keys(&fixtures::eval(1.0, 2, 0.5)).contains(&"valid.loss".to_owned()));
        assert!(!keys(&fixtures::eval(1.0, 2, f64::NAN)).contains(&"valid.loss".to_owned()));
        assert!(keys(&fixtures::resumed(1.0, 2)).is_empty());
    }

    /// A server that cannot be reached costs no time while the run trains, and is reported at its end.
    #[test]
    fn a_server_that_is_down_is_reported_and_costs_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::new(folder.path());
        let path = folder.path().join("job.toml");
        std::fs::write(&path, "[model]\nkind='mlp'\n[data]\nkind='shapes'\n[train]\nsteps=1\n").unwrap();
        let job = Job::load(&path, &[]).unwrap();
        // Nobody listens on this port: it was free a moment ago.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut sink = Mlflow::start(&format!("http://127.0.0.1:{port}"), &run, &job).unwrap();
        for step in 1..=10_000 {
            sink.record(&fixtures::step(step as f64, step)).unwrap();
        }
        let error = sink.finish().unwrap_err().to_string();
        assert!(error.starts_with("70,000 metrics not sent: "), "{error}");
        assert!(TrackedRun::read(&run.mlflow()).unwrap().is_new);
    }
}
