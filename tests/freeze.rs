//! Frozen parameters and groups of parameters, through the binary.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;

use crate::harness::{FinalState, command, events, finish, job_folder, last, names, read_json, trainer};

fn job(model: &str, train: &str, rest: &str) -> String {
    format!(
        "seed = 3\n[model]\n{model}\n[data]\nkind = \"shapes\"\ntrain_samples = 256\nvalid_samples = 64\nimage_size = 16\n\
         [train]\nbatch_size = 16\nsteps = 12\nclip_norm = 1.0\n{train}\n{rest}\n[checkpoint]\nevery_steps = 4\nkeep = 9\n\
         [log]\ntensorboard = false\n"
    )
}

const MOBILENET: &str = "kind = \"mobilenet\"\nwidth = 0.25\nstem = \"small\"\nnorm_group = 8";
const CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 8, norm = \"batch\" }, { channels = 16 }]\nhidden = [32]\n\
    norm_group = 8\ndropout = 0.1";

/// The tensors of a file, by name.
pub fn tensors(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, tensor)| (name, tensor.data().to_vec())).collect()
}

/// A checkpoint's model and optimizer state, by name.
fn checkpoint(run: &Path, step: usize) -> [BTreeMap<String, Vec<u8>>; 2] {
    let folder = run.join(format!("checkpoints/step-{step:08}"));
    ["model.safetensors", "optimizer.safetensors"].map(|file| tensors(&folder.join(file)))
}

#[test]
fn frozen_parameters_stay_and_cost_nothing() {
    let folder = job_folder(job(CNN, "", ""));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "whole", "-q"]).expect(0);
    let freeze = "train.freeze=[\"*\", \"!layers.1\"]";
    trainer(at, &["fit", "job.toml", "--run-dir", "head", "-q", "--set", freeze]).expect(0);
    let [(before, _), (after, state)] =
        [4, 12].map(|step| checkpoint(&at.join("head"), step)).map(|[model, state]| (model, state));
    for (name, values) in &before {
        let is_head = name.starts_with("layers.1.");
        assert_eq!(*values != after[name], is_head, "{name}");
    }
    // The head has 32 x 10 weights and 10 biases; f32.
    assert!(state.values().all(|values| values.len() == 4 * 330), "state of the head alone");
    let [whole, head] = ["whole", "head"].map(|run| read_json(&at.join(run).join("plan.json")));
    let peak = |plan: &serde_json::Value| plan["peak"]["ram_bytes"].as_u64().unwrap();
    assert!(peak(&head) < peak(&whole), "{} {}", peak(&head), peak(&whole));
    assert_eq!(head["trained_parameters"], 330);
    let started = events(&at.join("head"));
    let started = last(&started, "started");
    assert_eq!(started["trained_parameters"], 330);
    assert_eq!(started["parameters"], head["parameters"]);
    for run in ["whole", "head"] {
        let summary = read_json(&at.join(run).join("summary.json"));
        let bytes = |key: &str| summary[key]["ram"].as_u64().unwrap();
        assert!(bytes("measured_peak_bytes") <= bytes("planned_peak_bytes"), "{run}: {summary}");
    }
}

/// Killed and resumed, and after an out-of-memory error, a run with frozen parameters and groups has the bits of the
/// undisturbed one, whatever the optimizer, in f32 and in bf16, with and without a moving average.
#[test]
fn disturbances_change_no_bit() {
    let groups = "[[train.groups]]\nparams = \"layers.0\"\nlr_scale = 0.3\n[[train.groups]]\nparams = \"*.bias\"\nweight_decay = 0.1\n";
    let runs = [
        (CNN, "adamw", "ema = 0.9\nfreeze = [\"stages.0\", \"*.bias\"]"),
        (CNN, "adamw8bit", "precision = \"bf16\"\nfreeze = [\"stages.1\", \"layers.0.weight\"]"),
        (CNN, "adafactor", "precision = \"bf16\"\nema = 0.9\nfreeze = \"stages.0\""),
        (MOBILENET, "lion", "freeze = [\"*\", \"!features.18\", \"!classifier\"]"),
        (MOBILENET, "sgd", "precision = \"bf16\"\nfreeze = [\"features.0\", \"features.*.weight\"]"),
    ];
    for (model, optimizer, train) in runs {
        let momentum = if optimizer == "sgd" { "momentum = 0.9\n" } else { "" };
        let rest = format!("[optimizer]\nkind = \"{optimizer}\"\nlr = 0.002\n{momentum}");
        let groups = if model == CNN { groups } else { "" };
        let folder = job_folder(job(model, train, &format!("{groups}{rest}")));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let undisturbed = FinalState::of(&at.join("run"));
        let mut killed = command(at, &["fit", "job.toml", "--run-dir", "killed", "-q"]);
        finish(killed.env("TRAINER_FAULT_CRASH", "kill:6")).expect(0);
        undisturbed.assert_same(&FinalState::of(&at.join("killed")));
        trainer(at, &["fit", "job.toml", "--run-dir", "resumed", "-q", "--max-steps", "4"]).expect(0);
        trainer(at, &["fit", "job.toml", "--run-dir", "resumed", "-q", "--resume"]).expect(0);
        let resume = ["fit", "job.toml", "--run-dir", "resumed", "-q", "--resume", "--set", "train.steps=20"];
        let text =
            trainer(at, &[&resume[..], &["--set", "train.freeze=\"*.bias\""]].concat()).expect(2).stderr;
        assert!(text.contains("train.freeze"), "{optimizer}: another experiment: {text}");
        let frozen = |step| checkpoint(&at.join("run"), step)[0].clone();
        let (first, end) = (frozen(4), frozen(12));
        assert!(first.iter().any(|(name, values)| end[name] == *values), "{optimizer}: some are frozen");
        assert!(first.iter().any(|(name, values)| end[name] != *values), "{optimizer}: some are trained");
        let steps = names(&at.join("run/checkpoints")).len();
        assert!(steps >= 3, "{optimizer}: {steps} checkpoints");
    }
}

/// The token table of a language model with a tied head is frozen by either name.
#[test]
fn a_tied_head_is_frozen_by_either_name() {
    let job = "[model]\nkind = \"gpt\"\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 16\n[data]\nkind = \"text-synthetic\"\n\
               [train]\nbatch_size = 4\nsteps = 3\n[checkpoint]\nevery_steps = 1\nkeep = 9\n[log]\ntensorboard = false\n";
    let folder = job_folder(job);
    let at = folder.path();
    let run = |name: &str, pattern: &str| {
        let set = format!("train.freeze={pattern}");
        trainer(at, &["fit", "job.toml", "--run-dir", name, "-q", "--set", &set]).expect(0);
        [1, 3].map(|step| checkpoint(&at.join(name), step)[0].clone())
    };
    let [first, end] = run("table", "\"transformer.wte\"");
    assert!(first["transformer.wte.weight"] == end["transformer.wte.weight"]);
    assert!(first["transformer.wpe.weight"] != end["transformer.wpe.weight"]);
    assert!(run("head", "\"lm_head.weight\"") == [first, end]);
}
