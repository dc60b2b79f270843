"""Quantizes what it trains, and prints what that costs in quality and what it saves in bytes.

    python bench/quantize.py --trainer target/release/trainer --text input.txt [--steps 5000]
    python bench/quantize.py --trainer target/release/trainer --mnist path/to/mnist [--epochs 2] [--runtimes]

With --text: a character-level GPT, its perplexity on the validation tenth in f32 and in 4 bits, rounded to the nearest
and by GPTQ, in blocks of 32 (GGUF) and of 128 (ONNX). With --mnist, or another set in its format: a MobileNet in f32 and
in 8 bits, calibrated after training and trained with rounding (`quantize.training`) for as many epochs, with all its channels
and without a fraction of them (--prune); --runtimes also runs the files in onnxruntime and LiteRT (ai-edge-litert),
whichever is installed. Accuracies are of the test set.

With --folder the runs stay there, and those that are finished are not trained again: they may come from another machine
where all paths are the same.
"""

import contextlib
import gzip
import math
import pathlib
import tempfile

import mnist

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

MOBILENET = 'kind = "mobilenet"\nwidth = {width}\nstem = "small"\ndropout = 0.0'

CHANNELS = """
[prune]
structure = "channels"
final = {final}
begin_step = {begin}
end_step = {end}
"""


def language(args, folder):
    runner = mnist.Runner(args, folder)
    runner.fit("gpt", GPT.format(text=args.text.resolve(), steps=args.steps))
    model, metrics = runner.export("gpt", "--format", "onnx", checkpoint="best")
    base = math.exp(metrics["loss"][0])
    print("| weights | perplexity | worse by | bytes |\n|---|---|---|---|")
    print(f"| f32 | {base:.4f} | | {model.stat().st_size:,} |", flush=True)
    for form, kind in [("gguf", "q4_0"), ("onnx", "int4")]:
        for rounding in ["nearest", "gptq"]:
            words = ["--format", form, "--quantize", kind, "--rounding", rounding]
            model, metrics = runner.export("gpt", *words, checkpoint="best")
            after, size = math.exp(metrics["loss"][1]), model.stat().st_size
            print(f"| {form} {kind}, {rounding} | {after:.4f} | {after / base - 1:.2%} | {size:,} |", flush=True)


def test_set(folder):
    """Images (n, 1, 28, 28), normalized, and labels."""
    import numpy

    def values(name, header):
        return numpy.frombuffer(gzip.decompress((folder / name).read_bytes()), numpy.uint8, offset=header)

    images = values("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28).astype("float32")
    return (images / 255 - 0.1307) / 0.3081, values("t10k-labels-idx1-ubyte.gz", 8)


def onnxruntime_accuracy(path, folder):
    import onnxruntime

    images, labels = test_set(folder)
    session = onnxruntime.InferenceSession(str(path))
    parts = [session.run(None, {"pixel_values": images[i : i + 500]})[0] for i in range(0, len(images), 500)]
    return sum((part.argmax(1) == labels[500 * i :][: len(part)]).sum() for i, part in enumerate(parts)) / len(labels)


def litert_accuracy(path, folder):
    from ai_edge_litert.interpreter import Interpreter

    images, labels = test_set(folder)
    runner = Interpreter(str(path)).get_signature_runner()
    images = images.transpose(0, 2, 3, 1)
    parts = [runner(pixel_values=images[i : i + 100])["logits"] for i in range(0, len(images), 100)]
    return sum((part.argmax(1) == labels[100 * i :][: len(part)]).sum() for i, part in enumerate(parts)) / len(labels)


def images(args, folder):
    bench = mnist.Bench(args, folder)
    model = (1, MOBILENET.format(width=args.width), args.epochs)
    bench.fit("floats", bench.job(*model))
    rounded = "[quantize]\ntraining = true\n"
    bench.fit("rounded", bench.job(*model, rest=rounded))
    steps = bench.steps(args.epochs)
    fewer = CHANNELS.format(final=args.prune, begin=steps // 10, end=steps // 2)
    bench.fit("fewer", bench.job(*model, rest=rounded + fewer))
    int8 = ["--quantize", "int8"]
    print("| model | accuracy | in the runtime | bytes |\n|---|---|---|---|")
    for name, run, words in [
        ("f32", "floats", []),
        ("int8, calibrated", "floats", int8),
        ("int8, trained", "rounded", int8),
        (f"int8, trained, {args.prune:.0%} of the channels pruned", "fewer", int8),
    ]:
        for form, accuracy in [("onnx", onnxruntime_accuracy), ("tflite", litert_accuracy)]:
            file, metrics = bench.export(run, "--format", form, *words)
            measured = "-"
            if args.runtimes:
                try:
                    measured = f"{accuracy(file, bench.mnist):.2%}"
                except ImportError as missing:
                    measured = f"without {missing.name}"
            cells = [f"{form}, {name}", f"{metrics['accuracy'][1]:.2%}", measured, f"{file.stat().st_size:,}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = mnist.parser(__doc__, batch_size=64, needs_mnist=False)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=5000, help="of the GPT")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=float, default=0.35, help="of the MobileNet")
    parser.add_argument("--prune", type=float, default=0.15, help="fraction of the MobileNet's channels")
    parser.add_argument("--runtimes", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the runs; trains none that is finished there")
    args = parser.parse_args()
    if not (args.text or args.mnist):
        parser.error("--text or --mnist is needed")
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        if args.text:
            language(args, folder)
        if args.mnist:
            images(args, folder)


if __name__ == "__main__":
    main()
