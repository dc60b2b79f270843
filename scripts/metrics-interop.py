#!/usr/bin/env python3
"""Compares the metrics of `trainer eval` with scikit-learn's on the predictions of `trainer predict`.

    python3 scripts/metrics-interop.py [TRAINER]

Trains small models on generated tables: two and seven classes, and a regression. Needs scikit-learn. Exits with 1
if a metric differs by more than TOLERANCE.
"""

import csv
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from sklearn import metrics

# Probabilities are written in f32.
TOLERANCE = 1e-5
JOB = """
[model]
kind = "mlp"
hidden = [16]
[data]
kind = "csv"
train = ["train.csv"]
target = "target"
[train]
batch_size = 32
epochs = 3
[optimizer]
kind = "adamw"
lr = 0.01
[log]
tensorboard = false
"""


def table(path, rows, classes, draw):
    """Rows of four numbers and a category; `classes` is 0 for a regression."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["a", "b", "c", "d", "place", "target"])
        for _ in range(rows):
            values = [draw.gauss(0, 1) for _ in range(4)]
            place = draw.choice(["north", "south", "east"])
            score = values[0] - 0.5 * values[1] + (place == "north") + draw.gauss(0, 0.7)
            if classes:
                target = "class-%d" % max(0, min(classes - 1, math.floor((score + 2) / 4 * classes)))
            else:
                target = 300 + 25 * score
            out.writerow([round(value, 4) for value in values] + [place, target])


def calibration_error(truths, probabilities, names, bins=15):
    sums = [[0, 0, 0.0] for _ in range(bins)]
    for truth, row in zip(truths, probabilities):
        best = max(range(len(row)), key=row.__getitem__)
        bin_ = sums[min(bins, max(1, math.ceil(row[best] * bins))) - 1]
        bin_[0] += 1
        bin_[1] += names[best] == truth
        bin_[2] += row[best]
    return sum(abs(correct - confidence) for _, correct, confidence in sums) / len(truths)


def classification(rows, truths):
    names = [key.removeprefix("probability_") for key in rows[0] if key.startswith("probability_")]
    probabilities = [[float(row["probability_" + name]) for name in names] for row in rows]
    # Rounded to f32, they do not add up to 1 exactly.
    probabilities = [[p / sum(row) for p in row] for row in probabilities]
    predicted = [row["prediction"] for row in rows]
    macro = {"average": "macro", "zero_division": 0}
    present = [i for i, name in enumerate(names) if 0 < truths.count(name) < len(truths)]
    aucs = [
        metrics.roc_auc_score([truth == names[i] for truth in truths], [row[i] for row in probabilities])
        for i in present
    ]
    wanted = {
        "accuracy": metrics.accuracy_score(truths, predicted),
        "precision": metrics.precision_score(truths, predicted, **macro),
        "recall": metrics.recall_score(truths, predicted, **macro),
        "f1": metrics.f1_score(truths, predicted, **macro),
        "log_loss": metrics.log_loss(truths, probabilities, labels=names),
        "roc_auc": sum(aucs) / len(aucs),
        "calibration_error": calibration_error(truths, probabilities, names),
    }
    if len(names) > 5:
        wanted["top5"] = metrics.top_k_accuracy_score(truths, probabilities, k=5, labels=names)
    confusion = metrics.confusion_matrix(truths, predicted, labels=names).tolist()
    return wanted, {"classes": names, "matrix": confusion}


def regression(rows, truths):
    predicted = [float(row["prediction"]) for row in rows]
    truths = [float(truth) for truth in truths]
    wanted = {
        "rmse": math.sqrt(metrics.mean_squared_error(truths, predicted)),
        "mae": metrics.mean_absolute_error(truths, predicted),
        "r2": metrics.r2_score(truths, predicted),
    }
    return wanted, None


def main():
    trainer = str(Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/trainer").resolve())
    wrong = 0
    for name, classes in [("two classes", 2), ("seven classes", 7), ("regression", 0)]:
        with tempfile.TemporaryDirectory() as folder:
            draw = random.Random(classes)
            table(Path(folder, "train.csv"), 1500, classes, draw)
            table(Path(folder, "test.csv"), 700, classes, draw)
            Path(folder, "job.toml").write_text(JOB)

            def run(*args):
                return subprocess.run([trainer, *args, "-q"], cwd=folder, check=True, capture_output=True, text=True).stdout

            run("fit", "job.toml", "--run-dir", "run")
            ours = json.loads(run("eval", "run", "--data", "test.csv", "--json"))
            run("predict", "run", "test.csv", "-o", "out.csv", *(["--probabilities"] if classes else []))
            rows = list(csv.DictReader(open(Path(folder, "out.csv"))))
            truths = [row["target"] for row in csv.DictReader(open(Path(folder, "test.csv")))]
            assert len(rows) == len(truths) == ours["samples"]
            wanted, confusion = (classification if classes else regression)(rows, truths)
        for metric, value in wanted.items():
            found = ours["metrics"][metric]
            differs = abs(found - value) > TOLERANCE * max(1, abs(value))
            wrong += differs
            print(f"{name:<14} {metric:<18} {found:<22} {value:<22} {'DIFFERS' if differs else ''}")
        if confusion and confusion != ours["confusion"]:
            wrong += 1
            print(f"{name}: the confusion matrices differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
