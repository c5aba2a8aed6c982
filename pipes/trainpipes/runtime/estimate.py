"""About how many items an epoch has, where rows are packed or batched by their lengths: some rows are read
and put through the stages to say."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainpipes.runtime.iterator import Pass
from trainpipes.runtime.plan import Plan
from trainpipes.runtime.run import Run, RunSource
from trainpipes.runtime.stage import OpenState, Stage
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["cuts_by_length", "items_by_sample"]

#: Rows that are read.
SAMPLE_ROWS = 2048


def cuts_by_length(stage: Stage) -> bool:
    """Whether what comes out of a stage depends on how long rows are."""
    return stage.role in ("pack", "batch") and not stage.keeps_rows


def items_by_sample(plan: Plan) -> int:
    """Items of an epoch, over all ranks: exact where all rows are read, else in proportion.

    Args:
        plan: whose rows are counted before they are read, with a stage that cuts by length.
    """
    assert plan.epoch_rows is not None
    stages = [s for s in plan.stages if s.role not in ("shard", "repeat", "place")]
    place = next(n for n, stage in enumerate(stages) if cuts_by_length(stage))
    counted = [stage for stage in stages[place:] if stage.role in ("take", "skip")]
    sample = _Sample()
    fresh = [type(s)(None, **s.options) for s in stages if s not in counted]
    fresh.insert(place, sample)
    items = sum(1 for _ in _pass(Plan([*fresh, _Uncollated()], plan.source)))
    if sample.cut and sample.rows:
        items = round(items * plan.epoch_rows / sample.rows)
    for stage in counted:
        count = int(stage.options["count"])
        items = min(items, count) if stage.role == "take" else max(0, items - count)
    return items


def _pass(plan: Plan) -> Any:
    run = Pass(plan, Topology(), Position(0, 0, 1), 0, go_on=False)
    while True:
        try:
            yield next(run)
        except StopIteration:
            return


class _Sample(Stage):
    """Lets the first rows through, and counts them."""

    role = "rows"
    keeps_rows = False

    def __init__(self) -> None:
        super().__init__(None)
        self.rows = 0
        self.cut = False

    def begin(self, open_below: OpenState, state: dict[str, Any]) -> RunSource:
        return _First(self, open_below(state))


class _First:
    def __init__(self, stage: _Sample, below: RunSource) -> None:
        self._stage = stage
        self._below = below

    def next_run(self) -> Run:
        stage = self._stage
        left = SAMPLE_ROWS - stage.rows
        if not left:
            stage.cut = True
            raise StopIteration
        run = self._below.next_run()
        if len(run) > left:
            run = run.pick(np.arange(left, dtype=np.int64))
        stage.rows += len(run)
        return run


class _Uncollated(Stage):
    """Makes nothing of items that are not made of yet: they are only counted."""

    role = "rows"

    def process(self, run: Run) -> Run:
        return run if run.items is not None else run.with_items([0] * len(run))
