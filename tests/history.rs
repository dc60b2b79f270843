//! Looking at runs through the binary: lists, comparisons and pages have the numbers of the events, and folders that
//! are no runs, or damaged ones, are named.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{
    command, events, events_so_far, finish, job_folder, last, losses, mlp_job, named, names, read_json,
    trainer,
};

fn job() -> String {
    mlp_job(&["name = 'seen'", "model.hidden = [8]", "data.train_samples = 96", "train.epochs = 2"])
}

/// Two runs of a job that differ in their learning rate.
fn two_runs() -> TempDir {
    let folder = job_folder(job());
    for (run, lr) in [("runs/a", "optimizer.lr=0.001"), ("runs/b", "optimizer.lr=0.01")] {
        trainer(folder.path(), &["fit", "job.toml", "--run-dir", run, "--set", lr, "-q"]).expect(0);
    }
    folder
}

/// The data of every chart of a page, by title.
fn charts(page: &str) -> Vec<(String, Value)> {
    let figures = page.split("<figcaption>").skip(1);
    figures
        .map(|figure| {
            let title = figure.split("</figcaption>").next().unwrap();
            let data = figure.split("application/json\">").nth(1).unwrap().split("</script>").next().unwrap();
            (title.to_owned(), serde_json::from_str(data).unwrap())
        })
        .collect()
}

fn values(series: &Value) -> Vec<f64> {
    series["value"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

#[test]
fn the_page_has_the_numbers_of_the_events() {
    let folder = two_runs();
    let run = folder.path().join("runs/a");
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    let events = events(&run);
    let charts = charts(&page);
    let chart = |title: &str| &charts.iter().find(|(known, _)| known == title).unwrap().1;
    let series = |title: &str, label: &str| {
        let all = chart(title)["series"].as_array().unwrap();
        all.iter().find(|series| series["label"] == label).unwrap_or_else(|| panic!("{title}: {label}"))
    };
    let steps = named(&events, "step");
    let of_steps = |key: &str| -> Vec<f64> { steps.iter().map(|step| step[key].as_f64().unwrap()).collect() };
    assert_eq!(values(series("Loss", "update")), losses(&events));
    assert_eq!(series("Loss", "update")["step"], json!((1..=12).collect::<Vec<u64>>()));
    assert_eq!(values(series("Learning rate", "")), of_steps("lr"));
    assert_eq!(values(series("Gradient norm, before clipping", "")), of_steps("grad_norm"));
    assert_eq!(values(series("Host memory", "heap")), of_steps("ram_bytes"));
    assert_eq!(values(series("Host memory", "resident")), of_steps("resident_bytes"));
    let evals = named(&events, "eval");
    for (title, label, name) in [
        ("Loss", "valid", "valid.loss"),
        ("Accuracy", "valid", "valid.accuracy"),
        ("Loss", "train", "train.loss"),
    ] {
        let measured: Vec<f64> = evals.iter().map(|eval| eval["metrics"][name].as_f64().unwrap()).collect();
        assert_eq!(values(series(title, label)), measured, "{name}");
    }
    let planned = last(&events, "planned")["plan"]["peak"]["ram_bytes"].as_f64().unwrap();
    assert_eq!(values(series("Host memory", "planned")), [planned, planned]);
    assert!(page.contains("seen finished after 12 steps (2 epochs, 192 samples)"));
    let job = fs::read_to_string(run.join("job.toml")).unwrap();
    assert!(page.contains(&job.replace('"', "&quot;")), "the resolved job");
    assert!(!names(&run).iter().any(|name| name.ends_with(".tmp")));
}

#[test]
fn several_runs_are_listed_compared_and_overlaid() {
    let folder = two_runs();
    let list = trainer(folder.path(), &["runs", "--json"]).expect(0).json();
    let of_run = |run: &str| list.as_array().unwrap().iter().find(|row| row["run"] == run).unwrap().clone();
    for (run, lr) in [("runs/a", 0.001), ("runs/b", 0.01)] {
        let (row, summary) = (of_run(run), read_json(&folder.path().join(run).join("summary.json")));
        assert_eq!((&row["state"], &row["differs"]), (&json!("finished"), &json!({ "optimizer.lr": lr })));
        for key in ["best", "steps", "metrics", "elapsed_s", "measured_peak_bytes", "resident_peak_bytes"] {
            assert_eq!(row[key], summary[key], "{key}");
        }
    }
    let sorted = trainer(folder.path(), &["runs", "--sort", "valid.loss", "--json"]).expect(0).json();
    let losses: Vec<f64> =
        sorted.as_array().unwrap().iter().map(|row| row["best"]["value"].as_f64().unwrap()).collect();
    assert!(losses.len() == 2 && losses[0] <= losses[1], "{losses:?}");
    let table = trainer(folder.path(), &["runs"]).expect(0);
    assert!(table.stdout.contains("runs/a  finished  valid.loss "), "{}", table.stdout);
    assert!(table.stdout.contains("optimizer.lr=0.01"), "{}", table.stdout);
    assert_eq!(table.stderr, "2 runs: 2 finished\n");

    let compared = trainer(folder.path(), &["compare", "runs/a", "runs/b", "--json"]).expect(0).json();
    assert_eq!(compared["job"], json!([{ "key": "optimizer.lr", "values": [0.001, 0.01] }]));
    let text = trainer(folder.path(), &["compare", "runs/a", "runs/b"]).expect(0).stdout;
    assert!(
        text.contains("optimizer.lr") && text.contains("valid.loss") && !text.contains("steps "),
        "{text}"
    );

    let done = trainer(folder.path(), &["report", "runs/a", "runs/b", "-o", "both.html"]).expect(0);
    assert!(done.stderr.starts_with("wrote both.html, "), "{}", done.stderr);
    let page = fs::read_to_string(folder.path().join("both.html")).unwrap();
    let loss = &charts(&page)[0].1;
    let labels: Vec<&str> =
        loss["series"].as_array().unwrap().iter().map(|series| series["label"].as_str().unwrap()).collect();
    assert_eq!(labels, ["A update", "B update", "A train", "B train", "A valid", "B valid"]);
}

#[test]
fn a_run_without_a_report_has_none() {
    let folder = job_folder(job());
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q", "--set", "log.report=false"])
        .expect(0);
    assert!(!folder.path().join("run/report.html").exists());
}

/// Nothing can be written where a folder stands; the run is complete without its page.
#[test]
fn a_report_that_cannot_be_written_is_a_warning() {
    let folder = job_folder(job());
    fs::create_dir_all(folder.path().join("run/report.html/x")).unwrap();
    let done = trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    assert!(done.stderr.contains("warning: cannot write `run/report.html`"), "{}", done.stderr);
    assert_eq!(last(&events(&folder.path().join("run")), "finished")["steps"], 12);
}

#[test]
fn folders_that_are_no_runs_are_named() {
    let folder = job_folder(job());
    fs::create_dir(folder.path().join("empty")).unwrap();
    let failed = |args: &[&str]| trainer(folder.path(), args).expect(2).stderr;
    for command in ["report", "watch"] {
        assert!(failed(&[command, "empty"]).starts_with("error: `empty` is empty\n  hint: "));
        assert!(failed(&[command, "none"]).starts_with("error: `none` does not exist\n  hint: "));
        assert!(failed(&[command, "."]).starts_with("error: `.` is not the folder of a run\n  hint: "));
    }
    assert!(failed(&["compare", "empty", "."]).starts_with("error: `empty` is empty\n  hint: "));
    assert!(failed(&["compare", "empty"]).contains("2 values required"), "{}", failed(&["compare", "empty"]));
    assert!(failed(&["runs"]).starts_with("error: `runs` does not exist\n  hint: "));
    assert!(failed(&["runs", "empty"]).starts_with("error: there are no runs in `empty`\n  hint: "));
    assert!(
        failed(&["runs", "job.toml"]).starts_with("error: `job.toml` is not the folder of a run\n  hint: ")
    );
    fs::create_dir_all(folder.path().join("begun/checkpoints")).unwrap();
    fs::write(folder.path().join("begun/job.toml"), job()).unwrap();
    assert!(failed(&["report", "begun"]).starts_with("error: the run `begun` has no events yet\n  hint: "));
    let json = trainer(folder.path(), &["report", "empty", "--json"]).expect(2).json();
    assert_eq!(json["error"]["exit_code"], 2);
}

/// A run that a newer version wrote, and damage, are read as far as they can be.
#[test]
fn damaged_lines_and_newer_events_are_skipped_and_said() {
    let folder = two_runs();
    let run = folder.path().join("runs/a");
    let mut lines: Vec<String> =
        fs::read_to_string(run.join("events.jsonl")).unwrap().lines().map(str::to_owned).collect();
    lines.insert(3, r#"{"t":1.5,"event":"teleported","step":1}"#.into());
    lines.insert(5, "\u{fffd}{not json".into());
    fs::write(run.join("events.jsonl"), lines.join("\n") + "\n{\"t\":1").unwrap();
    let skipped = "runs/a: 1 damaged line of `events.jsonl` skipped, the first is line 6; \
                   1 event of a newer version skipped: `teleported`\n";
    for args in [&["runs"][..], &["compare", "runs/a", "runs/b"], &["report", "runs/a"]] {
        let done = trainer(folder.path(), args).expect(0);
        assert!(done.stderr.contains(skipped), "{args:?}: {}", done.stderr);
    }
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("1 event of a newer version skipped: `teleported`"));
    assert_eq!(values(&charts(&page)[0].1["series"][0]), losses(&events_so_far(&run)));
    fs::write(folder.path().join("runs/b/job.toml"), "model = [").unwrap();
    let compared = trainer(folder.path(), &["compare", "runs/a", "runs/b"]).expect(0).stderr;
    assert!(
        compared.contains("warning: runs/b: `job.toml` is missing or damaged: its keys are unknown\n"),
        "{compared}"
    );
    let unknown = trainer(folder.path(), &["runs", "--sort", "valid.f1"]).expect(2);
    assert!(unknown.stderr.starts_with("error: no run has the metric `valid.f1`\n  hint: metrics: train."));
}

#[test]
fn a_running_run_is_told_apart_from_a_killed_one() {
    let folder = job_folder(job());
    let run = folder.path().join("runs/a");
    let args = ["fit", "job.toml", "--run-dir", "runs/a", "-q", "--set", "train.epochs=1000000"];
    let mut child = command(folder.path(), &args).spawn().unwrap();
    let state = || trainer(folder.path(), &["runs", "--json"]).expect(0).json()[0]["state"].clone();
    wait_until(|| !named(&events_so_far(&run), "step").is_empty());
    assert_eq!(state(), "running");
    let page = trainer(folder.path(), &["report", "runs/a"]).expect(0);
    assert!(page.stderr.contains("wrote report.html"), "{}", page.stderr);
    let html = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(html.contains("seen is running: it made "));
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until(|| state() == "killed");
    let watched = finish(&mut command(folder.path(), &["watch", "runs/a"])).expect(2);
    assert!(
        watched.stderr.starts_with("error: `trainer watch` needs a terminal\n  hint: "),
        "{}",
        watched.stderr
    );
}

#[track_caller]
fn wait_until(condition: impl Fn() -> bool) {
    for _ in 0..600 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("nothing happened in a minute");
}

/// Only its own folder is read: a job's own folder is not a run, and the run in it is.
#[test]
fn runs_are_found_below_a_folder_with_a_job() {
    let folder = two_runs();
    let found = trainer(folder.path(), &["runs", ".", "--json"]).expect(0).json();
    let found: Vec<&Path> =
        found.as_array().unwrap().iter().map(|row| Path::new(row["run"].as_str().unwrap())).collect();
    assert_eq!(found, [Path::new("./runs/a"), Path::new("./runs/b")]);
}
