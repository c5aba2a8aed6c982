"""Files of each format with rows that cannot be used, and what a quarantine lists of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

import trainpipes as tp
from damaged_files import tar
from trainpipes.sources.arrow_layout import read_layout

#: Rows of a file, of a row group or a record batch; bytes of a row of text that is not too long.
ROWS, GROUP, LONG = 20, 5, 300


def text_of(number: int) -> str:
    return f"row {number} é" * (1 + number % 3)


def broken_line(number: int) -> bytes:
    line = json.dumps({"id": number, "text": text_of(number)}).encode()
    ways = [
        line[: 3 + number % 20],
        b"garbage",
        b'{"id": 1, "text": "not ended}',
        b'{"id": 1, "text": "\xff\xfe"}',
        b'{"id": 1, "text": "' + b"x" * LONG + b'"}',
        b'{"id": "a text", "text": "x"}',
        line + line,
    ]
    return ways[number % len(ways)]


def json_lines(numbers: range, bad: Collection[int]) -> bytes:
    lines = []
    for n in numbers:
        line = json.dumps({"id": n, "text": text_of(n)}).encode()
        lines.append(broken_line(n) if n in bad else line)
    return b"\n".join(lines) + b"\n"


def csv_lines(numbers: range, bad: Collection[int]) -> bytes:
    lines = [b"id,text"]
    for n in numbers:
        ways = [b"1,2,3", b"1", b"1,\xff\xfe", b"1," + b"x" * LONG]
        lines.append(ways[n % len(ways)] if n in bad else f"{n},{text_of(n)}".encode())
    return b"\n".join(lines) + b"\n"


def archive(numbers: range, bad: Collection[int]) -> bytes:
    found: list[tuple[str, bytes]] = []
    for n in numbers:
        members = {"id": str(n).encode(), "text": text_of(n).encode()}
        if n in bad and n % 2:
            del members["id"]
        elif n in bad:
            members["text"] = b"\xff\xfe"
        found += [(f"{n:05}.{kind}", content) for kind, content in members.items()]
    return tar(*found)


def table_of(numbers: range) -> pa.Table:
    return pa.table({"id": pa.array(numbers, pa.int64()), "text": [text_of(n) for n in numbers]})


def parquet(numbers: range, bad: Collection[int]) -> bytes:
    file = io.BytesIO()
    how: Any = {"row_group_size": GROUP, "write_page_checksum": True, "compression": "none"}
    pq.write_table(table_of(numbers), file, **how)
    content, metadata = bytearray(file.getvalue()), pq.read_metadata(file)
    for group in range(metadata.num_row_groups):
        if numbers[group * GROUP] in bad:
            place = metadata.row_group(group).column(1)
            start = place.dictionary_page_offset or place.data_page_offset
            content[start + place.total_compressed_size - 3] ^= 0xFF
    return bytes(content)


def arrow(numbers: range, bad: Collection[int]) -> bytes:
    file = io.BytesIO()
    table = table_of(numbers)
    pyarrow.feather.write_feather(table, file, compression="zstd", chunksize=GROUP)
    content = bytearray(file.getvalue())
    layout = read_layout(lambda parts: [bytes(content[a:b]) for a, b in parts], len(content))
    for batch, stop in enumerate(layout.stop.tolist()):
        if numbers[batch * GROUP] in bad:
            content[stop - 24 : stop] = b"\xff" * 24
    return bytes(content)


def in_groups(bad: Collection[int]) -> set[int]:
    """All rows of the groups that have a bad one."""
    return {n for one in bad for n in range(one // GROUP * GROUP, (one // GROUP + 1) * GROUP)}


Write = Callable[[range, Collection[int]], bytes]
#: By format: what writes a file, its end, and what reads it.
FORMATS: dict[str, tuple[Write, str, Callable[..., tp.Pipeline]]] = {
    "json": (json_lines, "jsonl", lambda f, **how: tp.read_json(f, max_row_bytes=LONG, **how)),
    "csv": (csv_lines, "csv", lambda f, **how: tp.read_csv(f, max_row_bytes=LONG, **how)),
    "tar": (archive, "tar", lambda f, **how: tp.read_webdataset(f, text=["text"], **how)),
    "parquet": (parquet, "parquet", tp.read_parquet),
    "arrow": (arrow, "feather", tp.read_arrow),
}
GROUPED = ("parquet", "arrow")


def write_files(folder: Path, kind: str, files: int, bad: Collection[int]) -> str:
    write, end, _ = FORMATS[kind]
    bad = in_groups(bad) if kind in GROUPED else bad
    for number in range(0 if folder.exists() else files):  # others may be reading them
        folder.mkdir(exist_ok=True)
        numbers = range(number * ROWS, (number + 1) * ROWS)
        (folder / f"{number}.{end}").write_bytes(write(numbers, bad))
    return str(folder / f"*.{end}")


def listed(folder: Path) -> list[dict[str, Any]]:
    """The lines of a quarantine."""
    if not folder.exists():
        return []
    texts = [one.read_text() for one in sorted(folder.iterdir())]
    assert all(text.endswith("\n") for text in texts)
    return [json.loads(line) for text in texts for line in text.splitlines()]


def numbers_of(lines: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """Epoch and number of each row that is listed."""
    return {(line["epoch"], int(Path(line["file"]).stem) * ROWS + line["row"]) for line in lines}
