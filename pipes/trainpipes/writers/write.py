"""Writes the rows of one epoch to files in a folder: what all formats share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.progress import Progress
from trainpipes.runtime.options import either
from trainpipes.shown import shown
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.inputs import about_inputs
from trainpipes.writers.output_file import OutputFile
from trainpipes.writers.output_folder import Opened, OutputFolder, Written

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

__all__ = ["Format", "GroupWriter", "check_codec", "write"]

#: Bytes of rows in memory after which a file ends, where neither rows nor files are counted.
FILE_BYTES = 512 << 20


class GroupWriter(Protocol):
    """Writes one file."""

    def write(self, group: pa.Table, first_row: int) -> None:
        """Write some rows; the first one's number in the epoch is for messages."""
        ...

    def close(self) -> None:
        """Write what comes after the last rows."""
        ...


@dataclass(frozen=True)
class Format:
    """How rows are written.

    Args:
        asker: the method, for messages.
        suffix: of the files' names.
        open: begins a file with rows of a schema.
        options: of the method, of JSON types, which shape the files.
        rows: in a group, at most.
        bytes: in a group, about; None where the user counts its rows.
    """

    asker: str
    suffix: str
    open: Callable[[OutputFile, pa.Schema], GroupWriter]
    options: dict[str, Any]
    rows: int
    bytes: int | None


def write(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    form: Format,
    files: int | None,
    rows_per_file: int | None,
    overwrite: bool,
) -> Written:
    """Write the rows of a pipeline's first epoch.

    Args:
        pipeline: gives rows with columns.
        folder: where the files are to be.
        form: how rows are written.
        files: how many of about as many rows; or
        rows_per_file: how many rows each has. If both are left out, a file ends after 512 MiB of rows as they
            are in memory.
        overwrite: whether what was written there before is removed.
    """
    rows = EpochRows(pipeline, form.asker)
    lengths = _Lengths(rows.count, files, rows_per_file, form.asker)
    options = {"format": form.asker.removeprefix("write_"), **form.options}
    options |= {"files": files, "rows_per_file": rows_per_file}
    about = {"options": options, "pipeline": json.loads(rows.plan.identity)}
    about |= about_inputs(rows.plan.inputs.source)
    with OutputFolder(folder, form.asker, about, overwrite) as out, closing(rows):
        opened = out.open()
        return opened.written or _write(rows, out, opened, form, lengths)


def check_codec(compression: object, known: Collection[str], asker: str) -> None:
    """Raise ConfigError unless a compression is a known one, or None."""
    if compression is not None and compression not in known:
        raise ConfigError(
            f"{asker}(compression) is {either([*known])}, or None, got {shown(compression)}"
        )


class _Lengths:
    """How many rows each file has."""

    def __init__(
        self, count: int | None, files: int | None, rows_per_file: int | None, asker: str
    ) -> None:
        if files is not None:
            whole_number(files, 1, f"{asker}(files)", "how many to write")
        if rows_per_file is not None:
            whole_number(rows_per_file, 1, f"{asker}(rows_per_file)", "rows in each file")
        if files is not None and rows_per_file is not None:
            raise ConfigError(
                f"{asker}() takes files or rows_per_file, got files={files} and "
                f"rows_per_file={rows_per_file}: give one of the two"
            )
        if files is not None and count is None:
            raise ConfigError(
                f"{asker}(files={files}) needs to know how many rows there are, and that is known only when "
                "all are read: give rows_per_file=... instead"
            )
        if files is not None and count is not None and files > count:
            raise ConfigError(
                f"{asker}(files={files}): each file has a row at least, and there are {count:,} rows: give "
                "fewer files"
            )
        self._count, self._files, self._rows = count or 0, files, rows_per_file

    def of(self, number: int) -> int | None:
        """Rows of file ``number``; None where it ends by its bytes."""
        if self._files is None:
            return self._rows
        return self._count // self._files + (number < self._count % self._files)


def _write(
    rows: EpochRows, out: OutputFolder, opened: Opened, form: Format, lengths: _Lengths
) -> Written:
    files, columns = list(opened.files), opened.columns
    done = sum(entry["rows"] for entry in files)
    rows.plan.adopt(opened.notes)
    rows.open(opened.next)
    with Progress(f"writing {out.path.name}", rows.count, "rows") as progress:
        progress.skip(done)
        while True:
            length = lengths.of(len(files))
            group = rows.group(min(form.rows, length or form.rows), form.bytes)
            if group is None:
                break
            now = {field.name: str(field.type) for field in rows.schema}
            if columns is not None and now != columns:
                raise SchemaError(
                    f"{form.asker}(): the files written so far have columns {columns}, and the next rows "
                    f"have {now}; write all anew with overwrite=True",
                    stage=form.asker,
                )
            columns = now
            name = f"part-{len(files):05d}{form.suffix}"
            with out.file(name) as file:
                writer = form.open(file, rows.schema)
                try:
                    count = size = 0
                    while group is not None:
                        writer.write(group[0], done + count)
                        count, size = count + len(group[0]), size + group[1]
                        progress.advance(len(group[0]))
                        left = form.rows if length is None else min(form.rows, length - count)
                        if not left or (length is None and size >= FILE_BYTES):
                            break
                        group = rows.group(left, form.bytes)
                    writer.close()
                except BaseException:
                    with suppress(Exception):
                        writer.close()
                    raise
            done += count
            check = f"{file.check:08x}"
            files.append({"file": name, "rows": count, "bytes": file.size, "crc32": check})
            out.save(Opened(None, files, rows.cursor, rows.plan.notes, columns))
    if columns is None:
        raise ConfigError(
            f"{form.asker}(): the pipeline has no rows, and nothing was written: check what filters it"
        )
    return out.finish(files, columns)
