"""Where the record batches of an Arrow file or stream lie, and their row counts, by their headers.

A file is read as the stream that it holds: message follows message up to the footer, so that a damaged
footer hides none. A flipped bit can hide a flatbuffer's field. So facts that the format says twice are
compared: the schema, and each batch's rows, which it counts for each column, too
(https://arrow.apache.org/docs/format/Columnar.html).


Rows of a record batch in a file, read piece by piece; of a local one into memory of our own.

A map is faster, but it kills the process when the file is cut, or its disk fails. A piece holds no bytes of
other columns.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.sources.files import formats

#: Gives bytes ``start`` to ``stop`` of a file, of several ranges at once.
Fetch = Callable[[list[tuple[int, int]]], list[bytes]]

MAGIC = b"ARROW1"
#: What a message starts with.
CONTINUED = b"\xff\xff\xff\xff"
#: What the headers of messages are about.
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
#: Bytes that are read of a message's header at first.
HEAD = 4096
#: Bytes between two messages at most: writers let them begin at multiples of up to 64.
PADDING = 63
#: Bytes that are read before and behind a header: of the bodies of record batches, to know their content.
SAMPLE = 1024
#: A footer's message: its start, and the bytes of header and body. A batch's column: its rows.
BLOCK, NODE = struct.Struct("<qi4xq"), struct.Struct("<q8x")


def spans_before(about: dict[str, Any], batch: int) -> list[tuple[int, int]]:
    """Where the schema and the dictionaries of a record batch lie; none in a file without dictionaries."""
    if about["dictionaries"] is None:
        return []
    messages: dict[int, list[tuple[int, int]]] = {}
    for before, start, stop, number, delta in about["dictionaries"]:
        if before <= batch:
            messages[number] = [*(messages.get(number, ()) if delta else ()), (start, stop)]
    return [
        tuple(about["schema"]),
        *sorted(message for each in messages.values() for message in each),
    ]


def read_layout(fetch: Fetch, size: int) -> formats.Layout:
    """The record batches of an Arrow file of ``size`` bytes."""
    if size == 0:
        raise formats.BadFileError("empty: 0 bytes")
    head, footer = fetch([(0, min(size, 8))])[0], b""
    if head.startswith(b"FEA1"):
        raise formats.BadFileError(
            "Feather of version 1, which is no Arrow file: write it anew with "
            "pyarrow.feather.write_feather(pyarrow.feather.read_table(path), path)"
        )
    if head.startswith(b"PAR1"):
        raise formats.BadFileError("a Parquet file: use read_parquet()")
    if head.startswith(MAGIC):
        footer = _footer(fetch, size)
    elif head[:4] != CONTINUED:
        raise formats.BadFileError(f"not an Arrow file (starts with {head!r})")
    try:
        about = len(head) if footer else 0, size - len(footer), footer
        messages, content = _messages(fetch, *about)
        first = messages[0] if messages else None
        if first is None or first[2].number(1, "<B") != SCHEMA or first[2].table(2) is None:
            raise formats.BadFileError("damaged: it does not begin with a schema")
        schema = _parsed(pa.ipc.read_schema, fetch([first[:2]])[0], "schema")
        batches, dictionaries, compressed = _parts(messages[1:], len(schema), bool(footer))
    except (struct.error, IndexError) as error:
        raise formats.BadFileError(f"damaged: a header cannot be understood ({error})") from error
    if footer:  # read as a file of nothing else
        reader = _parsed(pa.ipc.open_file, MAGIC + b"\0\0" + footer, "footer")
        if not reader.schema.equals(schema, check_metadata=True):
            raise formats.BadFileError(
                "damaged: its footer and its first message have different schemas"
            )
    encoded = any(_encoded(field.type) for field in schema)
    if dictionaries and not encoded:
        raise formats.BadFileError(
            f"damaged: a dictionary of no column at byte {dictionaries[0][1]:,}"
        )
    extra = formats.packed(
        schema=first[:2],
        compressed=compressed,
        dictionaries=dictionaries if encoded else None,
        content=zlib.crc32(footer, content),
    )
    rows, start, stop = np.array(batches, dtype=np.int64).reshape(-1, 3).T
    return formats.Layout(
        rows, start, stop, pa.schema([formats.plain(field) for field in schema]), extra
    )


def _parsed(parse: Callable[[pa.Buffer], Any], content: bytes, part: str) -> Any:
    try:
        return parse(pa.py_buffer(content))
    except (pa.ArrowException, OSError) as error:
        raise formats.BadFileError(f"damaged {part}: {formats.one_line(error)}") from error


def _encoded(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _encoded(kind.storage_type)
    inner = (kind.field(n).type for n in range(kind.num_fields))
    return bool(pa.types.is_dictionary(kind)) or any(map(_encoded, inner))


def _footer(fetch: Fetch, size: int) -> bytes:
    """The footer and the bytes after it."""
    tail = fetch([(max(0, size - 10), size)])[0]
    if size < 30 or tail[-6:] != MAGIC:
        raise formats.BadFileError(f"cut short: {size:,} bytes, its footer is missing")
    (length,) = struct.unpack("<i", tail[:4])
    if not 0 < length <= size - 18:
        raise formats.BadFileError(
            f"damaged: {size:,} bytes long, and its footer would have {length:,}"
        )
    return fetch([(size - 10 - length, size)])[0]


def _heads(fetch: Fetch, footer: bytes, end: int) -> tuple[dict[int, bytes], int]:
    """Headers of messages where the footer says that they are, so that they are fetched at once; and the
    CRC-32 of them and of what lies around them.
    """
    with suppress(struct.error, IndexError):
        table = Table(footer)
        blocks = [*table.vector(2, BLOCK), *table.vector(3, BLOCK)]  # dictionaries, record batches
        for start, header, body in blocks:
            if not (start >= 0 < header and 0 <= body <= end - start - header):
                raise formats.BadFileError(
                    f"damaged: its footer has a message at byte {start:,}, where none begins or fits"
                )
        spans = [(start, start + header) for start, header, _ in blocks]
        around = [(max(0, start - SAMPLE), min(end, stop + SAMPLE)) for start, stop in spans]
        *parts, last = fetch([*around, (max(0, end - SAMPLE), end)])
        heads = {
            start: part[start - first : stop - first]
            for (start, stop), (first, _), part in zip(spans, around, parts, strict=True)
        }
        return heads, zlib.crc32(b"".join([*parts, last]))
    return {}, 0


def _messages(
    fetch: Fetch, at: int, end: int, footer: bytes
) -> tuple[list[tuple[int, int, Table]], int]:
    """Where messages begin and end, which lie side by side, and their headers; a CRC-32 of the bytes that
    were read.
    """
    spans: list[tuple[int, int, Table]] = []
    (heads, content), stop = _heads(fetch, footer, end), at
    while at < end:
        head = heads.get(at, b"")
        if not head:
            head = fetch([(at, min(end, at + HEAD))])[0]
            content = zlib.crc32(head, content)
        if footer and head.startswith(b"\0") and at - stop < PADDING:
            at = min(at + len(head) - len(head.lstrip(b"\0")), stop + PADDING)
            continue
        if len(head) < 8:
            raise formats.BadFileError(
                f"cut short: {end:,} bytes, and a message begins at byte {at:,}"
            )
        if not head.startswith(CONTINUED):
            raise formats.BadFileError(f"damaged: no message at byte {at:,}")
        (length,) = struct.unpack_from("<i", head, 4)
        start, at = at, at + 8 + length
        if not length:
            break
        if length < 0 or at > end:
            raise formats.BadFileError(
                f"cut short or damaged: the header at byte {start:,} would have {length:,} bytes"
            )
        if len(head) < 8 + length:
            head = fetch([(start, at)])[0]
        header = Table(head[8 : 8 + length])
        body = header.number(3, "<q")
        at = stop = at + body
        if body < 0 or stop > end:
            raise formats.BadFileError(
                f"cut short: {end:,} bytes, and the message at byte {start:,} goes to {stop:,}"
            )
        spans.append((start, stop, header))
    for lost in sorted(heads.keys() - {start for start, *_ in spans}):
        raise formats.BadFileError(
            f"damaged: its footer has a message at byte {lost:,}, where none begins"
        )
    if footer and end - at > PADDING:
        raise formats.BadFileError(f"damaged: no message from byte {at:,} to {end:,}")
    if not footer and any(fetch([(at, min(end, at + 8))])[0]):
        raise formats.BadFileError(
            f"it goes on behind its end, at byte {at:,}, as streams do that were put together by cat: read "
            "them one by one"
        )
    return spans, content


def _parts(
    messages: list[tuple[int, int, Table]], fields: int, is_file: bool
) -> tuple[list[tuple[int, int, int]], list[list[int]], bool]:
    """Rows, start and stop of record batches, the dictionaries, and whether any is compressed."""
    batches: list[tuple[int, int, int]] = []
    dictionaries, compressed = [], False
    for start, stop, header in messages:
        kind, content = header.number(1, "<B"), header.table(2)
        if content is None or kind not in (DICTIONARY, BATCH):
            raise formats.BadFileError(f"damaged: a message of kind {kind} at byte {start:,}")
        if kind == DICTIONARY:
            # Those of a file may stand behind the batches that need them.
            before, delta = 0 if is_file else len(batches), content.number(2, "<B")
            dictionaries.append([before, start, stop, content.number(0, "<q"), delta])
            continue
        rows, columns = content.number(0, "<q"), content.vector(1, NODE)
        # They are counted for each column, too; the parts of nested ones follow it.
        good = len(columns) >= fields > 0 and columns[0][0] == rows
        good = good or not (fields or columns or header.number(3, "<q"))
        if not good or not 0 <= rows < 1 << 40:
            raise formats.BadFileError(
                f"damaged: a record batch of {rows:,} rows at byte {start:,}"
            )
        compressed |= content.table(3) is not None
        if rows:
            batches.append((rows, start, stop))
    return batches, dictionaries, compressed


class Table:
    """A table of flatbuffers, to which the offset at a byte leads: fields by number."""

    def __init__(self, data: bytes, offset: int = 0) -> None:
        self._data = data
        self._at = offset + self._get("<I", offset)
        self._slots = self._at - self._get("<i", self._at)

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

    def table(self, field: int) -> Table | None:
        place = self._place(field)
        return Table(self._data, place) if place else None

    def vector(self, field: int, item: struct.Struct) -> list[tuple[int, ...]]:
        place = self._place(field)
        if not place:
            return []
        start = place + self._get("<I", place) + 4
        stop = start + self._get("<I", start - 4) * item.size
        if stop > len(self._data):
            raise IndexError(f"byte {stop} of {len(self._data)}")
        return list(item.iter_unpack(self._data[start:stop]))


#: Reads a range of the file.
Read = Callable[[int, int], pa.Buffer]
#: Calls a function with one that reads.
Reading = Callable[[Callable[[Read], Any]], Any]

#: Bytes of a piece, and of it for each of its buffers, at least.
PIECE, SHARE = 4 << 20, 64 << 10
BUFFER = struct.Struct("<qq")


def can_be_cut(kind: pa.DataType) -> bool:
    """Whether rows of a column can be read without its others."""
    if isinstance(kind, pa.BaseExtensionType):
        return can_be_cut(kind.storage_type)
    if not _is_nested(kind):
        return _is_text(kind) or pa.types.is_null(kind) or _bits(kind) > 0
    return all(can_be_cut(kind.field(n).type) for n in range(kind.num_fields))


def pieces(
    reading: Reading, schema: pa.Schema, span: tuple[int, int], rows: int, columns: list[int]
) -> Iterator[pa.RecordBatch]:
    """Some columns of the ``rows`` of an uncompressed batch, whose message lies in ``span``."""
    buffers = reading(partial(_buffers, span))
    places, count = {}, 0
    for number, kind in enumerate(schema.types):
        places[number], count = count, count + _count(kind)
    if count != len(buffers):
        raise formats.BadFileError(
            f"damaged: a record batch of {len(buffers):,} buffers, not {count:,}"
        )
    wanted = {n: buffers[places[n] : places[n] + _count(schema.types[n])] for n in columns}
    each = [stop - start for some in wanted.values() for start, stop in some]
    size = max(PIECE, SHARE * len(each))
    step = max(8, rows * size // max(1, sum(each)) // 8 * 8)  # whole bytes of bits
    chosen = pa.schema([schema.field(n) for n in columns])

    def read_rows(first: int, last: int, read: Read) -> list[pa.Array]:
        kinds = zip(chosen.types, wanted.values(), strict=True)
        return [_rows(read, kind, iter(places), first, last) for kind, places in kinds]

    for first in range(0, rows, step):
        arrays = reading(partial(read_rows, first, min(first + step, rows)))
        yield pa.RecordBatch.from_arrays(arrays, schema=chosen)


def _buffers(span: tuple[int, int], read: Read) -> list[tuple[int, int]]:
    """Where a message's buffers begin and end in the file."""
    start, stop = span
    head = read(start, min(start + HEAD, stop)).to_pybytes()
    (length,) = struct.unpack_from("<i", head, 4)
    body = start + 8 + length
    if not start + 8 < body <= stop:
        raise formats.BadFileError(
            f"damaged: the header at byte {start:,} would have {length:,} bytes"
        )
    if body > start + len(head):
        head = read(start, body).to_pybytes()
    batch = Table(head[8 : 8 + length]).table(2)
    places = batch.vector(2, BUFFER) if batch else []
    if any(begin < 0 or size < 0 or body + begin + size > stop for begin, size in places):
        raise formats.BadFileError(
            f"damaged: the message at byte {start:,} ends before its buffers do"
        )
    return [(body + begin, body + begin + size) for begin, size in places]


def _is_nested(kind: pa.DataType) -> bool:
    return bool(
        _has_ends(kind) or pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind)
    )  # not unions, nor run ends


def _has_ends(kind: pa.DataType) -> bool:
    is_type = pa.types
    return bool(is_type.is_list(kind) or is_type.is_large_list(kind) or is_type.is_map(kind))


def _is_text(kind: pa.DataType) -> bool:
    is_type = pa.types
    text = is_type.is_string(kind) or is_type.is_large_string(kind)
    return bool(text or is_type.is_binary(kind) or is_type.is_large_binary(kind))


def _bits(kind: pa.DataType) -> int:
    """Bits of a value of fixed width; 0 of others."""
    if pa.types.is_dictionary(kind) or pa.types.is_null(kind):
        return 0
    try:
        return int(kind.bit_width)
    except ValueError:
        return 0


def _count(kind: pa.DataType) -> int:
    """Buffers of a column."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count(kind.storage_type)
    if not _is_nested(kind):
        return 0 if pa.types.is_null(kind) else 3 if _is_text(kind) else 2
    buffers = 2 if _has_ends(kind) else 1
    return buffers + sum(_count(kind.field(n).type) for n in range(kind.num_fields))


def _rows(
    read: Read, kind: pa.DataType, places: Iterator[tuple[int, int]], first: int, last: int
) -> pa.Array:
    """Rows of a column; ``places`` are where it and those inside it have their buffers."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(_rows(read, kind.storage_type, places, first, last))

    if pa.types.is_null(kind):
        return pa.nulls(last - first)

    def part(place: tuple[int, int], start: int, stop: int) -> pa.Buffer:
        if place[0] + stop > place[1]:
            raise formats.BadFileError("damaged: a buffer is shorter than its rows")
        return read(place[0] + start, place[0] + stop)

    def bits(width: int) -> pa.Buffer:
        return part(next(places), begin * width // 8, (last * width + 7) // 8)

    # Bits begin with a byte's first one: up to seven rows before these are read, too.
    begin = first // 8 * 8
    rows, offset = last - first, first - begin
    valid_at, *_ = islice(places, 1)
    valid = part(valid_at, begin // 8, (last + 7) // 8) if valid_at[1] > valid_at[0] else None
    make = partial(pa.Array.from_buffers, kind, rows)
    if not _is_nested(kind) and not _is_text(kind):
        return make([valid, bits(_bits(kind))], offset=offset)
    if pa.types.is_struct(kind):
        inner = [
            _rows(read, kind.field(n).type, places, begin, last) for n in range(kind.num_fields)
        ]
        return make([valid], offset=offset, children=inner)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        return make(
            [valid],
            offset=offset,
            children=[_rows(read, kind.value_type, places, begin * size, last * size)],
        )
    wide = (
        pa.types.is_large_list(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )
    dtype = np.dtype(np.int64 if wide else np.int32)
    ends_at = next(places)
    if rows and ends_at[0] == ends_at[1]:
        raise formats.BadFileError("damaged: a buffer is shorter than its rows")
    raw = part(ends_at, begin * dtype.itemsize, (last + 1) * dtype.itemsize)
    ends = np.frombuffer(raw, dtype)
    low, high = int(ends[0]), int(ends[-1])
    if not 0 <= low <= high or (ends[1:] < ends[:-1]).any():
        raise formats.BadFileError("damaged: ends of values go down, or below 0")
    own_ends = pa.py_buffer(ends - dtype.type(low)) if low else raw
    if _is_text(kind):
        return make([valid, own_ends, part(next(places), low, high)], offset=offset)
    inner_kind = kind.field(0).type
    inner = [_rows(read, inner_kind, places, low, high)]
    return make([valid, own_ends], offset=offset, children=inner)
