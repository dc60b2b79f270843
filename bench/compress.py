"""Trains a small network on MNIST as it is and pruned, and prints file size, gzipped size and accuracy of each.

    python bench/compress.py --trainer target/release/trainer --mnist path/to/mnist [--epochs 2] [--final 0.8,0.95]

The schedule is that of TensorFlow's pruning tutorial: from 50 % to the final sparsity over the whole run, in its last two
thirds here, so that the weights settle. Sizes are of the exported model.safetensors, in f32; gzip with its default level.
Nothing but Python's standard library is needed.
"""

import argparse
import gzip
import json
import pathlib
import subprocess
import tempfile

JOB = """
seed = {seed}
[model]
kind = "cnn"
stages = [{{ channels = 32 }}, {{ channels = 64 }}]
hidden = [128]
dropout = 0.3
[data]
kind = "idx"
train_images = "{mnist}/train-images-idx3-ubyte.gz"
train_labels = "{mnist}/train-labels-idx1-ubyte.gz"
valid_images = "{mnist}/t10k-images-idx3-ubyte.gz"
valid_labels = "{mnist}/t10k-labels-idx1-ubyte.gz"
mean = 0.1307
std = 0.3081
[train]
batch_size = 64
epochs = {epochs}
[schedule]
kind = "cosine"
[log]
tensorboard = false
report = false
"""

STEPS_PER_EPOCH = -(-60000 // 64)


def run(args, folder, sparsity):
    """Trains and exports; returns the sizes and the accuracy on the test set."""
    job = JOB.format(seed=args.seed, mnist=args.mnist.resolve(), epochs=args.epochs)
    if sparsity:
        steps = STEPS_PER_EPOCH * args.epochs
        job += f"[prune]\ninitial = 0.5\nfinal = {sparsity}\nbegin_step = {steps // 6}\nend_step = {steps * 2 // 3}\n"
    folder.mkdir()
    (folder / "job.toml").write_text(job)

    def trainer(*words):
        subprocess.run([args.trainer.resolve(), *words, "-q"], cwd=folder, check=True)

    trainer("fit", "job.toml", "--run-dir", "run")
    trainer("export", "run", "--checkpoint", "last", "--format", "safetensors", "-o", "out")
    summary = json.loads((folder / "run/summary.json").read_text())
    (model,) = (folder / "out").rglob("model.safetensors")
    data = model.read_bytes()
    return len(data), len(gzip.compress(data, 6)), summary["metrics"]["valid.accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, required=True)
    parser.add_argument("--mnist", type=pathlib.Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--final", default="0.8,0.95", help="sparsities, separated by commas")
    args = parser.parse_args()
    print("| model | file | gzipped | smaller | accuracy |\n|---|---|---|---|---|", flush=True)
    whole = None
    with tempfile.TemporaryDirectory() as scratch:
        for sparsity in [0.0, *map(float, args.final.split(","))]:
            size, packed, accuracy = run(args, pathlib.Path(scratch) / str(sparsity), sparsity)
            whole = whole or packed
            name = f"pruned to {sparsity:.0%}" if sparsity else "as trained"
            kib = f"{size / 1024:.0f} KiB | {packed / 1024:.0f} KiB"
            print(f"| {name} | {kib} | {whole / packed:.2f} x | {accuracy:.2%} |", flush=True)


if __name__ == "__main__":
    main()
