//! What people read of a run, compared with snapshots in which times and machines are blanked.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::harness::{
    self, Finished, assert_snapshot, command, events, finish, job_folder, last, mlp_job, named, program,
    read_json, reproducible_command, root,
};

/// 8 updates of 16 samples, an evaluation and a checkpoint after every fourth.
fn job() -> String {
    mlp_job(&["name = 'small'", "seed = 7", "data.train_samples = 64", "train.epochs = 2"])
}

/// Runs `fit`; the result does not depend on the processor.
fn fit(folder: &Path, args: &[&str]) -> Finished {
    let args = [&["fit", "job.toml", "--set", "memory.ram=64MiB"], args].concat();
    finish(&mut reproducible_command(folder, &args))
}

/// Blanks what differs from run to run: times, rates, measured memory, and where the program is.
fn blanked(text: &str) -> String {
    let text = text.replace(&program().display().to_string(), "trainer");
    // How many progress lines there are depends on the time, and whether a budget is corrected on the build.
    let lines = text.lines().filter(|line| !line.starts_with("epoch ") && !line.starts_with("memory "));
    let lines = lines.map(|line| {
        let fields = line.split("  ").map(|field| {
            let text = field.trim_start();
            let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
            let is_number = first.starts_with(|c: char| c.is_ascii_digit());
            let blank = match rest {
                "s" | "samples/s" if is_number => format!("_ {rest}"),
                _ if first == "peak" || text.starts_with("data wait") => format!("{first} _"),
                _ => text.to_owned(),
            };
            field.replace(text, &blank)
        });
        fields.collect::<Vec<_>>().join("  ") + "\n"
    });
    lines.collect()
}

/// Runs `fit` and compares what it prints with a snapshot.
fn snapshot(name: &str, folder: &Path, args: &[&str]) {
    let done = fit(folder, args);
    let (args, code) = (args.join(" "), done.code().unwrap());
    assert!(!done.stderr.contains('\x1b') && !done.stderr.contains('\r'), "{:?}", done.stderr);
    let seen = format!(
        "$ trainer fit job.toml --set memory.ram=64MiB {args}\nexit code {code}\n--- stdout\n{}--- stderr\n{}",
        done.stdout,
        blanked(&done.stderr)
    );
    assert_snapshot(&root().join("tests/snapshots").join(format!("{name}.txt")), &seen);
}

fn summary(folder: &Path, run: &str) -> Value {
    read_json(&folder.join(run).join("summary.json"))
}

/// `--max-steps`, the rest, and a resume that finds nothing to do: in words, in the events and in the summary.
#[test]
fn a_part_the_rest_and_nothing_are_told_apart() {
    let folder = job_folder(job());
    let folder = folder.path();
    snapshot("fit_max_steps", folder, &["--run-dir", "run", "--max-steps", "3"]);
    let part = summary(folder, "run");
    assert_eq!((&part["state"], &part["reason"]), (&"stopped".into(), &"--max-steps 3 of 8".into()));
    assert_eq!(last(&events(&folder.join("run")), "finished")["stopped"], "--max-steps 3 of 8");
    snapshot("fit_max_steps_again", folder, &["--resume", "run", "--max-steps", "3"]);
    snapshot("fit_resumed", folder, &["--resume", "run"]);
    let whole = summary(folder, "run");
    assert_eq!((&whole["state"], &whole["reason"]), (&"finished".into(), &Value::Null));
    snapshot("fit_nothing_left", folder, &["--resume", "run"]);
    let all = events(&folder.join("run"));
    assert_eq!(
        named(&all, "nothing_left").iter().map(|e| e["key"].as_str().unwrap()).collect::<Vec<_>>(),
        ["--max-steps", "train.epochs"]
    );
    assert_eq!(last(&all, "finished")["stopped"], Value::Null);
    assert_eq!(summary(folder, "run")["state"], "finished");
}

/// A job shortened below what is trained cannot be resumed, and leaves the run as it is.
#[test]
fn a_shorter_job_is_refused_and_changes_nothing() {
    let folder = job_folder(job());
    let folder = folder.path();
    fit(folder, &["--run-dir", "run", "-q"]).expect(0);
    let files = ["job.toml", "summary.json", "events.jsonl"].map(|name| folder.join("run").join(name));
    let read = || files.clone().map(|file| fs::read(file).unwrap());
    let before = read();
    let text = fit(folder, &["--resume", "run", "--set", "train.epochs=1"]).expect(2).stderr;
    assert!(text.contains("the run is at step 8, and the job ends at step 4"), "{text}");
    assert!(text.contains("raise `train.epochs`"), "{text}");
    assert!(read() == before);
}

#[test]
fn a_run_that_stopped_early_says_which_key_would_continue_it() {
    let folder = job_folder(job());
    let stop = ["--set", "stop.target=100", "--set", "stop.metric=valid.loss", "-q", "--run-dir", "run"];
    fit(folder.path(), &stop).expect(0);
    let ended = summary(folder.path(), "run");
    assert_eq!(ended["state"], "finished");
    let text = fit(folder.path(), &[&stop[..4], &["--resume", "run"]].concat()).expect(0).stderr;
    assert!(text.contains("done   nothing is left to train: valid.loss has reached"), "{text}");
    assert!(text.contains("change `stop.target` to train on"), "{text}");
}

/// The best checkpoint and the epoch are the same wherever they are reported.
#[test]
fn the_best_checkpoint_and_the_epoch_have_one_form() {
    let folder = job_folder(job());
    fit(folder.path(), &["--run-dir", "run", "-q", "--set", "eval.every_steps=2"]).expect(0);
    let (all, summary) = (events(&folder.path().join("run")), summary(folder.path(), "run"));
    let best = last(&all, "best");
    for key in ["step", "path", "metric", "value"] {
        assert!(!best[key].is_null());
        assert_eq!(summary["best"][key], best[key], "{key}");
        assert_eq!(last(&all, "finished")["best"][key], best[key], "{key}");
    }
    for event in all.iter().filter(|event| ["step", "eval"].contains(&event["event"].as_str().unwrap())) {
        assert_eq!(event["epoch"].as_u64().unwrap(), event["step"].as_u64().unwrap().div_ceil(4), "{event}");
    }
    let metrics = fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let last_row: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!((&last_row["epoch"], &summary["epochs"]), (&2.into(), &2.0.into()));
    assert_eq!(last(&all, "finished")["epochs"], 2.0);
}

/// One update of many micro-batches, which takes far longer than the signal.
#[cfg(unix)]
mod signals {
    use std::io::{BufRead, BufReader};

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    const SLOW: &str = "\
name = \"slow\"
[model]
kind = \"cnn\"
[data]
kind = \"shapes\"
train_samples = 20000
valid_samples = 64
image_size = 32
[train]
batch_size = 8
accumulation_steps = 2500
epochs = 50
";

    fn start(folder: &Path, args: &[&str]) -> (std::process::Child, BufReader<std::process::ChildStderr>) {
        let mut child =
            command(folder, &[&["fit", "job.toml", "--run-dir", "run"], args].concat()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        (child, stderr)
    }

    /// What is printed up to the line that contains `text`.
    fn read_until(stderr: &mut impl BufRead, text: &str) -> String {
        let mut all = String::new();
        while !all.contains(text) {
            assert!(stderr.read_line(&mut all).unwrap() > 0, "no `{text}` in {all}");
        }
        all
    }

    /// The first signal is answered within the update, on a line of its own; the second leaves, and the run can be
    /// resumed.
    #[test]
    fn the_first_is_answered_at_once_and_the_second_leaves() {
        let folder = job_folder(SLOW);
        for (signal, code, again) in [
            (Signal::INT, 130, "press Ctrl-C again to leave now"),
            (Signal::TERM, 143, "a second SIGTERM leaves now"),
        ] {
            let _ = fs::remove_dir_all(folder.path().join("run"));
            let (mut child, mut stderr) = start(folder.path(), &[]);
            read_until(&mut stderr, "plan   fits");
            while harness::events_so_far(&folder.path().join("run")).len() < 2 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            // The update has begun when its events were written a moment ago.
            std::thread::sleep(std::time::Duration::from_millis(300));
            kill_process(Pid::from_child(&child), signal).unwrap();
            let answer = read_until(&mut stderr, "stop   ");
            let line = answer.lines().last().unwrap();
            assert_eq!(line, format!("stop   finishing the update, then a checkpoint; {again}"));
            assert!(child.try_wait().unwrap().is_none(), "it finishes the update");
            kill_process(Pid::from_child(&child), signal).unwrap();
            let rest = read_until(&mut stderr, "resume   ");
            assert_eq!(child.wait().unwrap().code(), Some(code));
            let resume = rest.lines().find_map(|line| line.strip_prefix("resume   ")).unwrap();
            assert_eq!(resume, format!("{} fit job.toml --resume run", program().display()));
            assert!(named(&events(&folder.path().join("run")), "interrupted").is_empty());
        }
        let (mut child, mut stderr) = start(folder.path(), &["--resume"]);
        read_until(&mut stderr, "no checkpoint yet: starting over");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A signal during an evaluation does not wait for its end: the resumed run repeats it, with the same result.
    #[test]
    fn an_evaluation_is_left_at_once_and_repeated() {
        let folder = job_folder(job().replace("valid_samples = 32", "valid_samples = 4000"));
        let (folder, run) = (folder.path(), folder.path().join("run"));
        fit(folder, &["--run-dir", "undisturbed", "-q"]).expect(0);
        let args = ["fit", "job.toml", "--set", "memory.ram=64MiB", "--run-dir", "run"];
        let mut child = reproducible_command(folder, &args).spawn().unwrap();
        while named(&harness::events_so_far(&run), "checkpoint").is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let so_far = events(&run);
        let step = last(&so_far, "interrupted")["step"].clone();
        let evaluated = |events: &[Value]| named(events, "eval").iter().any(|eval| eval["step"] == step);
        println!("evaluated before the signal: {}", evaluated(&so_far));
        let resumed = fit(folder, &["--resume", "run"]).expect(0);
        assert!(!resumed.stderr.contains("nothing is left"), "{}", resumed.stderr);
        // An evaluation is due after every fourth update.
        let is_due = step.as_u64().unwrap().is_multiple_of(4);
        assert_eq!(evaluated(&events(&run)), is_due, "the evaluation of step {step}");
        harness::FinalState::of(&folder.join("undisturbed")).assert_same(&harness::FinalState::of(&run));
    }
}
