"""Writes the rows of one epoch to files in a folder: what all formats share."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from trainpipes._internal.progress import Progress
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import either
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.inputs import about_inputs
from trainpipes.storage.writers.manifest import Opened, Written
from trainpipes.storage.writers.on_ray import HERE, Cluster, check_cut, check_paths, write_on_ray
from trainpipes.storage.writers.one_file import (
    Format,
    Lengths,
    columns_of,
    entry_of,
    first_missing,
    in_order,
    numbered,
    same_columns,
    write_file,
)
from trainpipes.storage.writers.output_folder import OutputFolder
from trainpipes.storage.writers.own_input import refuse_own_input
from trainpipes.storage.writers.storage import storage_at

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline


def write(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    form: Format,
    num_files: int | None,
    rows_per_file: int | None,
    overwrite: bool,
    cluster: Cluster = HERE,
) -> Written:
    """Write the rows of a pipeline's first epoch.

    Args:
        pipeline: gives rows with columns.
        folder: where the files are to be.
        form: how rows are written.
        num_files: how many of about as many rows; or
        rows_per_file: how many rows each has. If both are left out, a file ends after 512 MiB of rows as they
            are in memory.
        overwrite: whether what was written there before is removed.
        cluster: of Ray, where tasks write.
    """
    with ExitStack() as stack:
        # Before anything is read: Ray starts processes.
        ray = cluster.enter(stack, form.asker)
        rows = EpochRows(pipeline, form.asker)
        lengths = Lengths(rows.count, num_files, rows_per_file, form.asker)
        if ray is not None:
            check_cut(rows, lengths)
        options = {"format": form.asker.removeprefix("write_"), **form.options}
        options |= {"num_files": num_files, "rows_per_file": rows_per_file}
        about = {"options": options, "pipeline": json.loads(rows.plan.identity)}
        about |= about_inputs(rows.plan.inputs.source)
        storage = storage_at(folder, form.asker, urls=ray is not None)
        refuse_own_input(rows.plan.inputs.source, storage, [form.name_of(0)], form.asker)
        out = stack.enter_context(OutputFolder(storage, form.asker, about, overwrite))
        stack.enter_context(closing(rows))
        if ray is not None:
            check_paths(ray, rows, storage.root)
        opened = out.open()
        if opened.written is not None:
            return opened.written
        if ray is not None:
            return write_on_ray(ray, rows, out, opened, form, lengths)
        return _write(rows, out, opened, form, lengths)


def check_codec(compression: object, known: Collection[str], asker: str) -> None:
    """Raise ConfigError unless a compression is a known one, or None."""
    if compression is not None and compression not in known:
        raise ConfigError(
            f"{asker}(compression) is {either([*known])}, or None, got {shown(compression)}"
        )


def _write(
    rows: EpochRows, out: OutputFolder, opened: Opened, form: Format, lengths: Lengths
) -> Written:
    # Tasks on a cluster end in any order, so that later files may be whole before earlier ones.
    known, columns = numbered(opened.files), opened.columns
    rows.open(opened.next)
    done = number = 0
    at = opened.row  # where ``rows`` stands
    if at is None:
        at = sum(known[n]["rows"] for n in range(first_missing(known))) if opened.next else 0
    with Progress(f"writing {out.name}", rows.count, "rows") as progress:
        progress.skip(sum(entry["rows"] for entry in known.values()))
        while True:
            while number in known:
                done, number = done + known[number]["rows"], number + 1
            if done != at:
                rows.close()
                rows.open(rows.cursor_at(done))
            length = lengths.of(number)
            group = rows.group(min(form.rows, length or form.rows), form.bytes)
            if group is None:
                break
            columns = same_columns(form.asker, columns, columns_of(rows.schema))
            name = form.name_of(number)
            with out.file(name) as file:
                count = write_file(rows, form, file, group, length, done, progress.advance)
            known[number] = entry_of(name, count, file)
            at = done = done + count
            number += 1
            out.note(known[number - 1], (at, rows.cursor), columns=columns)
    if columns is None:
        raise ConfigError(
            f"{form.asker}(): the pipeline has no rows, and nothing was written: check what filters it"
        )
    return out.finish(in_order(known), columns)
