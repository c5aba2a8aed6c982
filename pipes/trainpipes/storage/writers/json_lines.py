"""Rows of a table as JSON lines, by ``orjson`` where it is installed, else by ``json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_numpy

is_ = pa.types
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


class NoJson(Exception):
    def __init__(self, row: int | None, why: str) -> None:
        super().__init__(why)
        self.row = row


def lines_of(table: pa.Table) -> bytes:
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = _json_type(field.type, field.name)
        columns.append(column if kind == field.type else column.cast(kind))
        _check_finite(columns[-1], field.name)
    names, encode = table.column_names, _encoder()
    rows = zip(*map(_python_values, columns), strict=True)
    return b"".join([encode(dict(zip(names, row, strict=True))) for row in rows])


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column; of lists of numbers ten times as fast as Arrow gives them."""
    kind = column.type
    is_list = is_.is_list(kind) or is_.is_large_list(kind)
    if not is_list or not (is_.is_integer(kind.value_type) or is_.is_floating(kind.value_type)):
        return list(column.to_pylist(maps_as_pydicts="strict"))
    found: list[Any] = []
    for chunk in column.chunks:
        edges = to_numpy(chunk.offsets).tolist()
        values = chunk.values.slice(edges[0], edges[-1] - edges[0])
        if chunk.null_count or values.null_count:
            found += chunk.to_pylist()
            continue
        flat = to_numpy(values).tolist()
        starts = [edge - edges[0] for edge in edges]
        found += [flat[start:stop] for start, stop in pairwise(starts)]
    return found


@cache
def _encoder() -> Callable[[Any], bytes]:
    try:
        import orjson
    except ImportError:
        return lambda row: f"{ENCODER.encode(row)}\n".encode()
    return lambda row: bytes(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def _json_type(kind: pa.DataType, column: str) -> pa.DataType:
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
