//! Pruning through the binary: sparsity, resumes, the plan and the size of what comes out.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use safetensors::SafeTensors;

use crate::harness::{
    FinalState, command, dataset, events, finish, job_folder, last, named, newest_checkpoint, read_json,
    skip, trainer,
};

fn job(model: &str, train: &str, prune: &str) -> String {
    format!(
        "seed = 3\n[model]\n{model}\n[data]\nkind = \"shapes\"\ntrain_samples = 256\nvalid_samples = 64\nimage_size = 16\n\
         [train]\nbatch_size = 16\nsteps = 12\n{train}\n[prune]\n{prune}\n[checkpoint]\nevery_steps = 4\nkeep = 9\n\
         [log]\ntensorboard = false\n"
    )
}

const CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 8, norm = \"batch\" }, { channels = 16 }]\nhidden = [32]\n\
    norm_group = 8\ndropout = 0.1";
const MLP: &str = "kind = \"mlp\"\nhidden = [48, 32]";
const VIT: &str = "kind = \"vit\"\nlayers = 2\nheads = 2\nwidth = 16\npatch = 4";
const POLYNOMIAL: &str = "initial = 0.2\nfinal = 0.8\nbegin_step = 3\nend_step = 9\nevery_steps = 2";

/// Zeros and values of each tensor of a file.
fn zeros(file: &Path) -> BTreeMap<String, (usize, usize)> {
    let bytes = fs::read(file).unwrap();
    let count = |data: &[u8]| data.chunks_exact(4).filter(|value| **value == [0; 4]).count();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors.map(|(name, tensor)| (name, (count(tensor.data()), tensor.data().len() / 4))).collect()
}

fn is_pruned(name: &str) -> bool {
    name.ends_with("weight") && !name.contains("norm") && !name.contains("ln")
}

/// A run does not end before its model is as small as the job says, however good or bad it is.
#[test]
fn a_run_is_not_stopped_before_its_last_selection() {
    for stop in ["patience = 1\nmin_delta = 1000.0", "target = 1000.0"] {
        let stopped = format!("{}[eval]\nevery_steps = 1\n[stop]\n{stop}\n", job(MLP, "", POLYNOMIAL));
        let folder = job_folder(stopped);
        trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let finished = last(&events(&folder.path().join("run")), "finished").clone();
        // The first evaluation of the pruned model is an improvement, the second is not.
        let expected = if stop.starts_with("target") { 9 } else { 10 };
        assert_eq!(finished["steps"].as_u64(), Some(expected), "{finished}");
    }
}

/// Weights, their moving average and what is exported have the sparsity that the run reports; nothing else is zero.
#[test]
fn weights_become_as_sparse_as_the_job_says() {
    for model in [CNN, VIT] {
        let folder = job_folder(job(model, "ema = 0.9", POLYNOMIAL));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let events = events(&at.join("run"));
        let steps: Vec<u64> = named(&events, "pruned").iter().map(|e| e["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [3, 5, 7, 9]);
        trainer(at, &["export", "run", "--checkpoint", "last", "--format", "safetensors", "-o", "out", "-q"])
            .expect(0);
        let checkpoint = newest_checkpoint(&at.join("run"));
        let exported = walk(&at.join("out")).into_iter().find(|file| file.ends_with("model.safetensors"));
        let files = ["model.safetensors", "ema.safetensors"].map(|name| checkpoint.join(name));
        for file in files.into_iter().chain(exported) {
            let (mut pruned, mut weights) = (0, 0);
            for (name, (zeros, len)) in zeros(&file) {
                if is_pruned(&name) {
                    let expected = (0.8 * len as f64).round() as usize;
                    assert!(zeros >= expected && zeros <= expected + 2, "{name}: {zeros} of {len}");
                    (pruned, weights) = (pruned + expected, weights + len);
                } else if name.ends_with("weight") || name.contains("embedding") {
                    assert_eq!(zeros, 0, "{name}");
                }
            }
            let last = last(&events, "pruned");
            assert_eq!(
                (last["pruned"].as_u64(), last["weights"].as_u64()),
                (Some(pruned as u64), Some(weights as u64))
            );
        }
        let summary = read_json(&at.join("run/summary.json"));
        assert!((summary["sparsity"].as_f64().unwrap() - 0.8).abs() < 0.01, "{summary}");
        let bytes = |key: &str| summary[key]["ram"].as_u64().unwrap();
        assert!(bytes("measured_peak_bytes") <= bytes("planned_peak_bytes"), "{summary}");
        trainer(at, &["eval", "run", "-q"]).expect(0);
    }
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

/// Killed, stopped and resumed, or after an out-of-memory error, a run has the bits of the undisturbed one, mask
/// included, whatever the optimizer, in f32 and bf16, with a moving average, frozen parameters and either scope.
#[test]
fn disturbances_change_no_bit() {
    let runs = [
        (CNN, "adamw", "ema = 0.9\nfreeze = \"stages.0\"", "scope = \"global\""),
        (CNN, "adafactor", "precision = \"bf16\"", "skip = \"layers.1\""),
        (MLP, "adamw8bit", "precision = \"bf16\"\nema = 0.5", ""),
        (MLP, "sgd", "accumulation_steps = 2\nclip_norm = 1.0", "scope = \"global\""),
        (MLP, "lion", "", "power = 1.0"),
    ];
    for (model, optimizer, train, prune) in runs {
        let momentum = if optimizer == "sgd" { "momentum = 0.9\n" } else { "" };
        let text = job(model, train, &format!("{POLYNOMIAL}\n{prune}"));
        let folder = job_folder(format!("{text}[optimizer]\nkind = \"{optimizer}\"\nlr = 0.002\n{momentum}"));
        let at = folder.path();
        trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let undisturbed = FinalState::of(&at.join("run"));
        assert!(undisturbed.tensors.iter().any(|(name, _)| name == "mask.safetensors"));
        let mut killed = command(at, &["fit", "job.toml", "--run-dir", "killed", "-q"]);
        finish(killed.env("TRAINER_FAULT_CRASH", "kill:6")).expect(0);
        undisturbed.assert_same(&FinalState::of(&at.join("killed")));
        for steps in ["4", "8"] {
            trainer(at, &["fit", "job.toml", "--run-dir", steps, "-q", "--max-steps", steps]).expect(0);
            trainer(at, &["fit", "job.toml", "--run-dir", steps, "-q", "--resume"]).expect(0);
            // The end of a part is evaluated too, and may be the best.
            assert!(undisturbed.tensors == FinalState::of(&at.join(steps)).tensors);
        }
        let other = ["--resume", "--set", "train.steps=20", "--set", "prune.final=0.9"];
        let text = trainer(at, &[&["fit", "job.toml", "--run-dir", "run", "-q"], &other[..]].concat());
        let text = text.expect(2).stderr;
        assert!(text.contains("prune.final"), "{optimizer}: another experiment: {text}");
    }
}

/// The updates before the first selection are those of the job without `[prune]`: gradients know nothing of it.
#[test]
fn nothing_changes_before_pruning_begins() {
    let folder = job_folder(job(CNN, "", "schedule = \"constant\"\nfinal = 0.5\nbegin_step = 8"));
    let at = folder.path();
    let text = fs::read_to_string(at.join("job.toml")).unwrap();
    let (before, after) = text.split_once("[prune]").unwrap();
    let plain = format!("{before}{}", &after[after.find("[checkpoint]").unwrap()..]);
    fs::write(at.join("plain.toml"), plain).unwrap();
    for job in ["job.toml", "plain.toml"] {
        trainer(at, &["fit", job, "--run-dir", &format!("{job}.run"), "-q", "--set", "log.every_steps=1"])
            .expect(0);
    }
    let losses = |job: &str| crate::harness::losses(&events(&at.join(format!("{job}.run"))));
    let (pruned, plain) = (losses("job.toml"), losses("plain.toml"));
    assert_eq!(pruned[..8], plain[..8]);
    assert_ne!(pruned[8..], plain[8..]);
}

/// With `2:4`, two of each four inputs of an output are zero, where there are fours; the first layer has one channel.
#[test]
fn two_of_each_four_weights_are_zero() {
    let prune = "schedule = \"constant\"\nstructure = \"2:4\"\nbegin_step = 6";
    let folder = job_folder(job(CNN, "precision = \"bf16\"", prune));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let zeros = zeros(&newest_checkpoint(&at.join("run")).join("model.safetensors"));
    for (name, len) in
        [("stages.1.weight", 16 * 8 * 9), ("layers.0.weight", 32 * 256), ("layers.1.weight", 320)]
    {
        assert_eq!(zeros[name], (len / 2, len), "{name}");
    }
    assert_eq!(zeros["stages.0.weight"].0, 0);
    let undisturbed = FinalState::of(&at.join("run"));
    let mut killed = command(at, &["fit", "job.toml", "--run-dir", "killed", "-q"]);
    finish(killed.env("TRAINER_FAULT_CRASH", "kill:9")).expect(0);
    undisturbed.assert_same(&FinalState::of(&at.join("killed")));
}

/// A checkpoint of before the end of pruning is not the best, however good it is.
#[test]
fn the_best_checkpoint_is_among_the_sparsest() {
    let row = |i: usize| format!("{},{},{}\n", i % 7, i * 3 % 11, if i % 7 < 3 { "low" } else { "high" });
    let folder = job_folder(
        "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nkind = \"csv\"\ntrain = \"rows.csv\"\ntarget = \"y\"\n\
         [train]\nbatch_size = 16\nsteps = 60\n[optimizer]\nlr = 0.02\n[eval]\nevery_steps = 20\n[log]\ntensorboard = false\n\
         [prune]\nschedule = \"constant\"\nfinal = 0.99\nbegin_step = 40\n",
    );
    let at = folder.path();
    fs::write(at.join("rows.csv"), format!("a,b,y\n{}", (0..200).map(row).collect::<String>())).unwrap();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let events = events(&at.join("run"));
    let losses: Vec<f64> =
        named(&events, "eval").iter().map(|e| e["metrics"]["valid.loss"].as_f64().unwrap()).collect();
    assert!(losses[0] < losses[1].min(losses[2]), "pruning this much costs something: {losses:?}");
    let best = if losses[1] <= losses[2] { 40 } else { 60 };
    assert_eq!(last(&events, "finished")["best"]["step"], best);
}

/// The mask is in the plan: one byte per weight, and as much in a checkpoint.
#[test]
fn the_plan_counts_the_mask_and_estimates_the_pruned_model() {
    let folder = job_folder(job(MLP, "", POLYNOMIAL));
    let plan = trainer(folder.path(), &["plan", "job.toml", "--json", "--ram", "1GiB"]).expect(0).json();
    let weights = 48 * 256 + 32 * 48 + 10 * 32;
    let parts = plan["parts"].as_array().unwrap();
    let mask = parts.iter().find(|part| part["name"] == "pruning mask").unwrap();
    assert_eq!((mask["bytes"].as_u64(), &mask["role"]), (Some(weights), &"weights".into()));
    let pruned = &plan["pruned"];
    assert_eq!((pruned["weights"].as_u64(), pruned["sparsity"].as_f64()), (Some(weights), Some(0.8)));
    let [raw, gzipped] = ["bytes", "compressed_bytes"].map(|key| pruned[key].as_f64().unwrap());
    assert!(raw == 4.0 * (weights + 48 + 32 + 10) as f64 && raw / gzipped > 3.5, "{pruned}");
    let out = trainer(folder.path(), &["check", "job.toml", "-v"]).expect(0).stdout;
    assert!(out.contains("80.0 % of 14,144 weights pruned"), "{out}");
}

fn gzipped(file: &Path) -> usize {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(&fs::read(file).unwrap()).unwrap();
    encoder.finish().unwrap().len()
}

/// MNIST from 50 to 80 %: three times smaller once compressed, and little less accurate after half an epoch.
#[test]
fn a_pruned_network_is_three_times_smaller_compressed() {
    let data = dataset("mnist");
    if !data.exists() {
        return skip("there is no MNIST");
    }
    let data = data.display();
    let job = format!(
        "seed = 1\n[model]\nkind = \"cnn\"\nstages = [{{ channels = 8 }}, {{ channels = 16 }}]\nhidden = [64]\n[data]\nkind = \"idx\"\n\
         train_images = \"{data}/train-images-idx3-ubyte.gz\"\ntrain_labels = \"{data}/train-labels-idx1-ubyte.gz\"\n\
         valid_images = \"{data}/t10k-images-idx3-ubyte.gz\"\nvalid_labels = \"{data}/t10k-labels-idx1-ubyte.gz\"\n\
         mean = 0.1307\nstd = 0.3081\n[train]\nbatch_size = 64\nsteps = 400\n[optimizer]\nlr = 2e-3\n\
         [schedule]\nkind = \"cosine\"\n[eval]\nevery_steps = 400\n[log]\ntensorboard = false\n"
    );
    let folder = job_folder(&job);
    let at = folder.path();
    let prune = "[prune]\ninitial = 0.5\nfinal = 0.8\nbegin_step = 100\nend_step = 300\nevery_steps = 20\n";
    fs::write(at.join("pruned.toml"), job + prune).unwrap();
    let [(accuracy, bytes), (pruned_accuracy, pruned_bytes)] = ["job.toml", "pruned.toml"].map(|job| {
        let run = at.join(job).with_extension("run");
        trainer(at, &["fit", job, "--run-dir", run.to_str().unwrap(), "-q"]).expect(0);
        let end = read_json(&run.join("summary.json"));
        let accuracy = end["metrics"]["valid.accuracy"].as_f64().unwrap();
        (accuracy, gzipped(&newest_checkpoint(&run).join("model.safetensors")))
    });
    assert!(bytes as f64 / pruned_bytes as f64 >= 3.0, "{bytes} and {pruned_bytes} bytes");
    assert!(accuracy > 0.95 && pruned_accuracy > accuracy - 0.03, "{accuracy} and {pruned_accuracy}");
}
