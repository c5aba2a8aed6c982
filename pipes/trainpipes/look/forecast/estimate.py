"""About how many items an epoch has, where that follows from fractions, or from what rows hold: then some are
read and put through the stages to say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trainpipes.columns.run import Run, RunSource
from trainpipes.engine.iterating.one_pass import OnePass
from trainpipes.engine.layout import Layout, count_batches
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.topology import Topology
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import CutStage, OpenBelow, RunStage
from trainpipes.state.format import Position

__all__ = ["cuts_by_length", "ends_short", "estimated_items", "is_measured"]

#: Rows that are read, and batches at least where batches are filtered.
SAMPLE_ROWS = 2048
MINIMUM_BATCHES = 64


def cuts_by_length(stage: Stage) -> bool:
    """Whether how many items a stage makes depends on what rows hold, on how long they are most of all."""
    return stage.role in ("pack", "batch") and not stage.keeps_rows


def is_measured(stage: Stage) -> bool:
    """Whether rows have to be read to say how many items a stage makes of them."""
    return not stage.keeps_rows and stage.share is None and stage.role not in ("take", "skip")


def estimated_items(plan: Plan) -> int:
    """Items of an epoch, over all ranks: exact where all rows are read, else in proportion.

    Stage by stage: ``sample`` and ``split`` let their fraction through, ``take`` and ``skip`` their count.
    What ``pack``, budgets of tokens and buckets make of rows is measured on the first 2,048 that come to
    the first of them, and what a ``filter`` or a ``flat_map`` makes of them with it. Where there are none
    of these, ``filter`` and ``flat_map`` are measured on the first 2,048 rows that come to the first. After
    any of them each shard has a short batch of its own.

    Args:
        plan: whose rows are counted before they are read.
    """
    stages = [s for s in plan.chain.stages if s.role not in ("shard", "repeat", "place")]
    made = _measured(plan, stages)
    items: float = plan.inputs.epoch_rows or 0
    several = False  # whether a stage may make more rows than it gets
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
            items = _batches(plan, items, several)
        elif stage.share is not None:
            items *= stage.share
        several = several or stage.role == "pack"
        ordered = stage.role in ("shuffle", "batch", "pack")
        in_file_order = in_file_order and stage.keeps_rows and not ordered
    return round(items)


def ends_short(plan: Plan) -> bool:
    """Whether each shard ends with a batch of its own, which may be short: where a stage below ``batch``
    makes fewer rows or more, so that they are not counted before they are read."""
    chain = plan.chain
    sized = chain.batch is not None and chain.batch.batch_size is not None
    return sized and chain.num_shards > 1 and not plan.layouts.whole and not chain.rolling


def _batches(plan: Plan, rows: float, several: bool) -> float:
    """Batches that are cut of an epoch's rows.

    Args:
        plan: of the pipeline.
        rows: that come to ``batch``, about.
        several: whether a stage may have made more rows of those that are read.
    """
    chain = plan.chain
    if not ends_short(plan):
        return count_batches(round(rows), chain.batch_size, chain.drop_last)
    layout, read = plan.layouts.usual, plan.inputs.epoch_rows or 0
    if isinstance(layout, Layout):
        spans = map(layout.span, range(layout.num_spans))
        sizes = [float(stop - start) for start, stop in spans]
    else:
        sizes = [read / chain.num_shards] * chain.num_shards
    sharers = chain.num_shards // len(sizes)
    share = rows / max(1, read)
    found = 0.0
    for size in sizes:
        mean = size * share
        spread = math.sqrt(mean * (1 if several else max(0.0, 1 - share)))
        found += sharers * _batches_of(mean / sharers, spread / sharers, plan)
    return found


def _batches_of(rows: float, spread: float, plan: Plan) -> float:
    """Batches that a shard gives on average, whose rows are normally distributed: for each, how likely there
    are rows enough for it."""
    size = plan.chain.batch_size
    first = size if plan.chain.drop_last else 1  # rows that make the first batch
    sure = max(0, math.floor((rows - 5 * spread - first) / size))
    needed = np.arange(first + sure * size, rows + 5 * spread + 1, size) - 0.5 - rows
    if not spread:
        return sure + float(np.count_nonzero(needed <= 0))
    likely = (0.5 - 0.5 * math.erf(x / spread / math.sqrt(2)) for x in needed.tolist())
    return sure + sum(likely)


def _measured(plan: Plan, stages: Sequence[Stage]) -> dict[Stage, float]:
    """Items that come out of stages for each that goes in, of those for which rows must be read."""
    # What a cache() keeps is known by the stages before it: none is put among them.
    cached = next((n for n, stage in enumerate(stages) if stage.role == "cache"), 0)
    measured = [n for n, stage in enumerate(stages) if n >= cached and is_measured(stage)]
    if not measured:
        return {}
    place = next((n for n in measured if cuts_by_length(stages[n])), measured[0])
    shuffled = (n + 1 for n, stage in enumerate(stages) if stage.role == "shuffle")
    place = max([place, *shuffled])  # what comes before a shuffle is made window by window
    most = SAMPLE_ROWS
    if any(stage.role == "batch" for stage in stages[:place]):
        most = max(MINIMUM_BATCHES, SAMPLE_ROWS // plan.chain.batch_size)
    chain: list[Stage] = []
    taken = _Count()
    counts: dict[Stage, tuple[_Count, _Count]] = {}
    for number, stage in enumerate(stages):
        if stage.role in ("take", "skip") and number > place:
            continue
        chain += [_First(taken, most), _Tally(taken)] if number == place else []
        fresh = stage.fresh()
        if number not in measured:
            chain.append(fresh)
            continue
        into, out = counts[stage] = _Count(), _Count()
        chain += [_Tally(into), fresh, _Tally(out)]
    chain += [_First(taken, most), _Tally(taken)] if place == len(stages) else []
    sample = Plan.of([*chain, _Uncollated()], plan.inputs.source, plan.inputs.schemas, quiet=True)
    walk = OnePass(sample, Topology(), Position(0, 0, 1))
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
    """Lets items pass until so many are counted after it."""

    keeps_rows = False

    count: _Count
    most: int

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        return _FirstRuns(below(at), self.count, self.most)


class _FirstRuns:
    def __init__(self, below: RunSource, count: _Count, most: int) -> None:
        self._below, self._count, self._most = below, count, most

    def next_run(self) -> Run:
        left = self._most - self._count.items
        if left <= 0:
            raise StopIteration
        run = self._below.next_run()
        return run if len(run) <= left else run.pick(np.arange(left, dtype=np.int64))


class _Uncollated(RunStage):
    """Makes nothing of items that are not made of yet: they are only counted."""

    def process(self, run: Run) -> Run:
        return run if run.items is not None else run.with_items([0] * len(run))
