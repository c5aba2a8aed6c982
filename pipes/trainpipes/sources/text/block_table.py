"""What is kept of files of text: a row for each, with its pieces and what was found of its types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart, one_chunk, python_to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.sources.text.block_scan import Pieces
from trainpipes.sources.text.format import Start

#: What is kept of each piece; see ``Pieces``.
PIECES = ("stops", "rows", "lines", "checks", "entries", "places")
#: More bytes or rows than a file has.
MOST = 2.0**62

COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("size", pa.int64()),
        ("compression", pa.string()),
        ("start", pa.int64()),
        ("header", pa.list_(pa.string())),
        ("lines_before", pa.int64()),
        *((name, pa.list_(pa.int64())) for name in PIECES),
        ("schema", pa.binary()),  # empty where nobody looked
        ("sampled_rows", pa.int64()),
        ("sampled_bytes", pa.list_(pa.float64())),
    ]
)


@dataclass
class FileEntry:
    """What is known of one file.

    Args:
        size: bytes of the file.
        compression: what it is compressed with; "" for nothing.
        pieces: of it.
        schema: of the rows that were looked at; None if none were.
        sampled_rows: rows that were looked at.
        sampled_bytes: bytes of these in memory, of each column.
    """

    size: int
    compression: str
    pieces: Pieces
    schema: pa.Schema | None = None
    sampled_rows: int = 0
    sampled_bytes: Sequence[float] = ()


def table_of(entries: Sequence[FileEntry], names: Sequence[str], stamps: Sequence[str]) -> pa.Table:
    """Entries of files with these names and stamps as a table."""
    values = {
        "path": names,
        "stamp": stamps,
        "size": [one.size for one in entries],
        "compression": [one.compression for one in entries],
        "start": [one.pieces.start.at for one in entries],
        "header": [list(one.pieces.start.header) for one in entries],
        "lines_before": [one.pieces.lines_before for one in entries],
        **{name: [getattr(one.pieces, name) for one in entries] for name in PIECES},
        "schema": [
            b"" if one.schema is None else one.schema.serialize().to_pybytes() for one in entries
        ],
        "sampled_rows": [one.sampled_rows for one in entries],
        "sampled_bytes": [list(one.sampled_bytes) for one in entries],
    }
    columns = {f.name: python_to_arrow(values[f.name], f.type) for f in COLUMNS}
    return pa.table(columns, schema=COLUMNS)


def entry_of(table: pa.Table) -> FileEntry:
    """What a table of one row says."""
    one = table.to_pylist()[0]
    pieces = Pieces(Start(one["start"], tuple(one["header"])), lines_before=one["lines_before"])
    for name in PIECES:
        setattr(pieces, name, one[name])
    schema = pa.ipc.read_schema(pa.py_buffer(one["schema"])) if one["schema"] else None
    return FileEntry(
        one["size"],
        one["compression"],
        pieces,
        schema,
        one["sampled_rows"],
        one["sampled_bytes"],
    )


def flat(table: pa.Table, name: str) -> tuple[IntArray, IntArray]:
    """A column of lists of integers: all of them, and where each file's begin, int64 ``[files + 1]``."""
    values, starts = apart(one_chunk(table.column(name)))
    return to_numpy(values).astype(np.int64), starts.astype(np.int64)


def is_sound(table: pa.Table) -> bool:
    """Whether a table can be what files were found to be: nothing missing, no place before another."""
    if not table.schema.equals(COLUMNS) or any(c.null_count for c in table.columns):
        return False
    table.validate(full=True)
    lists = [one_chunk(table.column(n)) for n in (*PIECES, "header", "sampled_bytes")]
    if any(column.flatten().null_count for column in lists):
        return False
    (stops, firsts), (rows, _) = flat(table, "stops"), flat(table, "rows")
    if any(not np.array_equal(flat(table, name)[1], firsts) for name in PIECES):
        return False
    numbers = [to_numpy(one_chunk(table.column(n))) for n in ("size", "start", "lines_before")]
    numbers += [flat(table, name)[0] for name in PIECES]
    if any((each < 0).any() or np.sum(each, dtype=np.float64) > MOST for each in numbers):
        return False
    begins = begins_of(stops, firsts, to_numpy(one_chunk(table.column("start"))))
    places = flat(table, "places")[0]
    try:
        for written in table.column("schema").to_pylist():
            if written:
                pa.ipc.read_schema(pa.py_buffer(written))
    except (pa.ArrowException, OSError):
        return False
    return bool((begins <= stops).all() and (rows > 0).all() and (places <= begins).all())


def begins_of(stops: IntArray, firsts: IntArray, starts: IntArray) -> IntArray:
    """Where each piece begins: where the one before it ends, or the file's rows begin."""
    found = np.roll(stops, 1)
    some = firsts[:-1] < firsts[1:]
    found[firsts[:-1][some]] = starts[some]
    return found
