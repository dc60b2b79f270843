//! Tables through the binary: a job over a file of rows trains, and what is wrong with a row is told.

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

/// y is a line of x and a step of the colour.
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
    let output = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .args(["fit", "job.toml", "--json", "--run-dir", run])
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

/// In the order of the file, a compressed table is the same experiment as a plain one, and it learns.
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
fn a_file_of_another_kind_is_told_as_such() {
    let folder = folder();
    let job = JOB.replace("\"csv\"", "\"parquet\"").replace("shuffle = false\n", "");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    let (code, events, error) = fit(folder.path(), "run");
    let told = format!("{events:?} {error}");
    assert!(code == 4 && told.contains("is not a Parquet file: it begins with `x,co`"), "{code} {told}");
}
