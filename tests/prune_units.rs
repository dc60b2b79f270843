//! Pruned channels and heads through the binary: what is zero, what an export is without, the plan, and resumes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::harness::{
    FinalState, command, events, finish, job_folder, last, newest_checkpoint, read_json, trainer,
};

const SHAPES: &str = "kind = \"shapes\"\ntrain_samples = 64\nvalid_samples = 32\nimage_size = 16";
const TEXT: &str = "kind = \"text\"\ntrain = \"text.txt\"\nvalid_fraction = 0.2\ntokens = \"bytes\"";
const REVIEWS: &str = "kind = \"jsonl\"\ntrain = \"reviews.jsonl\"\nvalid_fraction = 0.25\nlabel = \"label\"\n\
    tokens = \"bytes\"";

const MLP: &str = "kind = \"mlp\"\nhidden = [24, 16]\nactivation = \"gelu\"\ndropout = 0.1";
const CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 8, norm = \"batch\" }, { channels = 12 }]\nhidden = [16]\n\
    norm_group = 8";
const RESNET: &str = "kind = \"resnet\"\ndepth = 18\nstem = \"small\"\nnorm_group = 8";
const MOBILENET: &str = "kind = \"mobilenet\"\nstem = \"small\"\nnorm_group = 8\nwidth = 0.25";
const VIT: &str = "kind = \"vit\"\nlayers = 2\nheads = 4\nwidth = 16\npatch = 4";
const GPT: &str = "kind = \"gpt\"\nlayers = 2\nheads = 4\nwidth = 16\ncontext = 16";
const LLAMA: &str =
    "kind = \"llama\"\nlayers = 2\nheads = 8\nkv_heads = 4\nwidth = 32\nhidden = 24\ncontext = 16";
const BERT: &str = "kind = \"bert\"\nlayers = 2\nheads = 4\nwidth = 16\nhidden = 24\ncontext = 16";

const HALF: &str = "initial = 0.2\nfinal = 0.5\nbegin_step = 2\nend_step = 4\nevery_steps = 1";

fn job(model: &str, data: &str, train: &str, prune: &str) -> String {
    format!(
        "seed = 3\n[model]\n{model}\n[data]\n{data}\n[train]\nbatch_size = 8\nsteps = 6\n{train}\n[prune]\n{prune}\n\
         [checkpoint]\nevery_steps = 2\nkeep = 9\n[log]\ntensorboard = false\nreport = false\n"
    )
}

/// A folder with a job, a text and labelled texts.
fn folder_of(job: String) -> tempfile::TempDir {
    let folder = job_folder(job);
    let line = |i: usize| format!("line {i} says {} and then some more\n", i * 7 % 13);
    fs::write(folder.path().join("text.txt"), (0..60).map(line).collect::<String>()).unwrap();
    let review = |i: usize| {
        let (text, label) =
            if i.is_multiple_of(2) { ("good and warm", "good") } else { ("bad, cold", "bad") };
        format!("{{\"text\": \"{text} {}\", \"label\": \"{label}\"}}\n", i % 5)
    };
    fs::write(folder.path().join("reviews.jsonl"), (0..64).map(review).collect::<String>()).unwrap();
    folder
}

/// Shape and values of each tensor of a file.
fn tensors(file: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(file).unwrap();
    let values = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all = file.tensors().into_iter();
    all.map(|(name, tensor)| (name, (tensor.shape().to_vec(), values(tensor.data())))).collect()
}

fn loss(found: &Value) -> f64 {
    found["metrics"]["loss"].as_f64().unwrap_or_else(|| panic!("{found}"))
}

/// Every kind: half of the units go, an export is without them and computes the same, in every format that has a form
/// for it, and as large as the plan said.
#[test]
fn exports_are_without_pruned_units() {
    let cases = [
        (MLP, SHAPES, "channels", "layers.0.bias", 12, vec!["onnx", "tflite"]),
        (CNN, SHAPES, "channels", "stages.0.norm.weight", 4, vec!["onnx", "tflite"]),
        (RESNET, SHAPES, "channels", "layer2.0.bn1.weight", 64, vec!["tflite"]),
        (MOBILENET, SHAPES, "channels", "features.2.conv.1.1.weight", 24, vec!["onnx"]),
        (VIT, SHAPES, "channels", "encoder.layers.encoder_layer_1.mlp.0.bias", 32, vec!["onnx", "hf"]),
        (
            VIT,
            SHAPES,
            "heads",
            "encoder.layers.encoder_layer_1.self_attention.in_proj_bias",
            24,
            vec!["onnx"],
        ),
        (GPT, TEXT, "channels", "transformer.h.0.mlp.c_fc.bias", 32, vec!["onnx", "hf", "gguf"]),
        (GPT, TEXT, "heads", "transformer.h.1.attn.c_attn.bias", 24, vec!["onnx"]),
        (LLAMA, TEXT, "channels", "model.layers.0.mlp.up_proj.weight", 12, vec!["onnx", "hf", "gguf"]),
        (LLAMA, TEXT, "heads", "model.layers.1.self_attn.k_proj.weight", 8, vec!["onnx", "hf", "gguf"]),
        (BERT, REVIEWS, "channels", "bert.encoder.layer.0.intermediate.dense.bias", 12, vec!["onnx", "hf"]),
        (BERT, REVIEWS, "heads", "bert.encoder.layer.0.attention.self.key.bias", 8, vec!["onnx"]),
    ];
    for (model, data, structure, tensor, len, formats) in cases {
        let prune = format!("structure = \"{structure}\"\n{HALF}");
        let folder = folder_of(job(model, data, "ema = 0.5", &prune));
        let (at, what) = (folder.path(), format!("{model}: {structure}"));
        let planned = trainer(at, &["plan", "job.toml", "--json", "--ram", "2GiB"]).expect(0).json();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let all = events(&at.join("run"));
        let pruned = last(&all, "pruned");
        let [removed, units] = ["pruned_units", "units"].map(|key| pruned[key].as_u64().unwrap());
        assert!(removed * 2 == units && units > 0, "{what}: {removed} of {units}");
        assert_eq!(planned["pruned"]["units"]["removed"].as_u64(), Some(removed), "{what}");
        let summary = read_json(&at.join("run/summary.json"));
        let bytes = |key: &str| summary[key]["ram"].as_u64().unwrap();
        assert!(bytes("measured_peak_bytes") <= bytes("planned_peak_bytes"), "{what}: {summary}");
        // The average has the zeros of the weights.
        let checkpoint = newest_checkpoint(&at.join("run"));
        let [weights, average] =
            ["model.safetensors", "ema.safetensors"].map(|name| tensors(&checkpoint.join(name)));
        for (name, (_, average)) in &average {
            let zeros = weights[name].1.iter().zip(average).filter(|(w, _)| **w == 0.0);
            assert!(zeros.clone().all(|(_, a)| *a == 0.0), "{what}: {name}");
        }
        let of_run = trainer(at, &["eval", "run", "--checkpoint", "last", "--json"]).expect(0).json();
        for format in ["safetensors"].iter().chain(&formats) {
            let args = ["export", "run", "--checkpoint", "last", "--format", format, "-o", format, "--json"];
            let dtype: &[&str] = if *format == "gguf" { &["--dtype", "f32"] } else { &[] };
            let written = trainer(at, &[&args, dtype].concat()).expect(0).json();
            let pairs = written["comparison"].as_array().unwrap();
            assert!(!pairs.is_empty(), "{what} as {format}: {written}");
            // Its ranks of almost equal outputs may change.
            for pair in pairs.iter().filter(|pair| pair["metric"] != "roc_auc") {
                let [before, after] = ["before", "after"].map(|key| pair[key].as_f64().unwrap());
                assert!((before - after).abs() <= 1e-4 * before.abs().max(1.0), "{what} as {format}: {pair}");
            }
            let exported = trainer(at, &["eval", format, "--json"]).expect(0).json();
            let [before, after] = [&of_run, &exported].map(loss);
            assert!((before - after).abs() < 1e-4 * before.abs(), "{what} as {format}: {before} and {after}");
        }
        let exported = tensors(&at.join("safetensors/model.safetensors"));
        assert_eq!(exported[tensor].0[0], len, "{what}");
        let values: usize = exported.values().map(|(_, values)| values.len()).sum();
        assert_eq!(planned["pruned"]["bytes"].as_u64(), Some(4 * values as u64), "{what}");
        let count = |(name, (_, values)): (&String, &(Vec<usize>, Vec<f32>))| {
            if name.contains("running_") { 0 } else { values.len() as u64 }
        };
        let parameters: u64 = exported.iter().map(count).sum();
        assert_eq!(planned["prediction"]["model"]["parameters"].as_u64(), Some(parameters), "{what}");
        assert!(exported.values().all(|(_, values)| values.iter().any(|value| *value != 0.0)), "{what}");
    }
}

/// What the run predicts, its export does, and the export of that.
#[test]
fn predictions_of_an_export_are_those_of_the_run() {
    let row = |i: usize| format!("{},{},{}\n", i % 7, i * 3 % 11, if i % 7 < 3 { "low" } else { "high" });
    let data = "kind = \"csv\"\ntrain = \"rows.csv\"\ntarget = \"y\"";
    for scope in ["tensor", "global"] {
        let prune = format!("structure = \"channels\"\nscope = \"{scope}\"\n{HALF}");
        let folder = folder_of(job(MLP, data, "", &prune));
        let at = folder.path();
        fs::write(at.join("rows.csv"), format!("a,b,y\n{}", (0..200).map(row).collect::<String>())).unwrap();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        trainer(at, &["export", "run", "--format", "safetensors", "-o", "out", "-q"]).expect(0);
        trainer(at, &["export", "out", "--format", "onnx", "-o", "again", "-q"]).expect(0);
        let [run, out, again] = ["run", "out", "again"].map(|from| {
            let rows = trainer(at, &["predict", from, "rows.csv", "--probabilities", "-q"]).expect(0).stdout;
            let numbers = rows.split([',', '\n']).filter_map(|field| field.parse::<f64>().ok());
            numbers.collect::<Vec<f64>>()
        });
        assert!(run.len() >= 400 && run.len() == out.len() && run.len() == again.len());
        for other in [out, again] {
            let most = run.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(most < 1e-5, "{scope}: {most}");
        }
    }
}

/// Killed, or stopped and resumed, a run has the bits of the undisturbed one, mask included.
#[test]
fn disturbances_change_no_bit() {
    let runs = [
        (CNN, SHAPES, "adamw", "ema = 0.9", "structure = \"channels\"\nscope = \"global\""),
        (MLP, SHAPES, "adamw8bit", "precision = \"bf16\"", "structure = \"channels\"\nskip = \"layers.0\""),
        (GPT, TEXT, "adafactor", "", "structure = \"heads\""),
        (LLAMA, TEXT, "sgd", "precision = \"bf16\"\nema = 0.5", "structure = \"channels\""),
    ];
    for (model, data, optimizer, train, prune) in runs {
        let text = job(model, data, train, &format!("{HALF}\n{prune}"));
        let folder = folder_of(format!("{text}[optimizer]\nkind = \"{optimizer}\"\nlr = 0.002\n"));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let undisturbed = FinalState::of(&at.join("run"));
        assert!(undisturbed.tensors.iter().any(|(name, _)| name == "mask.safetensors"));
        let mut killed = command(at, &["fit", "job.toml", "--run-dir", "killed", "-q"]);
        finish(killed.env("TRAINER_FAULT_CRASH", "kill:3")).expect(0);
        undisturbed.assert_same(&FinalState::of(&at.join("killed")));
        trainer(at, &["fit", "job.toml", "--run-dir", "stopped", "-q", "--max-steps", "3"]).expect(0);
        trainer(at, &["fit", "job.toml", "--run-dir", "stopped", "-q", "--resume"]).expect(0);
        assert!(undisturbed.tensors == FinalState::of(&at.join("stopped")).tensors);
    }
}

/// A global threshold leaves layers of different sizes, and never none; formats that state one size refuse them.
#[test]
fn formats_refuse_sizes_that_they_cannot_state() {
    let refuse = |model: &str, data: &str, prune: &str, format: &str| {
        let folder = folder_of(job(model, data, "", &format!("{HALF}\n{prune}")));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        trainer(at, &["export", "run", "--format", "safetensors", "-o", "whole", "-q"]).expect(0);
        trainer(at, &["export", "run", "--format", format, "-o", "out"]).expect(2).stderr
    };
    let text = refuse(GPT, TEXT, "structure = \"heads\"", "hf");
    assert!(
        text.contains("pruning made `transformer.h.0.attn` smaller, which `hf` does not support"),
        "{text}"
    );
    assert!(text.contains("hint: `--format onnx`") && !text.contains("tflite"), "{text}");
    let text =
        refuse(RESNET, SHAPES, "structure = \"channels\"\nskip = [\"layer2\", \"layer3\", \"layer4\"]", "hf");
    assert!(text.contains("pruning made `layer1.0.conv1` smaller"), "{text}");
    let skip = "structure = \"channels\"\nskip = \"model.layers.0\"";
    let text = refuse(LLAMA, TEXT, skip, "gguf");
    assert!(
        text.contains(
            "`model.layers.0.mlp` has 24 units and `model.layers.1.mlp` has 12, and `gguf` states one number"
        ),
        "{text}"
    );
    assert!(text.contains("none of them alone in `prune.skip`"), "the scope is \"tensor\" already: {text}");
}

/// A shrunk model is a model like others: it is pruned further, quantized and compressed.
#[test]
fn a_shrunk_model_is_compressed() {
    let prune = format!("structure = \"channels\"\n{HALF}");
    let folder = folder_of(job(CNN, SHAPES, "", &prune));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    for (format, quantize) in [("tflite", "int8"), ("onnx", "int8")] {
        let out = format!("{format}-{quantize}");
        trainer(at, &["export", "run", "--format", format, "--quantize", quantize, "-o", &out, "-q"])
            .expect(0);
        trainer(at, &["eval", &out, "-q"]).expect(0);
    }
    let described = read_json(&at.join("tflite-int8/model.json"));
    assert_eq!(described["job"]["model"]["stages"][0]["channels"], 4, "{described}");
    assert_eq!(described["job"]["model"]["hidden"][0], 8, "{described}");
    assert!(described["job"].get("prune").is_none(), "{described}");
    let found =
        trainer(at, &["compress", "run", "--target", "1.1x", "--max-loss", "1", "--json"]).expect(0).json();
    assert!(found["chosen"].is_number(), "{found}");
    let plan = trainer(at, &["check", "job.toml", "-v"]).expect(0).stdout;
    assert!(plan.contains("18 of 36 channels removed"), "{plan}");
}

/// A job may state the units that layers have left, and prune more of them.
#[test]
fn kept_units_are_those_of_the_model() {
    let prune = format!(
        "kept = {{ \"transformer.h.0.attn\" = 2, \"transformer.h.1.attn\" = 2 }}\n{HALF}\nstructure = \"heads\""
    );
    let folder = folder_of(job(GPT, TEXT, "", &prune));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let weights = tensors(&newest_checkpoint(&at.join("run")).join("model.safetensors"));
    assert_eq!(weights["transformer.h.0.attn.c_attn.weight"].0, [16, 24]);
    trainer(at, &["export", "run", "--format", "safetensors", "-o", "out", "-q"]).expect(0);
    let weights = tensors(&at.join("out/model.safetensors"));
    assert_eq!(weights["transformer.h.0.attn.c_attn.weight"].0, [16, 12]);
    let described = read_json(&at.join("out/model.json"));
    assert_eq!(described["job"]["prune"]["kept"]["transformer.h.1.attn"], 1, "{described}");
    trainer(at, &["generate", "out", "--prompt", "line", "--max-tokens", "4", "-q"]).expect(0);
}
