"""``take`` and ``skip``: the first items only, or all but the first."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainpipes._internal.checks import Natural
from trainpipes.columns.run import Cursors, Run, RunSource, innermost
from trainpipes.errors import DataError
from trainpipes.kinds.empty_epoch_guard import MOST_EMPTY_EPOCHS, EmptyEpochGuard
from trainpipes.kinds.stage_kinds import CutStage, OpenBelow


class _Counted(CutStage):
    """A stage that counts items. Directly after the source and after ``batch`` the plan does it by
    arithmetic; elsewhere, in a pipeline of one shard, it counts what passes. Cursor then: the count,
    and the rows' state at the start of the run in hand."""

    asks_inputs = True

    count: Natural

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        bounds = (0, self.count) if self.role == "take" else (self.count, None)
        rows, passed, row = (at["below"], at["passed"], at["row"]) if "below" in at else (at, 0, 0)
        return _Counter(below(rows), rows, passed, row, bounds, self.plan_inputs.chain.rolling)


class Take(_Counted):
    """Gives the first ``count`` items of each epoch.

    In and out: rows, or batches after ``batch``. Directly after the source the rows are
    counted in file order; after ``batch``, batches are counted over all ranks.

    Args:
        count: items.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(9)).take(2))
    [0, 1]
    """

    role = "take"


class Skip(_Counted):
    """Leaves out the first ``count`` items of each epoch, counted as ``take`` counts them.

    Args:
        count: items.
    """

    role = "skip"


class _Counter:
    """Items ``bounds[0]`` to ``bounds[1]`` of those below, in each epoch; ``rolls`` says whether what comes
    from below goes on into the next one."""

    def __init__(
        self,
        below: RunSource,
        state: dict[str, Any],
        passed: int,
        row: int,
        bounds: tuple[int, int | None],
        rolls: bool,
    ) -> None:
        self._below = below
        self._state = state  # of the rows below, before the run in hand
        self._passed = passed  # items of the epoch before that run
        self._skip = row  # items of that run already used
        self._low, self._high = bounds
        self._rolls = rolls
        self._epoch = innermost(state)["epoch"]
        self._guard = EmptyEpochGuard(gave=passed > 0 or row > 0)

    def next_run(self) -> Run:
        while True:
            enough = self._high is not None and self._passed + self._skip >= self._high
            if enough and not self._rolls:
                raise StopIteration
            run = self._below.next_run()
            epoch = innermost(run.cursors.state(0))["epoch"]
            if epoch != self._epoch:
                if self._guard.next_epoch():
                    raise DataError(
                        "repeat() would wait forever: take() or skip() left nothing of "
                        f"{MOST_EMPTY_EPOCHS} epochs in a row"
                    )
                self._passed = 0
                self._state = run.cursors.state(0)
            self._epoch = epoch
            first = max(self._skip, self._low - self._passed)
            last = len(run) if self._high is None else min(len(run), self._high - self._passed)
            base = {"below": self._state, "passed": self._passed}
            self._passed += len(run)
            self._state = run.cursors.state(len(run))
            self._skip = max(0, self._skip - len(run))
            if first < last:
                self._guard.gave()
                kept = run.pick(np.arange(first, last, dtype=np.int64))
                rows = np.arange(first, last + 1, dtype=np.int64)
                return Run(kept.block, Cursors.counting(base, rows), kept.bounds, kept.items)
