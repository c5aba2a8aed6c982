"""In which batches the rows of a plan come, by their numbers: by arithmetic where batches are counted, else
by going through them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from trainpipes._internal.checks import IntArray
from trainpipes._internal.progress import Progress, counted
from trainpipes.columns.block import Pieces
from trainpipes.columns.run import Run
from trainpipes.engine.iterating.consumer import Consumer, RunOptions
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import Place, RandomAccessSource, RowSource
from trainpipes.interfaces.stage import Stage, aside
from trainpipes.look.lengths import exact_length
from trainpipes.look.row_numbers import NONE, NumberedRows
from trainpipes.order.layout import Layout, Topology, WindowKey
from trainpipes.order.permutation import permutation
from trainpipes.sources.mixture import Mixture
from trainpipes.stages.filter import Drawn, DrawnOnce
from trainpipes.state.format import Position

#: What of a source says which rows it has, names them, or shapes their order.
SHAPE = (
    "lengths", "unread", "is_filtered", "file_of_block", "named_by", "joined_inputs", "holds_numbers",
    "row_bytes", "block_bytes",
)  # fmt: skip


class Steps(NamedTuple):
    """Where rows come in a pass: which row (of ``NumberedRows.ids``), the number of the batch over all ranks,
    the batch's number among those of its rank, the row's place in it, and its epoch: int64 ``[found]`` each.
    """

    which: IntArray
    m: IntArray
    step: IntArray
    place: IntArray
    epoch: IntArray

    @staticmethod
    def join(parts: Sequence[Steps]) -> Steps:
        return Steps(*(np.concatenate([NONE, *column]) for column in zip(*parts, strict=True)))


EMPTY = Steps(NONE, NONE, NONE, NONE, NONE)


def steps_of(
    plan: Plan, position: Position, rows: NumberedRows, world_size: int, steps: int | None
) -> Steps:
    """Where rows come in a pass that begins at a position, in its first ``steps`` or all."""
    plan = plan.reweighed(position.reweighed).resized(position.sizes, 0)
    if not len(rows.ids):
        return EMPTY
    if plan.counted:
        found = _by_arithmetic(plan, position.pass_number, rows, world_size, steps)
    else:
        found = _by_going_through(plan, position, rows, world_size, steps)
    order = np.lexsort((found.place, found.m))
    return Steps(*(column[order] for column in found))


# Where batches are counted


def _by_arithmetic(
    plan: Plan, pass_number: int, rows: NumberedRows, world_size: int, steps: int | None
) -> Steps:
    counts, chain, first = plan.counts, plan.chain, plan.chain.first_epoch(pass_number)
    end = counts.end(world_size)
    end = end if steps is None else min(end, steps * world_size)
    parts = [EMPTY]
    for epoch in count(first):
        layout = plan.layouts.of(epoch)
        assert isinstance(layout, Layout)
        start = _first_batch(plan, layout, epoch, first)
        if start >= end or (chain.times is not None and epoch >= first + chain.times):
            break
        stop = end if chain.rolling else min(end, counts.epoch_start(epoch + 1, first))
        for which, span, row in _places(plan, layout, epoch, rows):
            if chain.rolling:  # over the epochs' joints
                begin, after = layout.span(span)
                row = row + (epoch - first) * (after - begin)
            chunk, index = layout.chunks_of(span, row)
            m = chunk * layout.num_spans + span - counts.shift(epoch, first)
            in_range = np.flatnonzero((m >= (0 if chain.rolling else start)) & (m < stop))
            m = m[in_range]
            of_epoch = np.full(len(m), epoch, dtype=np.int64)
            parts.append(Steps(which[in_range], m, m // world_size, index[in_range], of_epoch))
    return Steps.join(parts)


def _first_batch(plan: Plan, layout: Layout, epoch: int, first: int) -> int:
    """A batch of the pass that no row of an epoch comes before."""
    if not plan.chain.rolling:
        return plan.counts.epoch_start(epoch, first)
    spans = [layout.span(span) for span in range(layout.num_spans)]
    passed = (epoch - first) * min(stop - start for start, stop in spans)
    size = max([layout.batch_size, *(size for _, size in layout.changes)])
    return passed // size * layout.num_spans - plan.counts.shift(epoch, first)


def _places(
    plan: Plan, layout: Layout, epoch: int, rows: NumberedRows
) -> Iterator[tuple[IntArray, int, IntArray]]:
    """Which rows come in each span of an epoch, and as the how manieth there."""
    if plan.chain.drawn is not None:
        yield from _drawn(plan, layout, epoch, rows)
        return
    blocks = plan.inputs.blocks
    starts, order = blocks.order(epoch, plan.layouts.block_order)
    block = np.searchsorted(blocks.firsts, rows.ids, side="right") - 1
    block = np.minimum(block, len(blocks.lengths) - 1)
    row = rows.ids - blocks.firsts[block] - blocks.begins[block]
    which = np.flatnonzero((row >= 0) & (row < blocks.lengths[block]))
    block, row = block[which], row[which]
    if order is None:
        row += starts[block]
    else:
        place_of_block = np.empty_like(order)
        place_of_block[order] = np.arange(len(order))
        row += starts[place_of_block[block]]
    edges = np.array([layout.span(span)[0] for span in range(layout.num_spans)], dtype=np.int64)
    spans = np.searchsorted(edges, row, side="right") - 1
    with Progress("looking for rows in shuffle windows", len(which), "rows") as progress:
        for span in np.unique(spans).tolist():
            here = np.flatnonzero(spans == span)
            in_span = row[here] - edges[span]
            if plan.chain.seed is not None:
                windows = layout.windows_of(span, in_span)
                sorted_by_window = np.argsort(windows, kind="stable")
                here, in_span = here[sorted_by_window], in_span[sorted_by_window]
                cuts = np.flatnonzero(np.diff(windows[sorted_by_window])) + 1
                for part in np.split(np.arange(len(here)), cuts):
                    in_span[part] = _shuffled(plan, layout, epoch, span, in_span[part])
                    progress.advance(len(part))
            yield which[here], span, in_span


def _shuffled(plan: Plan, layout: Layout, epoch: int, span: int, rows: IntArray) -> IntArray:
    """At which rows of a span those of a window come out."""
    window = layout.window_of(span, int(rows[0]))
    start, stop = layout.window(span, window)
    seed = plan.chain.seed
    assert seed is not None
    order = permutation(stop - start, seed, "window", *WindowKey(epoch, span, window))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return start + place[rows - start]


def _drawn(
    plan: Plan, layout: Layout, epoch: int, rows: NumberedRows
) -> Iterator[tuple[IntArray, int, IntArray]]:
    """The same of an order that is drawn by number: each of its rows is looked at."""
    chain, total = plan.chain, plan.inputs.blocks.rows
    assert chain.drawn is not None
    for span in range(layout.num_spans):
        begin, _ = layout.span(span)
        windows = range(layout.num_windows(span))
        for window in counted(windows, "looking for rows in the order", len(windows), "windows"):
            start, stop = layout.window(span, window)
            drawn = chain.drawn.index(epoch, begin + start, begin + stop, total)
            at, which = rows.among(chain.skip_rows + np.asarray(drawn, dtype=np.int64))
            if len(at):
                yield which, span, at + start


# Where they are not


def _by_going_through(
    plan: Plan, position: Position, rows: NumberedRows, world_size: int, steps: int | None
) -> Steps:
    """Batches are made without stages that do not change which rows are in them."""
    uneven = plan.chain.uneven or world_size == 1
    options = RunOptions(unroll=lambda run: _hits(run, rows), step=0 if uneven else world_size)
    done: dict[int, int] = defaultdict(int)  # batches of each rank
    parts: list[Steps] = [EMPTY]
    total = exact_length(plan, 0, 1) if steps is None else steps * world_size
    items = Consumer(_light(plan), Topology(), position, options=options)
    with aside(), closing(items):
        for hits in counted(items, "looking for rows in the batches", total, "batches"):
            assert items.m is not None
            rank = items.m % world_size
            if steps is not None and done[rank] >= steps:
                if all(done[rank] >= steps for rank in range(world_size)):
                    break
                continue
            if hits is not None:
                which, index, epoch = hits
                m, step = np.full_like(which, items.m), np.full_like(which, done[rank])
                parts.append(Steps(which, m, step, index, epoch))
            done[rank] += 1
    found = Steps.join(parts)
    if uneven:
        return found
    whole = min(done[rank] for rank in range(world_size))  # ranks end at the same step
    return Steps(*(column[found.step < whole] for column in found))


def _hits(run: Run, rows: NumberedRows) -> list[Any]:
    """In place of the items of a run: which rows are in each, at which place of it, and of which epoch."""
    block = run.block
    pieces = block.made_of or Pieces.whole(block.ids, block.epoch)
    at, which = rows.among(pieces.ids)
    items: list[Any] = [None] * len(run)
    row = np.searchsorted(pieces.bounds, at, side="right") - 1
    starts = np.arange(len(block) + 1) if run.bounds is None else run.bounds
    item = np.searchsorted(starts, row, side="right") - 1
    for n in np.unique(item).tolist():
        hits = np.flatnonzero(item == n)
        items[n] = which[hits], row[hits] - starts[n], pieces.epochs[at[hits]]
    return items


def _light(plan: Plan) -> Plan:
    """A plan with the same rows in the same batches that makes as little of them as it can."""
    chain, inputs, steps = plan.chain, plan.inputs, plan.chain.steps
    reads, source = _reads(plan), inputs.source
    last = max((n for n, stage in enumerate(steps) if _asks_content(stage)), default=-1)
    if isinstance(source, Mixture) and source.by_tokens:
        last = len(steps)
    needless = {
        stage for n, stage in enumerate(steps)
        if n > last and isinstance(stage, kinds.RunStage) and not isinstance(stage, Drawn)
    }  # fmt: skip
    before, after = (
        tuple(stage for stage in part if stage not in needless)
        for part in (chain.before, chain.after)
    )
    chain = replace(chain, before=before, after=after, device_stages=())
    if not reads:
        chain = replace(chain, cache=None, cached=None)
        source = Unread(source) if isinstance(source, RowSource) else source
    light = Inputs(chain, source, inputs.schemas, inputs.name)
    light.keeps_pieces, light.above = True, inputs.above
    parts = {} if reads else {name: _light(part) for name, part in plan.mixed.items()}
    others = {"layouts": plan.layouts, "counts": plan.counts, **({"mixed": parts} if parts else {})}
    return Plan(light, True, plan.new_weights)._with(**others)


def _reads(plan: Plan) -> bool:
    """Whether the rows' values decide which batch they are in."""
    source = plan.inputs.source
    if isinstance(source, Mixture):
        of_source = source.by_tokens or any(map(_reads, plan.mixed.values()))
    else:
        of_source = not isinstance(source, RowSource)
    return of_source or any(map(_asks_content, plan.chain.steps))


def _asks_content(stage: Stage) -> bool:
    if isinstance(stage, DrawnOnce):
        return stage.options["key"] is not None
    if isinstance(stage, kinds.ShuffleStage | kinds.CountingStage):
        return False
    if isinstance(stage, kinds.RunStage | kinds.BatchingStage):
        return not stage.traits.keeps_rows
    return True


class Unread(RandomAccessSource):
    """A source with the rows of another, of which nothing is read."""

    by_number = True

    def __init__(self, source: RowSource) -> None:
        self._source: Any = source
        vars(self).update({name: getattr(self._source, name, False) for name in SHAPE})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, block: int, start: int, stop: int) -> list[Any]:
        return [{}] * (stop - start)

    def take(self, index: IntArray) -> list[Any]:
        return [{}] * len(index)

    def place(self, block: int, row: int) -> Place:
        place: Place = self._source.place(block, row)
        return place

    def fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = self._source.fingerprint()
        return fingerprint
