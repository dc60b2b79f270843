//! Runs through the binary: what they leave behind, and that no disturbance changes their result.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use trainer::base::random::{RngKey, stream_id};

/// Small enough for a second, long enough to be disturbed: 64 updates of 16 samples.
const JOB: &str = "\
name = \"small\"
seed = 7

[model]
kind = \"cnn\"
stages = [{ channels = 4 }, { channels = 8 }]
hidden = [16]
dropout = 0.1

[data]
kind = \"shapes\"
train_samples = 512
valid_samples = 96
image_size = 16

[train]
batch_size = 8
accumulation_steps = 2
epochs = 2
clip_norm = 1.0

[schedule]
kind = \"cosine\"
warmup_steps = 5

[checkpoint]
every_steps = 5

[log]
every_steps = 1
";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("job.toml"), JOB).unwrap();
    folder
}

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.env("TRAINER_PROCESS_BYTES", "0");
    command.args(args).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn fit(folder: &Path, args: &[&str]) -> Output {
    command(folder, &[&["fit", "job.toml"], args].concat()).output().unwrap()
}

#[track_caller]
fn assert_exit(output: &Output, code: i32) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(output.status.code(), Some(code), "{}\n{}", text(&output.stdout), text(&output.stderr));
}

fn events(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}

/// What no disturbance may change: the last checkpoint's tensors, the metrics, the samples seen.
fn final_state(run: &Path) -> (Vec<u8>, Vec<u8>, Value, Value) {
    let checkpoints: BTreeSet<PathBuf> =
        fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let newest = checkpoints.last().unwrap();
    let read = |name: &str| fs::read(newest.join(name)).unwrap();
    let events = events(run);
    let finished = named(&events, "finished");
    let last = finished.last().expect("the run finished");
    let (metrics, digest) = (last["metrics"].clone(), last["samples_digest"].clone());
    (read("model.safetensors"), read("optimizer.safetensors"), metrics, digest)
}

/// The outcome of the job undisturbed.
fn reference_run(folder: &Path) -> (Vec<u8>, Vec<u8>, Value, Value) {
    assert_exit(&fit(folder, &["--run-dir", "undisturbed", "-q"]), 0);
    final_state(&folder.join("undisturbed"))
}

#[track_caller]
fn assert_same(a: &(Vec<u8>, Vec<u8>, Value, Value), b: &(Vec<u8>, Vec<u8>, Value, Value)) {
    assert_eq!((&a.2, &a.3), (&b.2, &b.3), "metrics and samples");
    assert!(a.0 == b.0, "weights differ");
    assert!(a.1 == b.1, "optimizer state differs");
}

#[test]
fn a_run_leaves_everything_behind() {
    let folder = folder();
    let output = fit(folder.path(), &["--run-dir", "run", "--json"]);
    assert_exit(&output, 0);
    let run = folder.path().join("run");
    for name in [
        "job.toml",
        "plan.json",
        "events.jsonl",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "tensorboard",
    ] {
        assert!(run.join(name).exists(), "{name}");
    }
    let events = events(&run);
    let streamed: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(streamed, events, "--json streams the events");
    assert!(events.iter().all(|event| event["event"].is_string() && event["t"].is_f64()));
    let order: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(order[..2], ["started", "planned"]);
    assert_eq!(order.last(), Some(&"finished"));
    let steps = named(&events, "step");
    assert_eq!(steps.len(), 64);
    for key in [
        "step",
        "epoch",
        "loss",
        "lr",
        "samples",
        "micro_batch",
        "accumulation_steps",
        "step_s",
        "data_wait_s",
        "ram_bytes",
        "vram_bytes",
        "samples_digest",
    ] {
        assert!(!steps[0][key].is_null(), "a step has {key}");
    }
    let finished = named(&events, "finished")[0];
    assert_eq!((&finished["steps"], &finished["samples"]), (&64.into(), &1024.into()));
    let peak = |key: &str| finished[key]["ram"].as_u64().unwrap();
    assert!(peak("measured_peak_bytes") > 0);
    assert!(peak("measured_peak_bytes") <= peak("planned_peak_bytes"), "{finished}");
    assert!(peak("planned_peak_bytes") <= peak("measured_peak_bytes") + (16 << 20), "{finished}");
    // The summary is rebuilt from the run directory alone.
    let kept: Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
    let rebuilt = trainer::events::Summary::from_events(&run.join("events.jsonl")).unwrap();
    assert_eq!(serde_json::to_value(rebuilt).unwrap(), kept);
    // The resolved job is itself a job, and the same one.
    let resolved = trainer::job::Job::load(&run.join("job.toml"), &[]).unwrap();
    assert_eq!(resolved, trainer::job::Job::load(&folder.path().join("job.toml"), &[]).unwrap());
}

#[test]
fn two_runs_of_one_seed_are_equal_to_the_bit() {
    let folder = folder();
    let first = reference_run(folder.path());
    assert_exit(
        &fit(
            folder.path(),
            &["--run-dir", "again", "-q", "--set", "data.workers=5", "--set", "data.prefetch=1B"],
        ),
        0,
    );
    assert_same(&first, &final_state(&folder.path().join("again")));
    assert_exit(&fit(folder.path(), &["--run-dir", "other", "-q", "--set", "seed=8"]), 0);
    assert!(first.0 != final_state(&folder.path().join("other")).0, "another seed is another run");
}

#[test]
fn a_folder_is_refused_without_resume_and_another_experiment_with_it() {
    let folder = folder();
    assert_exit(&fit(folder.path(), &["--run-dir", "run", "-q", "--max-steps", "3"]), 0);
    let taken = fit(folder.path(), &["--run-dir", "run"]);
    assert_exit(&taken, 2);
    assert!(String::from_utf8_lossy(&taken.stderr).contains("--resume"));
    let changed = fit(folder.path(), &["--run-dir", "run", "--resume", "--set", "model.hidden=[8]"]);
    assert_exit(&changed, 2);
    assert!(String::from_utf8_lossy(&changed.stderr).contains("model.hidden"));
    // What does not change the experiment may change.
    assert_exit(&fit(folder.path(), &["--run-dir", "run", "--resume", "-q", "--set", "train.epochs=1"]), 0);
}

#[test]
fn max_steps_and_then_the_rest_is_the_whole() {
    let folder = folder();
    let whole = reference_run(folder.path());
    assert_exit(&fit(folder.path(), &["--run-dir", "run", "-q", "--max-steps", "13"]), 0);
    let events_so_far = events(&folder.path().join("run"));
    assert_eq!(named(&events_so_far, "finished")[0]["steps"], 13);
    assert_exit(&fit(folder.path(), &["--run-dir", "run", "-q", "--resume"]), 0);
    assert_same(&whole, &final_state(&folder.path().join("run")));
}

#[test]
fn resume_before_the_first_checkpoint_begins_anew_and_says_so() {
    let folder = folder();
    let output = fit(folder.path(), &["--run-dir", "run", "--resume", "--max-steps", "2"]);
    assert_exit(&output, 0);
    fs::remove_dir_all(folder.path().join("run/checkpoints/step-00000002")).unwrap();
    let output = fit(folder.path(), &["--run-dir", "run", "--resume", "--max-steps", "2"]);
    assert_exit(&output, 0);
    let all = events(&folder.path().join("run"));
    assert_eq!(named(&all, "resumed").last().unwrap()["step"], 0);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("no checkpoint"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Starts a run and waits until it has recorded `lines` events, or has ended.
fn start_and_wait(folder: &Path, args: &[&str], lines: usize) -> Child {
    let mut child = command(folder, &[&["fit", "job.toml", "-q"], args].concat()).spawn().unwrap();
    let path = folder.join("run/events.jsonl");
    while child.try_wait().unwrap().is_none()
        && fs::read_to_string(&path).unwrap_or_default().lines().count() < lines
    {
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

#[test]
fn killed_at_any_point_and_resumed_ends_the_same() {
    let trials: u64 = std::env::var("TRAINER_KILL_TRIALS").map_or(5, |n| n.parse().unwrap());
    let folder = folder();
    let whole = reference_run(folder.path());
    let run = folder.path().join("run");
    for trial in 0..trials {
        let random = RngKey::new(trial, stream_id("kill"));
        let _ = fs::remove_dir_all(&run);
        let mut kills = 0;
        // Kills the run a few times, at a random delay after random events, then lets it finish.
        for round in 0..4 {
            let lines = fs::read_to_string(run.join("events.jsonl")).unwrap_or_default().lines().count();
            let wait_for = lines + 1 + random.below(2 * round, 40) as usize;
            let mut child = start_and_wait(folder.path(), &["--run-dir", "run", "--resume"], wait_for);
            std::thread::sleep(Duration::from_micros(random.below(2 * round + 1, 8_000)));
            kills += u32::from(child.try_wait().unwrap().is_none());
            let _ = child.kill();
            child.wait().unwrap();
            if named(&events_or_none(&run), "finished").len() == 1 {
                break;
            }
        }
        if named(&events_or_none(&run), "finished").is_empty() {
            assert_exit(&fit(folder.path(), &["--run-dir", "run", "--resume", "-q"]), 0);
        }
        assert_same(&whole, &final_state(&run));
        println!("trial {trial}: killed {kills} times, same weights, metrics and samples");
    }
}

/// The events of a run that may just have been killed: its last line may be torn.
fn events_or_none(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[cfg(unix)]
#[test]
fn signals_finish_the_update_and_write_a_checkpoint() {
    use rustix::process::{Pid, Signal, kill_process};
    let folder = folder();
    let whole = reference_run(folder.path());
    for (signal, code, name) in [(Signal::INT, 130, "SIGINT"), (Signal::TERM, 143, "SIGTERM")] {
        let run = folder.path().join("run");
        let _ = fs::remove_dir_all(&run);
        let mut child = start_and_wait(folder.path(), &["--run-dir", "run"], 12);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(code), "{name}");
        let so_far = events(&run);
        let stopped = named(&so_far, "interrupted")[0];
        assert_eq!(stopped["signal"], name);
        let step = stopped["step"].as_u64().unwrap();
        assert!(run.join(format!("checkpoints/step-{step:08}/DONE")).exists());
        assert_exit(&fit(folder.path(), &["--run-dir", "run", "--resume", "-q"]), 0);
        assert_same(&whole, &final_state(&run));
    }
}

#[test]
fn a_damaged_checkpoint_is_reported_and_the_one_before_is_used() {
    let folder = folder();
    let whole = reference_run(folder.path());
    assert_exit(&fit(folder.path(), &["--run-dir", "run", "-q", "--max-steps", "12"]), 0);
    let run = folder.path().join("run");
    let newest = run.join("checkpoints/step-00000012/model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    fs::write(&newest, bytes).unwrap();
    // Lost events are gone for good; the checkpoints remain.
    fs::remove_file(run.join("events.jsonl")).unwrap();
    let output = fit(folder.path(), &["--run-dir", "run", "--resume"]);
    assert_exit(&output, 0);
    let all = events(&run);
    let resumed = named(&all, "resumed")[0];
    assert_eq!(resumed["step"], 10);
    assert!(
        resumed["skipped"][0].as_str().unwrap().contains("model.safetensors does not match its checksum")
    );
    assert!(String::from_utf8_lossy(&output.stderr).contains("does not match its checksum"));
    assert_same(&whole, &final_state(&run));
    // If no checkpoint is intact, the run must not start over on top of them.
    for entry in fs::read_dir(run.join("checkpoints")).unwrap() {
        fs::write(entry.unwrap().path().join("state.json"), "{}").unwrap();
    }
    let output = fit(folder.path(), &["--run-dir", "run", "--resume"]);
    assert_exit(&output, 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no whole checkpoint is left"));
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run() {
    let folder = folder();
    let output = fit(
        folder.path(),
        &[
            "--run-dir",
            "run",
            "--set",
            "optimizer.lr=1e30",
            "--set",
            "schedule.warmup_steps=0",
            "--set",
            "train.clip_norm=1e30",
        ],
    );
    assert_exit(&output, 5);
    let all = events(&folder.path().join("run"));
    let diverged = named(&all, "diverged")[0];
    assert_eq!(diverged["sample_ids"].as_array().unwrap().len(), 16);
    assert!(diverged["step"].as_u64().unwrap() > 1);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("error: the loss is not finite at step") && text.contains("hint:"), "{text}");
}

#[test]
fn what_cannot_fit_is_said_before_anything_is_done() {
    let folder = folder();
    let output = fit(folder.path(), &["--run-dir", "run", "--set", "memory.ram=1MiB"]);
    assert_exit(&output, 3);
    assert!(!folder.path().join("run").exists());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("hint: give it `memory.ram"), "{text}");
    let plan = command(folder.path(), &["plan", "job.toml", "--ram", "1MiB", "--json"]).output().unwrap();
    assert_exit(&plan, 3);
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(plan["verdict"], "does_not_fit");
}

/// Losses of a run, step by step.
fn losses(run: &Path) -> Vec<f64> {
    named(&events(run), "step").iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "loss {i}: {a} and {b}");
    }
}

#[test]
fn a_smaller_budget_gives_the_same_experiment() {
    let folder = folder();
    let whole = reference_run(folder.path());
    let plan = |ram: &str| -> Value {
        let output = command(folder.path(), &["plan", "job.toml", "--json", "--ram", ram]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    // A budget halfway between the job as written and its smallest split.
    let needs = plan("1GiB")["peak"]["ram_bytes"].as_u64().unwrap();
    let least = plan("1MiB")["peak"]["ram_bytes"].as_u64().unwrap();
    let ram = format!("{}B", (needs + least) / 2);
    assert_eq!(plan(&ram)["verdict"], "fits_after_shrink");
    let strict = command(folder.path(), &["plan", "job.toml", "--strict", "--ram", &ram]).output().unwrap();
    assert_exit(&strict, 3);
    assert_exit(&fit(folder.path(), &["--run-dir", "run", "-q", "--set", &format!("memory.ram={ram}")]), 0);
    let run = folder.path().join("run");
    let all = events(&run);
    let steps = named(&all, "step");
    assert!(steps[0]["micro_batch"].as_u64().unwrap() < 8);
    assert_eq!(final_state(&run).3, whole.3, "the same samples in the same order");
    assert_near(&losses(&run), &losses(&folder.path().join("undisturbed")));
    let forbidden = fit(
        folder.path(),
        &["--run-dir", "no", "--set", &format!("memory.ram={ram}"), "--set", "memory.on_oom=[]"],
    );
    assert_exit(&forbidden, 3);
}

#[test]
fn an_oom_anywhere_is_survived_with_the_same_samples() {
    let folder = folder();
    let whole = reference_run(folder.path());
    let reference = losses(&folder.path().join("undisturbed"));
    let mut shrunk = 0;
    for request in [9, 17, 26, 40, 71, 333, 1500, 2900] {
        let run = folder.path().join(format!("ask-{request}"));
        let output = command(folder.path(), &["fit", "job.toml", "-q", "--run-dir", run.to_str().unwrap()])
            .env("TRAINER_FAULT_ASK", request.to_string())
            .output()
            .unwrap();
        assert_exit(&output, 0);
        let all = events(&run);
        assert_eq!(named(&all, "oom").len(), 1, "ask {request} failed once");
        shrunk += named(&all, "shrunk").len();
        assert_eq!(final_state(&run).3, whole.3, "ask {request}: the same samples in the same order");
        assert_near(&losses(&run), &reference);
    }
    assert_eq!(shrunk, 8);
    let never =
        command(folder.path(), &["fit", "job.toml", "--run-dir", "never", "--set", "memory.on_oom=[]"])
            .env("TRAINER_FAULT_ASK", "40")
            .output()
            .unwrap();
    assert_exit(&never, 3);
    assert!(String::from_utf8_lossy(&never.stderr).contains("out of memory"));
}

#[test]
fn a_folder_that_cannot_be_written_is_a_clear_error() {
    let folder = folder();
    fs::write(folder.path().join("file"), "").unwrap();
    let output = fit(folder.path(), &["--run-dir", "file/run"]);
    assert_exit(&output, 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot create the folder"));
}

#[test]
fn checkpoints_that_vanish_end_the_run_with_an_error_and_not_a_new_folder() {
    let folder = folder();
    let mut child = start_and_wait(folder.path(), &["--run-dir", "run", "--set", "train.epochs=2000"], 8);
    let checkpoints = folder.path().join("run/checkpoints");
    // A removal that races with a checkpoint being written may leave some of it.
    let gone = (0..100).any(|_| fs::remove_dir_all(&checkpoints).is_ok());
    assert!(gone || !checkpoints.exists());
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(named(&events(&folder.path().join("run")), "failed").len(), 1);
}

/// A 2 MiB file system, if the machine lets us mount one, that another process fills.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_what_was_written_stays_whole() {
    let folder = folder();
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"]).arg(&run).status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("skipped: a small file system can be mounted by root only");
        return;
    }
    let sets = ["--set", "train.epochs=2000", "--set", "log.tensorboard=false"];
    let child = start_and_wait(folder.path(), &[&["--run-dir", "run"], &sets[..]].concat(), 12);
    let filled = fs::File::create(run.join("theirs")).map(|mut file| {
        let full = (0..).find_map(|_| std::io::Write::write_all(&mut file, &[1; 4096]).err());
        full.expect("it fills up").kind()
    });
    let output = child.wait_with_output().unwrap();
    let kept: Vec<PathBuf> =
        fs::read_dir(run.join("checkpoints")).unwrap().map(|e| e.unwrap().path()).collect();
    let full = fit(folder.path(), &["--resume", "run", "-q", "--set", "train.epochs=2000"]);
    fs::remove_file(run.join("theirs")).unwrap();
    let done = fs::read_dir(run.join("checkpoints")).unwrap().count() as u64;
    let again =
        fit(folder.path(), &["--resume", "run", "-q", "--set", "train.epochs=2000", "--max-steps", "1"]);
    Command::new("umount").arg(&run).status().unwrap();
    assert_eq!(filled.unwrap(), std::io::ErrorKind::StorageFull);
    assert_exit(&output, 1);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("No space left on device") && text.contains("hint: the disk"), "{text}");
    assert!(!kept.is_empty() && kept.iter().all(|path| path.extension().is_none()), "{kept:?}");
    // Still no space, but the state is intact; with space the run resumes.
    assert_exit(&full, 1);
    assert!(!String::from_utf8_lossy(&full.stderr).contains("no whole checkpoint"));
    assert!(done > 0);
    assert_exit(&again, 0);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = folder();
    let mut child =
        command(folder.path(), &["fit", "job.toml", "--json", "--run-dir", "run"]).spawn().unwrap();
    drop(child.stdout.take());
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(named(&events(&folder.path().join("run")), "finished").len(), 1);
}

#[test]
fn bad_data_is_reported_with_the_file_before_anything_is_done() {
    let folder = folder();
    fs::write(folder.path().join("empty"), "").unwrap();
    // A header that declares five images, and three bytes of data.
    let short = [&[0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 28, 0, 0, 0, 28][..], b"abc"].concat();
    fs::write(folder.path().join("short"), short).unwrap();
    for (file, said) in [("empty", "is empty"), ("short", "ends too early"), ("absent", "cannot read")] {
        let images = ["train", "valid"]
            .map(|part| format!("{part}_images = \"{file}\"\n{part}_labels = \"{file}\"\n"));
        let job = format!(
            "[model]\nkind = \"mlp\"\n[data]\nkind = \"idx\"\n{}[train]\nsteps = 1\n",
            images.concat()
        );
        fs::write(folder.path().join("job.toml"), job).unwrap();
        let output = fit(folder.path(), &["--run-dir", "run"]);
        assert_exit(&output, 4);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(said) && text.contains(file) && text.contains("hint:"), "{text}");
        assert!(!folder.path().join("run").exists());
    }
}
