"""About how many items an epoch has, where that follows from fractions, or from what rows hold: then some are
read and put through the stages to say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import CutStage, OpenBelow, RunStage
from trainpipes.order import count_batches
from trainpipes.rows.run import Run, RunSource
from trainpipes.runtime.iterating.one_pass import OnePass
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["cuts_by_length", "estimated_items"]

#: Rows that are read.
SAMPLE_ROWS = 2048


def cuts_by_length(stage: Stage) -> bool:
    """Whether how many items a stage makes depends on what rows hold, on how long they are most of all."""
    return stage.role in ("pack", "batch") and not stage.keeps_rows


def estimated_items(plan: Plan) -> int:
    """Items of an epoch, over all ranks: exact where all rows are read, else in proportion.

    Stage by stage: ``sample`` and ``split`` let their fraction through, ``take`` and ``skip`` their count.
    What ``pack``, budgets of tokens and buckets make of rows is measured on the first 2,048 that come to
    the lowest of them, and what a ``filter`` lets through with it. Without any of these nothing is read,
    and a filter counts as if it let all through.

    Args:
        plan: whose rows are counted before they are read.
    """
    stages = [s for s in plan.chain.stages if s.role not in ("shard", "repeat", "place")]
    made = _measured(plan, stages)
    items: float = plan.inputs.epoch_rows or 0
    in_file_order = True  # where take() and skip() are counted in the plan's rows
    for stage in stages[len(plan.chain.file_stages) + 1 :]:
        if stage.role in ("take", "skip"):
            count = 0 if in_file_order else int(stage.options["count"])
            if stage.role == "skip":
                items = max(0, items - count)
            elif not in_file_order:
                items = min(items, count)
            continue
        if stage in made:
            items *= made[stage]
        elif stage.role == "batch":
            items = count_batches(round(items), plan.chain.batch_size, plan.chain.drop_last)
        elif stage.share is not None:
            items *= stage.share
        ordered = stage.role in ("shuffle", "batch", "pack")
        in_file_order = in_file_order and stage.keeps_rows and not ordered
    return round(items)


def _measured(plan: Plan, stages: Sequence[Stage]) -> dict[Stage, float]:
    """Items that come out of stages for each that goes in, of those for which rows must be read."""
    place = next((n for n, stage in enumerate(stages) if cuts_by_length(stage)), None)
    if place is None:
        return {}
    # What a cache() keeps is known by the stages below it: none is put among them.
    cached = next((n for n, stage in enumerate(stages) if stage.role == "cache"), 0)
    chain: list[Stage] = []
    counts: dict[Stage, tuple[_Count, _Count]] = {}
    for number, stage in enumerate(stages):
        if stage.role in ("take", "skip") and number > place:
            continue
        fresh = stage.fresh()
        drops = not stage.keeps_rows and stage.share is None and stage.role not in ("take", "skip")
        if not drops or number < cached:
            chain.append(fresh)
            continue
        into, out = counts[stage] = _Count(), _Count()
        chain += [_First(into)] if number == place else []
        chain += [_Tally(into), fresh, _Tally(out)]
    measured = Plan.of([*chain, _Uncollated()], plan.inputs.source, plan.inputs.schemas, quiet=True)
    walk = OnePass(measured, Topology(), Position(0, 0, 1))
    with suppress(StopIteration):
        while True:
            next(walk)
    return {stage: out.items / max(1, into.items) for stage, (into, out) in counts.items()}


class _Count:
    """Items that have come by."""

    items = 0


class _Tally(RunStage):
    """Counts items that pass."""

    keeps_rows = False

    count: _Count

    def process(self, run: Run) -> Run:
        self.count.items += len(run)
        return run


class _First(CutStage):
    """Lets items pass until so many are counted above it."""

    keeps_rows = False

    count: _Count

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        return _FirstRuns(below(at), self.count)


class _FirstRuns:
    def __init__(self, below: RunSource, count: _Count) -> None:
        self._below, self._count = below, count

    def next_run(self) -> Run:
        left = SAMPLE_ROWS - self._count.items
        if left <= 0:
            raise StopIteration
        run = self._below.next_run()
        return run if len(run) <= left else run.pick(np.arange(left, dtype=np.int64))


class _Uncollated(RunStage):
    """Makes nothing of items that are not made of yet: they are only counted."""

    def process(self, run: Run) -> Run:
        return run if run.items is not None else run.with_items([0] * len(run))
