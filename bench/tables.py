"""Compares reading a large csv file with pandas, alternating, in one session on one machine.

    python bench/tables.py --rows target/release/examples/rows [--mb 1024] [--rounds 3]

Needs numpy and pandas (`pip install numpy pandas`) and the example that reads a table as training does
(`cargo build --release --example rows`). The script writes a temporary file of eleven numeric columns: a hundred
thousand random rows, repeated. Each contestant runs in its own process on a file that is in the page cache. It prints
medians over the rounds: seconds to read every row (ours into batches of f32 samples, pandas into a DataFrame), peak
resident memory, CPU time of the process, and seconds from its start to the first batch.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

COLUMNS = 11


def write(path, mb):
    import numpy as np

    rng = np.random.default_rng(1)
    values = rng.normal(size=(100_000, COLUMNS)) * 10.0 ** rng.integers(-2, 4, COLUMNS)
    block = "\n".join(",".join(f"{x:.6g}" for x in row) for row in values).encode() + b"\n"
    with open(path, "wb") as f:
        f.write(",".join(f"c{i}" for i in range(COLUMNS)).encode() + b"\n")
        while f.tell() < mb << 20:
            f.write(block)


def run(command):
    """Runs a command; returns its JSON output, its seconds, its peak resident MiB and its seconds of CPU time."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}")
    seconds = time.perf_counter() - begun
    return json.loads(out), seconds, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


PANDAS = """
import json, sys, time
import pandas
begun = time.perf_counter()
table = pandas.read_csv(sys.argv[1])
read = time.perf_counter() - begun
print(json.dumps({"rows": len(table), "all_s": read, "sum": float(table.iloc[:, :-1].to_numpy().sum())}))
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="target/release/examples/rows")
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seen = {"ours": [], "pandas": [], "first": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "table.csv")
        write(path, args.mb)
        print(f"{os.path.getsize(path) / 1e9:.2f} GB, {COLUMNS} columns, {os.cpu_count()} cores")
        for _ in range(args.rounds):
            target = f"c{COLUMNS - 1}"
            ours = run([args.rows, path, target])
            first = run([args.rows, path, target, "first"])
            theirs = run([sys.executable, "-c", PANDAS, path])
            # Ours holds out one row in a million for validation, so the sums agree up to that and to f32 rounding.
            assert abs(ours[0]["rows"] - theirs[0]["rows"]) <= 1 + theirs[0]["rows"] // 100_000, (ours, theirs)
            assert abs(ours[0]["sum"] / theirs[0]["sum"] - 1) < 1e-2, (ours, theirs)
            seen["ours"].append((ours[0]["all_s"], ours[2], ours[3]))
            seen["pandas"].append((theirs[0]["all_s"], theirs[2], theirs[3]))
            seen["first"].append((first[1], first[2], first[3]))
    median = {name: [statistics.median(x) for x in zip(*values)] for name, values in seen.items()}
    print(f"{'':8} {'all rows':>10} {'peak':>13} {'cpu':>10}")
    for name in ("ours", "pandas"):
        seconds, mib, cpu = median[name]
        print(f"{name:8} {seconds:>8.2f} s {mib:>9.0f} MiB {cpu:>8.2f} s")
    faster, memory = median["pandas"][0] / median["ours"][0], median["ours"][1] / median["pandas"][1]
    print(f"{faster:.2f} times as fast, {memory:.3f} of the memory")
    print(f"process start to first batch, row index rebuilt: {median['first'][0]:.2f} s")


if __name__ == "__main__":
    main()
