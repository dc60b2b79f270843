"""Jobs on MNIST, or on another set in its format, for the benchmarks of smaller models; trains and exports them.

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
kind = "cnn"
stages = [{{ channels = {channels} }}, {{ channels = {twice} }}]
hidden = [{hidden}]
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


def parser(text, samples=60000):
    """The arguments that every benchmark on MNIST has; this many samples by default."""
    described = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--trainer", type=pathlib.Path, required=True)
    described.add_argument("--mnist", type=pathlib.Path, required=True, help="folder of the four files, gzipped")
    described.add_argument("--batch-size", type=int, default=128)
    described.add_argument("--samples", type=int, default=samples, help="first samples of the training set")
    return described


class Bench:
    """Jobs in a folder of their own."""

    def __init__(self, args, folder):
        self.program, self.mnist, self.batch = args.trainer.resolve(), args.mnist.resolve(), args.batch_size
        self.folder = pathlib.Path(folder)
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

    def fit(self, name, seed, channels, hidden, epochs, init="", rest=""):
        """Trains a network; returns its parameters and its accuracy on the test set."""
        sizes = {"channels": channels, "twice": 2 * channels, "hidden": hidden, "batch": self.batch}
        sets = {"mnist": self.mnist, "train": self.train, "suffix": self.suffix}
        init = f'init = "{init}"' if init else ""
        job = JOB.format(seed=seed, epochs=epochs, init=init, rest=rest, **sizes, **sets)
        tomllib.loads(job)
        (self.folder / f"{name}.toml").write_text(job)
        self.run("fit", f"{name}.toml", "--run-dir", name, "-q")
        summary = json.loads((self.folder / name / "summary.json").read_text())
        return summary["parameters"], summary["metrics"]["valid.accuracy"]

    def export(self, name, *options):
        """Exports the last checkpoint; returns the file of the model and its accuracy on the test set."""
        folder = "-".join([name, *(option.strip("-") for option in options)])
        words = ["export", name, "--checkpoint", "last", "-o", folder, "--json", "-q", *options]
        compared = {row["metric"]: row["after"] for row in json.loads(self.run(*words))["comparison"]}
        (model,) = (path for path in (self.folder / folder).glob("model.*") if path.suffix != ".json")
        return model, compared.get("accuracy")

    def run(self, *words):
        done = subprocess.run([self.program, *words], cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout
