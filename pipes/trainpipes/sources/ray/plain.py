"""Blocks of Ray Data as Arrow tables of plain types, and the one schema of all of them.

Called in Ray's tasks, and by the thread that plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.fixed_lists import lists_of
from trainpipes.errors import SchemaError
from trainpipes.sources.files.schema import plain

__all__ = ["fitted", "one_schema", "plain_table"]


def plain_table(block: Any) -> pa.Table:
    """A block as a table: no dictionaries, no metadata, and tensors as lists.

    Tensors of one shape are fixed-size lists, others lists of lists.

    Raises:
        SchemaError: two columns have one name, or a column holds Python objects, or tensors of several
            numbers of dimensions.
    """
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    names = table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SchemaError(f"from_ray(): there are two columns {twice!r}: rename one in the dataset")
    columns = [_plain(table.column(name), name) for name in names]
    return pa.Table.from_arrays(columns, names=names)


def _plain(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    kind = column.type
    said = getattr(kind, "extension_name", "")
    if said == "ray.data.arrow_pickled_object":
        raise SchemaError(
            f"from_ray(): column {name!r} holds Python objects, which have no type of Arrow's (values of "
            "several types in one column, as a rule): bring them to one type with dataset.map_batches(), or "
            "leave it out with dataset.drop_columns()"
        )
    if said == "ray.data.arrow_variable_shaped_tensor":
        chunks = [_ragged(chunk.storage, name) for chunk in column.chunks if len(chunk)]
        return pa.chunked_array(chunks, None if chunks else pa.null())
    if said.startswith("ray.data.arrow_tensor") or isinstance(kind, pa.FixedShapeTensorType):
        shape = tuple(kind.shape)
        kind = lists_of(np.empty((0, *shape), kind.value_type.to_pandas_dtype())).type
        chunks = [_fixed(chunk.storage, shape, kind) for chunk in column.chunks]
        return pa.chunked_array(chunks, kind)
    kind = plain(pa.field(name, kind)).type
    return column if kind.equals(column.type) else column.cast(kind)


def _fixed(storage: pa.Array, shape: tuple[int, ...], kind: pa.DataType) -> pa.Array:
    """Tensors of one shape, each stored as one list of numbers."""
    values = storage.flatten()
    if not storage.null_count and not values.null_count and all(shape):
        return lists_of(to_numpy(values).reshape(len(storage), *shape))
    rows = storage.to_pylist()
    return pa.array(
        [None if row is None else np.reshape(row, shape).tolist() for row in rows], kind
    )


def _ragged(storage: pa.StructArray, name: str) -> pa.Array:
    """Tensors of several shapes, each stored as one list of numbers and one of sizes, as lists of lists."""
    there = storage.drop_null()
    shapes = there.field("shape")
    sizes = to_numpy(shapes.flatten())
    dims = len(sizes) // max(1, len(there))
    if (to_numpy(shapes.value_lengths()) != dims).any():
        raise SchemaError(
            f"from_ray(): column {name!r} holds tensors of several numbers of dimensions: bring them to one "
            "with dataset.map_batches()"
        )
    sizes = sizes.reshape(-1, dims)
    found = there.field("data").flatten()
    for axis in range(dims - 1, 0, -1):
        # At each depth there are as many lists as the sizes before it say.
        lengths = np.repeat(sizes[:, axis], sizes[:, :axis].prod(axis=1))
        found = _lists(found, lengths)
    outer = np.zeros(len(storage), np.int64)
    outer[to_numpy(storage.is_valid())] = sizes[:, 0]
    return _lists(found, outer, to_numpy(storage.is_null()) if storage.null_count else None)


def _lists(values: pa.Array, lengths: np.ndarray[Any, Any], null: Any = None) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = None if null is None else to_arrow(null)
    return pa.LargeListArray.from_arrays(to_arrow(offsets), values, mask=mask)


def one_schema(schemas: Sequence[tuple[int, pa.Schema]]) -> pa.Schema:
    """The schema that the rows of all blocks can be cast to without loss.

    Args:
        schemas: number and schema of the first block, and of the first block of each other schema.

    Raises:
        SchemaError: blocks have other columns, or types that no one type holds.
    """
    (first_number, first), *others = schemas
    fields = list(first)
    for number, schema in others:
        odd = sorted({*first.names} ^ {*schema.names})
        if odd:
            has, lacks = (first_number, number) if odd[0] in first.names else (number, first_number)
            raise SchemaError(
                f"from_ray(): block {has} of the dataset has a column {odd[0]!r}, and block {lacks} has not: "
                "give all rows the same columns with dataset.select_columns() or dataset.map_batches()"
            )
        for place, field in enumerate(fields):
            fields[place] = _wider(field, schema.field(field.name), first_number, number)
    return pa.schema([pa.field(field.name, field.type) for field in fields])


def _wider(field: pa.Field, other: pa.Field, first: int, number: int) -> pa.Field:
    exact, loose = (field, other), [one.with_type(_loose(one.type)) for one in (field, other)]
    for both in (exact, loose):
        pair = [pa.schema([one]) for one in both]
        try:
            return pa.unify_schemas(pair, promote_options="permissive").field(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            continue
    raise SchemaError(
        f"from_ray(): column {field.name!r} is {field.type} in block {first} of the dataset and {other.type} "
        f"in block {number}, which no one type holds: bring it to one type with dataset.map_batches()"
    )


def _loose(kind: pa.DataType) -> pa.DataType:
    """A type with lists of any length instead of those of a fixed one, at every depth."""
    is_ = pa.types
    if is_.is_fixed_size_list(kind) or is_.is_list(kind) or is_.is_large_list(kind):
        return pa.large_list(_loose(kind.value_type))
    return kind


def fitted(table: pa.Table, schema: pa.Schema, number: int) -> pa.Table:
    """A block's table in the schema of all blocks.

    Raises:
        SchemaError: a value does not fit the type.
    """
    columns = []
    for field in schema:
        column = table.column(field.name)
        try:
            columns.append(column if column.type.equals(field.type) else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"from_ray(): column {field.name!r} is {column.type} in block {number} of the dataset and "
                f"{field.type} over all blocks, and a value does not fit: {error}; bring it to one type with "
                "dataset.map_batches()"
            ) from error
    return pa.Table.from_arrays(columns, schema=schema)
