//! Splits of the data through the binary: test sets, classes, groups, folds, and the evaluation before the first
//! update.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::fixtures;
use crate::harness::{events, finish, job_folder, measured_command, named, trainer, write_files};

/// 200 rows, four of each patient; the class is rare and depends on the inputs.
fn table(rows: std::ops::Range<usize>) -> String {
    let row = |i: usize| {
        let (x, y) = ((i * 37 % 101) as f64 / 10.0, (i * 53 % 97) as f64 / 9.0);
        let class = if i.is_multiple_of(10) { "rare" } else { "common" };
        format!("{x},{y},p{},{class}\n", i / 4)
    };
    std::iter::once("x,y,patient,class\n".to_owned()).chain(rows.map(row)).collect()
}

fn csv_job(keys: &str) -> tempfile::TempDir {
    let folder = job_folder(format!(
        "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\ntarget = 'class'\n{keys}\n\
         [train]\nbatch_size = 16\nepochs = 2\n[log]\ntensorboard = false\n"
    ));
    fs::write(folder.path().join("train.csv"), table(0..200)).unwrap();
    folder
}

fn check(folder: &Path, sets: &[&str]) -> Value {
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    trainer(folder, &[&["check", "job.toml", "--json", "-q"], &sets[..]].concat()).expect(0).json()["data"]
        .clone()
}

fn counts(data: &Value) -> [Option<u64>; 3] {
    ["train_samples", "valid_samples", "test_samples"].map(|key| data[key].as_u64())
}

fn eval(folder: &Path, split: &str) -> Value {
    trainer(folder, &["eval", "run", "--split", split, "--json", "-q"]).expect(0).json()
}

/// Samples of each class, as an evaluation counts them.
fn classes(evaluation: &Value) -> Vec<(String, u64)> {
    let classes = evaluation["metrics"]["classes"].as_object().unwrap();
    classes.iter().map(|(name, class)| (name.clone(), class["samples"].as_u64().unwrap())).collect()
}

#[test]
fn a_table_has_a_test_set_of_the_same_classes() {
    let folder =
        csv_job("valid_fraction = 0.2\ntest_fraction = 0.1\nsplit = 'stratified'\nignore = ['patient']");
    let data = check(folder.path(), &[]);
    assert_eq!(counts(&data), [Some(140), Some(40), Some(20)]);
    assert_eq!(data["about"]["split"], "stratified by class, 20 % for validation, 10 % for testing");
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    assert_eq!(named(&events(&folder.path().join("run")), "started")[0]["test_samples"], 20);
    for (split, samples, rare) in [("test", 20, 2), ("valid", 40, 4), ("train", 140, 14)] {
        let found = eval(folder.path(), split);
        assert_eq!(found["samples"], samples, "{split}");
        assert_eq!(
            classes(&found),
            [("common".to_owned(), samples - rare), ("rare".to_owned(), rare)],
            "{split}"
        );
    }
    let none = trainer(folder.path(), &["eval", "run", "--split", "test", "--data", "train.csv"]);
    assert!(none.stderr.contains("cannot be used with"), "{}", none.text());
}

#[test]
fn test_files_are_evaluated_and_a_run_without_them_says_so() {
    let folder = csv_job("test = 'test.csv'\nignore = ['patient']");
    fs::write(folder.path().join("test.csv"), table(200..230)).unwrap();
    assert_eq!(counts(&check(folder.path(), &[])), [Some(180), Some(20), Some(30)]);
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    assert_eq!(eval(folder.path(), "test")["samples"], 30);
    // The test files belong to the experiment: other ones are refused, moved ones are not.
    fs::rename(folder.path().join("test.csv"), folder.path().join("moved.csv")).unwrap();
    let resume = |set: &str| trainer(folder.path(), &["fit", "job.toml", "--resume=run", "-q", "--set", set]);
    resume("data.test=moved.csv").expect(0);
    fs::write(folder.path().join("moved.csv"), table(200..231)).unwrap();
    let refused = resume("data.test=moved.csv");
    assert_ne!(refused.code(), Some(0), "{}", refused.text());

    let folder = csv_job("ignore = ['patient']");
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let refused = trainer(folder.path(), &["eval", "run", "--split", "test"]);
    assert_ne!(refused.code(), Some(0));
    assert!(refused.stderr.contains("neither `data.test` nor `data.test_fraction`"), "{}", refused.text());
}

#[test]
fn groups_stay_together_and_folds_share_the_test_set() {
    let folder = csv_job("test_fraction = 0.2\ngroup = 'patient'");
    let mut valid = 0;
    for fold in 1..=4 {
        let data = check(folder.path(), &[&format!("data.fold={fold}/4")]);
        let [train, own, test] = counts(&data);
        assert_eq!((train.unwrap() + own.unwrap(), test), (160, Some(40)), "fold {fold}");
        assert_eq!(data["input"], "[2] numbers", "the group is no input");
        valid += own.unwrap();
    }
    assert_eq!(valid, 160);
    // One group of a third of the rows is more than a tenth.
    let rows = (0..200).map(|i| format!("{i},{},p{},{}\n", i % 7, if i < 70 { 0 } else { i }, i % 2));
    let one = std::iter::once("x,y,patient,class\n".to_owned()).chain(rows).collect::<String>();
    fs::write(folder.path().join("train.csv"), one).unwrap();
    let warnings = check(folder.path(), &["data.valid_fraction=0.1"])["warnings"].to_string();
    assert!(
        warnings.contains("the largest group of `patient`, that of row 1, has 70 of 200 samples"),
        "{warnings}"
    );
}

#[test]
fn a_folder_of_images_is_split_by_class() {
    let image = |i: usize| {
        let mut colour = [(i * 7 % 60) as u8; 4];
        colour[i % 3] = 200;
        fixtures::png([8, 8], png::ColorType::Rgba, png::BitDepth::Eight, &colour.repeat(64))
    };
    // 40 red, 10 green, 10 blue and a single grey image.
    let class = |i: usize| ["red", "red", "red", "red", "green", "blue"][i % 6];
    let mut images: Vec<(String, Vec<u8>)> =
        (0..60).map(|i| (format!("{}/{i:02}.png", class(i)), image(i))).collect();
    images.push(("grey/60.png".into(), image(60)));
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'images'\ntrain = ['set']\nimage_size = 8\n\
         split = 'stratified'\nvalid_fraction = 0.2\ntest_fraction = 0.2\n[data.augment]\nhorizontal_flip = 0.5\n\
         [train]\nbatch_size = 8\nepochs = 1\n[log]\ntensorboard = false\n",
    );
    write_files(&folder.path().join("set"), &images);
    let data = check(folder.path(), &[]);
    assert_eq!(counts(&data), [Some(37), Some(12), Some(12)]);
    let warnings = data["warnings"].to_string();
    for set in ["validation", "test"] {
        let expected = format!("the {set} set has no sample of class `grey`, which has 1 in all");
        assert!(warnings.contains(&expected), "{warnings}");
    }
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    for split in ["valid", "test"] {
        let found = eval(folder.path(), split);
        let expected =
            [("blue", 2), ("green", 2), ("grey", 0), ("red", 8)].map(|(name, n)| (name.to_owned(), n));
        assert_eq!(classes(&found).into_iter().collect::<BTreeSet<_>>(), BTreeSet::from(expected), "{split}");
    }
}

#[test]
fn the_folds_of_records_validate_each_once() {
    let folder = job_folder(
        "[model]\nkind = 'bert'\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 16\n[data]\nkind = 'jsonl'\n\
         train = ['a.jsonl']\ntokens = 'bytes'\nlabel = 'class'\nsplit = 'stratified'\nfold = '2/3'\n\
         [train]\nbatch_size = 8\nepochs = 1\n[log]\ntensorboard = false\n",
    );
    let record = |i: usize| format!("{{\"text\": \"record {i}\", \"class\": \"{}\"}}\n", ["a", "b"][i % 2]);
    fs::write(folder.path().join("a.jsonl"), (0..31).map(record).collect::<String>()).unwrap();
    let sizes =
        ["1/3", "2/3", "3/3"].map(|fold| counts(&check(folder.path(), &[&format!("data.fold={fold}")])));
    assert!(sizes.iter().all(|[train, valid, _]| train.unwrap() + valid.unwrap() == 31), "{sizes:?}");
    assert_eq!(sizes.iter().map(|[_, valid, _]| valid.unwrap()).sum::<u64>(), 31, "{sizes:?}");
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let evaluation = eval(folder.path(), "valid");
    assert_eq!(evaluation["samples"].as_u64(), sizes[1][1]);
    let events = events(&folder.path().join("run"));
    let trained = named(&events, "eval").last().unwrap()["metrics"]["valid.loss"].as_f64().unwrap();
    let found = evaluation["metrics"]["loss"].as_f64().unwrap();
    assert!((trained - found).abs() < 1e-5, "{trained} {found}");
    // Another fold is another experiment.
    let other = trainer(folder.path(), &["fit", "job.toml", "--resume=run", "-q", "--set", "data.fold=3/3"]);
    assert!(other.stderr.contains("data.fold"), "{}", other.text());
}

/// The evaluation of the initial weights comes once, whatever interrupts the run, and counts for the best checkpoint.
#[test]
fn the_initial_weights_are_evaluated_once() {
    let job = |folder: &tempfile::TempDir| folder.path().join("run");
    let folders = ["", "kill:0,kill:3,kill:5"].map(|crash| {
        let folder = csv_job("ignore = ['patient']");
        let args = [
            "fit",
            "job.toml",
            "--run-dir",
            "run",
            "-q",
            "--set",
            "eval.at_start=true",
            "--set",
            "eval.every_steps=5",
            "--set",
            "checkpoint.every_steps=2",
        ];
        let mut command = measured_command(folder.path(), &args);
        if !crash.is_empty() {
            command.env("TRAINER_FAULT_CRASH", crash);
        }
        finish(&mut command).expect(0);
        folder
    });
    let evals = folders.each_ref().map(|folder| {
        let mut found: Vec<(u64, String)> = named(&events(&job(folder)), "eval")
            .iter()
            .map(|event| (event["step"].as_u64().unwrap(), event["metrics"].to_string()))
            .collect();
        found.dedup();
        found
    });
    assert_eq!(evals[0].first().unwrap().0, 0, "{:?}", evals[0]);
    assert_eq!(evals[0], evals[1]);
    let metrics = fs::read_to_string(job(&folders[1]).join("metrics.jsonl")).unwrap();
    let at_start = metrics.lines().filter(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        row["step"] == 0 && row.get("valid.loss").is_some()
    });
    assert_eq!(at_start.count(), 1, "{metrics}");

    // Training with such a learning rate only makes it worse: the initial weights are the best.
    let folder = csv_job("ignore = ['patient']");
    let sets = ["eval.at_start=true", "optimizer.lr=100"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let done = trainer(folder.path(), &[&["fit", "job.toml", "--run-dir", "run", "-q"], &sets[..]].concat());
    done.expect(0);
    let run = folder.path().join("run");
    let best = fs::read_link(run.join("checkpoints/best")).unwrap();
    assert!(best.ends_with("step-00000000"), "{best:?}");
    trainer(folder.path(), &["eval", "run", "-q"]).expect(0);
}
