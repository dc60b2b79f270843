"""Prints smaller models beside their f32 models in one table: size, gzipped size, latency and memory in other runtimes.

    python bench/runtimes.py --trainer target/release/trainer --mnist path/to/mnist --text path/to/text.txt

Trains a CNN on MNIST, prunes it to 80 %, and exports both as ONNX and TFLite in f32 and int8; trains a small GPT on
the text and exports it as GGUF. A process for each model measures it in the runtime that its format is for, with one
thread: latency is the median time of a sample or of a token, memory what the process took beyond the imported runtime
at its peak. The last column compares with what we predict from the same file: the largest difference of a
probability, or how many characters of a greedy continuation are the same. Needs numpy, and onnxruntime,
ai-edge-litert and xllamacpp; what is not installed is named and left out.
"""

import csv
import gzip
import importlib.util
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import numpy as np

import mnist

SAMPLES, REPEATS, TOKENS = 256, 300, 32
PROMPT = "ROMEO:\nWhat is the "
GPT = """
seed = {seed}
[model]
kind = "gpt"
layers = 2
heads = 4
width = 128
context = 64
[data]
kind = "text"
train = "{text}"
[train]
batch_size = 16
steps = {steps}
[log]
tensorboard = false
report = false
"""
MODULES = {"onnx": "onnxruntime", "tflite": "ai_edge_litert", "gguf": "xllamacpp"}


def onnx_model(path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda image: session.run(None, {name: image[None, None]})[0][0]


def tflite_model(path):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(path, num_threads=1)
    interpreter.allocate_tensors()
    source, result = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]

    def predict(image):
        interpreter.set_tensor(source, image[None, :, :, None])
        interpreter.invoke()
        return interpreter.get_tensor(result)[0].copy()

    return predict


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_images(load, path, images):
    before = peak_bytes()
    predict, seconds = load(path), []
    logits = [predict(image).tolist() for image in images]
    for i in range(REPEATS):
        begin = time.perf_counter()
        predict(images[i % len(images)])
        seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds), "bytes": peak_bytes() - before, "logits": logits}


def measure_gguf(path):
    import xllamacpp

    before, params = peak_bytes(), xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_predict, params.warmup, params.verbosity = 64, TOKENS, False, 0
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    body = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0.0, "top_k": 1, "cache_prompt": False}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(), headers)
    answers = [json.loads(urllib.request.urlopen(request).read()) for _ in range(9)]
    seconds = statistics.median(answer["timings"]["predicted_per_token_ms"] for answer in answers) / 1e3
    return {"seconds": seconds, "bytes": peak_bytes() - before, "text": answers[0]["content"]}


def measure(form, path, images):
    """In the process of one model."""
    importlib.import_module(MODULES[form])
    if form == "gguf":
        return measure_gguf(path)
    load = {"onnx": onnx_model, "tflite": tflite_model}[form]
    return measure_images(load, path, np.load(images))


def in_own_process(form, path, images):
    words = [sys.executable, __file__, "--measure", form, path, images]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def probabilities(logits):
    e = np.exp(logits - np.max(logits, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Table:
    def __init__(self, bench):
        self.bench, self.missing = bench, set()
        self.files = [bench.first(f"t10k-{name}-ubyte", SAMPLES) for name in ("images-idx3", "labels-idx1")]
        pixels = np.frombuffer(self.files[0].read_bytes(), np.uint8, offset=16).reshape(SAMPLES, 28, 28)
        np.save(bench.folder / "images.npy", ((pixels / 255 - 0.1307) / 0.3081).astype(np.float32))
        columns = ["model", "runtime", "weights", "file", "gzipped", "latency", "memory", "difference"]
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, label, run, form, weights, *options):
        if importlib.util.find_spec(MODULES[form]) is None:
            self.missing.add(MODULES[form])
            return
        model = self.bench.export(run, "--format", form, *options)[0]
        found = in_own_process(form, str(model), str(self.bench.folder / "images.npy"))
        apart = self.token_difference(model, found) if form == "gguf" else self.difference(model, found)
        size, packed = model.stat().st_size, len(gzip.compress(model.read_bytes(), 6))
        cells = [label, MODULES[form], weights, f"{size / 1024:.1f} KiB", f"{packed / 1024:.1f} KiB"]
        cells += [f"{found['seconds'] * 1e6:.0f} us", f"{found['bytes'] / 2**20:.1f} MiB", apart]
        print(f"| {' | '.join(cells)} |", flush=True)

    def difference(self, model, found):
        out = model.parent.name + ".csv"
        self.bench.run("predict", model.parent.name, *self.files, "--probabilities", "-o", out, "-q")
        with open(self.bench.folder / out) as file:
            ours = [[float(row[f"probability_{i}"]) for i in range(10)] for row in csv.DictReader(file)]
        return f"{np.abs(probabilities(np.array(found['logits'])) - ours).max():.1e}"

    def token_difference(self, model, found):
        words = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", str(TOKENS), "-q"]
        ours = self.bench.run("generate", model.parent.name, *words).rstrip("\n")
        theirs = found["text"]
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        return f"{same} of {len(theirs)} characters the same"


def main():
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:5])))
        return
    parser = mnist.parser(__doc__)
    parser.add_argument("--text", type=pathlib.Path, help="a text file; without it, no GPT is trained")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--gpt-steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = mnist.Bench(args, scratch)
        table, model = Table(bench), (args.seed, mnist.cnn(12, 64))
        bench.fit("dense", bench.job(*model, args.epochs))
        end = bench.steps(args.epochs) * 2 // 3
        prune = f"[prune]\ninitial = 0.5\nfinal = 0.8\nend_step = {end}\nevery_steps = 20\n"
        bench.fit("pruned", bench.job(*model, args.epochs, init="dense", rest=prune))
        for label, run in [("CNN", "dense"), ("CNN pruned to 80 %", "pruned")]:
            for form in ["onnx", "tflite"]:
                table.row(label, run, form, "f32")
                table.row(label, run, form, "int8", "--quantize", "int8")
        if args.text:
            job = GPT.format(seed=args.seed, text=args.text.resolve(), steps=args.gpt_steps)
            bench.fit("gpt", job)
            table.row("GPT", "gpt", "gguf", "f32", "--dtype", "f32")
            table.row("GPT", "gpt", "gguf", "q8_0", "--quantize", "q8_0")
            table.row("GPT", "gpt", "gguf", "q4_k_m", "--quantize", "q4_k_m")
        for name in sorted(table.missing):
            print(f"not installed: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
