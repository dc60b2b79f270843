//! Every CPU dispatch through the binary: the same experiment under each, bitwise reproducible, with a plan not below
//! what is measured, and a clear error for a dispatch the machine lacks.

use std::path::Path;

use trainer::kernels::dispatch::{Dispatch, ENV_VAR};

use crate::harness::{Finished, events, finish, job_folder, last, losses, measured_command, skip, tensors};

const TOKENS: &str = "kind = 'text-synthetic'\nvocab = 61\ntrain_samples = 29\nvalid_samples = 4";
const IMAGES: &str = "kind = 'shapes'\nimage_size = 20\ntrain_samples = 37\nvalid_samples = 4";

/// Name, `[model]`, `[data]` and samples per update: sizes that tiles, vectors and threads do not divide, and a short
/// last batch.
const JOBS: [(&str, &str, &str, usize); 3] = [
    ("mlp", "hidden = [101, 67]\nactivation = 'gelu'", IMAGES, 8),
    (
        "cnn",
        "stages = [{ channels = 24, kernel = 5 }, { channels = 32 }, { channels = 40 }]\nhidden = [33]",
        IMAGES,
        5,
    ),
    ("gpt", "layers = 2\nheads = 3\nwidth = 96\ncontext = 50", TOKENS, 5),
];
/// Relative difference of losses allowed between dispatches: one rounding of the dtype.
const TYPES: [(&str, f64); 3] = [("f32", 1e-4), ("bf16", 5e-3), ("f16", 1e-3)];
const STEPS: usize = 9;

fn trainer(folder: &Path, dispatch: &str, args: &[&str]) -> Finished {
    finish(measured_command(folder, args).env(ENV_VAR, dispatch))
}

/// What a run left: its losses, its tensors, and the planned and measured peaks.
struct RunResult {
    losses: Vec<f64>,
    tensors: Vec<(String, Vec<u8>)>,
    peaks: (u64, u64),
}

fn run(folder: &Path, dispatch: Dispatch, name: &str) -> RunResult {
    trainer(folder, dispatch.name(), &["fit", "job.toml", "-q", "--run-dir", name]).expect(0);
    let run = folder.join(name);
    let events = events(&run);
    let bytes = |key: &str| last(&events, "finished")[key]["ram"].as_u64().unwrap();
    RunResult {
        losses: losses(&events),
        tensors: tensors(&run),
        peaks: (bytes("planned_peak_bytes"), bytes("measured_peak_bytes")),
    }
}

#[test]
fn all_dispatches_make_the_same_experiment() {
    for dispatch in Dispatch::ALL.into_iter().filter(|dispatch| !dispatch.is_available()) {
        skip(format!("this machine has no {}", dispatch.name()));
    }
    let dispatches: Vec<Dispatch> = Dispatch::ALL.into_iter().filter(|d| d.is_available()).collect();
    for (model, sizes, data, batch) in JOBS {
        for (precision, tolerance) in TYPES {
            let job = format!(
                "name = 'dispatch'\nseed = 3\n[model]\nkind = '{model}'\n{sizes}\n[data]\n{data}\n\
                 [train]\nbatch_size = {batch}\nsteps = {STEPS}\nprecision = '{precision}'\n[optimizer]\nkind = 'sgd'\n\
                 lr = 0.001\n[log]\nevery_steps = 1\ntensorboard = false\n",
            );
            let folder = job_folder(job);
            let mut first: Option<RunResult> = None;
            for dispatch in &dispatches {
                let what = format!("{model} in {precision} by {}", dispatch.name());
                let left = run(folder.path(), *dispatch, dispatch.name());
                let again = run(folder.path(), *dispatch, &format!("{}-again", dispatch.name()));
                assert_eq!(left.losses, again.losses, "{what}: losses of two runs");
                assert!(left.tensors == again.tensors, "{what}: bits of two runs");
                let (planned, measured) = left.peaks;
                assert!(planned >= measured, "{what}: {planned} bytes planned, {measured} measured");
                assert_eq!(left.losses.len(), STEPS, "{what}");
                if let Some(first) = &first {
                    for (a, b) in first.losses.iter().zip(&left.losses) {
                        assert!(
                            (a - b).abs() <= tolerance * a.abs(),
                            "{what}: a loss of {b}, of {a} elsewhere"
                        );
                    }
                }
                first.get_or_insert(left);
            }
        }
    }
}

#[test]
fn what_there_is_not_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        trainer(folder.path(), "sse9", &["probe"]).expect(2).stderr,
        format!(
            "error: `TRAINER_CPU_DISPATCH=sse9` names no dispatch; allowed: portable, avx2, avx512, amx\n  \
             hint: unset `TRAINER_CPU_DISPATCH` to use the best of this processor: `{}`\n",
            Dispatch::best().name()
        )
    );
    match Dispatch::ALL.into_iter().find(|dispatch| !dispatch.is_available()) {
        None => skip("this machine has every dispatch"),
        Some(missing) => {
            let said = trainer(folder.path(), missing.name(), &["probe"]).expect(2).stderr;
            assert!(said.contains("does not have"), "{said}");
        }
    }
    // An empty value is ignored.
    trainer(folder.path(), "", &["probe"]).expect(0);
}
