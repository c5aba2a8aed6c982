"""How many items an epoch has: exact, estimated from some rows, or why neither."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np

from trainpipes._internal.progress import Progress
from trainpipes.columns.run import Run
from trainpipes.engine.iterating.consumer import Consumer
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.lane import Lane
from trainpipes.engine.shards.shard_rows import Shards, open_windows
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import RowSource, RowStream
from trainpipes.interfaces.stage import Stage, aside
from trainpipes.order.layout import Topology, count_batches, slots_before
from trainpipes.stages.order import Take
from trainpipes.state.format import BatchSizes, Position

#: Rows that are read, and batches at least where batches are filtered.
SAMPLE_ROWS = 2048
MINIMUM_BATCHES = 64
#: Rows of a shard up to which the item that it ends with counts.
SHARD_ROWS = 256


def length_of(iteration: IterationState, step: int = 0) -> int:
    length = exact_length(iteration.plan, *iteration.ranks(), step)
    if length is None:
        raise TypeError(f"this pipeline has no len(): {no_length(iteration.plan)}")
    return length


def exact_length(plan: Plan, rank: int, world_size: int, step: int = 0) -> int | None:
    """Items that a rank gets in an epoch, of whole steps; None if not known in advance."""
    if not plan.counts.known or plan.chain.endless:
        return None
    return slots_before(int(plan.counts.end(step or world_size)), rank, world_size)


def batches_left(
    plan: Plan, done: int = 0, step: int = 0, sizes: BatchSizes | None = None
) -> int | None:
    """Batches that all ranks have yet to get in an epoch, of whole steps; None if not known in advance.

    Args:
        sizes: where the size of batches changed in this epoch.
    """
    if not plan.counts.known or plan.chain.endless:
        return None
    left = int(plan.resized(sizes).counts.batches_in_pass) - done
    return left - left % step if step else left


def ends_apart(plan: Plan, world_size: int) -> bool:
    """Whether ranks may get different numbers of batches in an epoch."""
    if not plan.chain.uneven or plan.chain.has_no_end or world_size == 1:
        return False
    whole = batches_left(plan)
    return whole is None or whole % world_size > 0


def estimated_length(plan: Plan, rank: int, world_size: int) -> int:
    """Items that a rank gets in an epoch, about."""
    exact = exact_length(plan, rank, world_size)
    if exact is not None:
        return exact
    takes = plan.chain.endless and not plan.chain.has_no_end
    if plan.chain.has_no_end or (plan.inputs.epoch_rows is None and not takes):
        raise TypeError(f"the length of this pipeline cannot be estimated: {no_length(plan)}")
    items = expected_items(plan) if takes else _of_whole_shards(plan)
    if items is None:
        items = expected_items(plan, _measured(plan))
    return round(items or 0) // world_size


def no_length(plan: Plan) -> str:
    """Why the length is not known, and the way out."""
    if plan.grows:
        return "each epoch reads what stands there when it begins (refresh), and may have more"
    if plan.chain.has_no_end and plan.chain.repeat is None:
        return 'mix(stop="repeat") has no end; count steps, or give another stop'
    if plan.chain.has_no_end:
        return "repeat() has no end; count steps, or give repeat(times=...)"
    if plan.inputs.epoch_rows is None and not plan.chain.endless:
        return f"the rows of {plan.chain.stages[0]} are not counted; list(pipe) counts them where they end"
    way_out = "is known only at the end; use Loader(pipe).estimate_len()"
    cutting = next((s for s in plan.chain.after if kinds.cuts_by_length(s)), None)
    if cutting is not None:
        return f"how many items {cutting} makes {way_out}"
    dropping = [str(s) for s in plan.chain.before + plan.chain.after if not s.traits.keeps_rows]
    if not dropping and plan.chain.repeat is not None:
        return (
            f"how many items repeat() makes of {plan.chain.num_shards} shards that go on {way_out}"
        )
    reason = dropping[0] if dropping else "take() or skip() on the way"
    return f"how many rows {reason} lets through {way_out}"


def ends_short(plan: Plan) -> bool:
    """Whether each shard ends with a batch of its own, which may be short."""
    chain = plan.chain
    sized = chain.batch is not None and chain.batch.batch_size is not None
    goes_on = chain.rolling or chain.opener.traits.endless
    return sized and chain.num_shards > 1 and not plan.layouts.whole and not goes_on


def left_open(plan: Plan) -> str:
    """What each shard has open where an epoch of its rows ends, and goes on into the next."""
    chain = plan.chain
    if plan.counts.known or not (chain.rolling or chain.mixes):
        return ""
    packs = kinds.first_of(chain.after, kinds.PackingStage) is not None
    opens = ["row of pack()"] * packs + ["batch"] * (chain.batch is not None)
    return " and one open ".join(opens)


def rows_of(source: RowSource | RowStream) -> int | None:
    """Rows of a source; None where they are not counted in advance."""
    return int(source.lengths.sum()) if isinstance(source, RowSource) else source.length


def expected_items(plan: Plan, ratios: Mapping[Stage, float] | None = None) -> float | None:
    """Items of an epoch over all ranks, about; None where that takes reading rows.

    Args:
        plan: of a pass that has an end.
        ratios: items that come out of a stage for each that goes in, where rows were read to say so.
    """
    chain, source = plan.chain, plan.inputs.source
    rows = rows_of(source)
    if ratios is not None and isinstance(source, RowSource) and source.unread is not None:
        rows = int(source.lengths[~source.unread].sum())
    count: float | None = None
    exact_items: float | None = None  # items, as far as they are exact
    exact, several = True, False  # several: a stage may make more rows than it gets
    # Whether shards end apart, after their last epoch; where rows are kept, shards of one span end alike.
    shares = plan.layouts.whole and plan.layouts.usual.num_spans < chain.num_shards
    rolls = chain.rolling and chain.num_shards > 1 and not shares
    for stage in chain.stages:
        options = stage.options
        if stage is chain.opener:
            count = None if ratios is None and options.get("filter") is not None else rows
            count = math.inf if stage.traits.endless else count
        elif count is None or (count == math.inf and not isinstance(stage, kinds.CountingStage)):
            continue
        elif isinstance(stage, kinds.RepeatStage):
            count *= options["times"]
        elif isinstance(stage, kinds.CountingStage):
            n = int(stage.count)
            count = max(0, count - n) if stage.skips else min(count, n)
        elif isinstance(stage, kinds.ShuffleStage) and chain.drawn is not None and exact_items:
            count *= (plan.inputs.epoch_rows or 0) / exact_items
        elif not stage.traits.keeps_rows:
            share = stage.traits.share
            if share is None and ratios is not None:
                share = ratios.get(stage, 1.0)
            if share is None:
                return None
            count, exact = count * share, False
        elif isinstance(stage, kinds.BatchingStage) and (rolls or (ends_short(plan) and not exact)):
            count = _batches(plan, count, several)
        elif isinstance(stage, kinds.BatchingStage):
            dropping = bool(options.get("drop_last"))
            count = count_batches(round(count), options["batch_size"], dropping)
        several = several or isinstance(stage, kinds.PackingStage)
        exact_items = count if exact else exact_items
    return count


def _batches(plan: Plan, rows: float, several: bool) -> float:
    """Batches where each shard ends with its own, by how many rows shards are likely to have."""
    chain, mean = plan.chain, rows / plan.chain.num_shards
    epochs = (chain.times or 1) if chain.rolling else 1
    share = rows / epochs / max(1, plan.inputs.epoch_rows or 0)
    # Shards that read the same span share its rows evenly.
    sharers = chain.num_shards // plan.layouts.usual.num_spans
    spread = math.sqrt(mean / sharers * (1 if several else max(0.0, 1 - share)))
    of_shards = np.random.default_rng(0).normal(mean, spread, 10_000).round().clip(0)
    whole, rest = np.divmod(of_shards, chain.batch_size)
    batches = whole if chain.drop_last else whole + (rest > 0)
    return chain.num_shards * float(batches.mean())


def _of_whole_shards(plan: Plan) -> float | None:
    """Items of an epoch by those of some shards, where shards are small and a stage cuts by length: each ends
    with an item of its own. None elsewhere.
    """
    chain, rows = plan.chain, plan.inputs.epoch_rows or 0
    shards, cuts = chain.num_shards, any(map(kinds.cuts_by_length, chain.after))
    if shards == 1 or not cuts or not rows or rows > SHARD_ROWS * shards or chain.rolling:
        return None
    stages = kinds.without(chain.stages, kinds.RepeatStage | kinds.DeviceStage)
    whole = Plan.of(
        [s._fresh() for s in stages], plan.inputs.source, plan.inputs.schemas, quiet=True
    )
    windows = open_windows(whole)
    sampled = Shards(whole, windows)
    count = min(shards, 2 * SAMPLE_ROWS * shards // rows)
    sample = [number * shards // count for number in range(count)]  # of all parts of the data
    with closing(windows):
        items = sum(
            last - first for shard in sample for first, last in _runs(Lane(sampled, shard, 0))
        )
    of_epoch = items / count * shards
    if chain.stop_batches is not None:
        of_epoch = min(of_epoch, chain.stop_batches)
    return max(0.0, of_epoch - chain.skip_batches) * (chain.times or 1)


def _runs(lane: Lane) -> Iterator[tuple[int, int]]:
    """Of each run of a lane the number of its first item, and of the item after its last."""
    while (upcoming := lane.next_run()) is not None:
        yield upcoming[1:]


def _is_measured(stage: Stage) -> bool:
    return (
        not stage.traits.keeps_rows
        and stage.traits.share is None
        and not isinstance(stage, kinds.CountingStage)
    )


def _measured(plan: Plan) -> dict[Stage, float]:
    """Items that come out of a stage for each that goes in, where rows must be read."""
    moving = kinds.ShardStage | kinds.RepeatStage | kinds.DeviceStage
    stages = kinds.without(plan.chain.stages, moving)
    # What a cache() keeps is known by the stages before it: none is put among them.
    cached = next((n for n, stage in enumerate(stages) if isinstance(stage, kinds.CacheStage)), 0)
    measured = [n for n, stage in enumerate(stages) if n >= cached and _is_measured(stage)]
    if not measured:
        return {}
    place = next((n for n in measured if kinds.cuts_by_length(stages[n])), measured[0])
    shuffled = (n + 1 for n, stage in enumerate(stages) if isinstance(stage, kinds.ShuffleStage))
    place = max([place, *shuffled])  # rows before a shuffle are made window by window
    most = SAMPLE_ROWS
    if kinds.first_of(stages[:place], kinds.BatchingStage):
        most = max(MINIMUM_BATCHES, SAMPLE_ROWS // plan.chain.batch_size)
    chain: list[Stage] = []
    counts: Counter[tuple[Stage, str]] = Counter()
    for number, stage in enumerate(stages):
        if isinstance(stage, kinds.CountingStage) and number > place:
            continue
        tallies = [_Tally((stage, way), counts) for way in ("in", "out") if number in measured]
        chain += [Take(most)] if number == place else []
        chain += [*tallies[:1], stage._fresh(), *tallies[1:]]
    chain += [Take(most)] if place == len(stages) else []
    sample = Plan.of([*chain, Numbered()], plan.inputs.source, plan.inputs.schemas, quiet=True)
    next(walk(sample), None)  # finds the types that functions make, by rows that pass here, too
    counts.clear()
    for _ in walk(sample):
        pass
    measured_stages = (stages[number] for number in measured)
    return {stage: counts[stage, "out"] / max(1, counts[stage, "in"]) for stage in measured_stages}


def walk(plan: Plan, epoch: int = 0) -> Iterator[Any]:
    """The items of an epoch of a plan, over all ranks."""
    items = Consumer(plan, Topology(), Position(epoch, 0, plan.chain.num_shards))
    with closing(items):
        yield from made_aside(items)
        items.finish()


def made_aside(items: Iterator[Any]) -> Iterator[Any]:
    """The items; their rows are counted, and neither logged nor listed."""
    while True:
        with aside(counts=True):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class _Tally(kinds.RunStage, keeps_rows=False):
    """Counts the items that come to a place of a chain."""

    key: tuple[Stage, str]
    counts: Counter[tuple[Stage, str]]

    def process(self, run: Run) -> Run:
        self.counts[self.key] += len(run)
        return run


def look_through(plan: Plan, job: str) -> int:
    """Have all rows of an epoch pass its stages, of which ``Numbered`` is the last. How many there were."""
    rows = 0
    with Progress(job, plan.inputs.epoch_rows, "rows") as progress:
        for ids in walk(plan):
            progress.advance(len(ids))
            rows += len(ids)
    return rows


class Numbered(kinds.RunStage, holds_data=True):
    """Makes of each item the numbers of its rows."""

    def process(self, run: Run) -> Run:
        ids = run.block.ids
        bounds = range(len(ids) + 1) if run.bounds is None else run.bounds.tolist()
        items: list[Any] = [ids[a:b] for a, b in pairwise(bounds)]
        return run.with_items(items)
