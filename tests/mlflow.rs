//! `log.mlflow`: against a server of ours that remembers every request, and in a SQLite file.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::harness::{command, finish, job_folder, mlp_job, read_json, trainer};

fn job() -> String {
    mlp_job(&[
        "name = 'tracked'",
        "model.hidden = [8]",
        "data.train_samples = 64",
        "train.batch_size = 8",
        "train.steps = 20",
        "checkpoint.every_steps = 5",
        "eval.every_steps = 10",
        "log.tensorboard = false",
    ])
}

type Requests = Arc<Mutex<Vec<(String, Value)>>>;

/// Starts the server; returns its address and what it receives: the method and the body of each request.
fn server() -> (String, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, requests) = (listener.local_addr().unwrap(), Requests::default());
    let received = requests.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            answer(stream, &received);
        }
    });
    (format!("http://{address}"), requests)
}

fn answer(mut stream: TcpStream, requests: &Requests) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let Some(path) = line.split(' ').nth(1).map(str::to_owned) else { return };
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        match header.trim().to_ascii_lowercase().strip_prefix("content-length:") {
            Some(value) => length = value.trim().parse().unwrap(),
            None if header.trim().is_empty() => break,
            None => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let method = path.strip_prefix("/api/2.0/mlflow/").unwrap_or(&path).to_owned();
    let mut requests = requests.lock().unwrap();
    let is_known = requests.iter().any(|(method, _)| method == "experiments/create");
    let created = requests.iter().find(|(method, _)| method == "runs/create");
    let reply = match method.as_str() {
        "experiments/search" if is_known => json!({ "experiments": [{ "experiment_id": "7" }] }),
        "experiments/create" => json!({ "experiment_id": "7" }),
        "runs/search" if created.is_some() => json!({ "runs": [{ "info": { "run_id": "abc" } }] }),
        "runs/create" => json!({ "run": { "info": { "run_id": "abc" } } }),
        _ => json!({}),
    };
    requests.push((method, serde_json::from_slice(&body).unwrap()));
    let reply = reply.to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        reply.len()
    );
    stream.write_all(format!("{head}{reply}").as_bytes()).unwrap();
}

fn bodies(requests: &Requests, method: &str) -> Vec<Value> {
    let requests = requests.lock().unwrap();
    requests.iter().filter(|(name, _)| name == method).map(|(_, body)| body.clone()).collect()
}

/// Steps of a metric, in the order sent.
fn steps(requests: &Requests, key: &str) -> Vec<u64> {
    let batches = bodies(requests, "runs/log-batch");
    let metrics = batches.iter().flat_map(|body| body["metrics"].as_array().into_iter().flatten());
    metrics.filter(|metric| metric["key"] == key).map(|metric| metric["step"].as_u64().unwrap()).collect()
}

#[test]
fn a_resumed_run_continues_its_mlflow_run_and_sends_every_step_once() {
    let (uri, requests) = server();
    let folder = job_folder(job());
    let set = format!("log.mlflow={uri}");
    let fit = ["fit", "job.toml", "--run-dir", "run", "--resume", "--set", &set, "-q"];
    for max_steps in ["7", "14", "20"] {
        let done = trainer(folder.path(), &[&fit[..], &["--max-steps", max_steps]].concat()).expect(0);
        assert!(!done.stderr.contains("mlflow"), "{}", done.stderr);
    }
    assert_eq!(bodies(&requests, "runs/create").len(), 1);
    assert_eq!(bodies(&requests, "experiments/create"), [json!({ "name": "tracked" })]);
    assert_eq!(read_json(&folder.path().join("run/mlflow.json"))["run_id"], "abc");
    let mut sent = steps(&requests, "train.loss");
    sent.sort_unstable();
    assert_eq!(sent, (1..=20).collect::<Vec<_>>());
    assert_eq!(steps(&requests, "valid.loss").last(), Some(&20));
    let batches = bodies(&requests, "runs/log-batch");
    let params: Vec<&Value> =
        batches.iter().flat_map(|body| body["params"].as_array().into_iter().flatten()).collect();
    let value = |key: &str| {
        params.iter().filter(|param| param["key"] == key).map(|param| &param["value"]).collect::<Vec<_>>()
    };
    assert_eq!(value("optimizer.kind"), ["adamw"]);
    assert_eq!(value("model.hidden"), ["[8]"]);
    let metric = batches.iter().find_map(|body| body["metrics"].as_array()?.first()).unwrap();
    assert!(
        metric["timestamp"].as_u64() > Some(1_600_000_000_000) && metric["value"].is_number(),
        "{metric}"
    );
    let statuses: Vec<Value> =
        bodies(&requests, "runs/update").iter().map(|body| body["status"].clone()).collect();
    assert_eq!(statuses.last(), Some(&"FINISHED".into()), "{statuses:?}");
    assert_eq!(statuses.first(), Some(&"RUNNING".into()));
}

/// A worker that is killed may not have sent its last metrics: its successor reads them from the events.
#[test]
fn a_killed_run_sends_what_was_not_sent() {
    let (uri, requests) = server();
    let folder = job_folder(job());
    let set = format!("log.mlflow={uri}");
    let mut fit = command(folder.path(), &["fit", "job.toml", "--run-dir", "run", "--set", &set, "-q"]);
    finish(fit.env("TRAINER_FAULT_CRASH", "kill:12")).expect(0);
    let sent: std::collections::BTreeSet<u64> = steps(&requests, "train.loss").into_iter().collect();
    assert_eq!(sent, (1..=20).collect());
}

/// A process that is killed before the answer of the server is on disk finds the run by the id that it had chosen.
#[test]
fn a_run_whose_creation_was_not_noted_is_found_by_its_tag() {
    let (uri, requests) = server();
    let folder = job_folder(job());
    let set = format!("log.mlflow={uri}");
    let fit = ["fit", "job.toml", "--run-dir", "run", "--resume", "--set", &set, "-q"];
    trainer(folder.path(), &[&fit[..], &["--max-steps", "7"]].concat()).expect(0);
    let created = bodies(&requests, "runs/create");
    let tag = created[0]["tags"].as_array().unwrap().last().unwrap();
    assert_eq!(tag["key"], "trainer.run_id");
    let file = folder.path().join("run/mlflow.json");
    let mut identity = read_json(&file);
    (identity["is_new"], identity["run_id"]) = (true.into(), tag["value"].clone());
    std::fs::write(&file, identity.to_string()).unwrap();
    trainer(folder.path(), &fit).expect(0);
    assert_eq!(bodies(&requests, "runs/create").len(), 1);
    let searched = bodies(&requests, "runs/search").pop().unwrap();
    assert_eq!(searched["filter"], format!("tags.\"trainer.run_id\" = '{}'", tag["value"].as_str().unwrap()));
    assert_eq!(read_json(&file)["run_id"], "abc");
    assert_eq!(steps(&requests, "train.loss").last(), Some(&20));
}

#[test]
fn a_server_that_is_down_is_a_warning() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let folder = job_folder(job());
    let set = format!("log.mlflow=http://127.0.0.1:{port}");
    let done = trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "--set", &set]).expect(0);
    assert!(done.stderr.contains("metrics not sent"), "{}", done.stderr);
    assert_eq!(read_json(&folder.path().join("run/summary.json"))["state"], "finished");
    for (uri, said) in [
        ("localhost:5000", "must be the address"),
        ("sqlite:///", "must be the address"),
        ("sqlite://mlflow.db", "must be the address"),
        ("http://", "must be the address"),
        ("https://x", "--features https"),
    ] {
        let set = format!("log.mlflow={uri}");
        let text = trainer(folder.path(), &["check", "job.toml", "--set", &set]).expect(2).stderr;
        assert!(text.contains(said), "{text}");
    }
}

/// The first column of every row.
fn rows<R: rusqlite::types::FromSql>(file: &Path, query: &str) -> Vec<R> {
    let file = rusqlite::Connection::open(file).unwrap();
    let mut statement = file.prepare(query).unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_sqlite_file_has_one_run_with_every_step_once_however_often_it_is_resumed() {
    let folder = job_folder(job());
    let set = "log.mlflow=sqlite:///tracked.db";
    let fit = ["fit", "job.toml", "--run-dir", "run", "--resume", "--set", set, "-q"];
    let mut killed = command(folder.path(), &[&fit[..], &["--max-steps", "14"]].concat());
    finish(killed.env("TRAINER_FAULT_CRASH", "kill:9")).expect(0);
    let done = trainer(folder.path(), &fit).expect(0);
    assert!(!done.stderr.contains("mlflow"), "{}", done.stderr);
    let file = folder.path().join("tracked.db");
    assert_eq!(rows::<String>(&file, "SELECT status FROM runs"), ["FINISHED"]);
    let run_id = &read_json(&folder.path().join("run/mlflow.json"))["run_id"];
    assert_eq!(json!(rows::<String>(&file, "SELECT DISTINCT run_uuid FROM metrics")), json!([run_id]));
    assert_eq!(rows::<String>(&file, "SELECT value FROM tags WHERE key = 'mlflow.runName'"), ["run"]);
    assert_eq!(rows::<String>(&file, "SELECT value FROM params WHERE key = 'optimizer.kind'"), ["adamw"]);
    let steps = rows::<i64>(&file, "SELECT step FROM metrics WHERE key = 'train.loss' ORDER BY step");
    assert_eq!(steps, (1..=20).collect::<Vec<_>>());
    // The values are those of the run's own record.
    let events = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let written: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let losses: Vec<f64> = written.iter().filter_map(|line| line["train.loss"].as_f64()).collect();
    let stored = rows::<f64>(&file, "SELECT value FROM metrics WHERE key = 'train.loss' ORDER BY step");
    assert!(stored.iter().all(|loss| losses.contains(loss)), "{stored:?} {losses:?}");
    let last = rows::<i64>(&file, "SELECT step FROM latest_metrics WHERE key = 'train.loss'");
    assert_eq!(last, [20]);
}

#[test]
fn a_sqlite_file_that_cannot_be_written_is_a_warning() {
    let folder = job_folder(job());
    let fit = |run: &str, uri: &str| {
        let set = format!("log.mlflow=sqlite:///{uri}");
        let done = trainer(folder.path(), &["fit", "job.toml", "--run-dir", run, "--set", &set]).expect(0);
        assert_eq!(read_json(&folder.path().join(run).join("summary.json"))["state"], "finished");
        done.stderr
    };
    let text = fit("nowhere", "no/folder/mlflow.db");
    assert!(text.contains("not sent: no/folder/mlflow.db: unable to open database file"), "{text}");
    // Another process writes the file and does not end.
    let file = folder.path().join("locked.db");
    let mut other = rusqlite::Connection::open(&file).unwrap();
    let writing = other.transaction_with_behavior(rusqlite::TransactionBehavior::Exclusive).unwrap();
    let text = fit("locked", "locked.db");
    assert!(text.contains("not sent: locked.db: database is locked"), "{text}");
    drop(writing);
    rusqlite::Connection::open(folder.path().join("other.db"))
        .unwrap()
        .execute_batch("CREATE TABLE a (b)")
        .unwrap();
    let text = fit("other", "other.db");
    assert!(text.contains("not a store of MLflow that a run can write: there is no table"), "{text}");
}
