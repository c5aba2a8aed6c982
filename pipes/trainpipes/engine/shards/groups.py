"""Groups of batches of a counted pipeline, and what makes their items: each group by itself, in any
thread."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np

from trainpipes.columns.bad_text import naming_bad_text
from trainpipes.columns.block import Block
from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Run, Unroll, unplaced
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.reading.windows import Window


@dataclass(frozen=True)
class Group:
    """Batches that are made together.

    Args:
        ms: their numbers, in order.
        places: where each of them stands among the group's items.
        parts: windows, and positions in their order, of all rows, item after item.
        bounds: first row of each item, and the end.
    """

    ms: IntArray
    places: list[int]
    parts: list[tuple[Window, IntArray]]
    bounds: IntArray

    def is_ready(self) -> bool:
        """Whether its rows are there."""
        return all(window.is_read for window, _ in self.parts)

    def rows(self) -> Block:
        """Its rows, item after item."""
        return Block.join([window.take(positions) for window, positions in self.parts])

    def rows_of(self, place: int) -> Block:
        """The rows of one item."""
        start, stop = self.bounds[place : place + 2].tolist()
        blocks: list[Block] = []
        for window, positions in self.parts:
            if start < len(positions) and stop > 0:
                blocks.append(window.take(positions[max(0, start) : stop]))
            start, stop = start - len(positions), stop - len(positions)
        return Block.join(blocks)


class GroupMaker:
    """Puts groups through the stages above the rows that are dealt.

    Args:
        chain: has the stages, none of which has a position of its own but ``batch``.
        unroll: gives the items of a run.

    Attributes:
        seconds: that the last group took in the stages.
    """

    def __init__(self, chain: Chain, unroll: Unroll) -> None:
        self._stages: Sequence[Any] = chain.after
        self._batch = chain.batch
        #: Whether rows go through no stage before they are cut.
        self._cuts_first = chain.batch is not None and chain.after[0] is chain.batch
        self._unroll = unroll
        self.seconds = math.inf

    @cached_property
    def has_workers(self) -> bool:
        """Whether workers of a stage can be given a group before its turn; asked when these are settled."""
        return any(stage.has_workers for stage in self._stages if stage is not self._batch)

    def items(self, group: Group) -> MutableSequence[Any]:
        """A group's items."""
        run = self._run(group.rows(), group.bounds)
        start = perf_counter()
        run = self._through(self._stages, run, group.bounds)
        self.seconds = perf_counter() - start
        return self._unroll(run)

    def lazy_items(self, group: Group) -> MutableSequence[Any]:
        """A group's items, each of which is made when it is taken."""
        return LazyBatches(partial(self._item, group), len(group.ms))

    def _item(self, group: Group, place: int) -> Any:
        block = group.rows_of(place)
        bounds = np.array([0, len(block)], dtype=np.int64)
        run = self._run(block, bounds)
        return self._unroll(self._through(self._stages, run, bounds))[0]

    def submit(self, group: Group) -> Callable[[], MutableSequence[Any]]:
        """Put a group through the stages up to the first with workers, and have these begin; what is returned
        waits for them, does the rest and gives the items. It raises what went wrong before, too."""
        try:
            run = self._run(group.rows(), group.bounds)
            for number, stage in enumerate(self._stages):
                if stage is not self._batch:
                    with naming_bad_text(run.block, stage):
                        rest = stage.submit_run(run)
                    if rest is not None:
                        later = self._stages[number + 1 :]
                        return lambda: self._unroll(self._through(later, rest(), group.bounds))
                run = self._through([stage], run, group.bounds)
        except Exception as error:
            return partial(fail, error)
        return lambda: self._unroll(run)

    def _run(self, block: Block, bounds: IntArray) -> Run:
        """Rows as the first stage is given them."""
        return unplaced(block, bounds if self._cuts_first else None)

    def _through(self, stages: Sequence[Any], run: Run, bounds: IntArray) -> Run:
        """What becomes of a run in some stages, one of which may cut it at ``bounds``."""
        for stage in stages:
            if stage is self._batch:
                run = run if self._cuts_first else unplaced(run.block, bounds)
            else:
                with naming_bad_text(run.block, stage):
                    run = stage.process(run)
        return run


def fail(error: BaseException) -> Any:
    """Raise what was raised before its turn."""
    raise error
