//! Quantization-aware training through the binary: resumes, evaluations, the plan, and what is exported.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;

use crate::harness::{
    FinalState, command, events, finish, job_folder, last, named, newest_checkpoint, read_json, trainer,
};

fn job(model: &str, train: &str, rest: &str) -> String {
    format!(
        "seed = 3\n[model]\n{model}\n[data]\nkind = \"shapes\"\ntrain_samples = 256\nvalid_samples = 64\nimage_size = 16\n\
         [train]\nbatch_size = 16\nsteps = 12\n{train}\n[quantize]\ntraining = true\n[checkpoint]\nevery_steps = 4\nkeep = 9\n\
         [log]\ntensorboard = false\nreport = false\nevery_steps = 1\n{rest}"
    )
}

const CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 8, norm = \"batch\" }, { channels = 16 }]\nhidden = [32]\n\
    norm_group = 8\ndropout = 0.1";
const MLP: &str = "kind = \"mlp\"\nhidden = [48, 32]\nactivation = \"gelu\"";
const MOBILENET: &str = "kind = \"mobilenet\"\nwidth = 0.1\nstem = \"small\"\nnorm_group = 8";

/// The tensors of a file, in f32.
fn tensors(file: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = fs::read(file).unwrap();
    let values = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, tensor)| (name, values(tensor.data()))).collect()
}

fn losses(run: &Path) -> Vec<f64> {
    crate::harness::losses(&events(run))
}

/// Killed, stopped and resumed, or after an out-of-memory error, a run has the bits of the undisturbed one, ranges
/// included, in f32 and bf16, with a moving average, frozen and pruned weights, and whatever the optimizer.
#[test]
fn disturbances_change_no_bit() {
    let runs = [
        (
            CNN,
            "adamw",
            "ema = 0.9\nfreeze = \"stages.0\"",
            "[prune]\nschedule = \"constant\"\nfinal = 0.5\nbegin_step = 3\n",
        ),
        (CNN, "adafactor", "precision = \"bf16\"", ""),
        (MLP, "adamw8bit", "precision = \"bf16\"\nema = 0.5\nfreeze = \"layers.0\"", ""),
        (MLP, "sgd", "accumulation_steps = 2\nclip_norm = 1.0", ""),
    ];
    for (model, optimizer, train, rest) in runs {
        let text = job(model, train, rest);
        let folder = job_folder(format!("{text}[optimizer]\nkind = \"{optimizer}\"\nlr = 0.002\n"));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let undisturbed = FinalState::of(&at.join("run"));
        let ends = tensors(&newest_checkpoint(&at.join("run")).join("model.safetensors"));
        let ranges: Vec<_> = ends.iter().filter(|(name, _)| name.ends_with(".activation_range")).collect();
        assert!(ranges.len() >= 3 && ranges.iter().all(|(_, range)| range[0] < 0.0 || range[1] > 0.0));
        for (run, fault) in [("killed", ["CRASH", "kill:9"]), ("oom", ["OOM", "40"])] {
            let mut disturbed = command(at, &["fit", "job.toml", "--run-dir", run, "-q"]);
            finish(disturbed.env(format!("TRAINER_FAULT_{}", fault[0]), fault[1])).expect(0);
            match run {
                // A micro-batch may be smaller for a while: other sums, and values that round to other neighbours.
                "oom" => {
                    let pairs = losses(&at.join(run)).into_iter().zip(losses(&at.join("run")));
                    pairs.for_each(|(a, b)| assert!((a - b).abs() < 0.05, "{a} and {b}"));
                }
                _ => undisturbed.assert_same(&FinalState::of(&at.join(run))),
            }
        }
        // Before rounding begins, which is half way by default, and after.
        for steps in ["4", "8"] {
            trainer(at, &["fit", "job.toml", "--run-dir", steps, "-q", "--max-steps", steps]).expect(0);
            trainer(at, &["fit", "job.toml", "--run-dir", steps, "-q", "--resume"]).expect(0);
            // The end of a part is evaluated too, and may be the best.
            assert!(undisturbed.tensors == FinalState::of(&at.join(steps)).tensors, "{optimizer} {steps}");
        }
        let other = ["--resume", "--set", "train.steps=20", "--set", "quantize.begin_step=8"];
        let text = trainer(at, &[&["fit", "job.toml", "--run-dir", "run", "-q"], &other[..]].concat());
        assert!(text.expect(2).stderr.contains("quantize.begin_step"), "{optimizer}: another experiment");
        // A longer run keeps the step at which rounding began.
        let longer = ["--resume", "--set", "train.steps=14"];
        trainer(at, &[&["fit", "job.toml", "--run-dir", "run", "-q"], &longer[..]].concat()).expect(0);
    }
}

/// The updates before rounding begins are those of the job without `[quantize]`.
#[test]
fn nothing_changes_before_rounding_begins() {
    let folder = job_folder(job(CNN, "", ""));
    let at = folder.path();
    for (run, set) in [("rounded", "quantize.begin_step=8"), ("floats", "quantize.training=false")] {
        trainer(at, &["fit", "job.toml", "--run-dir", run, "-q", "--set", set]).expect(0);
    }
    let (rounded, floats) = (losses(&at.join("rounded")), losses(&at.join("floats")));
    assert_eq!(rounded[..8], floats[..8]);
    assert_ne!(rounded[8..], floats[8..]);
    rounded.iter().zip(&floats).for_each(|(a, b)| assert!((a - b).abs() < 0.2, "{a} and {b}"));
}

/// How an update is split into micro-batches changes no range.
#[test]
fn ranges_do_not_depend_on_the_micro_batch() {
    let folder = job_folder(job(MLP, "precision = \"f32\"", ""));
    let at = folder.path();
    let first = ["--max-steps", "1", "--set", "quantize.begin_step=1"];
    for (run, sets) in [
        ("whole", ["train.batch_size=16", "train.accumulation_steps=1"]),
        ("split", ["train.batch_size=4", "train.accumulation_steps=4"]),
    ] {
        let sets = ["--set", sets[0], "--set", sets[1]];
        trainer(at, &[&["fit", "job.toml", "--run-dir", run, "-q"], &first[..], &sets[..]].concat())
            .expect(0);
    }
    let ranges = |run: &str| {
        let mut all = tensors(&newest_checkpoint(&at.join(run)).join("model.safetensors"));
        all.retain(|name, _| name.ends_with(".activation_range"));
        all
    };
    let (whole, split) = (ranges("whole"), ranges("split"));
    assert_eq!(whole["input.activation_range"], split["input.activation_range"]);
    for (name, range) in &whole {
        let close = range.iter().zip(&split[name]).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs());
        assert!(close && range[2..] == [0.0, 0.0], "{name}: {range:?} and {:?}", split[name]);
    }
}

/// `eval` prints what the run measured, and an export in 8-bit integers computes almost the same: it has the ranges of
/// training, and the weights are those that training rounded to.
#[test]
fn an_export_computes_what_was_evaluated() {
    for (model, train) in [(CNN, "ema = 0.9"), (MLP, ""), (MOBILENET, "")] {
        let folder = job_folder(job(model, train, "[optimizer]\nlr = 0.01\n"));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let events = events(&at.join("run"));
        let measured = last(&events, "eval")["metrics"]["valid.loss"].as_f64().unwrap();
        let evaluated =
            trainer(at, &["eval", "run", "--checkpoint", "last", "--json", "-q"]).expect(0).json();
        let loss = evaluated["metrics"]["loss"].as_f64().unwrap_or_else(|| panic!("{evaluated}"));
        assert!((loss - measured).abs() < 1e-5 * measured, "{model}: {loss} and {measured}");
        let summary = read_json(&at.join("run/summary.json"));
        let bytes = |key: &str| summary[key]["ram"].as_u64().unwrap();
        assert!(bytes("measured_peak_bytes") <= bytes("planned_peak_bytes"), "{summary}");
        for format in ["onnx", "tflite"] {
            let words = ["--checkpoint", "last", "--quantize", "int8", "--format", format, "--json", "-q"];
            let exported = trainer(at, &[&["export", "run", "-o", format], &words[..]].concat()).expect(0);
            let compared = exported.json()["comparison"].clone();
            let of = |key: &str| compared[0][key].as_f64().unwrap();
            assert_eq!(compared[0]["metric"], "loss", "{compared}");
            assert!((of("before") - loss).abs() < 1e-9, "{compared}");
            assert!((of("after") - loss).abs() < 0.01 * loss, "{model} as {format}: {compared}");
            trainer(at, &["eval", format, "-q"]).expect(0);
        }
        // In floats, the weights are those before rounding.
        trainer(at, &["export", "run", "--format", "safetensors", "-o", "floats", "-q"]).expect(0);
        trainer(at, &["eval", "floats", "-q"]).expect(0);
    }
}

/// An export without pruned units has the ranges of training too: samples decide those of the outputs only.
#[test]
fn ranges_of_training_stay_without_pruned_units() {
    for model in [CNN, MLP] {
        let prune = "[prune]\nstructure = \"channels\"\nschedule = \"constant\"\nfinal = 0.5\n";
        let folder = job_folder(job(model, "", prune));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        for (format, file) in [("onnx", "model.onnx"), ("tflite", "model.tflite")] {
            let export = |samples: &str| {
                let out = format!("{format}-{samples}");
                let args = ["export", "run", "--quantize", "int8", "--format", format, "-o", &out, "-q"];
                trainer(at, &[&args[..], &["--calibrate", samples]].concat()).expect(0);
                fs::read(at.join(out).join(file)).unwrap()
            };
            let [one, many] = ["1", "200"].map(export);
            let differing = one.iter().zip(&many).filter(|(a, b)| a != b).count();
            assert!(one.len() == many.len() && differing < 16, "{model} as {format}: {differing} bytes");
        }
    }
}

/// A model of one layer has its input rounded, whatever it reads.
#[test]
fn linear_models_are_quantized() {
    let row = |i: usize| format!("{},{},{}\n", i % 17, i % 5, 0.5 * (i % 17) as f64 - (i % 5) as f64);
    let table = "a,b,y\n".to_owned() + &(0..200).map(row).collect::<String>();
    let csv = "kind = \"csv\"\ntrain = \"t.csv\"\nvalid_fraction = 0.2\ntarget = \"y\"";
    let shapes = "kind = \"shapes\"\ntrain_samples = 64\nvalid_samples = 32\nimage_size = 16";
    for (data, training) in [(csv, false), (csv, true), (shapes, false), (shapes, true)] {
        let folder = job_folder(format!(
            "[model]\nkind = \"mlp\"\nhidden = []\n[data]\n{data}\n[train]\nbatch_size = 16\nsteps = 60\n[optimizer]\n\
             lr = 0.02\n[quantize]\ntraining = {training}\n[log]\ntensorboard = false\nreport = false\n"
        ));
        let at = folder.path();
        fs::write(at.join("t.csv"), &table).unwrap();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        for format in ["onnx", "tflite"] {
            let args =
                ["export", "run", "--quantize", "int8", "--format", format, "-o", format, "--json", "-q"];
            let compared = trainer(at, &args).expect(0).json()["comparison"].clone();
            let [before, after] = ["before", "after"].map(|key| compared[0][key].as_f64().unwrap());
            assert!((after - before).abs() < 0.02 * before.abs() + 0.002, "{data} as {format}: {compared}");
        }
    }
}

/// A checkpoint of before rounding begins is not the best, however good it is; and a run that starts from the weights
/// of another rounds from the first update on.
#[test]
fn the_best_checkpoint_is_rounded() {
    let folder = job_folder(job(MLP, "", "[eval]\nevery_steps = 4\n[optimizer]\nlr = 0.003\n"));
    let at = folder.path();
    let sets = ["--set", "quantize.begin_step=11", "--set", "eval.every_steps=5"];
    trainer(at, &[&["fit", "job.toml", "--run-dir", "run", "-q"], &sets[..]].concat()).expect(0);
    let best = |run: &str| last(&events(&at.join(run)), "finished")["best"]["step"].clone();
    assert_eq!(best("run"), 12);
    let init = ["--set", "train.init=\"run\"", "--set", "train.steps=4"];
    trainer(at, &[&["fit", "job.toml", "--run-dir", "again", "-q"], &init[..]].concat()).expect(0);
    let text = fs::read_to_string(at.join("again/job.toml")).unwrap();
    assert!(text.contains("begin_step = 1\n"), "{text}");
    let initialized = named(&events(&at.join("again")), "initialized")[0].clone();
    let left_over = initialized["left_over"].as_array().unwrap();
    assert!(
        left_over.iter().all(|name| name.as_str().unwrap().ends_with("activation_range")),
        "{initialized}"
    );
    // Smaller variants are quantized after training.
    let compress = ["compress", "run", "-o", "smaller", "-q", "--target", "2x", "--max-loss", "1"];
    trainer(at, &compress).expect(0);
}

/// The planned size of a pruned model is that of its export, which has neither the ranges of activations nor the maps to
/// a teacher's features.
#[test]
fn the_pruned_model_is_planned_as_it_is_exported() {
    let folder = job_folder(job(MLP, "", ""));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "teacher", "-q"]).expect(0);
    for structure in ["weights", "channels"] {
        let rest = format!(
            "[distill]\nteacher = \"teacher\"\n[[distill.features]]\nstudent = \"layers.0\"\nteacher = \"layers.0\"\n\
             [prune]\nstructure = \"{structure}\"\nschedule = \"constant\"\nfinal = 0.5\nbegin_step = 2\n"
        );
        fs::write(at.join("student.toml"), job(MLP, "", &rest)).unwrap();
        let plan = trainer(at, &["plan", "student.toml", "--json", "--ram", "1GiB"]).expect(0).json();
        trainer(at, &["fit", "student.toml", "--run-dir", structure, "-q"]).expect(0);
        let out = format!("{structure}-export");
        trainer(at, &["export", structure, "--format", "safetensors", "-o", &out, "-q"]).expect(0);
        let exported = tensors(&at.join(out).join("model.safetensors"));
        let values: usize = exported.values().map(Vec::len).sum();
        assert_eq!(plan["pruned"]["bytes"], 4 * values, "{structure}: {}", plan["pruned"]);
        // The fraction of the weights that go.
        let sparsity = plan["pruned"]["sparsity"].as_f64().unwrap();
        assert!((0.45..0.6).contains(&sparsity), "{structure}: {sparsity}");
    }
}

/// The rounded weights, as many as there are, are in the plan.
#[test]
fn the_plan_counts_the_rounded_weights() {
    let folder = job_folder(job(MLP, "", ""));
    let copy = |set: &str| {
        let args = ["plan", "job.toml", "--json", "--ram", "1GiB", "--set", set];
        let plan = trainer(folder.path(), &args).expect(0).json();
        let parts = plan["parts"].as_array().unwrap().clone();
        parts.iter().find(|part| part["name"] == "computed copy").map(|part| part["bytes"].as_u64().unwrap())
    };
    let parameters = 48 * 256 + 48 + 32 * 48 + 32 + 10 * 32 + 10;
    assert_eq!(copy("quantize.training=true"), Some(4 * parameters));
    assert_eq!(copy("quantize.training=false"), None);
}
