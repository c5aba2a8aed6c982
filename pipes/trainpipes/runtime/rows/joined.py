"""Arrow tables joined in memory that is used again, and that has large pages.

A window's rows are looked up all over, tens of megabytes of them: large pages cost a fraction of the faults
when they are written first, and of the misses when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.runtime.rows.large_memory import LargeMemory

__all__ = ["joined_tables"]

#: Bytes from which it matters.
LARGE = 4 << 20


def joined_tables(tables: Sequence[pa.Table], memory: LargeMemory | None = None) -> pa.Table:
    """All rows of tables of one schema, each column in one chunk where one can hold it.

    Args:
        tables: the tables.
        memory: where to put the rows; None for memory of their own.
    """
    table = pa.concat_tables(tables)
    if table.nbytes < LARGE:
        return table.combine_chunks()
    memory = memory or LargeMemory()
    columns = [_joined(column, memory) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _joined(column: pa.ChunkedArray, memory: LargeMemory) -> Any:
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if column.null_count or len(chunks) < 2 or column.nbytes < LARGE:
        return column.combine_chunks()
    kind = column.type
    if _is_number(kind):
        data, count = _concatenated([chunk.to_numpy() for chunk in chunks], memory)
        return pa.Array.from_buffers(kind, count, [None, data])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(column, chunks, memory)
    if _is_string(kind):
        return _strings(column, chunks, memory)
    return column.combine_chunks()


def _lists(column: pa.ChunkedArray, chunks: list[Any], memory: LargeMemory) -> Any:
    kind = column.type
    leaf = kind.value_type
    edges = [chunk.offsets.to_numpy() for chunk in chunks]
    inner = [
        chunk.values.slice(int(edge[0]), int(edge[-1] - edge[0]))
        for chunk, edge in zip(chunks, edges, strict=True)
    ]
    offsets = _offsets(edges)
    fits = offsets[-1] <= np.iinfo(edges[0].dtype).max
    if not fits or not _is_number(leaf) or any(values.null_count for values in inner):
        return column.combine_chunks()
    content, count = _concatenated([values.to_numpy() for values in inner], memory)
    child = pa.Array.from_buffers(leaf, count, [None, content])
    narrow = pa.py_buffer(offsets.astype(edges[0].dtype))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, narrow], children=[child])


def _strings(column: pa.ChunkedArray, chunks: list[Any], memory: LargeMemory) -> Any:
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    size: Any = np.int64 if large else np.int32
    edges, data = [], []
    for chunk in chunks:
        _, offsets, content = chunk.buffers()
        edge = np.frombuffer(offsets, size)[chunk.offset : chunk.offset + len(chunk) + 1]
        edges.append(edge)
        if edge[-1] > edge[0]:
            data.append(np.frombuffer(content, np.uint8)[edge[0] : edge[-1]])
    offsets = _offsets(edges)
    if offsets[-1] > np.iinfo(size).max or not data:
        return column.combine_chunks()
    buffers = [None, pa.py_buffer(offsets.astype(size)), _concatenated(data, memory)[0]]
    return pa.Array.from_buffers(column.type, len(offsets) - 1, buffers)


def _concatenated(parts: list[Any], memory: LargeMemory) -> tuple[Any, int]:
    """The parts' values, one after the other, as a buffer, and their number."""
    count = sum(map(len, parts))
    if count * parts[0].itemsize < LARGE:
        return pa.py_buffer(np.concatenate(parts)), count
    found = memory.take(count * parts[0].itemsize)
    np.concatenate(parts, out=found.view(parts[0].dtype))
    return pa.py_buffer(found), count


def _offsets(edges: Sequence[Any]) -> Any:
    """Offsets of parts that follow each other, int64, from 0."""
    lengths = np.concatenate([np.diff(edge) for edge in edges])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_string(kind: pa.DataType) -> bool:
    asked = pa.types
    text = asked.is_string(kind) or asked.is_large_string(kind)
    return bool(text or asked.is_binary(kind) or asked.is_large_binary(kind))
