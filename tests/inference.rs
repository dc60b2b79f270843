//! Trained models are used through the program: evaluated and asked, after their data is gone and their folder moved.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::harness::{Finished, events, job_folder, mlp_job, named, trainer};

/// A table of two numbers and a category; the class depends on all of them.
fn table(rows: usize, first: usize) -> String {
    let row = |i: usize| {
        let (x, y) = ((i * 37 % 101) as f64 / 10.0, (i * 53 % 97) as f64 / 9.0);
        let (color, shift) = [("red", 0.0), ("green", 3.0), ("blue, dark", -3.0)][i % 3];
        let class = if x + shift > y { "above" } else { "below" };
        format!("{x},{y},\"{color}\",{class}\n")
    };
    std::iter::once("x,y,color,class\n".to_owned()).chain((first..first + rows).map(row)).collect()
}

const CLASSIFIER: &str = "[model]\nkind = 'mlp'\nhidden = [32]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\n\
    target = 'class'\nvalid_fraction = 0.25\n[train]\nbatch_size = 16\nepochs = 12\nema = 0.9\n\
    [optimizer]\nkind = 'adamw'\nlr = 0.02\n[log]\ntensorboard = false\n";

fn trained(job: &str, train: &str) -> tempfile::TempDir {
    let folder = job_folder(job);
    fs::write(folder.path().join("train.csv"), train).unwrap();
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    folder
}

fn rows(text: &str) -> Vec<Vec<&str>> {
    text.lines().map(|line| line.split(',').collect()).collect()
}

fn predict(folder: &Path, args: &[&str]) -> Finished {
    trainer(folder, &[&["predict"], args, &["-q"]].concat())
}

/// The last evaluation that training reported.
fn last_eval(run: &Path) -> Value {
    let events = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let lines = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.rev().find(|event| event["event"] == "eval").unwrap()
}

#[test]
fn a_classifier_is_evaluated_as_training_evaluated_it() {
    let folder = trained(CLASSIFIER, &table(400, 0));
    let metrics =
        trainer(folder.path(), &["eval", "run", "--checkpoint", "last", "--json", "-q"]).expect(0).json();
    let trained = last_eval(&folder.path().join("run"));
    for (ours, theirs) in [("loss", "valid.loss"), ("accuracy", "valid.accuracy")] {
        let (ours, theirs) =
            (metrics["metrics"][ours].as_f64().unwrap(), trained["metrics"][theirs].as_f64().unwrap());
        assert!((ours - theirs).abs() < 1e-5, "{ours} {theirs}");
    }
    assert_eq!(metrics["samples"], 100);
    let confusion: u64 = metrics["confusion"]["matrix"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|n| n.as_u64().unwrap())
        .sum();
    assert_eq!(confusion, 100);
    assert_eq!(metrics["confusion"]["classes"], serde_json::json!(["above", "below"]));
    assert!(metrics["metrics"]["roc_auc"].as_f64().unwrap() > 0.9);
}

#[test]
fn predictions_need_neither_the_training_data_nor_the_old_place() {
    let folder = trained(CLASSIFIER, &table(400, 0));
    fs::write(folder.path().join("new.csv"), table(50, 1000)).unwrap();
    let before = predict(folder.path(), &["run", "new.csv", "--probabilities"]).expect(0).stdout;
    fs::remove_file(folder.path().join("train.csv")).unwrap();
    fs::remove_dir_all(folder.path().join("runs")).ok();
    fs::rename(folder.path().join("run"), folder.path().join("moved")).unwrap();
    let after = predict(folder.path(), &["moved", "new.csv", "--probabilities"]).expect(0).stdout;
    assert_eq!(before, after);
    let found = rows(&after);
    assert_eq!(found[0], ["prediction", "probability", "probability_above", "probability_below", "error"]);
    assert_eq!(found.len(), 51);
    let right =
        table(50, 1000).lines().zip(&found).skip(1).filter(|(row, found)| row.ends_with(found[0])).count();
    assert!(right >= 45, "{right} of 50");
    // The checkpoint folder alone is enough, and so is the link to it.
    let linked =
        predict(folder.path(), &["moved/checkpoints/best", "new.csv", "--probabilities"]).expect(0).stdout;
    assert_eq!(linked, after);
}

#[test]
fn columns_may_be_in_another_order_and_a_missing_one_is_named() {
    let folder = trained(CLASSIFIER, &table(400, 0));
    fs::write(folder.path().join("new.csv"), "x,y,color\n1,2,red\n9,1,green\n").unwrap();
    fs::write(folder.path().join("other.csv"), "id,color,y,x\n7,red,2,1\n8,green,1,9\n").unwrap();
    let one = predict(folder.path(), &["run", "new.csv"]).expect(0).stdout;
    assert_eq!(predict(folder.path(), &["run", "other.csv"]).expect(0).stdout, one);
    fs::write(folder.path().join("short.csv"), "x,color\n1,red\n").unwrap();
    let text = predict(folder.path(), &["run", "short.csv"]).expect(4).stderr;
    assert!(text.contains("it has no column `y`"), "{text}");
}

/// Predictions never take the place of what they are of, under whatever name.
#[test]
fn inputs_are_not_overwritten() {
    let folder = trained(CLASSIFIER, &table(100, 0));
    let inputs = "x,y,color\n1,2,red\n9,1,green\n";
    fs::write(folder.path().join("new.csv"), inputs).unwrap();
    fs::hard_link(folder.path().join("new.csv"), folder.path().join("same.csv")).unwrap();
    for output in ["new.csv", "./run/../new.csv", "same.csv"] {
        let text = predict(folder.path(), &["run", "new.csv", "-o", output]).expect(2).stderr;
        assert!(text.contains("would overwrite `new.csv`"), "{text}");
        assert_eq!(fs::read_to_string(folder.path().join("new.csv")).unwrap(), inputs);
    }
    predict(folder.path(), &["run", "new.csv", "-o", "out.csv"]).expect(0);
    predict(folder.path(), &["run", "new.csv", "-o", "out.csv"]).expect(0);
}

#[test]
fn a_bad_row_stops_or_is_a_row_with_an_error_as_the_job_says() {
    let folder = trained(CLASSIFIER, &table(400, 0));
    fs::write(folder.path().join("new.csv"), "x,y,color\n1,2,red\nfour,1,green\n3,1,purple\n").unwrap();
    let text = predict(folder.path(), &["run", "new.csv", "-o", "out.csv"]).expect(4).stderr;
    assert!(text.contains("four") && !folder.path().join("out.csv").exists(), "{text}");
    assert_eq!(
        fs::read_dir(folder.path())
            .unwrap()
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().ends_with(".part"))
            .count(),
        0
    );
    let args = ["run", "new.csv", "-o", "out.jsonl", "--set", "data.on_bad_record=skip", "--with-inputs"];
    let ended = trainer(folder.path(), &[&["predict"], &args[..]].concat()).expect(4);
    assert!(
        ended.stderr.contains("error: 1 bad row: ") && ended.stderr.contains("training row had in 1 cell"),
        "{}",
        ended.stderr
    );
    let lines: Vec<Value> = fs::read_to_string(folder.path().join("out.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[1]["prediction"].is_null() && lines[1]["error"].as_str().unwrap().contains("four"));
    assert_eq!((&lines[1]["x"], &lines[2]["color"]), (&"four".into(), &"purple".into()));
    assert!(lines[0]["prediction"].is_string() && lines[2]["prediction"].is_string());
}

#[test]
fn regression_is_in_the_units_of_the_target() {
    let text: String = std::iter::once("a,b,price\n".to_owned())
        .chain((0..300).map(|i| {
            let (a, b) = ((i * 37 % 101) as f64, (i * 53 % 97) as f64);
            format!("{a},{b},{}\n", 1000.0 + 30.0 * a - 10.0 * b)
        }))
        .collect();
    let job =
        CLASSIFIER.replace("target = 'class'", "target = 'price'").replace("epochs = 12", "epochs = 60");
    let folder = trained(&job, &text);
    fs::write(folder.path().join("new.csv"), "a,b\n50,50\n10,90\n").unwrap();
    let found = predict(folder.path(), &["run", "new.csv"]).expect(0).stdout;
    let found: Vec<f64> = rows(&found)[1..].iter().map(|row| row[0].parse().unwrap()).collect();
    assert!((found[0] - 2000.0).abs() < 150.0 && (found[1] - 400.0).abs() < 250.0, "{found:?}");
    let metrics = trainer(folder.path(), &["eval", "run", "--json", "-q"]).expect(0).json();
    let of = |name: &str| metrics["metrics"][name].as_f64().unwrap();
    assert!(
        of("rmse") > 1.0 && of("rmse") < 150.0 && of("mae") <= of("rmse") && of("r2") > 0.95,
        "{metrics}"
    );
}

#[test]
fn an_evaluation_shows_the_confusion_matrix_and_says_what_to_do_without_its_data() {
    let folder = trained(CLASSIFIER, &table(400, 0));
    let at = folder.path();
    let shown = trainer(at, &["eval", "run"]).expect(0).stdout;
    let matrix: Vec<Vec<&str>> = shown
        .lines()
        .skip_while(|line| !line.starts_with("class / "))
        .map(|x| x.split_whitespace().collect())
        .collect();
    assert_eq!(matrix[0], ["class", "/", "predicted", "above", "below"], "{shown}");
    let counts = matrix[1..].iter().flat_map(|row| &row[1..]).map(|count| count.parse::<u64>().unwrap());
    assert_eq!((matrix.len(), counts.sum::<u64>()), (3, 100), "{shown}");
    // An older checkpoint was the best when it was written.
    let steps: Vec<String> = crate::harness::names(&at.join("run/checkpoints"));
    let best = fs::read_link(at.join("run/checkpoints/best")).unwrap();
    for step in steps.iter().filter(|name| name.starts_with("step-")) {
        let said = trainer(at, &["eval", &format!("run/checkpoints/{step}")]).expect(0).stderr;
        assert_eq!(said.contains("the best"), best.ends_with(step), "{said}");
    }
    fs::rename(at.join("train.csv"), at.join("gone.csv")).unwrap();
    let said = trainer(at, &["eval", "run"]).expect(4).stderr;
    assert!(said.contains("not where it was") && said.contains("`--data PATH`"), "{said}");
    trainer(at, &["eval", "run", "--data", "gone.csv"]).expect(0);
}

#[test]
fn what_is_no_model_is_refused_with_its_exit_code() {
    let folder = trained(CLASSIFIER, &table(100, 0));
    let at = folder.path();
    trainer(at, &["eval", "nowhere"]).expect(2);
    let text = trainer(at, &["eval", "run", "--checkpoint", "step-3"]).expect(2).stderr;
    assert!(text.contains("has no checkpoint of step 3; those kept are step-"), "{text}");
    fs::write(at.join("empty.csv"), "").unwrap();
    trainer(at, &["predict", "run", "empty.csv"]).expect(4);
    let views = trainer(at, &["eval", "run", "--tta", "flip"]).expect(2).stderr;
    assert!(views.contains("the data of this run are no images"), "{views}");
    trainer(at, &["predict", "run", "new.xyz", "-o", "out.xyz"]).expect(2);
    let weights = at.join("run/checkpoints/last/ema.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let text = trainer(at, &["eval", "run", "--checkpoint", "last"]).expect(4).stderr;
    assert!(text.contains("does not match its checksum"), "{text}");
    let text = trainer(at, &["eval", "run/checkpoints/last", "--set", "memory.ram='1MiB'"]);
    assert!(text.code() == Some(4) || text.code() == Some(3));
}

/// Class weights, smoothing, the losses of a regression and early stopping are keys of the job.
#[test]
fn losses_and_early_stopping_are_keys_of_the_job() {
    let folder = job_folder(CLASSIFIER);
    fs::write(folder.path().join("train.csv"), table(400, 0)).unwrap();
    let fit = |run: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        trainer(folder.path(), &[&["fit", "job.toml", "--run-dir", run, "-q"], &sets[..]].concat())
    };
    fit("smooth", &["train.label_smoothing=0.2", "train.class_weights=balanced"]).expect(0);
    let smooth = last_eval(&folder.path().join("smooth"))["metrics"]["valid.loss"].as_f64().unwrap();
    assert!(smooth > 0.3, "smoothing keeps the loss of certain predictions up: {smooth}");
    let text = fit("a", &["train.class_weights={abov=2.0}"]).expect(2).stderr;
    assert!(text.contains("names `abov`, which is no class"), "{text}");
    let text = fit("a", &["train.class_weights={above=0.0, below=0.0}"]).expect(2).stderr;
    assert!(text.contains("is 0 for every class of the training set"), "{text}");
    let text = fit("b", &["train.loss=mae"]).expect(2).stderr;
    assert!(text.contains("`train.loss = \"mae\"` needs values as targets"), "{text}");
    fit("early", &["train.epochs=200", "stop.target=0.9", "stop.metric=valid.accuracy"]).expect(0);
    let summary: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("early/summary.json")).unwrap()).unwrap();
    assert_eq!(summary["state"], "finished");
    assert!(summary["reason"].as_str().unwrap().contains("valid.accuracy has reached"), "{summary}");
    assert!(summary["steps"].as_u64().unwrap() < summary["total_steps"].as_u64().unwrap());
    // A resumed run that has stopped has nothing left to do, and one with another target continues.
    let resume = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        trainer(
            folder.path(),
            &[
                &["fit", "job.toml", "--run-dir", "early", "--resume", "-q", "--set", "train.epochs=200"],
                &sets[..],
            ]
            .concat(),
        )
        .expect(0);
        let text = fs::read_to_string(folder.path().join("early/summary.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["steps"].as_u64().unwrap()
    };
    let stopped = resume(&["stop.target=0.9", "stop.metric=valid.accuracy"]);
    assert_eq!(Some(stopped), summary["steps"].as_u64());
    assert!(resume(&["stop.patience=1", "stop.min_delta=0.5"]) > stopped);
}

/// A model trained on ten classes is fine-tuned to two, in full and by its head alone, and is then better than one
/// that begins with nothing.
#[test]
fn a_trained_model_is_fine_tuned_to_other_classes() {
    let job = |classes: &str, extra: &str| {
        format!(
            "[model]\nkind = 'mlp'\nhidden = [48, 32]\n[data]\nkind = 'csv'\ntrain = ['{classes}.csv']\nvalid = ['{classes}-valid.csv']\n\
             target = 'class'\nstandardise = false\n[train]\nbatch_size = 16\n{extra}\n[optimizer]\nkind = 'adamw'\nlr = 0.01\n\
             [log]\ntensorboard = false\n"
        )
    };
    // The class is the sector of the plane; two of the ten, or halves of the plane.
    let rows = |count: usize, first: usize, classes: usize| {
        let row = |i: usize| {
            let (x, y) = ((i * 37 % 211) as f64 / 105.0 - 1.0, (i * 53 % 197) as f64 / 98.0 - 1.0);
            let turn = (y.atan2(x) / std::f64::consts::TAU + 0.5) * 10.0;
            let class = (turn as usize).min(9);
            format!("{x},{y},c{}\n", if classes == 10 { class } else { class % 2 })
        };
        std::iter::once("x,y,class\n".to_owned()).chain((first..first + count).map(row)).collect::<String>()
    };
    let folder = job_folder(job("ten", "epochs = 25"));
    let at = folder.path();
    for (name, classes, samples) in [("ten", 10, 2000), ("two", 2, 60)] {
        fs::write(at.join(format!("{name}.csv")), rows(samples, 0, classes)).unwrap();
        fs::write(at.join(format!("{name}-valid.csv")), rows(500, 5000, classes)).unwrap();
    }
    trainer(at, &["fit", "job.toml", "--run-dir", "ten", "-q"]).expect(0);
    let fit = |run: &str, extra: &str| {
        fs::write(at.join("two.toml"), job("two", extra)).unwrap();
        trainer(at, &["fit", "two.toml", "--run-dir", run])
    };
    let text = fit("strict", "epochs = 1\ninit = 'ten'").expect(2).stderr;
    assert!(text.contains("in the file, and [2, 32] in the model") && text.contains("init_head"), "{text}");
    for command in ["check", "plan"] {
        let text = trainer(at, &[command, "two.toml"]).expect(2).stderr;
        assert!(text.contains("in the file, and [2, 32] in the model"), "{command}: {text}");
    }
    let text = fit("tuned", "epochs = 120\ninit = 'ten'\ninit_head = 'auto'").expect(0).stderr;
    assert!(text.contains("4 tensors matched; new layers.2.weight, layers.2.bias"), "{text}");
    let head = "epochs = 120\ninit = 'ten'\ninit_head = 'auto'\nfreeze = ['*', '!layers.2']\n\
                [[train.groups]]\nparams = 'layers.2'\nlr_scale = 10";
    let text = fit("head", head).expect(0).stderr;
    assert!(text.contains("1,778 parameters, 66 trained"), "{text}");
    fit("scratch", "epochs = 120").expect(0);
    let loss = |run: &str| last_eval(&at.join(run))["metrics"]["valid.loss"].as_f64().unwrap();
    for tuned in ["tuned", "head"] {
        assert!(loss(tuned) < loss("scratch"), "{tuned}: {} {}", loss(tuned), loss("scratch"));
    }
    // `init` takes the best checkpoint of a run.
    let weights =
        |run: &str| crate::freeze::tensors(&at.join(run).join("checkpoints/best/model.safetensors"));
    let (ten, head, tuned) = (weights("ten"), weights("head"), weights("tuned"));
    for name in ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"] {
        assert!(ten[name] == head[name], "{name} is frozen");
        assert!(ten[name] != tuned[name], "{name} is trained");
    }
}

/// `train.init` takes the weights that `eval` evaluates.
#[test]
fn initial_weights_are_the_average_of_an_intact_checkpoint() {
    let folder = job_folder(mlp_job(&["train.steps = 12", "train.ema = 0.9"]));
    let at = folder.path();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    let evaluated = trainer(at, &["eval", "run", "--json", "-q"]).expect(0).json();
    let sets = ["--set", "train.init=run", "--set", "eval.at_start=true", "--set", "train.steps=1"];
    trainer(at, &[&["fit", "job.toml", "--run-dir", "next", "-q"], &sets[..]].concat()).expect(0);
    let events = events(&at.join("next"));
    let first = named(&events, "eval")[0]["metrics"]["valid.loss"].as_f64().unwrap();
    let loss = evaluated["metrics"]["loss"].as_f64().unwrap();
    assert!((first - loss).abs() < 1e-5, "{first} {loss}");
    for file in ["ema.safetensors", "model.safetensors"] {
        let path = at.join("run/checkpoints/best").join(file);
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        *damaged.last_mut().unwrap() ^= 1;
        fs::write(&path, damaged).unwrap();
        let text = trainer(at, &[&["check", "job.toml"], &sets[..]].concat()).expect(2).stderr;
        let problem = format!("which is damaged: {file} does not match its checksum");
        assert!(text.contains("`train.init` is `") && text.contains(&problem), "{text}");
        assert!(text.contains("hint: "), "{text}");
        fs::write(&path, whole).unwrap();
    }
}

/// The metrics of no rows are no numbers, and those of the other rows are not what was asked for.
#[test]
fn an_evaluation_ends_at_a_bad_record_or_leaves_it_out_as_the_job_says() {
    let folder = trained(CLASSIFIER, &table(400, 0));
    let at = folder.path();
    let eval = |file: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        trainer(at, &[&["eval", "run", "--data", file], &sets[..]].concat())
    };
    let bad = "1,2,red,sideways\n";
    fs::write(at.join("some.csv"), table(30, 1000) + bad + bad).unwrap();
    fs::write(at.join("none.csv"), format!("x,y,color,class\n{bad}{bad}")).unwrap();
    for file in ["some.csv", "none.csv"] {
        let ended = eval(file, &[]).expect(4);
        for part in [file, "line ", "column `class`", "`sideways`", "data.on_bad_record=skip"] {
            assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
        }
        assert_eq!(ended.stdout, "");
    }
    let ended = eval("some.csv", &["data.on_bad_record=skip"]).expect(0);
    assert!(ended.stderr.contains("left out: 2 bad records"), "{}", ended.stderr);
    assert_eq!(
        ended.stdout.lines().next().unwrap().split_whitespace().collect::<Vec<_>>(),
        ["samples", "30"]
    );
    assert!(!ended.stdout.contains("NaN") && !ended.stdout.contains(" -0.0"), "{}", ended.stdout);
    let ended = eval("some.csv", &["data.on_bad_record=skip", "data.max_bad_records=1"]).expect(4);
    assert!(ended.stderr.contains("2 bad records, more than the limit of 1"), "{}", ended.stderr);
    let ended = eval("none.csv", &["data.on_bad_record=skip"]).expect(4);
    assert!(ended.stderr.contains("has no samples") && ended.stderr.contains("sideways"), "{}", ended.stderr);
    assert_eq!(ended.stdout, "");
}

/// An idx file of bytes.
fn idx(dims: &[u32], value: impl Fn(u32) -> u8) -> Vec<u8> {
    let header = [0, 0, 8, dims.len() as u8].into_iter().chain(dims.iter().flat_map(|dim| dim.to_be_bytes()));
    let count: u32 = dims.iter().product();
    header.chain((0..count).map(value)).collect()
}

/// As many pixels in other rows and columns would train and be evaluated without an error, scrambled.
#[test]
fn idx_images_of_another_shape_than_those_of_training_are_refused() {
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'idx'\ntrain_images = 'ti'\ntrain_labels = 'tl'\n\
         valid_images = 'vi'\nvalid_labels = 'vl'\n[train]\nbatch_size = 8\nepochs = 1\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    let write = |images: &str, labels: &str, shape: [u32; 3]| {
        fs::write(at.join(images), idx(&shape, |i| (i * 37 % 251) as u8)).unwrap();
        fs::write(at.join(labels), idx(&shape[..1], |i| (i % 10) as u8)).unwrap();
    };
    write("ti", "tl", [40, 6, 5]);
    write("vi", "vl", [20, 6, 5]);
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    trainer(at, &["eval", "run", "--data", "vi", "vl", "-q"]).expect(0);
    for shape in [[20, 5, 6], [20, 30, 1], [20, 5, 3]] {
        let says = |text: &str| {
            let other = format!("vi` have shape [{}, {}, 1]", shape[1], shape[2]);
            assert!(text.contains(&other) && text.contains("ti` have shape [6, 5, 1]"), "{text}");
        };
        write("vi", "vl", shape);
        for command in ["check", "plan"] {
            says(&trainer(at, &[command, "job.toml"]).expect(4).stderr);
        }
        let run = format!("run-{}-{}", shape[1], shape[2]);
        says(&trainer(at, &["fit", "job.toml", "--run-dir", &run]).expect(4).stderr);
        for command in
            [&["eval", "run"][..], &["eval", "run", "--data", "vi", "vl"], &["predict", "run", "vi", "vl"]]
        {
            says(&trainer(at, command).expect(4).stderr);
        }
        // A test set that training only counts.
        write("vi", "vl", [20, 6, 5]);
        write("xi", "xl", shape);
        let sets = ["--set", "data.test_images=xi", "--set", "data.test_labels=xl"];
        let text = trainer(at, &[&["check", "job.toml"], &sets[..]].concat()).expect(4).stderr;
        assert!(text.contains("xi` have shape"), "{text}");
    }
}
