"""``repack``: data rewritten for training, as Parquet files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainpipes.amount import amount
from trainpipes.checks import column_names, flag, local_path, whole_number
from trainpipes.checksum import checksum
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.given import files_of, given_rows, kept_metadata, refuse_inside
from trainpipes.prepare.repack.job import ROW_BYTES, Job
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.row_groups import Form
from trainpipes.prepare.repack.work import Options, Report, remove_folder
from trainpipes.progress import JobReport
from trainpipes.runtime.pool import default_threads
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.inputs import about_inputs
from trainpipes.writers.output_folder import Opened, OutputFolder, Written, check_bytes
from trainpipes.writers.parquet import CODECS, GROUP_BYTES, GROUP_ROWS
from trainpipes.writers.write import check_codec

__all__ = ["Repacked", "repack"]

ASKER = "repack"
#: Bytes of memory that can do, and that are taken if nothing is said.
LEAST_MEMORY, MEMORY = 16 << 20, 512 << 20
#: Threads, at most: more would have little memory each.
MOST_THREADS = 4
#: What temporary files take, and files that are written, of the rows' bytes in memory: at least, since
#: data that cannot be compressed takes twice and four times as much.
TEMPORARY_SHARE, OUTPUT_SHARE = 0.5, 0.25
#: The folder of temporary files, where none is given.
TEMPORARY = ".repack"


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
    files: int | None = None,
    compression: str | None = "zstd",
    compression_level: int | None = None,
    memory: int = MEMORY,
    temporary_folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verify: bool = False,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Report | None = None,
) -> Repacked:
    """Rewrite data for training: as Parquet files with row groups of one size, in a random order if asked
    for, sorted, or without duplicates. See docs/prepare.md for when that pays.

    Rows come out as they went in, each once, which is checked by a checksum of their content. The files
    are the same, byte for byte, whatever the memory and the threads, and however often the process was
    killed: the same call goes on after the last whole file. It does nothing once all are there.

    Args:
        data: files (a path, folder, glob, URL, or a list of them) of one format, which the ends of their
            names say; or a ``Pipeline`` of rows, whose order without its ``sharding_filter`` is taken.
        folder: for the files, named "part-00000.parquet" and so on, and "_manifest.json". On this machine,
            new or empty.
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
        files: how many of about as many rows. If both are left out, files are of 512 MiB of rows in memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        compression_level: of zstd, gzip or brotli; if left out, their own.
        memory: bytes for rows that are worked on; besides them stands what Python and its packages take, what
            reading the input does, and a row group of each thread.
        temporary_folder: for temporary files, about half of the rows' bytes in memory, and more where
            there is ``sort`` or ``drop_duplicates``; if left out, in ``folder``. They are gone at the end.
        overwrite: whether to remove what was written there before, and write everything anew.
        verify: whether to read each file back once it is written; those that are there already, first.
        threads: how many; if left out, one a core, and 4 at most.
        storage_options: for the file system of ``data``, as fsspec takes them.
        progress: called with what is done ("reading", "writing", ...), rows done, and rows in all, or
            None.

    Raises:
        ConfigError: an option is invalid; the folder holds other files, is part of the input, or was begun
            with other options; there are no rows; the disk is full.
        SchemaError: a column is not there, has no order, or cannot be written to Parquet.
        DataChangedError: the input has changed since the work was begun, also where all was finished, or a
            file since it was written.

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
    options = _checked(
        shuffle, seed, sort, descending, drop_duplicates, row_group_size, rows_per_file, files,
        compression, compression_level, memory, verify, threads,
    )  # fmt: skip
    if columns is not None:
        columns = column_names(columns, f"{ASKER}(columns)")
    out_path = Path(local_path(folder, f"{ASKER}(folder)")).expanduser().absolute()
    pipeline = given_rows(data, columns, storage_options, ASKER)
    rows = EpochRows(pipeline, ASKER)
    source = rows.plan.inputs.source
    refuse_inside(data, source, out_path, ASKER)
    form = replace(options.form, metadata=kept_metadata(pipeline, source))
    options = replace(options, form=form)
    about = {"options": _about(options), "pipeline": json.loads(rows.plan.identity)}
    about |= about_inputs(source)
    with OutputFolder(out_path, ASKER, about, overwrite) as out:
        if overwrite:
            _remove_temporary(out_path)
        opened = out.open()
        if verify:
            check_bytes(out_path, opened.files)
        made = opened.notes
        kept = len(opened.files)
        if opened.written is None:
            opened = _planned(opened, rows, options, out, temporary_folder)
            temporary = Path(opened.notes["temporary"])
            if "made" not in opened.notes:
                opened = _made(opened, pipeline, rows, options, out, progress)
            remove_folder(temporary)
            made = opened.notes["made"]
            assert opened.columns is not None
            out.finish(opened.files, opened.columns, made)
    given = files_of(source)
    known = given is not None and bool((given.sizes >= 0).all())
    return Repacked(
        str(out_path),
        tuple(str(out_path / entry["file"]) for entry in opened.files),
        sum(entry["rows"] for entry in opened.files),
        made["rows_in"],
        made["duplicates"],
        made["row_groups"],
        int(given.sizes.sum()) if given is not None and known else None,
        sum(entry["bytes"] for entry in opened.files),
        time.monotonic() - began,
        kept,
    )


def _checked(
    shuffle: Any, seed: Any, sort: Any, descending: Any, drop_duplicates: Any, row_group_size: Any,
    rows_per_file: Any, files: Any, compression: Any, level: Any, memory: Any, verify: Any, threads: Any,
) -> Options:  # fmt: skip
    """The options, each of which is what it must be."""
    flag(shuffle, f"{ASKER}(shuffle)")
    whole_number(seed, None, f"{ASKER}(seed)", "the seed of the shuffle")
    flag(descending, f"{ASKER}(descending)")
    flag(verify, f"{ASKER}(verify)")
    order = () if sort is None else tuple(_names(sort, "sort"))
    if shuffle and order:
        raise ConfigError(
            f"{ASKER}() takes shuffle or sort, got shuffle=True and sort={list(order)}: give one of the two"
        )
    by: tuple[str, ...] | None = None
    if isinstance(drop_duplicates, bool):
        by = () if drop_duplicates else None
    else:
        by = tuple(_names(drop_duplicates, "drop_duplicates"))
    for value, name, meaning in (
        (row_group_size, "row_group_size", "rows of each row group"),
        (rows_per_file, "rows_per_file", "rows of each file"),
        (files, "files", "how many to write"),
        (threads, "threads", "how many"),
    ):
        if value is not None:
            whole_number(value, 1, f"{ASKER}({name})", meaning)
    if files is not None and rows_per_file is not None:
        raise ConfigError(
            f"{ASKER}() takes files or rows_per_file, got files={files} and rows_per_file={rows_per_file}: "
            "give one of the two"
        )
    check_codec(compression, CODECS, ASKER)
    if level is not None:
        _check_level(level, compression or "none")
    whole_number(memory, LEAST_MEMORY, f"{ASKER}(memory)", "bytes")
    form = Form(
        row_group_size or GROUP_ROWS,
        None if row_group_size else GROUP_BYTES,
        compression or "none",
        level,
    )
    return Options(
        ASKER, seed if shuffle else None, order, descending, by, files, rows_per_file, form, memory,
        threads or min(MOST_THREADS, default_threads()), verify,
    )  # fmt: skip


def _names(value: Any, option: str) -> list[str]:
    return column_names([value] if isinstance(value, str) else value, f"{ASKER}({option})")


def _check_level(level: int, compression: str) -> None:
    """Raise ConfigError unless a compression has a level."""
    leveled = compression in ("zstd", "gzip", "brotli")
    if not leveled:
        raise ConfigError(
            f"{ASKER}(compression_level) is of zstd, gzip or brotli, got {level} for {compression}: "
            "leave it out"
        )
    least, most = (1, 22) if compression == "zstd" else (1, 9) if compression == "gzip" else (0, 11)
    whole_number(level, least, f"{ASKER}(compression_level)", f"a level of {compression}", most)


def _about(options: Options) -> dict[str, Any]:
    """The options that shape the files, of JSON types."""
    form = options.form
    by = options.by
    return {
        "format": ASKER,
        "shuffle": options.seed is not None,
        "seed": options.seed,
        "sort": list(options.sort),
        "descending": options.descending,
        "drop_duplicates": by is not None if not by else list(by),
        "row_group_size": form.rows if form.size is None else None,
        "rows_per_file": options.rows_per_file,
        "files": options.files,
        "compression": form.compression,
        "compression_level": form.level,
    }


def _planned(
    opened: Opened, rows: EpochRows, options: Options, out: OutputFolder, temporary: Any
) -> Opened:
    """What was planned when the work was begun; or the plan, which is kept before anything is read."""
    folder = out.path / TEMPORARY
    if temporary is not None:
        # More than one output may have its temporary files in one folder.
        name = f"repack-{checksum(str(out.path))}"
        folder = (
            Path(local_path(temporary, f"{ASKER}(temporary_folder)")).expanduser().absolute() / name
        )
    source = rows.plan.inputs.source
    notes = opened.notes
    if not notes:
        count = rows.count if rows.plan.counted else None
        row_bytes = getattr(source, "row_bytes", None) or ROW_BYTES
        unit = max(1, options.memory // 12)
        notes = {
            "part_rows": max(1, int(unit // (row_bytes + ROW_COST))),
            "temporary": str(folder),
        }
        if count:
            size = count * row_bytes
            _check_space(size, options, out.path, folder)
    elif notes["temporary"] != str(folder):
        remove_folder(Path(notes["temporary"]))
        notes = {**notes, "temporary": str(folder)}
    opened = Opened(None, opened.files, None, notes, opened.columns)
    out.save(opened)
    return opened


def _made(
    opened: Opened,
    pipeline: Pipeline,
    rows: EpochRows,
    options: Options,
    out: OutputFolder,
    progress: Report | None,
) -> Opened:
    """All files, once they are whole: temporary files are not needed any more."""
    report = JobReport(out.path.name) if progress is None else progress
    try:
        made = Job(pipeline, rows, out, opened, options, report).run()
    except BaseException:
        _forget_unless_begun(opened, out)
        raise
    finally:
        if isinstance(report, JobReport):
            report.close()
    notes = {**opened.notes, "made": made["notes"]}
    opened = Opened(None, made["files"], None, notes, made["columns"])
    out.save(opened)
    return opened


def _forget_unless_begun(opened: Opened, out: OutputFolder) -> None:
    """Let the next call have other options, where nothing has been done that it could go on with."""
    temporary = Path(opened.notes["temporary"])
    written = any(name.startswith("part-") for name in os.listdir(out.path))
    if not written and not any((temporary / "read").glob("*.json")):
        remove_folder(temporary)
        with suppress(TrainpipesError):
            out.save(Opened(None, [], None, {}, None))


def _check_space(size: float, options: Options, out: Path, temporary: Path) -> None:
    """Raise ConfigError where the disk is too small, as far as can be told."""
    needs: dict[int, tuple[Path, float]] = {}
    wanted = [(out, OUTPUT_SHARE * size)]
    if options.moves_rows:
        twice = 2 if options.sort or options.by is not None else 1
        wanted.append((temporary, twice * TEMPORARY_SHARE * size))
    for path, need in wanted:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        device = os.stat(there).st_dev
        needs[device] = there, needs.get(device, (there, 0.0))[1] + need
    for path, need in needs.values():
        free = shutil.disk_usage(path).free
        if free < need:
            raise ConfigError(
                f"{ASKER}() needs about {amount(need)} on the disk of {path}, which has {amount(free)} free: "
                "free space there, or give temporary_folder=... on another disk"
            )


def _remove_temporary(out: Path) -> None:
    """Remove the temporary files of what is overwritten."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        notes = json.loads((out / "_unfinished.json").read_bytes())["notes"]
        remove_folder(Path(notes["temporary"]))
    remove_folder(out / TEMPORARY)
