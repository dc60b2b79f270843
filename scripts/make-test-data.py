#!/usr/bin/env python3
"""Writes the small files of tests/data with the tools that people use, and what those tools read back.

    pip install pandas pyarrow pillow zstandard
    python3 scripts/make-test-data.py

`tests/data/tables.json` lists the tables: the file, the keys of the job that differ from the defaults, and every column
as the tool itself reads it. The unit tests of src/data compare value by value. The output depends only on this script
and the versions of the tools.
"""

import datetime
import json
import math
import random
import shutil
import urllib.parse
import zipfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as pq
from PIL import Image

OUT = Path(__file__).resolve().parent.parent / "tests" / "data"
ROWS = 60


def frame():
    """Prices beyond a thousand, fractions, a percentage, a date with a time, a name with an umlaut, a class."""
    draw = random.Random(7)
    start = pd.Timestamp("2021-01-28 22:15:30")
    return pd.DataFrame(
        {
            "price": [round(draw.uniform(0, 3_000_000), 2) for _ in range(ROWS)],
            "count": [draw.randrange(0, 40_000) for _ in range(ROWS)],
            "rate": [round(draw.uniform(0, 100), 2) for _ in range(ROWS)],
            "when": [start + pd.Timedelta(hours=7 * i) for i in range(ROWS)],
            "name": [draw.choice(["Müller", "Straße", "O'Neil, J.", "plain"]) for _ in range(ROWS)],
            "y": [draw.choice([0.25, 0.5, 0.75]) for _ in range(ROWS)],
        }
    )


def parts(when, hours=True):
    """The numbers of a column of dates, as pandas derives them."""
    found = {"year": when.dt.year, "month": when.dt.month, "day": when.dt.day, "weekday": when.dt.day_of_week}
    if hours:
        found["hour"] = when.dt.hour + when.dt.minute / 60 + when.dt.second / 3600
    return found


def numbers(table, hours=True):
    """Every numeric input of a table by the name it has in a sample."""
    found = {}
    for name in table.columns:
        column = table[name]
        if name == "y":
            continue
        if pd.api.types.is_datetime64_any_dtype(column):
            found.update({f"{name}.{part}": values for part, values in parts(column, hours).items()})
        elif pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column):
            found[name] = column.astype(float)
        else:
            for value in column.dropna().unique():
                found[f"{name} = {value}"] = (column == value).astype(float)
    return {name: [None if math.isnan(x) else float(x) for x in values] for name, values in found.items()}


CASES = []


def case(file, table, keys=None, hours=True, left_out=()):
    CASES.append(
        {
            "file": file,
            "keys": keys or {},
            "inputs": numbers(table.drop(columns=list(left_out)), hours),
            "left_out": list(left_out),
        }
    )


def write(name, text, encoding="utf-8"):
    (OUT / name).write_bytes(text.encode(encoding))
    return OUT / name


def csv_tables():
    table = frame()
    dated = ["when"]

    # As a German Excel saves it: semicolons, decimal commas, day first, Windows-1252.
    german = table.assign(when=table["when"].dt.strftime("%d.%m.%Y %H:%M:%S"))
    text = german.to_csv(index=False, sep=";", decimal=",", lineterminator="\r\n")
    path = write("german-excel.csv", text, "cp1252")
    back = pd.read_csv(path, sep=";", decimal=",", encoding="cp1252", parse_dates=dated, dayfirst=True)
    case("german-excel.csv", back, {"encoding": "latin-1"})

    # Excel's "Unicode text": UTF-16 with a byte order mark, separated by tabs.
    path = write("unicode-text.txt", table.to_csv(index=False, sep="\t", lineterminator="\r\n"), "utf-16")
    case("unicode-text.txt", pd.read_csv(path, sep="\t", encoding="utf-16", parse_dates=dated))

    # As people type it in the United States: groups of digits, dollars, percent, month first.
    typed = table.assign(
        price=table["price"].map("${:,.2f}".format),
        count=table["count"].map("{:,}".format),
        rate=table["rate"].map("{:.2f}%".format),
        when=table["when"].dt.strftime("%m/%d/%Y %I:%M:%S %p"),
    )
    path = write("typed.csv", typed.to_csv(index=False))
    back = pd.read_csv(path, thousands=",", parse_dates=dated, date_format="%m/%d/%Y %I:%M:%S %p")
    back["price"] = back["price"].str.replace("[$,]", "", regex=True).astype(float)
    back["rate"] = back["rate"].str.rstrip("%").astype(float)
    case("typed.csv", back)

    # pandas' default: an index without a name.
    path = OUT / "indexed.csv"
    table.sample(frac=1, random_state=3).to_csv(path)
    case("indexed.csv", pd.read_csv(path, index_col=0, parse_dates=dated))

    # Comments above and between the rows, single quotes, no header of a spreadsheet.
    plain = table.drop(columns=["when"])
    lines = plain.to_csv(index=False, quotechar="'").splitlines()
    lines[1:1] = ["# units: euro, pieces, percent; it's \"measured\""]
    path = write("commented.csv", "# made by a script\n" + "\n".join(lines) + "\n# the end\n")
    case("commented.csv", pd.read_csv(path, comment="#", quotechar="'"))

    # Values that are not finite are missing values.
    wild = plain.copy()
    wild.loc[3, "price"], wild.loc[5, "price"], wild.loc[8, "rate"] = np.inf, -np.inf, np.nan
    text = wild.to_csv(index=False).replace("-inf", "-Infinity", 1)
    path = write("not-finite.csv", text)
    back = pd.read_csv(path).replace([np.inf, -np.inf], np.nan).fillna({"price": 0.0, "rate": 0.0})
    case("not-finite.csv", back, {"on_missing": "zero"})

    # Times of day, and dates alone in the order of the year.
    times = pd.DataFrame({"at": table["when"].dt.strftime("%H:%M"), "x": table["rate"], "y": table["y"]})
    write("times.csv", times.to_csv(index=False))
    clock = table["when"].dt.hour + table["when"].dt.minute / 60
    case("times.csv", pd.DataFrame({"at.hour": clock, "x": table["rate"], "y": table["y"]}))
    days = table.assign(when=table["when"].dt.normalize())
    days.to_csv(OUT / "days.csv", index=False)
    case("days.csv", pd.read_csv(OUT / "days.csv", parse_dates=dated), hours=False)


def compressed_tables():
    """The same table in every container that pandas writes; what pandas reads back is the same too."""
    table = frame().drop(columns=["when"])
    for ending in ["gz", "bz2", "xz", "zip", "zst"]:
        name = f"packed.csv.{ending}"
        if ending == "zip":
            # With the time of the file fixed, so that the bytes depend on this script alone.
            with zipfile.ZipFile(OUT / name, "w", zipfile.ZIP_DEFLATED) as archive:
                info = zipfile.ZipInfo("packed.csv", (2020, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, table.to_csv(index=False))
        else:
            options = {"mtime": 0} if ending == "gz" else {}
            method = {"gz": "gzip", "zst": "zstd"}.get(ending, ending)
            table.to_csv(OUT / name, index=False, compression={"method": method, **options})
        case(name, pd.read_csv(OUT / name))


def json_tables():
    table = frame().drop(columns=["when"])
    table.loc[4, "price"] = np.nan
    table.to_json(OUT / "lines.jsonl", orient="records", lines=True, force_ascii=False)
    table.to_json(OUT / "array.json", orient="records", indent=1)
    for name, lines in [("lines.jsonl", True), ("array.json", False)]:
        back = pd.read_json(OUT / name, lines=lines).fillna({"price": 0.0})
        case(name, back, {"kind": "json", "on_missing": "zero"})


def parquet_tables():
    """What pyarrow, Spark and DuckDB write: encodings, compressions, types, lists and partitions."""
    draw = random.Random(11)
    table = frame()
    rich = pa.table(
        {
            "decimal": pa.array([Decimal(f"{x:.4f}") * (-1) ** i for i, x in enumerate(table["price"])], pa.decimal128(20, 4)),
            "small_decimal": pa.array([Decimal(f"{x:.2f}") for x in table["rate"]], pa.decimal128(7, 2)),
            "half": pa.array(np.array(table["rate"], dtype=np.float16)),
            "day": pa.array(table["when"].dt.date),
            "when": pa.array(table["when"], pa.timestamp("us")),
            "clock": pa.array(table["when"].dt.time, pa.time64("us")),
            "flag": pa.array([draw.random() < 0.5 for _ in range(ROWS)]),
            "position": pa.array([[draw.random(), draw.random(), 1.0] for _ in range(ROWS)], pa.list_(pa.float32(), 3)),
            "scores": pa.array([[draw.randrange(9) for _ in range(2)] for _ in range(ROWS)], pa.list_(pa.int64())),
            "name": pa.array(table["name"]),
            "y": pa.array(table["y"]),
        }
    )

    def read_back(path):
        back = pq.read_table(path).to_pandas()
        found = pd.DataFrame(index=back.index)
        for name in back.columns:
            values = back[name]
            first = values.iloc[0]
            if isinstance(first, (list, np.ndarray)):
                for i in range(len(first)):
                    found[f"{name}.{i}"] = [float(value[i]) for value in values]
            elif isinstance(first, Decimal):
                found[name] = [float(value) for value in values]
            elif isinstance(first, datetime.time):
                found[f"{name}.hour"] = [t.hour + t.minute / 60 + t.second / 3600 for t in values]
            elif isinstance(first, datetime.date) and not isinstance(first, datetime.datetime):
                when = pd.to_datetime(values)
                for part, numbers in parts(when, hours=False).items():
                    found[f"{name}.{part}"] = numbers
            else:
                found[name] = values
        return found

    keys = {"kind": "parquet"}
    plain = {"use_dictionary": False}
    variants = {
        "delta.parquet": {
            **plain,
            "column_encoding": {
                "name": "DELTA_BYTE_ARRAY",
                "when": "DELTA_BINARY_PACKED",
                "half": "BYTE_STREAM_SPLIT",
                "y": "BYTE_STREAM_SPLIT",
            },
        },
        "delta-length.parquet": {**plain, "column_encoding": {"name": "DELTA_LENGTH_BYTE_ARRAY"}, "data_page_version": "2.0"},
        "brotli.parquet": {"compression": "brotli"},
        "int96.parquet": {"use_deprecated_int96_timestamps": True, "compression": "gzip"},
    }
    for name, options in variants.items():
        pq.write_table(rich, OUT / name, row_group_size=25, **options)
        case(name, read_back(OUT / name), keys)

    # A folder with partitions: the columns `region` and `year` are in the path.
    folder = OUT / "partitioned"
    shutil.rmtree(folder, ignore_errors=True)
    parted = pa.table(
        {
            "x": pa.array(table["rate"]),
            "y": pa.array(table["y"]),
            "region": pa.array([["north", "so uth", None][i % 3] for i in range(ROWS)]),
            "year": pa.array([2020 + i % 2 for i in range(ROWS)]),
        }
    )
    pq.write_to_dataset(parted, folder, partition_cols=["region", "year"], basename_template="part-{i}.parquet")
    (folder / "_SUCCESS").write_bytes(b"")
    files = sorted(folder.rglob("*.parquet"))
    back = pd.concat([pq.ParquetFile(file).read().to_pandas().assign(
        region=urllib.parse.unquote(file.parts[-3].split("=")[1]), year=int(file.parts[-2].split("=")[1])
    ) for file in files], ignore_index=True)
    # pyarrow's own dataset has the same rows.
    own = dataset.dataset(folder, partitioning="hive").to_table().to_pandas()
    assert sorted(zip(own["x"], own["year"].astype(int))) == sorted(zip(back["x"], back["year"]))
    null = back["region"] == "__HIVE_DEFAULT_PARTITION__"
    back.loc[null, "region"] = None
    inputs = numbers(back)
    inputs["region is missing"] = [float(x) for x in null]
    CASES.append({"file": "partitioned", "keys": {**keys, "on_missing": "zero"}, "inputs": inputs, "left_out": []})


def feather_tables():
    """What pandas, pyarrow and polars write as Feather: compressions, types, dictionaries, several batches."""
    table = frame()
    table["flag"] = table["count"] % 3 == 0
    table["name"] = table["name"].astype("category")
    table.loc[4, "price"] = np.nan
    keys = {"kind": "parquet", "on_missing": "zero"}
    for compression in ["lz4", "zstd", "uncompressed"]:
        name = f"{compression}.feather"
        table.to_feather(OUT / name, compression=compression)
        case(name, pd.read_feather(OUT / name).astype({"name": object}).fillna({"price": 0.0}), keys)
    views = pa.table(
        {
            "decimal": pa.array([Decimal(f"{x:.4f}") * (-1) ** i for i, x in enumerate(frame()["price"])], pa.decimal128(20, 4)),
            "half": pa.array(np.array(table["rate"], dtype=np.float16)),
            "single": pa.array([None if i == 7 else x for i, x in enumerate(table["rate"])], pa.float32()),
            "byte": pa.array([i - 30 for i in range(ROWS)], pa.int8()),
            "large": pa.array([2**40 + i for i in range(ROWS)], pa.uint64()),
            "day": pa.array(table["when"].dt.date, pa.date32()),
            "when": pa.array(table["when"], pa.timestamp("ns", tz="UTC")),
            "clock": pa.array(table["when"].dt.time, pa.time32("s")),
            "name": pa.array([f"{x}, a name of more than twelve bytes" for x in frame()["name"]], pa.string_view()),
            "short": pa.array([["a", "b\"c", None][i % 3] for i in range(ROWS)], pa.string_view()),
            "long": pa.array(frame()["name"].astype(str), pa.large_string()),
            "y": pa.array(table["y"]),
        }
    )
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(OUT / "views.arrow", views.schema, options=options) as out:
        out.write_table(views, max_chunksize=25)
    back = pa.ipc.open_file(OUT / "views.arrow").read_all()
    found = pd.DataFrame(index=range(ROWS))
    for name in ["decimal", "half", "single", "byte", "large"]:
        found[name] = [0.0 if x is None else float(x) for x in back[name].to_pylist()]
    for name, hours in [("day", False), ("when", True)]:
        when = pd.Series(pd.to_datetime(back[name].to_pylist()))
        for part, values in parts(when, hours).items():
            found[f"{name}.{part}"] = values
    found["clock.hour"] = [t.hour + t.minute / 60 + t.second / 3600 for t in back["clock"].to_pylist()]
    for name in ["name", "short", "long"]:
        found[name] = pd.Series(back[name].to_pylist(), dtype=object)
    inputs = numbers(found)
    inputs["short is missing"] = [float(x is None) for x in found["short"]]
    CASES.append({"file": "views.arrow", "keys": keys, "inputs": inputs, "left_out": []})


def images():
    """Small images in the formats that Pillow writes, and their pixels."""
    folder = OUT / "images"
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(5)
    first, second = [Image.fromarray(draw.integers(0, 256, (6, 9, 3), dtype=np.uint8)) for _ in range(2)]
    gray = first.convert("L")
    few = first.quantize(16)
    frames = {"save_all": True, "append_images": [second], "duration": 100}
    written = {
        "animated.gif": (few, {**frames, "append_images": [second.quantize(16)]}),
        "still.gif": (few, {}),
        "rgb.bmp": (first, {}),
        "gray.bmp": (gray, {}),
        "palette.bmp": (few, {}),
        "plain.tiff": (first, {}),
        "lzw.tif": (first, {"compression": "tiff_lzw"}),
        "deflate.tif": (gray, {"compression": "tiff_adobe_deflate"}),
        "pages.tif": (first, {"save_all": True, "append_images": [second]}),
        "rgb.ppm": (first, {}),
        "gray.pgm": (gray, {}),
        "bits.pbm": (first.convert("1"), {}),
        "animated.webp": (first, {**frames, "lossless": True}),
        "noextension": (first, {"format": "PNG"}),
    }
    expected = []
    for name, (image, options) in written.items():
        image.save(folder / name, **options)
        back = Image.open(folder / name).convert("RGB")
        expected.append({"file": name, "size": [back.height, back.width], "rgb": list(back.tobytes())})
    (folder / "images.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")
    smooth = Image.fromarray(np.array([[[20 * x, 9 * y + 40, 200 - 8 * (x + y)] for x in range(11)] for y in range(13)], dtype=np.uint8))
    written = {
        "full.avif": (first, {"subsampling": "4:4:4", "quality": 90}),
        "halved.avif": (smooth, {"subsampling": "4:2:0", "quality": 90}),
        "limited.avif": (smooth, {"subsampling": "4:2:2", "quality": 90, "range": "limited"}),
        "gray.avif": (gray, {"subsampling": "4:0:0", "quality": 90}),
        "alpha.avif": (smooth.convert("RGBA"), {"subsampling": "4:4:4", "quality": 90}),
    }
    expected = []
    for name, (image, options) in written.items():
        image.save(folder / name, **options)
        back = Image.open(folder / name).convert("RGB")
        expected.append({"file": name, "size": [back.height, back.width], "rgb": list(back.tobytes())})
    (folder / "avif.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


def zoned_tables():
    """The same points in time as text, as Parquet, and as a stream of Arrow: the clock of their zone shows the same."""
    when = pd.date_range("2021-03-27 22:15:30", periods=12, freq="5h", tz="Europe/Berlin")
    colour = pd.Categorical(["red", "green", "blue"] * 4)
    table = pd.DataFrame({"when": when, "fixed": when.tz_convert("-03:30"), "colour": colour, "y": np.arange(12) * 0.5})
    table.to_csv(OUT / "zoned.csv", index=False)
    table.to_parquet(OUT / "zoned.parquet", index=False)
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    with pa.ipc.new_stream(OUT / "zoned.arrows", arrow.schema) as out:
        out.write_table(arrow, max_chunksize=5)


def main():
    OUT.mkdir(exist_ok=True)
    csv_tables()
    compressed_tables()
    json_tables()
    parquet_tables()
    feather_tables()
    zoned_tables()
    images()
    (OUT / "tables.json").write_text(json.dumps(CASES, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
