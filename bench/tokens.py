"""Compares tokenisation with Python's `tokenizers`, and measures random reads of token windows.

    cargo build --release --example tokens
    python bench/tokens.py --tokenizer path/to/tokenizer.json --text path/to/text [--megabytes 50] [--rounds 3]

Needs `pip install tokenizers`. Both tokenise the same file with the same number of threads, alternating, each in its
own process; the script prints medians over the rounds. Python gets the text in pieces of about 2 kB, cut before a
single space between two words, for `encode_batch_fast`, its fastest call. Its time excludes reading and cutting the
file; ours runs from opening the file to tokens on disk. The token counts are equal if a cut changes nothing, as with
GPT-2's tokenizer (a tokenizer that prepends a token to every text yields more in Python).
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

PYTHON = """
import json, re, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
text = open(sys.argv[2], encoding="utf-8", newline="").read()
lone = re.compile(r"(?<=\\S) (?=\\S)")
pieces, start = [], 0
while start < len(text):
    found = lone.search(text, start + 2000)
    end = found.start() if found else len(text)
    pieces.append(text[start:end])
    start = end
# A few megabytes per call, so that the memory of the results does not slow Python down.
batches = [pieces[i : i + 2000] for i in range(0, len(pieces), 2000)]
start = time.perf_counter()
encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
tokens = sum(len(e.ids) for b in batches for e in encode(b, add_special_tokens=False))
print(json.dumps(dict(seconds=time.perf_counter() - start, tokens=tokens)))
"""


def run(command, threads):
    env = dict(os.environ, RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true")
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", default="target/release/examples/tokens")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True, nargs="+")
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--bin-gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = "".join(pathlib.Path(file).read_text(encoding="utf-8") for file in args.text)
        whole = folder / "text.txt"
        with open(whole, "w", encoding="utf-8", newline="") as out:
            while out.tell() < args.megabytes * 1_000_000:
                out.write(text)
        size = whole.stat().st_size
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(run([args.example, "encode", args.tokenizer, whole], args.threads))
            theirs.append(run([sys.executable, "-c", PYTHON, args.tokenizer, whole], args.threads))
        for name, rounds in (("ours", ours), ("python tokenizers", theirs)):
            seconds = statistics.median(r["seconds"] for r in rounds)
            print(f"{name:18} {size / seconds / 1e6:8.1f} MB/s  {rounds[0]['tokens']:>12,} tokens  {args.threads} threads")
        ratio = statistics.median(r["seconds"] for r in theirs) / statistics.median(r["seconds"] for r in ours)
        print(f"{'ours is faster by':18} {ratio:8.1f}")

        tokens = folder / "tokens.bin"
        block = random.Random(1).randbytes(16 << 20)
        with open(tokens, "wb") as out:
            while out.tell() < args.bin_gigabytes * (1 << 30):
                out.write(block)
        read = run([args.example, "windows", tokens, "1024", "10", str(args.threads)], args.threads)
        rate = 60 * read["windows"] / read["seconds"]
        print(f"{'windows of 1024':18} {rate / 1e6:8.1f} million a minute, from {tokens.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
