//! Tables through the binary: a job on a file of rows trains, and errors in a row are reported.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

const JOB: &str = "\
[model]
kind = \"mlp\"
hidden = [8]

[data]
kind = \"csv\"
train = [\"train.csv\"]
valid = [\"valid.csv\"]
target = \"y\"
shuffle = false

[train]
epochs = 8
batch_size = 16

[optimizer]
kind = \"adamw\"
lr = 0.02

[log]
every_steps = 1
";

/// y is linear in x, plus a step for the color.
fn rows(from: u32, to: u32) -> String {
    let row = |i: u32| {
        let (x, red) = (f64::from(i * 37 % 101), i.is_multiple_of(3));
        let colour = if red { "red" } else { "\"sea, blue\"" };
        format!("{x},{colour},{}\n", 0.5 * x + if red { 10.0 } else { 0.0 })
    };
    "x,colour,y\n".to_owned() + &(from..to).map(row).collect::<String>()
}

/// Exit code, the events, and stderr.
fn fit(folder: &Path, run: &str) -> (i32, Vec<Value>, String) {
    fit_with(folder, &["--run-dir", run])
}

fn fit_with(folder: &Path, arguments: &[&str]) -> (i32, Vec<Value>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .env("TRAINER_PROCESS_BYTES", "0")
        .args(["fit", "job.toml", "--json"])
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let events = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code().unwrap(), events, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("job.toml"), JOB).unwrap();
    fs::write(folder.path().join("train.csv"), rows(0, 300)).unwrap();
    fs::write(folder.path().join("valid.csv"), rows(300, 350)).unwrap();
    folder
}

/// In file order, a compressed table is the same experiment as a plain one, and the model learns.
#[test]
fn plain_and_compressed_tables_train_alike() {
    let folder = folder();
    let ended = |run: &str| {
        let (code, events, stderr) = fit(folder.path(), run);
        assert_eq!(code, 0, "{stderr}");
        let of =
            |kind: &str| events.iter().filter(|event| event["event"] == kind).cloned().collect::<Vec<_>>();
        let losses: Vec<f64> = of("step").iter().map(|event| event["loss"].as_f64().unwrap()).collect();
        (losses, of("finished")[0]["metrics"].clone())
    };
    let (losses, metrics) = ended("plain");
    assert!(losses[losses.len() - 1] < 0.5 * losses[0], "{losses:?}");
    assert!(metrics.get("valid.accuracy").is_none(), "{metrics}");
    let text = fs::read(folder.path().join("train.csv")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    fs::write(folder.path().join("train.csv"), gzip.finish().unwrap()).unwrap();
    assert_eq!(ended("packed").0, losses);
}

#[test]
fn a_bad_value_ends_with_its_file_line_column_and_value() {
    let folder = folder();
    let text = rows(0, 300).replace("\n37,", "\n3.7.1,");
    fs::write(folder.path().join("train.csv"), text).unwrap();
    fs::write(folder.path().join("job.toml"), JOB.replace("shuffle", "numeric = [\"x\"]\nshuffle")).unwrap();
    let (code, events, stderr) = fit(folder.path(), "bad");
    assert_eq!(code, 4, "{stderr}");
    let message = events.last().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("train.csv`, line 3, column `x`: `3.7.1` is not a finite number"), "{message}");
}

#[test]
fn a_file_of_another_format_is_reported_as_such() {
    let folder = folder();
    let job = JOB.replace("\"csv\"", "\"parquet\"").replace("shuffle = false\n", "");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    let (code, events, error) = fit(folder.path(), "run");
    let output = format!("{events:?} {error}");
    assert!(code == 4 && output.contains("is not a Parquet file: it begins with `x,co`"), "{code} {output}");
}

/// y has an arbitrary value for each of twelve names: only an embedding can learn it.
fn named_rows(from: u32, to: u32) -> String {
    let row = |i: u32| {
        let (name, x) = (i * 5 % 12, f64::from(i * 37 % 101) / 100.0);
        format!("n{name},{x},{}\n", f64::from(name * name * 7 % 11) + x)
    };
    "name,x,y\n".to_owned() + &(from..to).map(row).collect::<String>()
}

fn embedding_folder() -> tempfile::TempDir {
    let folder = folder();
    let job = JOB.replace("shuffle = false", "encode = \"embed\"").replace("epochs = 8", "epochs = 12");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    fs::write(folder.path().join("train.csv"), named_rows(0, 300)).unwrap();
    // A name that no training row has is not an error.
    fs::write(folder.path().join("valid.csv"), named_rows(300, 350) + "n99,0.5,3\n").unwrap();
    folder
}

fn trainer(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .env("TRAINER_PROCESS_BYTES", "0")
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8_lossy(&said).into_owned())
}

/// Embedded categories are shown, counted and learned in any precision, and a stopped run resumes.
#[test]
fn embedded_categories_are_learned_and_resumed() {
    let folder = embedding_folder();
    let losses = |events: &[Value]| -> Vec<f64> {
        let steps = events.iter().filter(|event| event["event"] == "step");
        steps.map(|event| event["loss"].as_f64().unwrap()).collect()
    };
    let (code, said) = trainer(folder.path(), &["check", "job.toml"]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("1 numbers and 1 categories to embed"), "{said}");
    assert!(said.contains("category of 12 values, embedded"), "{said}");
    // The second name, n5, is the eighth in the order n0, n1, n10, n11, n2, ...
    assert!(said.contains("name = 7  target"), "{said}");
    let (code, said) = trainer(folder.path(), &["check", "job.toml", "--json"]);
    assert_eq!(code, 0, "{said}");
    // An embedding table of 12 x 6, a layer from 7 inputs to 8 hidden values, and one from 8 to 1.
    assert!(said.contains(&format!("\"parameters\":{}", 72 + 7 * 8 + 8 + 8 + 1)), "{said}");
    let (code, whole, stderr) = fit(folder.path(), "whole");
    assert_eq!(code, 0, "{stderr}");
    let whole = losses(&whole);
    assert!(whole[whole.len() - 1] < 0.1 * whole[0], "{whole:?}");
    let (_, first, _) = fit_with(folder.path(), &["--run-dir", "parts", "--max-steps", "30"]);
    let (code, second, stderr) = fit_with(folder.path(), &["--run-dir", "parts", "--resume"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!([losses(&first), losses(&second)].concat(), whole);
    let arguments = ["--run-dir", "short", "--set", "train.precision=\"bf16\""];
    let (code, short, stderr) = fit_with(folder.path(), &arguments);
    assert_eq!(code, 0, "{stderr}");
    let short = losses(&short);
    assert!(short[short.len() - 1] < 0.2 * short[0], "{short:?}");
}

#[test]
fn a_model_that_cannot_embed_is_reported_before_anything_is_read() {
    let folder = embedding_folder();
    let job = JOB.replace("shuffle = false", "encode = \"embed\"");
    let job = job.replace("kind = \"mlp\"\nhidden = [8]", "kind = \"cnn\"");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    fs::remove_file(folder.path().join("train.csv")).unwrap();
    let (code, said) = trainer(folder.path(), &["check", "job.toml"]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("`data.encode` is \"embed\", and a `cnn` model cannot embed categories"), "{said}");
}
