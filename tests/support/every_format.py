"""Every format that is read from files: how a test writes rows in it, reads them, and tells them apart.

Rows have ``x``, a number that a test wants to see again, ``y`` and ``text``. A format that holds no such
columns has them as a line of JSON in one column of text, or only the numbers.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.feather
import pyarrow.parquet as pq

import trainpipes as tp
from trainpipes.sources.files.file_bytes import FileBytes

__all__ = ["FORMATS", "Format", "opened", "table", "written"]


@dataclass(frozen=True)
class Format:
    """A format under test.

    Args:
        write: the bytes of a file of these rows, in blocks of so many.
        read: the rows of files, in blocks of so many.
        suffix: what names of its files end with.
        text: whether a row is a line of JSON in one column of text.
        columns: whether rows have just the columns that were written, in their types.
        blocks: whether blocks are those that are asked for.
        cut: whether a file that is cut off is found out.
        reads: how often each file is read, column by column.
    """

    write: Callable[[pa.Table, int], bytes]
    read: Callable[..., tp.Pipeline]
    suffix: str
    text: bool = False
    columns: bool = True
    blocks: bool = True
    cut: bool = True
    reads: int = 1

    def number(self, row: Any) -> int:
        """The number of a row."""
        return int((json.loads(row["text"]) if self.text else row)["x"])


def opened(pipe: tp.Pipeline) -> Any:
    """The source that a reader of files opens."""
    *below, reader = pipe.stages
    return reader._open_on(below)


def table(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "x": pa.array(numbers, pa.int64()),
            "y": pa.array([n / 7 for n in numbers], pa.float64()),
            "text": pa.array([f'row {n}, "{"é" * (n % 5)}"' for n in numbers], pa.string()),
        }
    )


def written(folder: Path, format: Format, counts: Sequence[int], rows: int) -> list[str]:
    """Files of so many rows, numbered from 0 over all of them, in blocks of ``rows``."""
    first, paths = 0, []
    for number, count in enumerate(counts):
        path = folder / f"{number}{format.suffix}"
        path.write_bytes(format.write(table(first, count), rows))
        paths.append(str(path))
        first += count
    return paths


# Files


def parquet(found: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, found.schema) as file:
        if len(found):  # else it would write a row group without rows
            file.write_table(found, row_group_size=rows)
    return bytes(sink.getvalue())


def arrow(found: pa.Table, rows: int, make: Callable[..., Any] = pa.ipc.new_file) -> bytes:
    sink = pa.BufferOutputStream()
    with make(sink, found.schema) as file:
        file.write_table(found, max_chunksize=rows)
    return bytes(sink.getvalue())


def arrow_stream(found: pa.Table, rows: int) -> bytes:
    return arrow(found, max(1, rows // 3), pa.ipc.new_stream)


def with_dictionaries(found: pa.Table, rows: int) -> bytes:
    """With a column of which each batch has another dictionary."""
    sink = pa.BufferOutputStream()
    schema = found.schema.append(pa.field("kind", pa.dictionary(pa.int32(), pa.string())))
    with pa.ipc.new_stream(sink, schema) as file:
        for first in range(0, len(found), rows):
            part = found.slice(first, rows)
            kinds = pa.array([f"kind {first}"] * len(part), pa.string()).dictionary_encode()
            file.write_table(part.append_column(schema.field("kind"), kinds))
    return bytes(sink.getvalue())


def feather(found: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(found, sink, compression="zstd", chunksize=rows + 7)
    return bytes(sink.getvalue())


def lines_of(found: pa.Table) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in found.to_pylist()]


def json_lines(found: pa.Table, rows: int) -> bytes:
    return b"".join(lines_of(found))


def json_array(found: pa.Table, rows: int) -> bytes:
    return json.dumps(found.to_pylist()).encode()


def paragraphs(found: pa.Table, rows: int) -> bytes:
    return b"".join(line + b"\n\n" for line in lines_of(found))


def cells(found: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pcsv.write_csv(found, sink)
    return bytes(sink.getvalue())


def tabs(found: pa.Table, rows: int) -> bytes:
    pairs = [f"{row['x']}\t{row['y']}\n" for row in found.to_pylist()]
    return "".join(["x\ty\n", *pairs]).encode()


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def packed(
    write: Callable[[pa.Table, int], bytes], pack: Callable[[bytes], bytes]
) -> Callable[[pa.Table, int], bytes]:
    """Compressed in members that end where they will, not where blocks do."""

    def members(found: pa.Table, rows: int) -> bytes:
        data = write(found, rows)
        step = max(50, len(data) // 400)
        return b"".join(pack(data[n : n + step]) for n in range(0, len(data), step)) or pack(b"")

    return members


def tar(found: pa.Table, rows: int, mode: str = "w") -> bytes:
    """Samples of two members, one of them the row as JSON."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as archive:  # type: ignore[call-overload]
        for row, line in zip(found.to_pylist(), lines_of(found), strict=True):
            for kind, content in (("text", line), ("cls", b"1")):
                member = tarfile.TarInfo(f"{row['x']:06}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def numbers(found: pa.Table, rows: int, save: Callable[..., None] = np.savez) -> bytes:
    sink = io.BytesIO()
    x, y = found["x"].to_numpy(), found["y"].to_numpy()
    if save is np.save:
        save(sink, x)
    else:
        save(sink, x=x, y=np.stack([y, y], 1))
    return sink.getvalue()


# Readers


def by_rows(read: Callable[..., tp.Pipeline], **more: Any) -> Callable[..., tp.Pipeline]:
    return lambda files, rows, **options: read(files, block_rows=rows, **more, **options)


def of_parquet(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_parquet(files, **options)


def of_arrow(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_arrow(files, **options)


def count(rows: int, file: BinaryIO) -> list[int]:
    lines = sum(1 for line in file if json.loads(line))
    return [min(rows, lines - start) for start in range(0, lines, rows)]


def tables(file: BinaryIO) -> Iterator[pa.Table]:
    while found := [json.loads(line) for line in islice(file, 7)]:
        yield pa.Table.from_pylist(found)


def tables_of_block(rows: int, file: BinaryIO, block: int) -> Iterator[pa.Table]:
    return tables(islice(file, block * rows, (block + 1) * rows))  # type: ignore[arg-type]


def own(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    """Lines of JSON by functions of the user's own, block by block."""
    read = partial(tables_of_block, rows)
    return tp.read_files(files, read, partial(count, rows), version="1", **options)


def uncounted(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_files(files, tables, **options)


class Lines(tp.Format):
    """Lines of JSON, so many a block."""

    name, suffixes = "lines", (".lines",)
    schema = pa.schema([("x", pa.int64()), ("y", pa.float64()), ("text", pa.string())])

    def __init__(self, rows: int) -> None:
        self.rows, self.key = rows, str(rows)

    def scan(self, file: FileBytes) -> tp.Layout:
        with file.stream() as lines:
            ends = np.cumsum([0, *map(len, lines)])
        firsts = np.arange(0, len(ends), self.rows)[: -(-(len(ends) - 1) // self.rows)]
        edges = np.append(firsts, len(ends) - 1)
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema.serialize()))
        first, last = file.read([(0, min(1, file.size)), (max(0, file.size - 2), file.size)])
        if file.size and (bytes(first), bytes(last)) != (b"{", b"}\n"):
            raise ValueError("no lines of JSON")
        if file.size and b'{"z"' in file.read([(0, file.size)])[0].tobytes():
            schema = schema.set(0, pa.field("x", pa.struct([("z", pa.int64())])))
        return tp.Layout(np.diff(edges), ends[edges[:-1]], ends[edges[1:]], schema)

    def decode(self, data: FileBytes, layout: tp.Layout, block: int, columns: Any) -> Any:
        [content] = data.read(self.ranges(layout, block, columns))
        rows = [json.loads(line) for line in content.tobytes().splitlines()]
        for first in range(0, len(rows), 7):
            yield pa.RecordBatch.from_pylist(rows[first : first + 7], schema=layout.schema)


def of_format(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_files(files, Lines(rows), **options)


def side_by_side(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    """The columns by two readers, whose blocks do not end at the same rows."""
    found = tp.read_json(files, ["x"], block_rows=rows, **options)
    return found.zip(tp.read_json(files, ["y", "text"], block_rows=rows // 2 + 1, **options))


of_json, of_text, of_numpy = by_rows(tp.read_json), by_rows(tp.read_text), by_rows(tp.read_numpy)
of_tar = by_rows(tp.read_webdataset, columns=["text"], text="text")
FORMATS = {
    "parquet": Format(parquet, of_parquet, ".parquet"),
    "arrow": Format(arrow, of_arrow, ".arrow"),
    "arrow stream": Format(arrow_stream, by_rows(tp.read_arrow), ".arrows"),
    "arrow dictionaries": Format(with_dictionaries, of_arrow, ".arrow", columns=False),
    "feather": Format(feather, by_rows(tp.read_arrow), ".feather"),
    "npy": Format(
        partial(numbers, save=np.save),
        by_rows(tp.read_numpy, output_column="x"),
        ".npy",
        columns=False,
    ),
    "npz": Format(numbers, of_numpy, ".npz", columns=False),
    "npz, compressed": Format(
        partial(numbers, save=np.savez_compressed), of_numpy, ".npz", columns=False
    ),
    "own functions": Format(json_lines, own, ".own"),
    "own functions, not counted": Format(json_lines, uncounted, ".own", blocks=False),
    "own format": Format(json_lines, of_format, ".lines"),
    "tar": Format(tar, of_tar, ".tar", text=True, columns=False),
    "tar, gzip": Format(partial(tar, mode="w:gz"), of_tar, ".tar.gz", text=True, columns=False),
    "json lines": Format(json_lines, of_json, ".jsonl"),
    "json array": Format(json_array, of_json, ".json"),
    "json lines, gzip": Format(packed(json_lines, gzipped), of_json, ".jsonl.gz"),
    "json lines, zstd": Format(packed(json_lines, zstd), of_json, ".jsonl.zst"),
    "csv": Format(cells, by_rows(tp.read_csv), ".csv", cut=False),
    "tsv, gzip": Format(packed(tabs, gzipped), by_rows(tp.read_csv), ".tsv.gz", columns=False),
    "text": Format(json_lines, of_text, ".txt", text=True, columns=False, cut=False),
    "paragraphs, zstd": Format(
        packed(paragraphs, zstd),
        by_rows(tp.read_text, unit="paragraph"),
        ".txt.zst",
        text=True,
        columns=False,
    ),
    "zip": Format(json_lines, side_by_side, ".jsonl", reads=2),
}
