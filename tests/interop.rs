//! Other tools on what we write, where a Python with them is installed: ONNX Runtime on an exported model, and
//! scikit-learn's metrics. `TRAINER_PYTHON` names another Python than `python3`. The larger tools (transformers,
//! torchvision, llama.cpp) are compared by `scripts/export-interop.py`.

use std::fs;
use std::process::Command;

use crate::harness::{job_folder, program, root, skip, trainer};

/// A Python that has these modules; reports that there is none.
fn python(modules: &str) -> Option<String> {
    let python = std::env::var("TRAINER_PYTHON").unwrap_or_else(|_| "python3".into());
    let imported = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    let has_them = imported.is_ok_and(|output| output.status.success());
    if !has_them {
        skip(format!("needs `{python}` with {modules}"));
    }
    has_them.then_some(python)
}

/// Reads the features from a csv file and prints the probabilities of each row.
const ONNX: &str = "
import csv, json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])
rows = np.array([[float(row[name]) for name in 'xy'] for row in csv.DictReader(open(sys.argv[2]))], np.float32)
logits = session.run(None, {session.get_inputs()[0].name: rows})[0]
p = np.exp(logits - logits.max(1, keepdims=True))
print(json.dumps((p / p.sum(1, keepdims=True)).tolist()))
";

#[test]
fn onnx_runtime_predicts_what_we_predict() {
    let Some(python) = python("numpy, onnxruntime") else { return };
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [16, 8]\n[data]\nkind = 'csv'\ntrain = ['train.csv']\ntarget = 'class'\n\
         standardise = false\n[train]\nbatch_size = 16\nepochs = 3\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    let row = |i: usize| {
        let (x, y) = ((i * 37 % 101) as f64 / 50.0, (i * 53 % 97) as f64 / 48.0);
        format!("{x},{y},{}\n", if x > y { "above" } else { "below" })
    };
    let rows: String = (0..200).map(row).collect();
    fs::write(at.join("train.csv"), format!("x,y,class\n{rows}")).unwrap();
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    trainer(at, &["export", "run", "--format", "onnx", "-o", "onnx", "-q"]).expect(0);
    let ours = trainer(at, &["predict", "run", "train.csv", "--probabilities", "-q"]).expect(0).stdout;
    let theirs =
        Command::new(python).args(["-c", ONNX, "onnx/model.onnx", "train.csv"]).current_dir(at).output();
    let theirs = theirs.unwrap();
    assert!(theirs.status.success(), "{}", String::from_utf8_lossy(&theirs.stderr));
    let theirs: Vec<Vec<f64>> = serde_json::from_slice(&theirs.stdout).unwrap();
    assert_eq!(theirs.len(), 200);
    for (line, theirs) in ours.lines().skip(1).zip(&theirs) {
        let cells: Vec<&str> = line.split(',').collect();
        for (ours, theirs) in cells[2..4].iter().zip(theirs) {
            assert!((ours.parse::<f64>().unwrap() - theirs).abs() < 1e-5, "{line} {theirs}");
        }
    }
}

#[test]
fn the_metrics_are_those_of_scikit_learn() {
    let Some(python) = python("sklearn") else { return };
    let script = root().join("scripts/metrics-interop.py");
    let output = Command::new(python).arg(script).arg(program()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
