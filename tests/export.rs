//! Exports through the program: what was written is evaluated beside the model, and what makes no sense is refused.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{job_folder, trainer};

const CLASSIFIER: &str = "[model]\nkind = 'mlp'\nhidden = [32]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\n\
    target = 'class'\nvalid_fraction = 0.25\n[train]\nbatch_size = 16\nepochs = 6\nema = 0.9\n\
    [log]\ntensorboard = false\n";

const LANGUAGE: &str = "[model]\nkind = 'llama'\nlayers = 2\nheads = 4\nkv_heads = 2\nwidth = 64\nhidden = 96\n\
    context = 32\n[data]\nkind = 'text'\ntrain = ['text.txt']\n[train]\nbatch_size = 8\nsteps = 30\n\
    [log]\ntensorboard = false\n";

fn classifier() -> tempfile::TempDir {
    let folder = job_folder(CLASSIFIER);
    let row = |i: usize| {
        let (x, y) = (i * 37 % 101, i * 53 % 97);
        format!("{x},{y},{},{}\n", ["red", "blue"][i % 2], if x > y { "above" } else { "below" })
    };
    let rows: String = (0..200).map(row).collect();
    fs::write(folder.path().join("train.csv"), format!("x,y,color,class\n{rows}")).unwrap();
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    folder
}

fn change(summary: &Value, metric: &str) -> f64 {
    let all = summary["comparison"].as_array().unwrap();
    let found = all.iter().find(|one| one["metric"] == metric).unwrap();
    (found["after"].as_f64().unwrap() - found["before"].as_f64().unwrap()).abs()
}

#[test]
fn an_export_is_evaluated_beside_its_model() {
    let folder = classifier();
    let export = |args: &[&str]| trainer(folder.path(), &[&["export", "run", "--json", "-q"], args].concat());
    for format in ["onnx", "safetensors"] {
        let exact = export(&["--format", format, "-o", format]).expect(0).json();
        // The moving average was exported, with the statistics of the same checkpoint.
        assert_eq!((change(&exact, "loss"), change(&exact, "accuracy")), (0.0, 0.0), "{exact}");
        let half = format!("{format}-bf16");
        let rounded = export(&["--format", format, "--dtype", "bf16", "-o", &half]).expect(0).json();
        let loss = change(&rounded, "loss");
        assert!(loss > 0.0 && loss < 0.05, "{rounded}");
    }
    let rounded = export(&["--format", "tflite", "-o", "tflite"]).expect(0).json();
    assert!(change(&rounded, "loss") < 1e-5, "{rounded}");
    let description: Value =
        serde_json::from_slice(&fs::read(folder.path().join("safetensors/model.json")).unwrap()).unwrap();
    assert_eq!(description["target"]["classes"], json!(["above", "below"]));
    assert!(description["preprocessing"]["table"]["columns"].as_array().unwrap().len() >= 3);
    // Nothing is left beside the exports.
    let hidden = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let hidden: Vec<_> = hidden.filter(|name| name.to_string_lossy().starts_with('.')).collect();
    assert!(hidden.is_empty(), "{hidden:?}");

    // Without the data there is nothing to evaluate on, and that is said.
    fs::remove_file(folder.path().join("train.csv")).unwrap();
    let blind = export(&["--format", "onnx", "-o", "blind"]).expect(0).json();
    assert_eq!(blind["comparison"], json!([]));
    assert!(blind["notes"][0].as_str().unwrap().contains("was not evaluated"), "{blind}");
}

#[test]
fn a_language_model_is_quantized() {
    let folder = job_folder(LANGUAGE);
    let text: String = (0..4000).map(|i| ["the ", "quick ", "brown ", "fox\n"][i * i % 7 % 4]).collect();
    fs::write(folder.path().join("text.txt"), text).unwrap();
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let export = |args: &[&str]| trainer(folder.path(), &[&["export", "run", "--json", "-q"], args].concat());
    let full = export(&["--format", "hf", "-o", "hf"]).expect(0).json();
    let quantized = export(&["--format", "gguf", "--quantize", "q8_0", "-o", "q8"]).expect(0).json();
    assert_eq!(change(&full, "loss"), 0.0, "{full}");
    assert!(change(&quantized, "loss") < 0.01, "{quantized}");
    assert!(quantized["bytes"].as_u64().unwrap() < full["bytes"].as_u64().unwrap() / 2);
    let q4_0 = export(&["--format", "gguf", "--quantize", "q4_0", "-o", "q4_0"]).expect(0).json();
    // Matrices in blocks: no activation is quantized, and the folder is used like a run.
    let onnx = export(&["--format", "onnx", "-o", "onnx"]).expect(0).json();
    let [eight, four] = ["int8", "int4"].map(|bits| {
        let blocks = export(&["--format", "onnx", "--quantize", bits, "-o", bits]).expect(0).json();
        assert!(blocks["notes"][0].as_str().unwrap().contains("blocks of 128"), "{blocks}");
        let loss = trainer(folder.path(), &["eval", bits, "--json", "-q"]).expect(0).json();
        let loss = loss["metrics"]["loss"].as_f64().unwrap();
        let after =
            blocks["comparison"].as_array().unwrap().iter().find(|one| one["metric"] == "loss").unwrap();
        assert!((loss - after["after"].as_f64().unwrap()).abs() < 1e-9, "{loss} {after}");
        blocks
    });
    assert!(change(&eight, "loss") < 0.01 && change(&four, "loss") < 0.2, "{eight} {four}");
    let bytes = |summary: &Value| file_bytes(summary, "model.onnx");
    assert!(bytes(&four) < bytes(&eight) && bytes(&eight) < bytes(&onnx), "{four} {eight} {onnx}");
    // GPTQ changes the outputs of layers less than the nearest values do, and is read back to the same metrics.
    for (format, bits, nearest) in [("onnx", "int4", &four), ("gguf", "q4_0", &q4_0)] {
        let folder_name = format!("{bits}-gptq");
        let args = ["--format", format, "--quantize", bits, "--rounding", "gptq", "--calibrate", "16"];
        let rounded = export(&[&args[..], &["-o", &folder_name]].concat()).expect(0).json();
        assert!(change(&rounded, "loss") < 0.2, "{rounded}");
        assert_ne!(change(&rounded, "loss"), change(nearest, "loss"), "{rounded}");
        assert_eq!(rounded["files"], nearest["files"]);
        let loss = trainer(folder.path(), &["eval", &folder_name, "--json", "-q"]).expect(0).json();
        let after =
            rounded["comparison"].as_array().unwrap().iter().find(|one| one["metric"] == "loss").unwrap();
        let differs = loss["metrics"]["loss"].as_f64().unwrap() - after["after"].as_f64().unwrap();
        assert!(differs.abs() < 1e-9, "{loss} {after}");
    }
    // What it takes is planned before it begins.
    let args = ["--format", "gguf", "--quantize", "q4_0", "--rounding", "gptq", "-o", "x"];
    export(&[&args[..], &["--set", "memory.ram=8MiB"]].concat()).expect(3);
    let refused =
        export(&["--format", "onnx", "--quantize", "int8", "--calibrate", "8", "-o", "x"]).expect(2);
    assert!(refused.stderr.contains("`--calibrate` is for activations"), "{}", refused.stderr);
    let refused = export(&["--format", "tflite", "-o", "x"]).expect(2).stderr;
    assert!(refused.contains("`llama` models cannot be exported as `tflite`"), "{refused}");
    for file in
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"]
    {
        assert!(folder.path().join("hf").join(file).exists(), "{file}");
    }
}

/// The file sizes of an export by name.
fn file_bytes(summary: &Value, name: &str) -> u64 {
    let all = summary["files"].as_array().unwrap();
    all.iter().find(|file| file["name"] == name).unwrap()["bytes"].as_u64().unwrap()
}

#[test]
fn a_classifier_is_exported_in_integers() {
    let folder = job_folder(
        "[model]\nkind = 'cnn'\nstages = [{ channels = 16, norm = 'batch' }, { channels = 32, norm = 'batch' }]\n\
         hidden = [64]\n[data]\nkind = 'shapes'\ntrain_samples = 600\nvalid_samples = 200\nimage_size = 16\n[train]\n\
         batch_size = 32\nepochs = 3\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let export = |args: &[&str]| trainer(at, &[&["export", "run", "--json", "-q"], args].concat());
    let eval = |model: &str| trainer(at, &["eval", model, "--json", "-q"]).expect(0).json();
    for format in ["onnx", "tflite"] {
        let float = export(&["--format", format, "-o", format]).expect(0).json();
        let quantized = format!("{format}-int8");
        let int8 = ["--format", format, "--quantize", "int8", "--calibrate", "100"];
        let int8 = export(&[&int8[..], &["-o", &quantized]].concat()).expect(0).json();
        assert_eq!(int8["dtype"], "int8");
        let file = format!("model.{format}");
        let ratio = file_bytes(&int8, &file) as f64 / file_bytes(&float, &file) as f64;
        assert!(ratio < 0.4, "{ratio}");
        assert!(change(&int8, "loss") > 0.0 && change(&int8, "accuracy") < 0.05, "{int8}");
        // The folder is used like a run: what is evaluated is the integers.
        let after =
            int8["comparison"].as_array().unwrap().iter().find(|one| one["metric"] == "loss").unwrap();
        let loss = eval(&quantized)["metrics"]["loss"].as_f64().unwrap();
        assert!((loss - after["after"].as_f64().unwrap()).abs() < 1e-9, "{loss} {after}");
    }
    // The same samples give the same file.
    export(&["--format", "tflite", "--quantize", "int8", "--calibrate", "100", "-o", "again"]).expect(0);
    let file = |folder: &str| fs::read(at.join(folder).join("model.tflite")).unwrap();
    assert!(file("again") == file("tflite-int8"));
    export(&["--format", "onnx", "--quantize", "int8", "--clip", "percentile", "-o", "percentile"]).expect(0);
    let text = export(&["--format", "onnx", "--clip", "mse", "-o", "x"]).expect(2).stderr;
    assert!(text.contains("`--clip` is for activations, which are not quantized here"), "{text}");
    let text = export(&["--format", "tflite", "--quantize", "q8_0", "-o", "x"]).expect(2).stderr;
    assert!(
        text.contains("`--quantize q8_0` is not supported by `tflite`") && text.contains("it has int8"),
        "{text}"
    );
    let text = export(&["--format", "tflite", "--dtype", "f16", "-o", "x"]).expect(2).stderr;
    assert!(text.contains("`--dtype f16` is not supported by `tflite`"), "{text}");
    assert!(!at.join("x").exists());
    // Within a budget that holds no batch, nothing is calibrated.
    let short = ["--format", "tflite", "--quantize", "int8", "--set", "memory.ram=1MiB", "-o", "x"];
    let text = export(&short).expect(3).stderr;
    assert!(text.contains("does not fit") || text.contains("budget"), "{text}");
}

/// Inputs of 1e-7 beside a bias of about 1.2, which takes more of their steps than 32 bits have.
#[test]
fn a_bias_far_larger_than_its_inputs_is_exported_in_integers() {
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = []\n[data]\nkind = 'csv'\ntrain = 'train.csv'\nvalid_fraction = 0.2\n\
         target = 'c'\ntask = 'values'\nstandardise = false\n[train]\nbatch_size = 16\nsteps = 60\n[optimizer]\n\
         lr = 0.05\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    let row = |i: usize| format!("{}e-8,{}e-8,1.{}\n", i * 37 % 101, i * 53 % 97, i % 5);
    fs::write(at.join("train.csv"), format!("x,y,c\n{}", (0..200).map(row).collect::<String>())).unwrap();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    for format in ["onnx", "tflite"] {
        let args = ["export", "run", "--json", "-q", "--format", format, "--quantize", "int8", "-o", format];
        let summary = trainer(at, &args).expect(0).json();
        assert!(change(&summary, "loss") < 0.01, "{format}: {summary}");
    }
}

/// A bad record among the samples of a calibration is one of an evaluation.
#[test]
fn a_calibration_ends_at_a_bad_record_or_leaves_it_out_as_the_job_says() {
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [64, 64]\n[data]\nkind = 'csv'\ntrain = 'train.csv'\nvalid = 'valid.csv'\n\
         target = 'y'\nclasses = ['low', 'high']\nstandardise = false\n[train]\nbatch_size = 16\nsteps = 10\n\
         [log]\ntensorboard = false\n",
    );
    let at = folder.path();
    let row = |i: usize| format!("{},{},{}\n", i % 7, i % 5, if i % 7 < 3 { "low" } else { "high" });
    let rows = |count: usize| format!("a,b,y\n{}", (0..count).map(row).collect::<String>());
    fs::write(at.join("train.csv"), rows(100)).unwrap();
    fs::write(at.join("valid.csv"), rows(40)).unwrap();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let bad = "1,2,sideways\n";
    fs::write(at.join("train.csv"), rows(100) + bad + bad).unwrap();
    let export = ["export", "run", "--format", "onnx", "--quantize", "int8", "-o", "out", "--force"];
    let compress = ["compress", "run", "--target", "1.1x", "--max-loss", "1", "-o", "small", "--force", "-q"];
    let skip = ["--set", "data.on_bad_record=skip"];
    for command in [&export[..], &compress] {
        let text = trainer(at, command).expect(4).stderr;
        for part in ["train.csv", "`sideways`", "hint: `--set data.on_bad_record=skip` leaves bad rows out"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = trainer(at, &[command, &skip].concat()).expect(0).stderr;
        assert!(text.contains("note: calibrated without 2 bad records"), "{text}");
    }
    fs::write(at.join("train.csv"), format!("a,b,y\n{bad}{bad}")).unwrap();
    for command in [&export[..], &compress] {
        let text = trainer(at, &[command, &skip].concat()).expect(4).stderr;
        for part in ["the data to calibrate on has no samples", "train.csv", "hint: "] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    fs::remove_file(at.join("train.csv")).unwrap();
    for command in [&export[..], &compress] {
        let text = trainer(at, command).expect(0).stderr;
        let note = "note: calibrated on the validation set, because the training set cannot be opened: ";
        assert!(text.contains(note) && text.contains("train.csv"), "{text}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_what_would_work() {
    let folder = classifier();
    let export = |args: &[&str]| trainer(folder.path(), &[&["export", "run", "-q"], args].concat());
    let text = export(&["--format", "gguf", "-o", "out"]).expect(2).stderr;
    assert!(text.contains("`mlp` models cannot be exported as `gguf`"), "{text}");
    assert!(
        text.contains(
            "hint: a `mlp` model exports with `--format safetensors`, `--format onnx`, `--format tflite`"
        ),
        "{text}"
    );
    export(&["--format", "onnx", "--quantize", "q4_0", "-o", "out"]).expect(2);
    assert!(!folder.path().join("out").exists());
    export(&["--format", "onnx", "-o", "out"]).expect(0);
    let text = export(&["--format", "onnx", "-o", "out"]).expect(2).stderr;
    assert!(text.contains("`out` exists and is not empty") && text.contains("--force"), "{text}");
    export(&["--format", "onnx", "-o", "out", "--force"]).expect(0);
    let text = trainer(folder.path(), &["export", "nowhere", "--format", "onnx", "-o", "x"]).expect(2).stderr;
    assert!(text.contains("is not a run"), "{text}");
}
