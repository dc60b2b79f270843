//! Runs through the binary: what they leave behind, and that no disturbance changes their result.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use trainer::base::random::{RngKey, stream_id};

use crate::harness::{
    self, FinalState, Finished, command, events, events_so_far, finish, job_folder, last, named, names,
    read_json, trainer,
};

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

fn folder() -> TempDir {
    job_folder(JOB)
}

fn fit(folder: &Path, args: &[&str]) -> Finished {
    trainer(folder, &[&["fit", "job.toml"], args].concat())
}

/// The outcome of the job undisturbed.
fn reference_run(folder: &Path) -> FinalState {
    fit(folder, &["--run-dir", "undisturbed", "-q"]).expect(0);
    FinalState::of(&folder.join("undisturbed"))
}

#[test]
fn a_run_leaves_everything_behind() {
    let folder = folder();
    let done = fit(folder.path(), &["--run-dir", "run", "--json"]).expect(0);
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
    assert_eq!(done.json_lines(), events, "--json streams the events");
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
    let kept = read_json(&run.join("summary.json"));
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
    let sets = ["--set", "data.workers=5", "--set", "data.prefetch=1B"];
    fit(folder.path(), &[&["--run-dir", "again", "-q"], &sets[..]].concat()).expect(0);
    first.assert_same(&FinalState::of(&folder.path().join("again")));
    fit(folder.path(), &["--run-dir", "other", "-q", "--set", "seed=8"]).expect(0);
    let other = FinalState::of(&folder.path().join("other"));
    assert!(first.tensors != other.tensors, "another seed is another run");
}

#[test]
fn a_folder_is_refused_without_resume_and_another_experiment_with_it() {
    let folder = folder();
    fit(folder.path(), &["--run-dir", "run", "-q", "--max-steps", "3"]).expect(0);
    let taken = fit(folder.path(), &["--run-dir", "run"]).expect(2);
    assert!(taken.stderr.contains("--resume"));
    let changed =
        fit(folder.path(), &["--run-dir", "run", "--resume", "--set", "model.hidden=[8]"]).expect(2);
    assert!(changed.stderr.contains("model.hidden"));
    // What does not change the experiment may change.
    fit(folder.path(), &["--run-dir", "run", "--resume", "-q", "--set", "train.epochs=1"]).expect(0);
}

#[test]
fn max_steps_and_then_the_rest_is_the_whole() {
    let folder = folder();
    let whole = reference_run(folder.path());
    fit(folder.path(), &["--run-dir", "run", "-q", "--max-steps", "13"]).expect(0);
    let events_so_far = events(&folder.path().join("run"));
    assert_eq!(last(&events_so_far, "finished")["steps"], 13);
    fit(folder.path(), &["--run-dir", "run", "-q", "--resume"]).expect(0);
    whole.assert_same(&FinalState::of(&folder.path().join("run")));
}

#[test]
fn resume_before_the_first_checkpoint_begins_anew_and_says_so() {
    let folder = folder();
    let resume = || fit(folder.path(), &["--run-dir", "run", "--resume", "--max-steps", "2"]).expect(0);
    resume();
    fs::remove_dir_all(folder.path().join("run/checkpoints/step-00000002")).unwrap();
    let text = resume().stderr;
    let all = events(&folder.path().join("run"));
    assert_eq!(last(&all, "resumed")["step"], 0);
    assert!(text.contains("no checkpoint"), "{text}");
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
            if named(&events_so_far(&run), "finished").len() == 1 {
                break;
            }
        }
        if named(&events_so_far(&run), "finished").is_empty() {
            fit(folder.path(), &["--run-dir", "run", "--resume", "-q"]).expect(0);
        }
        whole.assert_same(&FinalState::of(&run));
        println!("trial {trial}: killed {kills} times, same weights, metrics and samples");
    }
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
        fit(folder.path(), &["--run-dir", "run", "--resume", "-q"]).expect(0);
        whole.assert_same(&FinalState::of(&run));
    }
}

#[test]
fn a_damaged_checkpoint_is_reported_and_the_one_before_is_used() {
    let folder = folder();
    let whole = reference_run(folder.path());
    fit(folder.path(), &["--run-dir", "run", "-q", "--max-steps", "12"]).expect(0);
    let run = folder.path().join("run");
    let newest = run.join("checkpoints/step-00000012/model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    fs::write(&newest, bytes).unwrap();
    // Lost events are gone for good; the checkpoints remain.
    fs::remove_file(run.join("events.jsonl")).unwrap();
    let text = fit(folder.path(), &["--run-dir", "run", "--resume"]).expect(0).stderr;
    let all = events(&run);
    let resumed = named(&all, "resumed")[0];
    assert_eq!(resumed["step"], 10);
    assert!(
        resumed["skipped"][0].as_str().unwrap().contains("model.safetensors does not match its checksum")
    );
    assert!(text.contains("does not match its checksum"), "{text}");
    whole.assert_same(&FinalState::of(&run));
    // If no checkpoint is intact, the run must not start over on top of them.
    for entry in fs::read_dir(run.join("checkpoints")).unwrap() {
        fs::write(entry.unwrap().path().join("state.json"), "{}").unwrap();
    }
    let text = fit(folder.path(), &["--run-dir", "run", "--resume"]).expect(1).stderr;
    assert!(text.contains("no complete checkpoint is left"), "{text}");
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run() {
    let folder = folder();
    let sets = ["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.clip_norm=1e30"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let text = fit(folder.path(), &[&["--run-dir", "run"], &sets[..]].concat()).expect(5).stderr;
    let all = events(&folder.path().join("run"));
    let diverged = named(&all, "diverged")[0];
    assert_eq!(diverged["sample_ids"].as_array().unwrap().len(), 16);
    assert!(diverged["step"].as_u64().unwrap() > 1);
    assert!(text.contains("error: the loss is not finite at step") && text.contains("hint:"), "{text}");
}

#[test]
fn what_cannot_fit_is_said_before_anything_is_done() {
    let folder = folder();
    let text = fit(folder.path(), &["--run-dir", "run", "--set", "memory.ram=1MiB"]).expect(3).stderr;
    assert!(!folder.path().join("run").exists());
    assert!(text.contains("hint: give it `memory.ram"), "{text}");
    let plan = trainer(folder.path(), &["plan", "job.toml", "--ram", "1MiB", "--json"]).expect(3).json();
    assert_eq!(plan["verdict"], "does_not_fit");
}

/// Losses of a run, step by step.
fn losses(run: &Path) -> Vec<f64> {
    harness::losses(&events(run))
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
    let plan =
        |ram: &str| -> Value { trainer(folder.path(), &["plan", "job.toml", "--json", "--ram", ram]).json() };
    // A budget halfway between the job as written and its smallest split.
    let needs = plan("1GiB")["peak"]["ram_bytes"].as_u64().unwrap();
    let least = plan("1MiB")["peak"]["ram_bytes"].as_u64().unwrap();
    let ram = format!("{}B", (needs + least) / 2);
    assert_eq!(plan(&ram)["verdict"], "fits_after_shrink");
    trainer(folder.path(), &["plan", "job.toml", "--strict", "--ram", &ram]).expect(3);
    fit(folder.path(), &["--run-dir", "run", "-q", "--set", &format!("memory.ram={ram}")]).expect(0);
    let run = folder.path().join("run");
    let all = events(&run);
    let steps = named(&all, "step");
    assert!(steps[0]["micro_batch"].as_u64().unwrap() < 8);
    assert_eq!(
        FinalState::of(&run).samples_digest,
        whole.samples_digest,
        "the same samples in the same order"
    );
    assert_near(&losses(&run), &losses(&folder.path().join("undisturbed")));
    let sets = ["--set", &format!("memory.ram={ram}"), "--set", "memory.on_oom=[]"];
    fit(folder.path(), &[&["--run-dir", "no"], &sets[..]].concat()).expect(3);
}

#[test]
fn an_oom_anywhere_is_survived_with_the_same_samples() {
    let folder = folder();
    let whole = reference_run(folder.path());
    let reference = losses(&folder.path().join("undisturbed"));
    let mut shrunk = 0;
    for request in [9, 17, 26, 40, 71, 333, 1500, 2900] {
        let run = folder.path().join(format!("oom-{request}"));
        let mut fit = command(folder.path(), &["fit", "job.toml", "-q", "--run-dir", run.to_str().unwrap()]);
        finish(fit.env("TRAINER_FAULT_OOM", request.to_string())).expect(0);
        let all = events(&run);
        assert_eq!(named(&all, "oom").len(), 1, "reservation {request} failed once");
        shrunk += named(&all, "shrunk").len();
        let digest = FinalState::of(&run).samples_digest;
        assert_eq!(digest, whole.samples_digest, "reservation {request}: the same samples in the same order");
        assert_near(&losses(&run), &reference);
    }
    assert_eq!(shrunk, 8);
    let mut never =
        command(folder.path(), &["fit", "job.toml", "--run-dir", "never", "--set", "memory.on_oom=[]"]);
    let text = finish(never.env("TRAINER_FAULT_OOM", "40")).expect(3).stderr;
    assert!(text.contains("out of memory"), "{text}");
}

#[test]
fn a_folder_that_cannot_be_written_is_a_clear_error() {
    let folder = folder();
    fs::write(folder.path().join("file"), "").unwrap();
    let text = fit(folder.path(), &["--run-dir", "file/run"]).expect(1).stderr;
    assert!(text.contains("cannot create the folder"), "{text}");
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
    let Some(_disk) = harness::SmallDisk::mount(&run, "2m") else { return };
    let sets = ["--set", "train.epochs=2000", "--set", "log.tensorboard=false"];
    let child = start_and_wait(folder.path(), &[&["--run-dir", "run"], &sets[..]].concat(), 12);
    let filled = fs::File::create(run.join("theirs")).map(|mut file| {
        let full = (0..).find_map(|_| std::io::Write::write_all(&mut file, &[1; 4096]).err());
        full.expect("it fills up").kind()
    });
    assert_eq!(filled.unwrap(), std::io::ErrorKind::StorageFull);
    let text = Finished::from(child.wait_with_output().unwrap()).expect(1).stderr;
    let kept = names(&run.join("checkpoints"));
    let full = fit(folder.path(), &["--resume", "run", "-q", "--set", "train.epochs=2000"]);
    fs::remove_file(run.join("theirs")).unwrap();
    let done = names(&run.join("checkpoints"));
    let again =
        fit(folder.path(), &["--resume", "run", "-q", "--set", "train.epochs=2000", "--max-steps", "1"]);
    assert!(text.contains("No space left on device") && text.contains("hint: the disk"), "{text}");
    assert!(!kept.is_empty() && kept.iter().all(|name| !name.contains('.')), "{kept:?}");
    // Still no space, but the state is intact; with space the run resumes.
    assert!(!full.expect(1).stderr.contains("no complete checkpoint"));
    assert!(!done.is_empty());
    again.expect(0);
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
    for (file, said) in [("empty", "is empty"), ("short", "is truncated"), ("absent", "cannot read")] {
        let images = ["train", "valid"]
            .map(|part| format!("{part}_images = \"{file}\"\n{part}_labels = \"{file}\"\n"));
        let job = format!(
            "[model]\nkind = \"mlp\"\n[data]\nkind = \"idx\"\n{}[train]\nsteps = 1\n",
            images.concat()
        );
        fs::write(folder.path().join("job.toml"), job).unwrap();
        let text = fit(folder.path(), &["--run-dir", "run"]).expect(4).stderr;
        assert!(text.contains(said) && text.contains(file) && text.contains("hint:"), "{text}");
        assert!(!folder.path().join("run").exists());
    }
}
