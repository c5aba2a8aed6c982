"""Columns of rows in the forms that users' functions take: Arrow, NumPy, torch; and Arrow expressions over
columns: as conditions, as text, and asked of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.checks import repeated, require, several, wrong
from trainpipes._internal.messages import no_columns
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell, first_bad
from trainpipes.columns.content import short_digest
from trainpipes.columns.payload import Payload, payload_rows
from trainpipes.columns.python_values import (
    array_of,
    column_of,
    first_unfit,
    lists_of,
    python_values,
)
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.types import NoColumn, as_array, fixed_shape, unmarked
from trainpipes.errors import SchemaError, TrainpipesError, shown


def table_of(data: Payload, caller: object) -> pa.Table:
    """Rows as an Arrow table: columns as they are, or tensors with names."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, TensorRows) and data.names is not None:
        return pa.table(dict(zip(data.names, map(_array, data.tensors), strict=True)))
    kind = type(payload_rows(data)[0]).__name__ if len(data) else "nothing"
    raise no_columns(kind, caller)


def with_numbers(table: pa.Table) -> pa.Table:
    """A table with numbers for decimals, dates, times and durations: see ``as_numbers``. Made once for a
    table, of which runs take consecutive rows.
    """
    converted = _converted(table)
    return table if converted is None else converted


@arrays.once_for_each
def _converted(table: pa.Table) -> pa.Table | None:
    """The table with other columns; None if it needs none."""
    converted = None
    for place, kind in enumerate(table.schema.types):
        coded = pa.types.is_dictionary(kind)
        if arrays.stands_for_number(kind.value_type if coded else kind):
            column = table.column(place)
            numbers = arrays.as_numbers(arrays.decoded(column) if coded else column)
            name = table.column_names[place]
            converted = (converted or table).set_column(place, name, numbers)
    return converted


def to_columns(table: pa.Table, format: str) -> Any:
    """A table as ``format`` says; even columns as ``[rows, ...]`` arrays."""
    if format == "arrow":
        return table
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = arrays.viewless(arrays.laid_out(arrays.one_chunk(column)))
        if pa.types.is_dictionary(array.type):
            array = arrays.decoded(array)
        if format == "numpy":
            columns[name] = _numpy(array, name)
        elif pa.types.is_temporal(array.type):
            columns[name] = array.to_pylist()
        else:
            columns[name] = _tensor(_numpy(array, name))
    return columns


def _numpy(array: pa.Array, name: str) -> arrays.Array:
    if fixed_shape(array.type) is not None:
        shaped = array_of(array)
        if shaped is None:
            raise _no_null(array, name, lambda part: array_of(part) is None)
        return shaped
    if _holds_records(array.type):  # Arrow would make floats of integers beside nulls
        rows = np.empty(len(array), dtype=object)
        rows[:] = python_values(array)
        return rows
    leaf = _leaf(array)  # a null among integers or bools would make arrays of another dtype
    if leaf.null_count and arrays.is_number(leaf.type) and not pa.types.is_floating(leaf.type):
        raise _no_null(array, name, lambda part: _leaf(part).null_count > 0)
    return arrays.to_numpy(array)


def _holds_records(kind: pa.DataType) -> bool:
    is_ = pa.types
    while is_.is_nested(kind):
        if is_.is_struct(kind) or is_.is_map(kind) or is_.is_union(kind):
            return True
        kind = kind.value_type
    # Of intervals Arrow (26) makes no array: the process would end.
    return isinstance(kind, pa.JsonType) or bool(is_.is_interval(kind))


def _leaf(array: pa.Array) -> pa.Array:
    while True:
        if arrays.is_list(array.type):
            array = array.flatten()
        elif pa.types.is_fixed_size_list(array.type):  # with what a null one holds
            size = array.type.list_size
            array = array.values.slice(array.offset * size, len(array) * size)
        else:
            return array


def _no_null(array: pa.Array, name: str, has_null: Callable[[pa.Array], bool]) -> BadCell:
    return BadCell(
        first_bad(len(array), lambda start, stop: has_null(array.slice(start, stop - start))),
        f"column {name!r} holds a null, which a NumPy array of {array.type} cannot hold: fill it in a "
        'map_batches(format="arrow"), drop such rows with filter(), or leave the column out with select()',
    )


def _tensor(value: arrays.Array) -> Any:
    """A column as a tensor; a list where rows are ragged or no numbers."""
    if value.dtype == object:
        return [_tensor(row) if isinstance(row, np.ndarray) else row for row in value]
    return torch.from_numpy(np.array(value)) if value.dtype.kind in "biuf" else value.tolist()


#: The type of a column that holds Python values, by its name; None where none is known.
TypeOf: TypeAlias = Callable[[str], "pa.DataType | None"]


def from_columns(columns: Any, caller: object, type_of: TypeOf | None = None) -> pa.Table:
    """What a function returned, a table or dict of arrays or tensors, as an Arrow table."""
    if isinstance(columns, pa.RecordBatch):
        columns = pa.Table.from_batches([columns])
    if not isinstance(columns, Mapping | pa.Table):
        got = type(columns).__name__
        raise _refused(caller, f"returns a dict of columns or a pyarrow.Table, got {got}")
    if isinstance(columns, pa.Table):
        twice = sorted(repeated(columns.column_names))
        if twice:
            raise _refused(
                caller,
                f"returned a table with two columns {twice[0]!r}, of which a row can have only one: give "
                "them different names",
            )
        return columns
    returned = {name: _returned(column, name, caller, type_of) for name, column in columns.items()}
    if len(set(map(len, returned.values()))) > 1:
        got = ", ".join(f"{len(array)} in {name!r}" for name, array in returned.items())
        raise _refused(caller, f"must return columns that are equally long, got {got}")
    return pa.table(returned)


def _refused(caller: object, problem: str) -> SchemaError:
    return SchemaError(f"{caller}: the function {problem}", stage=str(caller))


def _returned(column: Any, name: Any, caller: object, type_of: TypeOf | None) -> Any:
    try:
        if not isinstance(name, str):
            raise TypeError(f"the name of a column is a string, got {name!r:.40}")
        is_one = isinstance(column, str | bytes | Mapping) or getattr(column, "ndim", 1) == 0
        if is_one or not (hasattr(column, "__iter__") or hasattr(column, "__arrow_array__")):
            raise TypeError(f"one {type(column).__name__} for all rows; give one value for each")
        if type_of is not None and _is_untyped(column):
            return _of_values(list(column), name, caller, type_of(name))
        return _array(column if type_of is None else _lasting(column))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TrainpipesError) or hasattr(error, "_trainpipes"):
            raise
        problem = f"returned values in {name!r} that cannot be made a column: {error}"
        raise _refused(caller, problem) from error


def _of_values(values: list[Any], name: str, caller: object, kind: pa.DataType | None) -> Any:
    """A column of Python values, of the type found in the first rows."""
    if kind is None:
        raise _refused(
            caller,
            f"returned a column {name!r} that it did not for the first rows: have it return the same columns "
            "each time",
        )
    kind = unmarked(kind)
    try:
        return column_of(values, kind)
    except NoColumn:
        number = first_unfit(values, kind)
        raise BadCell(
            number,
            f"column {name!r} has {shown(values[number], 60)}, and for the first rows it held {kind}: have "
            "the function return values of one type, or Arrow arrays of a type",
        ) from None


def untyped_columns(columns: Any) -> dict[str, list[Any]]:
    if not isinstance(columns, Mapping):
        return {}
    return {name: list(column) for name, column in columns.items() if _is_untyped(column)}


def _lasting(column: Any) -> Any:
    """A column of a function, copied where it is a part of an array that the function may write again."""
    if isinstance(column, torch.Tensor):
        array = as_array(column)
        return array.copy() if column.untyped_storage().nbytes() > column.nbytes else array
    if isinstance(column, np.ndarray) and column.base is not None and column.flags.writeable:
        return column.copy()
    return column


def _is_untyped(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return bool(column.dtype == object)
    return isinstance(column, list | tuple)


def _array(column: Any) -> Any:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, torch.Tensor):
        column = as_array(column)
    if isinstance(column, np.ndarray):
        if not column.dtype.isnative:
            column = column.astype(column.dtype.newbyteorder("="))
        if column.ndim > 1:
            return lists_of(column)
        if column.dtype != object:
            return arrays.to_arrow(column)
        column = list(column)
    if isinstance(column, list | tuple):
        return pa.array([_lists_of_arrays(value) for value in column])
    return pa.array(column)


def _lists_of_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = as_array(value)
    if isinstance(value, np.ndarray):
        return [_lists_of_arrays(row) for row in value] if value.ndim > 1 else value[()]
    return value


#: Of a filter, at most: of some 9,000 Arrow (25) ends the process.
MOST_CONDITIONS = 2000


def as_expression(filter: Any, caller: str) -> pc.Expression:
    if isinstance(filter, pc.Expression):
        text = text_of(filter)
        _check_count(1 + text.count(" and ") + text.count(" or "), caller)
        return filter
    if several(filter):
        options = (clause for clause in filter if several(clause))
        _check_count(
            sum(len(clause) if clause and several(clause[0]) else 1 for clause in options), caller
        )
    try:
        import pyarrow.parquet as pq

        return pq.filters_to_expression(filter)
    except Exception as error:  # of any kind, for a list of any values
        example = '[["x", ">", 20], ["lang", "in", ["en", "de"]]]'
        rule = f"a pyarrow expression, or a list such as {example}"
        way = "put .filter(function) after it" if callable(filter) else str(error)
        raise wrong(caller, rule, filter, way) from None


def _check_count(conditions: int, caller: str) -> None:
    way = 'give the values of a column as one condition, ["x", "in", [...]], or a function of a row'
    rule = f"at most {MOST_CONDITIONS:,} conditions, which Arrow goes through by recursion"
    require(conditions <= MOST_CONDITIONS, caller, rule, conditions, way)


def text_of(expression: pc.Expression) -> str:
    """The text of an expression, with a digest where Arrow leaves out some of its values."""
    try:
        text = str(expression)
    except UnicodeDecodeError:  # Arrow has cut a value within a character
        text = "..."
    if "..." in text:
        _, (content,) = expression.__reduce__()
        text += f" sha256:{short_digest(content)}"
    return text


def rows_that_match(table: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    """For which rows an expression is true, bool ``[rows]``; raises Arrow's errors."""
    plain = [n for n, kind in enumerate(table.schema.types) if not arrays.nests_fixed_lists(kind)]
    if len(plain) < table.num_columns:
        with suppress(pa.ArrowInvalid):  # it names one of the others
            return rows_that_match(table.select(plain), expression)
        table = arrays.gathered(table, np.arange(len(table)))
    name = max(table.column_names, key=len, default="") + "#"  # none that is asked for
    numbered = table.append_column(name, arrays.to_arrow(np.arange(len(table))))
    mask = np.zeros(len(table), dtype=np.bool_)
    mask[arrays.to_numpy(filtered(numbered, expression).column(table.num_columns))] = True
    return mask


def filtered(table: pa.Table, expression: pc.Expression) -> pa.Table:
    """The rows for which an expression is true; with texts for views of these, where Arrow needs that."""
    try:
        return table.filter(expression)
    except pa.ArrowNotImplementedError:
        return arrays.without_views(table).filter(expression)


#: What Arrow says of a number that it compares with a column of another type, and what to write for it.
UNLIKE = {
    "not in range: -16777216": "Arrow compares it with a float as 32-bit floats: write an int (1000000 for "
    '1e6), or pc.field(name).cast("float64")',
    "Precision is not great enough": "write a float or decimal.Decimal(...) for a column of decimals",
    "no kernel matching input types": "write a value of the column's type, such as a datetime for times",
    "Rescaling Decimal value": "write decimal.Decimal(...) for a column of decimals",
}


def why_unfit(error: Exception) -> str:
    """What Arrow says of an expression that does not fit the columns, with a way out if one is known."""
    said = " ".join(str(error).split())
    return "; ".join([said, *(way for words, way in UNLIKE.items() if words in said)])
