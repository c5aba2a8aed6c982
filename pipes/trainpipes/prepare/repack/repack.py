"""``repack``: data rewritten for training, as Parquet files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainpipes._internal.checks import column_names, whole_number
from trainpipes._internal.progress import JobReport
from trainpipes.errors import ConfigError, TrainpipesError, UnreachableError
from trainpipes.integrations.on_ray import RayCluster
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.job import ROW_BYTES, Job
from trainpipes.prepare.repack.options import Options, about, checked
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.temporary import TemporaryFiles
from trainpipes.prepare.repack.temporary_place import (
    TemporaryPlace,
    check_space,
    files_of,
    given_rows,
    inputs_of,
    kept_metadata,
    refuse_inside,
)
from trainpipes.prepare.repack.work import Report, unit_bytes
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.inputs import about_inputs
from trainpipes.storage.writers.manifest import Opened, Written, check_bytes
from trainpipes.storage.writers.on_ray import Cluster
from trainpipes.storage.writers.output_folder import OutputFolder
from trainpipes.storage.writers.storage import storage_at

ASKER = "repack"
#: Bytes of memory that can do, and that are taken if nothing is said.
LEAST_MEMORY, MEMORY = 16 << 20, 512 << 20


@dataclass(frozen=True)
class Repacked(Written):
    """The files that data was rewritten to.

    Attributes:
        folder: where.
        files: paths of the files, in the order of the rows.
        rows: how many there are in all.
        rows_in: how many the input had.
        duplicates: how many were dropped.
        row_groups: how many there are in all files.
        bytes_in: size of the files that were read; None where rows are from elsewhere, or a server does
            not say.
        bytes_out: size of the files that were written.
        seconds: that this call took.
        kept: files that were there already.
    """

    rows_in: int
    duplicates: int
    row_groups: int
    bytes_in: int | None
    bytes_out: int
    seconds: float
    kept: int


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
    memory_limit: int = MEMORY,
    temp_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verify: bool = False,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Report | None = None,
    engine: Literal["threads", "ray"] = "threads",
    address: str | None = None,
    shared_filesystem: bool = False,
) -> Repacked:
    """Rewrite data for training: as Parquet files with row groups of one size, in a random order if asked
    for, sorted, or without duplicates. See docs/prepare.md for when that pays.

    Rows come out as they went in, each once, which is checked by a checksum of their content. The files
    are the same, byte for byte, whatever the memory, the threads and the engine, and however often the
    process was killed: the same call goes on after the last whole file. It does nothing once all are there.

    Args:
        data: files (a path, folder, glob, URL, or a list of them) of one format, which the ends of their
            names say; or a ``Pipeline`` of rows, whose order without its ``sharding_filter`` is taken.
        folder: for the files, named "part-00000.parquet" and so on, and "_manifest.json". A path or any
            fsspec URL; new or empty.
        shuffle: permute all rows. Any order is as likely as any other.
        seed: of the shuffle. The order is a function of it and of the number of rows alone.
        sort: names of columns to sort by, the first one first; equal rows stay in the order of the input.
            Null comes after all values, NaN after all numbers.
        descending: whether the largest comes first; null and NaN stay at the end.
        drop_duplicates: True to keep the first of rows that are the same in all columns; or names of columns,
            to keep the first of those that are the same in these. Null equals null, NaN equals NaN.
        columns: names of the columns to keep.
        row_group_size: rows of each row group; if left out, 8 MiB of rows as they are in memory, and 16,384
            rows at most: small enough to be shuffled and dealt, and large enough to be worth a request.
        rows_per_file: rows of each file; or
        num_files: how many of about as many rows. If both are left out, files are of 512 MiB of rows in
            memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        compression_level: of zstd, gzip or brotli; if left out, their own.
        memory_limit: bytes for rows that are worked on, by each task where ``engine="ray"``; besides them
            stands what Python and its packages take, what reading the input does, and a row group of each
            thread.
        temp_dir: for temporary files, about half of the rows' bytes in memory, and more where
            there is ``sort`` or ``drop_duplicates``; a path, or any fsspec URL, whose credentials are those
            of ``folder`` where it is of the same kind, and else of the environment. If left out, they are
            in ``folder``; where that is a URL and threads do the work, in the system's folder for temporary
            files. They are gone at the end.
        overwrite: whether to remove what was written there before, and write everything anew.
        verify: whether to read each file back once it is written; those that are there already, first.
        threads: how many; if left out, one a core, and 4 at most.
        storage_options: for the file systems of ``data`` and of ``folder``, where they are URLs, as fsspec
            takes them. If the two need other ones, give ``data`` as a pipeline, whose files have their own.
        progress: called with what is done ("reading", "writing", ...), rows done, and rows in all, or
            None.
        engine: "threads" of this process; or "ray" for tasks of one core on a Ray cluster: first one
            for each part of the input, then one for each file.
        address: of the Ray cluster, as ``ray.init()`` takes it; if left out, the one that this process is
            connected to, ``RAY_ADDRESS``, or one that is started on this machine.
        shared_filesystem: whether every node of the cluster sees the same files at the same paths.

    Raises:
        ConfigError: an option is invalid; the folder holds other files, is part of the input, or was begun
            with other options; there are no rows; the disk is full; or several nodes cannot see a path.
        SchemaError: a column is not there, has no order, or cannot be written to Parquet.
        DataChangedError: the input has changed since the work was begun, also where all was finished, or a
            file since it was written.
        UnreachableError: no Ray cluster answers.
        WorkerError: a task of Ray was killed, time and again; says which.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> from trainpipes.prepare import repack
    >>> rows = tp.from_arrow(pa.table({"x": [3, 1, 3, 2]}))
    >>> done = repack(rows, tempfile.mkdtemp(), sort="x", drop_duplicates=True)
    >>> done.rows, done.duplicates
    (3, 1)
    >>> [row["x"] for row in tp.list_files(done.files).read_parquet()]
    [1, 2, 3]
    """
    began = time.monotonic()
    whole_number(memory_limit, LEAST_MEMORY, f"{ASKER}(memory_limit)", "bytes")
    options = checked(
        ASKER, shuffle, seed, sort, descending, drop_duplicates, row_group_size, rows_per_file, num_files,
        compression, compression_level, memory_limit, verify, threads,
    )  # fmt: skip
    if columns is not None:
        columns = column_names(columns, f"{ASKER}(columns)")
    where = Cluster(engine, address, shared_filesystem, "threads").checked(ASKER)
    if engine == "ray" and threads is not None:
        raise ConfigError(
            f'{ASKER}(threads) is of engine="threads", got {threads} and engine="ray", where a task has one '
            "core, and Ray decides how many run: leave it out"
        )
    storage = storage_at(folder, ASKER, storage_options)
    place = TemporaryPlace(storage, temp_dir, storage_options, engine == "ray", ASKER)
    with ExitStack() as stack:
        cluster = where.enter(stack, ASKER)
        pipeline = given_rows(data, columns, storage_options, ASKER)
        rows = EpochRows(pipeline, ASKER)
        source = rows.plan.inputs.source
        refuse_inside(data, source, storage, ASKER)
        if cluster is not None:
            _check_cluster(cluster, rows, data, storage.root, place.root)
        form = replace(options.form, metadata=kept_metadata(pipeline, source))
        options = replace(options, form=form)
        about_all = {"options": about(options), "pipeline": json.loads(rows.plan.identity)}
        about_all |= about_inputs(source)
        with OutputFolder(storage, ASKER, about_all, overwrite) as out:
            if overwrite:
                place.clear()
            opened = out.open()
            if verify:
                check_bytes(storage, opened.files)
            made = opened.notes
            kept = len(opened.files)
            if opened.written is None:
                temporary = place.files(opened.notes.get("temporary"))
                opened = _planned(opened, rows, options, out, temporary, cluster)
                if "made" not in opened.notes:
                    opened = _made(
                        opened, pipeline, rows, options, out, temporary, cluster, progress
                    )
                temporary.clear()
                made = opened.notes["made"]
                assert opened.columns is not None
                out.finish(opened.files, opened.columns, made)
    given = files_of(source)
    known = given is not None and bool((given.sizes >= 0).all())
    return Repacked(
        storage.root,
        tuple(storage.at(entry["file"]) for entry in opened.files),
        sum(entry["rows"] for entry in opened.files),
        made["rows_in"],
        made["duplicates"],
        made["row_groups"],
        int(given.sizes.sum()) if given is not None and known else None,
        sum(entry["bytes"] for entry in opened.files),
        time.monotonic() - began,
        kept,
        _storage=storage,
    )


def _check_cluster(
    cluster: RayCluster, rows: EpochRows, data: Any, out: str, temporary: str | None
) -> None:
    """Raise ConfigError where tasks on a cluster could not get at the files, or at their own rows."""
    if not rows.plan.counted:
        raise ConfigError(
            f'{ASKER}(engine="ray") cuts the rows into parts before they are read, and how many rows this '
            "pipeline has is known only when all are: write them first, by write_parquet(), and repack these "
            'files; or leave engine="ray" out'
        )
    cluster.check_path(out, f"{ASKER}(folder)")
    if temporary is not None:
        cluster.check_path(temporary, f"{ASKER}(temp_dir)")
    for path in inputs_of(data, rows.plan.inputs.source):
        cluster.check_path(path, f"{ASKER}(data)")


def _planned(
    opened: Opened,
    rows: EpochRows,
    options: Options,
    out: OutputFolder,
    temporary: TemporaryFiles,
    cluster: RayCluster | None,
) -> Opened:
    """What was planned when the work was begun; or the plan, which is kept before anything is read."""
    source = rows.plan.inputs.source
    notes = opened.notes
    if not notes:
        count = rows.count if rows.plan.counted else None
        row_bytes = getattr(source, "row_bytes", None) or ROW_BYTES
        unit = max(1, options.memory // 12)
        if cluster is not None:
            unit = unit_bytes(options.memory, 1)
        notes = {"part_rows": max(1, int(unit // (row_bytes + ROW_COST)))}
        if cluster is not None:
            notes["whole_blocks"] = True  # a block that two tasks need would be read twice
        if count:
            try:
                check_space(count * row_bytes, options, out.storage, temporary)
            except ConfigError:
                temporary.clear()
                raise
    if notes.get("temporary") != temporary.root:
        opened = Opened(
            None, opened.files, None, {**notes, "temporary": temporary.root}, opened.columns
        )
        out.save(opened)
    return opened


def _made(
    opened: Opened,
    pipeline: Pipeline,
    rows: EpochRows,
    options: Options,
    out: OutputFolder,
    temporary: TemporaryFiles,
    cluster: RayCluster | None,
    progress: Report | None,
) -> Opened:
    """All files, once they are whole: temporary files are not needed any more."""
    report = JobReport(out.name) if progress is None else progress
    try:
        made = Job(pipeline, rows, out, opened, options, temporary, report, cluster).run()
    except UnreachableError:
        raise
    except BaseException:
        _forget_unless_begun(temporary, out)
        raise
    finally:
        if isinstance(report, JobReport):
            report.close()
    notes = {**opened.notes, "made": made["notes"]}
    opened = Opened(None, made["files"], None, notes, made["columns"])
    out.save(opened)
    return opened


def _forget_unless_begun(temporary: TemporaryFiles, out: OutputFolder) -> None:
    """Let the next call have other options, where nothing has been done that it could go on with."""
    with suppress(TrainpipesError, OSError):
        written = any(name.startswith("part-") for name in out.storage.names())
        if not written and not temporary.names("read"):
            temporary.clear()
            out.save(Opened())
