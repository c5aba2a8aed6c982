"""Blocks as the stages below a ``cache()`` have made them: computed once, kept on disk, memory-mapped.

An entry is a row group, or a part of a large one, so that what is computed at a time stays small. It
is known by a digest of its data and of the stages. Whoever needs one that is not there makes it; one
process at a time does, and others meanwhile make what else they need.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.arrays import to_arrow, to_numpy
from trainpipes.cache import LOCK, entry_path, folder, make_room, schema_path
from trainpipes.errors import ConfigError
from trainpipes.order import IntArray
from trainpipes.runtime.caching import sealed
from trainpipes.runtime.caching.address import digest_of, stages_key
from trainpipes.runtime.caching.file_lock import FileLock
from trainpipes.runtime.caching.holes import with_holes
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.rows.joined import joined_tables
from trainpipes.runtime.source import LooksAhead, Reader, RowSource, read_rows
from trainpipes.runtime.stage import Stage
from trainpipes.runtime.warn_once import warn_once

__all__ = ["CachedBlocks", "CachedReader"]

#: Rows, and bytes of them as they are read, that an entry is made of, at most.
ENTRY_ROWS, ENTRY_BYTES = 65_536, 16 << 20
#: The same of what stages are given at a time.
STEP_ROWS, STEP_BYTES = 8192, 8 << 20
#: Entries that a reader keeps open.
MOST_OPEN = 2
#: Seconds between two looks at what another process makes, and how long one looks.
GLANCE, PATIENCE = (0.002, 0.05), 120.0
#: Entries for which it is not tried to keep them, at most, after it has failed time and again.
MOST_REST = 256
#: Of ``max_bytes``, what a process writes before it looks again what others have written.
UNSEEN = 1 / 16

#: A column of ours: which row of its entry each one is.
NUMBER = "trainpipes:row"


@dataclass(frozen=True)
class _Part:
    """Rows ``begin`` to ``end`` of a block, of which ``start`` to ``stop`` are wanted."""

    block: int
    begin: int
    end: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Rows:
    """What has become of some rows of a block.

    Args:
        table: the rows that are left.
        numbers: which rows of the block they are, int64 ``[rows]``, ascending.
    """

    table: pa.Table
    numbers: IntArray

    def between(self, start: int, stop: int) -> _Rows:
        low, high = np.searchsorted(self.numbers, (start, stop)).tolist()
        return _Rows(self.table.slice(low, high - low), self.numbers[low:high])


class CachedBlocks:
    """What stages make of a source's blocks, kept on disk. Threads may share it.

    Args:
        source: gives the rows.
        firsts: number of each block's first row in file order, int64 ``[blocks + 1]``.
        stages: the reader or source, and the stages on rows below the cache.
        asker: the ``cache()``, with its options.
        apply: puts rows through these stages.
        holes: whether rows that were dropped leave a hole, for ``DropHoles`` to close.
        listed: what was listed, if files were: some stages tell rows by their files' names below it.
        first: gives what tells the first rows of the data from others: stages may find types from them.
    """

    def __init__(
        self,
        source: RowSource,
        firsts: IntArray,
        stages: Sequence[Stage],
        asker: Any,
        apply: Callable[[Block], Block],
        holes: bool,
        listed: Any = None,
        first: Callable[[], Any] = lambda: None,
    ) -> None:
        self.source = source
        self.firsts = firsts
        self.holes = holes
        self._asker = asker
        self._apply = apply
        self._max_bytes: int | None = asker.max_bytes
        self._root = folder(asker.path)
        schema = getattr(source, "schema", None)
        text = None if schema is None else str(schema.remove_metadata())
        named = asker.version
        known = stages_key(stages, str(asker), strict=named is None)
        types = first() if any(stage.finds_types for stage in stages) else None
        self._stages = digest_of(known, named, text, types)
        self._whole: sealed.Marks = set()  # files that were read in full
        self._asks = any(stage.by_place or stage.by_row for stage in stages)
        self._listed = listed
        self._alone = any(stage.runs_user_code for stage in stages[1:])
        self._renew()
        self._kept: int | None = None  # bytes in the folder, when it was last looked at
        self._unseen = 0  # bytes written since
        self._failures = 0  # to keep rows, one after the other
        self._rest = 0  # entries for which it is not tried again
        self._too_large: set[str] = set()

    def _renew(self) -> None:
        """Locks of this process: a child's may have been taken by a thread that it has not."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._working = threading.Lock()

    def reader(self) -> CachedReader:
        if self._process != os.getpid():
            self._renew()
        return CachedReader(self)

    def describe(self) -> str:
        """Where the cache is, and how much of these rows is in it."""
        if self._root is None:
            return "off"
        found = total = size = 0
        for block, length in enumerate(self.source.lengths.tolist()):
            for part in self.parts(block, 0, length):
                total += 1
                with suppress(OSError):
                    size += self._path(part).stat().st_size
                    found += 1
        return f"{self._root}: {found:,} of {total:,} blocks kept, {size / 1e6:,.1f} MB"

    # Schemas of rows that are Python objects

    def schema(self, key: str, find: Callable[[], pa.Schema]) -> pa.Schema:
        """A schema that is found from the first rows, kept so that functions are not called for it again.

        Args:
            key: names it among those of the chain.
            find: finds it.
        """
        if self._root is None:
            return find()
        digest = digest_of("schema", self._stages, key, self._listed if self._asks else None)
        path, about = schema_path(self._root, digest), {"schema": digest}
        table = sealed.read(path, about)
        if table is not None:
            return table.schema.remove_metadata()
        schema = find()
        with suppress(OSError):  # it is found again
            sealed.put(path, sealed.pack(pa.Table.from_batches([], schema), about))
        return schema

    # Entries

    def parts(self, block: int, start: int, stop: int) -> Iterator[_Part]:
        """The entries that rows ``start`` to ``stop`` of a block lie in."""
        length = int(self.source.lengths[block])
        size = (self.source.row_bytes or 0.0) * length
        if self.source.block_bytes is not None:
            size = float(self.source.block_bytes[block])
        count = min(length, max(-(-length // ENTRY_ROWS), int(-(-size // ENTRY_BYTES))))
        number = start * count // max(1, length)
        while number < count:
            begin, end = (n * length // count for n in (number, number + 1))
            if begin >= stop:
                return
            if start < end:
                yield _Part(block, begin, end, max(start, begin), min(stop, end))
            number += 1

    def _digest(self, part: _Part) -> str:
        key = self.source.block_key(part.block)
        if key is None:
            raise ConfigError(
                f"{self._asker} keeps rows of data that can be told from other data, and "
                f"{type(self.source).__name__} has no key for its blocks: leave it out"
            )
        where = None
        if self._asks:  # some stage tells rows by where they are from, or by their numbers
            place = str(self.source.place(part.block, part.begin))
            where = [self._listed, place, int(self.firsts[part.block])]
        return digest_of(self._stages, key, where, part.begin, part.end)

    def _path(self, part: _Part) -> Path:
        assert self._root is not None
        return entry_path(self._root, self._digest(part))

    def find(self, part: _Part) -> _Rows | None:
        """An entry, if it is there and whole."""
        if self._root is None:
            return None
        digest = self._digest(part)
        table = sealed.read(
            entry_path(self._root, digest),
            {"rows": digest},
            known=self._whole,
            check=partial(_fits, part.end - part.begin),
            any_text=True,
        )
        if table is None:
            return None
        numbers = np.arange(part.begin, part.end, dtype=np.int64)
        if NUMBER in table.column_names:
            numbers = part.begin + to_numpy(table.column(NUMBER)).astype(np.int64)
            table = table.drop_columns(NUMBER)
        return _Rows(table, numbers)

    def obtain(self, part: _Part, reader: Reader, wait: bool) -> _Rows | None:
        """The wanted rows of an entry at least, made if it is not there; None if another is about to
        make it and not to ``wait``."""
        patience, glance = time.monotonic() + PATIENCE, GLANCE[0]
        while True:
            found = self.find(part)
            if found is not None:
                return found
            if self._root is None or self._rests() or self._path(part).stem in self._too_large:
                return self._compute(part.block, part.start, part.stop, reader)
            lock = FileLock(self._path(part).with_suffix(LOCK))
            try:
                taken = lock.take()
            except OSError as error:
                self._go_without(error)
                return self._compute(part.block, part.start, part.stop, reader)
            if taken or time.monotonic() > patience:
                try:
                    return self.find(part) or self._make(part, reader)
                finally:
                    lock.leave()
            if not wait:
                return None
            time.sleep(glance)
            glance = min(2 * glance, GLANCE[1])

    def _make(self, part: _Part, reader: Reader) -> _Rows:
        rows = self._compute(part.block, part.begin, part.end, reader)
        table = rows.table
        if len(rows.numbers) < part.end - part.begin:
            numbers = to_arrow((rows.numbers - part.begin).astype(np.int32))
            table = table.append_column(NUMBER, numbers)
        path = self._path(part)
        content = sealed.pack(table, {"rows": self._digest(part)})
        try:
            # With a limit one at a time, so that each sees what those before it have written.
            with self._lock if self._max_bytes is not None else nullcontext():
                if not self._room_for(len(content), path.stem):
                    return rows
                sealed.put(path, content)
        except OSError as error:
            self._go_without(error)
            return rows
        self._failures = 0
        return self.find(part) or rows  # in the file it takes no memory of ours

    def _room_for(self, size: int, name: str) -> bool:
        """Make room for an entry of this size; whether there is."""
        most = self._max_bytes
        if most is None:
            return True
        if size > most:
            self._too_large.add(name)
            warn_once(
                f"{self._asker}: max_bytes has room for one row group at least, got {most:,}, and one takes "
                f"{size:,} here: such are made again every time; raise max_bytes",
                ("too large", str(self._root), most),
            )
            return False
        assert self._root is not None
        known = None if self._kept is None else self._kept + self._unseen + size
        if known is None or known > most or self._unseen > most * UNSEEN:
            self._kept, self._unseen = make_room(self._root, most - size), 0
        self._unseen += size
        return True

    def _rests(self) -> bool:
        """Whether it is not tried now, since it did not work before: what fails may pass, as a full disk
        does, and a try costs little beside what it would save."""
        self._rest -= self._rest > 0
        return self._rest > 0

    def _go_without(self, error: OSError) -> None:
        self._failures += 1
        self._rest = min(2**self._failures, MOST_REST)
        said = error.strerror or str(error)
        warn_once(
            f"{self._asker}: rows cannot be kept in {self._root} ({said}); it goes on without, and makes "
            "rows again in every epoch, until they can be. Make room there, or name another folder by "
            "cache(path=...) or TRAINPIPES_CACHE",
            ("off", str(self._root)),
        )

    # The work

    def _compute(self, block: int, start: int, stop: int, reader: Reader) -> _Rows:
        """Rows of a block, put through the stages a few at a time."""
        step = STEP_ROWS
        if self.source.row_bytes:
            step = int(np.clip(STEP_BYTES // self.source.row_bytes, 1, STEP_ROWS))
        first = int(self.firsts[block])
        tables, numbers = [], []
        for low in range(start, stop, step):
            high = min(stop, low + step)
            data = read_rows(self.source, reader, block, low, high)
            ids = np.arange(first + low, first + high, dtype=np.int64)
            with self._working if self._alone else nullcontext():
                rows = self._apply(Block(data, ids))
            tables.append(rows.data)
            numbers.append(rows.ids - first)
        return _Rows(joined_tables(tables), np.concatenate(numbers))

    def block_of(self, found: Sequence[tuple[_Part, _Rows]]) -> Block:
        """The wanted rows of all parts."""
        tables, ids = [], []
        for part, rows in found:
            cut = rows.between(part.start, part.stop)
            first = int(self.firsts[part.block])
            if self.holes:
                tables.append(
                    with_holes(cut.table, cut.numbers - part.start, part.stop - part.start)
                )
                ids.append(np.arange(first + part.start, first + part.stop, dtype=np.int64))
            else:
                tables.append(cut.table)
                ids.append(first + cut.numbers)
        return Block(joined_tables(tables), np.concatenate(ids))


class CachedReader:
    """One place in cached blocks. Not for two threads at once.

    Args:
        blocks: the cached blocks.
    """

    def __init__(self, blocks: CachedBlocks) -> None:
        self._blocks = blocks
        self._reader: Reader | None = None
        self._open: dict[tuple[int, int], _Rows] = {}

    def gather(self, wanted: Iterable[tuple[int, int, int]]) -> Block:
        """The rows that are left of rows ``start`` to ``stop`` of each block.

        Args:
            wanted: block, start and stop of each stretch.
        """
        if self._reader is None:
            self._reader = self._blocks.source.reader()
        parts = [part for stretch in wanted for part in self._blocks.parts(*stretch)]
        found = {part: self._find(part) for part in parts}
        missing = [part for part, rows in found.items() if rows is None]
        if missing and isinstance(self._reader, LooksAhead):
            self._reader.expect(list(dict.fromkeys(part.block for part in missing)))
        for wait in (False, True):
            for part in missing:
                found[part] = found[part] or self._blocks.obtain(part, self._reader, wait)
        return self._blocks.block_of([(part, rows) for part, rows in found.items() if rows])

    def _find(self, part: _Part) -> _Rows | None:
        """An entry that is there. The last ones stay open, for the rest of them is wanted next."""
        key = (part.block, part.begin)
        rows = self._open.pop(key, None) or self._blocks.find(part)
        if rows is not None:
            self._open[key] = rows
        while len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        return rows

    def close(self) -> None:
        """Let go of what is open."""
        self._open.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _fits(rows: int, table: pa.Table) -> bool:
    """Whether an entry can be what has become of so many rows."""
    names = table.column_names
    if NUMBER not in names:
        return len(table) == rows
    numbers = table.column(NUMBER)
    if names.count(NUMBER) > 1 or numbers.type != pa.int32() or numbers.null_count:
        return False
    found = to_numpy(numbers)
    inside = not len(found) or (found[0] >= 0 and found[-1] < rows)
    return bool(inside and (np.diff(found) > 0).all())
