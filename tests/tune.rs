//! Sweeps and the learning-rate range test through the binary.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{
    children, command, events_so_far, finish, is_alive, job_folder, mlp_job, named, names, read_json, trainer,
};

fn job() -> String {
    job_with(&[])
}

fn job_with(keys: &[&str]) -> String {
    let own = [
        "seed = 7",
        "train.steps = 90",
        "memory.ram = '256MiB'",
        "checkpoint.every_steps = 10",
        "eval.every_steps = 30",
        "log.every_steps = 5",
        "log.tensorboard = false",
    ];
    mlp_job(&[&own[..], keys].concat())
}

/// Eight trials that fit and four that do not.
const SWEEP: [&str; 5] =
    ["tune", "job.toml", "--set", "optimizer.lr=1e-3,3e-3,1e-2,3e-2", "--set=model.hidden=[8],[16],[400000]"];

fn tune(folder: &Path, args: &[&str]) -> Command {
    let mut command = command(folder, args);
    command.env("RAYON_NUM_THREADS", "2");
    command
}

/// The folder of the only sweep.
fn sweep_folder(folder: &Path) -> PathBuf {
    let home = folder.join("runs/job");
    let sweeps: Vec<String> = names(&home).into_iter().filter(|name| name.starts_with("tune-")).collect();
    assert_eq!(sweeps.len(), 1, "{sweeps:?}");
    home.join(&sweeps[0])
}

/// The results so far, complete lines only.
fn results(folder: &Path) -> Vec<Value> {
    let Ok(home) = fs::read_dir(folder.join("runs/job")) else { return Vec::new() };
    let texts = home.filter_map(|entry| fs::read(entry.ok()?.path().join("trials.jsonl")).ok());
    texts
        .flat_map(|text| {
            text.split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice(line).ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// (trial, rung) to score and steps; fails if a rung of a trial has two results.
#[track_caller]
fn scores(folder: &Path) -> BTreeMap<(u64, u64), (Value, Value)> {
    let mut found = BTreeMap::new();
    for result in results(folder) {
        let key = (result["trial"].as_u64().unwrap(), result["rung"].as_u64().unwrap());
        let before = found.insert(key, (result["score"].clone(), result["steps"].clone()));
        assert!(before.is_none(), "trial and rung {key:?} ran twice");
    }
    found
}

fn wait_for(mut condition: impl FnMut() -> bool) {
    while !condition() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process and everything below it.
fn descendants(pid: u32) -> Vec<u32> {
    children(pid).into_iter().flat_map(|child| std::iter::once(child).chain(descendants(child))).collect()
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn a_sweep_that_is_killed_and_resumed_runs_every_trial_that_fits_once() {
    let reference = job_folder(job());
    let done = finish(&mut tune(reference.path(), &SWEEP)).expect(0);
    assert_eq!(done.stderr.matches("does not fit: ram ").count(), 4, "{}", done.stderr);
    assert!(done.stdout.contains("retrain") && done.stdout.contains("stopped early"), "{}", done.stdout);
    let expected = scores(reference.path());
    let first_rung = expected.keys().filter(|(_, rung)| *rung == 0).count();
    assert_eq!((first_rung, expected.len()), (8, 8 + 3), "{expected:?}");

    let folder = job_folder(job());
    let mut tuner = tune(folder.path(), &SWEEP).spawn().unwrap();
    wait_for(|| results(folder.path()).len() >= 3 && !children(tuner.id()).is_empty());
    let below = descendants(tuner.id());
    assert!(!below.is_empty());
    signal(&tuner, Signal::KILL);
    tuner.wait().unwrap();
    wait_for(|| below.iter().all(|pid| !is_alive(*pid)));
    let before = scores(folder.path());
    assert!(before.len() < expected.len(), "it was killed in the middle");
    let starts = |trial: u64| {
        let run = sweep_folder(folder.path()).join(format!("trial-{trial:03}"));
        named(&events_so_far(&run), "started").len()
    };
    let ended: Vec<(u64, usize)> = before.keys().map(|(trial, _)| (*trial, starts(*trial))).collect();

    let resumed = finish(&mut tune(folder.path(), &["tune", "--resume", "--json"])).expect(0).json();
    assert_eq!(resumed["complete"], true);
    assert_eq!(scores(folder.path()), expected, "as if it had never been killed, to the bit");
    for (trial, starts_before) in ended {
        let promoted = usize::from(expected.contains_key(&(trial, 1)) && !before.contains_key(&(trial, 1)));
        assert_eq!(starts(trial), starts_before + promoted, "trial {trial}");
    }
    let trials = resumed["trials"].as_array().unwrap();
    let states = |state: &str| trials.iter().filter(|trial| trial["state"] == state).count();
    assert_eq!([states("does_not_fit"), states("finished"), states("stopped_early")], [4, 3, 5]);
    for trial in trials.iter().filter(|trial| trial["state"] == "does_not_fit") {
        assert!(trial["planned_peak_bytes"]["ram"].as_u64() > Some(256 << 20));
        assert!(trial["run"].is_null());
    }
    assert_eq!(resumed["best"]["trial"], trials[0]["trial"]);
    let best = Path::new(resumed["best"]["run"].as_str().unwrap());
    trainer(folder.path(), &["eval", best.to_str().unwrap(), "-q"]).expect(0);
    // No trial ran out of memory, and none exceeded what it was given.
    for run in names(&sweep_folder(folder.path())).iter().filter(|name| !name.contains('.')) {
        let events = events_so_far(&sweep_folder(folder.path()).join(run));
        assert!(named(&events, "oom").is_empty() && named(&events, "shrunk").is_empty(), "{run}");
    }
    // A stopped trial can be resumed by hand.
    let stopped = trials.iter().find(|trial| trial["state"] == "stopped_early").unwrap();
    let run = stopped["run"].as_str().unwrap();
    trainer(folder.path(), &["fit", &format!("{run}.toml"), "--resume", run, "-q"]).expect(0);
    assert_eq!(read_json(&folder.path().join(run).join("summary.json"))["state"], "finished");
}

#[test]
fn an_interrupted_sweep_leaves_checkpoints_and_no_process() {
    let args =
        ["tune", "job.toml", "--set", "optimizer.lr=1e-3..1e-1:log", "--trials", "4", "--halving", "1"];
    let folder = job_folder(job_with(&["train.steps = 40000"]));
    let mut tuner = tune(folder.path(), &args).spawn().unwrap();
    let checkpointed = || {
        let runs = descendants(tuner.id());
        let folder = folder.path().join("runs/job");
        let sweep = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).next();
        let steps = sweep
            .map_or(0, |sweep| named(&events_so_far(&sweep.path().join("trial-000")), "checkpoint").len());
        steps > 0 && runs.len() >= 2
    };
    wait_for(checkpointed);
    let below = descendants(tuner.id());
    signal(&tuner, Signal::INT);
    assert_eq!(tuner.wait().unwrap().code(), Some(130));
    assert!(below.iter().all(|pid| !is_alive(*pid)));
    let events = events_so_far(&sweep_folder(folder.path()).join("trial-000"));
    assert_eq!(events.last().unwrap()["event"], "interrupted");
    // The values do not depend on when a trial starts: the resumed sweep has the same.
    let settings = |sweep: &Value| -> Vec<Value> {
        sweep["trials"].as_array().unwrap().iter().map(|trial| trial["set"].clone()).collect()
    };
    let sweep = read_json(&sweep_folder(folder.path()).join("tune.json"));
    assert_eq!(settings(&sweep).len(), 4);
    let short = ["tune", "job.toml", "--resume", "--set", "optimizer.lr=1"];
    let text = finish(&mut tune(folder.path(), &short)).expect(2).stderr;
    assert!(text.contains("`--set` differs from that of the sweep"), "{text}");
}

#[test]
fn mistakes_are_reported_before_anything_starts() {
    let folder = job_folder(job());
    for (args, code, said) in [
        (&["--set", "optimizer.lrr=1,2"][..], 2, "lrr"),
        (&["--set", "optimizer.lr=abc,def"], 2, "optimizer.lr"),
        (&["--set", "optimizer.lr=2..1"], 2, "the range `2..1` of `optimizer.lr` is empty"),
        (&["--set", "optimizer.lr=0..1:log"], 2, "must begin above 0"),
        (&["--set", "optimizer.lr=1e-3"], 2, "no key has several values"),
        (&[], 2, "no key has several values"),
        (&["--set", "seed=1,2", "--set", "seed=3"], 2, "`seed` is set twice"),
        (&["--set", "memory.ram=1GiB,2GiB"], 2, "the trials share the memory"),
        (&["--set", "seed=1,2", "--metric", "valid.rmse"], 2, "rmse"),
        (&["--set", "seed=1,2", "--metric", "sharpness"], 2, "sharpness"),
        (&["--set", "model.hidden=[400000],[500000]"], 3, "no trial fits in memory: the smallest needs"),
        (&["--resume"], 2, "there is no sweep of `job`"),
        (&["--resume", "."], 2, "is not a sweep"),
        (&["--lr=1..0"], 2, "LOW..HIGH"),
        (&["--lr", "--set", "seed=1,2"], 2, "several values"),
        (&["--lr", "--set", "model.hidden=[400000]", "--set", "memory.on_oom=[]"], 3, "does not fit"),
    ] {
        let done = finish(&mut tune(folder.path(), &[&["tune", "job.toml"], args].concat())).expect(code);
        assert!(done.stderr.contains(said), "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains("error") && done.stdout.is_empty(), "{args:?}: {}", done.text());
    }
    finish(&mut tune(
        folder.path(),
        &["tune", "job.toml", "--set", "seed=1,2", "--set", "train.steps=2", "-q"],
    ))
    .expect(0);
    fs::write(folder.path().join("job.toml"), job_with(&["model.hidden = [8]"])).unwrap();
    let text = finish(&mut tune(folder.path(), &["tune", "job.toml", "--resume"])).expect(2).stderr;
    assert!(text.contains("is a sweep of another job: `model.hidden` was [16] and is [8]"), "{text}");
}

#[test]
fn the_range_test_suggests_a_rate_between_its_bounds() {
    let keys = ["model.dropout = 0.0", "model.hidden = [64]", "train.batch_size = 64"];
    let folder = job_folder(job_with(&keys));
    let done =
        finish(&mut tune(folder.path(), &["tune", "job.toml", "--lr=1e-5..10", "--json"])).expect(0).json();
    let rate = done["suggestion"]["lr"].as_f64().unwrap();
    assert!((1e-4..0.1).contains(&rate), "{done}");
    let curve = fs::read_to_string(folder.path().join(done["curve"].as_str().unwrap())).unwrap();
    let rates: Vec<f64> = curve
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["lr"].as_f64().unwrap())
        .collect();
    assert_eq!(rates.len() as u64, done["updates"].as_u64().unwrap());
    let growth = rates[1] / rates[0];
    assert!(growth > 1.0 && (rates[0] - 1e-5).abs() < 1e-12);
    assert!(rates.windows(2).all(|pair| (pair[1] / pair[0] / growth - 1.0).abs() < 1e-6));
    let test = folder.path().join(done["folder"].as_str().unwrap());
    assert!(fs::read_to_string(test.join("lr.txt")).unwrap().contains('*'));
    let svg = fs::read_to_string(folder.path().join(done["svg"].as_str().unwrap())).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains(&format!("lr {rate:.1e}")), "{svg}");
    assert!(!test.join("run/checkpoints").exists());
    // The same test gives the same curve.
    let again =
        finish(&mut tune(folder.path(), &["tune", "job.toml", "--lr=1e-5..10", "--json"])).expect(0).json();
    assert_eq!(again["suggestion"], done["suggestion"]);
}
