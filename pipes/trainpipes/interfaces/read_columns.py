"""Columns of rows of any kind as numbers; and which row an error is about: noted when raised, said when it
leaves the pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import index
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes import errors
from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import need_columns, no_columns
from trainpipes.columns import arrays
from trainpipes.columns.arrays import Array
from trainpipes.columns.block import BadCell, Block, first_bad
from trainpipes.columns.columns import rows_that_match, table_of, why_unfit
from trainpipes.columns.python_values import numbers_in
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.types import as_array, fixed_shape
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.watched_calls import at_work_of


def each(stage: Stage, fn: Callable[[Any], Any], run: Run) -> list[Any]:
    fn = stage._draw_watch.around(fn)
    results: list[Any] = []
    append = results.append
    items = run.unroll_copies()
    try:
        at_work = at_work_of(stage)
        if at_work is None:
            for item in items:
                append(fn(item))
        else:
            for item, row in zip(items, run.first_ids(), strict=True):
                failed = at_work.at(row)
                append(fn(item) if failed is None else failed)
    except Exception as error:
        ids = run.row_ids(len(results))
        blame(error, stage, int(ids[0]) if len(ids) else None)
        raise
    return results


def matching(run: Run, expression: Any, stage: Stage) -> npt.NDArray[np.bool_]:
    """Which rows of a run an Arrow expression keeps, bool ``[rows]``."""
    table = table_of(run.block.data, stage)
    try:
        return rows_that_match(table, expression)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, KeyError) as error:
        missing = re.match(r"No match for FieldRef.Name\((.*?)\) in ", str(error))
        need_columns(table.column_names, missing.groups() if missing else (), stage)
        said = f" does not fit the columns {table.column_names}: {why_unfit(error)}"
        raise refused(stage, said) from error


def refused(
    stage: Stage, message: str, kind: type[errors.DataError] = errors.SchemaError
) -> errors.DataError:
    """The error of a stage about rows, none of them by itself."""
    return kind(f"{stage}{message}", stage=str(stage))


def at_row(
    message: str, stage: Stage, row: Any, kind: type[errors.DataError] = errors.DataError
) -> errors.DataError:
    error = kind(message, stage=str(stage))
    blame(error, stage, int(row))
    return error


def in_column(bad: BadCell, name: str, stage: Stage, ids: IntArray) -> errors.DataError:
    """A stage's error about a column or a value in it; ``ids`` are its rows' numbers."""
    message = f"{stage}: column {name!r} {bad}"
    if bad.row is None:
        return errors.SchemaError(message, stage=str(stage))
    return at_row(message, stage, ids[bad.row])


class naming:
    """Bad cells that are met within are errors about a stage's column; see ``in_column``."""

    def __init__(self, name: str, stage: Stage, ids: IntArray) -> None:
        self._about = name, stage, ids

    def __enter__(self) -> None:
        """Nothing is to be done before a bad row is met."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadCell):
            raise in_column(error, *self._about) from None


def blame(error: BaseException, stage: Stage, row: int | None) -> None:
    if not hasattr(error, "_trainpipes"):
        with suppress(Exception):  # of one that takes no attributes
            error._trainpipes = (str(stage), row)  # type: ignore[attr-defined]


def is_about_a_row(error: BaseException) -> TypeGuard[Exception]:
    """Whether an error names its row: earlier rows may still come."""
    return getattr(error, "_trainpipes", (None, None))[1] is not None


def say_where(error: Exception, place_of: Callable[[int], Place]) -> None:
    """Say which file and row an error is about, when it leaves the pipeline."""
    if not hasattr(error, "_trainpipes"):
        return
    stage, row = error._trainpipes
    place = Place() if row is None else _own_place(error, place_of(row))
    if isinstance(error, errors.TrainpipesError):
        error.path = error.path or place.path
        error.row_group = place.row_group if error.row_group is None else error.row_group
        error.row = place.row if error.row is None else error.row
        error.stage = error.stage or stage
        error.source = error.source or place.source
        where = f" (at {place})"  # an error of looking for types has it already
        if row is not None and not error.message.endswith(where):
            error.message += where
    else:
        error.add_note(f"raised in {stage}" + ("" if row is None else f" at {place}"))
    del error._trainpipes


def _own_place(error: Exception, place: Place) -> Place:
    """The place that the error gives, in the row's own pipeline."""
    row_place: Place | None = getattr(error, "_place", None)
    return place if row_place is None else replace(row_place, source=place.source)


@dataclass(frozen=True)
class Ragged:
    """A list of numbers a row."""

    values: Array
    lengths: IntArray


@dataclass(frozen=True)
class Even:
    """A number for each row, or an array of the same shape: ``[rows, ...]``; may be shared and read-only."""

    values: Array


@dataclass(frozen=True)
class Opaque:
    """Anything else: an object a row, or values that Python objects are made of."""

    values: list[Any] | pa.Array


Column: TypeAlias = Ragged | Even | Opaque

TWO_RAGGED = "holds lists of lists: flatten it with map_batches(), or leave it out with select()"
NULL_WITHIN = "holds a null within a list of numbers: fill or drop it with map_batches()"


def null_cell(row: int, name: str) -> BadCell:
    way = f"or drop such rows with .filter(pc.field({name!r}).is_valid())"
    return BadCell(row, f"is null, which a tensor cannot hold: fill it with map_batches(), {way}")


def of_arrow(column: pa.ChunkedArray, name: str) -> Column:
    array = arrays.one_chunk(column)
    if pa.types.is_run_end_encoded(array.type):
        array = arrays.runs_decoded(array)
    if pa.types.is_dictionary(array.type):
        array = arrays.decoded(array)
    kind = array.type
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        array = arrays.python_to_arrow(array.to_pylist(), pa.large_list(kind.value_type))
    ragged = arrays.is_list(array.type)
    if ragged and pa.types.is_null(array.type.value_type) and not len(array.flatten()):
        array = array.cast(pa.list_(pa.int64()))  # as of_list() takes lists that are all empty
    inner = array.type.value_type if ragged else array.type
    is_extension = ragged and isinstance(inner, pa.ExtensionType)
    is_even = not is_extension and fixed_shape(inner) is not None
    if not arrays.is_number(inner) and not is_even:
        while pa.types.is_fixed_size_list(inner):
            inner = inner.value_type
        while ragged and arrays.is_list(inner):
            inner = inner.value_type
        if ragged and arrays.is_number(inner):
            raise BadCell(None, TWO_RAGGED)
        return Opaque(array)
    if array.null_count:
        raise null_cell(arrays.first_null(array), name)
    rows, offsets = arrays.apart(array) if ragged else (array, np.arange(len(array) + 1))
    values = numbers_in(rows)
    if values is None:
        place = first_bad(len(rows), lambda a, b: numbers_in(rows.slice(a, b - a)) is None)
        raise BadCell(int(np.searchsorted(offsets, place, side="right")) - 1, NULL_WITHIN)
    return Ragged(values, np.diff(offsets).astype(np.int64)) if ragged else Even(values)


def of_list(values: Sequence[Any], name: str) -> Column:
    kinds = [_kind(value) for value in values]
    known = set(kinds) - {"none"}
    lists = None
    if known == {"list"}:
        lists = _of_lists([value for value in values if value is not None])
    if known <= {"other"} or isinstance(lists, Opaque):
        return Opaque(list(values))
    if "none" in kinds:
        raise null_cell(kinds.index("none"), name)
    if len(known) > 1:
        row = next(k for k, kind in enumerate(kinds) if kind != kinds[0])
        got, before = errors.shown(values[row], 40), errors.shown(values[row - 1], 40)
        rule = "within a batch all are numbers, all are lists, or none is"
        raise BadCell(row, f"is {got} where the row before it is {before}: {rule}")
    if isinstance(lists, Ragged):
        return Ragged(_exact(lists.values, values), lists.lengths)
    rows = [as_array(value) for value in values]
    shapes = [np.shape(row) for row in rows]
    odd = next((k for k, shape in enumerate(shapes) if shape[1:] != shapes[0][1:]), None)
    if odd is None and len({*shapes}) > 1:
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        some = [row for row in rows if len(row)]  # an empty one says nothing of its dtype
        return Ragged(_exact(np.concatenate(some), rows), lengths)
    if odd is not None:
        got = f"has shape {list(shapes[odd])} where the first of its batch has {list(shapes[0])}"
        raise BadCell(
            odd, f"{got}: arrays of two dimensions or more may differ in the first one only"
        )
    return Even(_exact(np.array(rows), rows))


def _exact(joined: Array, rows: Sequence[Any]) -> Array:
    """The values of rows, int64 where NumPy makes floats of unsigned and signed integers."""
    parts: list[Array] = []
    mixed = False
    for number, row in enumerate(rows if joined.dtype.kind in "fO" else ()):
        part = np.asarray(as_array(row))
        if part.size and part.dtype.kind in "fO":
            values = row if isinstance(row, list | tuple) else [row]
            if joined.dtype.kind == "f" and not all(
                isinstance(v, int | np.integer) for v in values
            ):
                return joined
            _refuse_large(values, number)
            part, mixed = np.array(values, np.int64), True
        mixed = mixed or part.dtype == np.uint64
        parts.append(part)
    if not mixed:
        return joined
    for number, part in enumerate(parts):
        if part.max(initial=0) > np.iinfo(np.int64).max:
            way = "other rows hold signed integers: make one type of them with map()"
            raise BadCell(number, f"holds {part.max()}, which int64 cannot hold, and {way}")
    whole = [part.reshape(-1).astype(np.int64) for part in parts]
    return np.concatenate(whole).reshape(joined.shape)


def _refuse_large(values: Sequence[Any], row: int) -> None:
    """Raise for an integer that int64 cannot hold, among numbers that are no integers to NumPy."""
    for value in values:
        if isinstance(value, int | np.integer) and not -1 << 63 <= value < 1 << 63:
            way = "make floats or a NumPy array of uint64 of such numbers with map()"
            raise BadCell(row, f"holds {value}, which int64 cannot hold: {way}")


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "list"
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return "number"
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    if is_numeric or isinstance(value, torch.Tensor):
        return ("number", "list")[value.ndim] if value.ndim < 2 else "array"
    return "none" if value is None else "other"


def _of_lists(rows: Sequence[Any]) -> Column:
    # An empty list or array says nothing of its type, unless all are empty.
    some = [row for row in rows if len(row)]
    some = some or [row for row in rows if not isinstance(row, list | tuple)]
    try:
        values = np.concatenate([np.asarray(as_array(row)) for row in some] or [np.empty(0, int)])
    except (TypeError, ValueError):  # of several types, or of several lengths within a row
        values = np.empty(0, object)
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    if values.dtype.kind in "biuf" and values.ndim == 1:
        return Ragged(values, lengths)
    flat = list(chain.from_iterable(rows))
    if any(isinstance(v, list | tuple | np.ndarray | torch.Tensor) for v in flat):
        raise BadCell(None, TWO_RAGGED)
    if all(isinstance(v, int | float) for v in flat):
        for number, row in enumerate(rows):
            _refuse_large(row, number)
    if any(isinstance(v, int | float) for v in flat) and None in flat:
        raise BadCell(row_at(flat.index(None), lengths), NULL_WITHIN)
    return Opaque(list(rows))


def row_at(place: int, lengths: IntArray) -> int:
    """The row of a value of lists of these lengths."""
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def check_fit(values: Array, dtype: Any, lengths: IntArray | None, way: str) -> None:
    """Raise unless a dtype can hold all numbers, of lists of these lengths or of one a row."""
    kind = np.dtype(dtype)
    if values.dtype.kind == "f" and kind.kind in "iub":
        rule = f"{kind} would cut off fractions: give a float dtype"
        raise BadCell(None, f"holds {values.dtype}, and {rule}")
    if not values.size or values.dtype.kind not in "iuf" or np.can_cast(values.dtype, kind, "safe"):
        return
    least, most = limits(kind)
    if values.min().item() >= least and values.max().item() <= most:
        return
    flat = values.reshape(-1)
    outside = (flat < least) | (flat > most)
    if kind.kind == "f":
        outside &= np.isfinite(flat)
    places = np.flatnonzero(outside)
    if not len(places):
        return
    row = int(places[0]) // values[:1].size
    row = row if lengths is None else row_at(row, lengths)
    raise BadCell(row, f"holds {flat[places[0]]}, which {kind} cannot hold{way and f'; {way}'}")


def limits(kind: np.dtype[Any] | torch.dtype) -> tuple[float, float]:
    if isinstance(kind, torch.dtype):
        return torch.finfo(kind).min, torch.finfo(kind).max
    if kind.kind == "b":
        return 0, 1
    if kind.kind == "f":
        return float(np.finfo(kind).min), float(np.finfo(kind).max)
    return np.iinfo(kind).min, np.iinfo(kind).max


# Columns of a block


def cell(row: Any, name: str, caller: object) -> Any:
    if not isinstance(row, Mapping):
        raise no_columns(type(row).__name__, caller)
    if name not in row:
        need_columns(list(row), [name], caller)
    return row[name]


def cells(block: Block, name: str, caller: Stage) -> Any:
    """A column as it is: of Arrow, a tensor, or a list."""
    data = block.data
    if isinstance(data, list):
        values: list[Any] = []
        try:
            for row in data:
                values.append(cell(row, name, caller))
        except errors.DataError as error:
            blame(error, caller, int(block.ids[len(values)]))
            raise
        return values
    need_columns(names := names_of(block, caller), [name], caller)
    return data.tensors[names.index(name)] if isinstance(data, TensorRows) else data.column(name)


def names_of(block: Block, caller: Stage) -> list[str]:
    # Rows of a table are not gathered for its names.
    data: Any = block.within if block.has_columns else block.data
    if isinstance(data, pa.Table):
        return list(data.column_names)
    if isinstance(data, TensorRows) and data.names is None:
        raise no_columns("tuple of tensors", caller)
    if isinstance(data, list) and data and not isinstance(data[0], Mapping):
        raise no_columns(type(data[0]).__name__, caller)
    names: Any = data.names if isinstance(data, TensorRows) else data[0] if data else []
    return list(names)


def read(column: Any, name: str, caller: Stage, ids: IntArray) -> Column:
    """A column as numbers: lists, numbers or arrays; or something else."""
    with naming(name, caller, ids):
        if isinstance(column, torch.Tensor):
            return Even(as_array(column))
        return of_list(column, name) if isinstance(column, list) else of_arrow(column, name)


def lengths_of(block: Block, name: str, caller: Stage) -> IntArray:
    """Each row's length, int64 ``[rows]``, by a column of lists or of lengths."""
    lengths = block.list_lengths(name)
    if lengths is not None:
        return lengths
    column = cells(block, name, caller)
    of_arrow = isinstance(column, pa.ChunkedArray)
    if isinstance(column, list):  # each row by itself
        lengths = np.array([_length(value) for value in column], dtype=np.int64)
    elif of_arrow and (known := arrays.list_lengths(column, None)) is not None:
        lengths = known  # of rows picked from others, of which some are null
    elif isinstance(numbers := read(column, name, caller, block.ids), Ragged):
        lengths = numbers.lengths
    elif isinstance(numbers, Even) and numbers.values.ndim > 1:
        lengths = np.full(len(block), numbers.values.shape[1], dtype=np.int64)
    elif isinstance(numbers, Even) and numbers.values.dtype.kind in "iu":
        lengths = numbers.values.astype(np.int64)
    if lengths is not None and not (lengths < 0).any():
        return lengths
    row, got = None, _said(column)
    if lengths is not None:
        row = int(np.argmax(lengths < 0))
        got = errors.shown(column[row].as_py() if of_arrow else column[row], 60)
    rule = "must tell how long a row is, as a list of numbers or as an integer of 0 or more"
    bad = BadCell(row, f"{rule}, got {got}; name another by column=...")
    raise in_column(bad, name, caller, block.ids)


def _length(value: Any) -> int:
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
        return len(value)
    try:
        length = -1 if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        return -1
    return length if length < 1 << 63 else -1


def numbers_of(block: Block, name: str, caller: Stage) -> tuple[Array, IntArray]:
    """A column of lists of numbers: all values, and each row's length."""
    column = cells(block, name, caller)
    lists = lists_of(read(column, name, caller, block.ids))
    if lists is None:
        rule = "must hold a list of numbers a row"
        bad = BadCell(None, f"{rule}, got {_said(column)}; tokenize() makes such columns")
        raise in_column(bad, name, caller, block.ids)
    return lists


def lists_of(column: Column) -> tuple[Array, IntArray] | None:
    """The values of lists of numbers, and how long these are; None of others."""
    if isinstance(column, Ragged) and column.values.ndim == 1:
        return column.values, column.lengths
    if isinstance(column, Even) and column.values.ndim == 2:
        rows, length = column.values.shape
        return column.values.reshape(-1), np.full(rows, length, dtype=np.int64)
    return None


def ids_of(block: Block, name: str, caller: Stage, dtype: Any = np.int64) -> tuple[Array, IntArray]:
    values, lengths = numbers_of(block, name, caller)
    with naming(name, caller, block.ids):
        if values.size and values.dtype.kind not in "iu":
            got = _said(cells(block, name, caller))
            raise BadCell(None, f"must hold lists of token ids, which are integers, got {got}")
        check_fit(values, dtype if values.size else values.dtype, lengths, "")
    return values, lengths


def check_beside(
    ids: IntArray,
    name: str,
    column_lengths: IntArray,
    column: str,
    lengths: IntArray,
    caller: Stage,
) -> None:
    if not np.array_equal(column_lengths, lengths):
        row = int(np.argmax(column_lengths != lengths))
        rule = f"goes with {column!r} and must have as many numbers in each row"
        bad = BadCell(row, f"{rule}, got {column_lengths[row]} where {column!r} has {lengths[row]}")
        raise in_column(bad, name, caller, ids)


def label_dtype(ids: Array) -> type[np.int32 | np.int64]:
    return np.int32 if np.can_cast(ids.dtype, np.int32, "safe") else np.int64


def _said(column: Any) -> str:
    if isinstance(column, pa.ChunkedArray):
        return str(column.type)
    if isinstance(column, torch.Tensor):
        return f"a tensor {list(column.shape)}"
    return type(column[0]).__name__ if column else "nothing"
