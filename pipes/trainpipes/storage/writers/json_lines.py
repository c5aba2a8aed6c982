"""Rows of a table as JSON lines, by ``orjson`` where it is installed, else by ``json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

is_ = pa.types
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


class NoJson(Exception):
    """A value that JSON has no form for.

    Attributes:
        row: in which; None if the whole column is of such a type.
    """

    def __init__(self, row: int | None, why: str) -> None:
        super().__init__(why)
        self.row = row


def lines_of(table: pa.Table) -> bytes:
    """Rows as JSON objects, a line each. Dates, times and decimals are text as Arrow writes it.

    Raises:
        NoJson: a value that JSON has no form for.
    """
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = _json_type(field.type, field.name)
        columns.append(column if kind == field.type else column.cast(kind))
        _check_finite(columns[-1], field.name)
    rows = pa.table(columns, names=table.column_names).to_pylist(maps_as_pydicts="strict")
    encode = _encoder()
    return b"".join([encode(row) for row in rows])


@cache
def _encoder() -> Callable[[Any], bytes]:
    """Makes a line of a row."""
    try:
        import orjson
    except ImportError:
        return lambda row: f"{ENCODER.encode(row)}\n".encode()
    return lambda row: bytes(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def _json_type(kind: pa.DataType, column: str) -> pa.DataType:
    """The type that a column is cast to, whose Python values JSON has forms for."""
    if isinstance(kind, pa.BaseExtensionType):
        return _json_type(kind.storage_type, column)
    if is_.is_dictionary(kind):
        return _json_type(kind.value_type, column)
    if is_.is_duration(kind):
        return pa.int64()
    if is_.is_decimal(kind) or (is_.is_temporal(kind) and not is_.is_interval(kind)):
        return pa.string()
    if is_.is_float16(kind):
        return pa.float32()
    if is_.is_struct(kind):
        return pa.struct([field.with_type(_json_type(field.type, column)) for field in kind])
    if is_.is_map(kind) and (is_.is_string(kind.key_type) or is_.is_large_string(kind.key_type)):
        return pa.map_(kind.key_type, _json_type(kind.item_type, column))
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        value = kind.value_field
        own = _json_type(value.type, column)
        return kind if own == value.type else pa.large_list(value.with_type(own))
    if is_.is_list_view(kind) or is_.is_large_list_view(kind):
        return pa.large_list(_json_type(kind.value_type, column))
    plain = (
        is_.is_null(kind) or is_.is_boolean(kind) or is_.is_integer(kind) or is_.is_floating(kind)
    )
    if plain or is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return kind
    raise NoJson(
        None,
        f"{column!r}: JSON has no form for {kind}: leave it out with drop_columns(), make text of it with "
        "with_columns(), or write Parquet",
    )


def _check_finite(column: pa.ChunkedArray, name: str) -> None:
    for chunk in column.chunks:
        if all(pc.all(pc.is_finite(values)).as_py() is not False for values in _floats(chunk)):
            continue
        rows = range(len(chunk))
        bad = next(n for n in rows if any(_odd(values) for values in _floats(chunk.slice(n, 1))))
        raise NoJson(
            bad,
            f"{name!r}: JSON has no NaN and no infinity: fill them, or make them null, in a with_columns(), "
            "or write Parquet",
        )


def _odd(values: pa.Array) -> bool:
    return pc.all(pc.is_finite(values)).as_py() is False


def _floats(array: pa.Array) -> Iterator[pa.Array]:
    """Arrays of all floats that an array holds, at any depth."""
    kind = array.type
    if is_.is_floating(kind):
        yield array
    elif is_.is_struct(kind):
        for field in array.flatten():
            yield from _floats(field)
    elif is_.is_map(kind):
        start, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
        yield from _floats(array.items.slice(start, stop - start))
    elif is_.is_nested(kind):
        yield from _floats(array.flatten())
