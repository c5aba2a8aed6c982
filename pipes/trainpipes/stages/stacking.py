"""What ``default_collate`` makes of rows and of columns, and which row it can make nothing of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import default_collate, get_worker_info

from trainpipes.columns.arrays import Array, as_numbers, is_number, is_text, one_chunk, to_numpy
from trainpipes.columns.block import BadCell, Part, Piece
from trainpipes.columns.payload import different_names, numbers_of
from trainpipes.columns.python_values import array_of, python_values
from trainpipes.columns.tensor_rows import late_if_small, room_for
from trainpipes.columns.types import fixed_shape
from trainpipes.errors import shown
from trainpipes.interfaces import read_columns
from trainpipes.stages.device import map_tensors

#: What ``default_collate`` makes of numbers of these types.
NUMBERS = {int: np.int64, float: np.float64, bool: np.bool_}
#: What it makes of columns of numbers; uint64 and float16 are taken as Python's.
WIDE: dict[str, type[np.generic]] = {
    "i": np.int64, "u": np.int64, "f": np.float64, "b": np.bool_,
}  # fmt: skip
AS_PYTHON = (pa.uint64(), pa.float16())
#: Python's values that stand for numbers, as columns of their types do.
STAND_FOR_NUMBERS = (Decimal, date, datetime, time, timedelta)
#: What makes the k-th batch of a table, how many there are, and their bytes.
Maker: TypeAlias = tuple[Callable[[int], dict[str, Any]], int, int]


def stacked(rows: Any) -> Any:
    """What ``default_collate`` makes of the rows of a batch, a list of them or a tuple.

    >>> stacked([{"a": 1, "b": 0.5}, {"a": 2, "b": 1.5}])
    {'a': tensor([1, 2]), 'b': tensor([0.5000, 1.5000], dtype=torch.float64)}
    """
    if len(rows) and isinstance(rows[0], Mapping):
        rows = with_same_keys(rows)
    kinds = set(map(type, rows))
    if len(kinds) > 1 and kinds <= {str, bytes, type(None)}:
        return list(rows)  # torch asks the first one alone whether it is a text
    kind = kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else None
    if kind in NUMBERS:
        with suppress(OverflowError):  # of which torch has a message of its own
            return torch.from_numpy(np.array(rows, NUMBERS[kind]))
    if kind in STAND_FOR_NUMBERS:
        with suppress(ValueError):  # such as Decimal("NaN")
            return torch.from_numpy(to_numpy(as_numbers(pa.array(rows))).copy())
    if kind is dict:
        return {name: _stacked_values([row[name] for row in rows]) for name in rows[0]}
    alike = kind is np.ndarray and len({(row.dtype, row.shape) for row in rows}) == 1
    if alike and rows[0].dtype.kind in "biuf" and get_worker_info() is None:
        # torch would have threads of its own stack large ones, which get in the way of ours.
        return torch.from_numpy(np.stack(rows))
    if kind is tuple and len(set(map(len, rows))) == 1:
        return [_stacked_values(column) for column in zip(*rows, strict=True)]
    return collated(rows)


def collated(rows: Any) -> Any:
    """What ``default_collate`` makes of rows: on the CPU, also where torch's default device is another."""
    if torch.get_default_device().type == "cpu":
        return default_collate(rows)
    with torch.device("cpu"):
        return default_collate(rows)


def _stacked_values(values: Sequence[Any]) -> Any:
    """A column of rows: as rows are, but lists of arrays that are alike, such as the frames of a video, make
    one tensor ``[B, n, ...]``.
    """
    lists = all(isinstance(value, list) and value for value in values)
    arrays = [item for value in values for item in value] if lists else []
    all_arrays = bool(arrays) and all(
        isinstance(item, np.ndarray | torch.Tensor) for item in arrays
    )
    if all_arrays and len({len(value) for value in values}) == 1:
        alike = {(type(item), item.dtype, tuple(item.shape)) for item in arrays}
        if len(alike) == 1:
            flat: torch.Tensor = stacked(arrays)
            return flat.reshape(len(values), -1, *flat.shape[1:])
    return stacked(values)


def as_floats(batch: Any, floats: np.dtype[Any], first_row: int = 0) -> Any:
    """A batch whose tensors of floats are of this dtype; a bad cell is counted from ``first_row``."""

    def cast(item: Any) -> torch.Tensor | None:
        if not isinstance(item, torch.Tensor) or not item.is_floating_point():
            return None
        made = item.to(getattr(torch, floats.name))
        lost = made.isinf() & item.isfinite()
        if lost.any():
            row, value = first_row + int(lost.nonzero()[0, 0]), float(item[lost][0])
            way = "leave such rows out with filter()"
            raise BadCell(row, f"holds {value}, which {floats} cannot hold; {way}")
        return made

    return map_tensors(batch, cast)


def stacked_columns(
    parts: Sequence[Part], as_lists: Collection[str], floats: np.dtype[Any] | None
) -> MutableSequence[Any]:
    """What ``default_collate`` makes of the batches of tables; of columns ``as_lists``, lists."""
    return joined_batches([column_batches(part, as_lists, floats) for part in parts])


def joined_batches(makers: Sequence[Maker]) -> MutableSequence[Any]:
    """The batches of several parts, in turn."""
    if len(makers) == 1:
        return late_if_small(*makers[0])
    firsts = np.cumsum([0, *(count for _, count, _ in makers)])

    def make(k: int) -> dict[str, Any]:
        number = int(np.searchsorted(firsts, k, side="right")) - 1
        return makers[number][0](k - int(firsts[number]))

    return late_if_small(make, int(firsts[-1]), sum(nbytes for *_, nbytes in makers))


def column_batches(part: Part, as_lists: Collection[str], floats: np.dtype[Any] | None) -> Maker:
    table: Any = part.data
    edges: list[int] = part.bounds.tolist()
    names = different_names(table)
    wide: list[tuple[Sequence[str], Sequence[Array], np.dtype[Any]]] = []
    nbytes, others = 0, set(range(len(names)))
    for numbers in numbers_of(table):
        if numbers.kind not in AS_PYTHON:
            columns = numbers.picked(part.index)
            dtype = _wide(columns[0].dtype, floats)
            if not _fits(columns, dtype):
                continue
            wide.append((numbers.names, columns, dtype))
            others -= {*numbers.places}
            nbytes += len(columns) * edges[-1] * dtype.itemsize
    rest: Any = Piece(table.select(sorted(others)), part.index).gathered() if others else {}
    cutters: list[tuple[str, Callable[[int], Any]]] = []
    for name in (names[place] for place in sorted(others)):
        values = _values(rest[name], floats)
        if values is None:
            rows = python_values(rest[name])
            stack = list if name in as_lists or _holds_texts(rest[name].type) else stacked
            batches = [stack(rows[a:b]) for a, b in pairwise(edges)]
            if floats is not None:
                firsts = zip(batches, edges, strict=False)
                batches = [as_floats(batch, floats, first) for batch, first in firsts]
            cutters.append((name, batches.__getitem__))
        else:
            nbytes += values.nbytes
            cutters.append((name, partial(_cut, values, edges)))

    def make(k: int) -> dict[str, Any]:
        batch: dict[str, Any] = dict.fromkeys(names)
        for some, columns, dtype in wide:
            tensors = _cut_columns(columns, edges[k], edges[k + 1], dtype).unbind(0)
            batch.update(zip(some, tensors, strict=True))
        batch.update((name, cut(k)) for name, cut in cutters)
        return batch

    return make, len(edges) - 1, nbytes


def _holds_texts(kind: pa.DataType) -> bool:
    """Whether a column holds texts or bytes, any of which may be null."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(kind) or bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _cut(values: Array, edges: Sequence[int], k: int) -> torch.Tensor:
    return torch.from_numpy(values[edges[k] : edges[k + 1]].copy())


def _cut_columns(
    columns: Sequence[Array], start: int, stop: int, dtype: np.dtype[Any]
) -> torch.Tensor:
    """Rows of columns, copied in a single call, ``[columns, rows]``."""
    room = room_for((len(columns), stop - start), dtype)
    np.concatenate([values[start:stop] for values in columns], out=room.reshape(-1))
    return torch.from_numpy(room)


def _wide(dtype: np.dtype[Any], floats: np.dtype[Any] | None) -> np.dtype[Any]:
    """What numbers of a dtype are collated as, where floats are to be of another dtype."""
    return floats if floats is not None and dtype.kind == "f" else np.dtype(WIDE[dtype.kind])


def _fits(columns: Sequence[Array], dtype: np.dtype[Any]) -> bool:
    try:
        for values in () if np.can_cast(columns[0].dtype, dtype) else columns:
            read_columns.check_fit(values, dtype, None, "")
    except BadCell:
        return False
    return True


def _values(column: pa.ChunkedArray, floats: np.dtype[Any] | None) -> Array | None:
    """Numbers, or arrays of the same shape, as ``default_collate`` would have them; None of others."""
    array = one_chunk(column)
    if not is_number(array.type):
        values = None if fixed_shape(array.type) is None else array_of(array)
        if values is None or floats is None or values.dtype.kind != "f":
            return values
    elif array.null_count or (array.type in AS_PYTHON and not _has_dtype(array.type, floats)):
        return None
    else:
        values = to_numpy(array)
    dtype = _wide(values.dtype, floats)
    if floats is not None:
        read_columns.check_fit(values, dtype, None, "leave such rows out with filter()")
    return values.astype(dtype, copy=False)


def _has_dtype(kind: pa.DataType, floats: np.dtype[Any] | None) -> bool:
    return floats is not None and pa.types.is_floating(kind)


def with_same_keys(rows: Sequence[Any]) -> list[Any]:
    """Rows whose dicts have the same keys: torch drops those that the first row lacks."""
    # Of as many keys each, a row that lacks a key is found when the rows are stacked.
    alike = set(map(type, rows)) == {dict} and len(set(map(len, rows))) == 1
    if rows and not alike and isinstance(rows[0], Mapping):
        keys = rows[0].keys()
        if any(isinstance(row, Mapping) and row.keys() != keys for row in rows):
            raise ValueError("rows have different keys")
    return list(rows)


def unfit(rows: Sequence[Any]) -> BadCell:
    number = next((n for n, row in enumerate(rows) if not collates(rows[0], row)), 0)
    first, row, where = rows[0], rows[number], "a row"
    while isinstance(first, Mapping) and isinstance(row, Mapping):
        if first.keys() != row.keys():
            said = f"has the keys {list(row)} where the first of its batch has {list(first)}"
            return BadCell(number, f"{where} {said}: give all rows the same, by map()")
        name = next((name for name in first if not collates(first[name], row[name])), None)
        if name is None:
            break
        where = f"column {name!r}" if where == "a row" else f"{where}[{name!r}]"
        first, row = first[name], row[name]
    way = "leave the column out with select(), make numbers of it with map(), or use pad_collate()"
    if isinstance(row, list | tuple) and None in row:
        way = "fill nulls with map(), or leave the column out with select()"
    problem = f"is {shown(row, 60)} ({type(row).__name__}), of which default_collate makes no tensor: {way}"
    if row is None:
        way = "fill it with map(), or drop it with filter()"
        problem = f"is null, which a tensor cannot hold: {way}"
    elif None not in (sizes := [size_of(row), size_of(first)]) and sizes[0] != sizes[1]:
        way = "pad_collate() pads lists of numbers"
        if len(sizes[0] or ()) > 2:  # images or clips
            way = "crop or resize images to one size, and decode videos with num_frames="
        rule = f"only equal shapes can be stacked: {way}"
        got = f"has the shape {sizes[0]} where the first row of its batch has {sizes[1]}"
        problem = f"{got}, and {rule}"
    return BadCell(number, f"{where} {problem}")


def collates(first: Any, other: Any) -> bool:
    try:
        stacked([first, other])
    except Exception:
        return False
    return True


def size_of(value: Any) -> list[int] | None:
    if isinstance(value, torch.Tensor | np.ndarray):
        return list(value.shape)
    return [len(value)] if isinstance(value, list | tuple) else None
