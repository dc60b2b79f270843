//! Faults at every file system call that writes, evaluates or removes a checkpoint: the process is killed there, the
//! disk is full, or the disk fails. After each, the run resumes to the same bits and its directory has no leftovers.
//! Kills at every call that creates a run in MLflow's store, which has one run after it is resumed.
//!
//! A shim preloaded before the C library counts the calls of an undisturbed run and makes one of them fail. `cargo
//! test` tries one call of each kind per fault; `TRAINER_FAULT_SWEEP=all` tries every call of the run.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{
    FinalState, Finished, finish, in_parallel, job_folder, measured_command, read_json, root, skip,
};

/// Three checkpoints, two evaluations, a best checkpoint that is kept and one that is removed.
const JOB: &str = "
seed = 5
[model]
kind = 'mlp'
hidden = [4]
[data]
kind = 'shapes'
train_samples = 16
valid_samples = 4
image_size = 16
workers = 1
[train]
batch_size = 8
steps = 3
ema = 0.5
[checkpoint]
every_steps = 1
keep = 1
[eval]
every_steps = 2
[memory]
supervise = false
[log]
every_steps = 1
tensorboard = false
";

const FAULTS: [(&str, &str); 3] = [("killed", "kill"), ("the disk is full", "28"), ("the disk fails", "5")];

fn fit(folder: &Path, shim: &[(&str, &str)]) -> Finished {
    let mut command = measured_command(folder, &["fit", "job.toml", "--run-dir", "run", "--resume", "-q"]);
    finish(command.envs(shim.iter().copied()).env("RAYON_NUM_THREADS", "1"))
}

/// Every file and folder below a folder.
fn listing(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let below = listing(&path);
            found.extend(below.into_iter().map(|p| Path::new(path.file_name().unwrap()).join(p)));
        }
        found.insert(path.file_name().unwrap().into());
    }
    found
}

fn build_shim(folder: &Path) -> Option<PathBuf> {
    let library = folder.join("shim.so");
    let source = root().join("tests/faults/shim.c");
    let mut build = Command::new("cc");
    build.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl");
    match build.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            skip(format!("no C compiler `cc`: {error}"));
            None
        }
    }
}

/// The kind of a call: the call without its number and without step numbers.
fn call_kind(line: &str) -> String {
    let call = line.split_once(' ').unwrap().1;
    let place = call.split_once("run/").map_or(call, |(_, place)| place);
    let name = call.split(' ').next().unwrap();
    format!("{name} {}", place.replace(|c: char| c.is_ascii_digit(), ""))
}

fn tries_all() -> bool {
    std::env::var("TRAINER_FAULT_SWEEP").is_ok_and(|value| value == "all")
}

#[test]
fn a_fault_at_any_call_of_a_checkpoint_leaves_a_run_that_resumes_to_the_bit() {
    let whole = job_folder(JOB);
    let Some(library) = build_shim(whole.path()) else { return };
    let library = library.to_str().unwrap();
    let all = tries_all();
    // The whole run directory for a full sweep; otherwise its checkpoints.
    let place = if all { "run/" } else { "run/checkpoints" };
    let log = whole.path().join("log");
    let counting = [("LD_PRELOAD", library), ("SHIM_FOLDER", place), ("SHIM_LOG", log.to_str().unwrap())];
    fit(whole.path(), &counting).expect(0);
    let run = whole.path().join("run");
    let (wanted, wanted_files) = (FinalState::of(&run), listing(&run));
    assert_eq!(wanted.tensors.len(), 3, "model, EMA and optimizer state");
    let calls: Vec<String> = fs::read_to_string(log).unwrap().lines().map(String::from).collect();
    let names: BTreeSet<&str> = calls.iter().map(|call| call.split(' ').nth(1).unwrap()).collect();
    for name in ["open", "write", "fsync", "rename", "mkdir", "unlinkat", "read"] {
        assert!(names.contains(name), "the shim sees `{name}`: {names:?}");
    }
    // The last call of each kind: by then there is the most to damage.
    let kinds: BTreeMap<String, usize> =
        calls.iter().enumerate().map(|(i, call)| (call_kind(call), i + 1)).collect();
    let chosen: BTreeSet<usize> =
        if all { (1..=calls.len()).collect() } else { kinds.into_values().collect() };
    let cases: Vec<(usize, (&str, &str))> =
        chosen.iter().flat_map(|at| FAULTS.map(|fault| (*at, fault))).collect();
    let failures = in_parallel(4, &cases, |(at, (name, how))| {
        let folder = job_folder(JOB);
        let at_text = at.to_string();
        let faulty =
            [("LD_PRELOAD", library), ("SHIM_FOLDER", place), ("SHIM_AT", &at_text), ("SHIM_HOW", *how)];
        let disturbed = fit(folder.path(), &faulty);
        let resumed = fit(folder.path(), &[]);
        let mut failures = Vec::new();
        let mut add_failure = |what: String| failures.push(format!("{name} at {}: {what}", calls[at - 1]));
        // Killed, reported, or harmless: never a panic.
        if !matches!((disturbed.code(), *how), (None, "kill") | (Some(0 | 1), "28" | "5"))
            || disturbed.stderr.contains("panicked")
        {
            add_failure(format!("ended with {:?}: {}", disturbed.status, disturbed.stderr));
        }
        if !resumed.status.success() {
            add_failure(format!("is not resumed: {}", resumed.stderr));
            return failures;
        }
        let run = folder.path().join("run");
        if let Some(difference) = FinalState::of(&run).difference(&wanted) {
            add_failure(format!("ends otherwise: {difference}"));
        }
        let files = listing(&run);
        if files != wanted_files {
            let left: Vec<_> = files.symmetric_difference(&wanted_files).collect();
            add_failure(format!("leaves {left:?}"));
        }
        failures
    });
    let wrong = failures.concat();
    println!("{} calls, {} cases, {} wrong", calls.len(), cases.len(), wrong.len());
    assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
}

/// The run's identity is on disk before the store has the run, so that no kill leaves a run that nobody continues.
#[test]
fn a_kill_at_any_call_on_a_store_of_mlflow_leaves_one_run() {
    let job = format!("{JOB}mlflow = 'sqlite:///mlflow.db'\n");
    let whole = job_folder(&job);
    let Some(library) = build_shim(whole.path()) else { return };
    let library = library.to_str().unwrap();
    let log = whole.path().join("log");
    let shim = [("LD_PRELOAD", library), ("SHIM_FOLDER", "/mlflow.")];
    fit(whole.path(), &[&shim[..], &[("SHIM_LOG", log.to_str().unwrap())]].concat()).expect(0);
    let calls: Vec<String> = fs::read_to_string(log).unwrap().lines().map(String::from).collect();
    let renames: Vec<usize> = (0..calls.len()).filter(|i| calls[*i].contains(" rename ")).collect();
    assert!(renames.len() > 2, "the identity, the created run, what it has: {calls:?}");
    // The second rename says that the store has the run; what follows are its parameters and metrics.
    let cases: Vec<usize> = (1..=if tries_all() { calls.len() } else { renames[1] + 2 }).collect();
    let killed = in_parallel(4, &cases, |at| {
        let folder = job_folder(&job);
        let kill = [("SHIM_AT", at.to_string()), ("SHIM_HOW", "kill".into())];
        let kill: Vec<(&str, &str)> = kill.iter().map(|(key, value)| (*key, value.as_str())).collect();
        let killed = fit(folder.path(), &[&shim[..], &kill].concat()).code().is_none();
        fit(folder.path(), &[]).expect(0);
        let file = rusqlite::Connection::open(folder.path().join("mlflow.db")).unwrap();
        let runs = "SELECT group_concat(run_uuid || ' ' || status) FROM runs";
        let runs: String = file.query_row(runs, [], |row| row.get(0)).unwrap();
        let id = read_json(&folder.path().join("run/mlflow.json"))["run_id"].as_str().unwrap().to_owned();
        assert_eq!(runs, format!("{id} FINISHED"), "killed at {}", calls[at - 1]);
        killed
    });
    let killed = killed.into_iter().filter(|killed| *killed).count();
    println!("{} calls, {} cases, {killed} killed", calls.len(), cases.len());
    assert!(2 * killed > cases.len(), "{killed} of {} were killed", cases.len());
}
