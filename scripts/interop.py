"""Checkpoints go to transformers and torchvision and come back.

    python scripts/interop.py --trainer target/release/trainer

Needs torch, torchvision, transformers and safetensors. Trains a small model of each kind for a few updates
on data made here, loads its checkpoint there by name, and compares the loss over the validation set: as the
program's own `eval` event has it, and as PyTorch computes it from the same samples. The language models also
go the other way: weights saved there are begun with here.
"""

import argparse
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

LETTERS = "".join(chr(97 + i) for i in range(20))
CONTEXT, CLASSES, SIDE, VALID = 32, 10, 32, 48


def write_text(folder):
    rng = random.Random(1)
    text = "".join(rng.choices(LETTERS, k=8000))
    (folder / "text.txt").write_text(text)
    ids = [LETTERS.index(c) for c in text]
    valid = ids[int(len(ids) * 0.9) :]
    n = (len(valid) - 1) // CONTEXT
    x = torch.tensor([valid[i * CONTEXT : (i + 1) * CONTEXT] for i in range(n)])
    y = torch.tensor([valid[i * CONTEXT + 1 : (i + 1) * CONTEXT + 1] for i in range(n)])
    return f'kind = "text"\nfiles = ["{folder}/text.txt"]', (x, y)


def write_pictures(folder):
    rng, lines = random.Random(1), ['kind = "idx"']
    for part, n in (("train", 128), ("valid", VALID)):
        pixels, labels = rng.randbytes(n * SIDE * SIDE * 3), bytes(rng.randrange(CLASSES) for _ in range(n))
        head = bytes([0, 0, 8, 4]) + struct.pack(">4I", n, SIDE, SIDE, 3)
        (folder / f"{part}-images").write_bytes(head + pixels)
        (folder / f"{part}-labels").write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", n) + labels)
        lines += [f'{part}_images = "{folder}/{part}-images"', f'{part}_labels = "{folder}/{part}-labels"']
    x = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(VALID, SIDE, SIDE, 3).permute(0, 3, 1, 2) / 255.0
    return "\n".join(lines), (x, torch.tensor(list(labels)))


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=len(LETTERS), n_positions=CONTEXT, n_embd=48, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config), f'kind = "gpt"\nlayers = 2\nheads = 4\nwidth = 48\ncontext = {CONTEXT}'


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False, rms_norm_eps=1e-6,
        rope_theta=10000.0,
    )
    keys = f'layers = 2\nheads = 4\nkv_heads = 2\nwidth = 48\nhidden = 96\ncontext = {CONTEXT}\nrope_theta = 10000.0'
    return LlamaForCausalLM(config), f'kind = "llama"\n{keys}'


def resnet():
    from torchvision.models import resnet18

    model = resnet18(num_classes=CLASSES)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model, 'kind = "resnet"\ndepth = 18\nstem = "small"\nnorm_group = 16'


def mobilenet():
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=CLASSES), 'kind = "mobilenet"\nstem = "imagenet"\nnorm_group = 16'


def fit(trainer, folder, model, data, run, extra=()):
    (folder / "job.toml").write_text(
        f"[model]\n{model}\n[data]\n{data}\n[train]\nbatch_size = 16\nsteps = 4\n[log]\ntensorboard = false\n"
    )
    command = [trainer, "fit", "job.toml", "--run-dir", run, "-q", *extra]
    subprocess.run(command, cwd=folder, check=True)
    events = [json.loads(line) for line in open(folder / run / "events.jsonl")]
    loss = [e for e in events if e["event"] == "eval"][-1]["metrics"]["valid.loss"]
    return loss, sorted((folder / run / "checkpoints").glob("step-*"))[-1] / "model.safetensors"


def theirs(model, batch):
    model.eval()
    with torch.no_grad():
        x, y = batch
        out = model(x)
        scores = getattr(out, "logits", out)
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]).double(), y.reshape(-1)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="target/release/trainer")
    trainer = str(pathlib.Path(parser.parse_args().trainer).resolve())
    failed = False
    print(f"{'model':<12} {'direction':<8} {'ours':>12} {'theirs':>12} {'apart':>9}")
    for make in (gpt, llama, resnet, mobilenet):
        torch.manual_seed(1)
        model, keys = make()
        words = make in (gpt, llama)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            data, batch = write_text(folder) if words else write_pictures(folder)
            rows = []
            if words:
                state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight" or make is llama}
                save_file(state, folder / "theirs.safetensors")
                wanted = theirs(model, batch)
                # A rate of almost nothing: the one update leaves the weights as they came.
                extra = ("--set", f"train.init={folder}/theirs.safetensors", "--set", "optimizer.lr=1e-30", "--max-steps", "1")
                rows.append(("to us", fit(trainer, folder, keys, data, "back", extra)[0], wanted))
            found, checkpoint = fit(trainer, folder, keys, data, "run")
            missing = model.load_state_dict(load_file(checkpoint), strict=False)
            lacking = [k for k in missing.missing_keys if k != "lm_head.weight" and "num_batches" not in k]
            if lacking or missing.unexpected_keys:
                sys.exit(f"{make.__name__}: lacks {lacking}, unknown {missing.unexpected_keys}")
            rows.append(("to them", found, theirs(model, batch)))
        for direction, ours, other in rows:
            apart = abs(ours - other) / abs(other)
            failed |= not apart < 1e-5
            print(f"{make.__name__:<12} {direction:<8} {ours:>12.7f} {other:>12.7f} {apart:>9.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
