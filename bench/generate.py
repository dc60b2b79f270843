"""Compares `trainer generate` with transformers and llama.cpp on the same weights, alternating, in one session.

    python bench/generate.py --trainer target/release/trainer [--device cpu|cuda] [--models llama,gpt] [--batch 1,8]

Needs torch; transformers and, on the CPU, xllamacpp are used if they are installed. Without transformers the script's own
implementation in torch, with a static key-value cache and scaled_dot_product_attention, stands in for it and is named so.
No network is needed: the script writes a tokenizer, trains each model for one step and exports it as `hf` and `gguf`.

`llama` has the sizes of SmolLM2-135M, `gpt` is a small GPT-2. Each contestant runs in its own process with the same number
of threads and continues the same prompts greedily, once by SHORT and once by LONG tokens; the difference of the two times
gives the tokens per second of decoding, without loading, warm-up and the prompt. Medians over the rounds are printed, and
how many characters of the first text agree with ours. In bf16, llama.cpp has f16 weights, its default.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

SHORT, LONG, PROMPT = 16, 144, 32
MODELS = {
    "llama": 'kind = "llama"\nlayers = 30\nheads = 9\nkv_heads = 3\nwidth = 576\nhidden = 1536\ncontext = 256\n'
             "norm_eps = 1e-5\ntie = true",
    "gpt": 'kind = "gpt"\nlayers = 6\nheads = 8\nwidth = 512\ncontext = 256',
}
VOCABULARY = 49152
PROMPTS = [random.Random(i).choices("0123456789", k=PROMPT) for i in range(64)]


def installed(name):
    return importlib.util.find_spec(name) is not None


def tokens():
    """The text of each token, and the merges that make it. Bytes come first, so that digits, which nothing merges, have
    known ids."""
    visible = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
    letters = [chr(c) for c in range(33, 127) if not chr(c).isdigit()]
    pairs = [(a, b) for a in letters for b in letters]
    triples = [(a + b, c) for a, b in pairs for c in letters]
    merges = (pairs + triples)[: VOCABULARY - 256]
    return names + [a + b for a, b in merges], merges


def write_tokenizer(path):
    names, merges = tokens()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)}, "merges": [f"{a} {b}" for a, b in merges],
        },
    }))


def prepare(trainer, at, model, precision, device):
    """A run of one step and its exports."""
    write_tokenizer(at / "tokenizer.json")
    (at / "text.txt").write_text("".join(random.Random(1).choices("0123456789", k=4000)))
    (at / "job.toml").write_text(
        f'[model]\n{MODELS[model]}\n[data]\nkind = "text"\ntrain = ["text.txt"]\ntokens = "tokenizer.json"\n'
        f'[train]\nbatch_size = 1\nsteps = 1\nprecision = "{precision}"\n[optimizer]\nkind = "sgd"\nlr = 1e-6\n'
        "[log]\ntensorboard = false\n"
    )
    def run(*command):
        done = subprocess.run([trainer, *command, "-q"], cwd=at, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"trainer {' '.join(command)}: {done.stderr}")
    run("fit", "job.toml", "--run-dir", "run", "--device", device)
    (at / "text.txt").unlink()  # so that the exports are not evaluated
    run("export", "run", "--format", "hf", "--dtype", precision, "-o", "hf")
    run("export", "run", "--format", "gguf", "--dtype", "f32" if precision == "f32" else "f16", "-o", "gguf")


# The contestants: each gives, for a number of new tokens, the seconds and the first text.


def ours(options):
    prompts = pathlib.Path(options.folder, "prompts.txt")
    prompts.write_text("".join("".join(prompt) + "\n" for prompt in PROMPTS[: options.batch]))
    # Rayon's threads, as many as the others have.
    environment = {**os.environ, "RAYON_NUM_THREADS": str(options.threads)}

    def generate(new):
        command = [
            options.trainer, "generate", f"{options.folder}/run", "--prompts", prompts, "--batch-size", str(options.batch),
            "--temperature", "0", "--max-tokens", str(new), "--device", options.device, "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        found = re.search(r"([\d,]+) tokens in .*?, ([\d.,]+) tokens/s", done.stderr).groups()
        count, rate = (float(number.replace(",", "")) for number in found)
        assert count == options.batch * new, done.stderr
        return count / rate, json.loads(done.stdout.splitlines()[0])["text"]

    return generate


def decode(ids):
    names = tokens()[0]
    return "".join(names[i] for i in ids)


def torch_setup(options):
    import torch

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    prompts = torch.tensor([[ord(c) for c in prompt] for prompt in PROMPTS[: options.batch]], device=options.device)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    return torch, dtype, prompts, wait


def timed(generate, wait):
    def run(new):
        wait()
        begun = time.perf_counter()
        ids = generate(new)
        wait()
        return time.perf_counter() - begun, decode(ids)

    run(4)
    return run


def transformers(options):
    torch, dtype, prompts, wait = torch_setup(options)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{options.folder}/hf", dtype=dtype).to(options.device).eval()

    @torch.inference_mode()
    def generate(new):
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0, use_cache=True,
        )
        return out[0, PROMPT:].tolist()

    return timed(generate, wait)


def plain_torch(options):
    """The same models in torch, for machines without transformers."""
    torch, dtype, prompts, wait = torch_setup(options)
    functional = torch.nn.functional
    folder = pathlib.Path(options.folder, "hf")
    config, raw = json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    weights = {}
    for name, info in json.loads(raw[8 : 8 + header_bytes]).items():
        if name != "__metadata__":
            start, end = (8 + header_bytes + at for at in info["data_offsets"])
            values = torch.frombuffer(bytearray(raw[start:end]), dtype=kinds[info["dtype"]]).reshape(info["shape"])
            weights[name] = values.to(options.device, dtype)
    llama = config["model_type"] == "llama"
    layers, heads = (config[key] for key in (("num_hidden_layers", "num_attention_heads") if llama else ("n_layer", "n_head")))
    kv_heads, width = (config["num_key_value_heads"], config["hidden_size"]) if llama else (heads, config["n_embd"])
    head, batch, capacity = width // heads, options.batch, PROMPT + LONG + 1
    cache = [torch.zeros(2, batch, kv_heads, capacity, head, device=options.device, dtype=dtype) for _ in range(layers)]
    if llama:
        angles = 1 / config["rope_theta"] ** (torch.arange(0, head, 2, device=options.device).float() / head)
        angles = torch.outer(torch.arange(capacity, device=options.device).float(), angles)
        cos, sin = (torch.cat([f(angles)] * 2, 1).to(dtype) for f in (torch.cos, torch.sin))
        w = lambda layer, name: weights[f"model.layers.{layer}.{name}.weight"]
        qkv = [torch.cat([w(i, f"self_attn.{part}_proj") for part in "qkv"]) for i in range(layers)]
        gate_up = [torch.cat([w(i, f"mlp.{part}_proj") for part in ("gate", "up")]) for i in range(layers)]
        eps = config["rms_norm_eps"]
        norm = lambda x, weight: functional.rms_norm(x, (width,), weight, eps)
    else:
        w = lambda layer, name: weights[f"transformer.h.{layer}.{name}"]
        norm = lambda x, name: functional.layer_norm(
            x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_epsilon"])
        # GPT-2's weights are (in, out).
        linear = lambda x, layer, name: functional.linear(x, transposed[layer, name], w(layer, f"{name}.bias"))
        transposed = {(i, name): w(i, f"{name}.weight").t().contiguous() for i in range(layers)
                      for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}

    def attend(layer, packed, start, count):
        q, k, v = packed.split([width, kv_heads * head, kv_heads * head], 2)
        q, k, v = (part.view(batch, count, -1, head).transpose(1, 2) for part in (q, k, v))
        if llama:
            turn = lambda x: x * cos[start : start + count] + torch.cat([-x[..., head // 2 :], x[..., : head // 2]], 3) * sin[start : start + count]
            q, k = turn(q), turn(k)
        cache[layer][0, :, :, start : start + count], cache[layer][1, :, :, start : start + count] = k, v
        k, v = cache[layer][:, :, :, : start + count]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=count > 1, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2).reshape(batch, count, width)

    def step(ids, start):
        count = ids.shape[1]
        if llama:
            x = weights["model.embed_tokens.weight"][ids]
            for i in range(layers):
                packed = functional.linear(norm(x, w(i, "input_layernorm")), qkv[i])
                x = x + functional.linear(attend(i, packed, start, count), w(i, "self_attn.o_proj"))
                gate, up = functional.linear(norm(x, w(i, "post_attention_layernorm")), gate_up[i]).chunk(2, 2)
                x = x + functional.linear(functional.silu(gate) * up, w(i, "mlp.down_proj"))
            x = norm(x[:, -1], weights["model.norm.weight"])
            table = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        else:
            positions = torch.arange(start, start + count, device=options.device)
            x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][positions]
            for i in range(layers):
                block = f"transformer.h.{i}"
                packed = linear(norm(x, f"{block}.ln_1"), i, "attn.c_attn")
                x = x + linear(attend(i, packed, start, count), i, "attn.c_proj")
                hidden = functional.gelu(linear(norm(x, f"{block}.ln_2"), i, "mlp.c_fc"), approximate="tanh")
                x = x + linear(hidden, i, "mlp.c_proj")
            x = norm(x[:, -1], "transformer.ln_f")
            table = weights.get("lm_head.weight", weights["transformer.wte.weight"])
        return functional.linear(x, table).argmax(1, keepdim=True)

    @torch.inference_mode()
    def generate(new):
        out, start = [step(prompts, 0)], PROMPT
        while len(out) < new:
            out.append(step(out[-1], start))
            start += 1
        return torch.cat(out, 1)[0].tolist()

    return timed(generate, wait)


def llama_cpp(options):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = f"{options.folder}/gguf/model.gguf"
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256 * options.batch, options.batch, True, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)

    def ask(prompt, new, into):
        body = {
            "prompt": [ord(c) for c in prompt], "n_predict": new, "temperature": 0.0, "top_k": 1, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True,
        }
        request = urllib.request.Request(
            server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        into.append((prompt, json.loads(urllib.request.urlopen(request).read())["tokens"]))

    def generate(new):
        answers = []
        threads = [threading.Thread(target=ask, args=(prompt, new, answers)) for prompt in PROMPTS[: options.batch]]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return next(ids for prompt, ids in answers if prompt == PROMPTS[0])

    return timed(generate, lambda: None)


CONTESTANTS = {"ours": ours, "transformers": transformers, "plain torch": plain_torch, "llama.cpp": llama_cpp}


def measure(options):
    """Runs one contestant, in this process; prints seconds per new token of each sequence, and the first text."""
    generate = CONTESTANTS[options.worker](options)
    short, _ = generate(SHORT)
    long, text = generate(LONG)
    print(json.dumps({"seconds": (long - short) / (LONG - SHORT), "text": text}))


def agreement(a, b):
    """Characters that agree at the beginning, up to the first that is not ASCII, which texts spell differently."""
    length = 0
    for x, y in zip(a, b):
        if x != y or not x.isascii():
            break
        length += 1
    return length


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="target/release/trainer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", default="llama,gpt")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--precision", default="bf16,f32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.batch = int(options.batch)
        return measure(options)
    options.trainer = str(pathlib.Path(options.trainer).resolve())
    names = ["ours", "transformers" if installed("transformers") else "plain torch"]
    names += ["llama.cpp"] if options.device == "cpu" and installed("xllamacpp") else []
    names = options.only.split(",") if options.only else names
    print(f"{options.device}, {options.threads} threads; tokens per second of all sequences, medians of {options.rounds}")
    print(f"{'model':8} {'type':6} {'batch':>5} " + " ".join(f"{name:>24}" for name in names))
    for model in options.models.split(","):
        for precision in options.precision.split(","):
            with tempfile.TemporaryDirectory() as folder:
                prepare(options.trainer, pathlib.Path(folder), model, precision, options.device)
                for batch in options.batch.split(","):
                    seen = {name: [] for name in names}
                    for _ in range(options.rounds):
                        for name in names:
                            command = [
                                sys.executable, __file__, "--worker", name, "--folder", folder, "--batch", batch,
                                "--precision", precision, "--device", options.device, "--threads", str(options.threads),
                                "--trainer", options.trainer,
                            ]
                            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                            if done.returncode:
                                sys.exit(f"{name}: {done.stderr[-3000:]}")
                            seen[name].append(json.loads(done.stdout.splitlines()[-1]))
                    cells = []
                    for name in names:
                        seconds = statistics.median(run["seconds"] for run in seen[name])
                        same = agreement(seen[name][0]["text"], seen[names[0]][0]["text"])
                        cells.append(f"{int(batch) / seconds:>10.1f} ({same:>3} chars)  ")
                    print(f"{model:8} {precision:6} {batch:>5} " + " ".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
