"""Compares training steps on a GPU with PyTorch, alternating, in one session on one machine.

    python bench/cuda.py --trainer target/release/trainer [--rounds 1] [--only gpt2-16,resnet18] [--no-peer]

Needs torch and torchvision with CUDA. Each job runs in its own process in bf16 with AdamW: PyTorch's GPTs with
torch.compile, its image models eager in channels-last, as people run them. It prints medians over the rounds: tokens
or images per second (of the median step), the peak of tensor memory in MiB, and seconds from the start of the process
to the end of the first step.
"""

import argparse
import array
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

JOBS = {
    "gpt2-16": dict(what="GPT-2 124M, 16 x 1024", batch=16, gpt=(12, 12, 768, 1024, 50257), steps=40, least=1.2),
    "gpt2-64": dict(what="GPT-2 124M, 64 x 1024", batch=64, gpt=(12, 12, 768, 1024, 50257), steps=15, least=1.15),
    "gpt-small": dict(what="GPT 10.8M, 64 x 256", batch=64, gpt=(6, 6, 384, 256, 65), steps=150, least=3.0),
    "resnet18": dict(what="ResNet-18, 32x32, batch 256", batch=256, image=32, steps=60, least=1.5),
    "resnet50": dict(what="ResNet-50, 224x224, batch 256", batch=256, image=224, steps=20, least=1.0),
    "mobilenet": dict(what="MobileNet-v2, 224x224, batch 256", batch=256, image=224, steps=20, least=1.0),
}
MODELS = {
    "resnet18": 'kind = "resnet"\ndepth = 18\nstem = "small"\nnorm_group = 256',
    "resnet50": 'kind = "resnet"\ndepth = 50\nstem = "imagenet"\nnorm_group = 256',
    "mobilenet": 'kind = "mobilenet"\nnorm_group = 256',
}


def write_data(folder, job):
    """Writes random tokens, or random images as idx files, and returns the keys of [data]."""
    rng = random.Random(1)
    if "gpt" in job:
        context, vocab = job["gpt"][3:]
        count = 4_000_000
        for part, n in (("train", count), ("valid", 8 * (context + 1))):
            ids = array.array("H", rng.choices(range(vocab), k=n))
            (folder / f"{part}.bin").write_bytes(ids.tobytes())
        lines = [f'{part} = ["{folder}/{part}.bin"]' for part in ("train", "valid")]
        return "\n".join(['kind = "tokens"', f"vocab = {vocab}", *lines])
    side = job["image"]
    lines = ['kind = "idx"']
    for part, n in (("train", 2048 if side > 32 else 8192), ("valid", 256)):
        with open(folder / f"{part}-images", "wb") as f:
            f.write(bytes([0, 0, 8, 4]) + struct.pack(">4I", n, side, side, 3))
            f.write(os.urandom(n * side * side * 3))
        with open(folder / f"{part}-labels", "wb") as f:
            f.write(bytes([0, 0, 8, 1]) + struct.pack(">I", n) + bytes(rng.randrange(10) for _ in range(n)))
        lines += [f'{part}_images = "{folder}/{part}-images"', f'{part}_labels = "{folder}/{part}-labels"']
    return "\n".join(lines)


def ours(args, name, job):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        data = write_data(folder, job)
        model = MODELS.get(name)
        if model is None:
            layers, heads, width, context, _ = job["gpt"]
            model = f'kind = "gpt"\nlayers = {layers}\nheads = {heads}\nwidth = {width}\ncontext = {context}'
        (folder / "job.toml").write_text(
            f"[model]\n{model}\n[data]\n{data}\n[train]\nbatch_size = {job['batch']}\nsteps = {job['steps']}\n"
            'precision = "bf16"\n[eval]\nevery_steps = 1000000000\n'
            "[checkpoint]\nevery_steps = 1000000000\n[log]\nevery_steps = 1\ntensorboard = false\n" + args.more
        )
        begun = time.time()
        command = [args.trainer, "fit", "job.toml", "--run-dir", "run", "--device", "cuda", "-q"]
        process = subprocess.Popen(command, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        path = folder / "run/events.jsonl"
        events = [json.loads(line) for line in open(path)] if path.exists() else []
        if status != 0:
            print(f"trainer failed on {name}: {events[-1:]}", flush=True)
            return None
        steps = [e for e in events if e["event"] == "step"]
        ms = [1000 * e["step_s"] for e in steps[len(steps) // 5 :]]
        wait = sum(e["data_wait_s"] for e in steps) / sum(e["step_s"] for e in steps)
        end = next(e for e in events if e["event"] == "finished")
        planned, measured = (end[f"{key}_peak_bytes"]["vram"] / 2**20 for key in ("planned", "measured"))
        return dict(
            ms=statistics.median(ms), mib=measured, planned=planned, first=steps[0]["t"] - begun, wait=wait,
            loss=steps[-1]["loss"],
        )


def peer(args, name, job):
    begun = time.time()
    command = [sys.executable, __file__, "--peer", name]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE)
    if process.returncode != 0:
        print(f"PyTorch failed on {name}: {process.stderr[-300:]}", flush=True)
        return None
    found = json.loads(process.stdout.splitlines()[-1])
    return dict(ms=found["ms"], mib=found["mib"], first=found["first_at"] - begun)


def run_peer(name):
    """Trains the PyTorch model of a job in this process and prints its timings as JSON."""
    job = JOBS[name]
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    b = job["batch"]
    if "gpt" in job:
        layers, heads, width, context, vocab = job["gpt"]
        from cpu import torch_gpt

        # As nanoGPT does: padding the vocabulary aligns the dimensions of the last GEMM.
        padded = -(-vocab // 64) * 64 if vocab > 1000 else vocab
        model = torch_gpt(torch, nn, F, layers, heads, width, context, padded).cuda()
        ids = torch.randint(0, vocab, (8, b, context + 1), device="cuda")
        batches = [(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
        loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x).view(-1, padded), y.view(-1)))
    else:
        import torchvision

        side = job["image"]
        if name == "mobilenet":
            model = torchvision.models.mobilenet_v2(num_classes=10)
        else:
            model = getattr(torchvision.models, name)(num_classes=10)
        if name == "resnet18":
            model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
            model.maxpool = nn.Identity()
        model = model.cuda().to(memory_format=torch.channels_last)
        make = lambda: torch.rand(b, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
        batches = [(make(), torch.randint(0, 10, (b,), device="cuda")) for _ in range(4)]
        loss_of = lambda x, y: F.cross_entropy(model(x), y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    ms, first_at = [], None
    for step in range(job["steps"]):
        x, y = batches[step % len(batches)]
        begun = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        ms.append(1000 * (time.perf_counter() - begun))
        first_at = first_at or time.time()
    mib = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(dict(ms=statistics.median(ms[len(ms) // 5 :]), mib=mib, first_at=first_at)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="target/release/trainer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--no-peer", action="store_true", help="measure only ours")
    parser.add_argument("--more", default="", help="lines to add to the job")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return run_peer(args.peer)
    args.trainer = str(pathlib.Path(args.trainer).resolve())
    print(f"{'job':<34} {'who':<8} {'ms/step':>9} {'a second':>11} {'MiB':>7} {'first s':>8} {'ratio':>6} {'memory':>7}")
    for name in args.only.split(","):
        job = JOBS[name]
        contestants = {"ours": ours} if args.no_peer else {"ours": ours, "torch": peer}
        seen = {who: [] for who in contestants}
        for _ in range(args.rounds):
            for who, run in contestants.items():
                found = run(args, name, job)
                if found:
                    seen[who].append(found)
        middle = {
            who: {key: statistics.median(f[key] for f in found) for key in found[0]}
            for who, found in seen.items()
            if found
        }
        each = job["batch"] * (job["gpt"][3] if "gpt" in job else 1)
        for who, m in middle.items():
            line = f"{job['what']:<34} {who:<8} {m['ms']:>9.2f} {1000 * each / m['ms']:>11,.0f} {m['mib']:>7.0f} {m['first']:>8.2f}"
            if who == "ours" and "torch" in middle:
                line += f" {middle['torch']['ms'] / m['ms']:>6.3f} {m['mib'] / middle['torch']['mib']:>7.2f}  wanted {job['least']},"
            if who == "ours":
                line += f" planned {m['planned']:.0f} MiB, waited {100 * m['wait']:.1f} %, loss {m['loss']:.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
