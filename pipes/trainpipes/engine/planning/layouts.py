"""How each epoch is cut, and in which order its blocks come; how many batches there are, and where each
begins: arithmetic, where counts are known.

Batches of a pass are numbered m = 0, 1, ...; batch m belongs to shard ``m % S``. Each epoch numbers its
own batches i = 0, 1, ... anew, with those that ``skip`` leaves out: ``i = m + shift``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes.engine.planning.chain import Chain, RowMixture
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import DataError
from trainpipes.interfaces.source import RandomAccessSource, RowSource, RowStream
from trainpipes.interfaces.stage_kinds import BalanceStage, ShuffleStage, cuts_by_length, first_of
from trainpipes.order.layout import (
    Layout,
    StreamLayout,
    Topology,
    WindowKey,
    count_batches,
    segments,
    slots_before,
)
from trainpipes.order.permutation import permutation
from trainpipes.state.format import BatchSizes, Position

#: Rows and bytes of a window without a shuffle.
READ_ROWS = 8192
READ_BYTES = 8 << 20
#: Positions in a window of a sampler's order: 512 KiB of row numbers.
DRAWN_ROWS = 1 << 16
#: Rows of a stream's window without a shuffle, if the pipeline packs or batches by length.
STREAM_ROWS = 32
#: The parts of a shuffle's memory: the windows' own, which the order depends on; the same and windows that
#: are read ahead; and bytes that are fetched from servers.
WINDOW_SHARE, HELD_SHARE, FETCHED_SHARE = 2 / 3, 5 / 6, 1 / 6
#: Memory for windows without a shuffle, those read ahead included.
HELD_BYTES = 256 << 20


@dataclass(eq=False)
class Layouts:
    """The layout of each epoch.

    Args:
        sizes: of batches, in an epoch in which their size was changed.
        lanes: see ``Plan.in_lanes``.
    """

    inputs: Inputs
    chain: Chain
    sizes: BatchSizes | None = None
    lanes: int = 1

    @cached_property
    def whole(self) -> bool:
        source, chain = self.inputs.source, self.chain
        if isinstance(source, RowMixture):  # its sources deal theirs
            return False
        stream = isinstance(source, RowStream)
        return chain.keeps_rows and not (chain.rolling and stream and chain.num_shards > 1)

    @cached_property
    def usual(self) -> Layout | StreamLayout:
        chain, source = self.chain, self.inputs.source
        size, shards, buffer = chain.batch_size, chain.num_shards, chain.buffer
        if isinstance(source, RowStream):
            # Unshuffled, a window is the part that is read at a time, and no stream is read far ahead.
            rows = size if buffer is None else buffer
            if buffer is None and any(map(cuts_by_length, chain.after)):
                rows = max(rows, STREAM_ROWS)  # batches have other rows than these
            return StreamLayout(size, shards, rows, self.whole, shuffled=buffer is not None)
        drawn = chain.drawn is not None
        window = (DRAWN_ROWS if drawn else READ_ROWS) if buffer is None else buffer
        stride = drawn or (chain.shard is not None and chain.shard.split == "stride")
        layout = Layout(
            self.inputs.epoch_rows or 0, size, shards, window, 1 if buffer is None else buffer,
            whole=self.whole, rolling=chain.rolling, stride=stride, lanes=self.lanes,
            grows=buffer is not None,
        )  # fmt: skip
        return replace(layout, window_limit=self._window_limit(layout.num_spans))

    def of(self, epoch: int) -> Layout | StreamLayout:
        """The layout of an epoch; where the batch size was changed, it differs from ``usual``."""
        changed = self.sizes and self.whole and (epoch == self.sizes.epoch or self.chain.rolling)
        return self.changed if changed else self.usual

    @cached_property
    def changed(self) -> Layout | StreamLayout:
        usual = self.usual
        if self.sizes is None or not isinstance(
            usual, Layout
        ):  # streams of several shards don't change
            return usual
        (_, first), *later = self.sizes.sizes
        # Windows stay where they were when the epoch began.
        layout = replace(usual, batch_size=first, changes=tuple(later))
        return replace(layout, window_limit=self._window_limit(layout.num_spans))

    def _window_limit(self, spans: int) -> int | None:
        row_bytes = self.window_row_bytes
        if not row_bytes or self.chain.drawn is not None:
            return None
        if self.chain.shuffle is None:
            return max(1, int(READ_BYTES // row_bytes))
        windows = self.chain.shuffle.memory * WINDOW_SHARE
        return max(1, int(windows // (row_bytes * spans)))

    @property
    def held_bytes(self) -> int:
        """Of all windows of a process, where some are read ahead."""
        shuffle = self.chain.shuffle
        return HELD_BYTES if shuffle is None else int(shuffle.memory * HELD_SHARE)

    @property
    def fetched_bytes(self) -> float:
        """Most that a process fetches ahead from servers, if the user sets no limit."""
        shuffle = self.chain.shuffle
        return math.inf if shuffle is None else shuffle.memory * FETCHED_SHARE

    @property
    def window_row_bytes(self) -> float | None:
        source = self.inputs.source
        by_number = isinstance(source, RandomAccessSource) and source.holds_numbers
        if by_number and not self.chain.before:
            return 8.0
        return source.row_bytes if isinstance(source, RowSource) else None

    # The rows of a window

    def places(self, key: WindowKey) -> range:
        """Places of a window's rows in its epoch's order; none past the span's last window."""
        layout = self.of(key.epoch)
        assert isinstance(layout, Layout)
        if key.window >= layout.num_windows(key.span):
            return range(0)
        first, (start, stop) = layout.span(key.span)[0], layout.window(key.span, key.window)
        return range(first + start, first + stop)

    def turn(self, key: WindowKey) -> float:
        """The epoch, and the share of it that is given before a window's first rows."""
        layout = self.of(key.epoch)
        assert isinstance(layout, Layout)
        start, stop = layout.span(key.span)
        first = layout.window(key.span, key.window)[0]
        within = layout.batch_size * key.span / layout.num_spans
        return key.epoch + (first + within) / (stop - start + layout.batch_size)

    def stretches(self, key: WindowKey, first: int = 0) -> list[tuple[int, int, int]]:
        """The blocks of a window's rows from ``first`` on, each with its first row and the row
        after its last.
        """
        blocks, places = self.inputs.blocks, self.places(key)
        starts, order = blocks.order(key.epoch, self.block_order)
        parts = segments(starts, order, places.start + first, places.stop)
        begins = blocks.begins
        return [(b, int(begins[b]) + low, int(begins[b]) + high) for b, low, high in parts]

    def row_order(self, key: WindowKey, rows: int) -> IntArray | None:
        """The order in which a window's rows come out; None for as they are."""
        seed = self.chain.seed
        return None if seed is None else permutation(rows, seed, "window", *key)

    # The order of blocks

    def block_order(self, epoch: int) -> IntArray | None:
        """None for file order."""
        seed, files = self.chain.seed, self.inputs.listed.file_of_block
        for stage in self.chain.file_stages:
            if isinstance(stage, ShuffleStage) and files is not None:
                return self._file_order(epoch, stage.seed, files)
        if seed is None:
            return None
        return permutation(len(self.inputs.blocks.lengths), seed, "blocks", epoch)

    def _file_order(self, epoch: int, file_seed: int, files: IntArray) -> IntArray:
        """Shuffles files; row groups too where rows are shuffled."""
        order = permutation(int(files.max(initial=-1)) + 1, file_seed, "files", epoch)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        if self.chain.seed is not None:
            blocks = permutation(len(files), self.chain.seed, "blocks", epoch)
            return blocks[np.argsort(rank[files[blocks]], kind="stable")]
        return np.argsort(rank[files], kind="stable").astype(np.int64, copy=False)


class Slot(NamedTuple):
    """One of an epoch's S sequences of batches: batch i of ``epoch`` is in slot ``number = i % S``.

    Args:
        span: the range of rows that its batches are of.
        sharer: which of the slots of that span it is.
    """

    epoch: int
    number: int
    span: int
    sharer: int


class Counts:
    """How many batches an epoch and a pass have, and where a shard stands at batch m."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.chain = layouts.chain
        #: Shards times lanes: batch m belongs to ``m % num_shards``.
        self.num_shards = layouts.chain.num_shards * layouts.lanes

    # What is known

    @cached_property
    def known(self) -> bool:
        chain, layouts = self.chain, self.layouts
        if layouts.inputs.epoch_rows is None or not layouts.whole:
            return False
        ragged = chain.rolling and not chain.endless and layouts.usual.num_spans > 1
        return not ragged and all(s.traits.keeps_rows or s in chain.groups for s in chain.after)

    @cached_property
    def counted(self) -> bool:
        """Whether the first row of a batch follows from its number: the number of rows is known,
        and all stages keep them one to one and in order, in batches of a fixed size.

        Then a state needs only m; in all other pipelines it keeps each shard's position.
        """
        moved = self.chain.groups or first_of(self.chain.after, ShuffleStage | BalanceStage)
        return self.known and isinstance(self.layouts.usual, Layout) and not moved

    @property
    def ends_unevenly(self) -> bool:
        return not self.known and not self.chain.endless

    @cached_property
    def limits_items(self) -> bool:
        """Whether ``take`` and ``skip`` count items as they come, since shards end at unknown batches.

        Else they are limits of m.
        """
        chain = self.chain
        limited = chain.skip_batches > 0 or chain.stop_batches is not None
        return limited and self.ends_unevenly and chain.num_shards > 1 and chain.repeat is None

    def topology(
        self,
        rank: int,
        world_size: int,
        worker: int = 0,
        num_workers: int = 1,
        members: tuple[int, ...] | None = None,
    ) -> Topology:
        """A consumer. One that does not end with the others must see their items to count them."""
        apart = num_workers > 1 or (world_size > 1 and self.chain.uneven)
        reads_all = apart and self.limits_items
        return Topology(rank, world_size, worker, num_workers, members, reads_all)

    # Counts, where they are known

    @property
    def _epoch_rows(self) -> int:
        return self.layouts.inputs.epoch_rows or 0

    @cached_property
    def batches_in_epoch(self) -> int:
        chain = self.chain
        return self._delivered(count_batches(self._epoch_rows, chain.batch_size, chain.drop_last))

    def _delivered(self, total: int) -> int:
        stop = self.chain.stop_batches
        return self._grouped(
            max(0, (total if stop is None else min(total, stop)) - self.chain.skip_batches)
        )

    def _grouped(self, batches: int) -> int:
        """How many lists of batches the shards make, each of its own batches."""
        for stage in self.chain.groups:
            per_shard, more = divmod(batches, self.num_shards)  # so many shards have a batch more
            each = [
                count_batches(n, stage.batch_size or 1, stage.drop_last)
                for n in (per_shard, per_shard + 1)
            ]
            batches = each[0] * (self.num_shards - more) + each[1] * more
        return batches

    @cached_property
    def batches_in_pass(self) -> float:
        """Over all ranks; inf for no end."""
        chain, sizes = self.chain, self.layouts.sizes
        if chain.times is None:
            return math.inf if self.batches_in_epoch or (chain.rolling and self._epoch_rows) else 0
        if chain.rolling:
            rows = self._epoch_rows * chain.times
            layout = Layout(rows, chain.batch_size, 1, 1)
            if sizes is not None:
                layout = replace(layout, batch_size=sizes.sizes[0][1], changes=sizes.sizes[1:])
            return self._grouped(layout.count(chain.drop_last))
        first_epoch = 0 if sizes is None else sizes.epoch // chain.times * chain.times
        return self.epoch_start(first_epoch + chain.times, first_epoch)

    @cached_property
    def by_epoch(self) -> bool:
        """Whether a pass has several epochs, each batched by itself."""
        chain = self.chain
        return chain.repeat is not None and not chain.rolling and self.known

    def epoch_start(self, epoch: int, first_epoch: int) -> int:
        known, start, after = self._known_epoch(first_epoch)
        return start if epoch <= known else after + (epoch - known - 1) * self.batches_in_epoch

    def epoch_of(self, m: int, first_epoch: int) -> int:
        """The epoch of batch ``m`` of a pass."""
        if not self.by_epoch:
            return first_epoch
        times, (epoch, _, after) = self.chain.times, self._known_epoch(first_epoch)
        if m >= after and self.batches_in_epoch:
            epoch += 1 + (m - after) // self.batches_in_epoch
        return epoch if times is None else min(epoch, first_epoch + times - 1)

    def _known_epoch(self, first_epoch: int) -> tuple[int, int, int]:
        """An epoch whose batches can be numbered; its first batch, and the end."""
        sizes = self.layouts.sizes
        if sizes is None:
            return first_epoch, 0, self.batches_in_epoch
        return sizes.epoch, sizes.start, sizes.start + self._delivered(self._changed_batches)

    @cached_property
    def _changed_batches(self) -> int:
        layout, sizes = self.layouts.changed, self.layouts.sizes
        if isinstance(layout, StreamLayout) and sizes is not None:  # as a single span of rows
            (_, size), *later = sizes.sizes
            layout = Layout(self._epoch_rows, size, 1, 1, changes=tuple(later))
        assert isinstance(layout, Layout)
        return layout.count(self.chain.drop_last)

    def end(self, step: int, origin: int = 0) -> float:
        """The batch after the last of a pass, which has whole steps of so many; inf where unknown."""
        chain, total = self.chain, math.inf
        if self.known:
            total = self.batches_in_pass
            if chain.endless and not total:
                raise DataError(
                    f"repeat() would wait forever, since an epoch of {chain.stages[0]} gives no batch; check "
                    "that it has rows, and leave out drop_last, take() and skip()"
                )
        elif chain.stop_batches is not None and chain.repeat is None and not self.limits_items:
            total = max(0, chain.stop_batches - chain.skip_batches)
        if math.isinf(total) or chain.uneven or self.ends_unevenly:
            return total
        return origin + max(0, int(total) - origin) // step * step

    # One shard

    def shift(self, epoch: int, first_epoch: int) -> int:
        """The number of a batch in its epoch less that in its pass."""
        start = self.epoch_start(epoch, first_epoch) if self.by_epoch else 0
        return (0 if self.limits_items else self.chain.skip_batches) - start

    def slot(self, shard: int, epoch: int, first_epoch: int) -> Slot:
        """The slot of an epoch that a shard takes; an epoch's batches need not be a multiple of S."""
        number = (shard + self.shift(epoch, first_epoch)) % self.num_shards
        spans = self.layouts.of(epoch).num_spans
        return Slot(epoch, number, number % spans, number // spans)

    def chunks(self, slot: Slot) -> tuple[int, int | None]:
        """First of a slot's batches that an epoch delivers, and the end."""
        chain, sizes, epoch = self.chain, self.layouts.sizes, slot.epoch
        if self.limits_items:
            return 0, None
        skipped = slots_before(chain.skip_batches, slot.number, self.num_shards)
        stop = chain.stop_batches
        if sizes is not None and epoch == sizes.epoch and self.known and not chain.rolling:
            # Spans do not end together: leftover rows of some belong to no batch.
            count = self._changed_batches
            stop = count if stop is None else min(stop, count)
        if stop is None:
            return skipped, None
        return skipped, max(skipped, slots_before(stop, slot.number, self.num_shards))

    def start(self, slot: Slot, skip: int) -> dict[str, Any]:
        """Where a slot's rows begin in an epoch; in a counted pipeline after ``skip`` of its
        batches."""
        epoch, _, span, sharer = slot
        layout = self.layouts.of(epoch)
        if not skip or not isinstance(layout, Layout) or not layout.num_windows(span):
            return {"epoch": epoch, "window": 0, "row": 0}
        start, stop = layout.span(span)
        row = layout.chunk_row(span, skip * layout.sharers + sharer)
        if self.chain.rolling:  # over the epochs' joints
            passed, times = row // (stop - start), self.chain.times
            passed = passed if times is None else min(passed, times - 1)
            epoch, row = epoch + passed, row - passed * (stop - start)
        row = min(row, stop - start)
        window = layout.window_of(span, row)
        return {"epoch": epoch, "window": window, "row": row - layout.window(span, window)[0]}

    def cursor_at(self, m: int, shard: int, pass_number: int) -> dict[str, Any]:
        first, shards = self.chain.first_epoch(pass_number), self.num_shards
        epoch = self.epoch_of(m, first)
        slot = self.slot(shard, epoch, first)
        at = slots_before(m + self.shift(epoch, first), slot.number, shards)
        delivered = slots_before(m, shard, shards)
        return {**self.start(slot, at), "delivered": delivered, "at": at}

    def cursor(self, position: Position, shard: int) -> dict[str, Any] | None:
        if self.counted:
            return self.cursor_at(position.m, shard, position.pass_number)
        return position.cursors.get(shard)
