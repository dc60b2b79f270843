//! Who held the memory: what a run leaves in `memory/` adds up, is bounded, and changes nothing.

use std::fs;
use std::path::Path;

use serde_json::Value;
use trainer::data::DatasetContext;
use trainer::events::{EventLog, Reporter};
use trainer::job::Job;
use trainer::train::run::{self, RunOptions};
use trainer::train::run_dir::{RequestedRun, RunDir};
use trainer::train::setup::Setup;

use crate::harness::{MIB, command, events, finish, job_folder, named, names, read_json, tensors, trainer};

const JOB: &str = "
[model]
kind = 'mlp'
hidden = [64, 32]
dropout = 0.1
[data]
kind = 'shapes'
train_samples = 256
valid_samples = 64
image_size = 16
workers = 1
[train]
batch_size = 32
accumulation_steps = 2
steps = 12
[eval]
every_steps = 5
[log]
every_steps = 1
tensorboard = false
[memory]
ram = '256MiB'
";

const FIT: [&str; 4] = ["fit", "job.toml", "--run-dir", "run"];

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number of bytes"))
}

/// Checks that the parts of a snapshot add up, and returns its peak.
#[track_caller]
fn check_sums(space: &Value) -> u64 {
    let holders = space["holders"].as_array().unwrap();
    let sum = |key: &str| holders.iter().map(|holder| bytes(&holder[key])).sum::<u64>();
    assert_eq!(sum("bytes"), bytes(&space["reserved_bytes"]));
    assert_eq!(sum("peak_bytes"), bytes(&space["peak_bytes"]));
    let (mut held, mut highest) = (sum("first_bytes"), sum("first_bytes"));
    for change in space["changes"].as_array().unwrap() {
        held = held.checked_add_signed(change["bytes"].as_i64().unwrap()).unwrap();
        highest = highest.max(held);
    }
    assert_eq!((held, highest), (sum("bytes"), sum("peak_bytes")));
    highest
}

#[test]
fn a_detailed_run_keeps_two_updates_and_trains_the_same() {
    let folder = job_folder(JOB);
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "plain"]).expect(0);
    trainer(at, &[&FIT[..], &["--set", "log.memory=detailed"]].concat()).expect(0);
    assert!(!at.join("plain/memory").exists());
    assert!(tensors(&at.join("plain")) == tensors(&at.join("run")), "no bit of training changes");
    assert_eq!(names(&at.join("run/memory")), ["end.json", "evaluation.json"]);

    let events = events(&at.join("run"));
    let snapshots = named(&events, "memory_snapshot");
    // Evaluations at steps 5, 10 and 12, and the end.
    assert_eq!(snapshots.iter().map(|event| bytes(&event["step"])).collect::<Vec<_>>(), [5, 10, 12, 12]);
    let planned = bytes(&named(&events, "finished")[0]["planned_peak_bytes"]["ram"]);
    for event in &snapshots[2..] {
        let snapshot = read_json(&at.join(event["path"].as_str().unwrap()));
        let space = &snapshot["spaces"][0];
        assert_eq!((check_sums(space), &space["space"]), (bytes(&event["peak_bytes"]["ram"]), &"ram".into()));
        assert!(bytes(&space["peak_bytes"]) <= planned, "{planned} planned");
        let updates: Vec<&Value> = space["changes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|change| change["phase"] == "update")
            .collect();
        assert_eq!(updates.len(), 2 * 2, "each update reserves and releases its workspace once");
        let recorder = |holder: &&Value| holder["name"] == "memory recorder";
        assert_eq!(space["holders"].as_array().unwrap().iter().filter(recorder).count(), 1);
    }
    let page = fs::read_to_string(at.join("run/report.html")).unwrap();
    for part in ["After the evaluation at step 12", "At the end, step 12", "Reserved host memory by role"] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn an_oom_that_was_survived_leaves_its_holders() {
    let folder = job_folder(JOB);
    let mut fit = command(folder.path(), &FIT);
    finish(fit.env("TRAINER_FAULT_OOM", "60,300")).expect(0);
    let run = folder.path().join("run");
    assert_eq!(names(&run.join("memory")), ["oom-1.json", "oom-2.json"]);
    let events = events(&run);
    assert_eq!(named(&events, "shrunk").len(), 2);
    for (event, file) in named(&events, "oom").iter().zip(["oom-1.json", "oom-2.json"]) {
        let snapshot = read_json(&run.join("memory").join(file));
        let (refused, space) = (&snapshot["refused"], &snapshot["spaces"][0]);
        for key in ["requester", "phase", "bytes", "left"] {
            assert_eq!(event[key], refused[key], "{key}");
        }
        assert_eq!((&snapshot["reason"], &snapshot["step"]), (&"oom".into(), &event["step"]));
        check_sums(space);
        // An injected failure refuses what would have fit: all that is held and all that is left is the budget.
        assert_eq!(bytes(&space["reserved_bytes"]) + bytes(&refused["left"]), bytes(&space["budget_bytes"]));
    }
    assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("Out of memory after step "));
}

/// A run whose budget is below its plan: its first micro-batches do not fit.
#[test]
fn a_refused_request_exceeds_the_budget() {
    for log in ["summary", "detailed"] {
        let home = tempfile::tempdir().unwrap();
        let job = Job::parse(JOB, "job.toml".as_ref(), &[format!("log.memory={log}")]).unwrap();
        let setup = Setup::open(job, 1 << 40, &DatasetContext::default()).unwrap();
        let plan = setup.plan(1 << 40);
        let ram = plan.peak.ram_bytes - 10_000;
        let requested = RequestedRun { run_dir: Some(home.path().join("run")), resume: None };
        let report =
            |folder: &RunDir, _| Ok(Reporter::default().with_required(EventLog::open(&folder.events())?));
        let options = RunOptions { requested, ram, ..RunOptions::default() };
        run::run_plan(&setup, plan, options, report).unwrap();
        let snapshot = read_json(&home.path().join("run/memory/oom-1.json"));
        let (refused, space) = (&snapshot["refused"], &snapshot["spaces"][0]);
        check_sums(space);
        assert_eq!(bytes(&space["budget_bytes"]), ram);
        assert!(bytes(&space["reserved_bytes"]) + bytes(&refused["bytes"]) > ram, "{snapshot}");
        assert_eq!(space["changes"].as_array().unwrap().is_empty(), log == "summary");
    }
}

fn folder_bytes(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn a_long_run_with_many_ooms_leaves_few_small_files() {
    let folder = job_folder(JOB);
    let sets =
        ["--set", "log.memory=detailed", "--set", "train.steps=200", "--set", "memory.max_retries=100"];
    let mut fit = command(folder.path(), &[&FIT[..], &sets].concat());
    finish(fit.env("TRAINER_FAULT_OOM", "60,300,700,1500,3000,6000")).expect(0);
    let run = folder.path().join("run");
    assert_eq!(named(&events(&run), "oom").len(), 6);
    let kept = ["end", "evaluation", "oom-1", "oom-3", "oom-4", "oom-5", "oom-6"];
    assert_eq!(names(&run.join("memory")), kept.map(|name| format!("{name}.json")));
    assert!(folder_bytes(&run.join("memory")) < 4 * MIB);
}
