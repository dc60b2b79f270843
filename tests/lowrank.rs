//! Factorized layers through the binary: what they start from, the ranks a run keeps, resumes, and what comes out.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;

use crate::harness::{
    FinalState, command, events, finish, job_folder, last, newest_checkpoint, read_json, trainer,
};

fn job(model: &str, keys: &str) -> String {
    format!(
        "seed = 3\n[model]\n{model}\n[data]\nkind = \"shapes\"\ntrain_samples = 128\nvalid_samples = 64\n\
         image_size = 16\n[log]\ntensorboard = false\nreport = false\n[checkpoint]\nevery_steps = 4\n\
         [train]\nbatch_size = 16\nsteps = 8\n{keys}\n"
    )
}

const MLP: &str = "kind = \"mlp\"\nhidden = [48, 32]";
const CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 8, norm = \"batch\" }, { channels = 16 }]\nhidden = [32]\n\
    norm_group = 8\ndropout = 0.1";
const VIT: &str = "kind = \"vit\"\nlayers = 2\nheads = 2\nwidth = 16\npatch = 4";
const RESNET: &str = "kind = \"resnet\"\ndepth = 18\nstem = \"small\"\nnorm_group = 8";
const MOBILENET: &str = "kind = \"mobilenet\"\nstem = \"small\"\nnorm_group = 8\nwidth = 0.35";

/// A job that factorizes the run in `whole`.
fn lowrank_job(model: &str, train: &str, lowrank: &str) -> String {
    job(model, &format!("init = \"whole\"\n{train}\n[lowrank]\n{lowrank}"))
}

/// Shape and values of each tensor of a file.
fn tensors(file: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(file).unwrap();
    let values = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all = file.tensors().into_iter();
    all.map(|(name, tensor)| (name, (tensor.shape().to_vec(), values(tensor.data())))).collect()
}

fn weights(run: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    tensors(&newest_checkpoint(run).join("model.safetensors"))
}

fn count(tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> usize {
    tensors.iter().filter(|(name, _)| !name.contains("running_")).map(|(_, (_, values))| values.len()).sum()
}

/// Layers of every kind become two, the model computes, and other formats have it or refuse it by the name of a layer.
#[test]
fn every_kind_of_model_is_factorized() {
    let kinds = [
        (MLP, "layers.0", "target = \"2x\"", vec!["onnx", "tflite", "safetensors"]),
        (CNN, "stages.1", "energy = 0.8", vec!["onnx", "tflite", "safetensors"]),
        (
            VIT,
            "encoder.layers.encoder_layer_0.self_attention.in_proj",
            "rank = 4",
            vec!["onnx", "safetensors"],
        ),
        (RESNET, "layer1.0.conv1", "energy = 0.5\nlayers = \"layer1\"", vec!["onnx"]),
        (MOBILENET, "features.3.conv.0.0", "rank = 4\nlayers = \"features.?.conv.0\"", vec!["tflite"]),
    ];
    for (model, layer, lowrank, formats) in kinds {
        let folder = job_folder(job(model, ""));
        let at = folder.path();
        let fit = |run: &str| {
            trainer(at, &["fit", "job.toml", "--run-dir", run, "-q", "--set", "train.steps=2"]).expect(0)
        };
        fit("whole");
        fs::write(at.join("job.toml"), lowrank_job(model, "ema = 0.9", lowrank)).unwrap();
        fit("run");
        let (whole, run) = (weights(&at.join("whole")), weights(&at.join("run")));
        assert!(count(&run) < count(&whole), "{model}");
        let kept = read_json_job(&at.join("run"));
        let rank =
            kept["lowrank"]["ranks"][layer].as_integer().unwrap_or_else(|| panic!("{layer} in {kept}"));
        let [first, second] = ["0", "1"].map(|part| &run[&format!("{layer}.{part}.weight")].0);
        assert_eq!((first[0], second[1]), (rank as usize, rank as usize), "{layer}");
        let all = events(&at.join("run"));
        let factorized = last(&all, "initialized")["factorized"].as_array().unwrap();
        assert!(factorized.iter().any(|name| name == layer), "{factorized:?}");
        let summary = read_json(&at.join("run/summary.json"));
        let bytes = |key: &str| summary[key]["ram"].as_u64().unwrap();
        assert!(bytes("measured_peak_bytes") <= bytes("planned_peak_bytes"), "{summary}");
        // The run that it came from is not needed any more.
        fs::remove_dir_all(at.join("whole")).unwrap();
        let of_run = trainer(at, &["eval", "run", "--json"]).expect(0).json();
        for format in formats {
            let out = format!("out-{format}");
            trainer(at, &["export", "run", "--format", format, "-o", &out, "-q"]).expect(0);
            let of_export = trainer(at, &["eval", &out, "--json"]).expect(0).json();
            let loss = |found: &serde_json::Value| found["metrics"]["loss"].as_f64().unwrap();
            let [run, export] = [&of_run, &of_export].map(loss);
            assert!((run - export).abs() < 1e-4 * run.abs(), "{model} as {format}: {run} and {export}");
        }
        if model == VIT {
            let text = trainer(at, &["export", "run", "--format", "hf", "-o", "hf"]).expect(2).stderr;
            assert!(text.contains("is factorized by `[lowrank]`, which `hf` does not support"), "{text}");
        }
    }
}

fn read_json_job(run: &Path) -> toml::Table {
    fs::read_to_string(run.join("job.toml")).unwrap().parse().unwrap()
}

/// Frozen factors are those of the decomposition: their product keeps the energy that the job says, and one rank
/// less would not. Biases are those of the whole layer.
#[test]
fn factors_keep_the_energy_of_the_weight() {
    let folder = job_folder(job(MLP, ""));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "whole", "-q"]).expect(0);
    let freeze = "freeze = [\"*\", \"!layers.2\"]";
    fs::write(at.join("job.toml"), lowrank_job(MLP, freeze, "energy = 0.7\nlayers = \"layers.0\"")).unwrap();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let (whole, run) = (weights(&at.join("whole")), weights(&at.join("run")));
    let (shape, values) = &whole["layers.0.weight"];
    let ((_, first), (second_shape, second)) = (&run["layers.0.0.weight"], &run["layers.0.1.weight"]);
    let (rows, columns, rank) = (shape[0], shape[1], second_shape[1]);
    let lost = |rank_kept: usize| {
        let error = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            let pair = |k: usize| f64::from(second[row * rank + k]) * f64::from(first[k * columns + column]);
            (f64::from(values[i]) - (0..rank_kept).map(pair).sum::<f64>()).powi(2)
        };
        let energy: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        (0..rows * columns).map(error).sum::<f64>() / energy
    };
    assert!(lost(rank) <= 0.3 && lost(rank - 1) > 0.3, "{} and {}", lost(rank), lost(rank - 1));
    assert_eq!(whole["layers.0.bias"], run["layers.0.1.bias"]);
    assert_eq!(whole["layers.1.weight"], run["layers.1.weight"]);
}

/// Killed or stopped and resumed, a run has the bits of the undisturbed one, though the weights it started from
/// are gone.
#[test]
fn disturbances_change_no_bit() {
    for (model, keys) in [(CNN, "precision = \"bf16\"\nema = 0.5"), (MLP, "")] {
        let folder = job_folder(job(model, ""));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "whole", "-q"]).expect(0);
        fs::write(at.join("job.toml"), lowrank_job(model, keys, "target = \"1.5x\"")).unwrap();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let undisturbed = FinalState::of(&at.join("run"));
        let mut killed = command(at, &["fit", "job.toml", "--run-dir", "killed", "-q"]);
        finish(killed.env("TRAINER_FAULT_CRASH", "kill:6")).expect(0);
        undisturbed.assert_same(&FinalState::of(&at.join("killed")));
        trainer(at, &["fit", "job.toml", "--run-dir", "part", "-q", "--max-steps", "4"]).expect(0);
        fs::remove_dir_all(at.join("whole")).unwrap();
        trainer(at, &["fit", "job.toml", "--run-dir", "part", "-q", "--resume"]).expect(0);
        assert!(undisturbed.tensors == FinalState::of(&at.join("part")).tensors, "{model}");
        let other = ["--resume", "--set", "train.steps=20", "--set", "lowrank.target=3x"];
        let text = trainer(at, &[&["fit", "job.toml", "--run-dir", "run", "-q"], &other[..]].concat());
        let text = text.expect(2).stderr;
        assert!(text.contains("lowrank.target"), "another experiment: {text}");
    }
}

/// A language model is factorized without weights to start from, generates text, and no other tool has a form for it.
#[test]
fn a_factorized_language_model_generates() {
    let models = [
        "kind = \"gpt\"\nlayers = 2\nheads = 2\nwidth = 16\ncontext = 16",
        "kind = \"llama\"\nlayers = 2\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32\ncontext = 16",
    ];
    for model in models {
        let folder = job_folder(format!(
            "[model]\n{model}\n[data]\nkind = \"text\"\ntrain = \"a.txt\"\n\
             [train]\nbatch_size = 4\nsteps = 3\n[lowrank]\nrank = 3\n[log]\ntensorboard = false\nreport = false\n"
        ));
        let at = folder.path();
        fs::write(at.join("a.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let found = trainer(at, &["check", "job.toml", "--json"]).expect(0).json();
        let (whole, now) = (&found["factorized"]["whole_parameters"], &found["parameters"]);
        assert!(found["factorized"]["layers"].as_u64() > Some(1) && whole.as_u64() > now.as_u64(), "{found}");
        trainer(at, &["generate", "run", "--prompt", "the ", "--max-tokens", "4"]).expect(0);
        for format in ["gguf", "hf"] {
            let text = trainer(at, &["export", "run", "--format", format, "-o", "out"]).expect(2).stderr;
            assert!(text.contains("is factorized") && text.contains("hint: `--format onnx`"), "{text}");
            assert!(!text.contains("tflite"), "language models have no such form: {text}");
        }
    }
}

/// A model without its pruned units is factorized where none are counted.
#[test]
fn what_pruning_left_is_factorized() {
    for (structure, whole) in [("channels", ".mlp."), ("heads", ".attn.")] {
        let job = |train: &str, keys: &str| {
            format!(
                "[model]\nkind = \"gpt\"\nlayers = 2\nheads = 4\nwidth = 32\ncontext = 16\n[data]\nkind = \"text\"\n\
                 train = \"a.txt\"\ntokens = \"bytes\"\n[train]\nbatch_size = 4\nsteps = 3\n{train}\n{keys}\n\
                 [log]\ntensorboard = false\nreport = false\n"
            )
        };
        let prune = format!(
            "[prune]\nstructure = \"{structure}\"\nschedule = \"constant\"\nfinal = 0.5\nbegin_step = 1"
        );
        let folder = job_folder(job("", &prune));
        let at = folder.path();
        fs::write(at.join("a.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
        trainer(at, &["fit", "job.toml", "--run-dir", "pruned", "-q"]).expect(0);
        trainer(at, &["export", "pruned", "--format", "safetensors", "-o", "small", "-q"]).expect(0);
        let description = read_json(&at.join("small/model.json"));
        let kept = description["job"]["prune"]["kept"].as_object().unwrap();
        let counts: Vec<String> =
            kept.iter().map(|(layer, count)| format!("\"{layer}\" = {count}")).collect();
        for lowrank in ["rank = 8", "rank = 2", "energy = 0.5", "target = \"1.05x\""] {
            let keys = format!("[prune]\nkept = {{ {} }}\n[lowrank]\n{lowrank}", counts.join(", "));
            fs::write(at.join("job.toml"), job("init = \"small\"", &keys)).unwrap();
            trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
            let job = read_json_job(&at.join("run"));
            let ranks = job["lowrank"]["ranks"].as_table().unwrap();
            assert!(
                !ranks.is_empty() && ranks.keys().all(|layer| !layer.contains(whole)),
                "{lowrank}: {ranks}"
            );
            trainer(at, &["export", "run", "--format", "safetensors", "-o", "out", "-q"]).expect(0);
            let [run, export] = ["run", "out"].map(|model| {
                let found = trainer(at, &["eval", model, "--json"]).expect(0).json();
                found["metrics"]["loss"].as_f64().unwrap()
            });
            assert!((run - export).abs() < 1e-4 * run.abs(), "{lowrank}: {run} and {export}");
            ["run", "out"].iter().for_each(|name| fs::remove_dir_all(at.join(name)).unwrap());
        }
    }
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    let folder = job_folder(job(MLP, ""));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "whole", "-q"]).expect(0);
    let refuse = |init: &str, lowrank: &str, expected: &[&str]| {
        fs::write(at.join("job.toml"), job(MLP, &format!("{init}\n[lowrank]\n{lowrank}"))).unwrap();
        let text = trainer(at, &["check", "job.toml"]).expect(2).stderr;
        assert!(expected.iter().all(|words| text.contains(words)), "{lowrank}: {text}");
    };
    let init = "init = \"whole\"";
    refuse("", "layers = \"layers.0\"", &["states no rank"]);
    refuse("", "target = \"2x\"", &["`lowrank.target` needs `train.init`"]);
    refuse(init, "target = \"half\"", &["a factor above 1, such as \"2x\""]);
    refuse(init, "target = \"2x\"\nenergy = 0.5", &["exclude each other"]);
    refuse(init, "target = \"500x\"", &["with rank 1 in every layer", "times smaller"]);
    refuse(init, "rank = 4\nlayers = \"layer.0\"", &["`lowrank.layers` has `layer.0`", "`layers.0.weight`"]);
    refuse(init, "rank = 4\nlayers = \"layers.[\"", &["`layers.[` is no pattern"]);
    refuse(init, "rank = 41", &["of 2 layers that may be, none becomes smaller", "a rank of 41"]);
    refuse(
        init,
        "ranks = { \"layers.7\" = 4 }",
        &["has `layers.7`, which is no layer that can be factorized"],
    );
    refuse(init, "ranks = { \"layers.1\" = 20 }", &["has 20 for `layers.1`", "a rank of 19"]);
    refuse(init, "ranks = { \"layers.1\" = 0 }", &["the rank of `layers.1` cannot be 0"]);
    refuse("init = \"gone\"", "energy = 0.5", &["does not exist"]);
}
