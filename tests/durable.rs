//! Nothing lost, through the binary: changed data, run directories in use, damaged runs, full disks, and runs with
//! non-finite values.
#![cfg(unix)]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::harness::{
    self, FinalState, events_so_far, finish, job_folder, measured_command, named, names, read_json,
    through_shell,
};

const JOB: &str = "
name = 'small'
seed = 3
[model]
kind = 'mlp'
hidden = [8]
[data]
kind = 'csv'
train = ['data/a.csv', 'data/b.csv']
valid = ['data/valid.csv']
target = 'y'
task = 'classes'
[train]
batch_size = 8
steps = 12
[checkpoint]
every_steps = 4
[eval]
every_steps = 6
[log]
every_steps = 1
tensorboard = false
";

struct RunFixture {
    folder: tempfile::TempDir,
}

impl RunFixture {
    fn new(job: &str) -> Self {
        let bench = Self { folder: job_folder(job) };
        for (file, rows) in [("a", 40), ("b", 24), ("valid", 16)] {
            let row = |i: usize| format!("{}.{},{},{}\n", i % 7, i, (i * 37 + file.len()) % 11, i % 3);
            bench.write(
                &format!("data/{file}.csv"),
                &("p,q,y\n".to_owned() + &(0..rows).map(row).collect::<String>()),
            );
        }
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Sets another modification time on a file.
    fn touch(&self, name: &str) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        File::options().append(true).open(self.path(name)).unwrap().set_modified(time).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        measured_command(self.folder.path(), &[&["fit", "job.toml"], args].concat())
    }

    #[track_caller]
    fn fit(&self, args: &[&str], code: i32) -> String {
        finish(&mut self.command(args)).expect(code).stderr
    }

    /// A run of the first steps, in `run`.
    fn with_partial_run(job: &str) -> Self {
        let bench = Self::new(job);
        bench.fit(&["--run-dir", "run", "--max-steps", "8", "-q"], 0);
        bench
    }

    #[track_caller]
    fn resume(&self, args: &[&str], code: i32) -> String {
        self.fit(&[&["--run-dir", "run", "--resume"], args].concat(), code)
    }

    fn events(&self, name: &str) -> Vec<Value> {
        named(&events_so_far(&self.path("run")), name).into_iter().cloned().collect()
    }

    #[track_caller]
    fn assert_same_result(&self, run: &str, other: &Path) {
        FinalState::of(&self.path(run)).assert_same(&FinalState::of(other));
    }

    fn checkpoints(&self) -> Vec<String> {
        let mut all = names(&self.path("run/checkpoints"));
        // `best` and `last` are links to some of them.
        all.retain(|name| name != "best" && name != "last");
        all
    }
}

#[test]
fn data_that_changed_is_refused_by_name_and_a_copy_is_not() {
    let bench = RunFixture::with_partial_run(JOB);
    // The same bytes with another modification time, and at another path.
    bench.touch("data/a.csv");
    bench.resume(&["--max-steps", "9", "-q"], 0);
    fs::create_dir(bench.path("copy")).unwrap();
    for name in ["a.csv", "b.csv", "valid.csv"] {
        fs::copy(bench.path("data").join(name), bench.path("copy").join(name)).unwrap();
    }
    let moved = ["--set", "data.train=['copy/a.csv','copy/b.csv']", "--set", "data.valid=['copy/valid.csv']"];
    bench.resume(&[&moved[..], &["--max-steps", "10", "-q"]].concat(), 0);
    for (file, key) in [("b", "data.train"), ("valid", "data.valid")] {
        let name = format!("data/{file}.csv");
        let before = bench.read(&name);
        bench.write(&name, &before.replacen("1.1,", "2.1,", 1));
        let text = bench.resume(&[], 2);
        assert!(text.contains(&format!("{file}.csv` of `{key}` changed")), "{text}");
        assert!(!text.contains("a.csv") && text.contains("--allow-changed-data"), "{text}");
        // The cache is gone: the checkpoint still has the fingerprint.
        fs::remove_dir_all(bench.path("runs/.data")).unwrap();
        bench.resume(&[], 2);
        bench.write(&name, &before);
    }
    let text = bench.resume(&["--set", "data.train=['data/a.csv']"], 2);
    assert!(text.contains("`data.train` was 2 files"), "{text}");
    // A changed job is reported before changed data.
    let text = bench.resume(&["--set", "model.hidden=[4]"], 2);
    assert!(text.contains("model.hidden"), "{text}");
    bench.write("data/b.csv", &bench.read("data/b.csv").replacen("1.1,", "2.1,", 1));
    bench.resume(&["--allow-changed-data", "--max-steps", "11", "-q"], 0);
    // From here on this is the data of the run.
    bench.resume(&["-q"], 0);
}

#[test]
fn classes_and_vocabularies_belong_to_a_checkpoint() {
    let job = "
        [model]\nkind = 'gpt'\nlayers = 1\nwidth = 8\nheads = 1\ncontext = 8\n
        [data]\nkind = 'text'\ntrain = ['t.txt']\n[train]\nbatch_size = 4\nsteps = 8\n[checkpoint]\nevery_steps = 4\n";
    let bench = RunFixture::new(job);
    bench.write("t.txt", &"the quick brown fox ".repeat(30));
    bench.fit(&["--run-dir", "run", "--max-steps", "4", "-q"], 0);
    let state = read_json(&bench.path("run/checkpoints/step-00000004/state.json"));
    assert!(bench.path("run/checkpoints/step-00000004/tokenizer.json").exists());
    assert!(state["data"]["vocabulary"].as_u64().unwrap() > 10 && state["data"]["tokenizer"].is_string());
    bench.write("t.txt", &"the quick brown fOx ".repeat(30));
    let text = bench.resume(&[], 2);
    assert!(text.contains("t.txt` of `data.train` changed") && text.contains("vocabulary"), "{text}");
    let classes = RunFixture::with_partial_run(JOB);
    let state = read_json(&classes.path("run/checkpoints/step-00000008/state.json"));
    assert_eq!(state["data"]["classes"], serde_json::json!(["0", "1", "2"]));
    assert_eq!(state["data"]["sources"].as_array().unwrap().len(), 3);
}

#[test]
fn a_folder_in_use_is_refused_with_the_process() {
    let bench = RunFixture::new(JOB);
    for supervise in ["true", "false"] {
        let set = format!("memory.supervise={supervise}");
        // The first run may have any number of steps behind it: the job must not end before them.
        let steps = ["--set", "train.steps=10000000"];
        let mut first = bench
            .command(&[&["--run-dir", "run", "-q", "--set", &set][..], &steps].concat())
            .spawn()
            .unwrap();
        while bench.path("run/events.jsonl").metadata().map_or(0, |m| m.len()) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = bench.resume(&[], 2);
        assert!(text.contains(&format!("is in use by process {}", first.id())), "{text}");
        // The lock dies with its owner and the owner's worker.
        first.kill().unwrap();
        first.wait().unwrap();
        for _ in 0..500 {
            let resume = [&["--resume", "run", "--max-steps", "1", "-q"][..], &steps].concat();
            let resumed = finish(&mut bench.command(&resume));
            match resumed.code() {
                Some(0) => break,
                _ => assert!(resumed.expect(2).stderr.contains("in use")),
            }
        }
        assert!(!bench.path("run/lock").exists());
        fs::remove_dir_all(bench.path("run")).unwrap();
    }
}

#[test]
fn the_experiment_is_known_without_job_toml() {
    for damage in ["missing", "damaged", "other"] {
        let bench = RunFixture::with_partial_run(JOB);
        match damage {
            "missing" => fs::remove_file(bench.path("run/job.toml")).unwrap(),
            "damaged" => bench.write("run/job.toml", "[model"),
            _ => bench
                .write("run/job.toml", &bench.read("run/job.toml").replace("hidden = [8]", "hidden = [4]")),
        }
        let text = bench.resume(&["--set", "model.hidden=[4]"], 2);
        assert!(text.contains("`model.hidden` was [8] and is [4]"), "{damage}: {text}");
        let text = bench.resume(&["--set", "seed=4"], 2);
        assert!(text.contains("`seed` was 3 and is 4"), "{damage}: {text}");
        bench.resume(&["-q"], 0);
    }
    // Only the checkpoints are left: it is still a run.
    let bench = RunFixture::with_partial_run(JOB);
    for name in ["job.toml", "events.jsonl", "plan.json", "metrics.jsonl"] {
        fs::remove_file(bench.path("run").join(name)).unwrap();
    }
    bench.fit(&["--run-dir", "run"], 2);
    bench.resume(&["--set", "seed=4"], 2);
    bench.resume(&["-q"], 0);
    // Without a checkpoint, the job in the run directory is the only record.
    let bench = RunFixture::with_partial_run(JOB);
    fs::remove_dir_all(bench.path("run/checkpoints")).unwrap();
    bench.write("run/job.toml", "[model");
    let text = bench.resume(&[], 2);
    assert!(text.contains("is unknown: it has no checkpoint"), "{text}");
}

#[test]
fn damaged_events_block_no_resume_and_are_reported() {
    let bench = RunFixture::with_partial_run(JOB);
    let mut lines: Vec<Vec<u8>> = fs::read(bench.path("run/events.jsonl"))
        .unwrap()
        .split(|b| *b == b'\n')
        .map(<[u8]>::to_vec)
        .collect();
    lines[3] = b"\xff\x00{nonsense".to_vec();
    lines[5].truncate(20);
    fs::write(bench.path("run/events.jsonl"), lines.join(&b'\n')).unwrap();
    let text = bench.resume(&[], 0);
    assert!(text.contains("line 4 is not an event") && text.contains("line 6 is not an event"), "{text}");
    let summary = read_json(&bench.path("run/summary.json"));
    assert_eq!((&summary["state"], &summary["steps"]), (&"finished".into(), &12.into()));
}

#[test]
fn missing_markers_are_an_error_and_no_new_beginning() {
    let bench = RunFixture::with_partial_run(JOB);
    for step in bench.checkpoints() {
        fs::remove_file(bench.path("run/checkpoints").join(step).join("DONE")).unwrap();
    }
    let before = bench.checkpoints();
    let text = bench.resume(&[], 1);
    assert!(
        text.contains("no complete checkpoint is left") && text.contains("it has no DONE marker"),
        "{text}"
    );
    assert_eq!(bench.checkpoints(), before, "nothing is removed");
    // One intact checkpoint is enough, and the others are reported.
    let bench = RunFixture::with_partial_run(JOB);
    fs::remove_file(bench.path("run/checkpoints/step-00000008/DONE")).unwrap();
    let text = bench.resume(&[], 0);
    assert!(text.contains("at step 6") && text.contains("step-00000008: it has no DONE marker"), "{text}");
}

#[test]
fn a_resume_that_finds_nothing_says_so_and_the_newest_is_what_was_last_active() {
    let bench = RunFixture::new(JOB);
    let text = bench.fit(&["--resume", "--max-steps", "4"], 0);
    assert!(text.contains("there is no run to resume"), "{text}");
    let home = bench.path("runs/small");
    let first = home.join(&names(&home)[0]);
    // Older runs under names that sort after it.
    for name in ["99999999-000000", "copy of it"] {
        fs::create_dir(home.join(name)).unwrap();
        fs::write(home.join(name).join("job.toml"), bench.read("job.toml")).unwrap();
        fs::write(home.join(name).join("events.jsonl"), "{\"t\":5.0}\n").unwrap();
    }
    let text = bench.fit(&["--resume", "--max-steps", "5"], 0);
    assert!(
        text.contains("at step 4") && text.contains(first.file_name().unwrap().to_str().unwrap()),
        "{text}"
    );
}

#[test]
fn an_evaluation_that_fails_costs_nothing() {
    let job =
        JOB.replace("every_steps = 4", "every_steps = 100").replace("steps = 12", "steps = 12\nema = 0.9");
    let whole = RunFixture::new(&job);
    whole.fit(&["--run-dir", "run", "-q"], 0);
    // The process dies right after the checkpoint: before and during the read of the validation set.
    let bench = RunFixture::new(&job);
    let bad = bench.read("data/valid.csv");
    bench.write("data/valid.csv", &bad.replace("\n1.1,", "\nx.1,"));
    let text = bench.fit(&["--run-dir", "run"], 4);
    assert!(text.contains("valid.csv"), "{text}");
    assert_eq!(bench.checkpoints(), ["step-00000006"]);
    bench.write("data/valid.csv", &bad);
    let text = bench.resume(&["--allow-changed-data"], 0);
    assert!(text.contains("at step 6"), "{text}");
    bench.assert_same_result("run", &whole.path("run"));
    assert_eq!(bench.checkpoints(), whole.checkpoints());
    assert_eq!(bench.events("eval").iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [6, 12]);
    let rows = bench.read("run/metrics.jsonl");
    assert_eq!(rows.lines().filter(|row| row.contains("valid.loss")).count(), 2, "{rows}");
}

#[test]
fn an_evaluation_that_was_not_kept_is_made_again() {
    let whole = RunFixture::new(JOB);
    whole.fit(&["--run-dir", "run", "-q"], 0);
    let bench = RunFixture::new(JOB);
    bench.fit(&["--run-dir", "run", "--max-steps", "6", "-q"], 0);
    fs::remove_file(bench.path("run/checkpoints/step-00000006/evaluated.json")).unwrap();
    bench.resume(&["-q"], 0);
    bench.assert_same_result("run", &whole.path("run"));
    let rows = bench.read("run/metrics.jsonl");
    assert_eq!(rows.lines().filter(|row| row.contains("valid.loss")).count(), 2, "each once: {rows}");
    let best = |bench: &RunFixture| bench.events("finished").last().unwrap()["best"]["step"].clone();
    assert_eq!(best(&bench), best(&whole));
}

const SHAPES: &str = "
seed = 3
[model]
kind = 'mlp'
hidden = [16]
[data]
kind = 'shapes'
train_samples = 64
valid_samples = 16
image_size = 16
[train]
batch_size = 16
steps = 40
[optimizer]
kind = 'sgd'
lr = 0.01
[checkpoint]
every_steps = 1
keep = 2
[log]
every_steps = 1
tensorboard = false
";

/// Non-finite weights after the last update, in every form.
#[test]
fn weights_that_are_not_finite_end_the_run_with_5_also_at_its_end() {
    for sets in [
        &["train.steps=1"][..],
        &["train.steps=1", "train.ema=0.5"],
        &["train.steps=1", "train.precision=bf16", "checkpoint.every_steps=100"],
        &["train.steps=2", "optimizer.kind=adamw"],
    ] {
        let bench = RunFixture::new(SHAPES);
        let mut args =
            vec!["--run-dir", "run", "--set", "optimizer.lr=3e38", "--set", "optimizer.weight_decay=10"];
        sets.iter().for_each(|set| args.extend(["--set", set]));
        let text = bench.fit(&args, 5);
        assert!(text.contains("is not finite"), "{sets:?}: {text}");
        assert_eq!(bench.events("diverged").len(), 1, "{sets:?}");
        for step in bench.checkpoints() {
            let model =
                fs::read(bench.path("run/checkpoints").join(&step).join("model.safetensors")).unwrap();
            let start = 8 + u64::from_le_bytes(model[..8].try_into().unwrap()) as usize;
            let values = model[start..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            assert!(values.into_iter().all(f32::is_finite), "{sets:?}: {step}");
        }
    }
}

/// In f16 an exploding loss overflows for many updates before the run gives up. None of them evicts the good
/// checkpoints, and a resume starts from one of those.
#[test]
fn a_loss_that_explodes_in_f16_leaves_a_checkpoint_to_resume_from() {
    let bench = RunFixture::new(SHAPES);
    let sets = ["--set", "train.precision=f16", "-q"];
    bench.fit(&[&["--run-dir", "run", "--max-steps", "10"], &sets[..]].concat(), 0);
    let good = bench.checkpoints();
    assert!(good.contains(&"step-00000010".to_owned()), "{good:?}");
    // Makes the weights so large that the next loss is not finite in f16.
    let text = bench.resume(&[&sets[..2], &["--set", "optimizer.lr=1e9"]].concat(), 5);
    assert!(text.contains("the last finite checkpoint is"), "{text}");
    let left = bench.checkpoints();
    assert!(left.contains(&"step-00000010".to_owned()), "{left:?}");
    assert!(left.len() <= 4, "{left:?}");
    let skipped = bench.events("step").iter().filter_map(|e| e["skipped_updates"].as_u64()).max().unwrap();
    assert!(skipped >= 10, "{skipped} updates were skipped");
    let text = bench.resume(&["--set", "train.precision=f16"], 0);
    assert!(text.contains("the next update was not finite"), "{text}");
    let losses: Vec<f64> = bench.events("step").iter().filter_map(|e| e["loss"].as_f64()).collect();
    assert!(losses.last().unwrap() < &10.0, "{losses:?}");
}

#[test]
fn a_damaged_cache_is_made_again_and_nobody_is_blamed() {
    let bench = RunFixture::new(JOB);
    bench.fit(&["--run-dir", "whole", "-q"], 0);
    let cache = bench.path("runs/.data");
    let entries = names(&cache);
    assert!(entries.len() >= 4 && entries.iter().all(|name| !name.ends_with(".part")), "{entries:?}");
    for (i, name) in entries.iter().enumerate() {
        let path = cache.join(name);
        let mut bytes = fs::read(&path).unwrap();
        match i % 3 {
            0 => {
                let at = bytes.len() / 2;
                bytes[at] ^= 1;
            }
            1 => bytes.truncate(bytes.len() / 2),
            _ => bytes.clear(),
        }
        fs::write(&path, bytes).unwrap();
        let run = format!("run-{i}");
        bench.fit(&["--run-dir", &run, "-q"], 0);
        println!("{name}");
        bench.assert_same_result(&run, &bench.path("whole"));
    }
}

#[test]
fn a_limit_on_file_sizes_is_a_full_disk() {
    let bench = RunFixture::new(&SHAPES.replace("hidden = [16]", "hidden = [256]"));
    // 64 KiB: enough for the first events, not for a checkpoint.
    let limit = "ulimit -f 64 && exec \"$@\"";
    let text =
        finish(&mut through_shell(limit, "sh", &bench.command(&["--run-dir", "run"]))).expect(1).stderr;
    assert!(text.contains("File too large") && text.contains("hint: the disk"), "{text}");
    assert_eq!(bench.checkpoints(), [""; 0]);
    bench.resume(&["-q"], 0);
}

/// A 300 KiB file system, if the machine lets us mount one.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_too_small_for_the_checkpoints_is_reported_before_the_first_step() {
    let bench = RunFixture::new(&SHAPES.replace("hidden = [16]", "hidden = [128]"));
    let Some(_disk) = harness::SmallDisk::mount(&bench.path("disk"), "300k") else { return };
    let text = bench.fit(&["--run-dir", "disk/run"], 1);
    assert!(
        text.contains("are free, and its checkpoints need") && text.contains("checkpoint.keep"),
        "{text}"
    );
    let checkpoints = bench.path("disk/run/checkpoints");
    assert!(!checkpoints.exists() || names(&checkpoints).is_empty());
}

#[test]
fn the_plan_says_what_the_disk_will_hold() {
    let bench = RunFixture::new(SHAPES);
    let plan = harness::trainer(bench.folder.path(), &["plan", "job.toml", "--json"]).json();
    let of = |key: &str| plan["disk"][key].as_u64().unwrap();
    assert_eq!((of("checkpoints"), of("checkpoints_bytes")), (4, 4 * of("checkpoint_bytes")));
    bench.fit(&["--run-dir", "run", "-q"], 0);
    let folder = bench.path("run/checkpoints/step-00000040");
    let real: u64 = names(&folder).iter().map(|name| folder.join(name).metadata().unwrap().len()).sum();
    assert!(real <= of("checkpoint_bytes") && of("checkpoint_bytes") <= real + (128 << 10), "{real}: {plan}");
    assert!(bench.checkpoints().len() <= 3);
}
