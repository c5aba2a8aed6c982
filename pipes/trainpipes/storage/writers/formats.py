"""``write_parquet``, ``write_arrow`` and ``write_json``: a pipeline's rows as files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import whole_number
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, DataError
from trainpipes.kinds.options import either
from trainpipes.storage.executor import Executor
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import Manifest
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.json_lines import NoJson, lines_of
from trainpipes.storage.writers.write import Format, Group, write

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

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


def write_parquet(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = "zstd",
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the rows of one epoch to Parquet files, in order and without ``sharding_filter``.

    After a kill the same call goes on after the last whole file and gives the same files; when all are there,
    it does nothing. Memory is the pipeline's plus a row group for each worker.

    Args:
        folder: a path or fsspec URL, new or empty, for "part-00000.parquet" and so on, and "_manifest.json"
            with counts, columns and checksums, which appears last.
        row_group_size: rows in each row group; if left out, 8 MiB of rows in memory, and 16,384 rows at most.
        rows_per_file: rows in each file; or
        num_files: number of files, where rows are counted. If both are left out, 512 MiB of rows in memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        overwrite: whether to remove what was written there before.
        executor: ``trainpipes.storage.Threads(n)``, ``Processes(n)`` or ``Ray(address)``, where rows are
            counted and ``num_files`` or ``rows_per_file`` is given; None for this thread.
        storage_options: of the folder's file system.

    Raises:
        ConfigError: the pipeline batches, repeats or has no rows; the folder holds other files or those of
            another pipeline, is part of the input, or cannot be written; or the executor cannot know which
            rows are whose.
        DataChangedError: the input has changed since the work was begun, or a file since it was written.
        SchemaError: rows have no columns, or not all the same.
        WorkerError: a worker process has died.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"x": range(10)})).filter(lambda row: row["x"] % 2)
    >>> written = rows.write_parquet(tempfile.mkdtemp(), rows_per_file=2)
    >>> written.rows, len(written.files)
    (5, 3)
    >>> list(tp.list_files(written.files).read_parquet())[-1]
    {'x': 9}
    """
    check_codec(compression, CODECS, "write_parquet")
    _check_rows(row_group_size, "write_parquet")
    parquet = parquet_form(row_group_size, compression)
    options = {"row_group_size": row_group_size, "compression": compression}
    form = parquet.format("write_parquet", options)
    rows = partial(EpochRows, pipeline, form.caller)
    return write(rows, folder, form, num_files, rows_per_file, overwrite, executor, storage_options)


def write_arrow(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the rows of one epoch to Arrow IPC files (Feather), "part-00000.arrow" and so on.

    Args:
        row_group_size: rows in each record batch; if left out, 4 MiB of rows, and 16,384 rows at most.
        compression: "zstd", "lz4" or None, with which files can be mapped into memory.
        folder, rows_per_file, num_files, overwrite, executor, storage_options: as in ``write_parquet``.

    Raises:
        ConfigError, SchemaError: as ``write_parquet``.
    """
    check_codec(compression, ARROW_CODECS, "write_arrow")
    _check_rows(row_group_size, "write_arrow")
    size = None if row_group_size else OTHER_GROUP_BYTES
    form = Format(
        "write_arrow", ".arrow", partial(_Arrow, compression),
        partial(table_group, row_group_size or GROUP_ROWS, size),
        {"row_group_size": row_group_size, "compression": compression}, FILE_BYTES,
    )  # fmt: skip
    rows = partial(EpochRows, pipeline, form.caller)
    return write(rows, folder, form, num_files, rows_per_file, overwrite, executor, storage_options)


def write_json(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: Literal["gzip", "zstd"] | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the rows of one epoch to JSON lines, "part-00000.jsonl" and so on. Dates, times and decimals
    become text. Compressed files can be read from every 4 MiB. ``orjson`` is used where it is installed.

    Args:
        compression: "gzip", "zstd" or None.
        folder, rows_per_file, num_files, overwrite, executor, storage_options: as in ``write_parquet``.

    Raises:
        ConfigError, SchemaError: as ``write_parquet``.
        DataError: bytes, NaN or infinity, for which JSON has no form.
    """
    check_codec(compression, JSON_SUFFIXES, "write_json")
    form = Format(
        "write_json", JSON_SUFFIXES.get(compression or "", ".jsonl"), partial(_Lines, compression),
        partial(table_group, GROUP_ROWS, OTHER_GROUP_BYTES), {"compression": compression}, FILE_BYTES,
    )  # fmt: skip
    rows = partial(EpochRows, pipeline, form.caller)
    return write(rows, folder, form, num_files, rows_per_file, overwrite, executor, storage_options)


def check_codec(compression: object, known: Collection[str], caller: str) -> None:
    if compression is not None and compression not in known:
        raise ConfigError(
            f"{caller}(compression) must be {either([*known])}, or None, got {shown(compression)}"
        )


def _check_rows(rows: int | None, caller: str) -> None:
    if rows is not None:
        whole_number(rows, 1, f"{caller}(row_group_size)", "rows in each group")


def table_group(
    most: int, most_bytes: int | None, rows: EpochRows, left: int | None, _: int
) -> Group | None:
    return rows.group(min(most, left or most), most_bytes)


class _TableFile:
    def __init__(self, schema: pa.Schema) -> None:
        self.columns = {field.name: str(field.type) for field in schema}


class ParquetFile(_TableFile):
    def __init__(self, form: ParquetForm, file: OutputFile, schema: pa.Schema) -> None:
        super().__init__(schema)
        kept = schema.with_metadata(form.metadata)
        self._writer = pq.ParquetWriter(file, kept, **form.options)

    def write(self, group: pa.Table, first_row: int) -> None:
        self._writer.write_table(group, row_group_size=max(1, len(group)))

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class ParquetForm:
    rows: int
    size: int | None
    options: dict[str, Any]
    metadata: dict[bytes, bytes] | None = None

    def even(self, row_bytes: float) -> ParquetForm:
        if self.size is None:
            return self
        return replace(self, rows=max(1, min(self.rows, int(self.size / row_bytes))), size=None)

    def open(self, file: OutputFile, schema: pa.Schema) -> ParquetFile:
        return ParquetFile(self, file, schema)

    def format(self, caller: str, options: dict[str, Any]) -> Format:
        group = partial(table_group, self.rows, self.size)
        return Format(caller, ".parquet", self.open, group, options, FILE_BYTES)


def parquet_form(
    row_group_size: int | None, compression: str | None, level: int | None = None, **options: Any
) -> ParquetForm:
    options |= {"compression": compression or "none", "compression_level": level}
    options |= {"write_page_checksum": True}
    return ParquetForm(
        row_group_size or GROUP_ROWS, None if row_group_size else GROUP_BYTES, options
    )


class _Arrow(_TableFile):
    def __init__(self, compression: str | None, file: OutputFile, schema: pa.Schema) -> None:
        super().__init__(schema)
        options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer = pa.ipc.new_file(file, schema, options=options)

    def write(self, group: pa.Table, first_row: int) -> None:
        self._writer.write_table(group, max_chunksize=len(group))

    def close(self) -> None:
        self._writer.close()


class _Lines(_TableFile):
    """One file. Compressed, each group is a gzip member or zstd frame of its own, so that a reader can begin
    at any of them."""

    def __init__(self, compression: str | None, file: OutputFile, schema: pa.Schema) -> None:
        super().__init__(schema)
        self._file = file
        self._codec = (
            None if compression is None else pa.Codec(compression, JSON_LEVELS[compression])
        )

    def write(self, group: pa.Table, first_row: int) -> None:
        try:
            lines = lines_of(group)
        except NoJson as error:
            row = None if error.row is None else first_row + error.row
            where = "" if row is None else f" (row {row:,} of those written)"
            raise DataError(f"write_json(): column {error}{where}", stage="write_json()") from None
        self._file.write(lines if self._codec is None else self._codec.compress(lines))

    def close(self) -> None:
        """Nothing follows the last line."""
