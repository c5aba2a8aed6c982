"""From a record of stages to what will happen: which stage stands where, how the epoch is cut,
and how one shard's chain is put together. Reads nothing but the source's listing."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from trainpipes.errors import DataError
from trainpipes.order import (
    IntArray,
    Layout,
    StreamLayout,
    count_batches,
    even_cuts,
    permutation,
    slots_before,
)
from trainpipes.runtime.caching.cached import CachedBlocks
from trainpipes.runtime.planning.arrange import Arranged, arrange
from trainpipes.runtime.pool import Pool
from trainpipes.runtime.reading.block_table import BlockTable
from trainpipes.runtime.reading.numbered import (
    DRAWN_ROWS,
    NumberedWindows,
    RowOrder,
    buffered_numbers,
    drawn_numbers,
    drawn_rows,
)
from trainpipes.runtime.reading.random_access import RandomAccessSource
from trainpipes.runtime.reading.stream_windows import StreamWindows
from trainpipes.runtime.reading.windows import ListedWindows, Windows, chain_before
from trainpipes.runtime.source import Place, RowMixture, RowSource, RowStream
from trainpipes.runtime.stage import Stage
from trainpipes.state import BatchSizes

__all__ = ["Plan"]

#: What a pipeline that does not shuffle reads at a time, in rows and in bytes.
READ_ROWS = 8192
READ_BYTES = 8 << 20
#: And what one that packs or batches by length reads of a stream.
STREAM_ROWS = 32
#: Of the memory that a shuffle may take, the windows' part; the rest is for files that are open and
#: batches that are made ahead.
WINDOW_SHARE = 2 / 3
#: The part of windows and those read ahead together, and that of what is not shuffled, in bytes.
AHEAD_SHARE = 5 / 6
AHEAD_BYTES = 256 << 20
#: Epochs between the passes of an endless pipeline, so that no two passes share an order.
PASS_EPOCHS = 1 << 20


class Plan(Arranged):
    """What a chain of stages amounts to.

    Args:
        stages: the chain, first one first; the instances belong to the plan.
        source: rows already listed, if another plan of the same chain has; listed anew otherwise.
    """

    def __init__(
        self, stages: Sequence[Stage], source: RowSource | RowStream | None = None
    ) -> None:
        self.stages = list(stages)
        vars(self).update(vars(arrange(self.stages)))
        for number, stage in enumerate(self.stages):
            stage.bind(self.stages[:number])
            if hasattr(stage, "plan"):  # it asks where rows are from
                stage.plan = self
        self._source = source
        self.sizes: BatchSizes | None = None

    def resized(self, sizes: BatchSizes | None) -> Plan:
        """This plan for a pass in which the size of micro-batches was changed."""
        if sizes == self.sizes:
            return self
        plan = Plan(self.stages, self.source)
        plan.sizes = sizes
        return plan

    # What the options say

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else int(self.shard.options["num_shards"])

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch; 1 where there are none, or where they are not counted."""
        return 1 if self.batch is None else int(self.batch.options["batch_size"] or 1)

    @property
    def drop_last(self) -> bool:
        return False if self.batch is None else bool(self.batch.options["drop_last"])

    @property
    def times(self) -> int | None:
        """Epochs in a pass; None for no end."""
        if self.repeat is None:
            return None if getattr(self.stages[0], "endless", False) else 1
        times: int | None = self.repeat.options["times"]
        return times

    @property
    def endless(self) -> bool:
        return self.times is None

    def first_epoch(self, number: int) -> int:
        """The epoch with which pass ``number`` starts."""
        return number * (PASS_EPOCHS if self.times is None else self.times)

    # What the source says

    @cached_property
    def source(self) -> RowSource | RowStream:
        if self._source is None:
            first = self.stages[0]
            if first.role == "files":
                self._source = self.stages[len(self.file_stages)].open_source(self.file_stages)
            else:
                self._source = first.open_source()
        return self._source

    @cached_property
    def mixed(self) -> dict[str, Plan]:
        """The plans of the pipelines whose rows are mixed; none where rows are of one source."""
        if not isinstance(self.source, RowMixture):
            return {}
        plans: dict[str, Plan] = self.stages[0].plans(self)
        return plans

    @cached_property
    def blocks(self) -> BlockTable:
        source = self.source
        assert isinstance(source, RowSource)
        return BlockTable(source.lengths, self.skip_rows, self.stop_rows)

    @cached_property
    def epoch_rows(self) -> int | None:
        """Rows read in an epoch, if they are counted before they are read."""
        if isinstance(self.source, RowSource):
            rows = self.blocks.rows
            return rows if self.drawn is None else drawn_rows(self.drawn, rows)
        total = self.source.length
        if total is None:
            return None
        return max(
            0, (total if self.stop_rows is None else min(total, self.stop_rows)) - self.skip_rows
        )

    @property
    def rows_known(self) -> bool:
        return self.epoch_rows is not None

    @cached_property
    def rows_kept(self) -> bool:
        """Whether each row read is one that is batched."""
        rows = self.before + [s for s in self.after_rows if s.role not in ("take", "skip")]
        rows += [] if self.batch is None else [self.batch]
        return all(stage.keeps_rows for stage in rows) and not self._counted_rows

    @property
    def after_rows(self) -> list[Stage]:
        """Stages on rows after the dealing."""
        if self.batch is None:
            return self.after
        return self.after[: self.after.index(self.batch)]

    @property
    def _counted_rows(self) -> bool:
        return any(stage.role in ("take", "skip") for stage in self.after)

    @cached_property
    def whole(self) -> bool:
        """Whether rows are dealt in whole micro-batches."""
        if isinstance(self.source, RowMixture):  # its sources deal theirs
            return False
        stream = isinstance(self.source, RowStream)
        return self.rows_kept and not (self.rolling and stream and self.num_shards > 1)

    @cached_property
    def known(self) -> bool:
        """Whether the number of micro-batches in a pass is known, and none is missing."""
        ragged = self.rolling and not self.endless and self.layout.num_spans > 1
        keeps = all(stage.keeps_rows for stage in self.after)
        return self.rows_known and self.whole and keeps and not ragged

    @cached_property
    def layout(self) -> Layout | StreamLayout:
        buffered = self.shuffle is not None and self.drawn is None
        buffer = int(self.shuffle.options["buffer_size"]) if self.shuffle and buffered else None
        source = self.source
        if isinstance(source, RowStream):
            # Unshuffled, a window is what is read at a time, and no stream is read far ahead.
            rows = buffer if buffer is not None else max(self.batch_size, 1)
            if buffer is None and any(
                s.role in ("pack", "batch") and not s.keeps_rows for s in self.after
            ):
                rows = max(rows, STREAM_ROWS)  # micro-batches have other rows than these
            return StreamLayout(self.batch_size, self.num_shards, rows, self.whole)
        if self.drawn is not None:
            assert self.epoch_rows is not None
            return Layout(
                self.epoch_rows, self.batch_size, self.num_shards, DRAWN_ROWS, whole=self.whole,
                rolling=self.rolling, stride=True,
            )  # fmt: skip
        layout = Layout(
            rows=self.blocks.rows,
            batch_size=self.batch_size,
            num_shards=self.num_shards,
            window_rows=READ_ROWS if buffer is None else buffer,
            span_rows=1 if buffer is None else buffer,
            whole=self.whole,
            rolling=self.rolling,
            stride=self.shard is not None and self.shard.options["split"] == "stride",
        )
        return replace(layout, window_limit=self._window_limit(layout.num_spans))

    def layout_of(self, epoch: int) -> Layout | StreamLayout:
        """How one epoch is cut: as all are, but for spans of even bytes, whose cuts depend on the
        order of the blocks."""
        layout = self.layout
        if self.sizes is not None and self.whole and (epoch == self.sizes.epoch or self.rolling):
            return self._resized_layout(self.sizes)
        if not isinstance(layout, Layout) or not self._by_bytes:
            return layout
        if epoch not in self._layouts:
            source = self.source
            assert isinstance(source, RowSource)
            assert source.block_bytes is not None
            blocks = self.blocks
            starts, order = blocks.order((epoch,), lambda: self.block_order(epoch))
            used = blocks.lengths / np.maximum(1, source.lengths)
            sizes = source.block_bytes * used
            cuts = even_cuts(starts, sizes if order is None else sizes[order], layout.num_spans)
            self._layouts[epoch] = replace(layout, cuts=cuts)
            while len(self._layouts) > 3:
                self._layouts.popitem(last=False)
        return self._layouts[epoch]

    def _resized_layout(self, sizes: BatchSizes) -> Layout | StreamLayout:
        (_, first), *later = sizes.sizes
        layout = replace(self.layout, batch_size=first, changes=tuple(later))
        if isinstance(layout, Layout):  # windows stay where they were when the epoch began
            layout = replace(layout, window_limit=self._window_limit(layout.num_spans))
        return layout

    @cached_property
    def _layouts(self) -> OrderedDict[int, Layout]:
        return OrderedDict()

    @cached_property
    def _by_bytes(self) -> bool:
        wanted = self.shard is not None and self.shard.options["balance"] == "bytes"
        known = isinstance(self.source, RowSource) and self.source.block_bytes is not None
        return wanted and known and not self.whole

    def _window_limit(self, spans: int) -> int | None:
        assert isinstance(self.source, RowSource)
        row_bytes = self.window_row_bytes
        if not row_bytes or self.drawn is not None:
            return None
        if self.shuffle is None:
            return max(1, int(READ_BYTES // row_bytes))
        windows = int(self.shuffle.options["max_bytes"]) * WINDOW_SHARE
        return max(1, int(windows // (row_bytes * spans)))

    @property
    def window_row_bytes(self) -> float | None:
        """Bytes that a window holds of a row, as far as it can be told."""
        by_number = isinstance(self.source, RandomAccessSource) and self.source.holds_numbers
        if by_number and not self.before:
            return 8.0
        return self.source.row_bytes if isinstance(self.source, RowSource) else None

    @cached_property
    def seed(self) -> int | None:
        if self.shuffle is None or self.drawn is not None:
            return None
        return int(self.shuffle.options["seed"])

    @property
    def drawn(self) -> RowOrder | None:
        """What says which rows an epoch has, row by row; None where windows are shuffled, or nothing."""
        return getattr(self.shuffle, "order", None)

    def block_order(self, epoch: int) -> IntArray | None:
        """Order of the blocks in an epoch; None for file order."""
        for stage in self.file_stages:
            if stage.role == "shuffle":
                return self._file_order(epoch, int(stage.options["seed"]))
        if self.seed is None:
            return None
        return permutation(len(self.blocks.lengths), self.seed, "blocks", epoch)

    def _file_order(self, epoch: int, seed: int) -> IntArray:
        """Files in another order; row groups shuffled too where rows are."""
        files = np.asarray(self.source.file_of_block)  # type: ignore[union-attr]
        order = permutation(int(files.max(initial=-1)) + 1, seed, "files", epoch)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        if self.seed is not None:
            blocks = permutation(len(files), self.seed, "blocks", epoch)
            return blocks[np.argsort(rank[files[blocks]], kind="stable")]
        return np.argsort(rank[files], kind="stable").astype(np.int64, copy=False)

    def windows(self, pool: Pool | None = None, number: int = 0) -> Windows:
        """The windows of this plan, for the shards of one process.

        Args:
            pool: reads ahead.
            number: of the pass.
        """
        if isinstance(self.source, RowMixture):
            windows: Windows = self.source.windows(self, pool, number)
            return windows
        before = chain_before(self.before[self.cached or 0 :])
        if isinstance(self.source, RowStream):
            assert isinstance(self.layout, StreamLayout)
            cut = (self.skip_rows, self.stop_rows)
            return StreamWindows(self.source, self.layout.window_rows, cut, self.seed, before)
        assert isinstance(self.layout, Layout)
        cached = self.cached_blocks
        source = self.source
        if isinstance(source, RandomAccessSource) and self.drawn is not None:
            numbers = drawn_numbers(self.drawn, self.skip_rows, self.blocks.rows)
            repeats = self.shuffle is not None and self.shuffle.name != "shuffle"
            return NumberedWindows(source, self.layout_of, numbers, repeats)
        if isinstance(source, RandomAccessSource) and source.by_number and not self.before:
            numbers = buffered_numbers(source, self.blocks, self.block_order, self.seed)
            return NumberedWindows(source, self.layout_of, numbers)
        keeps = all(s.keeps_rows for s in self.before) or (cached is not None and cached.holes)
        return ListedWindows(
            self.source, self.blocks, self.layout_of, self.block_order, self.seed, before, keeps,
            None if self.reads_user_code else pool, self._ahead_bytes(), cached,
            partial(self._following, self.first_epoch(number)),
        )  # fmt: skip

    def _following(self, first_epoch: int, shard: int, epoch: int) -> int | None:
        """The span that a shard comes to after an epoch; None where the pass ends with it."""
        last = self.times is not None and epoch + 1 >= first_epoch + self.times
        if last or self.repeat is None:
            return None
        return self.slot(shard, epoch + 1, first_epoch) % self.layout_of(epoch + 1).num_spans

    @cached_property
    def cached_blocks(self) -> CachedBlocks | None:
        """What a cache() keeps; None where nothing is kept."""
        if self.cache is None or self.cached is None:
            return None
        assert isinstance(self.source, RowSource)
        below = self.before[: self.cached]
        reader = len(self.file_stages) if self.stages[0].role == "files" else 0
        return CachedBlocks(
            self.source, self.blocks.firsts, [self.stages[reader], *below], self.cache,
            chain_before(below), holes=self.shuffle is None and not all(s.keeps_rows for s in below),
            listed=self.stages[0].options.get("urls"),
        )  # fmt: skip

    def _ahead_bytes(self) -> int:
        """What windows may take in memory, with those that are read ahead."""
        if self.shuffle is None:
            return AHEAD_BYTES
        return int(self.shuffle.options["max_bytes"] * AHEAD_SHARE)

    # Who may call what

    @cached_property
    def reads_user_code(self) -> bool:
        """Whether to read a window calls functions that are not ours."""
        return any(stage.runs_user_code for stage in [self.stages[0], *self.before])

    @cached_property
    def runs_user_code(self) -> bool:
        """Whether a function that is not ours is called for rows or batches."""
        return self.reads_user_code or any(stage.runs_user_code for stage in self.after)

    def place_of(self, row: int) -> Place:
        """Where a row, numbered in file order, stands."""
        if isinstance(self.source, RowSource):
            return self.blocks.locate(self.source, row)
        if isinstance(self.source, RowMixture):
            return self.source.place_of(self, row)
        return Place(row=row)

    # Counts

    @cached_property
    def epoch_batches(self) -> int:
        """Micro-batches of an epoch over all ranks, where counts are known."""
        assert self.epoch_rows is not None
        return self._delivered(count_batches(self.epoch_rows, self.batch_size, self.drop_last))

    def _delivered(self, total: int) -> int:
        stop = total if self.stop_batches is None else min(total, self.stop_batches)
        return max(0, stop - self.skip_batches)

    def epoch_start(self, epoch: int, first_epoch: int) -> int:
        """Number of an epoch's first micro-batch in its pass, where counts are known and epochs are
        batched one by one."""
        sizes = self.sizes
        if sizes is None:
            return (epoch - first_epoch) * self.epoch_batches
        if epoch <= sizes.epoch:
            return sizes.start
        layout = self._resized_layout(sizes)
        if isinstance(layout, Layout):
            total = layout.count(self.drop_last)
        else:
            total = self._as_layout(layout).count(self.drop_last)
        after = sizes.start + self._delivered(total)
        return after + (epoch - sizes.epoch - 1) * self.epoch_batches

    def _as_layout(self, layout: StreamLayout) -> Layout:
        """A counted stream as one span of rows."""
        assert self.epoch_rows is not None
        return Layout(
            self.epoch_rows, layout.batch_size, 1, layout.window_rows, changes=layout.changes
        )

    @cached_property
    def pass_batches(self) -> float:
        """Micro-batches of a pass over all ranks, where counts are known; inf for no end."""
        assert self.epoch_rows is not None
        if self.times is None:
            return math.inf if self.epoch_batches or (self.rolling and self.epoch_rows) else 0
        if self.rolling:
            layout = Layout(
                self.epoch_rows * self.times, self.batch_size, 1, 1,
                changes=() if self.sizes is None else self.sizes.sizes[1:],
            )  # fmt: skip
            if self.sizes is not None:
                layout = replace(layout, batch_size=self.sizes.sizes[0][1])
            return layout.count(self.drop_last)
        if self.sizes is None:
            return self.epoch_batches * self.times
        first_epoch = self.sizes.epoch // self.times * self.times
        return self.epoch_start(first_epoch + self.times, first_epoch)

    def last_slot(self, world_size: int, origin: int = 0) -> float:
        """The micro-batch after the last one of a pass; inf where that is not known. From ``origin``
        on, where they (re)started, several ranks deliver the same number each, so that the last few
        may be left out."""
        if self.known:
            total = self.pass_batches
            if self.endless and not total:
                raise DataError(
                    "repeat() goes on for ever only where an epoch gives something, and one of "
                    f"{self.stages[0]} gives nothing: there are no rows, or drop_last, take() or "
                    "skip() leave none"
                )
            if math.isinf(total) or self.ragged:
                return total
            return origin + max(0, int(total) - origin) // world_size * world_size
        if self.stop_batches is not None and self.repeat is None:
            return max(0, self.stop_batches - self.skip_batches)
        return math.inf

    @property
    def ragged(self) -> bool:
        """Whether ranks may end at different steps, and all is delivered."""
        return self.shard is not None and self.shard.options["tail"] == "ragged"

    @property
    def ends_unevenly(self) -> bool:
        """Whether shards end at steps that are not known beforehand."""
        return not self.known and not self.endless

    # One shard

    def slot(self, shard: int, epoch: int, first_epoch: int) -> int:
        """Which of the epoch's own S sequences a shard takes: epochs of K micro-batches follow
        each other in m, and K need not be a multiple of S."""
        shift = self.skip_batches
        if self.repeat is not None and not self.rolling and self.known:
            shift -= self.epoch_start(epoch, first_epoch)
        return (shard + shift) % self.num_shards

    def chunks(self, slot: int) -> tuple[int, int | None]:
        """First of a slot's micro-batches that an epoch delivers, and the one after its last."""
        skipped = slots_before(self.skip_batches, slot, self.num_shards)
        if self.stop_batches is None:
            return skipped, None
        return skipped, max(skipped, slots_before(self.stop_batches, slot, self.num_shards))

    def start(self, slot: int, epoch: int, skip: int) -> dict[str, Any]:
        """The state of a chain at the first row of an epoch, or after ``skip`` micro-batches of
        the slot where that follows by arithmetic (``seekable``): just the state in which reading them
        would leave it."""
        if not skip:
            return {"epoch": epoch, "window": 0, "row": 0}
        layout = self.layout_of(epoch)
        assert isinstance(layout, Layout)
        span, sharer = slot % layout.num_spans, slot // layout.num_spans
        start, stop = layout.span(span)
        length = stop - start
        if not length:
            return {"epoch": epoch, "window": 0, "row": 0}
        chunk = skip * layout.sharers + sharer
        upcoming = layout.chunk_row(span, chunk)
        last = layout.chunk_row(span, chunk - layout.sharers + 1) - 1
        if not self.rolling:
            last = min(last, length - 1)
        elif self.times is not None:
            last = min(last, length * self.times - 1)
        joint = last // length * length  # rows of the epochs before, when rolling
        window = layout.window_of(span, last - joint)
        begin, end = layout.window(span, window)
        epoch += last // length
        if upcoming - joint < end:
            return {"epoch": epoch, "window": window, "row": upcoming - joint - begin}
        return {"epoch": epoch, "window": window + 1, "row": 0}

    def cursor_at(self, m: int, shard: int, number: int, onward: bool = False) -> dict[str, Any]:
        """The cursor of a shard after ``m`` micro-batches of a pass over all ranks, by arithmetic
        (``seekable`` only): where its last micro-batch left it, or ``onward`` in the epoch of ``m``."""
        delivered = slots_before(m, shard, self.num_shards)
        if not onward:
            m = shard + self.num_shards * (delivered - 1) + 1 if delivered else 0
        first = epoch = self.first_epoch(number)
        passed = m + self.skip_batches
        if self.repeat is not None and not self.rolling and self.epoch_batches:
            epoch = self.epoch_of(m if onward else max(0, m - 1), first)
            passed -= self.epoch_start(epoch, first)
        slot = self.slot(shard, epoch, first)
        at = slots_before(passed, slot, self.num_shards)
        return {**self.start(slot, epoch, at), "delivered": delivered, "at": at}

    def epoch_of(self, m: int, first_epoch: int) -> int:
        """The epoch in which micro-batch ``m`` of a pass lies; the last one for those after it."""
        known = first_epoch if self.sizes is None else self.sizes.epoch
        after = self.epoch_start(known + 1, first_epoch)
        epoch = known if m < after else known + 1 + (m - after) // max(1, self.epoch_batches)
        return epoch if self.times is None else min(epoch, first_epoch + self.times - 1)

    @property
    def seekable(self) -> bool:
        """Whether a micro-batch's first row follows from its number."""
        return self.known and isinstance(self.layout, Layout)

    # Identity

    @cached_property
    def identity(self) -> str:
        """What a state must agree on with the pipeline that loads it, as JSON. Stages that may stand
        before or after the shuffle are named after it, wherever they are written."""
        return self._identity(moved=True)

    def identity_for(self, state: Any) -> str:
        """The identity for a state to be compared with: older ones have stages as they were written."""
        written = self._identity(moved=False)
        saved = state.get("pipeline") if isinstance(state, Mapping) else None
        return written if saved == written else self.identity

    def _identity(self, moved: bool) -> str:
        shaping = [s for s in self.stages if s.role not in ("place", "files", "cache")]
        places = {
            "reader": 0,
            "source": 0,
            "shard": 1,
        }  # where it stands in a chain changes nothing
        shaping.sort(key=lambda s: places.get(s.role, 2))
        if moved and self.shuffle in shaping:
            before = shaping[: shaping.index(self.shuffle)]
            last = max((n for n, s in enumerate(before) if not s.keeps_rows), default=-1)
            later = [s for s in before[last + 1 :] if s.role == "rows"]
            shaping = [s for s in shaping if s not in later]
            after = shaping.index(self.shuffle) + 1
            shaping[after:after] = later
        stages = [stage.identity() for stage in shaping]
        return json.dumps(
            {"data": self.source.fingerprint(), "stages": stages}, separators=(",", ":")
        )
