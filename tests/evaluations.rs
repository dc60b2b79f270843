//! What the predictions look like: `evaluation.json`, the page and TensorBoard have the numbers of `trainer eval`,
//! survive a resume and stay small; and the prompts of a language model are continued.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{job_folder, names, read_json, trainer};

/// A fit of `job` in the folder `run`, with `train.csv` beside it.
fn trained(job: &str, table: &str) -> TempDir {
    let folder = job_folder(job);
    fs::write(folder.path().join("train.csv"), table).unwrap();
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    folder
}

fn csv_job(target: &str, more: &str) -> String {
    format!(
        "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\ntarget = {target}\n\
         valid_fraction = 0.25\n{more}\n[train]\nbatch_size = 16\nepochs = 4\n[optimizer]\nkind = 'adamw'\nlr = 0.02\n"
    )
}

/// Rows `x,y,class` whose class follows from both numbers.
fn class_table(classes: usize, rows: usize) -> String {
    let row = |i: usize| {
        let (x, y) = (i * 37 % 101, i * 53 % 97);
        format!("{}.5,{y},kind {}\n", x, (x * classes / 101 + i % 3) % classes)
    };
    std::iter::once("x,y,class\n".to_owned()).chain((0..rows).map(row)).collect()
}

fn evaluate(folder: &Path) -> Value {
    trainer(folder, &["eval", "run", "--json", "-q"]).expect(0).json()
}

fn evaluation(folder: &Path) -> Value {
    read_json(&folder.join("run/evaluation.json"))
}

fn page(folder: &Path) -> String {
    fs::read_to_string(folder.join("run/report.html")).unwrap()
}

/// The numbers of the figure with this title.
fn figure(page: &str, title: &str) -> Value {
    let figure = page.split(&format!("<figcaption>{title}</figcaption>")).nth(1).unwrap();
    let data = figure.split("application/json\">").nth(1).unwrap().split("</script>").next().unwrap();
    serde_json::from_str(data).unwrap()
}

fn assert_close(a: &Value, b: &Value) {
    let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
    assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{a} {b}");
}

#[test]
fn the_page_of_a_classifier_has_the_numbers_of_eval() {
    let folder = trained(&csv_job("'class'", "task = 'classes'"), &class_table(4, 400));
    let (folder, page) = (folder.path(), page(folder.path()));
    let (eval, file) = (evaluate(folder), evaluation(folder));
    let best = &file["best"];
    assert_eq!(best["step"], read_json(&folder.join("run/summary.json"))["best"]["step"]);
    assert_eq!((&best["task"], &best["samples"]), (&json!("classification"), &json!(100)));
    assert_eq!(best["confusion"], eval["confusion"]["matrix"]);
    assert_close(&best["accuracy"], &eval["metrics"]["accuracy"]);
    assert_close(&best["calibration_error"], &eval["metrics"]["calibration_error"]);
    for (ours, theirs) in
        best["calibration"].as_array().unwrap().iter().zip(eval["calibration"].as_array().unwrap())
    {
        assert_eq!(ours["samples"], theirs["samples"]);
        assert_close(&ours["confidence"], &theirs["confidence"]);
    }
    let cells =
        |row: &Value| -> Vec<u64> { row.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect() };
    for (class, row) in best["classes"].as_array().unwrap().iter().zip(best["confusion"].as_array().unwrap())
    {
        let (name, theirs) = (class["name"].as_str().unwrap(), &eval["metrics"]["classes"]);
        for metric in ["precision", "recall", "f1", "samples"] {
            assert_close(&class[metric], &theirs[name][metric]);
        }
        let score = |metric: &str| format!("<td>{:.4}</td>", class[metric].as_f64().unwrap());
        let scores = ["precision", "recall", "f1"].map(score).concat();
        assert!(
            page.contains(&format!("<tr><td>{name}</td><td>{}</td>{scores}", class["samples"])),
            "{name}"
        );
        // The counts of the matrix, whatever their colour.
        let drawn =
            page.split(&format!("<tr><th>{name}</th>")).nth(1).unwrap().split("</tr>").next().unwrap();
        let counts = drawn.split("</td>").filter_map(|cell| cell.rsplit('>').next().unwrap().parse().ok());
        assert_eq!(counts.collect::<Vec<u64>>(), cells(row), "{name}");
    }
    assert_eq!(figure(&page, "Reliability"), best["calibration"]);
    // Several runs have a section each.
    trainer(folder, &["report", "run", "run", "-q"]).expect(0);
    let both = fs::read_to_string(folder.join("report.html")).unwrap();
    let step = &best["step"];
    assert!(
        ["A", "B"]
            .iter()
            .all(|run| both.contains(&format!("Evaluation of {run}: the best, after step {step}<")))
    );
}

#[test]
fn the_page_of_a_regression_has_the_numbers_of_eval() {
    let row = |i: usize| {
        let (x, y) = ((i * 37 % 101) as f64 / 10.0, (i * 53 % 97) as f64 / 9.0);
        format!("{x},{y},{}\n", 1000.0 + 30.0 * x - 7.0 * y)
    };
    let table: String = std::iter::once("x,y,price\n".to_owned()).chain((0..2400).map(row)).collect();
    let folder = trained(&csv_job("'price'", "task = 'values'"), &table);
    let (folder, page) = (folder.path(), page(folder.path()));
    let (eval, file) = (evaluate(folder), evaluation(folder));
    let target = &file["best"]["targets"][0];
    assert_eq!(target["name"], "price");
    for metric in ["rmse", "mae", "r2"] {
        assert_close(&target[metric], &eval["metrics"][metric]);
    }
    let residuals = &target["residuals"];
    let counts: u64 = residuals["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(counts, 600);
    let pairs = residuals["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 500);
    let of_units = |value: &Value| (600.0..1500.0).contains(&value.as_f64().unwrap());
    assert!(pairs.iter().all(|pair| of_units(&pair[0]) && of_units(&pair[1])), "in the units of the target");
    let drawn = figure(&page, "Residuals of price");
    for key in ["start", "width", "counts"] {
        assert_eq!(drawn[key], residuals[key]);
    }
    assert_eq!(figure(&page, "Predictions of price"), residuals["pairs"]);
    assert_eq!(page.matches("<circle ").count(), 500);
}

#[test]
fn the_page_of_labels_has_the_numbers_of_eval() {
    let row = |i: usize| {
        let (x, y) = (i * 37 % 101, i * 53 % 97);
        let labels = [("large", x > 50), ("wide", y > 40), ("even", i.is_multiple_of(2))];
        let labels: Vec<&str> = labels.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
        format!("{x},{y},{}\n", labels.join("|"))
    };
    let table: String = std::iter::once("x,y,tags\n".to_owned()).chain((0..400).map(row)).collect();
    let folder = trained(&csv_job("'tags'", "label_separator = '|'"), &table);
    let (folder, page) = (folder.path(), page(folder.path()));
    let (eval, file) = (evaluate(folder), evaluation(folder));
    let labels = file["best"]["labels"].as_array().unwrap();
    assert_eq!(labels.len(), 3);
    for label in labels {
        let name = label["name"].as_str().unwrap();
        assert_close(&label["f1"], &eval["metrics"]["labels"][name]["f1"]);
        let f1 = format!("<td>{:.4}</td>\n", label["f1"].as_f64().unwrap());
        assert!(page.contains(&format!("<td>{name}</td>")) && page.contains(f1.trim_end()), "{name}");
    }
}

/// A run that was stopped after its best evaluation and resumed has the same file as one that never stopped.
#[test]
fn a_resumed_run_keeps_the_detail_of_its_best_evaluation() {
    // The learning rate makes it worse after the first epoch.
    let job = csv_job("'class'", "task = 'classes'").replace("lr = 0.02", "lr = 0.6");
    let folder = trained(&job, &class_table(4, 400));
    let (whole, folder) = (evaluation(folder.path()), folder.path());
    let best = whole["best"]["step"].as_u64().unwrap();
    assert!(
        best < whole["last"]["step"].as_u64().unwrap(),
        "the last evaluation must not be the best: {best}"
    );
    let fit = ["fit", "job.toml", "--run-dir", "parts", "-q"];
    // After the next evaluation, an epoch of 19 updates later.
    let stop = (best + 19).to_string();
    trainer(folder, &[&fit[..], &["--max-steps", &stop]].concat()).expect(0);
    let first = read_json(&folder.join("parts/evaluation.json"));
    assert_eq!(first["best"], whole["best"]);
    trainer(folder, &[&fit[..], &["--resume"]].concat()).expect(0);
    assert_eq!(read_json(&folder.join("parts/evaluation.json")), whole);
    assert!(!names(&folder.join("parts")).iter().any(|name| name.ends_with(".tmp")));
}

#[test]
fn a_hundred_classes_are_a_small_file_and_a_small_page() {
    let folder = trained(&csv_job("'class'", "task = 'classes'"), &class_table(100, 1200));
    let (folder, page) = (folder.path(), page(folder.path()));
    let (eval, best) = (evaluate(folder), evaluation(folder)["best"].clone());
    assert_eq!((&best["num_classes"], &best["confusion"]), (&json!(100), &Value::Null));
    assert_eq!(
        (best["classes"].as_array().unwrap().len(), best["confused"].as_array().unwrap().len()),
        (64, 50)
    );
    let (names, matrix) = (&eval["confusion"]["classes"], &eval["confusion"]["matrix"]);
    let index = |name: &Value| names.as_array().unwrap().iter().position(|known| known == name).unwrap();
    for pair in best["confused"].as_array().unwrap() {
        assert_eq!(pair["samples"], matrix[index(&pair["truth"])][index(&pair["predicted"])]);
    }
    let size = fs::metadata(folder.join("run/evaluation.json")).unwrap().len();
    assert!(size < 60_000 && page.len() < 200_000, "{size} {}", page.len());
    assert!(
        page.contains("64 classes with the lowest F1, of 100") && page.contains("50 most confused pairs")
    );
}

#[test]
fn tensorboard_has_the_confusion_matrix_and_histograms_on_request() {
    let folder = trained(&(csv_job("'class'", "") + "[log]\nhistograms = true\n"), &class_table(4, 200));
    let board = folder.path().join("run/tensorboard");
    let bytes = fs::read(board.join(&names(&board)[0])).unwrap();
    let count = |text: &[u8]| bytes.windows(text.len()).filter(|window| *window == text).count();
    assert!(count(b"valid/confusion") >= 1);
    assert_eq!(count(b"\x89PNG\r\n\x1a\n"), count(b"valid/confusion"));
    // Four evaluations of a network with two layers.
    assert_eq!((count(b"weights/"), count(b".weight\x2a"), count(b".bias\x2a")), (16, 8, 8));
}

const GPT: &str = "name = 'abc'\nseed = 3\n[model]\nkind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 32\ncontext = 64\n\
    [data]\nkind = 'text'\ntrain = ['abc.txt']\nvalid = ['abc.txt']\n[train]\nsteps = 150\nbatch_size = 8\n\
    [optimizer]\nkind = 'adamw'\nlr = 0.005\n[log]\ntensorboard = false\n";

#[test]
fn the_prompts_of_a_language_model_are_continued_in_the_page() {
    let folder = job_folder(format!("{GPT}[eval]\nprompts = ['abc', 'xyz <']\nprompt_tokens = 12\n"));
    let folder = folder.path();
    fs::write(folder.join("abc.txt"), "abcdefghijklmnopqrstuvwxyz <".repeat(60)).unwrap();
    trainer(folder, &["fit", "job.toml", "--run-dir", "run", "-q", "--device", "cpu"]).expect(0);
    let file = read_json(&folder.join("run/generated.json"));
    assert_eq!(file["step"], read_json(&folder.join("run/summary.json"))["best"]["step"]);
    for (text, prompt) in file["texts"].as_array().unwrap().iter().zip(["abc", "xyz <"]) {
        let greedy = ["--prompt", prompt, "--temperature", "0", "--max-tokens", "12", "--json"];
        let one = trainer(folder, &[&["generate", "run", "--device", "cpu"], &greedy[..]].concat())
            .expect(0)
            .json();
        assert_eq!((&text["prompt"], &text["text"]), (&json!(prompt), &one["text"]));
    }
    assert_eq!(file["texts"][0]["text"], "defghijklmno");
    assert!(page(folder).contains("<b>xyz &lt;</b>abcdefghijkl"));
    // The texts are kept: a moved run without its checkpoints still shows them.
    fs::rename(folder.join("run"), folder.join("moved")).unwrap();
    fs::remove_dir_all(folder.join("moved/checkpoints")).unwrap();
    trainer(folder, &["report", "moved", "-q", "--device", "cpu"]).expect(0);
    let moved = fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(moved.contains("<b>abc</b>defghijklmno"));
}

/// `trainer report` continues prompts that the run has no texts for, and says what prevents it.
#[test]
fn a_report_continues_prompts_that_fit_and_says_which_do_not() {
    let folder = job_folder(format!("{GPT}report = false\n[eval]\nprompts = 'abc'\n"));
    let folder = folder.path();
    fs::write(folder.join("abc.txt"), "abcdefghijklmnopqrstuvwxyz ".repeat(60)).unwrap();
    trainer(folder, &["fit", "job.toml", "--run-dir", "run", "-q", "--device", "cpu"]).expect(0);
    assert!(!folder.join("run/generated.json").exists());
    let report = || {
        trainer(folder, &["report", "run", "-q", "--device", "cpu"]).expect(0);
        fs::read_to_string(folder.join("report.html")).unwrap()
    };
    assert!(report().contains("<b>abc</b>defghijklmnopqrstuvwxyz abcdefg"));
    let job = folder.join("run/job.toml");
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("prompts = [\"abc\"]", "prompts = [\"abc\", \"ABC\"]")).unwrap();
    let page = report();
    assert!(page.contains("Nothing was generated: prompt 2: it cannot be encoded"), "{page}");
}

#[test]
fn prompts_of_another_task_are_an_error_of_the_job() {
    let check = |job: &str| trainer(job_folder(job).path(), &["check", "job.toml"]).expect(2).stderr;
    let text =
        check("[model]\nkind = 'mlp'\n[data]\nkind = 'shapes'\n[train]\nsteps = 1\n[eval]\nprompts = 'a'\n");
    assert!(text.contains("`eval.prompts` needs a language model, and models of kind `mlp`"), "{text}");
    let text = check(
        "[model]\nkind = 'gpt'\n[data]\nkind = 'text-synthetic'\n[train]\nsteps = 1\n[eval]\nprompts = ['a']\n",
    );
    assert!(text.contains("`eval.prompts` needs text, and data of kind `text-synthetic`"), "{text}");
}
