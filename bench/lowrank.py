"""Trains a small network on MNIST, factorizes it to a fraction of its parameters, trains on and prints what was lost.

    python bench/lowrank.py --trainer target/release/trainer --mnist path/to/mnist [--model mlp] [--targets 2x,4x]

The whole model is trained for --epochs, the factorized one for one more epoch with a tenth of the learning rate. Sizes
are of the exported model.safetensors, in f32; accuracy is that on the test set after the last update. Nothing but
Python's standard library is needed.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

MODELS = {
    "mlp": 'kind = "mlp"\nhidden = [256, 128]',
    "cnn": 'kind = "cnn"\nstages = [{ channels = 32 }, { channels = 64 }]\nhidden = [128]\ndropout = 0.3',
}

JOB = """
seed = {seed}
[model]
{model}
[data]
kind = "idx"
train_images = "{mnist}/train-images-idx3-ubyte.gz"
train_labels = "{mnist}/train-labels-idx1-ubyte.gz"
valid_images = "{mnist}/t10k-images-idx3-ubyte.gz"
valid_labels = "{mnist}/t10k-labels-idx1-ubyte.gz"
mean = 0.1307
std = 0.3081
[optimizer]
lr = {lr}
[schedule]
kind = "cosine"
[log]
tensorboard = false
report = false
[train]
batch_size = 64
epochs = {epochs}
"""


def run(args, folder, name, epochs, lr, keys):
    """Trains and exports; returns the bytes of the weights and the accuracy on the test set."""
    job = JOB.format(seed=args.seed, model=MODELS[args.model], mnist=args.mnist.resolve(), epochs=epochs, lr=lr)
    (folder / f"{name}.toml").write_text(job + keys)

    def trainer(*words):
        command = [args.trainer.resolve(), *words, "-q"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    trainer("fit", f"{name}.toml", "--run-dir", name)
    trainer("export", name, "--checkpoint", "last", "--format", "safetensors", "-o", f"{name}-out")
    summary = json.loads((folder / name / "summary.json").read_text())
    (model,) = (folder / f"{name}-out").rglob("model.safetensors")
    return model.stat().st_size, summary["metrics"]["valid.accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, required=True)
    parser.add_argument("--mnist", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--targets", default="2x,4x", help="how many times smaller, separated by commas")
    args = parser.parse_args()
    print("| model | file | smaller | accuracy | lost |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        whole, before = run(args, folder, "whole", args.epochs, 1e-3, "")
        print(f"| as trained | {whole / 1024:.0f} KiB | | {before:.2%} | |", flush=True)
        for target in args.targets.split(","):
            keys = f'init = "whole"\n[lowrank]\ntarget = "{target}"\n'
            size, accuracy = run(args, folder, f"lowrank-{target}", 1, 1e-4, keys)
            lost = f"{100 * (before - accuracy):.2f} points"
            sizes = f"{size / 1024:.0f} KiB | {whole / size:.2f}x"
            print(f"| low rank {target} | {sizes} | {accuracy:.2%} | {lost} |", flush=True)


if __name__ == "__main__":
    main()
