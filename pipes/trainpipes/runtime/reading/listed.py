"""Windows of a source that lists its blocks: read whole, and put through what stands before the shuffle.

Owns a reader for each span, which reads on where the span's last window ended, or the span before; a span's
windows are read by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainpipes.caching.block_cache import BlockCache
from trainpipes.kinds.source import LooksAhead, Reader, RowSource, read_rows
from trainpipes.order import IntArray
from trainpipes.rows.bad_text import naming_bad_text
from trainpipes.rows.block import Block
from trainpipes.rows.payload import join_payloads
from trainpipes.rows.run import Cursors, Run
from trainpipes.runtime.interrupts import InterruptibleLock
from trainpipes.runtime.reading.window_cuts import WindowCuts
from trainpipes.runtime.reading.windows import Window, WindowKey, WindowLoader

__all__ = ["Before", "ListedLoader", "chain_before"]

#: What stands before the shuffle: rows in, rows out.
Before = Callable[[Block], Block]


class _Place:
    """Where a span is read.

    Attributes:
        at: the block and the row that its reader would read next.
    """

    def __init__(self) -> None:
        self.lock = InterruptibleLock()
        self.reader: Reader | None = None
        self.at = -1, 0


class ListedLoader(WindowLoader):
    """Reads windows of listed blocks.

    Args:
        source: where rows are read.
        cuts: which ones a window has.
        before: the stages before the shuffle.
        keeps_rows: whether those keep all rows.
        cached: the source's blocks as a cache keeps them; None to read the source.
    """

    def __init__(
        self,
        source: RowSource,
        cuts: WindowCuts,
        before: Before,
        keeps_rows: bool,
        cached: BlockCache | None = None,
    ) -> None:
        self._source = source
        self._cuts = cuts
        self._before = before
        self._keeps_rows = keeps_rows
        self._cached = cached
        self._places: dict[int, _Place] = {}  # of each span

    def planned(self, key: WindowKey) -> int | None:
        rows = len(self._cuts.places(key))
        return rows if self._keeps_rows or not rows else None

    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        if not self._cuts.places(key):
            return None
        place = self._places.setdefault(key.span, _Place())
        if self._cuts.seed is not None or not self._keeps_rows:
            first = 0  # which row comes out where is known when all are read
        return Window(self.planned(key), partial(self._read, key, place, first), first=first)

    def close(self) -> None:
        for place in self._places.values():
            with place.lock:
                if place.reader is not None:
                    place.reader.close()

    def _read(self, key: WindowKey, place: _Place, first: int) -> tuple[Block, IntArray | None]:
        wanted = self._cuts.stretches(key, first)
        with place.lock:
            reader = self._reader(place, wanted[0][:2])
            if self._cached is not None:
                rows = self._cached.read(wanted, reader).of_epoch(key.epoch)
            else:
                if isinstance(reader, LooksAhead):
                    reader.expect([block for block, _, _ in wanted])
                parts = (read_rows(self._source, reader, *stretch) for stretch in wanted)
                data = join_payloads(parts, len(self._cuts.places(key)) - first)
                rows = Block(data, self._cuts.ids(wanted), epoch=key.epoch)
            place.at = wanted[-1][0], wanted[-1][2]
            rows = self._before(rows)
        return rows, self._cuts.order(key, len(rows))

    def _reader(self, place: _Place, at: tuple[int, int]) -> Reader:
        """What reads a window that begins at a row of a block. Where another span has just been read up to
        there, that span's reader goes on: any other would decode the block from its start once more."""
        if place.at != at:
            for other in list(self._places.values()):
                if other.at == at and other.lock.acquire(blocking=False):
                    place.reader, other.reader = other.reader, place.reader
                    place.at, other.at = other.at, place.at
                    other.lock.release()
                    break
        if place.reader is None:
            place.reader = self._source.reader()
        return place.reader


def chain_before(stages: Sequence[Any]) -> Before:
    """The stages before the shuffle as one function on a window's rows."""

    def apply(block: Block) -> Block:
        for stage in stages:
            run = Run(block, Cursors.counting({}, np.arange(len(block) + 1, dtype=np.int64)))
            with naming_bad_text(block, stage):
                block = stage.process(run).block
        return block

    return apply
