"""Trains a student on MNIST alone and with a teacher, and prints how much of the gap between them distillation closes.

    python bench/distill.py --trainer target/release/trainer --mnist path/to/mnist [--epochs 2] [--seeds 1,2,3]

The student has a quarter of the teacher's parameters or fewer. Accuracies are of the test set, means over the seeds of the
student; the teacher is trained once. Nothing but Python's standard library is needed.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

JOB = """
seed = {seed}
[model]
kind = "cnn"
stages = [{{ channels = {channels} }}, {{ channels = {twice} }}]
hidden = [{hidden}]
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
{rest}
"""


def run(args, folder, name, seed, channels, hidden, epochs, rest=""):
    """Trains; returns the parameters and the accuracy on the test set."""
    mnist = args.mnist.resolve()
    twice = 2 * channels
    sizes = {"channels": channels, "twice": twice, "hidden": hidden}
    (folder / f"{name}.toml").write_text(JOB.format(seed=seed, mnist=mnist, epochs=epochs, rest=rest, **sizes))
    words = ["fit", f"{name}.toml", "--run-dir", name, "-q"]
    subprocess.run([args.trainer.resolve(), *words], cwd=folder, check=True)
    summary = json.loads((folder / name / "summary.json").read_text())
    return summary["parameters"], summary["metrics"]["valid.accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, required=True)
    parser.add_argument("--mnist", type=pathlib.Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--teacher-epochs", type=int, default=4)
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the student, separated by commas")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--weight", type=float, default=0.9)
    args = parser.parse_args()
    distill = f'[distill]\nteacher = "teacher"\ntemperature = {args.temperature}\nweight = {args.weight}'
    print("| model | parameters | accuracy |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        size, teacher = run(args, folder, "teacher", 42, 32, 128, args.teacher_epochs)
        print(f"| teacher | {size:,} | {teacher:.2%} |", flush=True)
        means = {}
        for name, rest in [("alone", ""), ("distilled", distill)]:
            runs = [run(args, folder, f"{name}-{seed}", seed, 4, 16, args.epochs, rest) for seed in args.seeds.split(",")]
            means[name] = statistics.mean(accuracy for _, accuracy in runs)
            print(f"| student, {name} | {runs[0][0]:,} | {means[name]:.2%} |", flush=True)
        closed = (means["distilled"] - means["alone"]) / (teacher - means["alone"])
        print(f"\n{closed:.0%} of the gap closed")


if __name__ == "__main__":
    main()
