"""What a column of a batch is to ``pad_collate``, and what writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes._internal.text import shown
from trainpipes.columns.arrays import (
    Array,
    apart,
    first_null,
    is_list,
    is_number,
    one_chunk,
    python_to_arrow,
    to_arrow,
    to_numpy,
)
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.rectangles import RaggedRows
from trainpipes.columns.row_types import as_array
from trainpipes.engine.layout import IntArray


@dataclass(frozen=True)
class Ragged:
    """A list of numbers a row."""

    values: Array
    lengths: IntArray


@dataclass(frozen=True)
class Even:
    """A number, or an array of one shape, a row: ``[rows, ...]``; may be shared and read-only."""

    values: Array


@dataclass(frozen=True)
class Opaque:
    """Anything else: an object a row, or what Python objects are made of."""

    values: list[Any] | pa.Array


Column = Ragged | Even | Opaque


TWO_RAGGED = (
    "holds lists of lists, and only one dimension of different lengths can be padded: flatten it with "
    "map_batches(), or leave it out with select()"
)


def of_arrow(column: pa.ChunkedArray, name: str) -> Column:
    array = one_chunk(column)
    kind = array.type
    tensors = isinstance(kind, pa.FixedShapeTensorType)
    if isinstance(array, pa.ExtensionArray) and not tensors:
        return Opaque(array)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        array = python_to_arrow(array.to_pylist(), pa.large_list(kind.value_type))
    inner = array.storage if tensors else array
    ragged, leaf = is_list(inner.type), inner.type
    if ragged:
        leaf = leaf.value_type
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(leaf):
        leaf, shape = leaf.value_type, (*shape, leaf.list_size)
    if not is_number(leaf):
        while ragged and is_list(leaf):
            leaf = leaf.value_type
        if is_number(leaf):
            raise BadCell(None, TWO_RAGGED)
        return Opaque(array)
    if array.null_count:
        raise BadCell(first_null(array), no_null(name))
    starts: IntArray = np.arange(len(array))
    if ragged:
        inner, offsets = apart(inner)
        starts = offsets[:-1].astype(np.int64)
    for size in (*shape, 0):
        if inner.null_count:
            row = int(np.searchsorted(starts, first_null(inner), side="right")) - 1
            raise BadCell(row, NULL_WITHIN)
        if size or pa.types.is_fixed_size_list(inner.type):
            inner, starts = inner.flatten(), starts * size
    if ragged:
        return Ragged(to_numpy(inner).reshape(-1, *shape), np.diff(offsets).astype(np.int64))
    if tensors:
        return Even(array.to_numpy_ndarray())
    return Even(to_numpy(inner).reshape(len(array), *shape))


def no_null(name: str) -> str:
    return (
        "is null, which a tensor cannot hold: fill it with map_batches(), or drop such rows "
        f"with .filter(pc.field({name!r}).is_valid())"
    )


def no_mask(mask: str) -> BadCell:
    return BadCell(
        None, f"has no lists to pad, so that it cannot get the mask {mask!r}: leave its mask out"
    )


NULL_WITHIN = "holds a null within a list of numbers: fill or drop it with map_batches()"


def of_list(values: Sequence[Any], name: str) -> Column:
    kinds = [_kind(value) for value in values]
    known = set(kinds) - {"none"}
    if known == {"list"} and "none" in kinds:
        rest = of_list([value for value in values if value is not None], name)
        known = {"other"} if isinstance(rest, Opaque) else known
    if known <= {"other"}:
        return Opaque(list(values))
    if "none" in kinds:
        raise BadCell(kinds.index("none"), no_null(name))
    if len(known) > 1:
        row = next(k for k, kind in enumerate(kinds) if kind != kinds[0])
        raise BadCell(
            row,
            f"is {shown(values[row], 40)} where the row before it is {shown(values[row - 1], 40)}: within a "
            "batch all are numbers, all are lists, or none is",
        )
    if kinds[0] == "list":
        return _of_row_lists(values)
    arrays = [as_array(value) for value in values]
    if kinds[0] == "number":
        return Even(np.array(arrays))
    odd = next((k for k, a in enumerate(arrays) if a.shape != arrays[0].shape), None)
    if odd is not None:
        raise BadCell(
            odd,
            f"has shape {list(arrays[odd].shape)} where the first of its batch has "
            f"{list(arrays[0].shape)}: arrays of two dimensions or more are stacked, not padded",
        )
    return Even(np.stack(arrays))


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "list"
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return "number"
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    if is_numeric or isinstance(value, torch.Tensor):
        return ("number", "list")[value.ndim] if value.ndim < 2 else "array"
    return "none" if value is None else "other"


def _of_row_lists(rows: Sequence[Any]) -> Column:
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    plain = all(isinstance(row, list | tuple) for row in rows)
    try:
        if plain:
            values = np.array(list(chain.from_iterable(rows)))
        else:  # an empty Python list says nothing of its type
            parts = [np.asarray(as_array(row)) for row in rows if not isinstance(row, list) or row]
            values = np.concatenate(parts)
    except ValueError:  # arrays of several lengths within a row
        raise BadCell(None, TWO_RAGGED) from None
    if not values.size and plain:
        values = np.empty(0, dtype=np.int64)
    if values.dtype.kind in "biuf":
        if values.ndim > 1:
            raise BadCell(None, TWO_RAGGED)
        return Ragged(values, lengths)
    flat = list(chain.from_iterable(rows))
    if any(isinstance(v, list | tuple | np.ndarray | torch.Tensor) for v in flat):
        raise BadCell(None, TWO_RAGGED)
    if any(isinstance(v, int | float) for v in flat) and None in flat:
        place = flat.index(None)
        raise BadCell(int(np.searchsorted(np.cumsum(lengths), place, side="right")), NULL_WITHIN)
    return Opaque(list(rows))


def first_unfit(values: Array, dtype: npt.DTypeLike) -> int | None:
    """Flat index of the first integer that an integer type cannot hold, or None."""
    kind = np.dtype(dtype)
    integers = kind.kind in "iub" and values.dtype.kind in "iu" and values.size
    if not integers or np.can_cast(values.dtype, kind, "safe"):
        return None
    least, most = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    if int(values.min()) >= least and int(values.max()) <= most:
        return None
    flat = values.reshape(-1)
    return int(np.flatnonzero((flat < least) | (flat > most))[0])


def check_fit(values: Any, dtype: np.dtype[Any], row_of: Any) -> None:
    if values.dtype.kind == "f" and dtype.kind in "iub":
        raise BadCell(
            None, f"holds {values.dtype}, and {dtype} would cut off fractions: give a float dtype"
        )
    place = first_unfit(values, dtype)
    if place is not None:
        raise BadCell(
            row_of(place),
            f"holds {values.reshape(-1)[place]}, which {dtype} cannot hold; give a wider dtype",
        )


#: Puts a column into a batch, given its number.
Write: TypeAlias = Callable[[dict[str, Any], int], None]


@dataclass(frozen=True)
class Writer:
    row_bytes: float
    writes: Callable[[IntArray | None, IntArray], Write]


def ragged_writer(name: str, rows: RaggedRows, mask: str | None) -> Writer:
    def writes(index: IntArray | None, bounds: IntArray) -> Write:
        rectangles = rows.rectangles(index, bounds)

        def write(batch: dict[str, Any], k: int) -> None:
            cells, real = rectangles[k]
            batch[name] = torch.from_numpy(cells)
            if mask is not None and real is not None:
                batch[mask] = torch.from_numpy(real)

        return write

    return Writer(rows.average_bytes, writes)


def even_writer(name: str, values: Array, dtype: np.dtype[Any]) -> Writer:
    def writes(index: IntArray | None, bounds: IntArray) -> Write:
        edges = bounds.tolist()

        def write(batch: dict[str, Any], k: int) -> None:
            part = slice(edges[k], edges[k + 1])
            found = values[part] if index is None else values[index[part]]
            batch[name] = torch.from_numpy(found.astype(dtype, order="C", copy=index is None))

        return write

    return Writer(float(np.prod(values.shape[1:], dtype=np.int64)) * dtype.itemsize, writes)


def object_writer(name: str, objects: Sequence[Any] | pa.Array) -> Writer:
    def writes(index: IntArray | None, bounds: IntArray) -> Write:
        edges, found = bounds.tolist(), objects
        if isinstance(objects, pa.Array):
            found = (objects if index is None else objects.take(to_arrow(index))).to_pylist()
        elif index is not None:
            found = [objects[row] for row in index.tolist()]

        def write(batch: dict[str, Any], k: int) -> None:
            batch[name] = list(found[edges[k] : edges[k + 1]])

        return write

    return Writer(float("inf"), writes)


def add_sequences(batch: dict[str, Any]) -> None:
    """Add ``cu_seqlens`` and ``max_seqlen`` to a batch that has ``segment_ids``, ``[B, L]``.

    >>> batch = {"segment_ids": torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]])}
    >>> add_sequences(batch)
    >>> batch["cu_seqlens"], batch["max_seqlen"]
    (tensor([0, 2, 3, 4, 8], dtype=torch.int32), 4)
    """
    segments = batch["segment_ids"].numpy()
    first = np.ones(segments.shape, dtype=np.bool_)
    np.not_equal(segments[:, 1:], segments[:, :-1], out=first[:, 1:])
    edges = np.append(np.flatnonzero(first), segments.size).astype(np.int32)
    batch["cu_seqlens"] = torch.from_numpy(edges)
    batch["max_seqlen"] = int(np.diff(edges).max(initial=0))
