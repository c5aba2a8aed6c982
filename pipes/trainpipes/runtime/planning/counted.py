"""How many micro-batches there are, and where each of them begins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

from trainpipes.errors import DataError
from trainpipes.order import Layout, StreamLayout, count_batches, slots_before
from trainpipes.runtime.planning.cut import Cut
from trainpipes.state import BatchSizes, Position

__all__ = ["Counted"]


class Counted(Cut):
    """Counts and places by arithmetic, where they are known before anything is read."""

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
        after = sizes.start + self._delivered(self._changed_count(sizes))
        return after + (epoch - sizes.epoch - 1) * self.epoch_batches

    def _changed_count(self, sizes: BatchSizes) -> int:
        """Micro-batches of the epoch in which their size was changed."""
        layout = self._resized_layout(sizes)
        if isinstance(layout, StreamLayout):
            layout = self._as_layout(layout)
        return layout.count(self.drop_last)

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
        return self.shard is not None and self.shard.tail == "ragged"

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

    def chunks(self, slot: int, epoch: int) -> tuple[int, int | None]:
        """First of a slot's micro-batches that an epoch delivers, and the one after its last."""
        skipped = slots_before(self.skip_batches, slot, self.num_shards)
        stop = self.stop_batches
        if self.sizes is not None and epoch == self.sizes.epoch and self.known and not self.rolling:
            # Spans do not end together: what some have left belongs to no micro-batch.
            count = self._changed_count(self.sizes)
            stop = count if stop is None else min(stop, count)
        if stop is None:
            return skipped, None
        return skipped, max(skipped, slots_before(stop, slot, self.num_shards))

    def start(self, slot: int, epoch: int, skip: int) -> dict[str, Any]:
        """The state of a chain at the first row of an epoch, or after ``skip`` micro-batches of
        the slot where that follows by arithmetic (``seekable``): at the first row of the next one."""
        layout = self.layout_of(epoch)
        span, sharer = slot % layout.num_spans, slot // layout.num_spans
        if not skip or not isinstance(layout, Layout) or not layout.num_windows(span):
            return {"epoch": epoch, "window": 0, "row": 0}
        start, stop = layout.span(span)
        row = layout.chunk_row(span, skip * layout.sharers + sharer)
        if self.rolling:  # over the epochs' joints
            passed = row // (stop - start)
            passed = passed if self.times is None else min(passed, self.times - 1)
            epoch, row = epoch + passed, row - passed * (stop - start)
        row = min(row, stop - start)
        window = layout.window_of(span, row)
        return {"epoch": epoch, "window": window, "row": row - layout.window(span, window)[0]}

    def cursor_at(self, m: int, shard: int, number: int) -> dict[str, Any]:
        """The cursor of a shard after ``m`` micro-batches of a pass over all ranks, by arithmetic
        (``seekable`` only): in the epoch of ``m``."""
        first = epoch = self.first_epoch(number)
        passed = m + self.skip_batches
        if self.repeat is not None and not self.rolling and self.epoch_batches:
            epoch = self.epoch_of(m, first)
            passed -= self.epoch_start(epoch, first)
        slot = self.slot(shard, epoch, first)
        at = slots_before(passed, slot, self.num_shards)
        delivered = slots_before(m, shard, self.num_shards)
        return {**self.start(slot, epoch, at), "delivered": delivered, "at": at}

    def cursor(self, position: Position, shard: int) -> dict[str, Any] | None:
        """Where a shard stands at a position; None for the start of the pass."""
        if self.seekable:
            return self.cursor_at(position.m, shard, position.epoch)
        return position.cursors.get(shard)

    def epoch_of(self, m: int, first_epoch: int) -> int:
        """The epoch in which micro-batch ``m`` of a pass lies; the last one for those after it."""
        known = first_epoch if self.sizes is None else self.sizes.epoch
        after = self.epoch_start(known + 1, first_epoch)
        epoch = known if m < after else known + 1 + (m - after) // max(1, self.epoch_batches)
        return epoch if self.times is None else min(epoch, first_epoch + self.times - 1)

    @property
    def seekable(self) -> bool:
        """Whether a micro-batch's first row follows from its number: then the pipeline is *counted*, and
        its states have no cursors."""
        return self.known and isinstance(self.layout, Layout)
