"""``flat_map`` and ``deduplicate``: stages that give more or fewer rows than they get, row by row."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY
from itertools import islice
from typing import Any, Self

import numpy as np

from trainpipes._internal.checks import ColumnNames, Function, Schema, column_names
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import warn_once
from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run, copies
from trainpipes.engine.planning.row_names import hash_keys
from trainpipes.errors import DataError, StateError
from trainpipes.interfaces.held import opened
from trainpipes.interfaces.quarantine import CallsFunction, Failed, OnBadRow
from trainpipes.interfaces.read_columns import blame, each
from trainpipes.interfaces.stage_kinds import OpenBelow, PackingStage
from trainpipes.interfaces.stateful_stage import LARGE_STATE, PLACE_BITS, RUN_ROWS, rows_in


class FlatMap(CallsFunction, PackingStage, per_row=True, gives="objects", versioned="fn"):
    """Make any number of rows of each row with a function.

    Stands after ``shuffle`` and before ``batch``. A resume calls the function again for the current
    row, and skips the rows that were delivered.

    Args:
        fn: function of a row that returns an iterable of rows, the same for the same row. No row
            may be None, nor hold the same array or tensor with other values; see ``map``.
        version: names the function in checkpoints; see ``map``.
        schema: Arrow types of the columns that it returns; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.
        on_error: for a row of which the function raises; see ``map``. None of the rows made of it
            comes then: all that are made of a row are held until its last.

    Raises:
        DataError: the function returned something else, such as a dict or a text.

    >>> import trainpipes as tp
    >>> texts = tp.from_dataset(["a b", "", "c"])
    >>> list(texts.flat_map(str.split))
    ['a', 'b', 'c']
    """

    free = frozenset({"schema", "thread_safe"})

    fn: Function
    _: KW_ONLY
    version: str | None = None
    schema: Schema | None = None
    thread_safe: bool = False
    on_error: OnBadRow = "raise"

    #: Whether workers have called the function for the rows that come.
    _is_called = False

    def call_ahead(self, run: Run) -> Run:
        """The rows that the function makes of each, for ``after_calls``."""
        most = RUN_ROWS + 1

        def call(row: Any) -> Any:
            rows = self.guarded(self.fn)(row)
            if isinstance(rows, Failed):
                return rows
            rows = rows_in(rows, self, "the function")
            taken = self.guarded(lambda: copies(islice(rows, most)))()
            return [row] if not isinstance(taken, Failed) and len(taken) == most else (taken,)

        return run.with_items(each(self, call, run))

    def after_calls(self) -> Self:
        """This stage, for rows that ``call_ahead`` made. It calls the function of a row with very many."""
        self._tallies()  # which both have
        return self._resolved(**{**vars(self), "_is_called": True})

    def _called(self, row: Any) -> Any:
        if self._is_called and not isinstance(row, list):
            answer: Any = row if isinstance(row, Failed) else row[0]
            return answer
        return self.guarded(self.fn)(row[0] if self._is_called else row)

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        at, used = opened(at)
        return self._runs(below(at), used)

    def _runs(self, below: Iterator[Run], skip: int) -> Iterator[Run]:
        for run in below:
            take = self._draw_watch.around(lambda new_rows, most: copies(islice(new_rows, most)))
            rows: list[Any] = []
            # Of each: the row it is made of, and how many made of that are used then.
            places: list[tuple[int, int]] = []
            number = -1
            for number, row in enumerate(run.unroll_copies()):
                new_rows, used, skip = self._made_of(run.block, number, row, skip), skip, 0
                while True:
                    try:
                        rows += take(new_rows, RUN_ROWS - len(rows))
                    except Exception as error:
                        ids = run.row_ids(number)
                        blame(error, self, int(ids[0]) if len(ids) else None)
                        raise
                    count = len(rows) - len(places)
                    places += [(number, used + k) for k in range(1, count + 1)]
                    used += count
                    if len(rows) < RUN_ROWS:  # there are no more of this row
                        break
                    yield _made_run(run, rows, places, places[-1])
                    rows, places = [], []
            if rows:
                yield _made_run(run, rows, places, (number + 1, 0))
                del run, rows  # their memory is free for the next run
            else:
                yield run.pick(np.empty(0, dtype=np.int64))

    def _made_of(self, block: Block, place: int, row: Any, skip: int) -> Iterator[Any]:
        """The rows made of a row, after those that a state says are used up."""
        rows = self._called(row)
        if not isinstance(rows, Failed):
            rows = rows_in(rows, self, "the function")
        if self.leaves_out:
            rows = self._whole(block, place, rows)
        number = 0
        for number, new_row in enumerate(rows, 1):
            if new_row is None:
                raise DataError(f"{self}: a row is None; leave it out instead")
            if number > skip:
                yield new_row
        if number < skip:
            said = f"the state was saved after {skip} rows made of one row, of which the function now makes"
            way = "use the function as it was, or load the state as it was saved"
            raise StateError(f"{self}: {said} {number}: {way}")

    def _whole(self, block: Block, place: int, answer: Iterable[Any] | Failed) -> list[Any]:
        """All rows made of a row; none if the function raises."""
        rows = answer if isinstance(answer, Failed) else self.guarded(copies)(answer)
        why = rows.why if isinstance(rows, Failed) else ""
        failed = np.array([isinstance(rows, Failed)], dtype=np.int64)
        self._left_out.drop(block.slice(place, place + 1), failed, lambda _: why)
        return [] if isinstance(rows, Failed) else rows


def _made_run(
    run: Run, rows: list[Any], origins: list[tuple[int, int]], end: tuple[int, int]
) -> Run:
    whose, counts = np.array(origins, dtype=np.int64).T.copy()
    below = run.block.take(whose)
    block = Block(rows, below.ids, epoch=below.epoch, part=below.part + (counts << PLACE_BITS))
    block.made_of = below.made_of
    places = [(origins[0][0], origins[0][1] - 1), *origins[:-1], end]
    numbers, used = np.array(places, dtype=np.int64).T.copy()
    bases, which = np.unique(numbers, return_inverse=True)
    states = tuple({"below": run.cursors.state(k)} for k in bases.tolist())
    return Run(block, Cursors(states, which.reshape(-1).astype(np.int64), used))


#: Bytes of the hash of a row.
DIGEST = 16
_SALTS = (0, 0x5851F42D4C957F2D)


class Deduplicate(PackingStage):
    """Leave out rows that have the same values in some columns as an earlier row.

    Each epoch keeps the first row of each shard, so that duplicates in different shards stay: without
    ``sharding_filter``, or with ``num_shards=1``, none does. For each row that is kept, the memory of
    the process and the state of each shard hold a hash of 16 bytes (about 150 bytes of memory).

    Args:
        columns: a column or several: texts, bytes, numbers or times.

    Raises:
        DataError: a value is null.
        SchemaError: there is no such column, or its values are lists or structs.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"url": ["a", "b", "a", "c"], "n": [0, 1, 2, 3]}))
    >>> [row["n"] for row in rows.deduplicate("url")]
    [0, 1, 3]
    """

    columns: ColumnNames

    @cached_property
    def _names(self) -> list[str]:
        return column_names(self.columns, f"{self.name}(columns)")

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        seen = None
        if "below" in at:
            at, seen = at["below"], _Seen(self, int(at["of"]), self._read(at["seen"]))
        return self._kept(below(at), seen)

    def _kept(self, below: Iterator[Run], seen: _Seen | None) -> Iterator[Run]:
        for run in below:
            epoch = run.cursors.place(0).get("epoch", 0)
            if seen is None or seen.epoch != epoch:
                seen = _Seen(self, epoch)
            yield seen.first_of_each(run)

    def digests(self, run: Run) -> list[bytes]:
        """A hash of 16 bytes of each row's values."""
        halves = [hash_keys(run.block, self._names, self, salt) for salt in _SALTS]
        both = np.stack(halves, axis=1).astype("<u8", copy=False)
        return both.view(f"V{DIGEST}").reshape(-1).tolist()

    def _read(self, text: Any) -> bytes:
        try:
            hashes = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise StateError(f"{self}: its state is damaged: {error}") from error
        if len(hashes) % DIGEST:
            raise StateError(
                f"{self}: its state is damaged: {len(hashes)} bytes are no whole hashes"
            )
        return hashes


class _Seen:
    """The rows of a shard that were kept in an epoch, in order: those before a position are the first
    of them, so that any position can still be asked for.
    """

    def __init__(self, stage: Deduplicate, epoch: int, hashes: bytes = b"") -> None:
        self.epoch, self._stage, self._kept = epoch, stage, bytearray(hashes)
        self._known = {hashes[k : k + DIGEST] for k in range(0, len(hashes), DIGEST)}

    def first_of_each(self, run: Run) -> Run:
        digests, before = self._stage.digests(run), len(self._known)
        first = dict(zip(reversed(digests), reversed(range(len(digests))), strict=True))
        new = sorted(map(first.__getitem__, {*first}.difference(self._known)))
        self._known.update(first)
        self._kept += b"".join(map(digests.__getitem__, new))
        first_rows = run.pick(np.array(new, dtype=np.int64))
        rows = np.arange(len(new) + 1, dtype=np.int64)
        return Run(
            first_rows.block, Cursors.counting(_Kept(self, before, first_rows.cursors), rows)
        )

    def state(self, rows: int, below: dict[str, Any]) -> dict[str, Any]:
        seen = base64.b64encode(self._kept[: rows * DIGEST]).decode()
        if len(seen) > LARGE_STATE:
            way = "put it before fewer rows, or remove duplicates once and write the rows to files"
            warn_once(f"{self._stage}: its state has {len(seen):,} bytes for a shard: {way}")
        return {"below": below, "of": self.epoch, "seen": seen}


class _Kept:
    """Positions after the rows that were kept of a run."""

    def __init__(self, seen: _Seen, before: int, below: Cursors) -> None:
        self._seen, self._before, self._below = seen, before, below

    def at(self, row: int) -> dict[str, Any]:
        return self._seen.state(self._before + row, self._below.state(row))

    def place(self, row: int) -> dict[str, Any]:
        return self._below.place(row)
