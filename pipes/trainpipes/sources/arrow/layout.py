"""Where the record batches of an Arrow file or stream lie, and their row counts, by their headers.

A flipped bit can hide a flatbuffer's field. So what the format says twice is compared: messages lie side by
side up to the footer, schemas are equal, and each batch counts its rows for each column, too
(https://arrow.apache.org/docs/format/Columnar.html).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.files.format import Layout, packed
from trainpipes.sources.files.schema import plain

#: Gives bytes ``start`` to ``stop`` of a file, of several ranges at once.
Fetch = Callable[[list[tuple[int, int]]], list[bytes]]

MAGIC = b"ARROW1"
#: What a message starts with.
CONTINUED = 0xFFFFFFFF
#: What the headers of messages are about.
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
#: Bytes that are read of a message's header at first.
HEAD = 4096
#: Bytes between two messages at most: writers let them begin at multiples of up to 64.
PADDING = 63
#: Bytes that end a stream, also within a file.
END = 8
#: A footer's message: its start, and the bytes of header and body. A batch's column: its rows.
BLOCK, NODE = struct.Struct("<qi4xq"), struct.Struct("<q8x")


class Message(NamedTuple):
    """An Arrow file's message at bytes ``start`` to ``stop``; a ``delta`` adds to a dictionary."""

    start: int
    stop: int
    kind: int
    rows: int = 0
    compressed: bool = False
    dictionary: int = -1
    delta: bool = False


def spans_before(about: dict[str, Any], batch: int) -> list[tuple[int, int]]:
    """Where the schema and the dictionaries of a record batch lie; none in a file without dictionaries."""
    if about["dictionaries"] is None:
        return []
    found: dict[int, list[tuple[int, int]]] = {}
    for before, start, stop, number, delta in about["dictionaries"]:
        if before <= batch:
            found[number] = [*(found.get(number, ()) if delta else ()), (start, stop)]
    return [tuple(about["schema"]), *sorted(one for each in found.values() for one in each)]


def read_layout(fetch: Fetch, size: int) -> Layout:
    """The record batches of an Arrow file of ``size`` bytes."""
    if size == 0:
        raise BadFileError("empty: 0 bytes")
    head = fetch([(0, min(size, 8 + PADDING))])[0]
    if head.startswith(b"FEA1"):
        raise BadFileError(
            "Feather of version 1, which is no Arrow file: write it anew with "
            "pyarrow.feather.write_feather(pyarrow.feather.read_table(path), path)"
        )
    if head.startswith(b"PAR1"):
        raise BadFileError("a Parquet file: use read_parquet()")
    try:
        if head.startswith(MAGIC):
            return _kept(*_file(fetch, size, head))
        if head[:4] == b"\xff\xff\xff\xff":
            return _kept(*_stream(fetch, size))
    except (struct.error, IndexError) as error:
        raise BadFileError(f"damaged: a header cannot be understood ({error})") from error
    raise BadFileError(f"not an Arrow file (starts with {head[:8]!r})")


def _kept(messages: list[Message], schema: pa.Schema) -> Layout:
    batches: list[tuple[int, int, int]] = []
    dictionaries = []
    for one in messages[1:]:
        if one.kind == DICTIONARY:
            dictionaries.append([len(batches), one.start, one.stop, one.dictionary, one.delta])
        elif one.kind != BATCH:
            raise BadFileError(f"damaged: a message of kind {one.kind} at byte {one.start:,}")
        elif one.rows:
            batches.append((one.rows, one.start, one.stop))
    rows, start, stop = np.array(batches, dtype=np.int64).reshape(-1, 3).T
    encoded = any(_encoded(field.type) for field in schema)
    if dictionaries and not encoded:
        raise BadFileError(f"damaged: a dictionary of no column at byte {dictionaries[0][1]:,}")
    extra = packed(
        schema=[messages[0].start, messages[0].stop],
        compressed=any(one.compressed for one in messages),
        dictionaries=dictionaries if encoded else None,
    )
    return Layout(rows, start, stop, pa.schema([plain(field) for field in schema]), extra)


def _stream(fetch: Fetch, size: int) -> tuple[list[Message], pa.Schema]:
    first, schema = _begun(fetch, 0, size)
    found = [first]
    while (at := found[-1].stop) < size and (message := _message(fetch, at, size)) is not None:
        found.append(message)
    at += END
    if at < size and any(fetch([(at, min(size, at + END))])[0]):
        raise BadFileError(
            f"it goes on behind its end, at byte {at:,}, as streams do that were put together by cat: read "
            "them one by one"
        )
    return found, schema


def _file(fetch: Fetch, size: int, head: bytes) -> tuple[list[Message], pa.Schema]:
    tail = fetch([(max(0, size - 10), size)])[0]
    if size < 30 or tail[-6:] != MAGIC:
        raise BadFileError(f"cut short: {size:,} bytes, its footer is missing")
    (length,) = struct.unpack("<i", tail[:4])
    if not 0 < length <= size - 18:
        raise BadFileError(f"damaged: {size:,} bytes long, and its footer would have {length:,}")
    end = size - 10 - length
    footer = fetch([(end, size - 10)])[0]
    begin = len(head) - len(head[len(MAGIC) :].lstrip(b"\0"))
    first, schema = _begun(fetch, begin, size)
    if not _schema_of(footer, tail).equals(schema, check_metadata=True):
        raise BadFileError("damaged: its footer and its first message have different schemas")
    table = _Table.root(footer)
    blocks = [*table.vector(2, BLOCK), *table.vector(3, BLOCK)]  # dictionaries, record batches
    if any(start < 0 or header < 8 or start + header > size for start, header, _ in blocks):
        raise BadFileError("damaged: its footer names bytes that it does not have")
    heads = fetch([(start, start + header) for start, header, _ in blocks])
    found = [first]
    for (start, header, body), said in zip(blocks, heads, strict=True):
        message = _message(fetch, start, size, said)
        if message is None or message.stop != start + header + body:
            raise BadFileError(f"damaged: its footer and its message at byte {start:,} differ")
        found.append(message)
    _check_side_by_side([(one.start, one.stop) for one in found], end)
    return found, schema


def _schema_of(footer: bytes, tail: bytes) -> pa.Schema:
    """The schema in a footer, read as a file of nothing else."""
    alone = pa.py_buffer(MAGIC + b"\0\0" + footer + tail)
    try:
        return pa.ipc.open_file(alone).schema
    except (pa.ArrowException, OSError) as error:
        raise BadFileError(f"damaged footer: {one_line(error)}") from error


def _check_side_by_side(spans: list[tuple[int, int]], end: int) -> None:
    """Raise unless messages lie side by side: this finds those that a damaged footer leaves out."""
    spans = sorted(spans)
    starts = [start for start, _ in spans[1:]]
    starts.append(end if spans[-1][1] == end else end - END)
    for (_, stop), start in zip(spans, starts, strict=True):
        if not 0 <= start - stop <= PADDING:
            what = f"no message from byte {stop:,} to" if stop < start else "two messages at byte"
            raise BadFileError(f"damaged: its footer lists {what} {start:,}")


def _begun(fetch: Fetch, at: int, size: int) -> tuple[Message, pa.Schema]:
    first = _message(fetch, at, size)
    if first is None or first.kind != SCHEMA:
        raise BadFileError("damaged: it does not begin with a schema")
    try:
        return first, pa.ipc.read_schema(pa.py_buffer(fetch([(first.start, first.stop)])[0]))
    except (pa.ArrowException, OSError) as error:
        raise BadFileError(f"damaged schema: {one_line(error)}") from error


def _encoded(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _encoded(kind.storage_type)
    inner = (kind.field(n).type for n in range(kind.num_fields))
    return bool(pa.types.is_dictionary(kind)) or any(map(_encoded, inner))


def _message(fetch: Fetch, at: int, size: int, head: bytes | None = None) -> Message | None:
    """The message at a byte; None for the end of a stream."""
    head = head or fetch([(at, min(size, at + HEAD))])[0]
    if len(head) < 8:
        raise BadFileError(f"cut short: {size:,} bytes, and a message begins at byte {at:,}")
    mark, length = struct.unpack_from("<Ii", head)
    if mark != CONTINUED:
        raise BadFileError(f"damaged: no message at byte {at:,}")
    if not length:
        return None
    if length < 0 or at + 8 + length > size:
        raise BadFileError(
            f"cut short or damaged: the header at byte {at:,} would have {length:,} bytes"
        )
    if len(head) < 8 + length:
        head = fetch([(at, at + 8 + length)])[0]
    root = _Table.root(head[8 : 8 + length])
    kind, body, content = root.number(1, "<B"), root.number(3, "<q"), root.table(2)
    stop = at + 8 + length + body
    if body < 0 or stop > size:
        raise BadFileError(
            f"cut short: {size:,} bytes, and the message at byte {at:,} goes to {stop:,}"
        )
    if content is None:
        raise BadFileError(f"damaged: a message without a header at byte {at:,}")
    if kind == DICTIONARY:
        delta = bool(content.number(2, "<B"))
        return Message(at, stop, kind, dictionary=content.number(0, "<q"), delta=delta)
    if kind != BATCH:
        return Message(at, stop, kind)
    rows, columns = content.number(0, "<q"), content.vector(1, NODE)
    # They are counted for each column, too; the parts of nested ones follow it.
    good = columns[0][0] == rows if columns else not body
    if not good or not 0 <= rows < 1 << 40:
        raise BadFileError(f"damaged: a record batch of {rows:,} rows at byte {at:,}")
    return Message(at, stop, kind, rows, content.table(3) is not None)


class _Table:
    """A table of flatbuffers: fields by number."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._slots = at - self._get("<i", at)

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, *struct.unpack_from("<I", data))

    def _get(self, kind: str, at: int) -> int:
        if at < 0:  # which is no error for struct
            raise IndexError(f"byte {at} of {len(self._data)}")
        return int(struct.unpack_from(kind, self._data, at)[0])

    def _place(self, field: int) -> int:
        slot = 4 + 2 * field
        offset = self._get("<H", self._slots + slot) if slot < self._get("<H", self._slots) else 0
        return self._at + offset if offset else 0

    def number(self, field: int, kind: str) -> int:
        place = self._place(field)
        return self._get(kind, place) if place else 0

    def _leads_to(self, field: int) -> int:
        place = self._place(field)
        return place + self._get("<I", place) if place else 0

    def table(self, field: int) -> _Table | None:
        at = self._leads_to(field)
        return _Table(self._data, at) if at else None

    def vector(self, field: int, item: struct.Struct) -> list[tuple[int, ...]]:
        at = self._leads_to(field)
        stop = at + 4 + self._get("<I", at) * item.size if at else 0
        if stop > len(self._data):
            raise IndexError(f"byte {stop} of {len(self._data)}")
        return list(item.iter_unpack(self._data[at + 4 : stop])) if at else []
