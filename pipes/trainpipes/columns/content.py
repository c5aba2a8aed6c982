"""Digests of all that tables and tensors hold, by SHA-256."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.pool import side_by_side
from trainpipes.columns.arrays import TEXTS, apart, gathered, is_list, plain, to_numpy

#: Rows of a column, and bytes of a tensor, that are hashed at a time.
PIECE_ROWS, PIECE_BYTES = 1 << 16, 8 << 20
#: Most threads that hash.
MOST_THREADS = 8

#: Digests of objects that are still there: by id, with a value that must be the same.
_known: dict[int, tuple[Any, Any, str]] = {}


def short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def table_digest(table: pa.Table) -> str:
    """A digest of a table's names, types and rows, 64 hexadecimal digits."""

    def compute() -> str:
        fields = [(field.name, str(field.type)) for field in table.schema]
        pieces = [
            partial(_piece, column.slice(start, PIECE_ROWS))
            for column in table.columns
            for start in range(0, len(table), PIECE_ROWS)
        ]
        return _joined(repr((fields, len(table))), pieces, table.get_total_buffer_size())

    return _once(table, None, compute)


def tensor_digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's shape, dtype and numbers, 64 hexadecimal digits."""

    def compute() -> str:
        rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        row_bytes = max(1, rows[:1].nbytes)
        step = max(1, PIECE_BYTES // row_bytes)
        pieces = [partial(_tensor_piece, rows[n : n + step]) for n in range(0, len(rows), step)]
        return _joined(repr((tuple(tensor.shape), str(tensor.dtype))), pieces, tensor.nbytes)

    # Counts changes in place; those by way of an array that shares its memory are not seen.
    changes = None if tensor.is_inference() else tensor._version
    return _once(tensor, changes, compute)


def _once(value: Any, state: Any, make: Callable[[], str]) -> str:
    key = id(value)
    known = _known.get(key)
    if known is not None and known[0]() is value and known[1] == state:
        return known[2]
    digest = make()
    _known[key] = weakref.ref(value, lambda _: _known.pop(key, None)), state, digest
    return digest


def _joined(about: str, pieces: Sequence[Callable[[], bytes]], size: int) -> str:
    digest = hashlib.sha256(about.encode())
    threads = min(MOST_THREADS, os.cpu_count() or 1, len(pieces)) if size > PIECE_BYTES else 0
    each = (
        side_by_side(call, pieces, threads, "trainpipes-digests")
        if threads > 1
        else map(call, pieces)
    )
    for part in each:
        digest.update(part)
    return digest.hexdigest()


def _tensor_piece(rows: torch.Tensor) -> bytes:
    whole = rows.resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().data).digest()


def _piece(column: pa.ChunkedArray) -> bytes:
    streams = _Streams()
    for chunk in column.chunks:
        streams.add(chunk, "")
    return streams.digest()


class _Streams:
    """Digests of an array's nulls, lengths and values at each level, wherever chunks end."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}
        self._rows: dict[str, int] = {}

    def digest(self) -> bytes:
        digests = [(path, stream.hexdigest()) for path, stream in sorted(self._hashes.items())]
        return hashlib.sha256(repr((digests, sorted(self._rows.items()))).encode()).digest()

    def _feed(self, path: str, content: Any) -> None:
        if path not in self._hashes:
            self._hashes[path] = hashlib.sha256()
        self._hashes[path].update(content)

    def add(self, array: pa.Array, path: str) -> None:
        if not len(array):
            return
        first = self._rows.get(path, 0)
        self._rows[path] = first + len(array)
        array = plain(array)
        kind = array.type
        if pa.types.is_null(kind):
            return
        if _is_odd(kind):  # Arrow has no way to bring these into the same form: row by row
            for value in array.to_pylist():
                self._feed(path, f"{value!r}\n".encode("utf-8", "backslashreplace"))
            return
        if array.null_count:
            nulls = np.flatnonzero(to_numpy(array.is_null())) + first
            self._feed(f"{path}?", nulls.astype("<i8"))
            array = gathered(array, np.flatnonzero(to_numpy(array.is_valid())))
            if not len(array):
                return
        self._values(array, kind, path)

    def _values(self, array: pa.Array, kind: pa.DataType, path: str) -> None:
        is_ = pa.types
        if is_.is_boolean(kind):
            self._feed(path, array.cast(pa.uint8()).buffers()[1])
        elif is_.is_struct(kind):
            for number in range(kind.num_fields):
                self.add(array.field(number), f"{path}.{number}")
        elif is_.is_fixed_size_list(kind):
            size = kind.list_size
            self.add(array.values.slice(array.offset * size, len(array) * size), f"{path}*")
        elif is_list(kind) or is_.is_map(kind) or kind in TEXTS:
            values, offsets = apart(array)
            self._feed(f"{path}#", np.diff(offsets).astype("<i8"))
            if isinstance(values, pa.Array):
                self.add(values, f"{path}*")
            elif len(values):
                self._feed(path, values)
        elif kind.bit_width:  # all others have a fixed width
            width = kind.bit_width // 8
            self._feed(path, array.buffers()[1][array.offset * width :][: len(array) * width])


def _is_odd(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_union(kind) or is_.is_list_view(kind) or is_.is_large_list_view(kind))
