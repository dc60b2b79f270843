"""Trains and exports jobs for the benchmarks of smaller models, most of them on MNIST or a set in its format.

Nothing but Python's standard library is needed. The validation set is MNIST's test set.
"""

import argparse
import gzip
import json
import pathlib
import struct
import subprocess
import tomllib

JOB = """
seed = {seed}
[model]
{model}
[data]
kind = "idx"
train_images = "{train}/train-images-idx3-ubyte{suffix}"
train_labels = "{train}/train-labels-idx1-ubyte{suffix}"
valid_images = "{mnist}/t10k-images-idx3-ubyte.gz"
valid_labels = "{mnist}/t10k-labels-idx1-ubyte.gz"
mean = 0.1307
std = 0.3081
[train]
batch_size = {batch}
epochs = {epochs}
{init}
[schedule]
kind = "cosine"
[eval]
every_epochs = {epochs}
[log]
tensorboard = false
report = false
{rest}
"""


def cnn(channels, hidden):
    """The `[model]` of a small network."""
    return f'kind = "cnn"\nstages = [{{ channels = {channels} }}, {{ channels = {2 * channels} }}]\nhidden = [{hidden}]'


def parser(text, batch_size=128, needs_mnist=True):
    """The arguments that every benchmark on MNIST has."""
    described = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--trainer", type=pathlib.Path, required=True)
    described.add_argument("--mnist", type=pathlib.Path, required=needs_mnist, help="folder of the four files, gzipped")
    described.add_argument("--batch-size", type=int, default=batch_size)
    described.add_argument("--samples", type=int, default=60000, help="first samples of the training set")
    return described


class Runner:
    """Runs of jobs in a folder. Those that are finished there are not trained again."""

    def __init__(self, args, folder):
        self.program, self.folder = args.trainer.resolve(), pathlib.Path(folder).resolve()

    def fit(self, name, job):
        """Trains a job; returns its parameters and its accuracy on the validation set, if it has classes."""
        tomllib.loads(job)
        path, run = self.folder / f"{name}.toml", self.folder / name
        is_same = path.exists() and path.read_text() == job
        if run.exists() and not is_same:
            raise SystemExit(f"{run} is a run of another job: remove it, or name another folder")
        path.write_text(job)
        summary = run / "summary.json"
        if not summary.exists() or json.loads(summary.read_text())["state"] != "finished":
            self.run("fit", path.name, "--run-dir", name, "-q", *(["--resume"] if run.exists() else []))
        summary = json.loads(summary.read_text())
        return summary["parameters"], summary["metrics"].get("valid.accuracy")

    def export(self, name, *options, checkpoint="last"):
        """Exports a checkpoint; returns the file of the model and what its metrics were and are."""
        folder = "-".join([name, *(option.strip("-") for option in options)])
        words = ["export", name, "--checkpoint", checkpoint, "-o", folder, "--force", "--json", "-q", *options]
        compared = {row["metric"]: (row["before"], row["after"]) for row in json.loads(self.run(*words))["comparison"]}
        (model,) = (path for path in (self.folder / folder).glob("model.*") if path.suffix != ".json")
        return model, compared

    def run(self, *words):
        done = subprocess.run([self.program, *words], cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout


class Bench(Runner):
    """Jobs on MNIST."""

    def __init__(self, args, folder):
        super().__init__(args, folder)
        self.mnist, self.batch = args.mnist.resolve(), args.batch_size
        self.train, self.suffix, self.samples = self.mnist, ".gz", 60000
        self.keep(args.samples)

    def keep(self, samples):
        """Trains on the first samples only from here on."""
        if samples == self.samples:
            return
        for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
            self.first(name, samples)
        self.train, self.suffix, self.samples = self.folder, "", samples

    def first(self, name, samples):
        """Writes a file of the first samples of one of MNIST's files, and returns it."""
        head, bytes_each = (16, 784) if "images" in name else (8, 1)
        data = gzip.open(self.mnist / f"{name}.gz").read(head + samples * bytes_each)
        (self.folder / name).write_bytes(data[:4] + struct.pack(">I", samples) + data[8:])
        return self.folder / name

    def steps(self, epochs):
        return epochs * -(-self.samples // self.batch)

    def job(self, seed, model, epochs, init="", rest=""):
        """The text of a job: a `[model]`, and what follows all other tables."""
        init = f'init = "{init}"' if init else ""
        sets = {"mnist": self.mnist, "train": self.train, "suffix": self.suffix}
        return JOB.format(seed=seed, model=model, batch=self.batch, epochs=epochs, init=init, rest=rest, **sets)
