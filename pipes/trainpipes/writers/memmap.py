"""Memory-mapped data sets: numbers written once, then read by row number."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import require, wrong
from trainpipes.columns.arrays import apart, first_null, is_list, one_chunk, viewless
from trainpipes.columns.block import BadCell
from trainpipes.columns.columns import from_columns
from trainpipes.columns.python_values import table_of_rows
from trainpipes.columns.types import SchemaFinder, UnfitRow, as_array
from trainpipes.engine.processes.executor_options import executor_of
from trainpipes.engine.processes.executors import Executor, Threads
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, DataError
from trainpipes.filesystems.places import OutputFile, place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.interfaces.read_columns import Even, Opaque, Ragged, null_cell, of_arrow, row_at
from trainpipes.sources import mapped_rows
from trainpipes.sources.from_memmap import MemmapDataset
from trainpipes.sources.mapped_rows import Array, Layout
from trainpipes.writers.epoch_rows import EpochRows, TableGroups
from trainpipes.writers.own_input import mapped_paths, refuse_mapped
from trainpipes.writers.write import Format, Output, write, write_once

NO_NUMBERS = (
    "holds {}, and a memory map holds bool, integers and floats of up to 64 bits, or bytes: encode text "
    "(.encode(), or tokenize it), and leave out what cannot be"
)


def bad_row(row: int, name: str, problem: str) -> DataError:
    return DataError(f"write_memmap(): row {row}: column {name!r} {problem}", row=row)


def arrays_of(column: pa.ChunkedArray, name: str, as_ragged: bool, row: int) -> Ragged | Even:
    """A column as arrays; ``row`` is the first row's number."""
    array = viewless(one_chunk(column))
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        if array.null_count:
            raise bad_row(row + first_null(array), name, str(null_cell(0, name)))
        values, offsets = apart(array)
        return Ragged(values, np.diff(offsets).astype(np.int64))
    try:
        found = of_arrow(column, name)
    except BadCell as bad:
        raise bad_row(row + (bad.row or 0), name, str(bad)) from bad
    if isinstance(found, Opaque):
        raise bad_row(row, name, NO_NUMBERS.format(array.type))
    if not as_ragged or isinstance(found, Ragged):
        return found
    if found.values.ndim < 2:
        problem = "is a single number, and in a ragged column rows are lists or arrays"
        raise bad_row(row, name, problem)
    count, length, *rest = found.values.shape
    return Ragged(found.values.reshape(count * length, *rest), np.full(count, length, np.int64))


class NpyFile:
    """Writes a ``.npy`` file, whose header is written anew at the end."""

    def __init__(self, file: OutputFile, dtype: str, shape: tuple[int, ...]) -> None:
        self.rows = 0
        self._file, self._dtype, self._shape = file, dtype, shape
        file.write(mapped_rows.npy_header(dtype, (0, *shape)))
        file.check = 0

    def write(self, array: Array) -> None:
        data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(data.data)
        self.rows += len(array)

    def close(self) -> int:
        """Write how many rows there are; gives the CRC-32 of the bytes after the header."""
        self._file.write_beginning(mapped_rows.npy_header(self._dtype, (self.rows, *self._shape)))
        return self._file.check


def _lost(values: Array, found: Array) -> Any:
    """Which values another dtype cannot hold; floats are rounded."""
    return np.isinf(found) & np.isfinite(values) if found.dtype.kind == "f" else found != values


class ColumnFile:
    """A column's values, and the offsets of a ragged column."""

    def __init__(
        self, name: str, empty: Ragged | Even, named: Any, part: OutputFile, ending: str
    ) -> None:
        dtype = named or empty.values.dtype.newbyteorder("=").name
        shape, self.ragged = empty.values.shape[1:], isinstance(empty, Ragged)
        self._column = mapped_rows.Column(name, dtype, shape, self.ragged)
        self._values = NpyFile(part.beside(ending), dtype, shape)
        self._offsets: NpyFile | None = None
        if self.ragged:
            self._offsets = NpyFile(part.beside(mapped_rows.offsets_ending(ending)), "int64", ())
            self._offsets.write(np.zeros(1, np.int64))

    def write(self, column: Ragged | Even, row: int) -> None:
        values, dtype = column.values, np.dtype(self._column.dtype)
        if isinstance(column, Ragged) and self._offsets:
            self._offsets.write(self._values.rows + np.cumsum(column.lengths, dtype=np.int64))
        with np.errstate(invalid="ignore", over="ignore"):  # a float beyond int64, or float32
            found: Array = values.astype(dtype, copy=False)
        if dtype != values.dtype and (bad := _lost(values, found)).any():
            place = np.unravel_index(np.argmax(bad), bad.shape)
            first, name = int(place[0]), self._column.name
            row += row_at(first, column.lengths) if isinstance(column, Ragged) else first
            raise bad_row(
                row, name,
                f"is {dtype}, which cannot hold {values.dtype} {values[place]}: pass dtype={{{name!r}: ...}} "
                "with one that can, or convert the values",
            )  # fmt: skip
        self._values.write(found)

    def close(self) -> mapped_rows.Column:
        found = replace(self._column, crc32=self._values.close(), values=self._values.rows)
        return replace(found, offsets_crc32=self._offsets.close()) if self._offsets else found


class PartFile:
    """Writes a part of a memory map: the ``FileWriter`` of ``write_memmap``."""

    def __init__(
        self,
        layout: Layout,
        dtypes: Mapping[str, str] | str | None,
        ragged: Collection[str],
        file: OutputFile,
        schema: pa.Schema,
    ) -> None:
        names, empty = schema.names, pa.Table.from_batches([], schema)
        asked = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(names, dtypes)
        if missing := sorted({*asked, *ragged} - {*names}):
            raise ConfigError(
                f"write_memmap(): there is no column {missing[0]!r}; there are {', '.join(sorted(names))}"
            )
        self.columns: dict[str, str] = {}
        self._file, self._layout, self._ragged, self._rows = file, layout, ragged, 0
        self._columns = {
            name: ColumnFile(
                name, arrays_of(empty[name], name, name in ragged, 0), asked.get(name), file, ending
            )
            for name, ending in zip(names, mapped_rows.file_endings(names), strict=True)
        }
        odd = [name for name, column in self._columns.items() if column.ragged]
        if layout == "tuple" and odd:
            raise ConfigError(
                f"write_memmap(): column {odd[0]!r} is ragged, and such columns need names: give rows that "
                "are dicts"
            )

    def write(self, group: pa.Table, first_row: int) -> None:
        for name, column in self._columns.items():
            column.write(arrays_of(group[name], name, name in self._ragged, first_row), first_row)
        self._rows += len(group)

    def close(self) -> None:
        columns = tuple(column.close() for column in self._columns.values())
        self.columns = {column.name: column.type for column in columns}
        self._file.write(mapped_rows.Header(self._rows, self._layout, columns).pack())


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
        source: arrays or tensors ``[N, ...]`` (a dict, a tuple or a single array); a ``pyarrow.Table``, whose
            list columns are ragged; rows in turn (an iterable, a function that returns one, a map-style
            dataset): dicts, tuples or single values; or a ``Pipeline`` of rows with columns, of which one
            epoch is written.
        dtype: of the columns; a dict of names for some of them ("0", "1" and so on for tuples); if left out,
            as the values come. A value that does not fit is refused; floats that are asked for may round
            floats and integers.
        ragged: columns whose rows are arrays of different lengths, if the first rows (1,024, or 4 MiB) do not
            show it. Lists are always ragged.
        rows_per_file: rows in each part; or
        num_files: number of parts, where rows are counted. If both are left out, a part ends after 1 GiB.
        overwrite: whether to remove files written there before.
        executor: ``tp.Threads(n)``, ``tp.Processes(n)`` or ``tp.Ray(address)``, for a pipeline
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
        WorkerError: three worker processes died at one file, or a task of Ray four times.

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
        alone = executor_of(executor, f"{CALLER}(executor)", Threads(1)) == Threads(1)
        rule = "left out for rows that are read once: a pipeline of rows can be shared out"
        require(alone, f"{CALLER}(executor)", rule, executor)
        several = source.values() if isinstance(source, Mapping) else source
        parts = list(several) if isinstance(source, Mapping | tuple) else [source]
        mapped = chain.from_iterable(map(mapped_paths, parts))
        refuse_mapped(mapped, place_at(path, CALLER, storage_options))
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
    return Format(CALLER, mapped_rows.HEADER, opened, options, *sizes, ".x.npy")


def _dtypes(dtype: Any) -> Any:
    try:
        if isinstance(dtype, Mapping):
            return {str(name): _dtype(kind) for name, kind in sorted(dtype.items())}
        return None if dtype is None else _dtype(dtype)
    except TypeError as error:
        rule = (
            "a dtype of NumPy or torch (bool, integers, floats of up to 64 bits), or a dict of them"
        )
        raise wrong(f"{CALLER}(dtype)", rule, dtype) from error


def _dtype(dtype: Any) -> str:
    found = np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
    if found.name not in mapped_rows.DTYPES:
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
    """Arrays ``[rows, ...]``: a dict, a tuple or a single array."""
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
    """Rows of a single kind, with copies of their arrays: who gives them may fill these again."""
    held: list[dict[str, Any]] = []
    layout: Layout = "dict"
    size = 0
    for number, row in enumerate(rows):
        kind, found = layout_of(row), named(row)
        same = held and kind == layout and found.keys() == held[0].keys()
        if held and (not same or size >= SOME_BYTES or len(held) == SOME_ROWS):
            yield layout, held
            held, size = [], 0
        for name, column_values in found.items():
            value = _plain(column_values, name, number)
            if isinstance(value, np.ndarray):
                value = np.array(value)
            found[name] = value
            size += getattr(value, "nbytes", 8 * len(value) if _is_long(value) else 8)
        layout = kind
        held.append(found)
    if held:
        yield layout, held
