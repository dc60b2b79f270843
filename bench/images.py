"""Compares loading JPEG files with torchvision's DataLoader, alternating, on the same files.

    python bench/images.py --example target/release/examples/images [--signs FOLDER] [--rounds 3]

Needs torch, torchvision and Pillow, and `cargo build --release --example images`. Both decode, resize to 224 x 224
(bilinear, antialiased), flip half of the images and normalise, in batches of 32 with two workers on two cores.
torchvision runs with each of its decoders (`torchvision.io.decode_jpeg`, and Pillow with the resize on the image or on
the tensor); the fastest counts. Datasets: the published 100 x 100 files, if `--signs` names their folder, and generated
500 x 375 files. It prints medians over the rounds in images per second, the ratio to the fastest, and the seconds from
the start to the first batch of a folder of 100,000 files.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SIZE, BATCH, WORKERS = 224, 32, 2
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make(folder, count, size, classes=10):
    """Writes JPEG files with the detail of photographs: smooth gradients, edges and some noise."""
    import numpy
    from PIL import Image

    rng = numpy.random.default_rng(1)
    for i in range(count):
        w, h = size
        small = rng.integers(0, 256, (12, 16, 3), dtype=numpy.uint8)
        image = numpy.asarray(Image.fromarray(small).resize((w, h), Image.BICUBIC)).astype(numpy.int16)
        for _ in range(12):
            x, y = rng.integers(0, w), rng.integers(0, h)
            image[y : y + rng.integers(5, h // 2), x : x + rng.integers(5, w // 2)] += rng.integers(-60, 60, 3)
        image += rng.normal(0, 6, image.shape).astype(numpy.int16)
        path = folder / f"class{i % classes}" / f"{i:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.clip(0, 255).astype(numpy.uint8)).save(path, quality=90)


def pin():
    """Restricts a contestant and its workers to two cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)


def ours(example, folder, seconds, size=SIZE):
    out = subprocess.run(
        [example, str(folder), str(size), str(seconds), str(WORKERS)],
        check=True, capture_output=True, text=True, preexec_fn=pin,
    )
    return json.loads(out.stdout)


def torchvision_child(how, folder, seconds):
    """Measures the DataLoader in a process of its own, whose children are the workers."""
    pin()
    import torch
    from torchvision import io
    from torchvision.datasets import DatasetFolder
    from torchvision.datasets.folder import pil_loader
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    tail = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    resize = v2.Resize((SIZE, SIZE), antialias=True)
    flip = v2.RandomHorizontalFlip()
    if how == "decode_jpeg":
        load = lambda path: io.decode_jpeg(io.read_file(path), mode=io.ImageReadMode.RGB)
        transform = v2.Compose([resize, flip, *tail])
    elif how == "pillow, resized by Pillow":
        load, transform = pil_loader, v2.Compose([resize, flip, v2.ToImage(), *tail])
    else:
        load, transform = pil_loader, v2.Compose([v2.ToImage(), resize, flip, *tail])
    dataset = DatasetFolder(folder, load, extensions=(".jpg", ".jpeg"), transform=transform)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4
    )

    def batches():
        while True:
            yield from loader

    stream = batches()
    next(stream)
    begun, images = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        images += len(next(stream)[0])
    print(json.dumps({"images_per_s": images / (time.monotonic() - begun)}))
    sys.stdout.flush()
    os._exit(0)


def theirs(how, folder, seconds):
    command = [sys.executable, __file__, "--child", how, str(folder), str(seconds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


HOWS = ["decode_jpeg", "pillow, resized by Pillow", "pillow, resized as a tensor"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", default="target/release/examples/images")
    parser.add_argument("--signs", help="folder of the class folders of the sign language digits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--files", type=int, default=100_000, help="files in the large folder; 0 for none")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        temporary = pathlib.Path(temporary)
        sets = {}
        if args.signs:
            sets["sign language digits, 100 x 100"] = pathlib.Path(args.signs)
        make(temporary / "photos", 600, (500, 375))
        sets["generated, 500 x 375"] = temporary / "photos"
        for name, folder in sets.items():
            rates = {how: [] for how in ["ours", *HOWS]}
            for _ in range(args.rounds):
                rates["ours"].append(ours(args.example, folder, args.seconds)["images_per_s"])
                for how in HOWS:
                    rates[how].append(theirs(how, folder, args.seconds)["images_per_s"])
            medians = {how: statistics.median(found) for how, found in rates.items()}
            fastest = max(medians[how] for how in HOWS)
            print(f"{name}")
            for how, rate in medians.items():
                print(f"  {how:<30} {rate:8.0f} images/s")
            print(f"  ratio to the fastest of torchvision's: {medians['ours'] / fastest:.2f} (at least 1.2)")
        if args.files:
            jpeg = next((temporary / "photos").glob("*/*.jpg")).read_bytes()
            for i in range(args.files):
                path = temporary / "many" / f"class{i % 100:02}" / f"{i:06}.jpg"
                if i < 100:
                    path.parent.mkdir(parents=True)
                path.write_bytes(jpeg)
            first = statistics.median(
                ours(args.example, temporary / "many", 0)["to_first_batch_s"] for _ in range(args.rounds)
            )
            print(f"{args.files} files: {first:.3f} s to the first batch (at most 1)")


if __name__ == "__main__":
    if "--child" in sys.argv:
        at = sys.argv.index("--child")
        torchvision_child(sys.argv[at + 1], sys.argv[at + 2], float(sys.argv[at + 3]))
    else:
        main()
