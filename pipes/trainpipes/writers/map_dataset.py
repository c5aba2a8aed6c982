"""``to_map_dataset``: rows that fit in memory, indexed, shared by all processes of a machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from trainpipes.cache import kept_file
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.python_values import python_rows
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, MissingFilesError, UnreadableError
from trainpipes.writers.epoch_rows import EpochRows

CALLER = "to_map_dataset"


class MapDataset(Dataset[dict[str, Any]]):
    """Rows of an Arrow file, memory-mapped: processes that read it share a single copy in memory. A row is a
    dict of Python values.

    Args:
        path: an Arrow IPC file.

    Raises:
        MissingFilesError: the file is gone.
        UnreadableError: it is no Arrow file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._table = os.fspath(path), None

    @property
    def table(self) -> pa.Table:
        """The rows as a table that lies in the file."""
        if self._table is None:
            again = "make it again by to_map_dataset(path)"
            try:
                with pa.memory_map(self.path) as source:
                    self._table = pa.ipc.open_file(source).read_all()
            except FileNotFoundError as error:
                raise MissingFilesError(
                    f"{self.path}: the rows of this data set were there, and are gone; {again}",
                    path=self.path,
                ) from error
            except (OSError, pa.ArrowException) as error:
                raise UnreadableError(
                    f"{self.path} is no Arrow file, or damaged: {error}; {again}", path=self.path
                ) from error
        return self._table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = len(self)
        if not -rows <= index < rows:
            raise IndexError(f"row {index} of {rows}")
        return python_rows(self.table.slice(index % rows, 1))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return python_rows(self.table.take(to_arrow(np.array(list(map(index, indices)), np.int64))))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_table": None}

    def __repr__(self) -> str:
        return f"MapDataset({self.path!r})"


def to_map_dataset(pipeline: Record, path: str | os.PathLike[str]) -> MapDataset:
    """The rows of the first epoch of a pipeline, in its order, written once and memory-mapped.

    Args:
        pipeline: gives rows with columns; no batches.
        path: the file, written anew.

    Raises:
        ConfigError: the pipeline batches, has no end or no rows; or the file cannot be written.
        SchemaError: its rows have no columns, or not all the same.
    """
    rows, target = EpochRows(pipeline, CALLER), Path(path).absolute()
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
