"""``repack``: data rewritten for training, as Parquet files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal import checks
from trainpipes._internal.pool import default_threads
from trainpipes.engine.processes.executor_options import executor_of
from trainpipes.engine.processes.executors import Executor, Threads
from trainpipes.engine.processes.ray_cluster import Ray
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.pipeline.chain import Pipeline
from trainpipes.pipeline.starts import read_by_name
from trainpipes.prepare.shuffle import CALLER, Shuffle, temporary_place
from trainpipes.sources.files.file_reader import ends_of_names
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.read_arrow import ReadArrow
from trainpipes.sources.read_parquet import ReadParquet
from trainpipes.writers import formats
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.output_folder import Manifest
from trainpipes.writers.write import ANY, Output, try_first, write

#: Bytes of memory, at least: less is a number of something else.
LEAST_MEMORY = 64_000
#: The schema's metadata that is kept, beside that of fields: meanings of columns for Hugging Face's datasets.
KEPT_METADATA = b"huggingface"
#: Threads, at most: more would have little memory each.
MOST_THREADS = 4


def repack(
    data: Any,
    folder: str | os.PathLike[str],
    *,
    shuffle: bool = False,
    seed: int = 0,
    columns: Sequence[str] | None = None,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = "zstd",
    memory_limit: int | str = "512MB",
    temp_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
    executor: Executor | None = None,
) -> Manifest:
    """Rewrite data for training, as Parquet files with row groups of a fixed size; if wanted, shuffled.

    Files and order depend on the input and the options alone. After a kill the same call goes on; when all is
    there, it does nothing.

    Args:
        data: files of the same format (a path, folder, glob, URL, or a list of them), or a ``Pipeline`` of
            rows, taken without its ``sharding_filter``.
        folder: a path or fsspec URL, new or empty, for "part-00000.parquet" and so on, and "_manifest.json".
        shuffle: permute all rows. Any order is as likely as any other.
        seed: of the shuffle.
        columns: the columns to keep.
        row_group_size: rows of each row group; if left out, 8 MiB of rows in memory, and 16,384 rows at most.
        rows_per_file: rows of each file; or
        num_files: number of files. If both are left out, files are of 512 MiB of rows in memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        memory_limit: bytes for rows that are worked on, such as "4GB", by each task on Ray, else by all;
            Python and reading come on top.
        temp_dir: a path or URL for temporary files, removed at the end. If left out, ``folder``, or the
            system's temporary folder where that is a URL and this machine does the work.
        overwrite: whether to remove files written there before.
        storage_options: for the file systems of ``data`` and ``folder``. If the two need other ones, give
            ``data`` as a pipeline.
        retry: how long failing requests to URLs are made again.
        executor: ``tp.Threads(n)``, ``tp.Processes(n)`` or ``tp.Ray(address)``; if left out,
            a thread a core, 4 at most.

    Raises:
        ConfigError: an option is invalid; the folder holds other files, or is part of the input; there are no
            rows; the disk is full; or several nodes cannot see a path.
        SchemaError: a column is not there, or cannot be written to Parquet.
        DataChangedError: the input, a function, or a file that was written has changed.
        MissingExtraError: Ray is not installed.
        WorkerError: a process, or a task of Ray, was killed repeatedly.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> from trainpipes.prepare import repack
    >>> rows = tp.from_arrow(pa.table({"x": range(100)}))
    >>> done = repack(rows, tempfile.mkdtemp(), shuffle=True, seed=3, num_files=2)
    >>> done.rows, len(done.files)
    (100, 2)
    """
    checks.flag(shuffle, f"{CALLER}(shuffle)")
    seed = checks.whole_number(seed, None, f"{CALLER}(seed)", "the seed of the shuffle")
    formats.check_codec(compression, formats.CODECS, CALLER)
    suffixes = None if isinstance(data, Pipeline) else ends_of_names()
    out = Output(folder, num_files, rows_per_file, overwrite, storage_options, retry, suffixes)
    out.check(ANY, CALLER)
    formats.check_group(row_group_size, CALLER)
    memory = checks.byte_count(memory_limit, f"{CALLER}(memory_limit)", LEAST_MEMORY)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed if shuffle else None}
    options |= {"row_group_size": row_group_size, "compression": compression}
    few = max(1, min(MOST_THREADS, default_threads()))
    if columns is not None:
        columns = checks.column_names(columns, f"{CALLER}(columns)")
    pipeline = _given_rows(data, columns, storage_options, retry)
    with executor_of(executor, f"{CALLER}(executor)", Threads(few)) as workers:
        rows = EpochRows(pipeline, CALLER)
        first = _first_schema(pipeline, rows.plan.inputs.source)
        form = formats.parquet_form(CALLER, options, row_group_size, compression, None, first)
        if not shuffle:
            alone = not (rows.plan.counted and out.is_cut) or rows.plan.runs_user_code
            return write(rows, form, out, None if executor is None and alone else workers)
        to = out.open(form, rows.plan, workers)
        between = temporary_place(to.place, temp_dir, storage_options, isinstance(workers, Ray))
        workers.check_path(between.root, f"{CALLER}(temp_dir)")
        if overwrite:
            with closing(rows):
                try_first(form, rows)
        with to:
            return Shuffle(pipeline, rows, form, seed, out, memory, between).run(to, workers)


def _given_rows(
    data: Any,
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    retry: Any,
) -> Pipeline:
    if isinstance(data, Pipeline):
        return data if columns is None else data.select(*columns)
    several = [data] if isinstance(data, str | os.PathLike) else data
    good = isinstance(several, Sequence) and len(several) > 0
    good = good and all(isinstance(path, str | os.PathLike) for path in several)
    rule = "files (a path, folder, glob, URL, or a list of them) or a pipeline of rows"
    checks.require(good, f"{CALLER}(data)", rule, data)
    paths = [os.fspath(path) for path in several]
    return read_by_name(paths, storage_options, f"{CALLER}()", columns, retry=retry)


def _first_schema(pipeline: Pipeline, source: Any) -> pa.Schema | None:
    """The first file's schema with the metadata that is kept, where all columns are taken."""
    reader = pipeline.stages[-1]
    if not isinstance(reader, ReadParquet | ReadArrow) or reader.columns is not None:
        return None
    forms: Any = (pq.ParquetFile, pa.ipc.open_file, pa.ipc.open_stream)
    with closing(open_bytes(source.files, 0).stream()) as file:
        for form in forms:
            file.seek(0)
            with suppress(pa.ArrowInvalid):
                metadata = form(file)
                schema = getattr(metadata, "schema_arrow", None) or metadata.schema
                value = (schema.metadata or {}).get(KEPT_METADATA)
                return schema.with_metadata(value and {KEPT_METADATA: value})
    return None
