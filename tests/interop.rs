//! Other tools on what we write, where a Python with them is installed: ONNX Runtime and LiteRT on exported models,
//! and scikit-learn's metrics. `TRAINER_PYTHON` names another Python than `python3`. The larger tools (transformers,
//! torchvision, llama.cpp) are compared by `scripts/export-interop.py`.

use std::fs;
use std::path::Path;
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

/// 200 rows of two columns and a class.
fn write_rows(at: &Path) {
    let row = |i: usize| {
        let (x, y) = ((i * 37 % 101) as f64 / 50.0, (i * 53 % 97) as f64 / 48.0);
        format!("{x},{y},{}\n", if x > y { "above" } else { "below" })
    };
    let rows: String = (0..200).map(row).collect();
    fs::write(at.join("train.csv"), format!("x,y,class\n{rows}")).unwrap();
}

/// What a Python program prints for these arguments: the probabilities of 200 rows.
fn probabilities(python: &str, program: &str, args: &[&str], at: &Path) -> Vec<Vec<f64>> {
    let output = Command::new(python).args(["-c", program]).args(args).current_dir(at).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Vec<f64>> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rows.len(), 200);
    rows
}

/// Compares with a table of predictions, whose columns 3 and 4 are the probabilities.
fn compare_probabilities(ours: &str, theirs: &[Vec<f64>], tolerance: f64) {
    assert_eq!(ours.lines().count(), theirs.len() + 1);
    for (line, theirs) in ours.lines().skip(1).zip(theirs) {
        let cells: Vec<&str> = line.split(',').collect();
        for (ours, theirs) in cells[2..4].iter().zip(theirs) {
            assert!((ours.parse::<f64>().unwrap() - theirs).abs() < tolerance, "{line} {theirs}");
        }
    }
}

/// Reads the features from a csv file and prints the probabilities of each row, by the file of either format.
const RUNTIMES: &str = "
import csv, json, sys
import numpy as np
rows = np.array([[float(row[name]) for name in 'xy'] for row in csv.DictReader(open(sys.argv[2]))], np.float32)
if sys.argv[1].endswith('.onnx'):
    import onnxruntime
    session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])
    logits = session.run(None, {session.get_inputs()[0].name: rows})[0]
else:
    from ai_edge_litert.interpreter import Interpreter
    interpreter = Interpreter(sys.argv[1])
    index = interpreter.get_input_details()[0]['index']
    interpreter.resize_tensor_input(index, rows.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(index, rows)
    interpreter.invoke()
    logits = interpreter.get_tensor(interpreter.get_output_details()[0]['index'])
p = np.exp(logits - logits.max(1, keepdims=True))
print(json.dumps((p / p.sum(1, keepdims=True)).tolist()))
";

/// In floats to rounding, in integers to the steps of the logits.
#[test]
fn runtimes_predict_what_we_predict_from_an_export() {
    let folder = job_folder(
        "[model]\nkind = 'mlp'\nhidden = [16, 8]\nactivation = 'gelu'\n[data]\nkind = 'csv'\ntrain = ['train.csv']\n\
         target = 'class'\nstandardise = false\n[train]\nbatch_size = 16\nepochs = 6\n[log]\ntensorboard = false\n",
    );
    let at = folder.path();
    write_rows(at);
    trainer(at, &["fit", "job.toml", "--run-dir", "run", "-q"]).expect(0);
    for (format, module) in [("onnx", "numpy, onnxruntime"), ("tflite", "numpy, ai_edge_litert")] {
        let Some(python) = python(module) else { continue };
        for (model, types, tolerance) in
            [("run", &[][..], 1e-5), ("export", &["--quantize", "int8"][..], 0.05)]
        {
            let export = ["export", "run", "--format", format, "-o", "export", "--force", "-q"];
            trainer(at, &[&export[..], types].concat()).expect(0);
            let ours =
                trainer(at, &["predict", model, "train.csv", "--probabilities", "-q"]).expect(0).stdout;
            let file = format!("export/model.{format}");
            let theirs = probabilities(&python, RUNTIMES, &[&file, "train.csv"], at);
            compare_probabilities(&ours, &theirs, tolerance);
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
