//! Every CPU dispatch through the binary: the same experiment under each, bitwise reproducible, with a plan not below
//! what is measured, and a clear error for a dispatch the machine lacks.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use trainer::kernels::dispatch::{Dispatch, ENV_VAR};

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

fn trainer(folder: &Path, dispatch: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(args).current_dir(folder).env(ENV_VAR, dispatch).output().unwrap()
}

/// What a run left: its losses, its weights, and the planned and measured peaks.
struct RunResult {
    losses: Vec<f64>,
    weights: Vec<u8>,
    peaks: (u64, u64),
}

fn run(folder: &Path, dispatch: Dispatch, name: &str) -> RunResult {
    let output = trainer(folder, dispatch.name(), &["fit", "job.toml", "-q", "--run-dir", name]);
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let run = folder.join(name);
    let events = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let events: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let named = |name: &'static str| events.iter().filter(move |event| event["event"] == name);
    let finished = named("finished").next().unwrap();
    let bytes = |key: &str| finished[key]["ram"].as_u64().unwrap();
    let newest = run.join(format!("checkpoints/step-{STEPS:08}/model.safetensors"));
    RunResult {
        losses: named("step").map(|step| step["loss"].as_f64().unwrap()).collect(),
        weights: fs::read(newest).unwrap(),
        peaks: (bytes("planned_peak_bytes"), bytes("measured_peak_bytes")),
    }
}

#[test]
fn all_dispatches_make_the_same_experiment() {
    for dispatch in Dispatch::ALL.into_iter().filter(|dispatch| !dispatch.is_available()) {
        println!("skipped: this machine has no {}", dispatch.name());
    }
    let dispatches: Vec<Dispatch> = Dispatch::ALL.into_iter().filter(|d| d.is_available()).collect();
    for (model, sizes, data, batch) in JOBS {
        for (precision, tolerance) in TYPES {
            let folder = tempfile::tempdir().unwrap();
            let job = format!(
                "name = 'dispatch'\nseed = 3\n[model]\nkind = '{model}'\n{sizes}\n[data]\n{data}\n\
                 [train]\nbatch_size = {batch}\nsteps = {STEPS}\nprecision = '{precision}'\n[optimizer]\nkind = 'sgd'\n\
                 lr = 0.001\n[log]\nevery_steps = 1\ntensorboard = false\n",
            );
            fs::write(folder.path().join("job.toml"), job).unwrap();
            let mut first: Option<RunResult> = None;
            for dispatch in &dispatches {
                let what = format!("{model} in {precision} by {}", dispatch.name());
                let left = run(folder.path(), *dispatch, dispatch.name());
                let again = run(folder.path(), *dispatch, &format!("{}-again", dispatch.name()));
                assert_eq!(left.losses, again.losses, "{what}: losses of two runs");
                assert!(left.weights == again.weights, "{what}: bits of two runs");
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
    let output = trainer(folder.path(), "sse9", &["probe"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        format!(
            "error: `TRAINER_CPU_DISPATCH=sse9` names no dispatch; allowed: portable, avx2, avx512, amx\n  \
             hint: unset `TRAINER_CPU_DISPATCH` for the best that there is: `{}`\n",
            Dispatch::best().name()
        )
    );
    match Dispatch::ALL.into_iter().find(|dispatch| !dispatch.is_available()) {
        None => println!("skipped: this machine has every dispatch"),
        Some(missing) => {
            let output = trainer(folder.path(), missing.name(), &["probe"]);
            assert_eq!(output.status.code(), Some(2));
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains("does not have"), "{said}");
        }
    }
    assert_eq!(trainer(folder.path(), "", &["probe"]).status.code(), Some(0), "an empty value is ignored");
}
