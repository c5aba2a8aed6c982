"""Reads damaged files of every format, beside the library that is the format's reference, in a process of its
own: it may be what ends.

Run as a script: ``damaged_formats.py FOLDER SEED FIRST STOP [KIND]`` reads cases ``FIRST`` to ``STOP``.
Before each it writes the case's number and kind, behind it what came of it, so that the last one is known:

same       the rows that were written
reference  other rows, and the reference reads the same
refused    an error of ours that names the file
"""

from __future__ import annotations

import bz2
import csv
import faulthandler
import gzip
import io
import json
import lzma
import random
import re
import resource
import shutil
import sys
import tarfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.feather
import pyarrow.parquet as pq
from PIL import Image, ImageOps

import trainpipes as tp
from damaged_files import damaged, tar

#: Seconds after which a case hangs, on a busy machine too.
LONG = 240
#: Bytes of memory that a file may ask for.
MEMORY = 8 << 30
ROWS = 40
#: First bytes of compressed files.
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7z", b"\x28\xb5")

Rows = list[Any]
Read = Callable[[str], tp.Pipeline]


def table() -> pa.Table:
    numbers = range(ROWS)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": pa.array([f"row {n} " + "é" * (n % 5) if n % 7 else None for n in numbers]),
            "kind": pa.array([("a", "bb", "ccc")[n % 3] for n in numbers]).dictionary_encode(),
            "tokens": pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int32())),
            "price": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(12, 2)),
            "chat": pa.array([[{"role": "user", "content": f"hi {n}"}] * (n % 3) for n in numbers]),
        }
    )


def lines() -> list[str]:
    """Rows of JSON."""
    return [
        json.dumps(
            {"id": n, "text": f"row {n} é", "x": n / 8, "in": {"a": [n] * (n % 3), "b": None}}
        )
        for n in range(ROWS)
    ]


# References. Each gives rows, or raises.


def of_arrow(data: bytes) -> Rows:
    options = pa.ipc.IpcReadOptions(use_threads=False)
    form = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
    found = form(pa.py_buffer(data), options=options).read_all()
    found.validate(full=True)
    return found.to_pylist()


def of_parquet(data: bytes) -> Rows:
    return pq.read_table(pa.BufferReader(data), use_threads=False).to_pylist()


def of_lines(data: bytes) -> Rows:
    return [json.loads(line) for line in _text(data).split("\n") if line.strip()]


def of_json(data: bytes) -> Rows:
    text = _text(data).lstrip()
    rows = json.loads(text) if text.startswith("[") else of_lines(data)
    return list(rows)


def of_csv(data: bytes, delimiter: str = ",") -> Rows:
    rows = [
        row for row in csv.reader(io.StringIO(_text(data), newline=""), delimiter=delimiter) if row
    ]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def of_typed_csv(data: bytes) -> Rows:
    if b"\n" not in data.strip():  # names and no rows, as csv reads it: pyarrow wants rows
        return []
    convert = pcsv.ConvertOptions(
        strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
    )
    parse = pcsv.ParseOptions(newlines_in_values=True)
    return pcsv.read_csv(io.BytesIO(data), parse_options=parse, convert_options=convert).to_pylist()


def of_text(data: bytes) -> Rows:
    rows = _text(data).replace("\r\n", "\n").split("\n")
    return [{"text": row} for row in (rows if rows[-1] else rows[:-1])]


def _text(data: bytes) -> str:
    return data.decode().removeprefix("\ufeff")


def of_numpy(data: bytes) -> Rows:
    found = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(found, np.ndarray):
        arrays = {name: found[name] for name in found.files}
    elif found.dtype.names:
        arrays = {name: found[name] for name in found.dtype.names}
    else:
        arrays = {"array": found}
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("arrays of several lengths")
    count = len(next(iter(arrays.values())))
    return [{name: array[row] for name, array in arrays.items()} for row in range(count)]


def of_tar(data: bytes) -> Rows:
    rows: list[dict[str, Any]] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            named = re.fullmatch(r"((?:.*/)?[^.]+)[.]([^/]*)", member.name, re.DOTALL)
            content = archive.extractfile(member)
            if content is None or named is None:  # webdataset leaves out what has no extension
                continue
            key, kind = named.groups()
            if not rows or rows[-1]["__key__"] != key:
                rows.append({"__key__": key})
            rows[-1][kind.lower()] = content.read()
    return rows


def of_image(data: bytes) -> Rows:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        return [{"image": pixels.transpose(2, 0, 1)}]


def unpacked(reference: Callable[[bytes], Rows], unpack: Callable[[bytes], bytes]) -> Any:
    return lambda data: reference(unpack(data))


def _unxz(data: bytes) -> bytes:
    """With zeros between streams, as the format has them and ``lzma.decompress`` does not."""
    content = b""
    while data := data.lstrip(b"\0"):
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        content += stream.decompress(data)
        if not stream.eof:
            raise EOFError("cut off")
        data = stream.unused_data
    return content


def _unzstd(data: bytes) -> bytes:
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()


# Kinds of files.


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        name: of the file.
        content: what it holds.
        read: how it is read.
        reference: how others read it.
        remote: whether it is also read from another file system than this machine's.
    """

    name: str
    content: bytes
    read: Read
    reference: Callable[[bytes], Rows]
    remote: bool = True


def _written(write: Callable[[Any], object]) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def _parquet(**options: Any) -> bytes:
    return _written(lambda sink: pq.write_table(table(), sink, row_group_size=13, **options))


def _arrow(open_new: Callable[..., Any], found: pa.Table, compression: str | None = None) -> bytes:
    def write(sink: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with open_new(sink, found.schema, options=options) as writer:
            writer.write_table(found, max_chunksize=13)

    return _written(write)


def _tar() -> bytes:
    members: list[tuple[str, bytes]] = []
    for n in range(12):
        name = f"{'é' * 60 if n % 5 == 4 else ''}{n:03}"
        members.append((f"{name}.txt", f"text {n}".encode() * n))
        members.append((f"{name}.json", f'{{"n": {n}}}'.encode()))
    return tar(*members)


def _numbers() -> dict[str, Any]:
    numbers = np.arange(ROWS)
    return {"x": numbers, "y": np.stack([numbers / 4, numbers / 3], 1).astype(np.float32)}


def kinds() -> list[Kind]:
    plain = table().drop_columns(["kind"])
    every = {
        "plain": {"use_dictionary": False, "compression": "none", "store_schema": False},
        "snappy": {},
        "zstd": {"data_page_version": "2.0", "compression": "zstd", "write_page_index": True},
        "gzip": {"write_page_checksum": True, "compression": "gzip", "write_statistics": False},
    }
    found = [
        Kind(f"{name}.parquet", _parquet(**options), READ["parquet"], of_parquet)
        for name, options in every.items()
    ]
    for name, content in (
        ("file.arrow", _arrow(pa.ipc.new_file, plain)),
        ("dictionaries.arrow", _arrow(pa.ipc.new_file, table())),
        ("stream.arrows", _arrow(pa.ipc.new_stream, plain)),
        ("dictionaries.arrows", _arrow(pa.ipc.new_stream, table())),
        ("lz4.feather", _arrow(pa.ipc.new_file, plain, "lz4")),
        ("zstd.feather", _arrow(pa.ipc.new_file, table(), "zstd")),
        ("narrow.arrow", _arrow(pa.ipc.new_file, plain.select(["id"]))),
    ):
        found.append(Kind(name, content, READ["arrow"], of_arrow))
    rows = lines()
    json_lines = "\n".join(rows).encode() + b"\n"
    array = b"[" + ",\n ".join(rows).encode() + b"]\n"
    cells = "".join(f'{n},"a ""b"", é",{n / 8},\n' for n in range(ROWS))
    cells = "id,text,x,none\n" + cells
    words = "".join(f"line {n} é\n" * (n % 3) + "\n" for n in range(ROWS)).encode()
    as_csv, read_json, text = READ["csv"], READ["json"], READ["text"]
    found += [
        Kind("lines.jsonl", json_lines, read_json, of_json),
        Kind("array.json", array, read_json, of_json),
        Kind("cells.csv", cells.encode(), as_csv, of_csv),
        Kind(
            "tabs.tsv", cells.replace(",", "\t").encode(), as_csv, partial(of_csv, delimiter="\t")
        ),
        Kind("typed.csv", b"\xef\xbb\xbf" + cells.encode(), READ["typed"], of_typed_csv),
        Kind("words.txt", words, text, of_text),
    ]
    zstd = pa.Codec("zstd")
    packers: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        ".gz": (gzip.compress, gzip.decompress),
        ".zst": (lambda data: zstd.compress(data, asbytes=True), _unzstd),
        ".bz2": (bz2.compress, bz2.decompress),
        ".xz": (lzma.compress, _unxz),
    }
    for ending, name, content, read, reference in (
        (".gz", "lines.jsonl", json_lines, read_json, of_json),
        (".zst", "lines.jsonl", json_lines, read_json, of_json),
        (".bz2", "array.json", array, read_json, of_json),
        (".xz", "words.txt", words, text, of_text),
        (".gz", "cells.csv", cells.encode(), as_csv, of_csv),
        (".gz", "pairs.tar", _tar(), READ["tar"], of_tar),
        (".zst", "pairs.tar", _tar(), READ["tar"], of_tar),
    ):
        pack, unpack = packers[ending]
        half = content.index(b"\n", len(content) // 2) + 1  # two members
        packed = pack(content[:half]) + pack(content[half:])
        found.append(Kind(name + ending, packed, read, unpacked(reference, unpack)))
    found.append(Kind("pairs.tar", _tar(), READ["tar"], of_tar))
    arrays = _numbers()
    record = np.zeros(ROWS, [("a", "<i4"), ("b", ">f8", (2,))])
    record["a"], record["b"] = np.arange(ROWS), 0.5
    for name, content in (
        ("array.npy", _written(lambda sink: np.save(sink, arrays["y"]))),
        ("fields.npy", _written(lambda sink: np.save(sink, record))),
        ("arrays.npz", _written(lambda sink: np.savez(sink, **arrays))),
        ("packed.npz", _written(lambda sink: np.savez_compressed(sink, **arrays))),
    ):
        # Of a remote .npz only the rows are fetched that are read, so that no checksum can be compared.
        remote = name != "arrays.npz"
        found.append(Kind(name, content, READ["numpy"], of_numpy, remote))
    found += [
        Kind(f"image.{ending}", _image(ending), READ["image"], of_image, remote=False)
        for ending in ("jpg", "png", "webp", "bmp", "tiff", "gif")
    ]
    return found


def _image(ending: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
    kind = {"jpg": "JPEG", "tiff": "TIFF"}.get(ending, ending.upper())
    return _written(lambda sink: Image.fromarray(pixels).save(sink, kind))


STRINGS = pa.schema([(name, pa.string()) for name in ("id", "text", "x", "none")])
READ: dict[str, Read] = {
    "parquet": lambda path: tp.read_parquet(path, index=False),
    "arrow": lambda path: tp.read_arrow(path),
    "json": lambda path: tp.read_json(path, index=False),
    "csv": lambda path: tp.read_csv(path, schema=STRINGS, index=False),
    "typed": lambda path: tp.read_csv(path, index=False),
    "text": lambda path: tp.read_text(path, index=False),
    "tar": lambda path: tp.read_webdataset(path, index=False, missing="null"),
    "image": lambda path: tp.read_images(path, labels=None).decode_image().select("image"),
    "numpy": lambda path: tp.read_numpy(path),
}


# Folders, of which one file is damaged.


def saved_dataset(folder: Path) -> None:
    """A folder as ``Dataset.save_to_disk`` writes it."""
    names = [f"data-{n:05}-of-00002.arrow" for n in range(2)]
    for name in names:
        (folder / name).write_bytes(_arrow(pa.ipc.new_stream, table()))
    about = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(about, indent=1))
    (folder / "dataset_info.json").write_text("{}")


def of_saved_dataset(folder: Path) -> Rows:
    names = json.loads((folder / "state.json").read_text())["_data_files"]
    return [row for name in names for row in of_arrow((folder / name["filename"]).read_bytes())]


def memory_map(folder: Path) -> None:
    shutil.rmtree(folder)
    found = table().select(["id", "tokens"])
    tp.write_memmap(folder, found)


def of_memory_map(folder: Path) -> Rows:
    about = json.loads((folder / "part-00000.json").read_text())
    columns: dict[str, list[Any]] = {}
    for column in about["columns"]:
        values = np.load(folder / f"part-00000.{column['name']}.npy")
        columns[column["name"]] = values.tolist()
        if column["ragged"]:
            ends = np.load(folder / f"part-00000.{column['name']}.offsets.npy")
            columns[column["name"]] = [part.tolist() for part in np.split(values, ends[1:-1])]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


FOLDERS: dict[str, tuple[Callable[[Path], None], Read, Callable[[Path], Rows]]] = {
    "saved dataset": (saved_dataset, lambda path: tp.read_arrow(path), of_saved_dataset),
    "memory map": (memory_map, lambda path: tp.from_memmap(path), of_memory_map),
}


# Cases.


def canonical(value: Any) -> Any:
    """A value in a form in which those that mean the same are equal: fields that are null are left out, as in
    JSON, and so are empty cells."""
    if isinstance(value, dict):
        parts = {key: canonical(part) for key, part in value.items()}
        return tuple(sorted((key, part) for key, part in parts.items() if part is not None))
    if isinstance(value, list | tuple):
        return [canonical(part) for part in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        kind = value.dtype.newbyteorder("=")
        return repr((str(kind), value.shape, value.astype(kind).tobytes()))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
        value = float(value)
    return None if value is None or value == "" else repr(value)


def what_came(
    read: Callable[[], tp.Pipeline], reference: Callable[[], Rows], good: Rows, path: str
) -> str:
    """What came of a damaged file, in a word.

    Raises:
        AssertionError: it was something wrong.
    """
    try:
        rows = [canonical(row) for row in read()]
    except tp.TrainpipesError as error:
        if path not in str(error) or len(str(error)) > 3000:
            raise AssertionError(f"no file is named, or too much said: {error}") from error
        return "refused"
    except MemoryError:  # a page's header says how large the page is
        return "refused"
    if rows == good:
        return "same"
    try:
        wanted = [canonical(row) for row in reference()]
    except Exception as error:
        raise AssertionError(
            f"{len(rows)} rows of what the reference refuses: {error!r}"
        ) from error
    if rows != wanted:
        first = next((n for n, (a, b) in enumerate(zip(rows, wanted, strict=False)) if a != b), "?")
        about = "" if first == "?" else f"; {rows[first]} in place of {wanted[first]}"
        raise AssertionError(
            f"{len(rows)} rows in place of {len(wanted)}, first row {first}{about}"
        )
    return "reference"


class Cases:
    """Damaged files, each drawn with the seed and its number.

    Args:
        folder: where they are written.
        seed: what they are drawn with.
        only: names of the kinds of files; none for all.
    """

    def __init__(self, folder: Path, seed: int, only: list[str]) -> None:
        self.folder, self.seed = folder, seed
        every = kinds()
        # Compressed text is read by any name.
        self.plain = [kind for kind in every if not kind.content.startswith(COMPRESSED)]
        self.kinds = [kind for kind in every if not only or kind.name in only]
        self.folders = {name: made for name, made in FOLDERS.items() if not only or name in only}
        self.good: dict[str, Any] = {}

    def name(self, case: int) -> str:
        """Which kind of file a case is about."""
        number = case % (len(self.kinds) + len(self.folders))
        if number < len(self.kinds):
            return self.kinds[number].name
        return list(self.folders)[number - len(self.kinds)]

    def run(self, case: int) -> str:
        """What came of a case."""
        draw = random.Random(f"{self.seed} {case}")
        number = case % (len(self.kinds) + len(self.folders))
        if number < len(self.kinds):
            return self._file(self.kinds[number], case, draw)
        return self._folder(self.name(case), case, draw)

    def _file(self, kind: Kind, case: int, draw: random.Random) -> str:
        if kind.name not in self.good:
            self.good[kind.name] = [canonical(row) for row in kind.reference(kind.content)]
            undamaged = self.folder / kind.name
            undamaged.write_bytes(kind.content)
            rows = [canonical(row) for row in kind.read(str(undamaged))]
            assert rows == self.good[kind.name], f"{kind.name} is not read as its reference does"
        others = [other.content for other in draw.sample(self.plain, 2)]
        content = damaged(kind.content, others, draw)
        if kind.remote and draw.random() < 0.2:
            path = f"memory:///damaged/{case}-{kind.name}"
            fsspec.filesystem("memory").pipe(path, content)
        else:
            path = str(self.folder / f"{case}-{kind.name}")
            Path(path).write_bytes(content)
        said = what_came(
            lambda: kind.read(path), lambda: kind.reference(content), self.good[kind.name], path
        )
        if path.startswith("memory"):
            fsspec.filesystem("memory").rm(path)
        else:
            Path(path).unlink()
        return said

    def _folder(self, name: str, case: int, draw: random.Random) -> str:
        make, read, reference = self.folders[name]
        folder = self.folder / f"{case}-{name.replace(' ', '-')}"
        folder.mkdir()
        make(folder)
        good = [canonical(row) for row in reference(folder)]
        path = draw.choice(sorted(folder.iterdir()))
        content = damaged(path.read_bytes(), [], draw)
        path.unlink()  # what is still mapped must not change
        path.write_bytes(content)
        said = what_came(lambda: read(str(folder)), lambda: reference(folder), good, str(folder))
        shutil.rmtree(folder)
        return said


def main(folder: Path, seed: int, first: int, stop: int, only: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    cases = Cases(folder, seed, only)
    for case in range(first, stop):
        sys.stdout.write(f"{case} {cases.name(case)}: ")
        sys.stdout.flush()
        faulthandler.dump_traceback_later(LONG, exit=True)
        try:
            said = cases.run(case)
        except BaseException as error:
            trace = "" if isinstance(error, AssertionError) else traceback.format_exc()[-1500:]
            said = "WRONG " + json.dumps(f"{type(error).__name__}: {error}"[:1000] + "\n" + trace)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5:])  # type: ignore[arg-type]
