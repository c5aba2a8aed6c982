"""``pipe.to_ray()``: the rows of a pipeline as a ``ray.data.Dataset``.

Read tasks are planned before anything is read: ranges of rows where rows are counted, else shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import need, require, whole_number
from trainpipes.engine.record import Record
from trainpipes.writers.epoch_rows import EpochRows

need("ray", "pipe.to_ray()")

import ray  # noqa: E402
from ray.data import Dataset, Datasource, ReadTask  # noqa: E402
from ray.data.block import BlockMetadata  # noqa: E402

#: What a task reads: from a row to another, or a shard.
_Part: TypeAlias = tuple[int, int] | int


class PipelineDatasource(Datasource):  # type: ignore[misc]  # ray may not be there
    """The rows of an epoch of a pipeline, as Ray Data asks for them."""

    def __init__(self, rows: EpochRows, epoch: int) -> None:
        super().__init__()
        self._schema = rows.know_columns()
        self._rows = rows
        self._epoch = epoch
        self._shared = [ray.put(rows)]

    def get_name(self) -> str:
        return "Trainpipes"

    def estimate_inmemory_data_size(self) -> int | None:
        source = self._rows.plan.inputs.source
        each = getattr(source, "row_bytes", None)
        return None if each is None or self._rows.count is None else int(each * self._rows.count)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        limit = {} if per_task_row_limit is None else {"per_task_row_limit": per_task_row_limit}
        size = self.estimate_inmemory_data_size()
        total = max(1, self._rows.count or 0)
        return [
            ReadTask(
                partial(_read, self._shared, part, self._epoch, self._schema),
                _metadata(rows, None if size is None or rows is None else size * rows // total),
                **limit,
            )
            for part, rows in self._parts(max(1, parallelism))
        ]

    def _parts(self, most: int) -> list[tuple[_Part, int | None]]:
        """What each task reads, and how many rows that is, where it is known."""
        plan = self._rows.plan
        if not plan.counted:
            return [(shard, None) for shard in range(plan.chain.num_shards)]
        cuts = _cuts(self._rows, most)
        return [((start, stop), stop - start) for start, stop in pairwise(cuts)]


def _cuts(rows: EpochRows, most: int) -> list[int]:
    """First rows of the parts of a counted pipeline, at the shuffle's windows if these are enough, and all
    rows.
    """
    count = rows.count or 0
    even = np.linspace(0, count, min(most, max(1, count)) + 1).astype(np.int64)
    layout: Any = rows.plan.layouts.usual
    windows = layout.num_windows(0) if count else 0
    if windows >= len(even) - 1 > 0:
        starts = np.array([layout.window(0, n)[0] for n in range(windows)] + [count])
        even = starts[np.clip(np.searchsorted(starts, even), 0, windows)]
    return [int(row) for row in (np.unique(even) if count else (0, 0))]


def _metadata(rows: int | None, size: int | None) -> BlockMetadata:
    # Versions of Ray have other fields.
    names = [f.name for f in dataclasses.fields(BlockMetadata) if f.init]
    return BlockMetadata(**{**dict.fromkeys(names), "num_rows": rows, "size_bytes": size})


def _read(
    shared: list[Any], part: _Part, epoch: int, schema: pa.Schema | None
) -> Iterator[pa.Table]:
    """The rows of a part, table by table. Ray calls it in a worker process."""
    rows: EpochRows = ray.get(shared[0])
    gave = False
    with closing(rows):
        if isinstance(part, int):
            rows.open(None, 0, epoch, part)
            tables = iter(rows.some, None)
        else:
            tables = rows.tables(*part, epoch)
        for table in tables:
            gave = True
            yield table
    if not gave and schema is not None:  # so that a dataset without rows has columns
        yield pa.Table.from_batches([], schema)


def to_ray(pipeline: Record, epoch: int) -> Dataset:
    """The rows of a pipeline as a ``ray.data.Dataset``. See ``Pipeline.to_ray``."""
    whole_number(epoch, 0, "to_ray(epoch)", "number of the epoch, from 0")
    way = "leave .distributed() out, and use dataset.streaming_split(n) or ray.train.get_dataset_shard()"
    require(pipeline._ranks is None, "pipe.to_ray()", "of all ranks", pipeline._ranks, way)
    rows = EpochRows(pipeline, "to_ray")
    if not rows.plan.counted:
        rows = EpochRows(pipeline, "to_ray", dealt=True)
    return ray.data.read_datasource(PipelineDatasource(rows, epoch))
