"""The rows of a shard, the stages that are opened above them at a cursor, and the memory that these take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trainpipes._internal.activity import each
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes._internal.pool import Pool
from trainpipes.columns.block import naming_bad_values
from trainpipes.columns.payload import is_wide
from trainpipes.columns.run import Cursors, Run, Unroll
from trainpipes.columns.tensor_rows import LazyBatches
from trainpipes.engine.calling import RUN_BYTES, called
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.span_windows import ListedMaker, NumberedMaker, StreamMaker
from trainpipes.engine.reading.windows import (
    AHEAD_PART,
    LEAST_HELD,
    MixedWindows,
    WindowedMixture,
    Windows,
)
from trainpipes.interfaces.held import check_shard
from trainpipes.interfaces.source import RandomAccessSource, RowSource, RowStream
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import RegroupStage, RunStage, WorkingStage
from trainpipes.order.layout import Layout, WindowKey

#: About how many rows a run has; whole batches where there are any.
RUN_ROWS = 2048
#: Fewest rows in a run.
LEAST_ROWS = 512
#: About how many rows the runs of all shards of a process have.
ALL_ROWS = 65_536


def rows_at_a_time(plan: Plan, most: int | None = None) -> int:
    """Rows that are made together; few where Python is called for each."""
    rows = RUN_ROWS if most is None else most
    if any(stage.traits.per_row for stage in plan.chain.after):
        counted = plan.chain.batch is not None and plan.chain.batch.traits.keeps_rows
        return plan.chain.batch_size if counted else max(plan.chain.batch_size, 8)
    row_bytes = plan.inputs.source.row_bytes if isinstance(plan.inputs.source, RowSource) else None
    if row_bytes:
        rows = min(rows, max(1, int(RUN_BYTES // row_bytes)))
    if plan.chain.batch is None:
        return max(1, rows // 2)
    return plan.chain.batch_size * max(1, rows // plan.chain.batch_size)


def has_workers(stages: Sequence[Stage]) -> bool:
    return any(isinstance(stage, WorkingStage) and stage.has_workers for stage in stages)


def last_stages(plan: Plan) -> tuple[RunStage, ...]:
    """The last stages of a shard, which make an item of each, in this thread."""
    found: list[RunStage] = []
    for stage in reversed(plan.chain.after):
        if not isinstance(stage, RunStage) or not stage.traits.keeps_rows or has_workers([stage]):
            break
        found.insert(0, stage)
    return tuple(found)


def stages_to_open(
    plan: Plan, stage_pool: Pool | None, last: Sequence[Stage] = (), shards: int = 1
) -> tuple[Stage, ...]:
    """The stages of a shard without the ``last`` ones; ``stage_pool`` runs those straight above the last
    user function. ``shards``: how many there are in this process.
    """
    stages = plan.chain.after[: len(plan.chain.after) - len(last)]
    if stage_pool is None or has_workers(stages):
        return stages if plan.workers is None else plan.workers.handed_out(plan, stages, shards)
    if plan.workers is not None:
        stages = plan.workers.handed_out(plan, stages, shards)
    called = (
        n + 1
        for n, s in enumerate(stages)
        if s._runs_user_code or s.traits.in_caller or has_workers([s])
    )
    first = max(called, default=0)
    above: list[RunStage] = []
    for stage in stages[first:]:
        if not isinstance(stage, RunStage):
            break
        above.append(stage)
    pooled = (PooledStages(tuple(above), stage_pool),) if above else ()
    return (*stages[:first], *pooled, *stages[first + len(above) :])


class PooledStages(WorkingStage):
    """Stages that a pool runs while the thread that iterates calls functions for the next rows."""

    stages: tuple[RunStage, ...]
    pool: Pool

    def submit_run(self, run: Run) -> Callable[[], Run]:
        return partial(self.pool.result, self.pool.submit(partial(self.process, run)))

    def process(self, run: Run) -> Run:
        for stage in self.stages:
            if len(run):
                with naming_bad_values(run.block, stage):
                    run = stage.process(run)
        return run

    def __repr__(self) -> str:
        return " and ".join(map(str, self.stages))


@dataclass(eq=False)
class Shards:
    """What the lanes of a process share.

    Args:
        count: shards of the process.
        most_rows: rows in a run, at most.
        is_own: of a consumer that passes over batches, of others or of skip(): whether a batch, by its
            number, is its own. The last stages run only for these.
    """

    plan: Plan
    windows: Windows | MixedWindows
    count: int = 1
    most_rows: int | None = None
    stage_pool: Pool | None = None
    is_own: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        # A run holds every window that it has rows of: no more than a part of a window.
        layout = self.plan.layouts.usual
        part = max(LEAST_ROWS, layout.window_rows // layout.sharers)
        most = min(RUN_ROWS, part, max(1, ALL_ROWS // self.count))
        rows = rows_at_a_time(self.plan, most)
        self.run_rows = rows if self.most_rows is None else min(rows, self.most_rows)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that a lane opens."""
        return stages_to_open(self.plan, self.stage_pool, self.last, self.count)

    @cached_property
    def last(self) -> tuple[RunStage, ...]:
        """Those that run for own batches alone."""
        return () if self.is_own is None else last_stages(self.plan)

    @cached_property
    def last_opened(self) -> tuple[Any, ...]:
        """The same, where workers run some of them."""
        workers = self.plan.workers
        return self.last if workers is None else workers.handed_out(self.plan, self.last)

    @property
    def begins_all(self) -> bool:
        """Whether workers run the last stages, so that whole runs are begun ahead."""
        return has_workers(self.last_opened)

    @cached_property
    def has_workers(self) -> bool:
        return has_workers(self.stages)


def own_items(
    shards: Shards, run: Run, numbers: Sequence[int], first: int, unroll: Unroll
) -> MutableSequence[Any]:
    """The items of a run, by the numbers of its batches; those before the first, and of other consumers, are
    not made.
    """
    if shards.is_own is None:
        return unroll(run)
    own = [k for k, m in enumerate(numbers) if k >= first and shards.is_own(m)]
    items: MutableSequence[Any] = [None] * len(numbers)
    if own:
        run = run.pick(np.array(own, dtype=np.int64))
        stages = shards.last_opened
        if has_workers(stages[-1:]):
            return _later(stages, run, unroll).among(own, len(numbers))
        for stage in stages:
            run = called(stage, stage.process, run)
        made = unroll(run)
        if isinstance(made, LazyBatches):
            return made.among(own, len(numbers))
        for place, k in enumerate(own):
            items[k] = made[place]
    return items


def _later(stages: Sequence[Any], run: Run, unroll: Unroll) -> LazyBatches:
    """The items of a run, which workers have begun with."""
    for stage in stages[:-1]:
        run = called(stage, stage.process, run)
    count, wait = len(run), stages[-1].submit_run(run)
    items_of_run: list[MutableSequence[Any]] = []

    def make(k: int) -> Any:
        if not items_of_run:
            items_of_run.append(unroll(wait()))
        return items_of_run[0][k]

    return LazyBatches(make, count)


def open_rows(
    shards: Shards,
    shard: int,
    rows: tuple[int, int],
    first_epoch: int,
    weights: int | None,
    state: dict[str, Any],
) -> Iterator[Run]:
    """The runs of a shard below all stages from a state on; ``rows``: most rows in a run, and in the first
    one; ``weights``: which of a mix's new weights hold.
    """
    plan, windows = shards.plan, shards.windows
    if isinstance(windows, MixedWindows):
        mixed = windows.open(shard, state, rows, shards.count, first_epoch, weights)
        return each(plan.chain.opener, mixed)
    runs = ShardRows(plan, windows, shard, rows, first_epoch, state, shards.count)
    return each(plan.chain.shuffle or plan.chain.opener, runs)


#: How many upcoming rows are named to a source that fetches rows singly, over all shards of a process.
ROWS_AHEAD = 128


class ShardRows(Iterator[Run]):
    """Runs of rows of a shard, below all stages. ``rows``: most rows in a run, and in the first run."""

    def __init__(
        self,
        plan: Plan,
        windows: Windows,
        shard: int,
        rows: tuple[int, int],
        first_epoch: int,
        state: dict[str, Any],
        shards: int = 1,
    ) -> None:
        self._later = max(1, ROWS_AHEAD // shards)
        self._plan = plan
        self._windows = windows
        self._shard = shard
        self._run_rows, self._next_rows = rows
        self._first_epoch = first_epoch
        epoch = int(state["epoch"])
        self._layout = layout = plan.layouts.of(epoch)
        slot = plan.counts.slot(shard, epoch, first_epoch)
        self._sharer = slot.sharer
        self._key = WindowKey(epoch, slot.span, int(state["window"]))
        self._row = int(state["row"])
        self._stream: dict[str, Any] = state.get("stream", {})
        # Sharers take turns at whole batches: a sharer may get none of a small epoch.
        shares_turn = isinstance(layout, Layout) and layout.whole
        self._endless = plan.chain.endless and not shares_turn
        begun = self._key.window > 0 or self._row > 0
        self._given = epoch if begun else epoch - 1  # the last epoch that gave something
        self._ended = False
        self._positions: IntArray | None = None  # of this shard in the window's order
        self._first = 0  # of these, the next

    def __next__(self) -> Run:
        while not self._ended:
            run = self._advance()
            if run is not None:
                self._given = self._key.epoch
                return run
        raise StopIteration

    def _advance(self) -> Run | None:
        if self._positions is None:  # pass over a window without a row of this shard
            planned = self._windows.planned(self._key)
            if planned is not None and planned > 0:
                self._take_positions(own := self._own(planned))
                if self._first == len(own):
                    self._next_window({})
                    return None
        window = self._windows.get(self._shard, self._key, self._stream, self._row)
        if window is None:
            self._end_epoch()
            return None
        if self._positions is None:
            self._take_positions(self._own(len(window)))
        assert self._positions is not None
        start, self._first = self._first, self._first + self._next_rows
        self._next_rows = self._run_rows
        positions = self._positions[start : self._first]
        if not len(positions):
            self._next_window(window.after)
            return None
        base, later = self._state(), self._positions[self._first : self._first + self._later]
        # After each row, the position of this shard's next row.
        if self._first < len(self._positions):
            rows = self._positions[start : self._first + 1]
            self._row = int(rows[-1])
            return Run(window.take(positions, later), Cursors.counting(base, rows))
        self._next_window(window.after)
        rows = np.append(positions, 0)
        which = np.zeros(len(rows), dtype=np.int64)
        which[-1] = 1
        return Run(window.take(positions, later), Cursors((base, self._state()), which, rows))

    def _take_positions(self, positions: IntArray) -> None:
        self._positions, self._first = positions, int(np.searchsorted(positions, self._row))

    def _own(self, rows: int) -> IntArray:
        epoch, span, window = self._key
        return self._layout.owned(span, self._sharer, window, rows, epoch - self._first_epoch)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._key.epoch, "window": self._key.window}
        if self._stream:
            state["stream"] = self._stream
        return state

    def _next_window(self, stream: dict[str, Any]) -> None:
        self._go_to(self._key._replace(window=self._key.window + 1), stream)

    def _go_to(self, key: WindowKey, stream: dict[str, Any]) -> None:
        self._key, self._row, self._stream, self._positions = key, 0, stream, None

    def _end_epoch(self) -> None:
        chain, epoch = self._plan.chain, self._key.epoch
        if not chain.rolling or not chain.goes_on(epoch, self._first_epoch):
            self._ended = True
            return
        if self._endless:
            check_shard(self._layout, self._shard, epoch, self._given)
        self._layout = self._plan.layouts.of(epoch + 1)
        self._go_to(WindowKey(epoch + 1, self._key.span, 0), self._windows.start(epoch + 1))


def open_windows(
    plan: Plan, pool: Pool | None = None, pass_number: int = 0, last: WindowKey | None = None
) -> Windows | MixedWindows:
    """The windows of a pass for the shards of a process, up to ``last``."""
    chain, source = plan.chain, plan.inputs.source
    if isinstance(source, WindowedMixture):
        return source.windows(plan, pool, pass_number)
    if isinstance(source, RowStream):
        return Windows(StreamMaker(plan, source))
    if isinstance(source, RandomAccessSource) and (
        chain.drawn is not None or (source.by_number and not chain.before)
    ):
        return Windows(NumberedMaker(plan, source))
    following = partial(_following, plan, chain.first_epoch(pass_number))
    readers = None if plan.reads_user_code else pool
    return Windows(ListedMaker(plan), readers, plan.layouts.held_bytes, following, last)


def _following(plan: Plan, first_epoch: int, shard: int, epoch: int) -> int | None:
    if not plan.chain.goes_on(epoch, first_epoch):
        return None
    return plan.counts.slot(shard, epoch + 1, first_epoch).span


# The memory that all this takes, by the layouts, before anything is read


#: How many times the bytes of its rows the runs of a shard take, the row group in hand and the next.
RUNS = 4


class Buffer(NamedTuple):
    """Rows that a stage after the dealing holds in a process, and the stage whose function made them."""

    stage: RegroupStage
    rows: int
    maker: Stage | None


class Memory:
    """Bytes of a process for the rows of a plan, where so many processes share the shards."""

    def __init__(self, plan: Plan, processes: int) -> None:
        self.plan, self.row_bytes = plan, plan.layouts.window_row_bytes
        self.parts = [Memory(part, processes) for part in plan.mixed.values()]
        #: That a process reads; where processes do not divide them, it reads some of others, too.
        self.shards = plan.chain.num_shards // math.gcd(plan.chain.num_shards, processes)

    @property
    def spans(self) -> int:
        return min(self.plan.layouts.usual.num_spans, self.shards)

    @property
    def window_rows(self) -> int | None:
        """Rows that a shuffle mixes with each other; None where there are no windows."""
        layout = self.plan.layouts.usual
        if not isinstance(layout, Layout) or not self.plan.inputs.epoch_rows:
            return None
        return max(layout.mixed_rows(span) for span in (0, layout.num_spans - 1))

    @property
    def _mixes(self) -> bool:
        chain = self.plan.chain
        return bool(self.window_rows) and chain.buffer is not None and chain.drawn is None

    @cached_property
    def windows(self) -> int:
        """Of windows of rows to be mixed."""
        nbytes, layout = sum(part.windows for part in self.parts), self.plan.layouts.usual
        if isinstance(layout, Layout) and self.row_bytes and self._mixes:
            largest = [_most_rows(layout, span) for span in range(layout.num_spans)]
            of_spans = math.ceil(self.row_bytes * sum(largest) / len(largest) * self.spans)
            most = max(LEAST_HELD * of_spans, self.plan.layouts.held_bytes)
            nbytes += min(_apart(layout) * of_spans, most)
        return nbytes

    @cached_property
    def buffers(self) -> list[Buffer]:
        chain, buffers = self.plan.chain, []
        most = -(-(self.plan.inputs.epoch_rows or 1 << 62) // chain.num_shards)
        batch_size, maker = 1, maker_of(chain.before)
        for stage in chain.after:
            if isinstance(stage, RegroupStage) and stage._held_items:
                rows = min(most, stage._held_items * batch_size) * self.shards
                buffers.append(Buffer(stage, rows, maker))
            batch_size = chain.batch_size if stage is chain.batch else batch_size
            maker = maker_of([stage]) or maker
        return buffers

    @property
    def held(self) -> int:
        """Of windows, and of buffers as far as sizes are known."""
        rows = sum(buffer.rows for buffer in self.buffers if buffer.maker is None)
        return self.windows + math.ceil(rows * (self.row_bytes or 0))

    def beside(self, threads: int) -> int:
        """Of windows that are read ahead, of data from servers, of decoders and of runs in hand."""
        nbytes = sum(part.beside(threads) for part in self.parts)
        plan, layouts, row_bytes = self.plan, self.plan.layouts, self.row_bytes
        windows = self.windows
        if plan.mixed or not row_bytes or not windows or not self._mixes:
            return nbytes
        source, blocks, of_span = plan.inputs.source, plan.inputs.blocks, windows / self.spans
        assert isinstance(source, RowSource)
        schema = source.schema
        sizes = row_bytes * blocks.lengths
        nbytes += source._decoding_bytes(sizes, self.spans, threads > 0, layouts.fetched_bytes)
        if isinstance(schema, pa.Schema) and not plan.chain.before and is_wide(schema):
            nbytes += math.ceil(of_span)  # batches are parts of a window, and rows of it still
        if threads and not plan.reads_user_code:
            ahead = max(of_span, layouts.held_bytes * AHEAD_PART)
            nbytes += math.ceil(min(windows, ahead, max(0, layouts.held_bytes - windows)))
        runs = min(blocks.rows, ALL_ROWS, self.shards * RUN_ROWS)
        return nbytes + math.ceil(RUNS * runs * row_bytes)


def _most_rows(layout: Layout, span: int) -> int:
    """Rows of a span's largest window: windows grow."""
    count = layout.num_windows(span)
    ends = (layout.window(span, n) for n in range(max(0, count - 3), count))
    return max((stop - start for start, stop in ends), default=0)


def _apart(layout: Layout) -> int:
    """Windows of a span in which its shards stand at once."""
    if layout.whole or layout.sharers == 1:
        return 1
    chunks = layout.mixed_rows(0) // layout.chunk_rows(0)
    return min(layout.num_windows(0), max(1, layout.sharers + 1 - chunks))


def maker_of(stages: Sequence[Stage]) -> Stage | None:
    """The last of some stages that makes values of a size that nobody knows."""
    makes = (s for s in reversed(stages) if s.traits.gives in ("objects", "found types"))
    return next(makes, None)
