//! Tables through the binary: a job on a file of rows trains, and errors in a row are reported.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::{Finished, gzip, job_folder, last, losses, root, trainer};

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

fn fit(folder: &Path, args: &[&str]) -> Finished {
    trainer(folder, &[&["fit", "job.toml", "--json", "--run-dir"], args].concat())
}

fn folder() -> TempDir {
    let folder = job_folder(JOB);
    fs::write(folder.path().join("train.csv"), rows(0, 300)).unwrap();
    fs::write(folder.path().join("valid.csv"), rows(300, 350)).unwrap();
    folder
}

/// In file order, a compressed table is the same experiment as a plain one, and the model learns.
#[test]
fn plain_and_compressed_tables_train_alike() {
    let folder = folder();
    let ended = |run: &str| {
        let events = fit(folder.path(), &[run]).expect(0).json_lines();
        (losses(&events), last(&events, "finished")["metrics"].clone())
    };
    let (losses, metrics) = ended("plain");
    assert!(losses[losses.len() - 1] < 0.5 * losses[0], "{losses:?}");
    assert!(metrics.get("valid.accuracy").is_none(), "{metrics}");
    fs::write(folder.path().join("train.csv"), gzip(rows(0, 300).as_bytes())).unwrap();
    assert_eq!(ended("packed").0, losses);
}

#[test]
fn a_bad_value_ends_with_its_file_line_column_and_value() {
    let folder = folder();
    let text = rows(0, 300).replace("\n37,", "\n3.7.1,");
    fs::write(folder.path().join("train.csv"), text).unwrap();
    fs::write(folder.path().join("job.toml"), JOB.replace("shuffle", "numeric = [\"x\"]\nshuffle")).unwrap();
    let events = fit(folder.path(), &["bad"]).expect(4).json_lines();
    let message = events.last().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("train.csv`, line 3, column `x`: `3.7.1` is not a finite number"), "{message}");
}

/// The value that is too large is named, not a good one beside it, whatever command reads the table first.
#[test]
fn a_number_too_large_for_a_standard_deviation_is_named() {
    let folder = folder();
    let write = |rows: &[String]| {
        let text = rows.iter().map(|row| format!("{row}\n")).collect::<String>();
        fs::write(folder.path().join("train.csv"), format!("x,colour,y\n{text}")).unwrap();
    };
    let refused = |expected: &str| {
        for args in [&["check", "job.toml"][..], &["plan", "job.toml"], &["fit", "job.toml"]] {
            let text = trainer(folder.path(), args).expect(4).text();
            assert!(text.contains(expected), "{args:?}: {text}");
        }
    };
    let row = |i: usize| format!("{},red,{}.5", if i % 7 == 6 { "7e300" } else { "5" }, i);
    write(&(0..60).map(row).collect::<Vec<_>>());
    refused("train.csv`, line 8, column `x`: `7e300` is not a number from -1e120 to 1e120");
    let mut rows: Vec<String> = (0..40).map(|i| format!("{i},red,{i}.5")).collect();
    rows.extend(["1,red,-1e160".to_owned(), "2,red,1e160".to_owned()]);
    write(&rows);
    refused("train.csv`, line 42, column `y`: `-1e160` is not a number from -1e120 to 1e120");
}

#[test]
fn a_file_of_another_format_is_reported_as_such() {
    let folder = folder();
    let job = JOB.replace("\"csv\"", "\"parquet\"").replace("shuffle = false\n", "");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    let text = fit(folder.path(), &["run"]).expect(4).text();
    assert!(text.contains("is not a Parquet or an Arrow file: it starts with `x,co`"), "{text}");
}

/// Feather files train alike whatever their compression, are predicted with their columns, and are named where another
/// kind is asked to read them.
#[test]
fn feather_files_are_read_by_kind_parquet() {
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'parquet'\ntrain = ['a.feather']\ntarget = 'y'\n\
         on_missing = 'mean'\ntask = 'values'\n[train]\nepochs = 2\nbatch_size = 16\n[log]\nevery_steps = 1\n",
    );
    let data = root().join("tests/data");
    let fitted = |name: &str| {
        fs::copy(data.join(name), folder.path().join("a.feather")).unwrap();
        losses(&fit(folder.path(), &[name]).expect(0).json_lines())
    };
    let packed = fitted("lz4.feather");
    assert!(packed.iter().all(|loss| loss.is_finite()) && packed.len() == 8, "{packed:?}");
    assert_eq!((fitted("zstd.feather"), fitted("uncompressed.feather")), (packed.clone(), packed));
    let predicted =
        trainer(folder.path(), &["predict", "lz4.feather", "a.feather", "--with-inputs", "-q"]).expect(0);
    let lines: Vec<&str> = predicted.stdout.lines().collect();
    assert_eq!(lines.len(), 61);
    assert!(lines[0].starts_with("price,count,rate,when,name,y,flag,prediction"), "{}", lines[0]);
    assert!(lines[1].contains(",2021-01-28 22:15:30,"), "{}", lines[1]);

    let kind = |kind: &str| {
        let set = format!("data.kind={kind}");
        trainer(folder.path(), &["check", "job.toml", "--set", &set])
    };
    let text = kind("feather").expect(2).stderr;
    assert!(text.contains("`parquet` is the kind of such files"), "{text}");
    let text = kind("csv").expect(4).stderr;
    assert!(text.contains("it is a Parquet or an Arrow file, not text"), "{text}");
    let whole = fs::read(data.join("lz4.feather")).unwrap();
    fs::write(folder.path().join("a.feather"), &whole[..whole.len() / 2]).unwrap();
    fit(folder.path(), &["cut"]).expect(4);
}

/// y has an arbitrary value for each of twelve names: only an embedding can learn it.
fn named_rows(from: u32, to: u32) -> String {
    let row = |i: u32| {
        let (name, x) = (i * 5 % 12, f64::from(i * 37 % 101) / 100.0);
        format!("n{name},{x},{}\n", f64::from(name * name * 7 % 11) + x)
    };
    "name,x,y\n".to_owned() + &(from..to).map(row).collect::<String>()
}

fn embedding_folder() -> TempDir {
    let folder = folder();
    let job = JOB.replace("shuffle = false", "encode = \"embed\"").replace("epochs = 8", "epochs = 12");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    fs::write(folder.path().join("train.csv"), named_rows(0, 300)).unwrap();
    // A name that no training row has is not an error.
    fs::write(folder.path().join("valid.csv"), named_rows(300, 350) + "n99,0.5,3\n").unwrap();
    folder
}

/// Embedded categories are shown, counted and learned in any precision, and a stopped run resumes.
#[test]
fn embedded_categories_are_learned_and_resumed() {
    let folder = embedding_folder();
    let fit = |args: &[&str]| losses(&fit(folder.path(), args).expect(0).json_lines());
    let said = trainer(folder.path(), &["check", "job.toml"]).expect(0).text();
    assert!(said.contains("1 number and 1 category to embed"), "{said}");
    assert!(said.contains("category of 12 values, embedded"), "{said}");
    // The second name, n5, is the eighth in the order n0, n1, n10, n11, n2, ...
    assert!(said.contains("name = 7  target"), "{said}");
    let said = trainer(folder.path(), &["check", "job.toml", "--json"]).expect(0).text();
    // An embedding table of 12 x 6, a layer from 7 inputs to 8 hidden values, and one from 8 to 1.
    assert!(said.contains(&format!("\"parameters\":{}", 72 + 7 * 8 + 8 + 8 + 1)), "{said}");
    let whole = fit(&["whole"]);
    assert!(whole[whole.len() - 1] < 0.1 * whole[0], "{whole:?}");
    let (first, second) = (fit(&["parts", "--max-steps", "30"]), fit(&["parts", "--resume"]));
    assert_eq!([first, second].concat(), whole);
    let short = fit(&["short", "--set", "train.precision=\"bf16\""]);
    assert!(short[short.len() - 1] < 0.2 * short[0], "{short:?}");
}

#[test]
fn a_model_that_cannot_embed_is_reported_before_anything_is_read() {
    let folder = embedding_folder();
    let job = JOB.replace("shuffle = false", "encode = \"embed\"");
    let job = job.replace("kind = \"mlp\"\nhidden = [8]", "kind = \"cnn\"");
    fs::write(folder.path().join("job.toml"), job).unwrap();
    fs::remove_file(folder.path().join("train.csv")).unwrap();
    let said = trainer(folder.path(), &["check", "job.toml"]).expect(2).text();
    assert!(
        said.contains("`data.encode` is \"embed\", but models of kind `cnn` cannot embed categories"),
        "{said}"
    );
}
