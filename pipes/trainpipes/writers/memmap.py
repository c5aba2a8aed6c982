"""Memory-mapped data sets: numbers written once, then read by row number."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import require, wrong
from trainpipes.columns.arrays import is_list
from trainpipes.columns.columns import from_columns
from trainpipes.columns.row_types import as_array
from trainpipes.columns.value_column import SchemaFinder, UnfitRow, table_of_rows
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, DataError
from trainpipes.filesystems.places import place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.sources.memmap.dataset import MemmapDataset
from trainpipes.sources.memmap.manifest import DTYPES, HEADER, Layout
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.executor import Executor, Threads, checked_executor
from trainpipes.writers.npy_files import NO_NUMBERS, PartFile, bad_row
from trainpipes.writers.table_groups import TableGroups
from trainpipes.writers.write import Format, Output, write, write_once

__all__ = ["read_memmap", "write_memmap"]

read_memmap = MemmapDataset
#: Bytes of rows after which a part ends, where neither rows nor parts are counted.
PART_BYTES = 1 << 30
#: Rows that are written together, and their bytes, at most.
GROUP_ROWS, GROUP_BYTES = 16_384, 1 << 20
CALLER = "write_memmap"
#: Bytes and rows that are looked at together, about; the first ones say which columns there are.
SOME_BYTES, SOME_ROWS = 4 << 20, 1024
#: NumPy's letters of the dtypes that columns can hold.
CHARS = "?bBhHiIlLqQefd"


def write_memmap(
    path: str | os.PathLike[str],
    source: Any,
    *,
    dtype: Any = None,
    ragged: Collection[str] = (),
    rows_per_file: int | None = None,
    num_files: int | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
) -> MemmapDataset | None:
    """Write rows of numbers to a folder of ``.npy`` files that ``read_memmap`` maps into memory.

    After a kill the same call goes on, for a pipeline of rows; other sources are written anew.

    Args:
        path: a folder, new or empty: a path or fsspec URL.
        source: arrays or tensors ``[N, ...]`` (a dict, a tuple or one); a ``pyarrow.Table``, whose list
            columns are ragged; rows one by one (an iterable, a function that returns one, a map-style
            dataset): dicts, tuples or single values; or a ``Pipeline`` of rows with columns, of which one
            epoch is written.
        dtype: of the columns; a dict of names for some of them ("0", "1" and so on for tuples); if left out,
            as the values come. A value that does not fit is refused; floats may be narrowed.
        ragged: columns whose rows are arrays of different lengths, if the first rows (1,024, or 4 MiB) do not
            show it. Lists are always ragged.
        rows_per_file: rows in each part; or
        num_files: number of parts, where rows are counted. If both are left out, a part ends after 1 GiB.
        overwrite: whether to remove what was written there before.
        executor: ``trainpipes.writers.Threads(n)``, ``Processes(n)`` or ``Ray(address)``, for a pipeline
            whose rows are counted, with ``num_files`` or ``rows_per_file``; None for this thread.
        storage_options: of the folder's file system.
        retry: how long failing requests to a URL are made again.

    Returns:
        The memory map, opened; None where it was written to a URL.

    Raises:
        ConfigError: something else is there; another process writes to it; a dtype is of no column; or it
            cannot be written.
        DataChangedError: the pipeline's input has changed.
        DataError: a row does not fit those before it, or holds no numbers.
        SchemaError: a part has other columns than those before it.
        WorkerError: a worker process has died.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> def documents():
    ...     for n in range(3):
    ...         yield {"input_ids": list(range(n)), "source": n}
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "documents.memmap"
    >>> data = tp.write_memmap(path, documents, dtype={"input_ids": "uint16"})
    >>> data[2]
    {'input_ids': tensor([0, 1], dtype=torch.uint16), 'source': tensor(2)}
    """
    ragged = [ragged] if isinstance(ragged, str) else list(ragged)
    dtypes = _dtypes(dtype)
    out = Output(path, num_files, rows_per_file, overwrite, storage_options, retry)
    if isinstance(source, Record):
        rows = EpochRows(source, CALLER, ragged=ragged)
        write(rows, _form("dict", dtypes, ragged), out, executor)
    else:
        alone = checked_executor(executor, CALLER, Threads(1)) == Threads(1)
        rule = "left out for rows that are read once: a pipeline of rows can be shared out"
        require(alone, f"{CALLER}(executor)", rule, executor)
        layout, count, tables = _tables(source, ragged)
        write_once(OnceTables(tables, CALLER), count, _form(layout, dtypes, ragged), out)
    place = place_at(path, CALLER, storage_options)
    if not place.is_local:
        return None
    return MemmapDataset(place.root if "://" in str(path) else path)


def _form(layout: Layout, dtypes: Any, ragged: list[str]) -> Format:
    options = {"dtype": dtypes, "ragged": sorted(ragged)}
    opened = partial(PartFile, layout, dtypes, ragged)
    sizes = GROUP_ROWS, min(GROUP_BYTES, PART_BYTES), PART_BYTES
    return Format(CALLER, HEADER, opened, options, *sizes, ".x.npy")


def _dtypes(dtype: Any) -> Any:
    try:
        if isinstance(dtype, Mapping):
            return {str(name): _dtype(one) for name, one in sorted(dtype.items())}
        return None if dtype is None else _dtype(dtype)
    except TypeError as error:
        rule = (
            "a dtype of NumPy or torch (bool, integers, floats of up to 64 bits), or a dict of them"
        )
        raise wrong(f"{CALLER}(dtype)", rule, dtype) from error


def _dtype(dtype: Any) -> str:
    found = np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
    if found.name not in DTYPES:
        raise TypeError
    return found.name


def _tables(source: Any, ragged: Collection[str]) -> tuple[Layout, int | None, Iterator[pa.Table]]:
    if isinstance(source, pa.Table | pa.RecordBatch):
        return "dict", len(source), iter([pa.table(source)])
    several = source.values() if isinstance(source, Mapping) else source
    arrays = list(several) if isinstance(source, Mapping | tuple) else [source]
    if arrays and all(isinstance(a, np.ndarray | torch.Tensor) for a in arrays):
        table = table_of_arrays(source)
        return layout_of(source), len(table), iter([table])
    if callable(source) and not isinstance(source, Iterable):
        source = source()
    count = None
    listed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if listed and not isinstance(source, Iterable):
        dataset, count = source, len(source)
        source = (dataset[n] for n in range(count))
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        raise wrong(
            f"{CALLER}(source)", "arrays or tensors [N, ...] (one, a tuple, a dict), a table, an iterable of "
            "rows, a function that returns one, a map-style dataset or a Pipeline", source,
        )  # fmt: skip
    layout, tables = tables_of_rows(source, ragged)
    return layout, count, tables


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
    """The columns of a row by name; of a tuple or a single value by number."""
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


def table_of_arrays(source: Any) -> pa.Table:
    """Arrays ``[rows, ...]``: a dict, a tuple or one."""
    columns = {name: _plain(value, name, 0) for name, value in named(source).items()}
    counts = {n: len(c) if c.ndim else "a number" for n, c in columns.items()}
    if len({*counts.values()}) > 1 or "a number" in counts.values():
        raise DataError(
            "write_memmap(): columns have one and the same first dimension, got "
            f"{', '.join(f'{n}: {k}' for n, k in counts.items())}"
        )
    return from_columns(columns, "write_memmap()")


def tables_of_rows(
    rows: Iterable[Any], ragged: Collection[str]
) -> tuple[Layout, Iterator[pa.Table]]:
    """Tables of Python rows, with the types of the first ones."""
    coming = _chunks(rows)
    if (found := next(coming, None)) is None:
        raise DataError(
            "write_memmap(): there are no rows to tell the columns from: check what filters them, or give "
            "arrays or a table, which have columns without rows"
        )
    layout, first = found
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
