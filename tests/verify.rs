//! `trainer verify` through the binary: its output, its exit code, and that it leaves nothing behind.

use std::path::Path;

use crate::harness::{Finished, job_folder, names, trainer};

fn verify(folder: &Path, args: &[&str]) -> Finished {
    trainer(folder, &[&["verify", "job.toml"], args].concat())
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
    let folder = job_folder(JOB);
    for precision in ["f32", "bf16", "f16"] {
        let precision = format!("train.precision={precision}");
        let done = verify(folder.path(), &["--json", "--set", &precision]).expect(0);
        let said = &done.stderr;
        assert!(said.contains("as planned: 16 x 1 = 16 samples per update"), "{said}");
        assert!(said.contains("batch norm normalizes 4 samples together"), "{said}");
        let report = done.json();
        assert_eq!((&report["passed"], &report["updates"]), (&true.into(), &4.into()));
        let ways = report["variants"].as_array().unwrap();
        let names: Vec<&str> = ways.iter().map(|way| way["name"].as_str().unwrap()).collect();
        // Micro-batches are multiples of the group, so an update splits into two rather than three.
        assert_eq!(
            names,
            ["one reader", "8 x 2", "4 x 4", "recomputed", "out of memory", "resumed", "candle"]
        );
        assert!(ways.iter().all(|way| way["samples_digest"] == report["samples_digest"]));
    }
    assert_eq!(names(folder.path()), ["job.toml"], "the job alone is left");
    let table = verify(folder.path(), &["--updates", "2"]).stdout;
    assert!(table.contains("resumed") && table.contains("bitwise equal"), "{table}");
    assert!(table.contains("2 updates of 16 samples"), "{table}");
}

/// At a learning rate that amplifies the smallest rounding into another run, verification fails and names the place.
#[test]
fn a_job_whose_result_hangs_on_rounding_fails_and_the_parameter_is_named() {
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
    let Finished { stdout: table, stderr: said, .. } =
        verify(job_folder(job).path(), &["--updates", "40"]).expect(1);
    assert!(said.contains("is not the same experiment") && said.contains("of `"), "{said}");
    // Bitwise identical variants are so at any learning rate.
    assert!(table.contains("DIFFERS"), "{table}");
    for way in ["one reader", "recomputed", "resumed"] {
        let line = table.lines().find(|line| line.starts_with(way)).unwrap();
        assert!(line.contains("bitwise equal"), "{line}");
    }
}

#[test]
fn what_does_not_fit_and_what_cannot_be_varied_is_said() {
    let folder = job_folder(JOB);
    verify(folder.path(), &["--set", "memory.ram=1MiB"]).expect(3);
    let sets = ["--set", "train.batch_size=4", "--set", "memory.on_oom=[]"];
    let said = verify(folder.path(), &[&["--updates", "2"], &sets[..]].concat()).expect(0).stderr;
    assert!(said.contains("an update of 4 samples cannot be split further"), "{said}");
    assert!(said.contains("`memory.on_oom` allows no measure that is left"), "{said}");
}
