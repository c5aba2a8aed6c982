"""Rows of a table as JSON lines."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from trainpipes.columns.arrays import holds, is_text
from trainpipes.columns.bad_values import BadCell

is_ = pa.types
ENCODE = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False
).encode


def lines_of(table: pa.Table) -> bytes:
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = _json_type(field.type, field.name)
        columns.append(column if kind == field.type else column.cast(kind))
    # Much slower, so that it is asked for where there are maps.
    maps = "strict" if any(holds(column.type, is_.is_map) for column in columns) else None
    rows = pa.Table.from_arrays(columns, table.column_names).to_pylist(maps_as_pydicts=maps)
    try:
        return "".join([f"{ENCODE(row)}\n" for row in rows]).encode()
    except ValueError:
        raise next(filter(None, map(_bad_cell, range(len(rows)), rows))) from None


def _bad_cell(number: int, row: dict[str, Any]) -> BadCell | None:
    for name, value in row.items():
        try:
            ENCODE(value)
        except ValueError:
            return BadCell(
                number,
                f"{name!r}: JSON has no NaN and no infinity: fill them, or make them null, in a "
                "with_columns(), or write Parquet",
            )
    return None


#: Types whose values JSON has, as they are.
PLAIN = (is_.is_null, is_.is_boolean, is_.is_integer, is_.is_floating, is_text)


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
    if hasattr(kind, "value_field"):  # lists of any form
        value = kind.value_field
        own = _json_type(value.type, column)
        is_plain = own == value.type and not is_.is_list_view(kind)
        is_plain = is_plain and not is_.is_large_list_view(kind)
        return kind if is_plain else pa.large_list(value.with_type(own))
    if any(of(kind) for of in PLAIN):
        return kind
    raise BadCell(
        None,
        f"{column!r}: JSON has no form for {kind}: leave it out with drop_columns(), make text of it with "
        "with_columns(), or write Parquet",
    )
