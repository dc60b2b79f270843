"""End-to-end trials on a real GPU: `python3 scripts/gpu-trials.py --trainer target/cuda/release/trainer`.

Each trial runs the program as users do and prints `pass` or `FAIL` with what it observed; the exit code is 1 if any
failed. Names as arguments select trials. Needs only Python and a GPU with a few GiB free. `full_disk` mounts a tmpfs
and is skipped without the permission to do so. `plans` takes the jobs of tests/bounds.rs from a folder (--jobs), which
`TRAINER_JOBS=FOLDER cargo test --test integration bounds::writes_its_jobs` fills.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20

NAMES = (
    "limits",
    "neighbour_before",
    "neighbour_during",
    "injected",
    "precision",
    "plans",
    "interrupted",
    "growing",
    "offload",
    "graphs",
    "shapes",
    "full_disk",
)

# Trials that run twice: with dropout, whose masks a CUDA graph derives from staged sample ids, and without.
TWICE = ("limits", "neighbour_during", "interrupted", "growing")

# The largest allowed difference between the mean loss of 20 consecutive updates and that of f32, relative to the first
# 20 updates of f32. Some jobs amplify the smallest difference: there the limit is how far f32 runs differ among
# themselves when the learning rate is scaled by one of RATES.
PRECISION = {"bf16": 0.03, "f16": 0.01}
RATES = (1 + 1e-6, 1 - 1e-6, 1 + 2e-6, 1 - 2e-6)

GPT = """[model]
kind = "gpt"
layers = 6
heads = 4
width = 256
context = 128
dropout = {dropout}
[data]
kind = "text-synthetic"
vocab = 2048
valid_samples = 64
[train]
batch_size = 64
steps = {steps}
clip_norm = 1.0
[optimizer]
kind = "adamw"
lr = 0.001
[eval]
every_steps = 20
[checkpoint]
every_steps = 10
[log]
every_steps = 1
tensorboard = false
[memory]
{memory}
"""


def job(model, data, batch, steps=24, samples=120):
    """A job whose last batch is short, with evaluations during training."""
    return f"""[model]
{model}
[data]
{data}
[train]
batch_size = {batch}
steps = {steps}
[optimizer]
kind = "adamw"
lr = 0.0005
[eval]
every_steps = 9
[checkpoint]
every_steps = {steps}
[log]
every_steps = 1
tensorboard = false
"""


def transformer(kind, layers, width, heads, context, vocab, batch, dropout=None):
    dropped = "" if dropout is None else f"\ndropout = {dropout}"
    model = f'kind = "{kind}"\nlayers = {layers}\nwidth = {width}\nheads = {heads}\ncontext = {context}{dropped}'
    samples = batch * 7 + 1
    return job(model, f'kind = "text-synthetic"\nvocab = {vocab}\ntrain_samples = {samples}\nvalid_samples = {batch + 1}', batch)


def images(kind, batch, size, norm_group=None):
    """A job on random RGB images in idx files, which `Trials.write` creates beside the job."""
    stages = ", ".join(f'{{ channels = {n}, norm = "batch" }}' for n in (64, 128, 256))
    model = f'kind = "{kind}"\n' + (f"stages = [{stages}]" if kind == "cnn" else "layers = 4\nwidth = 192\nheads = 3\npatch = 8")
    if norm_group:
        model += f"\nnorm_group = {norm_group}"
    lines = ['kind = "idx"'] + [f'{name} = "{name}-{size}.idx"' for name in ("train_images", "train_labels", "valid_images", "valid_labels")]
    text = job(model, "\n".join(lines), batch)
    return text + f"# idx: {size} {batch * 5 + 3} {batch // 2 + 1}\n"


def write_idx(folder, size, train, valid):
    """Writes random images, (samples, height, width, 3), and labels below ten as idx files."""
    draw = random.Random(7)
    for name, count in (("train", train), ("valid", valid)):
        head = struct.pack(">BBBBIIII", 0, 0, 8, 4, count, size, size, 3)
        (folder / f"{name}_images-{size}.idx").write_bytes(head + draw.randbytes(count * size * size * 3))
        labels = bytes(draw.randrange(10) for _ in range(count))
        (folder / f"{name}_labels-{size}.idx").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)


class FinishedRun:
    """A finished run: its exit code, its output, its events and its checkpoints."""

    def __init__(self, code, output, folder):
        self.code, self.output, self.folder = code, output, folder
        events = folder / "run" / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        self.events = [json.loads(line) for line in lines]

    def named(self, *names):
        return [event for event in self.events if event["event"] in names]

    def digest(self):
        return self.named("step")[-1]["samples_digest"] if self.named("step") else None

    def losses(self):
        return [event["loss"] for event in self.named("step")]

    def weights(self):
        """A digest of the last checkpoint's weights and optimizer state."""
        newest = sorted((self.folder / "run" / "checkpoints").glob("*/model.safetensors"))[-1].parent
        files = [newest / "model.safetensors", newest / "optimizer.safetensors"]
        return [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]


class Trials:
    def __init__(self, trainer, jobs, beside):
        self.trainer, self.jobs, self.beside = str(pathlib.Path(trainer).resolve()), jobs, beside
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="trials-"))
        self.numbers = itertools.count()
        self.dropout = 0.1

    def gpt(self, steps, memory=""):
        return GPT.format(steps=steps, dropout=self.dropout, memory=memory)

    def assert_captured(self, *runs):
        """Each run captured a CUDA graph."""
        for run in runs:
            assert run.named("cuda_graph_captured"), f"no graph: {run.named('cuda_graph_disabled')}"

    def start(self, text, *args, folder=None, env=None):
        if folder is None:
            folder = self.root / str(next(self.numbers))
            folder.mkdir()
            self.write(folder, text)
        command = [self.trainer, "fit", "job.toml", "--device", "cuda", "--run-dir", "run", "-q", *args]
        output = open(folder / "output", "w")
        env = {**os.environ, **(env or {})}
        return folder, subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)

    def write(self, folder, text):
        (folder / "job.toml").write_text(text)
        if wanted := re.search(r"^# idx: (\d+) (\d+) (\d+)$", text, re.MULTILINE):
            write_idx(folder, *map(int, wanted.groups()))

    def end(self, started):
        folder, process = started
        code = process.wait(timeout=600)
        return FinishedRun(code, (folder / "output").read_text(), folder)

    def fit(self, text, *args, **more):
        return self.end(self.start(text, *args, **more))

    def plan(self, text, *args):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.root))
        self.write(folder, text)
        command = [self.trainer, "plan", "job.toml", "--device", "cuda", "--json", *args]
        return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout)

    def until_step(self, started, step):
        """Waits until a running process has logged update `step`, or has ended."""
        folder, process = started
        events = folder / "run" / "events.jsonl"
        while process.poll() is None:
            lines = events.read_text().splitlines(keepends=True) if events.exists() else []
            logged = [e["step"] for e in map(json.loads, filter(lambda l: l.endswith("\n"), lines)) if e["event"] == "step"]
            if logged and logged[-1] >= step:
                return
            time.sleep(0.02)

    # The trials: each returns a line about what it observed, or fails an assertion.

    def limits(self):
        """Lowers the memory limit in ten steps from the planned peak until no plan fits."""
        ample = self.fit(self.gpt(4))
        self.assert_captured(ample)
        most = self.plan(self.gpt(4))["peak"]["vram_bytes"]
        least = self.plan(self.gpt(4, 'vram = "1MiB"'))["peak"]["vram_bytes"]
        codes, ooms = [], 0
        for i in range(10):
            limit = most - (most - least + 4 * MIB) * i // 9
            run = self.fit(self.gpt(4, f'vram = "{limit}B"'))
            ooms += len(run.named("oom"))
            codes.append(run.code)
            assert run.code in (0, 3), f"exit code {run.code} at {limit}: {run.output}"
            if run.code == 0:
                assert run.digest() == ample.digest(), f"the samples differ at {limit}"
            else:
                assert "hint:" in run.output and "memory." in run.output, run.output
        assert codes == sorted(codes) and codes[0] == 0 and codes[-1] == 3, codes
        return f"{most} to {limit} bytes: exit codes {codes}, {ooms} OOMs reported by the driver"

    def neighbour_before(self):
        """Another process holds most of the GPU memory when the run starts."""
        job = self.gpt(4)
        ample = self.fit(job)
        needs = ample.named("planned")[0]["plan"]["peak"]["vram_bytes"]
        context = ample.named("planned")[0]["plan"]["context_bytes"]
        with neighbour(context + needs * 3 // 4):
            run = self.fit(job)
        plan = run.named("planned")[0]["plan"]
        assert run.code == 0, run.output
        assert plan["verdict"] == "fits_after_shrink", plan["verdict"]
        assert run.digest() == ample.digest()
        return f"{needs} bytes requested, {plan['budget']['vram_bytes']} available, planned {plan['peak']['vram_bytes']}"

    def neighbour_during(self):
        """Another process allocates all free GPU memory during training."""
        job = self.gpt(60, "supervise = false")
        ample = self.fit(job)
        started = self.start(job)
        # One graph is captured by then. Those of the last evaluation batch and of a short batch are captured while no
        # memory is free.
        self.until_step(started, 5)
        started[1].send_signal(signal.SIGSTOP)
        with neighbour(0) as taken:
            assert started[1].poll() is None, "the run ended before"
            started[1].send_signal(signal.SIGCONT)
            run = self.end(started)
        assert run.code == 0, run.output
        self.assert_captured(ample, run)
        assert run.digest() == ample.digest(), "the samples differ"
        ooms = [(event["step"], event["phase"]) for event in run.named("oom")]
        assert not ooms, f"{taken} bytes taken; OOM at {ooms}"
        assert run.weights() == ample.weights(), "the weights differ"
        return f"{taken} bytes taken after update 5; no OOM, bitwise equal"

    def injected(self):
        """An OOM is injected in every phase, and `verify` compares the results."""
        job = self.gpt(3).replace("every_steps = 20", "every_steps = 1")
        ample, ooms = self.fit(job), []
        # One per run: an update in the smallest micro-batches makes thousands of reservations.
        for reservation in range(100, 460, 23):
            run = self.fit(job, env={"TRAINER_FAULT_OOM": str(reservation)})
            assert run.code == 0, run.output
            assert run.digest() == ample.digest()
            ooms += [event["phase"] for event in run.named("oom")]
        phases = sorted(set(ooms))
        assert {"backward", "eval", "forward"} <= set(phases), phases
        for name in ("gpt", "resnet", "mlp"):
            # In f32: the gradient of the key biases is zero up to rounding, so in a narrower type rounding alone moves
            # these biases.
            command = [self.trainer, "verify", str(HERE / "configs" / f"{name}.toml"), "--device", "cuda", "-q"]
            command += ["--set", "train.precision=f32"]
            proof = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            assert proof.returncode == 0, f"{name}: {proof.stdout}{proof.stderr}"
        return f"{len(ooms)} OOMs in {', '.join(phases)}; verified gpt, resnet, mlp"

    def precision(self):
        """The losses of 200 updates in bf16 and f16 follow those in f32."""
        report, failures = [], []
        for name in ("gpt", "llama", "resnet", "mlp"):
            text = (HERE / "configs" / f"{name}.toml").read_text()
            sets = ["train.steps=200", "log.every_steps=1", "log.tensorboard=false", "eval.every_steps=200"]
            sets += ["checkpoint.every_steps=200"]
            text = "\n".join(line for line in text.splitlines() if not line.startswith(("epochs", "steps", "every_")))
            args = [part for one in sets for part in ("--set", one)]
            lr = float(re.search(r"^lr = (\S+)", text, re.MULTILINE)[1])

            def losses(kind):
                precision, rate = kind
                more = ["--set", f"train.precision={precision}", "--set", f"optimizer.lr={lr * rate!r}"]
                run = self.fit(text, *args, *more)
                assert run.code == 0 and len(run.losses()) == 200, run.output
                return [sum(run.losses()[i : i + 20]) / 20 for i in range(0, 200, 20)]

            kinds = [("f32", 1), *(("f32", rate) for rate in RATES), *((kind, 1) for kind in PRECISION)]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                reference, *others = pool.map(losses, kinds)
            deviations = [max(abs(a - b) for a, b in zip(other, reference)) / reference[0] for other in others]
            f32_deviation = max(deviations[: len(RATES)])
            report.append(f"{name} f32 {100 * f32_deviation:.2f} %")
            for (kind, bound), deviation in zip(PRECISION.items(), deviations[len(RATES) :]):
                report.append(f"{name} {kind} {100 * deviation:.2f} %")
                failures += [report[-1]] if deviation > max(bound, f32_deviation) else []
        assert not failures, f"{', '.join(failures)} of {', '.join(report)}"
        return ", ".join(report)

    def plans(self):
        """The planned peak of every job is at least the heap's high-water mark, and at most 2 % above it."""
        jobs = sorted(pathlib.Path(self.jobs).glob("*.toml"))
        assert jobs, f"no jobs in {self.jobs}"

        def planned_and_measured(path):
            text, args = path.read_text(), []
            if "recompute" in path.stem:
                needs = self.plan(text)["peak"]["vram_bytes"]
                tight = f"memory.vram={needs - MIB}B"
                if self.plan(text, "--set", tight)["verdict"] != "does_not_fit":
                    args = ["--set", tight]
            run = self.fit(text, *args)
            assert run.code == 0, f"{path.stem}: {run.output}"
            end = run.named("finished")[0]
            return path.stem, end["planned_peak_bytes"]["vram"], end["measured_peak_bytes"]["vram"], len(run.named("oom"))

        with concurrent.futures.ThreadPoolExecutor(self.beside) as pool:
            rows = sorted(pool.map(planned_and_measured, jobs), key=lambda row: row[1] / row[2])
        for name, planned, measured, ooms in rows:
            print(f"  {name}: planned {planned}, measured {measured}, {100 * (planned / measured - 1):+.2f} %, {ooms} oom")
        failures = [row[0] for row in rows if not row[2] <= row[1] <= 1.02 * row[2]]
        assert not failures, failures
        worst = max(row[1] / row[2] - 1 for row in rows)
        return f"{len(rows)} jobs, never below, at most {100 * worst:.2f} % above"

    def interrupted(self):
        """A run stopped by SIGINT or SIGKILL and resumed ends with the same bits."""
        job = self.gpt(60, "supervise = false")
        ample = self.fit(job)
        codes = []
        for number in (signal.SIGINT, signal.SIGKILL):
            started = self.start(job)
            self.until_step(started, 25)
            started[1].send_signal(number)
            stopped = self.end(started)
            codes.append(stopped.code)
            self.assert_captured(ample, stopped)
            run = self.fit(None, "--resume", folder=started[0])
            assert run.code == 0, run.output
            assert run.weights() == ample.weights(), f"the weights differ after {number.name}"
            assert run.digest() == ample.digest()
        assert codes == [130, -signal.SIGKILL], codes
        return f"exit codes {codes}, then bitwise equal weights and optimizer state"

    def growing(self):
        """A run that shrank after one OOM returns to its larger micro-batch."""
        job = self.gpt(120).replace("every_steps = 20", "every_steps = 120")
        expected = ["cuda_graph_captured", "oom", "shrunk", "grown"]
        # A micro-batch makes some 200 reservations before its graph is captured, and one from then on.
        for reservation in range(400, 4000, 150):
            run = self.fit(job, env={"TRAINER_FAULT_OOM": str(reservation)})
            assert run.code == 0, run.output
            observed = [event["event"] for event in run.named(*expected)]
            if observed == expected and run.named("oom")[0]["step"] > 3:
                break
        else:
            raise AssertionError(f"no reservation led to {', '.join(expected)}; the last one to {observed}")
        first, last = run.named("step")[0], run.named("step")[-1]
        assert first["micro_batch"] == last["micro_batch"], (first, last)
        at = [event["step"] for event in run.named("shrunk", "grown")]
        return f"micro-batch {first['micro_batch']}, shrunk after update {at[0]}, grown after {at[1]}"

    def offload(self):
        """Offloading optimizer state and the inputs of blocks changes no bit, across a resume too."""
        job = self.gpt(6, "{memory}")
        report = []
        for kind in ("adamw", "lion", "sgd"):
            text = job.replace('kind = "adamw"', f'kind = "{kind}"' + ("\nmomentum = 0.9" if kind == "sgd" else ""))
            ample = self.fit(text.format(memory=""))
            needs = ample.named("planned")[0]["plan"]["peak"]["vram_bytes"]
            offloaded = self.fit(text.format(memory=f'vram = "{needs - 1}B"\non_oom = ["offload"]'))
            assert offloaded.code == 0, offloaded.output
            chosen = offloaded.named("planned")[0]["plan"]["chosen"]
            assert chosen["offload"] == ["optimizer_state"], chosen
            assert offloaded.weights() == ample.weights(), f"{kind}: the weights or the state differ"
            report.append(kind)
        # Deep enough that the inputs of all blocks take more memory than everything else.
        deep = job.replace("layers = 6", "layers = 24").replace("vocab = 2048", "vocab = 256")
        ample = self.fit(deep.format(memory=""))
        both = 'on_oom = ["recompute", "offload"]\nvram = "{}B"'
        least = self.plan(deep.format(memory=both.format(MIB)))["peak"]["vram_bytes"]
        run = self.fit(deep.format(memory=both.format(least)), "--max-steps", "3")
        run = self.fit(None, "--resume", folder=run.folder)
        assert run.code == 0, run.output
        chosen = run.named("planned")[-1]["plan"]["chosen"]
        assert "activations" in chosen["offload"] and chosen["recompute"] > 0, chosen
        assert run.weights() == ample.weights(), "offloaded block inputs: the weights or the state differ"
        report.append(f"with the inputs of {chosen['recompute']} blocks offloaded too, across a resume")
        return "bitwise equal: " + ", ".join(report)

    def graphs(self):
        """CUDA graphs change no bit, with short batches, evaluations and a resume."""
        report, short = [], ["--set", "data.train_samples=500"]
        for name, more in (
            ("gpt", []),
            ("llama", []),
            ("bert", []),
            ("vit", short),
            ("mlp", ["--set", "model.dropout=0.0", *short]),
            ("mlp", ["--set", "model.dropout=0.2", *short]),
            ("resnet", short),
            ("mobilenet", ["--set", "model.dropout=0.2", *short]),
        ):
            text = (HERE / "configs" / f"{name}.toml").read_text()
            text = "\n".join(line for line in text.splitlines() if not line.startswith(("epochs", "steps", "every_")))
            sets = ["train.steps=60", "train.accumulation_steps=2", "log.every_steps=1", "log.tensorboard=false"]
            sets += ["eval.every_steps=25", "checkpoint.every_steps=30", "schedule.warmup_steps=10"]
            args = [part for one in sets for part in ("--set", one)] + more
            eager = self.fit(text, *args, "--set", "memory.graphs=false")
            graphed = self.fit(text, *args)
            half = self.fit(text, *args, "--max-steps", "30")
            half = self.fit(None, *args, "--resume", folder=half.folder)
            for run in (eager, graphed, half):
                assert run.code == 0, f"{name}: {run.output}"
                assert run.weights() == eager.weights(), f"{name}: the weights or the state differ"
                assert run.losses()[-1] == eager.losses()[-1], name
                assert not run.named("oom"), f"{name}: {run.named('oom')}"
            assert not eager.named("cuda_graph_captured"), name
            self.assert_captured(graphed)
            report.append(f"{name} {graphed.named('cuda_graph_captured')[0]['launches']}")
        return "bitwise equal: " + ", ".join(report)

    def shapes(self):
        """Large single tensors, odd shapes and tight budgets: no OOM while the plan fits, and equal repetitions."""
        jobs = {
            "gpt 4096": transformer("gpt", layers=6, width=512, heads=8, context=4096, vocab=8192, batch=2),
            "gpt 3000": transformer("gpt", layers=3, width=384, heads=6, context=3000, vocab=5001, batch=3),
            "gpt dropout": transformer("gpt", layers=4, width=256, heads=4, context=512, vocab=4096, batch=16, dropout=0.1),
            "llama 2048": transformer("llama", layers=4, width=512, heads=8, context=2048, vocab=8192, batch=4),
            "cnn 64 px": images("cnn", batch=256, size=64, norm_group=256),
            "cnn 48 px": images("cnn", batch=200, size=48, norm_group=100),
            "cnn 96 px": images("cnn", batch=64, size=96, norm_group=64),
            "vit 64 px": images("vit", batch=64, size=64),
        }
        report, failures = [], []

        def check(item):
            name, text = item
            faults = []
            ample = self.fit(text)
            runs = [("ample", ample)]
            if ample.code == 0:
                peak = ample.named("planned")[0]["plan"]["peak"]["vram_bytes"]
                for fraction in (1.0, 0.7, 0.5):
                    more = ["--set", f"memory.vram={int(peak * fraction)}B"]
                    if self.plan(text, *more)["verdict"] != "does_not_fit":
                        runs += [(f"{fraction} of the peak", self.fit(text, *more)) for _ in range(2)]
            for label, run in runs:
                if run.code != 0 or run.named("oom", "shrunk"):
                    faults.append(f"{name}, {label}: exit code {run.code}, {run.named('oom', 'shrunk')} {run.output[-200:]}")
                elif run.digest() != ample.digest():
                    faults.append(f"{name}, {label}: the samples differ")
            for (label, first), (_, second) in zip(runs[1::2], runs[2::2]):
                if first.code == second.code == 0 and first.weights() != second.weights():
                    faults.append(f"{name}, {label}: two equal runs differ")
            heaps = [run.named("device_heap")[0] for _, run in runs if run.named("device_heap")]
            graphs = sum(bool(run.named("cuda_graph_captured")) for _, run in runs)
            waste = max((h["arena_waste_bytes"] / max(h["arena_bytes"], 1) for h in heaps), default=0)
            synchronizes = sum(h["synchronizes"] for h in heaps)
            return faults, f"{name}: {len(runs)} runs, {graphs} graphs, {100 * waste:.1f} % waste, {synchronizes} synchronizes"

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for faults, line in pool.map(check, jobs.items()):
                failures += faults
                report.append(line)
        assert not failures, "\n  ".join(failures + report)
        return "\n  ".join(["no OOM", *report])

    def full_disk(self):
        """A disk that fills up during training ends the run with an error; with space again, the run resumes."""
        job = self.gpt(40, "supervise = false").replace("[checkpoint]\nevery_steps = 10", "[checkpoint]\nevery_steps = 4")
        ample = self.fit(job)
        last = ample.folder / "run" / "checkpoints" / "step-00000040"
        checkpoint = sum(file.stat().st_size for file in last.iterdir())
        folder = self.root / str(next(self.numbers))
        folder.mkdir()
        # A run refuses to start on a disk that cannot hold the checkpoints it keeps (3), the best one and one in flight.
        with disk(folder, checkpoint * 6):
            (folder / "job.toml").write_text(job)
            started = self.start(None, folder=folder)
            # The first checkpoint is complete by then, and the next one is to come.
            self.until_step(started, 5)
            started[1].send_signal(signal.SIGSTOP)
            assert started[1].poll() is None, "the run ended before"
            filler = fill(folder, leave=checkpoint // 2)
            started[1].send_signal(signal.SIGCONT)
            run = self.end(started)
            assert run.code == 1 and "No space left on device" in run.output, f"exit code {run.code}: {run.output}"
            filler.unlink()
            run = self.fit(None, "--resume", folder=folder)
            assert run.code == 0, run.output
            assert run.weights() == ample.weights(), "the weights or the state differ"
            assert run.digest() == ample.digest(), "the samples differ"
            step = run.named("resumed")[0]["step"]
        return f"exit code 1 on a full disk, resumed at update {step}: bitwise equal"


class Skipped(Exception):
    """A trial that this machine does not permit."""


@contextlib.contextmanager
def disk(folder, size):
    """Mounts a tmpfs of `size` bytes on the folder while the body runs."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Skipped(f"no file system can be mounted: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def fill(folder, leave):
    """Writes a file that leaves `leave` bytes of the folder's file system free, and returns its path."""
    free, path = os.statvfs(folder), folder / "filler"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_frsize - leave, 1))
    return path


@contextlib.contextmanager
def neighbour(leave):
    """A process that holds all GPU memory but `leave` bytes while the body runs; yields the bytes it holds."""
    child = subprocess.Popen([sys.executable, __file__, "--hold", str(leave)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield int(child.stdout.readline())
    finally:
        child.stdin.close()
        child.wait()


def hold(leave):
    """The neighbour: allocates through the driver API, prints how much, and waits for the end of stdin."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, taken = ctypes.c_int(), ctypes.c_void_p(), 0
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        assert code == 0, f"CUDA driver error {code}"
    piece = 1 << 30
    while piece >= 2 * MIB:
        free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        if free.value < leave + piece or cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(piece)) != 0:
            piece //= 2
        else:
            taken += piece
    print(taken, flush=True)
    sys.stdin.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"trials to run, of {', '.join(NAMES)}; all by default")
    parser.add_argument("--trainer", default="target/cuda/release/trainer")
    parser.add_argument("--jobs", default="target/bounds", help="the folder of jobs for `plans`")
    parser.add_argument("--beside", type=int, default=2, help="jobs of `plans` that run at the same time")
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold is not None:
        return hold(args.hold)
    trials, failed = Trials(args.trainer, args.jobs, args.beside), 0
    if unknown := set(args.trials) - set(NAMES):
        parser.error(f"no trial is called {', '.join(sorted(unknown))}")
    for name in args.trials or NAMES:
        for trials.dropout in (0.1, 0.0) if name in TWICE else (0.1,):
            begun, label = time.time(), f"{name}, dropout {trials.dropout}" if name in TWICE else name
            try:
                verdict, report = "pass", getattr(trials, name)()
            except Skipped as error:
                verdict, report = "skip", str(error)
            except Exception as error:  # a failure of one trial does not stop the others
                verdict, report, failed = "FAIL", f"{type(error).__name__}: {error}", failed + 1
            print(f"{verdict} {label} ({time.time() - begun:.0f} s): {report}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
