"""Trains a small classifier, interrupted and resumed, and reads the run with the real MLflow and TensorBoard.

    cargo build --release
    python scripts/tracking-interop.py --build target/release

Needs mlflow, tensorboard and numpy. Both must have the numbers of the run's own record, `metrics.jsonl`: every step once, across
the resume. MLflow reads a file that the run created, which it migrates, and a file that MLflow made. TensorBoard also reads
the confusion matrix, as an image, and the histogram of each parameter, whose counts add up to its values.
"""

import argparse
import json
import math
import pathlib
import struct
import subprocess
import tempfile
import zlib

JOB = """
name = "tracked"
[model]
kind = "mlp"
hidden = [16]
[data]
kind = "shapes"
train_samples = 256
valid_samples = 64
image_size = 16
[train]
batch_size = 16
steps = 40
[eval]
every_steps = 10
[log]
every_steps = 1
histograms = true
"""


def fit(trainer, folder, run, store, steps):
    command = [trainer, "fit", "job.toml", "--run-dir", run, "--resume", "--set", f"log.mlflow={store}", "-q"]
    done = subprocess.run(command + ["--max-steps", str(steps)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "mlflow" not in done.stderr, done.stderr


def recorded(run):
    """The metrics of the run by name and step; a repeated step has the same values. The row of an evaluation also has the mean
    of the training loss since the last one, which is not that of the step."""
    values = {}
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        left_out = {"step", "train.loss"} if "valid.loss" in row else {"step"}
        for name, value in row.items():
            if name not in left_out and isinstance(value, (int, float)) and math.isfinite(value):
                values.setdefault(name, {})[row["step"]] = value
    return values


def check_mlflow(folder, store, run):
    from mlflow import MlflowClient

    client = MlflowClient(store.replace("sqlite:///", f"sqlite:///{folder}/"))
    experiment = client.get_experiment_by_name("tracked")
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 1, f"{len(found)} runs: a resumed run must continue its own"
    info, data, wanted = found[0].info, found[0].data, recorded(folder / run)
    assert info.run_name == run and info.status == "FINISHED" and info.end_time >= info.start_time, info
    assert data.params["optimizer.kind"] == "adamw" and data.params["model.hidden"] == "[16]", data.params
    assert data.tags["mlflow.source.name"] == "trainer", data.tags
    points = 0
    for name, last in data.metrics.items():
        history = client.get_metric_history(info.run_id, name)
        steps = [point.step for point in history]
        assert sorted(set(steps)) == sorted(steps), f"{name}: a step twice"
        if name in wanted:
            assert {point.step: point.value for point in history} == wanted[name], name
        assert last == max(history, key=lambda point: point.step).value, name
        points += len(history)
    assert len(client.get_metric_history(info.run_id, "train.loss")) == 40
    print(f"mlflow       {store}: {info.run_name}, {info.status}, {len(data.params)} parameters, "
          f"{len(data.metrics)} metrics with {points} values")


def png_pixels(data):
    """Width, height and grey values of an 8-bit grayscale PNG."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, size = 8, b"", None
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunk = data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + chunk) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        size = struct.unpack(">II", chunk[:8]) if kind == b"IHDR" else size
        body += chunk if kind == b"IDAT" else b""
        at += 12 + length
    return *size, zlib.decompress(body)


def check_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import (
        COMPRESSED_HISTOGRAMS, HISTOGRAMS, IMAGES, SCALARS, TENSORS, EventAccumulator)

    everything = {name: 0 for name in (COMPRESSED_HISTOGRAMS, HISTOGRAMS, IMAGES, SCALARS, TENSORS)}
    events = EventAccumulator(str(run / "tensorboard"), size_guidance=everything)
    events.Reload()
    tags, wanted = events.Tags(), recorded(run)
    losses = {point.step: point.value for point in events.Scalars("train/loss")}
    as_f32 = {step: struct.unpack("f", struct.pack("f", value))[0] for step, value in wanted["train.loss"].items()}
    assert losses == as_f32 and len(events.Scalars("train/loss")) == 40, "the losses differ"
    images = events.Images("valid/confusion")
    width, height, _ = png_pixels(images[-1].encoded_image_string)
    assert (width, height) == (images[-1].width, images[-1].height) and width > 0
    best = json.loads((run / "evaluation.json").read_text())["best"]["step"]
    assert images[-1].step == best, (images[-1].step, best)
    assert tags["histograms"], "no histogram"
    values = 0
    for tag in tags["histograms"]:
        for event in events.Histograms(tag):
            proto = event.histogram_value
            assert len(proto.bucket) == len(proto.bucket_limit) and sum(proto.bucket) == proto.num, tag
            assert list(proto.bucket_limit) == sorted(proto.bucket_limit) and proto.min <= proto.max, tag
            mean, square = proto.sum / proto.num, proto.sum_squares / proto.num
            assert proto.min <= mean <= proto.max and square + 1e-12 >= mean * mean, tag
            values += int(proto.num)
        assert sorted({event.step for event in events.Histograms(tag)}) == sorted(wanted["valid.loss"]), tag
    print(f"tensorboard  {len(tags['scalars'])} scalars, {len(images)} confusion matrices of {width}x{height} pixels, "
          f"{len(tags['histograms'])} histograms over {values} values")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="target/release", help="the folder of the program")
    trainer = str(pathlib.Path(parser.parse_args().build, "trainer").resolve())
    import mlflow

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "job.toml").write_text(JOB)
        # Ours, migrated by MLflow in the middle of the run; and one that MLflow made.
        mlflow.MlflowClient(f"sqlite:///{folder}/theirs.db").create_experiment("another")
        for store, run in (("sqlite:///ours.db", "ours"), ("sqlite:///theirs.db", "theirs")):
            fit(trainer, folder, run, store, 15)
            mlflow.MlflowClient(store.replace("sqlite:///", f"sqlite:///{folder}/")).search_experiments()
            fit(trainer, folder, run, store, 40)
            check_mlflow(folder, store, run)
            check_tensorboard(folder / run)


if __name__ == "__main__":
    main()
