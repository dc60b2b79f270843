#!/usr/bin/env python3
"""Writes small files of one format into fuzz/corpus/TARGET as the initial corpus: `fuzz/seeds.py TARGET`."""

import io
import json
import os
import pathlib
import struct
import sys
import tarfile
import zipfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parent
FILES = ROOT.parent / "tests" / "data"
DATA = pathlib.Path(os.environ.get("TRAINER_DATA", ROOT.parent.parent / "shared/data"))


def png(side=4):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(range(3 * side)) for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tar():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in [("cat/1.png", png()), ("dog/2.png", png()), ("dog/3.cls", b"dog")]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ["cat/1.png", "dog/2.png"]:
            archive.writestr(name, png())
    return out.getvalue()


def idx(count=4, side=3):
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, count, side, side) + bytes(count * side * side)
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes([0, 1, 2])
    # The last byte is the last label and the length of the labels file.
    return images + labels + bytes([len(labels) + 1])


def tokenizer(**parts):
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 3, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": "a", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    } | parts).encode()


def chat(*turns):
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}).encode() + b"\n"


def safetensors(**tensors):
    """A safetensors file of zeros, one tensor per argument: `a__weight=("F32", [3, 4])` is `a.weight`."""
    head, end = {}, 0
    for name, (kind, shape) in tensors.items():
        size = {"F32": 4, "F64": 8}.get(kind, 2)
        for side in shape:
            size *= side
        head[name.replace("__", ".")] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def state(**parts):
    return json.dumps({
        "format": 3, "step": 1, "cursor": {"update": 1, "done": 0}, "samples": 4, "digest": "0" * 16, "seed": 1, "job": None,
        "data": None, "optimizer": "adamw",
        "runtime_plan": {"micro_batch": 4, "accumulation_steps": 1, "recompute": 0, "eval_micro_batch": 4, "prefetch": 1},
        "backoff": {"larger": [], "failures": 0, "quiet": 0}, "best": [0.5, 1],
        "evaluation_due": False, "evaluation_deferred": False,
        "grad_scaler": {"factor": 1.0, "quiet": 0, "skipped": 0, "dynamic": False},
        "metrics": {"valid.loss": None, "train.loss": 1.0}, "elapsed_s": 1.0, "data_wait_s": 0.0, "written": 0.0,
        "files": {"model.safetensors": [1, 2]},
    } | parts).encode()


SEEDS = {
    "state": lambda: [path.read_bytes() for path in sorted((ROOT.parent / "runs").rglob("state.json"))[:9]] + [state()],
    "safetensors": lambda: [
        safetensors(a__weight=(kind, [3, 4]), b__weight=(kind, [2, 3, 2, 2]), b__mean=(kind, [2]))
        for kind in ["F32", "BF16", "F16", "F64"]
    ],
    "job": lambda: [path.read_bytes() + b"\ntrain.batch_size=3" for path in (ROOT.parent / "configs").glob("*.toml")],
    "csv": lambda: [b"a,b,y\n" + b"1,x,0\n2.5,\"q,\"\"r\",1\n" * 5, b"a\ty\r\n1\t2\r\n\r\n3\tNA\r\n" * 3],
    "json": lambda: [
        b'{"a": 1.5, "b": {"c": "x"}, "y": 0}\n{"a": null, "y": 1}\n' * 3,
        b'[{"a": [1, 2], "y": "n\\u00e9"}, {"a": [3e-2, -4], "y": true}]',
        b'{"a": {"0": 1, "1": 2}, "y": {"0": 0, "1": 1}}',
    ],
    "parquet": lambda: [
        path.read_bytes() for kind in ("parquet", "feather", "arrow") for path in FILES.rglob(f"*.{kind}")
        if path.stat().st_size < 20_000
    ],
    "idx": lambda: [idx(), idx(2, 5)],
    "zip": lambda: [zipped()],
    "tar": lambda: [tar(), zlib.compress(tar(), wbits=31)],
    "images": lambda: [png(), png(9)]
    + [path.read_bytes() for path in sorted((FILES / "images").rglob("*.*")) if path.stat().st_size < 4_000]
    + [path.read_bytes() for path in sorted(DATA.rglob("*.[jJ][pP][gG]"))[:20]],
    "jsonl": lambda: [b'{"text": "a\\u00e9"}\n[1]\n' * 3],
    "chat": lambda: [
        chat(("user", "Hi"), ("assistant", "Yo")) * 3,
        b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n' * 3,
        b'{"instruction": "a", "input": "b", "output": "c"}\n' * 3,
    ],
    "text": lambda: ["some text, Über 12\n".encode() * 9],
    "template": lambda: [
        b"{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim }}{% endfor %}{% if add_generation_prompt %}x{% endif %}",
        b"{% set ns = namespace(n=0) %}{%- for m in messages[1:] -%}{% set ns.n = ns.n + loop.index %}{{ m['content'].strip()[::-1] }}{%- endfor %}{{ ns.n }}",
        b"{% macro f(a, b='x') %}{{ a ~ b }}{% endmacro %}{{ f('1') | upper | replace('X', 'y') }}{{ [1, 2] | sort | join(',') | tojson }}",
        b"{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length is odd and {'a': [none]} }}",
    ],
    "tokenizer": lambda: [
        tokenizer(),
        tokenizer(pre_tokenizer={"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
                  model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0], ["_ab", -2.0]]}),
        tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
                  pre_tokenizer={"type": "BertPreTokenizer"},
                  model={"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                         "max_input_chars_per_word": 100, "vocab": {"a": 0, "##b": 1, "ab": 2}},
                  post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                                  "pair": [], "special_tokens": {}}),
    ],
    "tokens": lambda: [struct.pack("<40H", *range(40)), struct.pack("<40I", *range(40))],
}

kind = sys.argv[1]
folder = ROOT / "corpus" / kind
folder.mkdir(parents=True, exist_ok=True)
for number, seed in enumerate(SEEDS[kind]()):
    (folder / f"seed-{number}").write_bytes(seed)
