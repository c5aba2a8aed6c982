"""How an epoch is cut: into spans, windows, micro-batches. Reads nothing but the source's listing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from trainpipes.errors import ConfigError
from trainpipes.order import IntArray, Layout, StreamLayout, even_cuts, permutation
from trainpipes.runtime.planning.arrange import Arranged, arrange
from trainpipes.runtime.planning.as_columns import AsColumns
from trainpipes.runtime.planning.schemas import Schemas
from trainpipes.runtime.reading.block_table import BlockTable
from trainpipes.runtime.reading.numbered import DRAWN_ROWS, RowOrder, drawn_rows
from trainpipes.runtime.reading.random_access import RandomAccessSource
from trainpipes.runtime.source import RowMixture, RowSource, RowStream, checked_source
from trainpipes.runtime.stage import Stage
from trainpipes.state import BatchSizes

__all__ = ["Cut"]

#: What a pipeline that does not shuffle reads at a time, in rows and in bytes.
READ_ROWS = 8192
READ_BYTES = 8 << 20
#: And what one that packs or batches by length reads of a stream.
STREAM_ROWS = 32
#: Of the memory that a shuffle may take, the windows' part; the rest is for files that are open and
#: batches that are made ahead.
WINDOW_SHARE = 2 / 3
#: Epochs between the passes of an endless pipeline, so that no two passes share an order.
PASS_EPOCHS = 1 << 20


class Cut(Arranged):
    """What the options of a chain and its source say of an epoch.

    Args:
        stages: the chain, first one first; the instances belong to the plan.
        source: rows already listed, if another plan of the same chain has; listed anew otherwise.
        schemas: of such a plan; its own otherwise.

    Attributes:
        schemas: of rows that are Python objects, by ``AsColumns.key``.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        source: RowSource | RowStream | None = None,
        schemas: Schemas | None = None,
    ) -> None:
        self.stages: list[Stage] = []
        for stage in stages:
            self.stages.append(stage.resolve(self.stages))
        vars(self).update(vars(arrange(self.stages)))
        self.schemas = schemas or Schemas()
        for stage in [*self.stages, *self.before, *self.after]:
            if stage.by_place or stage.asks_plan:
                vars(stage)["plan"] = self
            if isinstance(stage, AsColumns) and stage.schema is not None:
                self.schemas.give(stage.key, stage.schema)
        self._source = source
        if schemas is None:
            self._join_schemas()
        self.sizes: BatchSizes | None = None

    # What the options say

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else int(self.shard.num_shards)

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch; 1 where there are none, or where they are not counted."""
        return 1 if self.batch is None else int(self.batch.batch_size or 1)

    @property
    def drop_last(self) -> bool:
        return False if self.batch is None else bool(self.batch.drop_last)

    @property
    def times(self) -> int | None:
        """Epochs in a pass; None for no end."""
        if self.repeat is None:
            return None if getattr(self.stages[0], "endless", False) else 1
        times: int | None = self.repeat.times
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
            reader: Any = self.stages[len(self.file_stages)]
            opened = reader.open_files(self.file_stages) if self.file_stages else reader.open()
            self._source = checked_source(opened, reader)
            if self.drawn is not None and not isinstance(opened, RandomAccessSource):
                raise ConfigError(
                    f"{self.shuffle} reads rows by number, and {reader} opens a {type(opened).__name__}, "
                    "which cannot: leave random_access out, and shuffle within a buffer"
                )
            self._join_schemas()
        return self._source

    def _join_schemas(self) -> None:
        if isinstance(self._source, RowSource):
            for number, part in enumerate(self._source.plans):
                self.schemas.join(str(number), part.schemas)

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
        buffer = int(self.shuffle.buffer_size) if self.shuffle and buffered else None
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
            stride=self.shard is not None and self.shard.split == "stride",
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
        found = self._layouts.get(epoch)
        if found is None:
            source = self.source
            assert isinstance(source, RowSource)
            assert source.block_bytes is not None
            blocks = self.blocks
            starts, order = blocks.order((epoch,), lambda: self.block_order(epoch))
            used = blocks.lengths / np.maximum(1, source.lengths)
            sizes = source.block_bytes * used
            cuts = even_cuts(starts, sizes if order is None else sizes[order], layout.num_spans)
            found = self._layouts[epoch] = replace(layout, cuts=cuts)
            with suppress(KeyError):  # another thread has let it go
                while len(self._layouts) > 3:
                    self._layouts.popitem(last=False)
        return found

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
        wanted = self.shard is not None and self.shard.balance == "bytes"
        known = isinstance(self.source, RowSource) and self.source.block_bytes is not None
        return wanted and known and not self.whole

    def _window_limit(self, spans: int) -> int | None:
        assert isinstance(self.source, RowSource)
        row_bytes = self.window_row_bytes
        if not row_bytes or self.drawn is not None:
            return None
        if self.shuffle is None:
            return max(1, int(READ_BYTES // row_bytes))
        windows = int(self.shuffle.max_bytes) * WINDOW_SHARE
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
        return int(self.shuffle.seed)

    @property
    def drawn(self) -> RowOrder | None:
        """What says which rows an epoch has, row by row; None where windows are shuffled, or nothing."""
        return getattr(self.shuffle, "order", None)

    def block_order(self, epoch: int) -> IntArray | None:
        """Order of the blocks in an epoch; None for file order."""
        shuffle: Any = next((s for s in self.file_stages if s.role == "shuffle"), None)
        if shuffle is not None:
            return self._file_order(epoch, int(shuffle.seed))
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
