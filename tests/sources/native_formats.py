"""Formats that are read as they are: how a test writes rows in each, and what it finds of a row.

``count`` rows with the numbers ``first`` and up; the number is what a test wants to see again.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq

import trainpipes as tp

__all__ = ["FORMATS", "Format", "opened"]


@dataclass(frozen=True)
class Format:
    """A format under test.

    Args:
        write: writes a file of so many rows with numbers from a first one.
        read: the pipeline of a folder or files.
        number: the number of a row.
        suffix: what names of its files end with.
        cut: whether a file that is cut in half is found out.
    """

    write: Callable[[Path, int, int], None]
    read: Callable[[Any], tp.Pipeline]
    number: Callable[[Any], int]
    suffix: str
    cut: bool = True


def opened(pipe: tp.Pipeline) -> Any:
    """The source that a reader of files opens."""
    *below, reader = pipe.stages
    return reader.open_files(below)


def rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    columns = {"x": numbers, "text": [f"text of row {n}" for n in numbers]}
    return pa.table(columns, schema=pa.schema([("x", pa.int64()), ("text", pa.string())]))


def arrow_file(path: Path, first: int, count: int) -> None:
    table = rows(first, count)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=7)


def arrow_stream(path: Path, first: int, count: int) -> None:
    table = rows(first, count)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)


def feather(path: Path, first: int, count: int) -> None:
    pyarrow.feather.write_feather(rows(first, count), path, compression="zstd", chunksize=7)


def with_dictionary(path: Path, first: int, count: int) -> None:
    table = rows(first, count)
    kinds = pa.array([f"kind {n % 3}" for n in range(count)], pa.string()).dictionary_encode()
    table = table.append_column("kind", kinds)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table.slice(0, count // 2))
        other = pa.array(["kind 7"] * (count - count // 2), pa.string()).dictionary_encode()
        half = table.slice(count // 2).set_column(2, table.schema.field(2), other)
        stream.write_table(half)


def parquet(path: Path, first: int, count: int) -> None:
    pq.write_table(rows(first, count), path, row_group_size=7)


def json_lines(path: Path, first: int, count: int) -> None:
    lines = [json.dumps(row) + "\n" for row in rows(first, count).to_pylist()]
    packed(path, [line.encode() for line in lines])


def json_array(path: Path, first: int, count: int) -> None:
    path.write_text(json.dumps(rows(first, count).to_pylist(), indent=1))


def comma_separated(path: Path, first: int, count: int) -> None:
    pyarrow.csv.write_csv(rows(first, count), path)


def tab_separated(path: Path, first: int, count: int) -> None:
    cells = zip(*rows(first, count).to_pydict().values(), strict=True)
    packed(path, [b"x\ttext\n", *(f"{x}\t{text}\n".encode() for x, text in cells)])


def lines(path: Path, first: int, count: int) -> None:
    packed(path, [f"{row['x']} {row['text']}\n".encode() for row in rows(first, count).to_pylist()])


def paragraphs(path: Path, first: int, count: int) -> None:
    found = rows(first, count).to_pylist()
    packed(path, [f"{row['x']}\n{row['text']}\n\n\n".encode() for row in found])


def packed(path: Path, parts: list[bytes]) -> None:
    """A file of these parts; a compressed one has a member for every five."""
    groups = [b"".join(parts[n : n + 5]) for n in range(0, len(parts), 5)] or [b""]
    if path.suffix == ".gz":
        groups = [gzip.compress(group, mtime=0) for group in groups]
    elif path.suffix == ".zst":
        groups = [pa.Codec("zstd").compress(group, asbytes=True) for group in groups]
    path.write_bytes(b"".join(groups))


def first_word(row: dict[str, Any]) -> int:
    return int(row["text"].split()[0])


def npy(path: Path, first: int, count: int) -> None:
    np.save(path, np.arange(first, first + count))


def npz(path: Path, first: int, count: int) -> None:
    x = np.arange(first, first + count)
    np.savez(path, x=x, y=np.stack([x, x * x], 1).astype(np.float32))


def compressed_npz(path: Path, first: int, count: int) -> None:
    np.savez_compressed(path, x=np.arange(first, first + count), y=np.zeros((count, 3), np.int8))


def array(row: dict[str, Any]) -> int:
    return int(row["array"])


def tar(path: Path, first: int, count: int) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for n in range(first, first + count):
            for kind in ("x", "txt"):
                content = str(n).encode() if kind == "x" else f"text of row {n}".encode()
                member = tarfile.TarInfo(f"sample/{n:06}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def counted_lines(path: Path, first: int, count: int) -> None:
    path.write_text(
        f"{count}\n" + "".join(f"{n} text of row {n}\n" for n in range(first, first + count))
    )


def tables_of_lines(file: BinaryIO) -> Iterator[pa.Table]:
    """Tables of up to four rows each."""
    count = int(file.readline())
    while found := list(islice(file, 4)):
        pairs = [line.decode().rstrip("\n").split(" ", 1) for line in found]
        count -= len(pairs)
        yield pa.table({"x": [int(n) for n, _ in pairs], "text": [text for _, text in pairs]})
    if count:
        raise ValueError(f"{count} rows are missing")


def count_lines(file: BinaryIO) -> int:
    return int(file.readline())


def numbers_in_blocks(file: BinaryIO, block: int) -> pa.Table:
    """Block by block, eight bytes a row and three rows a block."""
    file.seek(24 * block)
    return pa.table({"x": np.frombuffer(file.read(24), "<i8")})


def count_numbers(file: BinaryIO) -> list[int]:
    size = file.seek(0, 2)
    if size % 8:
        raise ValueError(f"{size} bytes are no whole numbers")
    return [min(3, size // 8 - n) for n in range(0, size // 8, 3)]


def bare_numbers(path: Path, first: int, count: int) -> None:
    path.write_bytes(np.arange(first, first + count, dtype="<i8").tobytes())


def x(row: dict[str, Any]) -> int:
    return int(row["x"])


FORMATS = {
    "arrow file": Format(arrow_file, tp.read_arrow, x, ".arrow"),
    "arrow stream": Format(arrow_stream, tp.read_arrow, x, ".arrows"),
    "feather": Format(feather, tp.read_arrow, x, ".feather"),
    "arrow dictionaries": Format(with_dictionary, tp.read_arrow, x, ".arrow"),
    "tar": Format(tar, lambda f: tp.read_webdataset(f, block_rows=5), x, ".tar"),
    "tar, gzip": Format(tar, tp.read_webdataset, x, ".tar.gz"),
    "own format": Format(
        counted_lines, lambda f: tp.read_files(f, tables_of_lines, count_lines), x, ".l"
    ),
    "own format, not counted": Format(
        counted_lines, lambda f: tp.read_files(f, tables_of_lines), x, ".l"
    ),
    "own format, in blocks": Format(
        bare_numbers,
        lambda f: tp.read_files(f, numbers_in_blocks, count_numbers),
        x,
        ".i8",
        cut=False,
    ),
    "npy": Format(npy, lambda f: tp.read_numpy(f, block_rows=6), array, ".npy"),
    "npz": Format(npz, lambda f: tp.read_numpy(f, block_rows=6), x, ".npz"),
    "npz, compressed": Format(compressed_npz, tp.read_numpy, x, ".npz"),
    "arrow, cut evenly": Format(arrow_file, lambda f: tp.read_arrow(f, block_rows=5), x, ".arrow"),
    "parquet": Format(parquet, tp.read_parquet, x, ".parquet"),
    "json lines": Format(json_lines, tp.read_json, x, ".jsonl", cut=False),
    "json lines, cut evenly": Format(
        json_lines, lambda f: tp.read_json(f, block_rows=5), x, ".jsonl", cut=False
    ),
    "json lines, gzip": Format(json_lines, lambda f: tp.read_json(f, block_rows=3), x, ".jsonl.gz"),
    "json lines, zstd": Format(json_lines, tp.read_json, x, ".jsonl.zst"),
    "json array": Format(json_array, lambda f: tp.read_json(f, block_rows=6), x, ".json"),
    "csv": Format(comma_separated, lambda f: tp.read_csv(f, block_rows=5), x, ".csv", cut=False),
    "tsv, gzip": Format(tab_separated, tp.read_csv, x, ".tsv.gz"),
    "lines": Format(lines, lambda f: tp.read_text(f, block_rows=4), first_word, ".txt", cut=False),
    "paragraphs": Format(
        paragraphs, lambda f: tp.read_text(f, "paragraph", block_rows=4), first_word, ".txt.zst"
    ),
}
