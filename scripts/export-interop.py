"""Exports models and compares their logits with those of the tools that the files are for.

    cargo build --release --bins --examples
    python scripts/export-interop.py --build target/release
    TRAINER_EXPORT_DIR=DIR cargo test --lib writes_what_other_tools_compare
    python scripts/export-interop.py --folder DIR [--golden tests/data/export-golden.json]

The first form trains a small model of each kind on generated data, also with pruned channels, pruned heads and low-rank
layers, exports it in each format and compares with the logits of `examples/logits.rs`. Of exports in integers it compares
the probabilities with those of `trainer predict`, or the validation loss of a language model with that of `trainer eval`.
Formats that cannot state a smaller model must refuse it. The second compares exports that a unit test made of models with random weights, which
covers more layers; `--golden` keeps what the tools gave, for the unit test that has no such tools, beside what it has of
tools that are not installed. Needs numpy, safetensors and what is to be compared: onnxruntime, ai-edge-litert, torch with
transformers and torchvision, xllamacpp; what is not installed is skipped and named.

A difference is relative to the largest logit. In f32 it must be below 1e-4; f16 and bf16 have the precision of their
weights. An int8 export is compared with what we compute from it, in steps of the quantization of the logits; matrices in blocks
are compared like f32, with the weights that they stand for. llama.cpp continues a prompt by 32 tokens, greedily: they must be those of the model with the weights that the
GGUF has, unless the two best logits are closer than rounding. With quantized weights, the probabilities of the first
token are compared instead.
"""

import argparse
import csv
import importlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib

import numpy as np
from safetensors.numpy import load_file

TOLERANCE = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}
# Of probabilities in llama.cpp, whose arithmetic has the type of the weights: activations are rounded to f16 or bf16 before
# a product, and to 8 bits for quantized weights. Measured with random weights: f32 2e-7 for a llama and 1e-4 for a gpt
# (its GELU is a table in f16), f16 3e-4, bf16 2e-3; rounding the activations in torch moves bf16 by 2e-3 to 5e-3. Flash
# attention, which sums in f16, is off: it alone moved f32 by 4e-4 and bf16 from 1e-3 to 2e-3. For scale: a layer in the
# wrong layout moves them by 0.1 or more, and an epsilon of 1e-2 by 0.015.
PROBABILITY_TOLERANCE = {"f32": 5e-4, "f16": 2e-3, "bf16": 8e-3}
QUANTIZED_TOLERANCE = 0.03
# Of probabilities, or of a validation loss as a fraction, from matrices in blocks, whose products are in f32.
BLOCK_TOLERANCE = 1e-4
# Of int8 logits, in their own steps. A runtime rounds in integers what we round in floats: a value that lies between two
# steps may go to the other one, and with each layer that follows.
INT8_STEPS = 12
NEW_TOKENS = 32
CONTEXT, SIDE, BATCH, CLASSES = 64, 16, 16, 4
LETTERS = "\n abcdefghijklmnopqrstuvwxyz"
GPT = f"layers = 2\nheads = 2\nwidth = 64\ncontext = {CONTEXT}"
LLAMA = f"layers = 2\nheads = 4\nkv_heads = 2\nwidth = 64\nhidden = 96\ncontext = {CONTEXT}"
# By the name of a case, which starts with the kind of its model.
CASES = {
    "mlp": "hidden = [24]",
    "cnn": "hidden = [16]\nstages = [{ channels = 8, norm = 'batch' }, { channels = 8, norm = 'group' }]\nnorm_group = 4",
    "resnet": "depth = 18\nstem = 'small'\nnorm_group = 4",
    "mobilenet": "width = 0.35\nstem = 'small'\nnorm_group = 4",
    "vit": "patch = 4\nlayers = 2\nheads = 2\nwidth = 32",
    "gpt": GPT,
    "gpt-bytes": GPT,
    "gpt-bpe": GPT,
    "llama": LLAMA,
    "llama-bpe": LLAMA,
    "llama-sentencepiece": LLAMA,
    "bert": f"layers = 2\nheads = 2\nwidth = 32\nhidden = 64\ncontext = {CONTEXT}",
    "layers": "layers = [{ kind = 'conv', channels = 8, padding = 1 }, { kind = 'silu' }, { kind = 'global_pool' }]",
}
# Models of which half of the channels or heads are pruned, and models with low-rank layers.
SMALLER = ["mlp+channels", "cnn+channels", "resnet+channels", "mobilenet+channels", "vit+channels", "vit+heads",
           "gpt+channels", "gpt+heads", "llama+channels", "llama+heads", "bert+channels", "bert+heads",
           "mlp+lowrank", "cnn+lowrank", "resnet+lowrank", "mobilenet+lowrank", "vit+lowrank", "gpt+lowrank",
           "llama+lowrank", "bert+lowrank"]
CASES |= {name: CASES[name.split("+")[0]] for name in SMALLER}
# What tokenizers must agree on.
TEXTS = ["the quick fox", " two  spaces", "naïve café €5", "line\n\nline\ttab 12345", "don't, can't; won't!", "日本語 🦊"]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FORMATS = {
    "hf": ("gpt", "llama", "bert", "vit", "resnet", "mobilenet"),
    "onnx": ("mlp", "cnn", "resnet", "mobilenet", "vit", "gpt", "llama", "bert", "layers"),
    "gguf": ("gpt", "llama"),
    "tflite": ("mlp", "cnn", "resnet", "mobilenet"),
}
# Exports in integers: of weights and activations, and of matrices in blocks.
INTEGERS = {
    ("onnx", "int8"): ("mlp", "cnn", "resnet", "mobilenet", "vit", "gpt", "llama", "bert"),
    ("onnx", "int4"): ("vit", "gpt", "llama", "bert"),
    ("tflite", "int8"): ("mlp", "cnn", "resnet", "mobilenet"),
    ("gguf", "q8_0"): ("gpt", "llama"),
    ("gguf", "q4_0"): ("gpt", "llama"),
}


def installed(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Case:
    """A model: its exports, an input, and our logits for it."""

    def __init__(self, name, kind, exports, inputs, logits, lengths=None, texts=None, int8=None, blocks=None,
                 ours=None, targets=None):
        self.name, self.kind, self.exports, self.lengths = name, kind, exports, lengths
        self.inputs, self.logits, self.texts = inputs, logits, texts
        # Our logits of an export in integers, and their step.
        self.int8 = int8
        # Our logits of matrices in blocks, by their type.
        self.blocks = blocks
        # By format and type: our probabilities of an export in integers, or its validation loss on `targets`.
        self.ours, self.targets = ours or {}, targets

    @property
    def mask(self):
        if self.lengths is None:
            return np.ones(self.inputs.shape, np.int64)
        return (np.arange(self.inputs.shape[1])[None] < np.array(self.lengths)[:, None]).astype(np.int64)


# Other tools.


def run_onnx(case, folder):
    ort = installed("onnxruntime")
    onnx = installed("onnx")
    if onnx:
        onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    options = ort.SessionOptions()
    # Matrices in blocks are multiplied with activations in f32; by default onnxruntime rounds them to 8 bits too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = lambda rows: {name: (case.mask if name == "attention_mask" else case.inputs)[rows] for name in names}
    logits = session.run(None, feed(slice(None)))[0]
    # Another batch, and for language models another length: both are dynamic.
    one = session.run(None, feed(slice(0, 1)))[0]
    np.testing.assert_allclose(one, logits[:1], atol=1e-4 * np.abs(logits).max())
    if case.kind in ("gpt", "llama"):
        short = session.run(None, {names[0]: case.inputs[:, :5]})[0]
        np.testing.assert_allclose(short, logits[:, :5], atol=1e-4 * np.abs(logits).max())
    metadata = session.get_modelmeta().custom_metadata_map
    assert {"preprocessing", "inputs", "job"} <= set(metadata), metadata.keys()
    return logits


def rounded_onnx(case):
    """What the graph in f32 gives with its weights rounded to f16: an export in f16 computes the same in f32."""
    onnx, ort = installed("onnx"), installed("onnxruntime")
    model, half = (onnx.load(str(case.exports["onnx", dtype] / "model.onnx")) for dtype in ("f32", "f16"))
    names = {tensor.name for tensor in half.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
    for tensor in model.graph.initializer:
        if tensor.name in names:
            value = onnx.numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {value.name: case.mask if value.name == "attention_mask" else case.inputs for value in session.get_inputs()}
    return session.run(None, feed)[0]


def run_tflite(case, folder):
    litert = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = litert.Interpreter(str(folder / "model.tflite"))
    inputs = case.inputs.transpose(0, 2, 3, 1) if case.inputs.ndim == 4 else case.inputs
    logits = []
    # One sample and all of them: the batch is dynamic.
    for rows in (inputs[:1], inputs):
        index = interpreter.get_input_details()[0]["index"]
        interpreter.resize_tensor_input(index, rows.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(index, np.ascontiguousarray(rows))
        interpreter.invoke()
        logits.append(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).copy())
    np.testing.assert_allclose(logits[0], logits[1][:1], atol=1e-4 * np.abs(logits[1]).max())
    assert list(interpreter.get_signature_list()) == ["serving_default"]
    return logits[1]


def run_hf(case, folder):
    torch = installed("torch")
    with torch.no_grad():
        if case.kind in ("resnet", "mobilenet"):
            # The lines of the model card.
            lines = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]
            names = {}
            before = os.getcwd()
            os.chdir(folder)
            exec(lines, names)
            os.chdir(before)
            return names["model"].eval()(torch.tensor(case.inputs)).numpy()
        transformers = installed("transformers")
        classes = {
            "gpt": transformers.AutoModelForCausalLM,
            "llama": transformers.AutoModelForCausalLM,
            "bert": transformers.AutoModelForSequenceClassification,
            "vit": transformers.AutoModelForImageClassification,
        }
        model, info = classes[case.kind].from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        problems = {key: value for key, value in info.items() if value and key != "error_msgs"}
        assert not problems, problems
        extra = {"attention_mask": torch.tensor(case.mask)} if case.kind == "bert" else {}
        if case.kind in ("gpt", "llama", "bert"):
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            ours = installed("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
            for text in case.texts or ["".join(ours.id_to_token(int(i)) for i in case.inputs[0])]:
                ids = theirs.encode(text, add_special_tokens=False)
                assert ids == ours.encode(text, add_special_tokens=False).ids, (text, ids)
        return model.eval()(torch.tensor(case.inputs), **extra).logits.numpy()


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def compare_integers(case, form, dtype, theirs):
    """Probabilities of classes with our own, or the loss of a language model with our own."""
    ours, p = case.ours[form, dtype], softmax(theirs.astype(np.float64))
    if case.targets is not None:
        loss = -np.log(np.take_along_axis(p, case.targets[..., None], -1)).mean()
        difference, what = abs(loss - ours) / ours, f"of the loss {ours:.4f}"
        return f"{difference:.1e} {what}", difference < BLOCK_TOLERANCE
    difference = np.abs(p - ours).max()
    if case.kind not in INTEGERS["tflite", "int8"]:
        return f"{difference:.1e} of a probability", difference < BLOCK_TOLERANCE
    # Probabilities give the logits up to a constant; those of the runtime are multiples of their step.
    apart = np.diff(np.unique(theirs))
    step = apart[apart > 1e-6 * np.abs(theirs).max()].min()
    centered = lambda values: values - values.mean(-1, keepdims=True)
    steps = np.abs(centered(theirs) - centered(np.log(np.maximum(ours, 1e-30)))).max() / step
    return f"{steps:.1f} steps, {difference:.1e} of a probability", steps <= INT8_STEPS


def greedy(model, prompt, never):
    """Continues `prompt` in torch, without the token `never`. Also gives the probabilities of the first new token, and
    how close the second best came to each."""
    torch = installed("torch")
    ids, gaps, first = list(prompt), [], None
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids])).logits[0, -1]
            first = torch.softmax(logits, 0).numpy().copy() if first is None else first
            scale = logits.abs().max()
            logits[never] = -float("inf")
            best = torch.topk(logits, 2).values
            gaps.append(((best[0] - best[1]) / scale).item())
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :], first, gaps


def gguf_model(case, folder, dtype):
    """The model in torch with the weights of a GGUF: those that a unit test read back, or else the matrices in its type.
    The `hf` folder of the type has others, because a GGUF keeps vectors and position embeddings in f32."""
    torch, transformers = installed("torch"), installed("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(case.exports["hf", "f32"], dtype=torch.float32)
    read_back = folder.with_name(folder.name + ".safetensors")
    if read_back.exists():
        weights = {name: torch.tensor(value) for name, value in load_file(read_back).items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
    else:
        half = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "wpe" not in name:
                weight.data = weight.data.to(half).float()
    return model.eval()


def compare_gguf(case, folder, dtype):
    """Tokens, and probabilities of the first: quantized weights are multiplied with quantized activations, so that the
    tokens of a model with random weights soon differ."""
    prompt, theirs, probabilities, end = run_gguf(case, folder)
    ours, first, gaps = greedy(gguf_model(case, folder, dtype), prompt, end)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), NEW_TOKENS)
    tie = same < NEW_TOKENS and gaps[same] < 1e-3
    apart = max(abs(first[id] - p) for id, p in probabilities.items())
    quantized = dtype not in TOLERANCE
    passed = len(theirs) == NEW_TOKENS and apart < PROBABILITY_TOLERANCE.get(dtype, QUANTIZED_TOLERANCE)
    passed &= quantized or same == NEW_TOKENS or tie
    kept = {"prompt": prompt, "tokens": theirs, "end": end}
    return f"{same} of {NEW_TOKENS} tokens{', then a tie' if tie else ''}, p {apart:.1e}", passed, kept


def run_gguf(case, folder):
    """Continues a prompt in llama.cpp. Gives its tokens, the continuation, the probabilities of the first new token and
    the end-of-text token."""
    xllamacpp, tokenizers = installed("xllamacpp"), installed("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(case.exports["hf", "f16"] / "tokenizer.json"))
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_ctx, params.n_predict, params.warmup, params.verbosity = CONTEXT, NEW_TOKENS, False, 0
    params.cpuparams.n_threads = 2
    params.flash_attn_type = next(t for t in xllamacpp.llama_flash_attn_type if t.name.endswith("DISABLED"))
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type(0)  # f32
    server = xllamacpp.Server(params)

    def ask(path, body=None):
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request).read())

    prompt = [int(i) for i in case.inputs[0][:16]]
    for text in case.texts or ["".join(tokenizer.id_to_token(i) for i in prompt)]:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, ask("/tokenize", {"content": text})["tokens"]
        assert ours == theirs, f"{text!r}: {ours} here, {theirs} in llama.cpp"
    answer = ask("/completion", {
        "prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0.0, "top_k": 1, "ignore_eos": True,
        "cache_prompt": False, "return_tokens": True,
    })
    # With a bias on its token, the end of the text is missing among the probabilities.
    probs = tokenizer.get_vocab_size()
    first = ask("/completion", {"prompt": prompt, "n_predict": 1, "temperature": 0.0, "n_probs": probs})
    first = first["completion_probabilities"][0]["top_logprobs"]
    probabilities = {entry["id"]: math.exp(entry["logprob"]) for entry in first}
    # The text of a byte is no entry of a byte-level vocabulary.
    end = ask("/props")["eos_token"]
    end = [tokenizer.token_to_id(end)] if tokenizer.token_to_id(end) is not None else tokenizer.encode(end).ids
    assert len(end) == 1, end
    return prompt, answer["tokens"], probabilities, end[0]


# Sources of models.


def from_folder(folder):
    for path in sorted(folder.iterdir()):
        if not (path / "expected.json").exists():
            continue
        expected = json.loads((path / "expected.json").read_text())
        dtype = np.int64 if expected["tokens"] else np.float32
        exports = {tuple(sub.name.split("-", 1)): sub for sub in path.iterdir() if sub.is_dir()}
        yield Case(
            path.name, expected["kind"], exports,
            np.array(expected["input"], dtype).reshape(expected["input_shape"]),
            np.array(expected["logits"], np.float32).reshape(expected["logits_shape"]), expected["lengths"],
            int8=expected["int8"] and (np.array(expected["int8"]["logits"], np.float32), expected["int8"]["step"]),
            blocks=expected["blocks"] and dict(zip(("int8", "int4"), expected["blocks"])),
        )


def train_tokenizer(name, text, path):
    """A tokenizer of the family that `name` ends with."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    byte_level = lambda use_regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    if name.endswith("-sentencepiece"):
        # Like Llama 2's: the space belongs to the word, and characters without a token become bytes.
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=500, special_tokens=special))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        file = json.loads(tokenizer.to_str())
        file["pre_tokenizer"] = None
        file["added_tokens"] = file["added_tokens"][:3]
    else:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
        tokenizer.pre_tokenizer = (
            byte_level(True) if name.startswith("gpt") else pre_tokenizers.Sequence([split, byte_level(False)])
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
        tokenizer.train_from_iterator([text], trainer)
        file = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(file))
    return Tokenizer.from_file(str(path))


def write_text(name, folder):
    """Returns the keys of [data] and the validation samples, with the token that follows."""
    rng = random.Random(1)
    path = folder / "text.txt"
    keys = f'kind = "text"\ntrain = ["{path}"]'
    if name in ("gpt", "llama"):
        text = "".join(rng.choices(LETTERS, k=16000))
        encode = lambda text: [LETTERS.index(c) for c in text]
    else:
        words = "the quick brown fox doesn't jump over 12 lazy dogs, naïve café €5! can't won't line tab".split(" ")
        text = " ".join(rng.choices(words, k=8000)).replace(" fox", "\nfox")
        if name.endswith("-bytes"):
            keys, encode = keys + '\ntokens = "bytes"', lambda text: list(text.encode())
        else:
            tokenizer = train_tokenizer(name, text, folder / "tokenizer.json")
            keys += f'\ntokens = "{folder}/tokenizer.json"'
            encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    path.write_text(text)
    ids = encode(text)
    valid = ids[int(len(ids) * 0.9) :]
    return keys, np.array([valid[i : i + CONTEXT + 1] for i in range(0, len(valid) - CONTEXT, CONTEXT)])


def write_data(kind, name, folder):
    """Returns the keys of [data] and the first validation samples."""
    rng = random.Random(1)
    if kind in ("gpt", "llama"):
        return write_text(name, folder)
    if kind == "bert":
        lines = [{"text": "".join(rng.choices(LETTERS[1:], k=CONTEXT)), "label": f"c{i % CLASSES}"} for i in range(400)]
        for part, rows in (("train", lines[:300]), ("valid", lines[300:])):
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ids = np.array([[sorted(LETTERS[1:]).index(c) for c in row["text"]] for row in lines[300:]])
        keys = f'kind = "jsonl"\ntrain = ["{folder}/train.jsonl"]\nvalid = ["{folder}/valid.jsonl"]\nlabel = "label"'
        return keys, ids
    lines, pixels = ['kind = "idx"'], None
    for part, n in (("train", 64), ("valid", 48)):
        pixels, labels = rng.randbytes(n * SIDE * SIDE * 3), bytes(i % CLASSES for i in range(n))
        head = bytes([0, 0, 8, 4]) + struct.pack(">4I", n, SIDE, SIDE, 3)
        (folder / f"{part}-images").write_bytes(head + pixels)
        (folder / f"{part}-labels").write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", n) + labels)
        lines += [f'{part}_images = "{folder}/{part}-images"', f'{part}_labels = "{folder}/{part}-labels"']
    images = np.frombuffer(pixels, np.uint8).reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2)
    return "\n".join(lines), (images / np.float32(255)).astype(np.float32)


def our_integers(trainer, folder, export, kind):
    """What we compute from an export in integers: probabilities of the validation set, or its loss."""
    run = lambda *words: subprocess.run([trainer, *words], cwd=folder, check=True, capture_output=True, text=True).stdout
    if kind in ("gpt", "llama"):
        return json.loads(run("eval", export, "--json", "-q"))["metrics"]["loss"]
    files = ["valid.jsonl"] if kind == "bert" else ["valid-images", "valid-labels"]
    run("predict", export, *files, "--probabilities", "-o", "predicted.csv", "-q")
    with open(folder / "predicted.csv") as file:
        rows = list(csv.DictReader(file))
    (folder / "predicted.csv").unlink()
    names = [name for name in rows[0] if name.startswith("probability_")]
    return np.array([[float(row[name]) for name in names] for row in rows])


def trained(build, root, only):
    trainer = build / "trainer"
    for name, keys in CASES.items():
        if only not in name:
            continue
        kind, folder = re.split("[-+]", name)[0], root / name
        change = name.partition("+")[2]
        tables = {
            "": "", "lowrank": "[lowrank]\nrank = 4\n",
            **{s: f'[prune]\nstructure = "{s}"\nschedule = "constant"\nfinal = 0.5\nbegin_step = 10\n'
               for s in ("channels", "heads")},
        }
        # Sizes that these formats cannot state.
        refused = change == "lowrank" or change == "heads" and kind != "llama" or change and kind in ("resnet", "mobilenet")
        folder.mkdir()
        data, samples = write_data(kind, name, folder)
        (folder / "job.toml").write_text(
            f'[model]\nkind = "{kind}"\n{keys}\n[data]\n{data}\n[train]\nbatch_size = {BATCH}\nsteps = 20\n'
            f"[log]\ntensorboard = false\n{tables[change]}"
        )
        run = lambda *command: subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        run(trainer, "fit", "job.toml", "--run-dir", "run", "-q")
        run(build / "examples" / "logits", "run", "logits.safetensors")
        exports, ours = {}, {}
        export = lambda *words: [trainer, "export", "run", "--checkpoint", "last", *words, "-q"]
        for form, kinds in FORMATS.items():
            if kind not in kinds:
                continue
            if refused and form in ("hf", "gguf"):
                done = subprocess.run(export("--format", form, "-o", f"{form}-no"), cwd=folder, capture_output=True, text=True)
                assert done.returncode == 2 and "hint" in done.stderr, f"{name} {form}: {done.returncode} {done.stderr}"
                continue
            for dtype in ("f32",) if form == "tflite" else ("f32", "f16"):
                exports[form, dtype] = target = folder / f"{form}-{dtype}"
                run(*export("--format", form, "--dtype", dtype, "-o", target))
        for (form, dtype), kinds in INTEGERS.items():
            if kind not in kinds or refused and form == "gguf":
                continue
            exports[form, dtype] = target = folder / f"{form}-{dtype}"
            run(*export("--format", form, "--quantize", dtype, "-o", target))
            if form == "gguf":
                # The weights that we read from it, for `gguf_model`.
                run(trainer, "export", target, "--format", "hf", "-o", folder / "read-back", "-q")
                (folder / "read-back" / "model.safetensors").rename(target.with_name(target.name + ".safetensors"))
                shutil.rmtree(folder / "read-back")
            else:
                ours[form, dtype] = our_integers(trainer, folder, target, kind)
        logits, targets = load_file(folder / "logits.safetensors")["logits"], None
        if kind in ("gpt", "llama"):
            samples, targets = samples[:, :-1], samples[:, 1:]
        texts = TEXTS if "-" in name else None
        yield Case(name, kind, exports, samples, logits, texts=texts, ours=ours, targets=targets)


def golden_files(folder, form):
    """CRC-32 of the files that a tool reads."""
    names = {"hf": ["model.safetensors", "config.json"]}.get(form, [f"model.{form}"])
    return {name: zlib.crc32((folder / name).read_bytes()) for name in names if (folder / name).exists()}


def golden_logits(logits):
    """The logits of each sample, of its last position for a language model."""
    last = logits if logits.ndim == 2 else logits[:, -1]
    return [float(f"{value:.7g}") for value in last.flatten()]


def compare(case, golden):
    """Yields (format, type, result, passed) of each export, and adds what the tools gave to `golden`."""
    for (form, dtype), folder in sorted(case.exports.items()):
        needed = {
            "onnx": ["onnxruntime"], "tflite": ["ai_edge_litert"], "hf": ["torch", "transformers"],
            "gguf": ["xllamacpp", "torch"],
        }.get(form, [])
        missing = [name for name in needed if installed(name) is None]
        if form == "safetensors":
            load_file(folder / "model.safetensors") if dtype != "bf16" else None
            continue
        if missing:
            yield form, dtype, f"skipped: no {', '.join(missing)}", True
        elif form == "gguf":
            result, passed, kept = compare_gguf(case, folder, dtype)
            if dtype == "f16":
                golden[form] = {"files": golden_files(folder, form), **kept}
            yield form, dtype, result, passed
        else:
            theirs = {"onnx": run_onnx, "tflite": run_tflite, "hf": run_hf}[form](case, folder)
            if (form, dtype) in case.ours:
                yield form, dtype, *compare_integers(case, form, dtype, theirs)
                continue
            theirs = theirs[: len(case.logits)]
            assert theirs.shape == case.logits.shape, (theirs.shape, case.logits.shape)
            if case.blocks and dtype in case.blocks:
                golden[f"{form}-{dtype}"] = {"files": {}, "logits": golden_logits(theirs)}
                difference = np.abs(theirs.flatten() - case.blocks[dtype]).max() / np.abs(case.logits).max()
                lost = np.abs(theirs - case.logits).max() / np.abs(case.logits).max()
                yield form, dtype, f"{difference:.1e}, {lost:.1e} from f32", difference < TOLERANCE["f32"]
                continue
            if dtype == "int8":
                ours, step = case.int8
                # The ranges depend on how the CPU sums, and the file on the ranges.
                golden[f"{form}-int8"] = {"files": {}, "logits": golden_logits(theirs)}
                steps = np.abs(theirs.flatten() - ours).max() / step
                lost = np.abs(theirs - case.logits).max() / np.abs(case.logits).max()
                yield form, dtype, f"{steps:.0f} steps, {lost:.1e} from f32", steps <= INT8_STEPS
                continue
            if dtype == "f32":
                golden[form] = {"files": golden_files(folder, form), "logits": golden_logits(theirs)}
            difference = np.abs(theirs - case.logits).max() / np.abs(case.logits).max()
            if (form, dtype) == ("onnx", "f16") and "+" in case.name and installed("onnx"):
                # A small model may lose more than the tolerance to the rounding of its weights, and nothing to the graph.
                exact = np.abs(theirs - rounded_onnx(case)[: len(theirs)]).max() / np.abs(case.logits).max()
                yield form, dtype, f"{difference:.1e}, {exact:.1e} from rounded", exact < TOLERANCE["f32"]
                continue
            yield form, dtype, f"{difference:.1e}", difference < TOLERANCE[dtype]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--build", type=pathlib.Path, help="folder of `trainer` and `examples/logits`")
    source.add_argument("--folder", type=pathlib.Path, help="what the unit test wrote")
    parser.add_argument("--golden", type=pathlib.Path, help="where to keep what the tools gave")
    parser.add_argument("--only", default="", help="part of the name of the cases to compare")
    arguments = parser.parse_args()
    failed, golden = False, {}
    with tempfile.TemporaryDirectory() as root:
        cases = (
            from_folder(arguments.folder) if arguments.folder
            else trained(arguments.build.resolve(), pathlib.Path(root), arguments.only)
        )
        for case in cases:
            if arguments.only not in case.name:
                continue
            for form, dtype, result, passed in compare(case, golden.setdefault(case.name, {})):
                failed |= not passed
                print(f"{case.name:<16} {form:<6} {dtype:<7} {result:<40} {'' if passed else 'FAILED'}", flush=True)
    if arguments.golden and not failed:
        kept = json.loads(arguments.golden.read_text()) if arguments.golden.exists() else {}
        for name, formats in golden.items():
            kept.setdefault(name, {}).update(formats)
        kept = {name: dict(sorted(formats.items())) for name, formats in sorted(kept.items())}
        arguments.golden.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
