"""``batch``: cut rows into micro-batches of a fixed size."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from trainpipes.errors import ConfigError
from trainpipes.order import IntArray
from trainpipes.runtime.block import Block
from trainpipes.runtime.run import Cursors, Run, RunSource
from trainpipes.runtime.stage import OpenState, Stage
from trainpipes.stages.shuffle import whole_number

__all__ = ["Batch"]


class Batch(Stage):
    """Cuts rows into micro-batches.

    In: rows. Out: micro-batches; without a collate above, each is a list of rows. The epoch is cut
    in whole micro-batches over all shards, so that there is at most one short one in an epoch and
    as many as a plain ``DataLoader`` gives (where a filter makes counts unknown: one short one a
    shard). Cursor: that of the last row; nothing of an open batch is kept. Costs nothing.

    Args:
        source: the node below, or None as a step of a pipeline.
        batch_size: B, rows in a micro-batch.
        drop_last: leave out a short micro-batch at the end of an epoch.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: "abcde").batch(2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """

    role = "batch"

    def __init__(
        self,
        source: BaseNode[Any] | None = None,
        batch_size: int = 1,
        *,
        drop_last: bool = False,
    ) -> None:
        whole_number(batch_size, 1, "batch(batch_size)", "rows in a micro-batch")
        if not isinstance(drop_last, bool):
            raise ConfigError(f"batch(drop_last) is True or False, got {drop_last!r}")
        super().__init__(source, batch_size=batch_size, drop_last=drop_last)
        self._size = batch_size
        self._drop_last = drop_last

    def begin(self, open_below: OpenState, state: dict[str, Any]) -> RunSource:
        return _Cutter(open_below(state), self._size, self._drop_last)


class _Cutter:
    """Micro-batches of the rows below; rows of an open one wait here."""

    def __init__(self, below: RunSource, size: int, drop_last: bool) -> None:
        self._below = below
        self._size = size
        self._drop_last = drop_last
        self._open: list[Run] = []
        self._rows = 0
        self._ended = False

    def next_run(self) -> Run:
        while not self._ended:
            try:
                run = self._below.next_run()
            except StopIteration:
                self._ended = True
                break
            self._open.append(run)
            self._rows += len(run)
            if self._rows >= self._size:
                return self._cut(self._rows // self._size * self._size)
        if self._rows and not self._drop_last:
            return self._cut(self._rows)
        raise StopIteration

    def _cut(self, rows: int) -> Run:
        block = Block.join([run.block for run in self._open])
        cursors = Cursors.join([run.cursors for run in self._open])
        edges = range(0, rows, self._size)
        bounds: IntArray = np.array([*edges, rows], dtype=np.int64)
        rest = self._rows - rows
        self._open = []
        if rest:
            left = np.arange(rows, self._rows + 1, dtype=np.int64)
            self._open.append(Run(block.slice(rows, self._rows), cursors.pick(left)))
        self._rows = rest
        return Run(block.slice(0, rows), cursors.pick(bounds), bounds)
