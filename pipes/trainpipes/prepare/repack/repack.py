"""``repack``: data rewritten for training, as Parquet files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainpipes._internal.checks import byte_count, column_names, flag, need, require, whole_number
from trainpipes.engine.pool import default_threads
from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.given import given_rows, kept_metadata
from trainpipes.prepare.repack.keys import Order
from trainpipes.prepare.repack.passes import Shuffle, temporary_place
from trainpipes.prepare.repack.pieces import CALLER
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import ends_of_names
from trainpipes.storage.executor import Executor, Threads, checked_executor
from trainpipes.storage.output_folder import Manifest
from trainpipes.storage.ray_cluster import Ray
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.formats import CODECS, check_codec, check_group, parquet_form
from trainpipes.storage.writers.write import ANY, Output, write

#: Bytes of memory, at least: less is a number of something else.
LEAST_MEMORY = 64_000
#: Threads, at most: more would have little memory each.
MOST_THREADS = 4


@dataclass(frozen=True)
class Repacked(Manifest):
    """The files that data was rewritten to, a ``Manifest``.

    Attributes:
        rows_in: rows of the input.
        bytes_in: size of the files that were read; None if unknown.
        seconds: that this call took.
    """

    rows_in: int = 0
    bytes_in: int | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def duplicates(self) -> int:
        return self.rows_in - self.rows


def repack(
    data: Any,
    folder: str | os.PathLike[str],
    *,
    shuffle: bool = False,
    seed: int = 0,
    sort: str | Sequence[str] | None = None,
    descending: bool = False,
    drop_duplicates: bool | str | Sequence[str] = False,
    columns: Sequence[str] | None = None,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = "zstd",
    compression_level: int | None = None,
    memory_limit: int | str = "512MB",
    temp_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Repacked:
    """Rewrite data for training, as Parquet files with row groups of one size; if wanted, shuffled, sorted
    or without duplicates.

    Files and order depend on the input and the options alone. After a kill the same call goes on; when all is
    there, it does nothing.

    Args:
        data: files of one format (a path, folder, glob, URL, or a list of them), or a ``Pipeline`` of rows,
            taken without its ``sharding_filter``.
        folder: a path or fsspec URL, new or empty, for "part-00000.parquet" and so on, and "_manifest.json".
        shuffle: permute all rows. Any order is as likely as any other.
        seed: of the shuffle.
        sort: columns to sort by, the first one first; equal rows keep their order. NaN comes after all
            numbers, null last. Needs DuckDB: ``pip install duckdb``.
        descending: whether the largest comes first; null and NaN stay at the end.
        drop_duplicates: True to keep the first of rows that are the same in all columns, or names of columns.
            Null equals null, NaN equals NaN. Needs DuckDB.
        columns: the columns to keep.
        row_group_size: rows of each row group; if left out, 8 MiB of rows in memory, and 16,384 rows at most.
        rows_per_file: rows of each file; or
        num_files: number of files. If both are left out, files are of 512 MiB of rows in memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        compression_level: of zstd, gzip or brotli; if left out, their own.
        memory_limit: bytes for rows that are worked on, such as "4GB", by each task on Ray, else by all;
            Python and reading come on top.
        temp_dir: a path or URL for temporary files, removed at the end. If left out, ``folder``, or the
            system's temporary folder where that is a URL and this machine does the work.
        overwrite: whether to remove what was written there before.
        storage_options: for the file systems of ``data`` and ``folder``. If the two need other ones, give
            ``data`` as a pipeline.
        executor: ``Threads(n)``, ``Processes(n)`` or ``Ray(address)`` of ``trainpipes.storage``; if left out,
            a thread a core, 4 at most.

    Raises:
        ConfigError: an option is invalid; the folder holds other files, or is part of the input; there are no
            rows; the disk is full; or several nodes cannot see a path.
        SchemaError: a column is not there, has no order, or cannot be written to Parquet.
        DataChangedError: the input, or a file that was written, has changed.
        MissingExtraError: DuckDB or Ray is not installed.
        WorkerError: a process, or a task of Ray, was killed repeatedly.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> from trainpipes.prepare import repack
    >>> rows = tp.from_arrow(pa.table({"x": range(100)}))
    >>> done = repack(rows, tempfile.mkdtemp(), shuffle=True, seed=3, num_files=2)
    >>> done.rows, len(done.files)
    (100, 2)
    """
    began = time.monotonic()
    caller = CALLER
    flag(shuffle, f"{caller}(shuffle)")
    whole_number(seed, None, f"{caller}(seed)", "the seed of the shuffle")
    flag(descending, f"{caller}(descending)")
    by = [] if sort is None else column_names(sort, f"{caller}(sort)")
    if shuffle and by:
        raise ConfigError(
            f"{caller}() takes shuffle or sort, got shuffle=True and sort={by}: give one of the two"
        )
    once: list[str] | None = [] if drop_duplicates is True else None
    if not isinstance(drop_duplicates, bool):
        drop_duplicates = once = column_names(drop_duplicates, f"{caller}(drop_duplicates)")
    order = Order(seed if shuffle else None, by, descending, once)
    if columns is not None:
        columns = column_names(columns, f"{caller}(columns)")
    check_codec(compression, CODECS, caller)
    _check_level(compression_level, compression)
    suffixes = None if isinstance(data, Pipeline) else ends_of_names()
    out = Output(folder, num_files, rows_per_file, overwrite, storage_options, suffixes)
    out.check(ANY, caller)
    check_group(row_group_size, caller)
    for given, option in ((by, "sort"), (drop_duplicates, "drop_duplicates")):
        if given:
            need("duckdb", f"{caller}({option})")
    memory = byte_count(memory_limit, f"{caller}(memory_limit)", LEAST_MEMORY)
    options = {
        "shuffle": shuffle, "seed": order.seed, "sort": by, "descending": descending,
        "drop_duplicates": drop_duplicates, "row_group_size": row_group_size, "compression": compression,
        "compression_level": compression_level,
    }  # fmt: skip
    pipeline = given_rows(data, columns, storage_options, caller)
    with checked_executor(executor, caller, _threads()) as workers:
        rows = EpochRows(pipeline, caller)
        source = rows.plan.inputs.source
        metadata = kept_metadata(pipeline, source)
        form = parquet_form(
            caller, options, row_group_size, compression, compression_level, metadata
        )
        if not shuffle and not order.has_keys:
            alone = not (rows.plan.counted and out.is_cut) or rows.plan.runs_user_code
            done = write(rows, form, out, None if executor is None and alone else workers)
        else:
            to = out.open(form, rows.plan, workers)
            between = temporary_place(to.place, temp_dir, storage_options, isinstance(workers, Ray))
            workers.check_path(between.root, f"{caller}(temp_dir)")
            with to:
                shuffled = Shuffle(pipeline, rows, form, order, out, memory, between)
                done = to.finished or shuffled.run(to, workers)
    files = getattr(source, "files", None)
    bytes_in = None
    if isinstance(files, FileList) and (files.sizes >= 0).all():
        bytes_in = int(files.sizes.sum())
    return Repacked(
        **vars(done), rows_in=done.notes.get("rows_in", done.rows),
        bytes_in=bytes_in, seconds=time.monotonic() - began,
    )  # fmt: skip


def _threads() -> Threads:
    return Threads(max(1, min(MOST_THREADS, default_threads())))


def _check_level(level: int | None, compression: str | None) -> None:
    if level is not None:
        option = f"{CALLER}(compression_level)"
        most = {"zstd": 22, "gzip": 9, "brotli": 11}.get(compression or "")
        require(most, option, "left out, but for zstd, gzip and brotli", level, "leave it out")
        whole_number(level, 1, option, f"a level of {compression}", most or 1)
