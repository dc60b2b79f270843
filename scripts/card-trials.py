"""What must hold on a card, tried on a real one: `python3 scripts/card-trials.py --trainer target/cuda/release/trainer`.

Each trial runs the program as people do and prints `pass` or `FAIL` with what was seen; the exit code is 1 if any
failed. Names as arguments choose among them. Needs nothing but Python and a card with a few GiB free; `full_disk` is
skipped by who may not mount a file system. `plans` takes
the jobs of tests/bounds.rs from a folder (--jobs), which `TRAINER_JOBS=FOLDER cargo test --test bounds writes_its_jobs`
fills.
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

# Those that are made twice: with dropout, whose masks a CUDA graph draws from staged sample ids, and without.
TWICE = ("limits", "neighbour_during", "interrupted", "growing")

# The farthest that the mean loss of any 20 of 200 updates may be from that of f32, relative to the first 20 of f32. Some
# jobs carry the smallest difference far: there it may be as far as f32 is from itself at one of these rates.
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
    """A job whose last batch is short, with evaluations in between."""
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
    """Random RGB images in idx files, which `Trials.start` writes beside the job."""
    stages = ", ".join(f'{{ channels = {n}, norm = "batch" }}' for n in (64, 128, 256))
    model = f'kind = "{kind}"\n' + (f"stages = [{stages}]" if kind == "cnn" else "layers = 4\nwidth = 192\nheads = 3\npatch = 8")
    if norm_group:
        model += f"\nnorm_group = {norm_group}"
    lines = ['kind = "idx"'] + [f'{name} = "{name}-{size}.idx"' for name in ("train_images", "train_labels", "valid_images", "valid_labels")]
    text = job(model, "\n".join(lines), batch)
    return text + f"# idx: {size} {batch * 5 + 3} {batch // 2 + 1}\n"


def write_idx(folder, size, train, valid):
    """Images (samples, height, width, 3) and labels below ten, as idx files."""
    draw = random.Random(7)
    for name, count in (("train", train), ("valid", valid)):
        head = struct.pack(">BBBBIIII", 0, 0, 8, 4, count, size, size, 3)
        (folder / f"{name}_images-{size}.idx").write_bytes(head + draw.randbytes(count * size * size * 3))
        labels = bytes(draw.randrange(10) for _ in range(count))
        (folder / f"{name}_labels-{size}.idx").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)


class Ran:
    """A run that ended: its exit code, what it told and what it left behind."""

    def __init__(self, code, said, folder):
        self.code, self.said, self.folder = code, said, folder
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

    def captured(self, *runs):
        for ran in runs:
            assert ran.named("cuda_graph_captured"), f"no graph: {ran.named('cuda_graph_disabled')}"

    def start(self, text, *args, folder=None, env=None):
        if folder is None:
            folder = self.root / str(next(self.numbers))
            folder.mkdir()
            self.write(folder, text)
        command = [self.trainer, "fit", "job.toml", "--device", "cuda", "--run-dir", "run", "-q", *args]
        said = open(folder / "said", "w")
        env = {**os.environ, **(env or {})}
        return folder, subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said)

    def write(self, folder, text):
        (folder / "job.toml").write_text(text)
        if wanted := re.search(r"^# idx: (\d+) (\d+) (\d+)$", text, re.MULTILINE):
            write_idx(folder, *map(int, wanted.groups()))

    def end(self, started):
        folder, process = started
        code = process.wait(timeout=600)
        return Ran(code, (folder / "said").read_text(), folder)

    def fit(self, text, *args, **more):
        return self.end(self.start(text, *args, **more))

    def plan(self, text, *args):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.root))
        self.write(folder, text)
        command = [self.trainer, "plan", "job.toml", "--device", "cuda", "--json", *args]
        return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout)

    def until_step(self, started, step):
        """Waits until a run under way has made so many updates."""
        folder, process = started
        events = folder / "run" / "events.jsonl"
        while process.poll() is None:
            lines = events.read_text().splitlines(keepends=True) if events.exists() else []
            made = [e["step"] for e in map(json.loads, filter(lambda l: l.endswith("\n"), lines)) if e["event"] == "step"]
            if made and made[-1] >= step:
                return
            time.sleep(0.02)

    # The trials: each gives what it saw, and fails by an assertion.

    def limits(self):
        """The pool's limit lowered in ten steps from what the job takes until nothing fits."""
        ample = self.fit(self.gpt(4))
        self.captured(ample)
        most = self.plan(self.gpt(4))["peak"]["vram_bytes"]
        least = self.plan(self.gpt(4, 'vram = "1MiB"'))["peak"]["vram_bytes"]
        seen, found = [], 0
        for i in range(10):
            limit = most - (most - least + 4 * MIB) * i // 9
            ran = self.fit(self.gpt(4, f'vram = "{limit}B"'))
            found += len(ran.named("oom"))
            seen.append(ran.code)
            assert ran.code in (0, 3), f"exit code {ran.code} at {limit}: {ran.said}"
            if ran.code == 0:
                assert ran.digest() == ample.digest(), f"other samples at {limit}"
            else:
                assert "hint:" in ran.said and "memory." in ran.said, ran.said
        assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 3, seen
        return f"{most} to {limit} bytes: exit codes {seen}, {found} out of memory by the driver on the way"

    def neighbour_before(self):
        """Another process has most of the card when the run begins."""
        job = self.gpt(4)
        ample = self.fit(job)
        needs = ample.named("planned")[0]["plan"]["peak"]["vram_bytes"]
        context = ample.named("planned")[0]["plan"]["context_bytes"]
        with neighbour(context + needs * 3 // 4):
            ran = self.fit(job)
        plan = ran.named("planned")[0]["plan"]
        assert ran.code == 0, ran.said
        assert plan["verdict"] == "fits_after_shrink", plan["verdict"]
        assert ran.digest() == ample.digest()
        return f"{needs} bytes wanted, {plan['budget']['vram_bytes']} left, planned {plan['peak']['vram_bytes']}"

    def neighbour_during(self):
        """Another process takes all that is free once the run is under way."""
        job = self.gpt(60, "supervise = false")
        ample = self.fit(job)
        started = self.start(job)
        # By then there is a graph; others are captured, with nothing free, for the evaluation's end and a short batch.
        self.until_step(started, 5)
        started[1].send_signal(signal.SIGSTOP)
        with neighbour(0) as taken:
            assert started[1].poll() is None, "it ended before"
            started[1].send_signal(signal.SIGCONT)
            ran = self.end(started)
        assert ran.code == 0, ran.said
        self.captured(ample, ran)
        assert ran.digest() == ample.digest(), "other samples"
        lacked = [(event["step"], event["phase"]) for event in ran.named("oom")]
        assert not lacked, f"{taken} bytes taken; out of memory at {lacked}"
        assert ran.weights() == ample.weights(), "other weights"
        return f"{taken} bytes taken after update 5; no out of memory, equal bits"

    def injected(self):
        """Every phase runs out of memory at some point of a run, and `verify` compares what comes of it."""
        job = self.gpt(3).replace("every_steps = 20", "every_steps = 1")
        ample, lacked = self.fit(job), []
        # One in each run: an update in the smallest micro-batches takes thousands of asks.
        for ask in range(100, 460, 23):
            ran = self.fit(job, env={"TRAINER_FAULT_ASK": str(ask)})
            assert ran.code == 0, ran.said
            assert ran.digest() == ample.digest()
            lacked += [event["phase"] for event in ran.named("oom")]
        phases = sorted(set(lacked))
        assert {"backward", "eval", "forward"} <= set(phases), phases
        for name in ("gpt", "resnet", "mlp"):
            # In f32: with less, the keys' biases, whose gradient is 0 but for rounding, go where it takes them.
            command = [self.trainer, "verify", str(HERE / "configs" / f"{name}.toml"), "--device", "cuda", "-q"]
            command += ["--set", "train.precision=f32"]
            proof = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            assert proof.returncode == 0, f"{name}: {proof.stdout}{proof.stderr}"
        return f"{len(lacked)} out of memory in {', '.join(phases)}; verified gpt, resnet, mlp"

    def precision(self):
        """The losses of 200 updates in bf16 and f16 follow those in f32."""
        told, wrong = [], []
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
                ran = self.fit(text, *args, *more)
                assert ran.code == 0 and len(ran.losses()) == 200, ran.said
                return [sum(ran.losses()[i : i + 20]) / 20 for i in range(0, 200, 20)]

            kinds = [("f32", 1), *(("f32", rate) for rate in RATES), *((kind, 1) for kind in PRECISION)]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                exact, *others = pool.map(losses, kinds)
            far = [max(abs(a - b) for a, b in zip(other, exact)) / exact[0] for other in others]
            itself = max(far[: len(RATES)])
            told.append(f"{name} f32 {100 * itself:.2f} %")
            for (kind, bound), far in zip(PRECISION.items(), far[len(RATES) :]):
                told.append(f"{name} {kind} {100 * far:.2f} %")
                wrong += [told[-1]] if far > max(bound, itself) else []
        assert not wrong, f"{', '.join(wrong)} of {', '.join(told)}"
        return ", ".join(told)

    def plans(self):
        """The plan of every job is at least the pool's high-water mark, and at most 2 % above it."""
        jobs = sorted(pathlib.Path(self.jobs).glob("*.toml"))
        assert jobs, f"no jobs in {self.jobs}"

        def above(path):
            text, args = path.read_text(), []
            if "recompute" in path.stem:
                needs = self.plan(text)["peak"]["vram_bytes"]
                tight = f"memory.vram={needs - MIB}B"
                if self.plan(text, "--set", tight)["verdict"] != "does_not_fit":
                    args = ["--set", tight]
            ran = self.fit(text, *args)
            assert ran.code == 0, f"{path.stem}: {ran.said}"
            end = ran.named("finished")[0]
            return path.stem, end["planned_peak_bytes"]["vram"], end["measured_peak_bytes"]["vram"], len(ran.named("oom"))

        with concurrent.futures.ThreadPoolExecutor(self.beside) as pool:
            rows = sorted(pool.map(above, jobs), key=lambda row: row[1] / row[2])
        for name, planned, measured, ooms in rows:
            print(f"  {name}: planned {planned}, measured {measured}, {100 * (planned / measured - 1):+.2f} %, {ooms} oom")
        wrong = [row[0] for row in rows if not row[2] <= row[1] <= 1.02 * row[2]]
        assert not wrong, wrong
        worst = max(row[1] / row[2] - 1 for row in rows)
        return f"{len(rows)} jobs, never below, at most {100 * worst:.2f} % above"

    def interrupted(self):
        """Ctrl-C and kill -9 in the middle, then going on: equal bits."""
        job = self.gpt(60, "supervise = false")
        ample = self.fit(job)
        codes = []
        for number in (signal.SIGINT, signal.SIGKILL):
            started = self.start(job)
            self.until_step(started, 25)
            started[1].send_signal(number)
            stopped = self.end(started)
            codes.append(stopped.code)
            self.captured(ample, stopped)
            ran = self.fit(None, "--resume", folder=started[0])
            assert ran.code == 0, ran.said
            assert ran.weights() == ample.weights(), f"other weights after {number.name}"
            assert ran.digest() == ample.digest()
        assert codes == [130, -signal.SIGKILL], codes
        return f"exit codes {codes}, then equal weights and state"

    def growing(self):
        """A run that shrank for one out of memory takes its larger way again."""
        job = self.gpt(120).replace("every_steps = 20", "every_steps = 120")
        wanted = ["cuda_graph_captured", "oom", "shrunk", "grown"]
        # A micro-batch makes some 200 reservations before its graph is captured, and one from then on.
        for ask in range(400, 4000, 150):
            ran = self.fit(job, env={"TRAINER_FAULT_ASK": str(ask)})
            assert ran.code == 0, ran.said
            told = [event["event"] for event in ran.named(*wanted)]
            if told == wanted and ran.named("oom")[0]["step"] > 3:
                break
        else:
            raise AssertionError(f"at no ask: {', '.join(wanted)}; at the last {told}")
        first, last = ran.named("step")[0], ran.named("step")[-1]
        assert first["micro_batch"] == last["micro_batch"], (first, last)
        at = [event["step"] for event in ran.named("shrunk", "grown")]
        return f"micro-batch {first['micro_batch']}, shrunk after update {at[0]}, grown after {at[1]}"

    def offload(self):
        """Optimizer state and inputs of blocks in host memory change no bit, nor does going on with them."""
        job = self.gpt(6, "{memory}")
        told = []
        for kind in ("adamw", "lion", "sgd"):
            text = job.replace('kind = "adamw"', f'kind = "{kind}"' + ("\nmomentum = 0.9" if kind == "sgd" else ""))
            ample = self.fit(text.format(memory=""))
            needs = ample.named("planned")[0]["plan"]["peak"]["vram_bytes"]
            away = self.fit(text.format(memory=f'vram = "{needs - 1}B"\non_oom = ["offload"]'))
            assert away.code == 0, away.said
            chosen = away.named("planned")[0]["plan"]["chosen"]
            assert chosen["offload"] == ["optimizer_state"], chosen
            assert away.weights() == ample.weights(), f"{kind}: other weights or state"
            told.append(kind)
        # Deep enough that the inputs of all blocks are more than all else.
        deep = job.replace("layers = 6", "layers = 24").replace("vocab = 2048", "vocab = 256")
        ample = self.fit(deep.format(memory=""))
        both = 'on_oom = ["recompute", "offload"]\nvram = "{}B"'
        least = self.plan(deep.format(memory=both.format(MIB)))["peak"]["vram_bytes"]
        ran = self.fit(deep.format(memory=both.format(least)), "--max-steps", "3")
        ran = self.fit(None, "--resume", folder=ran.folder)
        assert ran.code == 0, ran.said
        chosen = ran.named("planned")[-1]["plan"]["chosen"]
        assert "activations" in chosen["offload"] and chosen["recompute"] > 0, chosen
        assert ran.weights() == ample.weights(), "inputs of blocks away: other weights or state"
        told.append(f"with {chosen['recompute']} blocks' inputs away too, across a resume")
        return "equal bits: " + ", ".join(told)

    def graphs(self):
        """CUDA graphs change no bit, with short batches and evaluations in between; nor does a resume."""
        told, short = [], ["--set", "data.train_samples=500"]
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
            plain = self.fit(text, *args, "--set", "memory.graphs=false")
            again = self.fit(text, *args)
            half = self.fit(text, *args, "--max-steps", "30")
            half = self.fit(None, *args, "--resume", folder=half.folder)
            for ran in (plain, again, half):
                assert ran.code == 0, f"{name}: {ran.said}"
                assert ran.weights() == plain.weights(), f"{name}: other weights or state"
                assert ran.losses()[-1] == plain.losses()[-1], name
                assert not ran.named("oom"), f"{name}: {ran.named('oom')}"
            assert not plain.named("cuda_graph_captured"), name
            self.captured(again)
            told.append(f"{name} {again.named('cuda_graph_captured')[0]['launches']}")
        return "equal bits: " + ", ".join(told)

    def shapes(self):
        """Jobs with large single tensors, odd shapes and tight budgets: no OOM while the plan fits, and equal runs."""
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
        told, wrong = [], []

        def one(item):
            name, text = item
            found = []
            ample = self.fit(text)
            runs = [("ample", ample)]
            if ample.code == 0:
                peak = ample.named("planned")[0]["plan"]["peak"]["vram_bytes"]
                for part in (1.0, 0.7, 0.5):
                    more = ["--set", f"memory.vram={int(peak * part)}B"]
                    if self.plan(text, *more)["verdict"] != "does_not_fit":
                        runs += [(f"{part} of the peak", self.fit(text, *more)) for _ in range(2)]
            for label, ran in runs:
                if ran.code != 0 or ran.named("oom", "shrunk"):
                    found.append(f"{name}, {label}: exit code {ran.code}, {ran.named('oom', 'shrunk')} {ran.said[-200:]}")
                elif ran.digest() != ample.digest():
                    found.append(f"{name}, {label}: other samples")
            for (label, first), (_, second) in zip(runs[1::2], runs[2::2]):
                if first.code == second.code == 0 and first.weights() != second.weights():
                    found.append(f"{name}, {label}: two equal runs differ")
            heaps = [ran.named("device_heap")[0] for _, ran in runs if ran.named("device_heap")]
            graphs = sum(bool(ran.named("cuda_graph_captured")) for _, ran in runs)
            waste = max((h["arena_waste_bytes"] / max(h["arena_bytes"], 1) for h in heaps), default=0)
            synchronizes = sum(h["synchronizes"] for h in heaps)
            return found, f"{name}: {len(runs)} runs, {graphs} graphs, {100 * waste:.1f} % waste, {synchronizes} synchronizes"

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for found, line in pool.map(one, jobs.items()):
                wrong += found
                told.append(line)
        assert not wrong, "\n  ".join(wrong + told)
        return "\n  ".join(["no OOM", *told])

    def full_disk(self):
        """A disk that fills up ends the run by an error, and with more room it goes on from its last checkpoint."""
        job = self.gpt(40)
        ample = self.fit(job)
        last = ample.folder / "run" / "checkpoints" / "step-00000040"
        checkpoint = sum(file.stat().st_size for file in last.iterdir())
        folder = self.root / str(next(self.numbers))
        folder.mkdir()
        with disk(folder, checkpoint * 5 // 2) as enlarge:
            (folder / "job.toml").write_text(job)
            ran = self.fit(None, folder=folder)
            assert ran.code == 1 and "No space left on device" in ran.said, f"exit code {ran.code}: {ran.said}"
            enlarge(checkpoint * 6)
            ran = self.fit(None, "--resume", folder=folder)
            assert ran.code == 0, ran.said
            assert ran.weights() == ample.weights() and ran.digest() == ample.digest(), "other weights or samples"
            began = ran.named("resumed")[0]["step"]
        return f"exit code 1 with room for two checkpoints and a half, then on from update {began}: equal bits"


class Skipped(Exception):
    """What this machine does not let us try."""


@contextlib.contextmanager
def disk(folder, size):
    """A file system of so many bytes; what it gives makes it larger."""

    def mount(options):
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if made.returncode != 0:
            raise Skipped(f"no file system can be mounted: {made.stderr.strip()}")

    mount(f"size={size}")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@contextlib.contextmanager
def neighbour(leave):
    """A process that holds all of the card but `leave` bytes, for as long as the body runs; gives the bytes it has."""
    child = subprocess.Popen([sys.executable, __file__, "--hold", str(leave)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield int(child.stdout.readline())
    finally:
        child.stdin.close()
        child.wait()


def hold(leave):
    """The neighbour: takes memory through the driver, says how much, and waits until nobody listens."""
    cuda = ctypes.CDLL("libcuda.so.1")
    card, context, taken = ctypes.c_int(), ctypes.c_void_p(), 0
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(card), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), card),
        cuda.cuCtxSetCurrent(context),
    ):
        assert code == 0, f"the driver says {code}"
    piece = 1 << 30
    while piece >= 2 * MIB:
        free, total, at = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        if free.value < leave + piece or cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(piece)) != 0:
            piece //= 2
        else:
            taken += piece
    print(taken, flush=True)
    sys.stdin.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--trainer", default="target/cuda/release/trainer")
    parser.add_argument("--jobs", default="target/bounds", help="the folder of jobs for `plans`")
    parser.add_argument("--beside", type=int, default=2, help="jobs of `plans` at the same time")
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
                word, told = "pass", getattr(trials, name)()
            except Skipped as error:
                word, told = "skip", str(error)
            except Exception as error:  # whatever goes wrong in one, the others are tried
                word, told, failed = "FAIL", f"{type(error).__name__}: {error}", failed + 1
            print(f"{word} {label} ({time.time() - begun:.0f} s): {told}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
