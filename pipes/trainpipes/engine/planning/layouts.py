"""How each epoch is cut, and in which order its blocks come."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.mixture import RowMixture
from trainpipes.interfaces.source import RandomAccessSource, RowSource, RowStream
from trainpipes.interfaces.stage_kinds import ShuffleStage, cuts_by_length
from trainpipes.order.layout import Layout, StreamLayout, WindowKey, segments
from trainpipes.order.permutation import permutation
from trainpipes.state.format import BatchSizes

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
        windows = self.chain.shuffle.max_bytes * WINDOW_SHARE
        return max(1, int(windows // (row_bytes * spans)))

    @property
    def held_bytes(self) -> int:
        """Of all windows of a process, where some are read ahead."""
        shuffle = self.chain.shuffle
        return HELD_BYTES if shuffle is None else int(shuffle.max_bytes * HELD_SHARE)

    @property
    def fetched_bytes(self) -> float:
        """Most that a process fetches ahead from servers, if the user sets no limit."""
        shuffle = self.chain.shuffle
        return math.inf if shuffle is None else shuffle.max_bytes * FETCHED_SHARE

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
