from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trainpipes.columns.block import Block
from trainpipes.engine.layout import IntArray
from trainpipes.engine.shards.shard_rows import ShardOpener
from trainpipes.engine.shards.shard_runs import PlacedRun, ShardRuns
from trainpipes.errors import TrainpipesError

#: A source's cursor before so many more of its rows; None at the start of a pass.
CursorAfter = Callable[[int], "dict[str, Any] | None"]


@dataclass(eq=False)
class MixSource:
    name: str
    opener: ShardOpener
    ids: Callable[[IntArray], IntArray]
    lengths: Callable[[Block], IntArray] | None

    def expect(self, shard: int, epoch: int, cursor: dict[str, Any] | None) -> None:
        if cursor is None or not cursor.get("gone"):
            ShardRuns(self.opener, shard, epoch, cursor)

    def mixed(self, block: Block) -> tuple[Block, list[int]]:
        block.ids = self.ids(block.ids)
        if block.made_of is not None:
            block.made_of = block.made_of._replace(ids=self.ids(block.made_of.ids))
        return block, [] if self.lengths is None else self.lengths(block).tolist()

    def named(self, error: Exception) -> None:
        stage, row = getattr(error, "_trainpipes", (None, None))
        if row is not None:
            own = int(self.ids(np.array([row], dtype=np.int64))[0])
            error._trainpipes = stage, own  # type: ignore[attr-defined]
        elif isinstance(error, TrainpipesError):
            error.source = error.source or self.name
            error.message = f"{error.message} (in source {self.name!r} of a mix)"
        else:
            error.add_note(f"in source {self.name!r} of a mix")


class SourceRows:
    """One source's ready rows in one shard, and where the next stands. Whoever takes some updates
    ``left``.
    """

    def __init__(
        self, source: MixSource, shard: int, epoch: int, cursor: dict[str, Any] | None
    ) -> None:
        self.gone = cursor is not None and bool(cursor.get("gone"))
        self.left = self.passes = 0
        self._source, self._start = source, cursor
        self._first_epoch = source.opener.plan.chain.first_epoch(epoch)
        self._runs = None if self.gone else ShardRuns(source.opener, shard, epoch, cursor)
        self._made: PlacedRun | None = None
        self._block: Block | None = None
        self._lengths: list[int] = []
        self._begin = 0  # of those rows of the block that are taken and not given away yet
        self._pieces: list[Block] = []  # taken from blocks before

    def fill(self) -> None:
        assert self._runs is not None
        self._put_by()
        try:
            found = self._runs.next()
            assert found is not None
        except Exception as error:
            self._source.named(error)
            raise
        made, run = found
        self._block, self._lengths = self._source.mixed(run.block.slice(made.first, made.last))
        self._made = made
        self.left, self._begin = made.last - made.first, 0
        self.passes = self._runs.epoch - self._first_epoch

    @property
    def lengths(self) -> list[int]:
        return self._lengths[len(self._lengths) - self.left :]

    def taken(self) -> list[Block]:
        self._put_by()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _put_by(self) -> None:
        if self._block is not None:
            end = len(self._block) - self.left
            if end > self._begin:
                self._pieces.append(self._block.slice(self._begin, end))
            self._begin = end

    def cursor_after(self) -> CursorAfter:
        if self._made is None:
            start = self._start
            return lambda _: start
        return partial(_place, self._made, self._made.last - self.left, self.gone)


def _place(made: PlacedRun, used: int, gone: bool, count: int) -> dict[str, Any]:
    found = made.cursor(used + count)
    return {**found, "gone": True} if gone else found
