#!/usr/bin/env python3
"""Compares the metrics of `trainer eval` with scikit-learn's on the predictions of `trainer predict`.

    python3 scripts/metrics-interop.py [TRAINER]

Trains small models on generated tables: two and seven classes, any number of five labels, and regressions with one and two
targets. Needs scikit-learn. Exits with 1 if a metric differs by more than TOLERANCE.
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
{target}
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


LABELS = ["bright", "cold", "far", "open", "wet"]


def label_table(path, rows, draw):
    """Rows of four numbers, and labels that depend on them; a row may have none."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["a", "b", "c", "d", "target"])
        for _ in range(rows):
            values = [draw.gauss(0, 1) for _ in range(4)]
            scores = [values[i % 4] - 0.4 * i + draw.gauss(0, 0.7) for i in range(len(LABELS))]
            present = [label for label, score in zip(LABELS, scores) if score > 0]
            out.writerow([round(value, 4) for value in values] + ["|".join(present)])


def pair_table(path, rows, draw):
    """Rows of four numbers, and two numbers of different size that depend on them."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["a", "b", "c", "d", "price", "size"])
        for _ in range(rows):
            values = [draw.gauss(0, 1) for _ in range(4)]
            price = 300 + 25 * (values[0] - values[1] + draw.gauss(0, 0.5))
            out.writerow([round(value, 4) for value in values] + [price, 0.01 * values[2]])


def multi_label(rows, truths):
    probabilities = [[float(row["probability_" + label]) for label in LABELS] for row in rows]
    predicted = [[label in row["prediction"].split("|") for label in LABELS] for row in rows]
    truths = [[label in truth.split("|") for label in LABELS] for truth in truths]
    wanted = {
        "accuracy": metrics.accuracy_score(truths, predicted),
        "f1_micro": metrics.f1_score(truths, predicted, average="micro", zero_division=0),
        "f1_macro": metrics.f1_score(truths, predicted, average="macro", zero_division=0),
        "average_precision": metrics.average_precision_score(truths, probabilities, average="macro"),
    }
    return wanted, None


def pair(rows, tests):
    wanted = {}
    both = {"rmse": [], "mae": [], "r2": []}
    for name in ["price", "size"]:
        one, _ = regression([{"prediction": row["prediction_" + name]} for row in rows], [row[name] for row in tests])
        for metric, value in one.items():
            wanted[f"{metric}.{name}"] = value
            both[metric].append(value)
    wanted |= {metric: sum(values) / 2 for metric, values in both.items()}
    return wanted, None


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
    single = 'target = "target"'
    cases = [
        ("two classes", single, lambda path, rows, draw: table(path, rows, 2, draw), classification),
        ("seven classes", single, lambda path, rows, draw: table(path, rows, 7, draw), classification),
        ("five labels", single + '\nlabel_separator = "|"', label_table, multi_label),
        ("regression", single, lambda path, rows, draw: table(path, rows, 0, draw), regression),
        ("two targets", 'target = ["price", "size"]', pair_table, pair),
    ]
    for name, target, write, compare in cases:
        with tempfile.TemporaryDirectory() as folder:
            draw = random.Random(name)
            write(Path(folder, "train.csv"), 1500, draw)
            write(Path(folder, "test.csv"), 700, draw)
            Path(folder, "job.toml").write_text(JOB.replace("{target}", target))

            def run(*args):
                return subprocess.run([trainer, *args, "-q"], cwd=folder, check=True, capture_output=True, text=True).stdout

            run("fit", "job.toml", "--run-dir", "run")
            ours = json.loads(run("eval", "run", "--data", "test.csv", "--json"))
            probabilities = compare in (classification, multi_label)
            run("predict", "run", "test.csv", "-o", "out.csv", *(["--probabilities"] if probabilities else []))
            rows = list(csv.DictReader(open(Path(folder, "out.csv"))))
            tests = list(csv.DictReader(open(Path(folder, "test.csv"))))
            assert len(rows) == len(tests) == ours["samples"]
            wanted, confusion = compare(rows, tests if compare is pair else [row["target"] for row in tests])
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
