"""The runs of one shard, made in order, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trainpipes.errors import DataError
from trainpipes.runtime.drought import Drought
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.run import Run, RunSource, innermost
from trainpipes.runtime.shards.chains import Chains

__all__ = ["Made", "Maker", "finish", "hand_over", "make"]

#: In the place of rows that are not needed any more.
NOTHING = Block([], np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class Made:
    """A run of one shard, or its end.

    Args:
        run: to be finished; None past the last one.
        first: item of it with which to start.
        last: item of it before which to stop.
        at: micro-batches of the epoch's slot before the first item.
        state: the position at the end, where there is no run.
    """

    run: Run | None
    first: int
    last: int
    at: int
    state: dict[str, Any]

    def place(self, k: int) -> dict[str, Any]:
        """The position before item ``k``."""
        return self.state if self.run is None else self.run.cursors.state(k)


class Maker:
    """Makes the runs of one shard in order, epoch after epoch.

    Args:
        chains: of the process.
        shard: which shard.
        number: of the pass.
        cursor: where to start, as ``Lane.cursor`` gave it; None for the pass's start.
    """

    def __init__(
        self, chains: Chains, shard: int, number: int, cursor: dict[str, Any] | None
    ) -> None:
        self.chains = chains
        self._plan = chains.plan
        self._shard = shard
        self._first_epoch = self._plan.first_epoch(number)
        self._chain: RunSource | None = None
        self._drought = Drought(self._plan.endless and not self._plan.known, wet=cursor is not None)
        if cursor is None:
            self._enter(self._first_epoch)
            return
        self.state = dict(cursor)
        self.at = int(self.state.pop("at"))
        rolling = self._plan.rolling
        self.epoch = self._first_epoch if rolling else innermost(self.state)["epoch"]
        self._slot = self._plan.slot(shard, self.epoch, self._first_epoch)
        self._skip, self._until = self._plan.chunks(self._slot, self.epoch)
        self._expect()

    def _enter(self, epoch: int) -> None:
        """Stand before the first item of an epoch."""
        plan = self._plan
        self.epoch = epoch
        self._slot = plan.slot(self._shard, epoch, self._first_epoch)
        self._skip, self._until = plan.chunks(self._slot, epoch)
        self._chain = None
        # Where counts are not known, items to skip are passed over as they come.
        self.at = self._skip if plan.seekable else 0
        self.state = plan.start(self._slot, epoch, self.at)
        stream = self.chains.windows.start(epoch)
        if stream:
            self.state["stream"] = stream
        self._expect()

    def _expect(self) -> None:
        """Keep the windows that this shard needs until it comes to them."""
        self.chains.expect(self._shard, self._slot, self.state)

    def next(self) -> Made:
        """The next run with something to give, or the end, and then ever after."""
        while True:
            made = self._advance()
            if made is not None:
                if made.run is not None:
                    self._drought.broken()
                return made

    def _advance(self) -> Made | None:
        plan = self._plan
        run = self._next_run()
        if run is not None:
            before, self.at = self.at, self.at + len(run)
            first = min(max(0, self._skip - before), len(run))
            last = len(run) if self._until is None else min(len(run), self._until - before)
            self.at = before + last
            self.state = run.cursors.state(last)
            return Made(run, first, last, before + first, self.state) if first < last else None
        times = plan.times
        is_last = times is not None and self.epoch == self._first_epoch + times - 1
        if plan.rolling or plan.repeat is None or is_last:
            return Made(None, 0, 0, self.at, self.state)
        if self._drought.next_epoch(plan.layout_of(self.epoch)):
            raise DataError(
                f"repeat() goes on for ever only where each shard gets rows: shard "
                f"{self._shard} of {plan.num_shards} got none up to epoch {self.epoch}; lower "
                "num_shards in sharding_filter(), or check the filter"
            )
        self._enter(self.epoch + 1)
        return None

    def _next_run(self) -> Run | None:
        if self._until is not None and self.at >= self._until:
            return None
        if self._chain is None:
            self._chain = self.chains.open(self._shard, self._slot, self.state, self._first_epoch)
        try:
            return self._chain.next_run()
        except StopIteration:
            return None


def make(maker: Maker) -> tuple[Made, MutableSequence[Any]]:
    """The next run and its items."""
    return finish(maker.chains, maker.next())


def finish(chains: Chains, made: Made) -> tuple[Made, MutableSequence[Any]]:
    """A run and its items; its rows are let go."""
    return given(made, None if made.run is None else partial(chains.finish, made.run))


def hand_over(chains: Chains, made: Made) -> Callable[[], tuple[Made, MutableSequence[Any]]]:
    """Have workers begin with a run; what is returned does the rest of ``finish``."""
    return partial(given, made, None if made.run is None else chains.hand_over(made.run))


def given(made: Made, rest: Callable[[], Run] | None) -> tuple[Made, MutableSequence[Any]]:
    """A run and the items that ``rest`` makes of it; its rows are let go."""
    if made.run is None or rest is None:
        return made, []
    items = rest().unroll()
    return replace(made, run=Run(NOTHING, made.run.cursors)), items
