"""Compares `trainer predict` on a large csv file with ONNX Runtime on the exported model, alternating, in one session.

    python bench/predict.py --trainer target/release/trainer [--rows 1000000] [--rounds 3]

Needs numpy, pandas and onnxruntime. The script writes a csv file of eight numbers and two categories, trains a small
classifier on its first rows and exports it as ONNX. Each contestant runs in its own process, reads the same file, which
is in the page cache, and writes the class and its probability of every row to a csv file: ours with its defaults, the
other with pandas in chunks of `--chunk` rows, which go to the session as one batch each, on all cores. It prints medians
over the rounds: rows per second from start to end of the process, and peak resident memory; then that of ours on a tenth
of the rows, which must be the same.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

NUMBERS, TRAINED_ROWS = 8, 20_000
CATEGORIES = {"color": ["red", "green", "blue", "black"], "place": ["north", "south", "east", "west", "center"]}
JOB = """
[model]
kind = "mlp"
hidden = [64, 64]
[data]
kind = "csv"
train = ["train.csv"]
target = "class"
[train]
batch_size = 256
epochs = 2
[optimizer]
kind = "adamw"
lr = 0.003
[log]
tensorboard = false
"""
ONNX = """
import json, sys
import numpy as np, onnxruntime, pandas
model, source, target, chunk = sys.argv[1:5]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
classes, table = np.array(json.loads(about["classes"])), json.loads(about["preprocessing"])["table"]
columns = [(c, s) for c, s in zip(table["columns"], table["statistics"]["columns"]) if not c["target"]]
name, first = session.get_inputs()[0].name, True
for rows in pandas.read_csv(source, chunksize=int(chunk)):
    parts = []
    for column, statistics in columns:
        values = rows[column["name"]]
        if "Number" in statistics:
            s = statistics["Number"]
            parts.append(((values - s["mean"]) / np.sqrt(s["m2"] / s["count"])).to_numpy(np.float32)[:, None])
        else:
            known = list(statistics["Category"]["values"])
            codes = pandas.Categorical(values, categories=known).codes
            parts.append((codes[:, None] == np.arange(len(known))).astype(np.float32))
    logits = session.run(None, {name: np.concatenate(parts, 1)})[0]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    best = p.argmax(1)
    out = pandas.DataFrame({"prediction": classes[best], "probability": p[np.arange(len(p)), best]})
    out.to_csv(target, mode="w" if first else "a", header=first, index=False)
    first = False
"""


def write(path, rows):
    import numpy as np

    rng = np.random.default_rng(1)
    block = 100_000
    with open(path, "w") as file:
        file.write(",".join([f"x{i}" for i in range(NUMBERS)] + list(CATEGORIES) + ["class"]) + "\n")
        for start in range(0, rows, block):
            n = min(block, rows - start)
            x = rng.normal(size=(n, NUMBERS)) * 10.0 ** np.arange(-2, NUMBERS - 2)
            picks = [rng.choice(names, n) for names in CATEGORIES.values()]
            score = (x / 10.0 ** np.arange(-2, NUMBERS - 2)).sum(1) + (picks[0] == "red") * 2
            classes = np.where(score > 2, "high", np.where(score > -2, "middle", "low"))
            for i in range(n):
                cells = [f"{v:.6g}" for v in x[i]] + [pick[i] for pick in picks] + [classes[i]]
                file.write(",".join(cells) + "\n")


def measured(command):
    """Seconds, peak resident MiB and seconds of CPU time of a command."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[:3]} ended with {process.returncode}")
    return time.perf_counter() - begun, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def agree(ours, theirs):
    """The fraction of rows with the same class, and the largest difference of its probability."""
    import pandas

    a, b = pandas.read_csv(ours), pandas.read_csv(theirs)
    assert len(a) == len(b), (len(a), len(b))
    same = a.prediction == b.prediction
    return same.mean(), (a.probability - b.probability)[same].abs().max()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", default="target/release/trainer")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    trainer = str(pathlib.Path(args.trainer).resolve())
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        write(at / "big.csv", args.rows)
        with open(at / "big.csv") as big:
            head = [line for line, _ in zip(big, range(max(TRAINED_ROWS, args.rows // 10) + 1))]
        (at / "train.csv").write_text("".join(head[: TRAINED_ROWS + 1]))
        (at / "tenth.csv").write_text("".join(head[: args.rows // 10 + 1]))
        (at / "job.toml").write_text(JOB)
        quiet = lambda *command: subprocess.run([trainer, *command, "-q"], cwd=at, check=True, stdout=subprocess.DEVNULL)
        quiet("fit", "job.toml", "--run-dir", "run")
        quiet("export", "run", "--format", "onnx", "-o", "onnx")
        size = os.path.getsize(at / "big.csv") / 1e6
        print(f"{args.rows} rows, {NUMBERS} numbers and {len(CATEGORIES)} categories, {size:.0f} MB, {os.cpu_count()} cores")
        ours = lambda rows: [trainer, "predict", str(at / "run"), str(at / rows), "-o", str(at / "ours.csv"), "-q"]
        theirs = [
            sys.executable, "-c", ONNX, str(at / "onnx/model.onnx"), str(at / "big.csv"), str(at / "theirs.csv"),
            str(args.chunk),
        ]
        seen = {"ours": [], "onnxruntime": [], "tenth": []}
        for _ in range(args.rounds):
            seen["tenth"].append(measured(ours("tenth.csv")))
            seen["ours"].append(measured(ours("big.csv")))
            seen["onnxruntime"].append(measured(theirs))
        same, apart = agree(at / "ours.csv", at / "theirs.csv")
    median = {name: [statistics.median(x) for x in zip(*values)] for name, values in seen.items()}
    print(f"{'':12} {'rows/s':>10} {'peak':>11} {'cpu':>9}")
    for name in ("ours", "onnxruntime"):
        seconds, mib, cpu = median[name]
        print(f"{name:12} {args.rows / seconds:>10.0f} {mib:>7.0f} MiB {cpu:>7.2f} s")
    print(f"ours on a tenth of the rows: {median['tenth'][1]:.0f} MiB")
    print(f"{median['onnxruntime'][0] / median['ours'][0]:.2f} times as fast; {100 * same:.4f} % of the classes agree, "
          f"probabilities to {apart:.1e}")


if __name__ == "__main__":
    main()
