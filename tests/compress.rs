//! `trainer compress` through the binary: the table, the file that is chosen, and the error when none is good enough.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::harness::{job_folder, read_json, tensors, trainer};

/// Two classes that a line separates: small variants lose little.
fn trained(folder: &Path) {
    let row = |i: usize| format!("{},{},{}\n", i % 7, i * 3 % 11, if i % 7 < 3 { "low" } else { "high" });
    fs::write(folder.join("rows.csv"), format!("a,b,y\n{}", (0..240).map(row).collect::<String>())).unwrap();
    trainer(folder, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
}

const JOB: &str = "[model]\nkind = \"mlp\"\nhidden = [64, 64]\n[data]\nkind = \"csv\"\ntrain = \"rows.csv\"\n\
    target = \"y\"\n[train]\nbatch_size = 16\nsteps = 80\n[optimizer]\nlr = 0.01\n[log]\ntensorboard = false\n\
    report = false\n";

#[test]
fn the_best_small_variant_is_written() {
    let folder = job_folder(JOB);
    let at = folder.path();
    trained(at);
    // What a killed process left.
    fs::create_dir_all(at.join("run/.compressed.tmp/export")).unwrap();
    let found = trainer(at, &["compress", "run", "--target", "3x", "--max-loss", "0.1", "--json"]).expect(0);
    let found = found.json();
    let variants = found["variants"].as_array().unwrap();
    // Whole and two ranks; three sparsities; f32 and int8.
    assert_eq!((variants.len(), &found["metric"]), (18, &"accuracy".into()), "{found}");
    let chosen = &variants[found["chosen"].as_u64().unwrap() as usize];
    let number = |variant: &Value, key: &str| variant[key].as_f64().unwrap();
    assert!(number(chosen, "ratio") >= 3.0 && number(chosen, "loss") <= 0.1, "{chosen}");
    let better = |one: &&Value| number(one, "ratio") >= 3.0 && number(one, "loss") < number(chosen, "loss");
    assert_eq!(variants.iter().find(better), None);
    for one in variants {
        let same = |other: &&Value| {
            other["lowrank"] == one["lowrank"] && other["dtype"] == one["dtype"] && other["sparsity"] == 0.8
        };
        let sparse = variants.iter().find(same).unwrap();
        assert!(
            number(one, "sparsity") > 0.7 || number(sparse, "gzipped_bytes") < number(one, "gzipped_bytes")
        );
    }
    let out = at.join("run/compressed");
    assert_eq!(out.join("model.onnx").metadata().unwrap().len(), chosen["bytes"].as_u64().unwrap());
    assert_eq!(read_json(&out.join("frontier.json")), found);
    assert!(fs::read_to_string(out.join("frontier.svg")).unwrap().starts_with("<svg"));
    // What was written is the model that was measured.
    let evaluated = trainer(at, &["eval", "run/compressed", "--json"]).expect(0).json();
    assert!(
        (number(&evaluated["metrics"], "accuracy") - number(chosen, "metric")).abs() < 1e-9,
        "{evaluated}"
    );
    let left: Vec<_> =
        fs::read_dir(at.join("run")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with(".compress")), "{left:?}");
    let again =
        trainer(at, &["compress", "run", "--target", "3x", "--max-loss", "0.1", "--json"]).expect(2).stderr;
    assert!(again.contains("is not empty") && again.contains("--force"), "{again}");
    let again = ["compress", "run", "--target", "3x", "--max-loss", "0.1", "--json", "-o", "again"];
    assert_eq!(trainer(at, &again).expect(0).json(), found, "the same model and data give the same table");
}

/// `--force` replaces a folder, but never what is read.
#[test]
fn a_run_is_not_replaced_by_what_it_becomes() {
    let folder = job_folder(JOB);
    let at = folder.path();
    trained(at);
    let before = tensors(&at.join("run"));
    let commands = [
        &["compress", "run", "--target", "1.1x", "--max-loss", "1"][..],
        &["export", "run", "--format", "onnx"],
    ];
    for command in commands {
        for output in [
            "run",
            ".",
            "run/checkpoints",
            "run/checkpoints/best",
            "run/checkpoints/new",
            "gone/../run/checkpoints",
        ] {
            let text = trainer(at, &[command, &["-o", output, "--force"]].concat()).expect(2).stderr;
            assert!(text.contains("which is to be read") && text.contains("hint: "), "{output}: {text}");
        }
        fs::write(at.join("file"), "").unwrap();
        let text = trainer(at, &[command, &["-o", "file", "--force"]].concat()).expect(2).stderr;
        assert!(text.contains("a file is in the place of the folder `file`"), "{text}");
        trainer(at, &[command, &["-o", "run/small"]].concat()).expect(0);
        trainer(at, &[command, &["-o", "run/small", "--force"]].concat()).expect(0);
        fs::remove_dir_all(at.join("run/small")).unwrap();
    }
    assert!(before == tensors(&at.join("run")));
    trainer(at, &["compress", "run/checkpoints/best", "--target", "1.1x", "--max-loss", "1"]).expect(0);
    assert!(at.join("run/compressed/model.onnx").exists());
}

#[test]
fn nothing_small_enough_is_an_error_that_names_the_nearest() {
    let folder = job_folder(JOB);
    let at = folder.path();
    trained(at);
    let out = trainer(at, &["compress", "run", "--target", "1000x"]).expect(1);
    assert!(out.stdout.contains("low rank 2x, 80.0 % zero, int8"), "{}", out.stdout);
    assert!(
        out.stderr.contains("no variant is 1000x smaller and loses at most 0.01 of the accuracy"),
        "{}",
        out.stderr
    );
    assert!(out.stderr.contains("x smaller") && !at.join("run/compressed").exists(), "{}", out.stderr);
    for (option, value, problem) in [
        ("--target", "half", "a factor above 1"),
        ("--target", "1x", "a factor above 1"),
        ("--max-loss", "-1", "0 or more"),
    ] {
        let option = format!("{option}={value}");
        let words: Vec<&str> = ["compress", "run", &option]
            .into_iter()
            .chain(["--target=2x"].into_iter().filter(|_| !option.contains("target")))
            .collect();
        let text = trainer(at, &words).expect(2).stderr;
        assert!(text.contains(problem), "{text}");
    }
}

/// Compresses the run in `run` and its export, and checks the first variant and the one that was written by the metric
/// that `eval` finds; returns the table of the run.
fn compress_run_and_export(at: &Path, target: &str, metric: &str) -> Value {
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    trainer(at, &["export", "run", "--format", "safetensors", "-o", "exported", "-q"]).expect(0);
    let evaluated = |model: &str| {
        let found = trainer(at, &["eval", model, "--json"]).expect(0).json();
        found["metrics"][metric].as_f64().unwrap_or_else(|| panic!("{found}"))
    };
    let [of_run, _] = ["run", "exported"].map(|model| {
        let out = format!("{model}-compressed");
        let args = ["compress", model, "--target", target, "--max-loss", "1", "--json", "-o", &out];
        let found = trainer(at, &args).expect(0).json();
        let variants = found["variants"].as_array().unwrap();
        let chosen = &variants[found["chosen"].as_u64().unwrap() as usize];
        for (variant, value) in [(&variants[0], evaluated(model)), (chosen, evaluated(&out))] {
            let difference = variant["metric"].as_f64().unwrap() - value;
            assert!(difference.abs() <= 1e-4 * value.abs(), "{model}: {value} and {variant}");
        }
        found
    });
    of_run
}

/// A model keeps its factors, and its other layers have variants of lower rank.
#[test]
fn a_factorized_model_is_compressed() {
    for (layers, count) in [("", 6), ("layers = \"layers.1\"", 18)] {
        let folder = job_folder(format!(
            "[model]\nkind = \"mlp\"\nhidden = [64, 64]\n[data]\nkind = \"shapes\"\ntrain_samples = 200\n\
             valid_samples = 40\nimage_size = 16\n[train]\nbatch_size = 16\nsteps = 10\n[lowrank]\nrank = 8\n{layers}\n\
             [log]\ntensorboard = false\nreport = false\n"
        ));
        let found = compress_run_and_export(folder.path(), "1.5x", "accuracy");
        // The ranks of the run, and two more if a layer is whole; three sparsities; f32 and int8.
        assert_eq!(found["variants"].as_array().unwrap().len(), count, "{found}");
    }
}

/// Layers whose heads are counted stay whole, and others have variants of lower rank.
#[test]
fn a_model_without_its_pruned_heads_is_compressed() {
    let folder = job_folder(
        "[model]\nkind = \"gpt\"\nlayers = 2\nheads = 4\nwidth = 32\ncontext = 16\n[data]\nkind = \"text-synthetic\"\n\
         vocab = 61\ntrain_samples = 200\nvalid_samples = 40\n[train]\nbatch_size = 16\nsteps = 10\n[prune]\n\
         structure = \"heads\"\nschedule = \"constant\"\nfinal = 0.5\n[log]\ntensorboard = false\nreport = false\n",
    );
    let found = compress_run_and_export(folder.path(), "1.1x", "loss");
    let variants = found["variants"].as_array().unwrap();
    assert!(variants.iter().any(|variant| variant["lowrank"] == "2x"), "{found}");
}
