#!/usr/bin/env python3
"""Augmented images as torchvision and Pillow compute them, for the unit test that compares ours value by value.

    python3 scripts/augment-golden.py > tests/data/augment.json      the cases that the repository carries
    python3 scripts/augment-golden.py --random 300 > cases.json  larger random ones, for
    TRAINER_AUGMENT_CASES=cases.json cargo test --lib torchvision

Needs torch, torchvision and Pillow. An image is the bytes of (height, width, channels) in hexadecimal.
"""

import argparse
import json
import random

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, RandAugment
from torchvision.transforms import functional as F
from torchvision.transforms.autoaugment import _apply_op

BINS = 31
# The last is large enough for a histogram to be equalized.
SIZES = [(5, 6, 3), (5, 4, 1), (1, 1, 3), (2, 3, 1), (20, 16, 1)]


def make_image(draw, height, width, channels):
    """Noise on a slope, in a part of the range, so that contrast and histograms have something to change."""
    low, high = sorted(draw.sample(range(256), 2))
    values = bytearray()
    for y in range(height):
        for x in range(width):
            slope = (x + y) / max(1, height + width - 2)
            for _ in range(channels):
                value = low + (high - low) * (0.6 * slope + 0.4 * draw.random())
                values.append(int(value))
    if draw.random() < 0.5:
        values[draw.randrange(len(values))] = 255
    mode, size = ("L" if channels == 1 else "RGB"), (width, height)
    return Image.frombytes(mode, size, bytes(values))


def blurred(image, kernel, sigma):
    return F.gaussian_blur(image, [kernel, kernel], [sigma, sigma])


def case(name, parameters, result):
    return {"name": name, **parameters, "expected": result.tobytes().hex()}


def affine_case(draw, image):
    parameters = {
        "degrees": round(draw.uniform(-180, 180), 3),
        "translate": [draw.randint(-2, 2), draw.randint(-2, 2)],
        "scale": round(draw.uniform(0.5, 2), 3),
        "shear": [round(draw.uniform(-40, 40), 3), 0.0],
    }
    result = F.affine(
        image,
        angle=parameters["degrees"],
        translate=parameters["translate"],
        scale=parameters["scale"],
        shear=parameters["shear"],
        interpolation=InterpolationMode.BILINEAR,
    )
    return case("Affine", parameters, result)


def blur_case(draw, image):
    # torchvision needs a kernel whose half is below each side.
    most = min(image.width, image.height) - 1
    kernel = 2 * draw.randint(0, min(most, 8)) + 1
    sigma = round(draw.uniform(0.1, 3), 3)
    return case("Blur", {"kernel": kernel, "sigma": sigma}, blurred(image, kernel, sigma))


def randaugment_cases(draw, image, magnitudes):
    space = RandAugment(num_magnitude_bins=BINS)._augmentation_space(BINS, (image.height, image.width))
    for name, (values, signed) in space.items():
        for index in magnitudes:
            magnitude = float(values[index].item()) if values.ndim > 0 else 0.0
            negative = signed and draw.random() < 0.5
            result = _apply_op(
                image,
                name,
                -magnitude if negative else magnitude,
                interpolation=InterpolationMode.BILINEAR,
                fill=None,
            )
            yield case(name, {"magnitude": index, "negative": negative}, result)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=0, help="this many random images of up to 40 x 40 pixels")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    sizes = [
        (draw.randint(1, 40), draw.randint(1, 40), draw.choice([1, 3])) for _ in range(options.random)
    ] or SIZES
    images = []
    for size in sizes:
        image = make_image(draw, *size)
        magnitudes = [draw.randrange(BINS)] if options.random else [0, 9, 30]
        cases = list(randaugment_cases(draw, image, magnitudes))
        if size == SIZES[-1]:
            cases = [one for one in cases if one["name"] == "Equalize"][:1]
        else:
            cases += [affine_case(draw, image) for _ in range(3)]
            cases += [blur_case(draw, image) for _ in range(2)]
        images.append({"shape": size, "image": image.tobytes().hex(), "cases": cases})
    print(json.dumps(images, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
