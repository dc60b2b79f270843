"""Compares training steps on the CPU with PyTorch, alternating, in one session on one machine.

    python bench/cpu.py --trainer target/release/trainer [--rounds 3] [--only mlp,cnn] [--compile]

Needs torch and torchvision (`pip install torch torchvision`). Each job runs in its own process, on all threads of
the machine, in f32, with AdamW and data in memory; a round runs every contestant once. It prints medians over the
rounds: milliseconds per step (the median step of a run), peak resident memory, and seconds from the start of the
process to the end of the first step.

    python bench/cpu.py --types [--dispatch amx,avx512,avx2,portable] [--only gpt-5000,cnn]

needs no PyTorch and measures only the trainer, in f32, bf16 and f16 under each CPU dispatch.
"""

import argparse
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

JOBS = {
    "mlp": dict(what="MLP 784-512-256-10, batch 128", steps=300, batch=128, image=(28, 28, 1), least=1.5),
    "cnn": dict(what="CNN 28x28, 32 and 64 channels, batch 64", steps=60, batch=64, image=(28, 28, 1), least=1.5),
    "resnet18": dict(what="ResNet-18 on 32x32, batch 64", steps=8, batch=64, image=(32, 32, 3), least=1.0),
    "gpt-small": dict(what="GPT 4 x 128, 12 x 64 tokens", steps=80, batch=12, gpt=(4, 4, 128, 64), least=1.4),
    "gpt-medium": dict(what="GPT 6 x 384, 4 x 256 tokens", steps=15, batch=4, gpt=(6, 6, 384, 256), least=1.2),
}
# Jobs for --types: larger GEMMs, whose time depends most on the data type, and odd shapes near the even ones.
TYPED = {
    "gpt-5000": dict(what="GPT 6 x 384, 4 x 256 tokens, 5000 words", steps=12, batch=4, gpt=(6, 6, 384, 256), vocab=5000),
    "gpt-5001": dict(what="GPT 5 x 320, 3 x 200 tokens, 5001 words", steps=12, batch=3, gpt=(5, 5, 320, 200), vocab=5001),
    "mlp": dict(what="MLP 784-2048-2048-10, batch 256", steps=40, batch=256, image=(28, 28, 1), model='kind = "mlp"\nhidden = [2048, 2048]'),
    "cnn": dict(what="CNN 28x28, 32 and 64 channels, batch 64", steps=30, batch=64, image=(28, 28, 1)),
    "cnn-odd": dict(what="CNN 32x32, 24 and 48 channels of 5x5, batch 33", steps=12, batch=33, image=(32, 32, 3),
                    model='kind = "cnn"\nhidden = [100]\nstages = [{ channels = 24, kernel = 5 }, { channels = 48, kernel = 5 }]'),
    "resnet18": dict(what="ResNet-18 on 32x32, batch 32", steps=6, batch=32, image=(32, 32, 3), model='kind = "resnet"\ndepth = 18\nstem = "small"\nnorm_group = 32'),
}
MODELS = {
    "mlp": 'kind = "mlp"\nhidden = [512, 256]',
    "cnn": 'kind = "cnn"\nhidden = [128]\nstages = [{ channels = 32 }, { channels = 64 }]',
    "resnet18": 'kind = "resnet"\ndepth = 18\nstem = "small"\nnorm_group = 64',
}
VOCAB = 65


def write_data(folder, job):
    """Writes random images as idx files, or random text, and returns the keys of [data]."""
    rng = __import__("random").Random(1)
    if "vocab" in job:
        return f'kind = "text-synthetic"\nvocab = {job["vocab"]}\ntrain_samples = 512\nvalid_samples = 4'
    if "gpt" in job:
        letters = "".join(chr(33 + i) for i in range(VOCAB))
        (folder / "text.txt").write_text("".join(rng.choices(letters, k=400_000)))
        return f'kind = "text"\ntrain = ["{folder}/text.txt"]'
    h, w, c = job["image"]
    dims = (h, w) if c == 1 else (h, w, c)
    lines = ['kind = "idx"']
    for part, n in (("train", 4096), ("valid", 64)):
        with open(folder / f"{part}-images", "wb") as f:
            f.write(bytes([0, 0, 8, 1 + len(dims)]) + struct.pack(f">{1 + len(dims)}I", n, *dims))
            f.write(rng.randbytes(n * h * w * c))
        with open(folder / f"{part}-labels", "wb") as f:
            f.write(bytes([0, 0, 8, 1]) + struct.pack(">I", n) + bytes(rng.randrange(10) for _ in range(n)))
        lines += [f'{part}_images = "{folder}/{part}-images"', f'{part}_labels = "{folder}/{part}-labels"']
    return "\n".join(lines)


def ours(args, name, job, precision="f32", environment=None):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        data = write_data(folder, job)
        model = job.get("model") or MODELS.get(name)
        if model is None:
            layers, heads, width, context = job["gpt"]
            model = f'kind = "gpt"\nlayers = {layers}\nheads = {heads}\nwidth = {width}\ncontext = {context}'
        (folder / "job.toml").write_text(
            f"[model]\n{model}\n[data]\n{data}\n[train]\nbatch_size = {job['batch']}\nsteps = {job['steps']}\n"
            f'precision = "{precision}"\n'
            f"[eval]\nevery_steps = 1000000000\nbatch_size = {job['batch']}\n"
            "[checkpoint]\nevery_steps = 1000000000\n[log]\nevery_steps = 1\ntensorboard = false\n"
        )
        begun = time.time()
        process = subprocess.Popen([args.trainer, "fit", "job.toml", "--run-dir", "run", "-q"], cwd=folder, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"trainer failed on {name}")
        events = [json.loads(line) for line in open(folder / "run/events.jsonl")]
        steps = [e for e in events if e["event"] == "step"]
        ms = [1000 * e["step_s"] for e in steps[len(steps) // 5 :]]
        wait = sum(e["data_wait_s"] for e in steps) / sum(e["step_s"] for e in steps)
        return dict(ms=statistics.median(ms), mib=usage.ru_maxrss / 1024, first=steps[0]["t"] - begun, wait=wait)


def peer(args, name, compiled):
    begun = time.time()
    command = [sys.executable, __file__, "--peer", name] + (["--compile"] if compiled else [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        return None
    found = json.loads(out.splitlines()[-1])
    return dict(ms=found["ms"], mib=usage.ru_maxrss / 1024, first=found["first_at"] - begun)


def run_peer(name, compiled):
    """Trains the PyTorch model of a job in this process and prints its timings as JSON."""
    job = JOBS[name]
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(1)
    b = job["batch"]
    if "gpt" in job:
        layers, heads, width, context = job["gpt"]
        model = torch_gpt(torch, nn, F, layers, heads, width, context)
        ids = torch.randint(0, VOCAB, (64, b, context + 1))
        batches = [(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
        loss_of = lambda x, y: F.cross_entropy(model(x).view(-1, VOCAB), y.view(-1))
    else:
        h, w, c = job["image"]
        if name == "mlp":
            model = nn.Sequential(
                nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
            )
        elif name == "cnn":
            model = nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
            )
        else:
            from torchvision.models import resnet18

            model = resnet18(num_classes=10)
            model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
            model.maxpool = nn.Identity()
        batches = [(torch.rand(b, c, h, w), torch.randint(0, 10, (b,))) for _ in range(16)]
        loss_of = lambda x, y: F.cross_entropy(model(x), y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    if compiled:
        model = torch.compile(model)
    ms, first_at = [], None
    for step in range(job["steps"]):
        x, y = batches[step % len(batches)]
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        loss.item()
        ms.append(1000 * (time.perf_counter() - begun))
        first_at = first_at or time.time()
    print(json.dumps(dict(ms=statistics.median(ms[len(ms) // 5 :]), first_at=first_at)))


def torch_gpt(torch, nn, F, layers, heads, width, context, vocab=VOCAB):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = (
                z.view(b, t, heads, width // heads).transpose(1, 2) for z in self.attn(self.ln_1(x)).split(width, 2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, width))
            return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
            self.blocks, self.ln = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
            self.head = nn.Linear(width, vocab, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.ln(x))

    return Gpt()


def types(args):
    """Prints milliseconds per step for each data type and dispatch, the median over the rounds."""
    print(f"{'job':<46} {'dispatch':<9} {'f32':>8} {'bf16':>8} {'f16':>8}  bf16/f32  f16/f32")
    for name in args.only.split(",") if args.only else TYPED:
        job = TYPED[name]
        for dispatch in args.dispatch.split(","):
            environment = dict(os.environ, TRAINER_CPU_DISPATCH=dispatch)
            seen = {precision: [] for precision in ("f32", "bf16", "f16")}
            for _ in range(args.rounds):
                for precision, found in seen.items():
                    found.append(ours(args, name, job, precision, environment)["ms"])
            f32, bf16, f16 = (statistics.median(found) for found in seen.values())
            print(
                f"{job['what']:<46} {dispatch:<9} {f32:>8.1f} {bf16:>8.1f} {f16:>8.1f} {bf16 / f32:>9.2f} {f16 / f32:>8.2f}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="target/release/trainer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="job names, separated by commas")
    parser.add_argument("--types", action="store_true", help="compare f32, bf16 and f16 under each dispatch, without PyTorch")
    parser.add_argument("--dispatch", default="amx,avx512,avx2", help="with --types")
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return run_peer(args.peer, args.compile)
    args.trainer = str(pathlib.Path(args.trainer).resolve())
    if args.types:
        return types(args)
    head = f"{'job':<42} {'who':<14} {'ms/step':>9} {'MiB':>7} {'first s':>8} {'ratio':>6} {'memory':>7}"
    print(head)
    for name in args.only.split(",") if args.only else JOBS:
        job = JOBS[name]
        contestants = {"ours": lambda: ours(args, name, job), "torch eager": lambda: peer(args, name, False)}
        if args.compile:
            contestants["torch.compile"] = lambda: peer(args, name, True)
        seen = {who: [] for who in contestants}
        for _ in range(args.rounds):
            for who, run in contestants.items():
                found = run()
                if found:
                    seen[who].append(found)
        middle = {
            who: {key: statistics.median(f[key] for f in found) for key in found[0]}
            for who, found in seen.items()
            if found
        }
        best = min(m["ms"] for who, m in middle.items() if who != "ours")
        least = min(m["mib"] for who, m in middle.items() if who != "ours")
        for who, m in middle.items():
            line = f"{job['what']:<42} {who:<14} {m['ms']:>9.2f} {m['mib']:>7.0f} {m['first']:>8.2f}"
            if who == "ours":
                line += f" {best / m['ms']:>6.2f} {m['mib'] / least:>7.2f}  wanted {job['least']}, waited {100 * m['wait']:.1f} %"
            print(line, flush=True)


if __name__ == "__main__":
    main()
