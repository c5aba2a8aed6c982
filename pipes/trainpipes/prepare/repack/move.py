"""Rows that come out elsewhere than they went in: what has to be known before they are moved."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import gathered
from trainpipes.engine.permutation import Permutation
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.keys import Keys
from trainpipes.prepare.repack.passes import (
    CALLER,
    MOST_UNIT,
    PLACES_FILE,
    Form,
    PartTask,
    Places,
    Shuffle,
    few_rows,
)
from trainpipes.prepare.repack.pieces import below
from trainpipes.prepare.repack.shuffle import file_edges
from trainpipes.start import list_files
from trainpipes.state.cursor import checksum
from trainpipes.storage.executor import Executor, Ray, Threads
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import WORK, LocalPlace, Place, place_at
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.formats import write_arrow
from trainpipes.storage.writers.write import FILE_BYTES

#: Times that a task holds the rows that it works on, at most.
COPIES = 3
#: Rows at the start that say how large rows are.
FIRST_ROWS = 1000


def temporary_place(
    out: Place, given: Any, storage_options: Mapping[str, Any] | None, shared: bool
) -> Place:
    """The folder of temporary files.

    Args:
        out: the folder that is written to.
        given: a path or URL of the user's, or None.
        storage_options: of the file system of ``out``.
        shared: whether other machines read them.
    """
    if given is None and (shared or isinstance(out, LocalPlace)):
        return below(out, f"{WORK}/{CALLER}")
    root = os.fspath(given or tempfile.gettempdir()).rstrip("/")
    # More than one output may have its temporary files in one folder.
    same = root.partition("://")[0] == out.root.partition("://")[0]
    return place_at(
        f"{root}/trainpipes-{CALLER}-{checksum(out.root)}", CALLER, storage_options if same else None
    )


@dataclass(frozen=True)
class Move:
    """Moves rows.

    Attributes:
        pipeline: gives them.
        rows: of the pipeline, not opened.
        form: of the output files.
        sort: columns to sort by.
        descending: whether the largest comes first.
        once: whether rows that are the same in all columns are dropped, or names of columns.
        seed: of the shuffle; None for none.
        num_files: how many output files; or
        rows_per_file: how many rows in each.
        memory: bytes for rows.
        temporary: a folder of this job's.
        storage_options: of its file system.
    """

    pipeline: Pipeline
    rows: EpochRows
    form: Form
    sort: Sequence[str]
    descending: bool
    once: bool | Sequence[str]
    seed: int | None
    num_files: int | None
    rows_per_file: int | None
    memory: int
    temporary: Place
    storage_options: Mapping[str, Any] | None

    def run(self, out: OutputFolder, executor: Executor) -> Manifest:
        """Do it, or go on with it."""
        place = below(self.temporary, checksum(out.about))
        for other in self.temporary.sizes():
            if other != place.root.rpartition("/")[2]:
                self.temporary.remove(other)
        rows = self.rows if self.rows.plan.counted else self._kept(place)
        rows.know_columns()
        schema, row_bytes = first_rows(rows)
        count = int(rows.count or 0)
        if schema is None or not count:
            raise ConfigError(
                f"{CALLER}(): the input has no rows, and nothing was written: check what filters it"
            )
        ...
