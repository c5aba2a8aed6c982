"""Arrays, batches and rows that are read once, as tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import is_list
from trainpipes.columns.columns import from_columns
from trainpipes.columns.row_types import as_array
from trainpipes.columns.value_column import SchemaFinder, UnfitRow, table_of_rows
from trainpipes.errors import ConfigError, DataError
from trainpipes.sources.memmap.manifest import Layout
from trainpipes.writers.npy_files import NO_NUMBERS, bad_row
from trainpipes.writers.table_groups import TableGroups

#: Bytes and rows that are looked at together, about; the first ones say which columns there are.
SOME_BYTES, SOME_ROWS = 4 << 20, 1024
#: NumPy's letters of the dtypes that columns can hold.
CHARS = "?bBhHiIlLqQefd"


class OnceTables(TableGroups):
    """Tables that can be read once, from the first row on."""

    #: Nobody can begin between two rows of these.
    cursor = None

    _begun = False

    def __init__(self, tables: Iterator[pa.Table], caller: str) -> None:
        self.caller, self._tables = caller, tables

    def open(self, cursor: None, row: int) -> None:
        """Begin."""

    def next_run(self) -> pa.Table | None:
        return next(self._tables, None)

    def has_rows(self) -> bool:
        """Also of columns without rows, at first."""
        return super().has_rows() or not self._begun

    def group(self, most: int, most_bytes: int) -> tuple[pa.Table, int] | None:
        self._begun = True
        return super().group(most, most_bytes)


def layout_of(row: Any) -> Layout:
    return "dict" if isinstance(row, Mapping) else "tuple"


def named(row: Any) -> dict[str, Any]:
    """The columns of a row or batch by name; of a tuple or a single value by number."""
    if not isinstance(row, Mapping):
        values = row if isinstance(row, tuple) else (row,)
        return {str(number): value for number, value in enumerate(values)}
    found = {str(name): value for name, value in row.items()}
    if len(found) < len(row):
        raise ConfigError(f"write_memmap(): two columns have one name: {', '.join(map(str, row))}")
    return found


def _plain(value: Any, name: str, row: int) -> Any:
    if np.ma.is_masked(value):
        raise bad_row(row, name, "is masked in part; fill it, array.filled(0)")
    value = as_array(value)
    if isinstance(value, np.ndarray) and value.dtype.char not in CHARS:
        raise bad_row(row, name, NO_NUMBERS.format(value.dtype))
    return value


def _is_long(value: Any) -> bool:
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def table_of_batch(batch: Any, ragged: Collection[str], row: int) -> pa.Table:
    """Columns ``[rows, ...]``, lists or Arrow's; ``row`` is the first row's number."""
    if isinstance(batch, pa.Table | pa.RecordBatch):
        return pa.table(batch)
    columns = {name: _plain(value, name, row) for name, value in named(batch).items()}
    counts = {n: len(c) if _is_long(c) else "a number" for n, c in columns.items()}
    if len({*counts.values()}) > 1 or "a number" in counts.values():
        raise DataError(
            "write_memmap(): columns have one and the same first dimension, got "
            f"{', '.join(f'{n}: {k}' for n, k in counts.items())} from row {row} on",
            row=row,
        )
    table = from_columns(columns, "write_memmap()")
    for number, field in enumerate(table.schema):
        kind = field.type
        if field.name in ragged and pa.types.is_fixed_size_list(kind):
            lists = table.column(number).cast(pa.list_(kind.value_field))
            table = table.set_column(number, field.name, lists)
    return table


def tables_of_batches(
    batches: Iterable[Any], ragged: Collection[str]
) -> tuple[Layout, Iterator[pa.Table]]:
    coming = iter(batches)
    first = _first(coming)

    def tables() -> Iterator[pa.Table]:
        row = 0
        for batch in chain([first], coming):
            yield (table := table_of_batch(batch, ragged, row))
            row += len(table)

    return layout_of(first), tables()


def tables_of_rows(
    rows: Iterable[Any], ragged: Collection[str]
) -> tuple[Layout, Iterator[pa.Table]]:
    """Tables of Python rows, with the types of the first ones."""
    coming = _chunks(rows)
    layout, first = _first(coming)
    finder = SchemaFinder(ragged)
    try:
        finder.add(first)
    except UnfitRow as unfit:
        raise _unfit(unfit, 0) from unfit
    schema = pa.schema([(field.name, _typed(field.type)) for field in finder.schema])

    def tables() -> Iterator[pa.Table]:
        row = 0
        for kind, some in chain([(layout, first)], coming):
            if kind != layout or some[0].keys() != first[0].keys():
                raise DataError(
                    f"write_memmap(): row {row} is {_kind(kind, some[0])}, and those before it are "
                    f"{_kind(layout, first[0])}: all rows have the same columns",
                    row=row,
                )
            try:
                yield table_of_rows(some, schema)
            except UnfitRow as unfit:
                raise _unfit(unfit, row) from unfit
            row += len(some)

    return layout, tables()


def _first(coming: Iterator[Any]) -> Any:
    for first in coming:
        return first
    raise DataError(
        "write_memmap(): there are no rows to tell the columns from: check what filters them, or give "
        "arrays or a table, which have columns without rows"
    )


def _kind(layout: Layout, row: dict[str, Any]) -> str:
    if layout == "dict":
        return f"a dict of {', '.join(row)}"
    return f"a tuple of {len(row)}" if len(row) > 1 else "a single value"


def _unfit(unfit: UnfitRow, row: int) -> DataError:
    return DataError(
        f"write_memmap(): row {row + unfit.number} {unfit}: all rows have the same columns, of the types of "
        "the first ones; if lengths may differ, pass ragged=[...]",
        row=row + unfit.number,
    )


def _typed(kind: pa.DataType) -> pa.DataType:
    """The type of a column, which lists are integers if all are empty."""
    empty = is_list(kind) and pa.types.is_null(kind.value_type)
    return pa.list_(pa.int64()) if empty else kind


def _chunks(rows: Iterable[Any]) -> Iterator[tuple[Layout, list[dict[str, Any]]]]:
    """Rows of one kind, with copies of their arrays: who gives them may fill these again."""
    held: list[dict[str, Any]] = []
    layout: Layout = "dict"
    size = 0
    for number, row in enumerate(rows):
        kind, found = layout_of(row), named(row)
        same = held and kind == layout and found.keys() == held[0].keys()
        if held and (not same or size >= SOME_BYTES or len(held) == SOME_ROWS):
            yield layout, held
            held, size = [], 0
        for name, given in found.items():
            value = _plain(given, name, number)
            if isinstance(value, np.ndarray):
                value = np.array(value)
            found[name] = value
            size += getattr(value, "nbytes", 8 * len(value) if _is_long(value) else 8)
        layout = kind
        held.append(found)
    if held:
        yield layout, held
