"""A pipeline's rows as files: ``write_parquet``, ``write_arrow``, ``write_json`` and ``to_map_dataset``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import local_path, require, whole_number
from trainpipes.cache import kept_file
from trainpipes.columns.arrays import holds, is_text, laid_out, one_chunk, type_without_views
from trainpipes.columns.block import BadCell
from trainpipes.columns.python_values import python_values
from trainpipes.columns.types import unmarked
from trainpipes.engine.processes.executors import Executor
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.filesystems.places import OutputFile
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.interfaces.options import either
from trainpipes.sources.from_memmap import MemmapDataset
from trainpipes.writers.epoch_rows import EpochRows, MapDataset, compacts
from trainpipes.writers.output_folder import Manifest
from trainpipes.writers.own_input import refuse_own_file
from trainpipes.writers.write import ANY, Format, Output, write

#: A group's rows and bytes in memory, where its rows are not counted. A row group of Parquet is small enough
#: to be shuffled and dealt, and large enough to be worth a request.
GROUP_ROWS, GROUP_BYTES, OTHER_GROUP_BYTES = 16_384, 8 << 20, 4 << 20
#: Bytes of rows in memory after which a file ends, where neither rows nor files are counted.
FILE_BYTES = 512 << 20
CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4")
ARROW_CODECS = ("zstd", "lz4")
JSON_SUFFIXES = {"gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}
#: What the programs of these names take; Arrow's gzip is at 9, up to 3 times as slow for 1 % less.
JSON_LEVELS = {"gzip": 6, "zstd": 3}

is_ = pa.types
ENCODE = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False,
    default=methodcaller("tolist"),
).encode  # fmt: skip


def write_parquet(
    pipeline: Record,
    folder: str | os.PathLike[str],
    *,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = "zstd",
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
) -> Manifest:
    """Write the rows of an epoch to Parquet files, in order and without ``sharding_filter``.

    After a kill the same call goes on after the last whole file; when all are there, it does nothing.

    Args:
        folder: a path or fsspec URL, new or empty, for "part-00000.parquet" and so on, and "_manifest.json",
            which appears last.
        row_group_size: rows in each row group; if left out, 8 MiB in memory, 16,384 rows at most.
        rows_per_file: rows in each file; or
        num_files: number of files, where rows are counted. If both are left out, files are of 512 MiB in
            memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        overwrite: whether to remove files written there before.
        executor: ``tp.Threads(n)``, ``tp.Processes(n)`` or ``tp.Ray(address)``, where rows are
            counted and ``num_files`` or ``rows_per_file`` is given; None for this thread.
        storage_options: of the folder's file system.
        retry: how long failing requests to a URL are made again.

    Raises:
        ConfigError: the pipeline batches, repeats or has no rows; the folder holds other files, is part of
            the input, or cannot be written; or ``executor`` does not fit.
        DataChangedError: the input, a function, or a file that was written has changed.
        SchemaError: rows have no columns, or not all the same.
        WorkerError: three worker processes died at one file, or a task of Ray four times.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"x": range(10)})).filter(lambda row: row["x"] % 2)
    >>> written = rows.write_parquet(tempfile.mkdtemp(), rows_per_file=2)
    >>> written.rows, len(written.files)
    (5, 3)
    """
    check_codec(compression, CODECS, "write_parquet")
    check_group(row_group_size, "write_parquet")
    options = {"row_group_size": row_group_size, "compression": compression}
    form = parquet_form("write_parquet", options, row_group_size, compression)
    out = Output(folder, num_files, rows_per_file, overwrite, storage_options, retry)
    return write(pipeline, form, out, executor)


def write_arrow(
    pipeline: Record,
    folder: str | os.PathLike[str],
    *,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
) -> Manifest:
    """Write the rows of an epoch to Arrow IPC files (Feather), "part-00000.arrow" and so on.

    Args:
        row_group_size: rows in each record batch; if left out, 4 MiB of rows, and 16,384 rows at most.
        compression: "zstd", "lz4" or None, with which files can be mapped into memory.
        folder, rows_per_file, num_files, overwrite, executor, storage_options, retry: as in
            ``write_parquet``.

    Raises:
        ConfigError, SchemaError: as ``write_parquet``.
    """
    check_codec(compression, ARROW_CODECS, "write_arrow")
    check_group(row_group_size, "write_arrow")
    form = arrow_form("write_arrow", row_group_size, compression)
    out = Output(folder, num_files, rows_per_file, overwrite, storage_options, retry)
    return write(pipeline, form, out, executor)


def write_json(
    pipeline: Record,
    folder: str | os.PathLike[str],
    *,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: Literal["gzip", "zstd"] | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
) -> Manifest:
    """Write the rows of an epoch to JSON lines, "part-00000.jsonl" and so on. Dates, times and decimals
    become text.

    Args:
        compression: "gzip", "zstd" or None.
        folder, rows_per_file, num_files, overwrite, executor, storage_options, retry: as in
            ``write_parquet``.

    Raises:
        ConfigError, SchemaError: as ``write_parquet``.
        DataError: bytes, NaN, infinity or half of a pair of surrogates, for which JSON has no form.
    """
    check_codec(compression, JSON_SUFFIXES, "write_json")
    form = Format(
        "write_json", JSON_SUFFIXES.get(compression or "", ".jsonl"), partial(_JsonLines, compression),
        {"compression": compression}, GROUP_ROWS, OTHER_GROUP_BYTES, FILE_BYTES,
    )  # fmt: skip
    out = Output(folder, num_files, rows_per_file, overwrite, storage_options, retry)
    return write(pipeline, form, out, executor)


def check_codec(compression: object, known: Collection[str], caller: str) -> None:
    good = compression is None or compression in known
    require(good, f"{caller}(compression)", f"{either([*known])}, or None", compression)


def check_group(rows: int | None, caller: str) -> None:
    if rows is not None:
        whole_number(rows, 1, f"{caller}(row_group_size)", "rows in each group")


def parquet_form(
    caller: str,
    options: dict[str, Any],
    row_group_size: int | None,
    compression: str | None,
    level: int | None = None,
    first: pa.Schema | None = None,
    **how: Any,
) -> Format:
    how |= {"compression": compression or "none", "compression_level": level}
    return Format(
        caller, ".parquet", partial(_Parquet, how | {"write_page_checksum": True}, first), options,
        row_group_size or GROUP_ROWS, ANY if row_group_size else GROUP_BYTES, FILE_BYTES,
    )  # fmt: skip


def arrow_form(caller: str, row_group_size: int | None, compression: str | None) -> Format:
    return Format(
        caller, ".arrow", partial(_Arrow, compression),
        {"row_group_size": row_group_size, "compression": compression},
        row_group_size or GROUP_ROWS, ANY if row_group_size else OTHER_GROUP_BYTES, FILE_BYTES,
    )  # fmt: skip


class _Parquet:
    """Writes a Parquet file: the ``FileWriter`` of ``write_parquet``; ``first`` has metadata of columns."""

    def __init__(self, how: Any, first: pa.Schema | None, file: Any, schema: pa.Schema) -> None:
        self.columns = columns_of(schema)
        # Of structs within lists Arrow writes no views.
        kinds = [type_without_views(k) if is_.is_nested(k) else k for k in schema.types]
        self._schema = pa.schema([f.with_type(k) for f, k in zip(schema, kinds, strict=True)])
        try:
            self._writer = pq.ParquetWriter(file, _with_metadata(self._schema, first), **how)
        except pa.ArrowNotImplementedError as error:
            if len(schema) > 1:
                for column in schema:  # which column it is
                    _Parquet({}, None, pa.BufferOutputStream(), pa.schema([column])).close()
            raise SchemaError(
                f"column {schema[0].name!r} holds {schema[0].type}, which Parquet cannot hold ({error}): "
                "leave it out by select() or columns=[...], or make another column of it"
            ) from error

    def write(self, group: pa.Table, first_row: int) -> None:
        if group.schema.types != self._schema.types:
            group = group.cast(self._schema)
        # In a single chunk: where others begin, pages may, too.
        self._writer.write_table(group.combine_chunks(), max(1, len(group)))

    def close(self) -> None:
        self._writer.close()


def _with_metadata(schema: pa.Schema, first: pa.Schema | None) -> pa.Schema:
    if first is None:
        return schema
    of = {field.name: field.metadata for field in first if field in [*schema]}
    fields = [f.with_metadata(of.get(f.name, f.metadata)) for f in schema]
    return pa.schema(fields, metadata=first.metadata)


class _Arrow:
    """Writes an Arrow file: the ``FileWriter`` of ``write_arrow``."""

    def __init__(self, compression: str | None, file: OutputFile, schema: pa.Schema) -> None:
        self.columns, options = columns_of(schema), pa.ipc.IpcWriteOptions(compression=compression)
        self._schema = pa.schema([f.with_type(unmarked(f.type)) for f in schema], schema.metadata)
        self._writer = pa.ipc.new_file(file, self._schema, options=options)

    def write(self, group: pa.Table, first_row: int) -> None:
        if not group.schema.equals(self._schema, check_metadata=True):
            group = group.cast(self._schema)
        # Of slices it would write the whole buffers.
        for part in compacts(group):
            self._writer.write_table(part, max(1, len(part)))

    def close(self) -> None:
        self._writer.close()


def columns_of(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(unmarked(field.type)) for field in schema}


class _JsonLines:
    """One file. Compressed, each group is a gzip member or zstd frame of its own, to read from."""

    def __init__(self, compression: str | None, file: OutputFile, schema: pa.Schema) -> None:
        self.columns, self._file = columns_of(schema), file
        self._compress: Callable[[bytes], Any] = bytes
        if compression is not None:
            self._compress = pa.Codec(compression, JSON_LEVELS[compression]).compress

    def write(self, group: pa.Table, first_row: int) -> None:
        try:
            lines = lines_of(group)
        except BadCell as error:
            row = None if error.row is None else first_row + error.row
            where = "" if row is None else f" (row {row:,} of those written)"
            raise DataError(f"write_json(): column {error}{where}", stage="write_json()") from None
        self._file.write(self._compress(lines))

    def close(self) -> None:
        """Nothing follows the last row."""


def lines_of(table: pa.Table) -> bytes:
    columns = [*map(_json_values, table.schema, table.columns)]
    rows = [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]
    try:
        return "".join([f"{ENCODE(row)}\n" for row in rows]).encode()
    except ValueError:
        raise next(filter(None, map(_bad_cell, range(len(rows)), rows))) from None


def _json_values(field: pa.Field, column: pa.ChunkedArray) -> list[Any]:
    kind = _json_type(field.type, field.name)
    if isinstance(field.type, pa.FixedShapeTensorType):
        return python_values(column)
    if kind != column.type:
        column = laid_out(one_chunk(column)).cast(kind)
    if not holds(column.type, is_.is_map):  # dicts of maps are much slower to make
        return python_values(column, None)
    try:
        return python_values(column, "strict")
    except KeyError:
        row = next(n for n in range(len(column)) if _has_twice(column.slice(n, 1)))
        way = "leave one out in a map(), or write Parquet"
        raise BadCell(
            row, f"{field.name!r}: a map has a key twice, which JSON has once: {way}"
        ) from None


def _has_twice(column: Any) -> bool:
    """Whether a map in it has a key twice."""
    try:
        python_values(column, "strict")
    except KeyError:
        return True
    return False


def _bad_cell(number: int, row: dict[str, Any]) -> BadCell | None:
    for name, value in row.items():
        try:
            ENCODE(value).encode()
        except UnicodeEncodeError as error:  # of a value of Arrow's JSON type
            half = error.object[error.start]
            return BadCell(
                number,
                f"{name!r}: a file of UTF-8 cannot hold {half!r}, half of a pair of surrogates: replace it "
                "in a map(), or write Parquet",
            )
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
    if isinstance(kind, pa.JsonType):
        return kind
    if isinstance(kind, pa.Bool8Type):
        return pa.bool_()
    if isinstance(kind, pa.BaseExtensionType):
        return _json_type(kind.storage_type, column)
    if is_.is_run_end_encoded(kind):
        return _json_type(kind.value_type, column)
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
        plain_type = _json_type(value.type, column)
        is_plain = plain_type == value.type and not is_.is_list_view(kind)
        is_plain = is_plain and not is_.is_large_list_view(kind)
        return kind if is_plain else pa.large_list(value.with_type(plain_type))
    if any(of(kind) for of in PLAIN):
        return kind
    raise BadCell(
        None,
        f"{column!r}: JSON has no form for {kind}: leave it out with drop_columns(), make text of it with "
        "with_columns(), or write Parquet",
    )


def write_memmap(
    pipeline: Record,
    path: str | os.PathLike[str],
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
    """Write the rows of an epoch to a memory map. Options are those of
    ``trainpipes.write_memmap``. After a kill the same call continues after the last whole
    part.

    >>> import tempfile, trainpipes as tp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = tp.from_tensors(x=[1, 2, 3]).write_memmap(f"{folder}/numbers")
    ...     len(written), int(written[2]["x"])
    (3, 3)
    """
    from trainpipes.writers.memmap import write_memmap

    return write_memmap(
        path, pipeline, dtype=dtype, ragged=ragged, rows_per_file=rows_per_file, num_files=num_files,
        overwrite=overwrite, executor=executor, storage_options=storage_options, retry=retry,
    )  # fmt: skip


def to_map_dataset(pipeline: Record, path: str | os.PathLike[str]) -> MapDataset:
    """The rows of the first epoch of a pipeline, in its order, written once and memory-mapped.

    Args:
        pipeline: gives rows with columns; no batches.
        path: the file, written anew.

    Raises:
        ConfigError: the pipeline batches, has no end or no rows; or the file is part of the input, or cannot
            be written.
        SchemaError: its rows have no columns, or not all the same.
    """
    target = Path(local_path(path, "to_map_dataset(path)")).expanduser().absolute()
    rows = EpochRows(pipeline, "to_map_dataset")
    refuse_own_file(rows.plan.inputs, target, "to_map_dataset")
    failed: list[Exception] = []  # in making rows, which is not about the file

    def tables() -> Iterator[pa.Table]:
        try:
            rows.open()
            yield from iter(rows.some, None)
        except Exception as error:
            failed.append(error)
            raise

    try:
        with closing(rows):
            if not kept_file.write(target, tables(), None, private=False):
                raise ConfigError("to_map_dataset(): the pipeline has no rows")
    except OSError as error:
        if error in failed:
            raise
        raise ConfigError(
            f"to_map_dataset(): {target} cannot be written ({error.strerror or error}): make room there, or "
            "give another path",
            path=str(target),
        ) from error
    return MapDataset(target)
