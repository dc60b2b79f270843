//! Targets, losses and metrics through the program: several labels per sample, several numbers, sample weights.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DoubleType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::Value;
use tempfile::TempDir;

use crate::fixtures;
use crate::harness::{Finished, command, events, finish, job_folder, last, losses, named, tar, trainer};

fn job(data: &str, more: &str) -> String {
    format!(
        "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\n{data}\n[train]\nbatch_size = 16\nepochs = 15\n\
         [optimizer]\nkind = 'adamw'\nlr = 0.02\n[log]\ntensorboard = false\nevery_steps = 1\n{more}\n"
    )
}

fn numbers(i: usize) -> [f64; 3] {
    [(i * 37 % 101) as f64 / 10.0 - 5.0, (i * 53 % 97) as f64 / 9.0 - 5.0, (i * 29 % 89) as f64 / 8.0 - 5.0]
}

/// A label for each number above zero; a sample may have none.
fn labels(i: usize) -> Vec<&'static str> {
    let names = ["high x", "y", "z"];
    numbers(i).iter().zip(names).filter(|(x, _)| **x > 0.0).map(|(_, name)| name).collect()
}

fn csv_row(i: usize, target: &str) -> String {
    let [x, y, z] = numbers(i);
    format!("{x},{y},{z},{target}\n")
}

fn csv(rows: std::ops::Range<usize>, target: impl Fn(usize) -> String) -> String {
    "x,y,z,target\n".to_owned() + &rows.map(|i| csv_row(i, &target(i))).collect::<String>()
}

fn fit(folder: &Path, more: &[&str]) -> Finished {
    trainer(folder, &[&["fit", "job.toml", "--run-dir", "run", "-q"], more].concat())
}

fn eval(folder: &Path, data: &str) -> Value {
    trainer(folder, &["eval", "run", "--checkpoint", "last", "--data", data, "--json", "-q"]).expect(0).json()
}

fn predictions(folder: &Path, data: &str) -> Vec<Value> {
    let args = ["predict", "run", data, "--checkpoint", "last", "--probabilities", "-o", "out.jsonl", "-q"];
    trainer(folder, &args).expect(0);
    let text = fs::read_to_string(folder.join("out.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Writes rows whose target is a list of texts.
fn write_parquet(path: &Path, rows: std::ops::Range<usize>) {
    let schema = "message table { required double x; required double y; required double z;
        optional group target (LIST) { repeated group list { optional binary element (utf8); } } }";
    let properties = Arc::new(WriterProperties::builder().build());
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut file = SerializedFileWriter::new(fs::File::create(path).unwrap(), schema, properties).unwrap();
    let mut group = file.next_row_group().unwrap();
    for column in 0..3 {
        let values: Vec<f64> = rows.clone().map(|i| numbers(i)[column]).collect();
        let mut writer = group.next_column().unwrap().unwrap();
        writer.typed::<DoubleType>().write_batch(&values, None, None).unwrap();
        writer.close().unwrap();
    }
    let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
    for i in rows {
        let labels = labels(i);
        if labels.is_empty() {
            defined.push(1);
            repeated.push(0);
        }
        for (k, label) in labels.into_iter().enumerate() {
            values.push(ByteArray::from(label));
            defined.push(3);
            repeated.push(i16::from(k > 0));
        }
    }
    let mut writer = group.next_column().unwrap().unwrap();
    writer.typed::<ByteArrayType>().write_batch(&values, Some(&defined), Some(&repeated)).unwrap();
    writer.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
}

fn json_lines(rows: std::ops::Range<usize>) -> String {
    let line = |i: usize| {
        let [x, y, z] = numbers(i);
        serde_json::json!({ "x": x, "y": y, "z": z, "target": labels(i) }).to_string() + "\n"
    };
    rows.map(line).collect()
}

/// The same labels in every format give the same classes, and a model that learns them.
#[test]
fn several_labels_are_learned_from_every_kind_of_table() {
    let separated = |i| labels(i).join("|");
    let flags = |i: usize| numbers(i).map(|x| if x > 0.0 { "1" } else { "0" }).join(",");
    let cases = [
        ("csv", "target = 'target'\nlabel_separator = '|'", csv(0..300, separated), csv(300..400, separated)),
        ("json", "target = 'target'", json_lines(0..300), json_lines(300..400)),
        ("parquet", "target = 'target'", String::new(), String::new()),
        (
            "csv",
            "target = ['high x', 'y2', 'z2']\ntask = 'labels'",
            csv(0..300, flags).replacen("target", "high x,y2,z2", 1),
            csv(300..400, flags).replacen("target", "high x,y2,z2", 1),
        ),
    ];
    let mut found = Vec::new();
    for (kind, keys, train, test) in cases {
        let data = format!(
            "kind = '{kind}'\ntrain = ['train.{kind}']\nvalid = ['test.{kind}']\nshuffle = false\n{keys}"
        );
        let metrics = "[eval]\nmetrics = ['f1_micro', 'f1_macro', 'average_precision', 'accuracy']\n\
                       [checkpoint]\nbest = 'valid.average_precision'";
        let folder = job_folder(job(&data, metrics));
        let path = |name: &str| folder.path().join(format!("{name}.{kind}"));
        if kind == "parquet" {
            write_parquet(&path("train"), 0..300);
            write_parquet(&path("test"), 300..400);
        } else {
            fs::write(path("train"), train).unwrap();
            fs::write(path("test"), test).unwrap();
        }
        fit(folder.path(), &[]).expect(0);
        let metrics = eval(folder.path(), &format!("test.{kind}"))["metrics"].clone();
        let of_run = last(&events(&folder.path().join("run")), "eval")["metrics"].clone();
        for name in ["loss", "f1_micro", "f1_macro", "average_precision", "accuracy"] {
            let (ours, theirs) =
                (metrics[name].as_f64().unwrap(), of_run[format!("valid.{name}")].as_f64().unwrap());
            assert!((ours - theirs).abs() < 1e-5, "{kind} {name}: {ours} {theirs}");
        }
        assert!(metrics["f1_micro"].as_f64().unwrap() > 0.85, "{kind}: {metrics}");
        assert!(of_run["train.loss"].as_f64().unwrap() < 0.5, "{of_run}");
        assert!(of_run["train.accuracy"].as_f64().unwrap() > 0.5, "{of_run}");
        let rows = predictions(folder.path(), &format!("test.{kind}"));
        let right = rows.iter().enumerate().filter(|(i, row)| {
            let predicted = row["prediction"].as_str().unwrap().replace("y2", "y").replace("z2", "z");
            predicted == labels(300 + i).join("|")
        });
        let exact = right.count() as f64 / rows.len() as f64;
        assert!((exact - metrics["accuracy"].as_f64().unwrap()).abs() < 1e-9, "{kind}: {exact} {metrics}");
        for row in &rows {
            let p = row["probability_high x"].as_f64().unwrap();
            assert_eq!(row["prediction"].as_str().unwrap().contains("high x"), p > 0.5);
        }
        found.push(losses(&events(&folder.path().join("run"))));
    }
    assert_eq!(found[0], found[1], "csv and JSON are the same samples");
    assert_eq!(found[0], found[3], "lists and columns of 1 and 0 are the same samples");
}

#[test]
fn separated_labels_are_not_taken_for_classes() {
    let folder = job_folder(job("kind = 'csv'\ntrain = ['train.csv']\ntarget = 'target'", ""));
    fs::write(folder.path().join("train.csv"), csv(0..100, |i| labels(i).join("; "))).unwrap();
    let text = trainer(folder.path(), &["check", "job.toml"]).expect(4).stderr;
    assert!(text.contains("lists of labels, separated by `;`") && text.contains("label_separator"), "{text}");
    // Said so, each text is a class.
    let set = ["check", "job.toml", "--set", "data.task='classes'", "--set", "data.missing=['NA']"];
    trainer(folder.path(), &set).expect(0);
    let text =
        trainer(folder.path(), &["check", "job.toml", "--set", "data.label_separator=';'"]).expect(0).stdout;
    assert!(text.contains("any number of 3 labels"), "{text}");
}

#[test]
fn weights_of_labels_and_the_focal_loss_train() {
    let data = "kind = 'csv'\ntrain = ['train.csv']\ntarget = 'target'\nlabel_separator = '|'";
    let folder = job_folder(job(data, ""));
    fs::write(folder.path().join("train.csv"), csv(0..200, |i| labels(i).join("|"))).unwrap();
    let sets = [
        "train.loss='focal'",
        "train.class_weights='balanced'",
        "train.class_weights={ y = 3.0 }",
        "train.label_smoothing=0.1",
    ];
    for (i, set) in sets.iter().enumerate() {
        let run = format!("run-{i}");
        let ended = trainer(folder.path(), &["fit", "job.toml", "--run-dir", &run, "--set", set, "-q"]);
        ended.expect(0);
        let losses = losses(&events(&folder.path().join(run)));
        assert!(losses.last() < losses.first(), "{set}: {losses:?}");
    }
    let wrong = ["check", "job.toml", "--set", "train.class_weights={ w = 3.0 }"];
    assert!(trainer(folder.path(), &wrong).expect(2).stderr.contains("names `w`, which is no class"));
    let wrong = ["check", "job.toml", "--set", "train.loss='cross_entropy'"];
    assert!(trainer(folder.path(), &wrong).expect(2).stderr.contains("any number of 3 labels"));
}

fn tiny_png(value: u8) -> Vec<u8> {
    fixtures::png([8, 8], png::ColorType::Rgb, png::BitDepth::Eight, &[value, 255 - value, value].repeat(64))
}

fn image_labels(i: usize) -> Vec<&'static str> {
    let (bright, all) = (i * 40 % 250 > 120, i.is_multiple_of(5));
    [("bright", bright), ("any", all)].into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// A table of labels, and a tar file whose `.json` members hold lists, are the same samples.
#[test]
fn images_have_several_labels() {
    let data = "kind = 'images'\ntrain = ['SET']\nvalid = ['SET']\nimage_size = 8\n";
    let run = |folder: &TempDir| {
        trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
        let events = events(&folder.path().join("run"));
        let metrics = last(&events, "eval")["metrics"].clone();
        assert!(metrics["valid.f1_macro"].as_f64().is_some(), "{metrics}");
        losses(&events)
    };
    let table = job_folder(job(&(data.replace("SET", "labels.csv") + "label_separator = '|'"), ""));
    let mut rows = "path,label\n".to_owned();
    let mut members = Vec::new();
    for i in 0..40 {
        let png = tiny_png((i * 40 % 250) as u8);
        fs::write(table.path().join(format!("{i:02}.png")), &png).unwrap();
        rows += &format!("{i:02}.png,{}\n", image_labels(i).join("|"));
        members.push((format!("{i:02}.png"), png));
        members.push((
            format!("{i:02}.json"),
            serde_json::json!({ "label": image_labels(i) }).to_string().into(),
        ));
    }
    fs::write(table.path().join("labels.csv"), rows).unwrap();
    let archive = job_folder(job(&data.replace("SET", "images.tar"), ""));
    fs::write(archive.path().join("images.tar"), tar(&members)).unwrap();
    assert_eq!(run(&table), run(&archive));
    let found =
        trainer(table.path(), &["eval", "run", "--data", "labels.csv", "--json", "-q"]).expect(0).json();
    assert_eq!(found["metrics"]["labels"]["any"]["samples"], 8);
}

/// A table whose labels look like lists is refused, unless the job says whether they are.
#[test]
fn combined_labels_of_images_are_not_taken_for_classes() {
    let data = "kind = 'images'\ntrain = ['labels.csv']\nimage_size = 8\nvalid_fraction = 0.25";
    let folder = job_folder(job(data, ""));
    let mut rows = "path,label\n".to_owned();
    for i in 0..12 {
        fs::write(folder.path().join(format!("{i}.png")), tiny_png(20 * i as u8)).unwrap();
        rows += &format!("{i}.png,{}\n", ["red|round", "red", "round"][i % 3]);
    }
    fs::write(folder.path().join("labels.csv"), rows).unwrap();
    let check = |set: &str| trainer(folder.path(), &["check", "job.toml", "--set", set]);
    let text = check("seed=1").expect(4).stderr;
    assert!(text.contains("column `label`: its values look like lists of labels"), "{text}");
    assert!(text.contains("`red|round`") && text.contains("set `label_separator`"), "{text}");
    assert!(check("data.label_separator=''").expect(0).stdout.contains("3 classes"));
    assert!(check("data.label_separator='|'").expect(0).stdout.contains("any number of 2 labels"));
}

/// Two targets in units of their own, predicted, evaluated and exported together.
#[test]
fn several_numbers_are_predicted_together() {
    let target = |i: usize| {
        let [x, y, z] = numbers(i);
        format!("{},{}", 300.0 + 20.0 * x - 10.0 * y, 0.01 * z)
    };
    let data = "kind = 'csv'\ntrain = ['train.csv']\nvalid = ['test.csv']\ntarget = ['price', 'size']";
    let folder =
        job_folder(job(data, "[eval]\nmetrics = ['rmse', 'mae', 'r2']\n[checkpoint]\nbest = 'valid.r2'"));
    for (name, rows) in [("train.csv", 0..300), ("test.csv", 300..400)] {
        fs::write(folder.path().join(name), csv(rows, target).replacen("target", "price,size", 1)).unwrap();
    }
    fit(folder.path(), &[]).expect(0);
    let metrics = eval(folder.path(), "test.csv")["metrics"].clone();
    let of_run = last(&events(&folder.path().join("run")), "eval")["metrics"].clone();
    let number = |of: &Value, name: &str| of[name].as_f64().unwrap_or_else(|| panic!("{name}: {of}"));
    for metric in ["rmse", "mae", "r2"] {
        for name in [metric.to_owned(), format!("{metric}.price"), format!("{metric}.size")] {
            let (ours, theirs) = (number(&metrics, &name), number(&of_run, &format!("valid.{name}")));
            assert!((ours - theirs).abs() < 1e-4 * ours.abs().max(1.0), "{name}: {ours} {theirs}");
        }
        let mean = (number(&metrics, &format!("{metric}.price"))
            + number(&metrics, &format!("{metric}.size")))
            / 2.0;
        assert!((number(&metrics, metric) - mean).abs() < 1e-9);
    }
    assert!(number(&metrics, "r2.price") > 0.9 && number(&metrics, "r2.size") > 0.9, "{metrics}");
    let rows = predictions(folder.path(), "test.csv");
    let error = |name: &str, i: usize| {
        let truth: Vec<f64> = target(300 + i).split(',').map(|text| text.parse().unwrap()).collect();
        number(&rows[i], &format!("prediction_{name}")) - truth[usize::from(name == "size")]
    };
    let rmse = |name: &str| ((0..100).map(|i| error(name, i).powi(2)).sum::<f64>() / 100.0).sqrt();
    for name in ["price", "size"] {
        let (found, wanted) = (rmse(name), number(&metrics, &format!("rmse.{name}")));
        assert!((found - wanted).abs() < 1e-3 * wanted, "{name}: {found} {wanted}");
    }
    trainer(folder.path(), &["export", "run", "--format", "onnx", "-o", "onnx", "-q"]).expect(0);
    assert!(folder.path().join("onnx").exists());
}

fn weighted(rows: std::ops::Range<usize>, weight: impl Fn(usize) -> String) -> String {
    csv(rows, |i| format!("{},{}", if numbers(i)[0] > 0.0 { "yes" } else { "no" }, weight(i))).replacen(
        "target",
        "target,weight",
        1,
    )
}

const WEIGHTED: &str = "kind = 'csv'\ntrain = ['train.csv']\nvalid = ['train.csv']\ntarget = 'target'\nweight = 'weight'\nshuffle = false";

/// The loss of an update is divided by the weights of all of its samples, however it is split.
#[test]
fn sample_weights_do_not_depend_on_the_micro_batch() {
    let folder = job_folder(job(WEIGHTED, ""));
    let run = |name: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        trainer(folder.path(), &[&["fit", "job.toml", "--run-dir", name, "-q"], &sets[..]].concat())
            .expect(0);
        losses(&events(&folder.path().join(name)))
    };
    let close = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() < 1e-4 * b.abs().max(0.1), "{a} {b}"));
    };
    let uneven = |i: usize| if i.is_multiple_of(7) { "5".to_owned() } else { format!("0.{}", i % 10) };
    fs::write(folder.path().join("train.csv"), weighted(0..128, uneven)).unwrap();
    let whole = run("whole", &["train.epochs=3"]);
    close(
        &run("split", &["train.batch_size=3", "train.accumulation_steps=5", "train.epochs=3"])[..3],
        &run("fifteen", &["train.batch_size=15", "train.epochs=3"])[..3],
    );
    close(&run("parts", &["train.batch_size=4", "train.accumulation_steps=4", "train.epochs=3"]), &whole);
    // Ten times the weights are the same weights.
    let tenfold = |i: usize| if i.is_multiple_of(7) { "50".to_owned() } else { format!("{}", i % 10) };
    fs::write(folder.path().join("train.csv"), weighted(0..128, tenfold)).unwrap();
    close(&run("tenfold", &["train.epochs=3"]), &whole);
    // Without weights it is another experiment.
    fs::write(folder.path().join("train.csv"), weighted(0..128, |_| "1".into())).unwrap();
    let even = run("even", &["train.epochs=3"]);
    assert!((even[0] - whole[0]).abs() > 1e-4, "{even:?} {whole:?}");
    // Evaluation and prediction need no weights, and a file without them will do.
    fs::write(folder.path().join("new.csv"), csv(0..20, |_| "yes".into())).unwrap();
    let found =
        trainer(folder.path(), &["eval", "even", "--data", "new.csv", "--json", "-q"]).expect(0).json();
    assert_eq!(found["samples"], 20);
    trainer(folder.path(), &["predict", "even", "new.csv", "-q"]).expect(0);
}

#[test]
fn a_bad_weight_is_a_bad_record() {
    let folder = job_folder(job(WEIGHTED, ""));
    for bad in ["-1", "inf", "", "heavy"] {
        let weight = |i: usize| if i == 50 { bad.to_owned() } else { "1".into() };
        fs::write(folder.path().join("train.csv"), weighted(0..100, weight)).unwrap();
        let text = fit(folder.path(), &["--set", "train.epochs=1"]).expect(4).stderr;
        assert!(text.contains("weight") && text.contains("line 52"), "{bad}: {text}");
        fs::remove_dir_all(folder.path().join("run")).ok();
        let skip = ["--set", "train.epochs=1", "--set", "data.on_bad_record='skip'"];
        fit(folder.path(), &skip).expect(0);
        fs::remove_dir_all(folder.path().join("run")).unwrap();
    }
}

#[test]
fn a_metric_of_another_task_is_refused_with_those_of_this_one() {
    let folder = job_folder(job("kind = 'csv'\ntrain = ['train.csv']\ntarget = 'target'", ""));
    fs::write(folder.path().join("train.csv"), csv(0..100, |i| (i as f64 * 0.37).to_string())).unwrap();
    for set in ["eval.metrics=['accuracy']", "checkpoint.best='valid.f1'", "stop.metric='valid.perplexity'"] {
        let text = trainer(folder.path(), &["check", "job.toml", "--set", set]).expect(2).stderr;
        assert!(text.contains("whose metrics are \"rmse\", \"mae\", \"r2\""), "{set}: {text}");
    }
    trainer(folder.path(), &["check", "job.toml", "--set", "checkpoint.best='valid.mae'"]).expect(0);
}

/// Every metric of classes that `trainer eval` computes is the same while training, and ranks checkpoints.
#[test]
fn training_computes_the_metrics_of_evaluation() {
    let metrics =
        ["accuracy", "top5", "precision", "recall", "f1", "roc_auc", "log_loss", "calibration_error"];
    let more = format!("[eval]\nmetrics = {metrics:?}\n[checkpoint]\nbest = 'valid.roc_auc'\nkeep = 20");
    let folder = job_folder(job(
        "kind = 'csv'\ntrain = ['train.csv']\nvalid = ['test.csv']\ntarget = 'target'",
        &more,
    ));
    let class = |i: usize| format!("class-{}", (numbers(i)[0] + 5.0) as usize / 2);
    fs::write(folder.path().join("train.csv"), csv(0..300, class)).unwrap();
    fs::write(folder.path().join("test.csv"), csv(300..400, class)).unwrap();
    fit(folder.path(), &[]).expect(0);
    let events = events(&folder.path().join("run"));
    let (found, of_run) = (eval(folder.path(), "test.csv"), last(&events, "eval")["metrics"].clone());
    for name in metrics {
        let (ours, theirs) =
            (found["metrics"][name].as_f64().unwrap(), of_run[format!("valid.{name}")].as_f64().unwrap());
        assert!((ours - theirs).abs() < 1e-5, "{name}: {ours} {theirs}");
    }
    let values: Vec<f64> = named(&events, "eval")
        .iter()
        .map(|event| event["metrics"]["valid.roc_auc"].as_f64().unwrap())
        .collect();
    let most = values.iter().copied().fold(0.0, f64::max);
    assert_eq!(last(&events, "best")["value"].as_f64().unwrap(), most);
}

/// What evaluations report of the training samples is the mean over the updates since the last one, across a resume
/// too.
#[test]
fn training_loss_and_accuracy_stand_beside_those_of_the_validation_set() {
    let folder = job_folder(job(
        "kind = 'csv'\ntrain = ['train.csv']\ntarget = 'target'",
        "[eval]\nevery_steps = 5\n[checkpoint]\nevery_steps = 3",
    ));
    fs::write(
        folder.path().join("train.csv"),
        csv(0..200, |i| if numbers(i)[0] > 0.0 { "a" } else { "b" }.into()),
    )
    .unwrap();
    let whole = |name: &str, more: &[&str]| {
        trainer(folder.path(), &[&["fit", "job.toml", "--run-dir", name, "-q"], more].concat())
    };
    whole("whole", &[]).expect(0);
    let all = events(&folder.path().join("whole"));
    let evals = named(&all, "eval");
    let steps = losses(&all);
    for (i, event) in evals.iter().enumerate().take(2) {
        let mean = steps[5 * i..5 * i + 5].iter().sum::<f64>() / 5.0;
        let found = event["metrics"]["train.loss"].as_f64().unwrap();
        assert!((found - mean).abs() < 1e-6 * mean, "{found} {mean}: every update has as many samples");
        assert!(event["metrics"]["train.accuracy"].as_f64().unwrap() > 0.0);
    }
    // Killed between two evaluations, and resumed.
    let args = ["fit", "job.toml", "--run-dir", "parts", "-q"];
    finish(command(folder.path(), &args).env("TRAINER_FAULT_CRASH", "kill:7")).expect(0);
    let parts = events(&folder.path().join("parts"));
    let resumed = named(&parts, "eval");
    let of = |event: &Value| event["metrics"].clone();
    let last_of = |evals: &[&Value], step: u64| {
        evals.iter().rev().find(|event| event["step"] == step).map(|event| of(event)).unwrap()
    };
    assert_eq!(last_of(&resumed, 15), last_of(&evals, 15));
    assert_eq!(last_of(&resumed, 20), last_of(&evals, 20));
}
