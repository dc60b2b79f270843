//! `trainer verify` through the binary: its output, its exit code, and that it leaves nothing behind.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn verify(folder: &Path, job: &str, args: &[&str]) -> Output {
    fs::write(folder.join("job.toml"), job).unwrap();
    Command::new(env!("CARGO_BIN_EXE_trainer"))
        .env("TRAINER_PROCESS_BYTES", "0")
        .args([&["verify", "job.toml"], args].concat())
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A small network with everything that must not depend on the split: batch norm, dropout, clipping, an EMA.
const JOB: &str = "\
[model]
kind = 'layers'
layers = [{ kind = 'conv', channels = 4 }, { kind = 'batch_norm', group = 4 }, { kind = 'relu' }, { kind = 'flatten' }, { kind = 'dropout', p = 0.2 }]
[data]
kind = 'shapes'
train_samples = 40
valid_samples = 8
image_size = 16
[train]
batch_size = 16
epochs = 5
clip_norm = 1.0
ema = 0.9
";

#[test]
fn a_job_is_proved_in_every_precision_and_nothing_is_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    for precision in ["f32", "bf16", "f16"] {
        let output =
            verify(folder.path(), JOB, &["--json", "--set", &format!("train.precision={precision}")]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{precision}: {said}{}", text(&output.stdout));
        assert!(said.contains("as planned: 16 x 1 = 16 samples an update"), "{said}");
        assert!(said.contains("batch norm looks at 4 samples together"), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["passed"], &report["updates"]), (&true.into(), &4.into()));
        let ways = report["ways"].as_array().unwrap();
        let names: Vec<&str> = ways.iter().map(|way| way["name"].as_str().unwrap()).collect();
        // Micro-batches are multiples of the group, so an update splits into two rather than three.
        assert_eq!(names, ["one reader", "8 x 2", "4 x 4", "recomputed", "out of memory", "resumed"]);
        assert!(ways.iter().all(|way| way["samples_digest"] == report["samples_digest"]));
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "the job alone is left");
    let people = verify(folder.path(), JOB, &["--updates", "2"]);
    let table = text(&people.stdout);
    assert!(table.contains("resumed") && table.contains("equal to the bit"), "{table}");
    assert!(table.contains("2 updates of 16 samples"), "{table}");
}

/// At a learning rate that amplifies the smallest rounding into another run, verification fails and names the place.
#[test]
fn a_job_whose_result_hangs_on_rounding_fails_and_the_parameter_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let job = "\
[model]
kind = 'gpt'
layers = 2
heads = 2
width = 16
context = 8
[data]
kind = 'text-synthetic'
vocab = 16
[train]
batch_size = 8
steps = 40
[optimizer]
kind = 'adamw'
lr = 0.3
";
    let output = verify(folder.path(), job, &["--updates", "40"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stdout));
    assert!(said.contains("is not the same experiment") && said.contains("of `"), "{said}");
    // Bitwise identical variants are so at any learning rate.
    let table = text(&output.stdout);
    assert!(table.contains("DIFFERS"), "{table}");
    for way in ["one reader", "recomputed", "resumed"] {
        let line = table.lines().find(|line| line.starts_with(way)).unwrap();
        assert!(line.contains("equal to the bit"), "{line}");
    }
}

#[test]
fn what_does_not_fit_and_what_cannot_be_varied_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let small = verify(folder.path(), JOB, &["--set", "memory.ram=1MiB"]);
    assert_eq!(small.status.code(), Some(3));
    let whole = verify(
        folder.path(),
        JOB,
        &["--updates", "2", "--set", "train.batch_size=4", "--set", "memory.on_oom=[]"],
    );
    let said = text(&whole.stderr);
    assert_eq!(whole.status.code(), Some(0), "{said}");
    assert!(said.contains("an update of 4 samples cannot be split further"), "{said}");
    assert!(said.contains("`memory.on_oom` leaves nothing to do"), "{said}");
}
