"""Exchanges checkpoints with transformers and torchvision in both directions and compares the logits.

    cargo build --release --bins --examples
    python scripts/interop.py --build target/release

Needs torch, torchvision, transformers and safetensors. For each model, on generated data:

to them   trainer trains a small model for a few updates; PyTorch loads its checkpoint by name.
to us     PyTorch saves a model with other random weights and updated running statistics; a run starts from that file
          (`train.init`) and makes one update at a learning rate near zero. That update also moves batch norm's
          running statistics, so the PyTorch model sees the run's training samples once too: they are one micro-batch,
          so their order does not matter.

Both directions compare the logits of the first validation samples, ours from `examples/logits.rs`: the largest
difference relative to the largest logit. A file that lacks a parameter must be refused with the parameter's name.
"""

import argparse
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

LETTERS = "".join(chr(97 + i) for i in range(20))
CONTEXT, CLASSES, SIDE, BATCH, VALID, TOLERANCE = 32, 10, 32, 16, 48, 1e-4


def write_text(folder):
    """Returns the keys of [data], None (no running statistic depends on training samples), the validation samples."""
    text = "".join(random.Random(1).choices(LETTERS, k=8000))
    (folder / "text.txt").write_text(text)
    valid = [LETTERS.index(c) for c in text[int(len(text) * 0.9) :]]
    windows = [valid[i : i + CONTEXT] for i in range(0, len(valid) - CONTEXT, CONTEXT)]
    return f'kind = "text"\ntrain = ["{folder}/text.txt"]', None, torch.tensor(windows)


def write_images(folder):
    """Returns the keys of [data], the training samples and the validation samples."""
    rng, lines, sets = random.Random(1), ['kind = "idx"'], []
    for part, n in (("train", BATCH), ("valid", VALID)):
        pixels, labels = rng.randbytes(n * SIDE * SIDE * 3), bytes(rng.randrange(CLASSES) for _ in range(n))
        head = bytes([0, 0, 8, 4]) + struct.pack(">4I", n, SIDE, SIDE, 3)
        (folder / f"{part}-images").write_bytes(head + pixels)
        (folder / f"{part}-labels").write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", n) + labels)
        lines += [f'{part}_images = "{folder}/{part}-images"', f'{part}_labels = "{folder}/{part}-labels"']
        sets.append(torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(n, SIDE, SIDE, 3))
    return "\n".join(lines), *(pixels.permute(0, 3, 1, 2) / 255.0 for pixels in sets)


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
    return model, f'kind = "resnet"\ndepth = 18\nstem = "small"\nnorm_group = {BATCH}'


def mobilenet():
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=CLASSES), f'kind = "mobilenet"\nstem = "imagenet"\nnorm_group = {BATCH}'


class Ours:
    """A job, and the programs of this repository that run it."""

    def __init__(self, build, folder, model, data):
        self.build, self.folder = build, folder
        (folder / "job.toml").write_text(
            f"[model]\n{model}\n[data]\n{data}\n[train]\nbatch_size = {BATCH}\nsteps = 4\n[log]\ntensorboard = false\n"
        )

    def fit(self, run, *extra):
        """Trains, and returns the error message, empty on success."""
        command = [self.build / "trainer", "fit", "job.toml", "--run-dir", run, "-q", *extra]
        done = subprocess.run(command, cwd=self.folder, stderr=subprocess.PIPE, text=True)
        return done.stderr if done.returncode else ""

    def init_from(self, weights, run):
        # At this learning rate an update leaves every weight unchanged.
        extra = [f"train.init={self.folder}/{weights}", "optimizer.lr=1e-30", "train.steps=1"]
        return self.fit(run, *(word for one in extra for word in ("--set", one)))

    def checkpoint(self, run):
        return load_file(sorted((self.folder / run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")

    def logits(self, run):
        command = [self.build / "examples" / "logits", run, f"{run}.safetensors"]
        subprocess.run(command, cwd=self.folder, check=True)
        return load_file(self.folder / f"{run}.safetensors")["logits"]


def logits(model, samples):
    model.eval()
    with torch.no_grad():
        out = model(samples)
        return getattr(out, "logits", out)


def update_stats(model, samples, times):
    """Updates only the running statistics, as training does."""
    model.train()
    with torch.no_grad():
        for _ in range(times):
            model(samples)


def load(model, tensors):
    """Loads by name. Only what trainer never writes may be missing: torch's counters, and the name of a tied head."""
    result = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if getattr(getattr(model, "config", None), "tie_word_embeddings", False) else set()
    missing = [k for k in result.missing_keys if k not in tied and not k.endswith("num_batches_tracked")]
    if missing or result.unexpected_keys:
        sys.exit(f"{type(model).__name__}: missing {missing}, unknown {result.unexpected_keys}")


def exit_on(error):
    if error:
        sys.exit(error)


def compare(make, build, folder):
    """Yields each direction with our logits and theirs."""
    (model, keys), (theirs, _) = make(), make()
    data, train, valid = (write_text if make in (gpt, llama) else write_images)(folder)
    ours = Ours(build, folder, keys, data)

    exit_on(ours.fit("trained"))
    load(model, ours.checkpoint("trained"))
    yield "to them", ours.logits("trained"), logits(model, valid[:BATCH])

    if train is not None:
        update_stats(theirs, torch.randn_like(train), 5)
    shared = {"lm_head.weight"} if make is gpt else set()
    state = {name: v.contiguous().clone() for name, v in theirs.state_dict().items() if name not in shared}
    save_file(state, folder / "theirs.safetensors")
    exit_on(ours.init_from("theirs.safetensors", "begun"))
    if train is not None:
        update_stats(theirs, train, 1)
    yield "to us", ours.logits("begun"), logits(theirs, valid[:BATCH])

    lost = next(name for name in reversed(state) if name.endswith("weight"))
    save_file({name: v for name, v in state.items() if name != lost}, folder / "lacking.safetensors")
    error = ours.init_from("lacking.safetensors", "refused")
    if f"the file lacks the tensor `{lost}`" not in error:
        sys.exit(f"{make.__name__}: a file without `{lost}` should be refused: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release", help="folder of `trainer` and `examples/logits`")
    build = pathlib.Path(parser.parse_args().build).resolve()
    torch.manual_seed(1)
    failed = False
    print(f"{'model':<10} {'direction':<10} {'logits':<14} {'largest':>9} {'apart':>9}")
    for make in (gpt, llama, resnet, mobilenet):
        with tempfile.TemporaryDirectory() as folder:
            for direction, ours, theirs in compare(make, build, pathlib.Path(folder)):
                assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
                largest = theirs.abs().max().item()
                difference = (ours - theirs).abs().max().item() / largest
                failed |= not difference < TOLERANCE
                shape = " x ".join(map(str, ours.shape))
                print(f"{make.__name__:<10} {direction:<10} {shape:<14} {largest:>9.4f} {difference:>9.1e}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
