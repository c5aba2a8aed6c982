"""Rows of a record batch in a local file, read piece by piece into memory of our own.

A map is faster, but it kills the process when the file is cut, or its disk fails. A piece holds no bytes of
other columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa

from trainpipes.sources.arrow.layout import Table
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import LocalBytes

#: Reads a range of the file.
Read = Callable[[int, int], pa.Buffer]

#: Bytes of a piece, and of it for each of its buffers, at least.
PIECE, SHARE = 4 << 20, 64 << 10
#: Bytes that are read of a header at first.
HEAD = 4096
BUFFER = struct.Struct("<qq")


def can_be_cut(kind: pa.DataType) -> bool:
    """Whether rows of a column can be read without its others."""
    if isinstance(kind, pa.BaseExtensionType):
        return can_be_cut(kind.storage_type)
    if not _is_nested(kind):
        return _is_text(kind) or pa.types.is_null(kind) or _bits(kind) > 0
    return all(can_be_cut(kind.field(n).type) for n in range(kind.num_fields))


def pieces(
    data: LocalBytes, schema: pa.Schema, span: tuple[int, int], rows: int, columns: list[int]
) -> Iterator[pa.RecordBatch]:
    """Some columns of the ``rows`` of an uncompressed batch, whose message lies in ``span``."""
    buffers = data.reading(partial(_buffers, span))
    places, count = {}, 0
    for number, kind in enumerate(schema.types):
        places[number], count = count, count + _count(kind)
    if count != len(buffers):
        raise BadFileError(f"damaged: a record batch of {len(buffers):,} buffers, not {count:,}")
    wanted = {n: buffers[places[n] : places[n] + _count(schema.types[n])] for n in columns}
    each = [stop - start for some in wanted.values() for start, stop in some]
    size = max(PIECE, SHARE * len(each))
    step = max(8, rows * size // max(1, sum(each)) // 8 * 8)  # whole bytes of bits
    chosen = pa.schema([schema.field(n) for n in columns])

    def read_rows(first: int, last: int, read: Read) -> list[pa.Array]:
        kinds = zip(chosen.types, wanted.values(), strict=True)
        return [_rows(read, kind, iter(places), first, last) for kind, places in kinds]

    for first in range(0, rows, step):
        arrays = data.reading(partial(read_rows, first, min(first + step, rows)))
        yield pa.RecordBatch.from_arrays(arrays, schema=chosen)


def _buffers(span: tuple[int, int], read: Read) -> list[tuple[int, int]]:
    """Where a message's buffers begin and end in the file."""
    start, stop = span
    head = read(start, min(start + HEAD, stop)).to_pybytes()
    (length,) = struct.unpack_from("<i", head, 4)
    body = start + 8 + length
    if not start + 8 < body <= stop:
        raise BadFileError(f"damaged: the header at byte {start:,} would have {length:,} bytes")
    if body > start + len(head):
        head = read(start, body).to_pybytes()
    batch = Table(head[8 : 8 + length]).table(2)
    places = batch.vector(2, BUFFER) if batch else []
    if any(begin < 0 or size < 0 or body + begin + size > stop for begin, size in places):
        raise BadFileError(f"damaged: the message at byte {start:,} ends before its buffers do")
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
    own = 2 if _has_ends(kind) else 1
    return own + sum(_count(kind.field(n).type) for n in range(kind.num_fields))


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
            raise BadFileError("damaged: a buffer is shorter than its rows")
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
        raise BadFileError("damaged: a buffer is shorter than its rows")
    raw = part(ends_at, begin * dtype.itemsize, (last + 1) * dtype.itemsize)
    ends = np.frombuffer(raw, dtype)
    low, high = int(ends[0]), int(ends[-1])
    if not 0 <= low <= high or (ends[1:] < ends[:-1]).any():
        raise BadFileError("damaged: ends of values go down, or below 0")
    own_ends = pa.py_buffer(ends - dtype.type(low)) if low else raw
    if _is_text(kind):
        return make([valid, own_ends, part(next(places), low, high)], offset=offset)
    inner_kind = kind.field(0).type
    inner = [_rows(read, inner_kind, places, low, high)]
    return make([valid, own_ends], offset=offset, children=inner)
