"""``to_map_dataset``: rows that fit in memory, indexed, shared by all processes of a machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from trainpipes.cache import kept_file
from trainpipes.cache.entries import DATASETS, LOCK, VARIABLE, folder, path_of
from trainpipes.cache.kept_file import locked
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.row_types import python_rows
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, MissingFilesError, UnreadableError
from trainpipes.interfaces.contents import cache_key, digest_of
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage_kinds import UNKNOWN, without
from trainpipes.pipeline.chain import Pipeline
from trainpipes.writers.epoch_rows import EpochRows

CALLER = "to_map_dataset"
#: Seconds between two looks at what another process makes, and how long one looks.
PATIENCE = 600.0


class MapDataset(Dataset[dict[str, Any]]):
    """Rows of an Arrow file, memory-mapped: processes that read it share one copy in memory. A row is a dict
    of Python values.

    Args:
        path: an Arrow IPC file.

    Raises:
        MissingFilesError: the file is gone, as one in a cache may be.
        UnreadableError: it is no Arrow file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._table, self._is_kept = os.fspath(path), None, False

    @staticmethod
    def _kept(path: Path, about: dict[str, Any]) -> MapDataset | None:
        found = MapDataset(path)
        found._table, found._is_kept = kept_file.read(path, about), True
        return None if found._table is None else found

    @property
    def table(self) -> pa.Table:
        """The rows as a table that lies in the file."""
        if self._table is None:
            again = "make it again by to_map_dataset()"
            opened = pa.ipc.open_stream if self._is_kept else pa.ipc.open_file
            try:
                with pa.memory_map(self.path) as source:
                    self._table = opened(source).read_all()
            except FileNotFoundError as error:
                raise MissingFilesError(
                    f"{self.path}: the rows of this data set were there, and are gone; {again}, or keep it "
                    "in a file of your own by to_map_dataset(path)",
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


def to_map_dataset(pipeline: Pipeline, path: str | os.PathLike[str] | None = None) -> MapDataset:
    """The rows of the first epoch of a pipeline, in its order, written once and memory-mapped.

    Args:
        pipeline: gives rows with columns; no batches.
        path: the file, written anew. If left out, a file in the folder for caches, known by the data and the
            stages, and made if it is not there.

    Raises:
        ConfigError: the pipeline batches, has no end or no rows; its data has no fingerprint, and ``path`` is
            not given; or the file cannot be written.
        SchemaError: its rows have no columns, or not all the same.
    """
    rows = EpochRows(pipeline, CALLER)
    if path is not None:
        return _write(rows, Path(path).absolute(), None)
    root = folder()
    if root is None:
        raise ConfigError(f"{VARIABLE} says that nothing is kept: use to_map_dataset(path)")
    digest = digest_of(CALLER, _known_by(rows.plan))
    target, about = path_of(root, DATASETS, digest[:32]), {"dataset": digest}
    found = MapDataset._kept(target, about)
    return _write(rows, target, about) if found is None else found


def _known_by(plan: Plan) -> list[Any]:
    """What tells the rows of a pipeline from any others, as for ``cache()``."""
    stages = without(plan.chain.stages, UNKNOWN)
    known: list[Any] = [json.loads(plan.identity), cache_key(stages, f"{CALLER}()")]
    if plan.mixed:
        return [*known, {name: _known_by(below) for name, below in plan.mixed.items()}]
    source = plan.inputs.source
    keys: list[Any] = [None]
    if isinstance(source, RowSource):
        keys = [source.block_key(block) for block in range(len(source.lengths))]
    if None in keys:
        raise ConfigError(
            "to_map_dataset() names its file by what is in it, and the rows of "
            f"{plan.chain.stages[0]} have no fingerprint: use to_map_dataset(path), which "
            "writes the file anew"
        )
    if any({"place", "row"} & {*stage.traits.depends_on} for stage in stages):
        known.append(plan.chain.urls)  # where rows are from counts
    return [*known, keys]


def _write(rows: EpochRows, target: Path, about: dict[str, Any] | None) -> MapDataset:
    failed: list[Exception] = []  # in making rows, which is not about the file

    def tables() -> Iterator[pa.Table]:
        try:
            rows.open()
            yield from iter(rows.some, None)
        except Exception as error:
            failed.append(error)
            raise

    lock = nullcontext() if about is None else locked(target.with_suffix(LOCK), PATIENCE)
    try:
        with closing(rows), lock:
            # Another process may have made it since.
            found = None if about is None else MapDataset._kept(target, about)
            if found is None:
                if not kept_file.write(target, tables(), about, own=about is not None):
                    raise ConfigError("to_map_dataset(): the pipeline has no rows")
                found = MapDataset(target) if about is None else MapDataset._kept(target, about)
    except OSError as error:
        if error in failed:
            raise
        raise ConfigError(
            f"to_map_dataset(): {target} cannot be written ({error.strerror or error}): make room there, or "
            "keep the rows elsewhere by to_map_dataset(path)",
            path=str(target),
        ) from error
    assert found is not None, f"{target} was removed as it was written"
    return found
