//! Exported folders are used like the runs they came from, after these are gone; and what cannot be used is refused
//! with its exit code: a run without a checkpoint, files that are missing, truncated or of another model, inputs
//! that are none.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{dataset, job_folder, mlp_job, read_json, skip, trainer};

const CLASSIFIER: &str = "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\n\
    target = 'class'\nvalid_fraction = 0.25\n[train]\nbatch_size = 16\nepochs = 4\n[log]\ntensorboard = false\n";

fn fit(folder: &Path) {
    trainer(folder, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
}

fn export(folder: &Path, model: &str, format: &str, args: &[&str]) {
    let command = ["export", model, "--format", format, "-o", format, "-q"];
    trainer(folder, &[&command[..], args].concat()).expect(0);
}

fn classifier() -> TempDir {
    let folder = job_folder(CLASSIFIER);
    let row = |i: usize| {
        let (x, y) = (i * 37 % 101, i * 53 % 97);
        format!("{x},{y},{},{}\n", ["red", "blue"][i % 2], if x > y { "above" } else { "below" })
    };
    let rows: String = (0..200).map(row).collect();
    fs::write(folder.path().join("train.csv"), format!("x,y,color,class\n{rows}")).unwrap();
    fs::write(folder.path().join("new.csv"), "color,x,y\nred,5,9\nblue,90,4\npink,44,45\n").unwrap();
    fit(folder.path());
    folder
}

fn language_model(model: &str, data: &str) -> TempDir {
    let folder = job_folder(format!(
        "[model]\n{model}\n[data]\nkind = 'text'\ntrain = ['abc.txt']\n{data}\n[train]\nsteps = 60\nbatch_size = 8\n\
         [optimizer]\nkind = 'adamw'\nlr = 0.005\n[log]\ntensorboard = false\n"
    ));
    fs::write(folder.path().join("abc.txt"), "abcdefghijklmnopqrstuvwxyz ".repeat(60)).unwrap();
    folder
}

const LLAMA: &str = "kind = 'llama'\nlayers = 2\nheads = 4\nkv_heads = 2\nwidth = 32\nhidden = 64\ncontext = 64\n\
    norm_eps = 1e-5";
const GPT: &str = "kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 32\ncontext = 64";

#[test]
fn a_classifier_is_used_from_its_export() {
    let folder = classifier();
    let at = folder.path();
    let predict =
        |model: &str| trainer(at, &["predict", model, "new.csv", "--probabilities", "-q"]).expect(0).stdout;
    let eval =
        |model: &str| trainer(at, &["eval", model, "--data", "train.csv", "--json", "-q"]).expect(0).json();
    let (rows, metrics) = (predict("run"), eval("run"));
    let formats = ["safetensors", "onnx", "tflite"];
    formats.iter().for_each(|format| export(at, "run", format, &[]));
    fs::remove_dir_all(at.join("run")).unwrap();
    for format in formats {
        assert_eq!(predict(format), rows, "{format}");
        assert_eq!(eval(format), metrics, "{format}");
    }
    // An export is exported again, here in half precision, and used.
    trainer(at, &["export", "onnx", "--format", "safetensors", "--dtype", "bf16", "-o", "half", "-q"])
        .expect(0);
    let (all, half) = (eval("safetensors"), eval("half"));
    let change = all["metrics"]["loss"].as_f64().unwrap() - half["metrics"]["loss"].as_f64().unwrap();
    assert!(change != 0.0 && change.abs() < 0.05, "{all} {half}");
}

/// transformers has other names for the parameters of a `vit`.
#[test]
fn a_vit_is_used_from_each_of_its_exports() {
    let folder = job_folder(
        "[model]\nkind = 'vit'\npatch = 4\nlayers = 2\nheads = 2\nwidth = 32\n[data]\nkind = 'shapes'\n\
         train_samples = 64\nvalid_samples = 48\nimage_size = 16\n[train]\nbatch_size = 16\nsteps = 8\n\
         [log]\ntensorboard = false\n",
    );
    let at = folder.path();
    fit(at);
    let eval = |model: &str| trainer(at, &["eval", model, "--json", "-q"]).expect(0).json();
    for format in ["hf", "safetensors", "onnx"] {
        export(at, "run", format, &[]);
        assert_eq!(eval(format), eval("run"), "{format}");
    }
}

#[test]
fn a_language_model_generates_from_its_export() {
    for (model, data) in [(LLAMA, ""), (GPT, "tokens = 'bytes'")] {
        let folder = language_model(model, data);
        let at = folder.path();
        fit(at);
        for format in ["hf", "safetensors", "gguf", "onnx"] {
            export(at, "run", format, &["--dtype", "f32"]);
        }
        trainer(at, &["export", "run", "--format", "gguf", "--quantize", "q8_0", "-o", "q8", "-q"]).expect(0);
        let generate = |model: &str| {
            let prompt = ["--prompt", "abcdefgh", "--temperature", "0", "--max-tokens", "24", "-q"];
            trainer(at, &[&["generate", model], &prompt[..]].concat()).expect(0).stdout
        };
        let text = generate("run");
        fs::rename(at.join("run"), at.join("gone")).unwrap();
        for format in ["hf", "safetensors", "gguf", "onnx"] {
            assert_eq!(generate(format), text, "{format}");
        }
        assert!(!generate("q8").is_empty());
        // Without our description it is a folder that transformers could have saved.
        fs::remove_file(at.join("hf/model.json")).unwrap();
        assert_eq!(generate("hf"), text, "published");
        let out = trainer(at, &["generate", "hf", "--prompt", "abc", "--max-tokens", "1"]).expect(0);
        assert!(out.stderr.contains("a published model"), "{}", out.stderr);
    }
}

#[test]
fn a_published_model_is_refused_by_what_it_has_that_we_do_not() {
    let folder = language_model(LLAMA, "");
    let at = folder.path();
    fit(at);
    export(at, "run", "hf", &[]);
    fs::remove_file(at.join("hf/model.json")).unwrap();
    let config = read_json(&at.join("hf/config.json"));
    let refused = |key: &str, value: Value| {
        let mut changed = config.clone();
        changed[key] = value;
        fs::write(at.join("hf/config.json"), changed.to_string()).unwrap();
        trainer(at, &["generate", "hf", "--prompt", "abc"]).expect(2).stderr
    };
    for (key, value, expected) in [
        ("model_type", json!("mamba"), "its `model_type` is `mamba`"),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}), "`rope_scaling` is of type `llama3`"),
        ("attention_bias", json!(true), "`attention_bias` is true"),
        ("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\"; expected silu"),
        ("head_dim", json!(64), "`head_dim` is 64; expected 8"),
        ("num_hidden_layers", json!("two"), "`num_hidden_layers` is \"two\"; expected a number from 1 on"),
    ] {
        let text = refused(key, value);
        assert!(text.contains(expected) && text.contains("hint: `gpt2` and `llama` models"), "{text}");
    }
    fs::write(at.join("hf/config.json"), config.to_string()).unwrap();
    fs::rename(at.join("hf/model.safetensors"), at.join("hf/model-00001-of-00002.safetensors")).unwrap();
    fs::write(at.join("hf/model.safetensors.index.json"), "{}").unwrap();
    let text = trainer(at, &["generate", "hf", "--prompt", "abc"]).expect(4).stderr;
    assert!(text.contains("its weights are in shards"), "{text}");
}

#[test]
fn a_published_gpt2_opens_without_a_tokenizer() {
    let model = dataset("models/capp-gpt2");
    if !model.exists() {
        return skip("needs `models/capp-gpt2` in the folder TRAINER_DATA names");
    }
    let folder = language_model(GPT, "");
    fs::write(folder.path().join("tokenizer.json"), word_tokenizer(53)).unwrap();
    let model = model.to_str().unwrap();
    let text = trainer(folder.path(), &["generate", model, "--prompt", "w0"]).expect(2).stderr;
    assert!(text.contains("--tokenizer FILE"), "{text}");
    let args = ["--prompt", "w50 w51", "--tokenizer", "tokenizer.json", "--max-tokens", "4", "--json"];
    let out = trainer(folder.path(), &[&["generate", model], &args[..]].concat()).expect(0).json();
    assert!(out["text"].as_str().unwrap().starts_with('w'), "{out}");
}

/// A tokenizer with the words w0, w1 and so on, the last of which is called `<end>`.
fn word_tokenizer(vocab: usize) -> String {
    let name = |i: usize| if i + 1 == vocab { "<end>".to_owned() } else { format!("w{i}") };
    let words: serde_json::Map<String, Value> = (0..vocab).map(|i| (name(i), json!(i))).collect();
    let end = json!({
        "id": vocab - 1, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "w0" },
    })
    .to_string()
}

/// What was published beside a tokenizer stays in checkpoints and exports, so that its folder may go.
#[test]
fn the_settings_of_a_tokenizer_are_kept() {
    let folder = language_model(LLAMA, "tokens = 'words/tokenizer.json'\nvalid = ['abc.txt']");
    let at = folder.path();
    fs::create_dir(at.join("words")).unwrap();
    fs::write(at.join("words/tokenizer.json"), word_tokenizer(20)).unwrap();
    fs::write(at.join("words/tokenizer_config.json"), r#"{"unk_token": "w0", "auto_map": {"a": "b"}}"#)
        .unwrap();
    fs::write(at.join("words/special_tokens_map.json"), r#"{"eos_token": {"content": "<end>"}}"#).unwrap();
    fs::write(at.join("abc.txt"), "w1 w2 w3 w4 w5 w6 <end> ".repeat(300)).unwrap();
    fit(at);
    fs::remove_dir_all(at.join("words")).unwrap();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        assert!(at.join("run/checkpoints/last").join(name).exists(), "{name}");
    }
    export(at, "run", "hf", &[]);
    let config = read_json(&at.join("hf/tokenizer_config.json"));
    assert_eq!((&config["eos_token"], &config["unk_token"]), (&json!("<end>"), &json!("w0")));
    assert!(config.get("auto_map").is_none(), "{config}");
    assert_eq!(read_json(&at.join("hf/config.json"))["eos_token_id"], 19);
    // The end-of-text token ends a text, from the run and from the export.
    for model in ["run", "hf"] {
        let args = ["generate", model, "--prompt", "w1 w2", "--temperature", "0", "--json", "-q"];
        let out = trainer(at, &args).expect(0).json();
        assert_eq!((&out["tokens"], &out["finish"]), (&json!(4), &json!("end_token")), "{model}");
    }
}

#[test]
fn an_export_that_is_damaged_is_refused_by_what_is_wrong() {
    let folder = classifier();
    let at = folder.path();
    for (format, file) in [("safetensors", "model.safetensors"), ("onnx", "model.onnx")] {
        export(at, "run", format, &[]);
        let eval = || trainer(at, &["eval", format, "--data", "train.csv"]);
        for name in ["preprocessing.json", file] {
            let path = at.join(format).join(name);
            let bytes = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            let text = eval().expect(4).stderr;
            assert!(text.contains(name) && text.contains("hint: export the model again"), "{text}");
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            let text = eval().expect(4).stderr;
            assert!(text.contains(name), "{text}");
            fs::write(&path, bytes).unwrap();
        }
        eval().expect(0);
        let description = read_json(&at.join(format).join("model.json"));
        fs::remove_file(at.join(format).join("model.json")).unwrap();
        let text = eval().expect(4).stderr;
        assert!(text.contains(&format!("has `{file}` without the `model.json` of an export")), "{text}");
        // A model of another width than its weights.
        let mut other = description;
        other["job"]["model"]["hidden"] = json!([24]);
        fs::write(at.join(format).join("model.json"), other.to_string()).unwrap();
        let text = eval().expect(if format == "onnx" { 4 } else { 2 }).stderr;
        assert!(text.contains("`layers.0."), "{text}");
    }
}

/// The weights of an export are not read if they do not fit: their damage is not found.
#[test]
fn an_export_that_does_not_fit_is_refused_before_it_is_read() {
    let folder = job_folder(mlp_job(&["model.hidden = [400, 400]", "train.steps = 2"]));
    let at = folder.path();
    fit(at);
    for format in ["onnx", "tflite"] {
        export(at, "run", format, &[]);
        let path = at.join(format).join(format!("model.{format}"));
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let eval = |ram: &str| trainer(at, &["eval", format, "--set", &format!("memory.ram={ram}")]);
        let text = eval("1MiB").expect(3).stderr;
        assert!(text.contains("does not fit") && text.contains("memory.ram"), "{text}");
        eval("1GiB").expect(4);
    }
}

/// The job of an edited description is checked as that of a file, before anything is built from it.
#[test]
fn a_job_of_an_export_that_cannot_be_is_refused_by_its_key() {
    let cnn = job_folder(
        "[model]\nkind = 'cnn'\nstages = [{ channels = 4 }]\nhidden = [8]\n[data]\nkind = 'shapes'\n\
         train_samples = 32\nvalid_samples = 16\nimage_size = 16\n[train]\nbatch_size = 16\nsteps = 2\n\
         [log]\ntensorboard = false\n",
    );
    let gpt = language_model(GPT, "tokens = 'bytes'");
    let cases = [
        (&cnn, "/job/model/stages/0/stride", json!(0), "`model.stages[0].stride` cannot be 0; allowed: "),
        (&cnn, "/job/train/batch_size", json!(0), "`train.batch_size` cannot be 0; allowed: "),
        (&gpt, "/job/model/width", json!(0), "`model.width` cannot be 0; allowed: "),
        (&gpt, "/job/model/layers", json!(1 << 20), "`model.layers` cannot be 1048576; allowed: "),
        (
            &gpt,
            "/job/model/layers",
            json!(1u64 << 62),
            "`model.layers` cannot be 4611686018427387904; allowed: ",
        ),
        (&gpt, "/job/model/layers", json!(u64::MAX), "cannot be "),
    ];
    for folder in [&cnn, &gpt] {
        fit(folder.path());
        export(folder.path(), "run", "safetensors", &[]);
        let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
        fs::write(folder.path().join("student.toml"), format!("{job}[distill]\nteacher = 'safetensors'\n"))
            .unwrap();
        trainer(folder.path(), &["check", "student.toml", "-q"]).expect(0);
    }
    for (folder, key, value, expected) in cases {
        let at = folder.path();
        let file = at.join("safetensors/model.json");
        let description = read_json(&file);
        let mut changed = description.clone();
        *changed.pointer_mut(key).unwrap() = value;
        fs::write(&file, changed.to_string()).unwrap();
        let expected =
            |text: &str| text.contains("the job in `model.json` cannot be ") && text.contains(expected);
        let text = trainer(at, &["eval", "safetensors"]).expect(4).stderr;
        assert!(expected(&text), "{key}: {text}");
        let text = trainer(at, &["check", "student.toml"]).expect(2).stderr;
        assert!(expected(&text) && text.contains("`distill.teacher` is"), "{key}: {text}");
        fs::write(&file, description.to_string()).unwrap();
    }
    // Files of training need not exist, and what only training reads may be of another version or build.
    let at = gpt.path();
    let file = at.join("safetensors/model.json");
    let mut description = read_json(&file);
    description["job"]["data"]["train"] = json!(["/gone/${TRAINER_TEST_UNSET}.txt"]);
    description["job"]["log"]["mlflow"] = json!("https://example.org");
    description["job"]["train"]["a_key_of_another_version"] = json!(1);
    fs::write(&file, description.to_string()).unwrap();
    trainer(at, &["generate", "safetensors", "--prompt", "abc", "--max-tokens", "2", "-q"]).expect(0);
}

#[test]
fn a_model_and_a_job_that_do_not_match_are_refused() {
    let folder = classifier();
    let at = folder.path();
    let text = trainer(at, &["predict", "run", "new.csv", "--set", "model.hidden=[24]"]).expect(2).stderr;
    assert!(text.contains("does not belong to this model") && text.contains("[16, "), "{text}");
    let text = trainer(at, &["predict", "run", "new.csv", "--set", "model.hiden=[24]"]).expect(2).stderr;
    assert!(text.contains("hiden"), "{text}");
}

#[test]
fn a_run_without_a_checkpoint_says_so() {
    let folder = job_folder(CLASSIFIER);
    let at = folder.path();
    fs::create_dir_all(at.join("run/checkpoints")).unwrap();
    fs::write(at.join("run/job.toml"), CLASSIFIER).unwrap();
    for command in [
        &["eval", "run"][..],
        &["predict", "run", "new.csv"],
        &["generate", "run", "--prompt", "a"],
        &["export", "run", "--format", "onnx", "-o", "out"],
    ] {
        let text = trainer(at, command).expect(2).stderr;
        assert!(text.contains("has no checkpoint yet") && text.contains("hint:"), "{text}");
    }
    let text = trainer(at, &["eval", "run/checkpoints"]).expect(2).stderr;
    assert!(text.contains("is not a run") && text.contains("or of an export"), "{text}");
}

#[test]
fn inputs_that_do_not_fit_the_model_are_named() {
    let folder = classifier();
    let at = folder.path();
    let refused = |table: &str| {
        fs::write(at.join("bad.csv"), table).unwrap();
        trainer(at, &["predict", "run", "bad.csv", "-o", "out.csv", "-q"]).expect(4).stderr
    };
    assert!(refused("x,color\n1,red\n").contains("it has no column `y`"));
    let text = refused("x,y,color\nsoon,2,red\n");
    assert!(text.contains("soon") && text.contains("hint:"), "{text}");
    assert!(!at.join("out.csv").exists());
    // A category that no training row had is predicted, counted and reported.
    let out = trainer(at, &["predict", "run", "new.csv"]).expect(0);
    assert!(
        out.stderr.contains("column `color`: a category that no training row had in 1 cell"),
        "{}",
        out.stderr
    );
    assert_eq!(out.stdout.lines().count(), 4);
}

/// Decimal commas do not split the only column, and a blank line is a row without a value.
#[test]
fn a_table_of_one_column_has_a_prediction_for_each_row() {
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [4]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\ntarget = 'y'\n\
         valid_fraction = 0.25\non_missing = 'mean'\n[train]\nbatch_size = 8\nsteps = 2\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    let rows: String = (0..60).map(|i| format!("{i},5;{i},25\n")).collect();
    fs::write(at.join("train.csv"), format!("x;y\n{rows}")).unwrap();
    fit(at);
    let predicted = |table: &str| {
        fs::write(at.join("new.csv"), table).unwrap();
        let out = trainer(at, &["predict", "run", "new.csv", "-q"]).expect(0).stdout;
        out.lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    let two = predicted("x\n5,5\n1,5\n");
    assert_eq!(two.len(), 2);
    let three = predicted("x\n5,5\n\n1,5\n");
    assert_eq!((three.len(), &three[0], &three[2]), (3, &two[0], &two[1]));
    // Blank lines at the end are no rows, however long the table is.
    for rows in [2, 100_000] {
        assert_eq!(predicted(&format!("x\n{}\n\n\n", "5,5\n".repeat(rows))).len(), rows);
        let with_blank = format!("x\n{}\n1,5\n", "5,5\n".repeat(rows));
        assert_eq!(predicted(&with_blank).len(), rows + 2);
    }
}

#[test]
fn an_image_that_is_none_is_named() {
    let folder = job_folder(
        "[model]\nkind = 'cnn'\nstages = [{ channels = 4 }]\nhidden = []\n[data]\nkind = 'images'\ntrain = 'train'\n\
         image_size = 8\nvalid_fraction = 0.5\n[train]\nbatch_size = 4\nsteps = 2\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    for (class, value) in [("dark", 10), ("light", 240)] {
        fs::create_dir_all(at.join("train").join(class)).unwrap();
        for i in 0..6u8 {
            let pixels = [b"P5 8 8 255\n".as_slice(), &[value + i; 64]].concat();
            fs::write(at.join("train").join(class).join(format!("{i}.pgm")), pixels).unwrap();
        }
    }
    fit(at);
    fs::create_dir(at.join("new")).unwrap();
    fs::copy(at.join("train/dark/0.pgm"), at.join("new/a.pgm")).unwrap();
    fs::write(at.join("new/b.png"), "a text").unwrap();
    let text = trainer(at, &["predict", "run", "new", "-o", "out.csv"]).expect(4).stderr;
    assert!(text.contains("b.png"), "{text}");
    let skipping = ["predict", "run", "new", "-q", "--set", "data.on_bad_record=skip"];
    let out = trainer(at, &skipping).expect(4);
    let lines: Vec<&str> = out.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{}", out.stdout);
    assert!(lines[2].contains("b.png") && lines[1].contains("a.pgm"), "{}", out.stdout);
}
