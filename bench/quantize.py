"""Quantizes what it trains, and prints what that costs in quality and what it saves in bytes.

    python bench/quantize.py --trainer target/release/trainer --text input.txt [--steps 2000]
    python bench/quantize.py --trainer target/release/trainer --mnist path/to/mnist [--epochs 2] [--runtimes]

With --text: a character-level GPT, its perplexity on the validation tenth in f32 and in 4 bits, rounded to the nearest
and by GPTQ, in blocks of 32 (GGUF) and of 128 (ONNX). With --mnist, or another set in its format: a MobileNet in f32 and
in 8 bits, calibrated after training and trained with rounding (`quantize.training`) for as many epochs; --runtimes also
runs the files in onnxruntime and LiteRT (ai-edge-litert), whichever is installed. Accuracies are of the test set.
"""

import argparse
import gzip
import json
import math
import pathlib
import subprocess
import tempfile

GPT = """
seed = 1
[model]
kind = "gpt"
layers = 4
heads = 4
width = 128
context = 128
[data]
kind = "text"
train = ["{text}"]
valid_fraction = 0.1
tokens = "characters"
[train]
batch_size = 32
steps = {steps}
[optimizer]
kind = "adamw"
lr = 0.002
[schedule]
kind = "cosine"
warmup_steps = 100
[log]
tensorboard = false
report = false
"""

MOBILENET = """
seed = 1
[model]
kind = "mobilenet"
width = {width}
stem = "small"
dropout = 0.0
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
"""


def trainer(args, folder, *words):
    done = subprocess.run([args.trainer.resolve(), *words], cwd=folder, check=True, stdout=subprocess.PIPE)
    return done.stdout


def fit(args, folder, name, job):
    (folder / f"{name}.toml").write_text(job)
    trainer(args, folder, "fit", f"{name}.toml", "--run-dir", name, "-q")


def export(args, folder, run, name, *words):
    """Exports; returns the metrics of the model and of the export, and the bytes of its largest file."""
    done = json.loads(trainer(args, folder, "export", run, "--json", "-q", *words, "-o", name))
    metrics = {one["metric"]: (one["before"], one["after"]) for one in done["comparison"]}
    return metrics, max(file["bytes"] for file in done["files"] if file["name"].startswith("model."))


def language(args, folder):
    fit(args, folder, "gpt", GPT.format(text=args.text.resolve(), steps=args.steps))
    metrics, size = export(args, folder, "gpt", "f32", "--format", "onnx")
    base = math.exp(metrics["loss"][0])
    print("| weights | perplexity | worse by | bytes |\n|---|---|---|---|")
    print(f"| f32 | {base:.4f} | | {size:,} |", flush=True)
    for form, kind in [("gguf", "q4_0"), ("onnx", "int4")]:
        for rounding in ["nearest", "gptq"]:
            words = ["--format", form, "--quantize", kind, "--rounding", rounding]
            metrics, size = export(args, folder, "gpt", f"{kind}-{rounding}", *words)
            after = math.exp(metrics["loss"][1])
            print(f"| {form} {kind}, {rounding} | {after:.4f} | {after / base - 1:.2%} | {size:,} |", flush=True)


def test_set(mnist):
    """Images (n, 1, 28, 28), normalized, and labels."""
    import numpy

    def values(name, header):
        return numpy.frombuffer(gzip.decompress((mnist / name).read_bytes()), numpy.uint8, offset=header)

    images = values("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28).astype("float32")
    return (images / 255 - 0.1307) / 0.3081, values("t10k-labels-idx1-ubyte.gz", 8)


def onnxruntime_accuracy(path, mnist):
    import onnxruntime

    images, labels = test_set(mnist)
    session = onnxruntime.InferenceSession(str(path / "model.onnx"))
    parts = [session.run(None, {"pixel_values": images[i : i + 500]})[0] for i in range(0, len(images), 500)]
    return sum((part.argmax(1) == labels[500 * i :][: len(part)]).sum() for i, part in enumerate(parts)) / len(labels)


def litert_accuracy(path, mnist):
    from ai_edge_litert.interpreter import Interpreter

    images, labels = test_set(mnist)
    runner = Interpreter(str(path / "model.tflite")).get_signature_runner()
    images = images.transpose(0, 2, 3, 1)
    parts = [runner(pixel_values=images[i : i + 100])["logits"] for i in range(0, len(images), 100)]
    return sum((part.argmax(1) == labels[100 * i :][: len(part)]).sum() for i, part in enumerate(parts)) / len(labels)


def images(args, folder):
    mnist = args.mnist.resolve()
    job = MOBILENET.format(mnist=mnist, epochs=args.epochs, width=args.width)
    fit(args, folder, "floats", job)
    fit(args, folder, "rounded", f"{job}[quantize]\ntraining = true\n")
    int8 = ["--quantize", "int8"]
    print("| model | accuracy | in the runtime | bytes |\n|---|---|---|---|")
    for name, run, words in [
        ("f32", "floats", []),
        ("int8, calibrated", "floats", int8),
        ("int8, trained", "rounded", int8),
    ]:
        for form, accuracy in [("onnx", onnxruntime_accuracy), ("tflite", litert_accuracy)]:
            out = f"{form}-{run}-{len(words)}"
            metrics, size = export(args, folder, run, out, "--checkpoint", "last", "--format", form, *words)
            measured = "-"
            if args.runtimes:
                try:
                    measured = f"{accuracy(folder / out, mnist):.2%}"
                except ImportError as missing:
                    measured = f"without {missing.name}"
            print(f"| {form}, {name} | {metrics['accuracy'][1]:.2%} | {measured} | {size:,} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mnist", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=float, default=0.35, help="of the MobileNet")
    parser.add_argument("--runtimes", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.text:
            language(args, pathlib.Path(scratch))
        if args.mnist:
            images(args, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
