"""The runs of one shard, epoch after epoch, with the position after each. Called by one thread at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainpipes.errors import DataError
from trainpipes.kinds.empty_epoch_guard import EmptyEpochGuard
from trainpipes.rows.block import Block
from trainpipes.rows.run import Cursors, Run, RunSource, innermost
from trainpipes.runtime.shards.opener import ShardOpener

__all__ = ["PlacedRun", "ShardRuns"]

#: In the place of rows that are not needed any more.
NOTHING = Block([], np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class PlacedRun:
    """A run of one shard, or its end.

    Args:
        run: its items; None past the last one.
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

    def without_rows(self) -> PlacedRun:
        """The same with its positions only: they outlive the rows."""
        return self if self.run is None else replace(self, run=Run(NOTHING, self.run.cursors))


class ShardRuns:
    """Makes the runs of one shard in order, epoch after epoch.

    Args:
        opener: of the process.
        shard: which shard.
        number: of the pass.
        cursor: where to start, as a state says it; None for the pass's start.
        singly: whether runs are as small as can be.
    """

    def __init__(
        self,
        opener: ShardOpener,
        shard: int,
        number: int,
        cursor: dict[str, Any] | None,
        singly: bool = False,
    ) -> None:
        self._opener = opener
        self._plan = opener.plan
        self._shard = shard
        #: Whether runs are as small as can be.
        self.singly = singly
        self._first_epoch = self._plan.chain.first_epoch(number)
        self._opened: RunSource | None = None
        self._after: tuple[Cursors, int] | None = (
            None  # what the position is made of, when asked for
        )
        self._guard = EmptyEpochGuard(
            self._plan.chain.endless and not self._plan.counts.known, gave=cursor is not None
        )
        if cursor is None:
            self._enter(self._first_epoch)
            return
        self._state = dict(cursor)
        self.at = int(self._state.pop("at"))
        rolling = self._plan.chain.rolling
        self.epoch = self._first_epoch if rolling else innermost(self.state)["epoch"]
        self._slot = self._plan.counts.slot(shard, self.epoch, self._first_epoch)
        self._skip, self._until = self._plan.counts.chunks(self._slot, self.epoch)
        self._expect()

    @property
    def state(self) -> dict[str, Any]:
        """The position after the last run."""
        if self._after is not None:
            (cursors, last), self._after = self._after, None
            self._state = cursors.state(last)
        return self._state

    def _enter(self, epoch: int) -> None:
        """Stand before the first item of an epoch."""
        plan = self._plan
        self.epoch = epoch
        self._slot = plan.counts.slot(self._shard, epoch, self._first_epoch)
        self._skip, self._until = plan.counts.chunks(self._slot, epoch)
        self._opened = None
        # Where counts are not known, items to skip are passed over as they come.
        self.at = self._skip if plan.counted else 0
        self._state, self._after = plan.counts.start(self._slot, epoch, self.at), None
        stream = self._opener.windows.start(epoch)
        if stream:
            self._state["stream"] = stream
        self._expect()

    def _expect(self) -> None:
        """Keep the windows that this shard needs until it comes to them."""
        self._opener.expect(self._shard, self._slot, self.state)

    def next(self) -> PlacedRun:
        """The next run with something to give, or the end, and then ever after."""
        while True:
            found = self._advance()
            if found is not None:
                if found.run is not None:
                    self._guard.gave()
                return found

    def _advance(self) -> PlacedRun | None:
        plan = self._plan
        run = self._next_run()
        if run is not None:
            before, self.at = self.at, self.at + len(run)
            first = min(max(0, self._skip - before), len(run))
            last = len(run) if self._until is None else min(len(run), self._until - before)
            self.at = before + last
            self._after = run.cursors, last
            return PlacedRun(run, first, last, before + first, {}) if first < last else None
        times = plan.chain.times
        is_last = times is not None and self.epoch == self._first_epoch + times - 1
        if plan.chain.rolling or plan.chain.repeat is None or is_last:
            return PlacedRun(None, 0, 0, self.at, self.state)
        if self._guard.next_epoch(plan.layouts.of(self.epoch)):
            raise DataError(
                f"repeat() would wait forever: shard {self._shard} of {plan.chain.num_shards} got "
                f"no rows up to epoch {self.epoch}; lower num_shards in sharding_filter(), or "
                "check the filter"
            )
        self._enter(self.epoch + 1)
        return None

    def _next_run(self) -> Run | None:
        if self._until is not None and self.at >= self._until:
            return None
        if self._opened is None:
            self._opened = self._opener.open(
                self._shard, self._slot, self.state, self._first_epoch, self.singly
            )
        try:
            return self._opened.next_run()
        except StopIteration:
            return None
