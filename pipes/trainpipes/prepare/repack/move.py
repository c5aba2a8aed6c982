"""What has to be known of rows before they are moved."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import repeated
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import gathered
from trainpipes.engine.layout import IntArray
from trainpipes.engine.permutation import Permutation
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.keys import Keys
from trainpipes.prepare.repack.passes import (
    CALLER,
    MOST_UNIT,
    PLACES_FILE,
    Places,
    Shuffle,
    Task,
    few_rows,
    part_task,
    remove_others,
)
from trainpipes.sources.files.patterns import WORK
from trainpipes.start import list_files
from trainpipes.state.cursor import checksum
from trainpipes.storage.executor import Executor, Threads
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import Place, place_at
from trainpipes.storage.ray_cluster import Ray
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.formats import FILE_BYTES, write_arrow
from trainpipes.storage.writers.write import Format, Output, file_edges

#: Times that a task holds the rows that it works on, with the indices of lists' values and what the allocator
#: keeps; and while keys are read, with what is read ahead and DuckDB's own memory.
COPIES, COPIES_OF_KEYS = 6, 8
#: Rows at the start that say how large rows are, and bytes of them, at most.
FIRST_ROWS, FIRST_BYTES = 1000, 8 << 20


def temporary_place(
    out: Place, given: Any, storage_options: Mapping[str, Any] | None, shared: bool
) -> Place:
    if given is None and (shared or out.is_local):
        return out.below(f"{WORK}/{CALLER}")
    root = os.fspath(given or tempfile.gettempdir()).rstrip("/")
    # More than one output may have its temporary files in one folder.
    same = root.partition("://")[0] == out.root.partition("://")[0]
    return place_at(
        f"{root}/trainpipes-{CALLER}-{checksum(out.root)}",
        CALLER,
        storage_options if same else None,
    )


@dataclass(frozen=True)
class Move:
    pipeline: Pipeline
    rows: EpochRows
    form: Format
    sort: Sequence[str]
    descending: bool
    once: bool | Sequence[str]
    seed: int | None
    output: Output
    memory: int
    temporary: Place

    def run(self, out: OutputFolder, executor: Executor) -> Manifest:
        name = checksum(json.dumps(out.about))
        remove_others(self.temporary, name)
        place = self.temporary.below(name)
        try:
            rows = self.rows if self.rows.plan.counted else self._counted(place)
            rows.know_columns()
            first, row_bytes = first_rows(rows)
            self._check(first)
            places = Places(rows.count or 0, self.seed or 0)
            if self.sort or self.once is not False:
                places = self._places(rows, place)
            files = self._files(places.rows, row_bytes)
        except (ConfigError, SchemaError):
            self.temporary.remove("", recursive=True)  # nothing could go on with it
            raise
        tasks = 1 if isinstance(executor, Ray) else executor.workers
        unit = max(1, min(MOST_UNIT, self.memory // (COPIES * tasks)))
        shuffle = Shuffle(rows, row_bytes, first.schema, places, files, unit, place, self.form)
        one = isinstance(executor, Threads) and rows.plan.runs_user_code
        done = shuffle.run(out, Threads(1) if one else executor, executor)
        self.temporary.remove("", recursive=True)
        return done

    def _counted(self, place: Place) -> EpochRows:
        path = place.at("rows")
        written = write_arrow(
            self.pipeline, path, compression="lz4", storage_options=self.output.storage_options
        )
        files = list_files(list(written.files), storage_options=self.output.storage_options)
        return EpochRows(files.read_arrow(), CALLER)

    def _check(self, first: pa.Table) -> None:
        schema = first.schema
        once = [] if isinstance(self.once, bool) else self.once
        need_columns(schema.names, [*self.sort, *once], f"{CALLER}()")
        twice = sorted(repeated(schema.names))
        if twice:
            raise SchemaError(
                f"{CALLER}(): rows have the column {twice[0]!r} twice: give each a name of its own",
                stage=CALLER,
            )
        for field in schema:
            why = _obstacle(first.select([field.name]), self.form)
            if why is not None:
                raise SchemaError(
                    f"{CALLER}(): column {field.name!r} holds {field.type}, {why}: leave it out by "
                    "columns=[...], or make another column of it",
                    stage=CALLER,
                )

    def _places(self, rows: EpochRows, place: Place) -> Places:
        if (
            self.once is not True and rows is self.rows
        ):  # columns that nothing depends on are not read
            once = [] if isinstance(self.once, bool) else self.once
            rows = EpochRows(self.pipeline.select(*dict.fromkeys([*self.sort, *once])), CALLER)
        find = partial(self._find_places, rows, place)
        count = int(rows.count or 0)
        task = part_task(PLACES_FILE, 0, count)
        with OutputFolder(place.below("placed"), CALLER, {}) as placed:
            made = run([task], find, placed, Threads(1), total=count, job="reading keys for")
        return Places(made.rows, 0, placed.place)

    def _find_places(
        self, rows: EpochRows, place: Place, task: Task, file: OutputFile, _: None
    ) -> FileInfo:
        """Make the file that says where rows go, 8 bytes for each; -1 for those that are dropped."""
        by = None if self.once is False else [] if self.once is True else self.once
        with ExitStack() as stack:
            folder = place.at("keys") if place.is_local else None
            if folder is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trainpipes-"))
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            os.makedirs(folder)
            keys = Keys(Path(folder), self.sort, self.descending, by, self.memory, CALLER)
            stack.enter_context(closing(keys))
            rows.open(None)
            with closing(rows):
                for tables in few_rows(rows, task.given[1], self.memory // COPIES_OF_KEYS):
                    table = pa.concat_tables(tables)
                    keys.add(table)
                    file.advance(len(table))
            pa.default_memory_pool().release_unused()
            kept = keys.order()
            order = None if self.seed is None else Permutation(kept, self.seed, CALLER)
            for places in keys.places():
                stays = places >= 0
                if order is not None:
                    places[stays] = order(places[stays])
                file.write(places.astype("<i8").tobytes())
        return FileInfo(kept, {})

    def _files(self, rows: int, row_bytes: float) -> IntArray:
        files = self.output.num_files or max(1, min(rows, round(rows * row_bytes / FILE_BYTES)))
        self.output.check(rows, CALLER)
        return file_edges(rows, files, self.output.rows_per_file)


def first_rows(rows: EpochRows) -> tuple[pa.Table, float]:
    rows = copy.copy(rows)
    rows.open(None)
    with closing(rows):
        found = rows.group(FIRST_ROWS, FIRST_BYTES)
        if found is None:
            raise ConfigError(
                f"{CALLER}(): the pipeline has no rows, and nothing was written: check what filters it"
            )
        table = found[0]
        known = getattr(rows.plan.inputs.source, "row_bytes", None) or 0.0
        return table, max(1.0, known, table.nbytes / len(table))


def _obstacle(rows: pa.Table, form: Format) -> str | None:
    try:
        form.open(pa.BufferOutputStream(), rows.schema).close()
    except (pa.ArrowException, TypeError) as error:
        return f"which Parquet cannot hold ({error})"
    try:
        gathered(rows, np.zeros(1, dtype=np.int64))
    except pa.ArrowException as error:
        return f"whose rows Arrow cannot put into another order ({error})"
    return None
