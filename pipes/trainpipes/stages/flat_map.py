from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY
from itertools import islice
from typing import Any

import numpy as np

from trainpipes._internal.checks import Function, Schema
from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run, RunSource
from trainpipes.errors import DataError, StateError
from trainpipes.kinds.blame import blame
from trainpipes.kinds.empty_epoch_guard import EmptyRounds
from trainpipes.kinds.stage_kinds import OpenBelow, RegroupStage

#: Rows in a run, at most.
RUN_ROWS = 256
#: In a row's part (see ``Block``): where its place among those made of one row begins.
PLACE_BITS = 40


Pairs = list[tuple[int, int]]


class FlatMap(RegroupStage):
    """Make any number of rows of each row with a function.

    Stands after ``shuffle`` and before ``batch``. A resume calls the function again for the current
    row, and skips what was delivered.

    Args:
        fn: function of one row that returns an iterable of rows, the same for the same row. No row
            may be None.
        version: names the function in checkpoints; see ``map``.
        schema: Arrow types of the columns that it returns; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.

    Raises:
        DataError: the function returned something else, such as a dict or a text.

    >>> import trainpipes as tp
    >>> texts = tp.from_dataset(["a b", "", "c"])
    >>> list(texts.flat_map(str.split))
    ['a', 'b', 'c']
    """

    role = "pack"
    keeps_rows = False
    per_row = True
    makes_objects = True
    versioned = "fn"
    draws_by = (
        "draw in a map(fn, rng=True) before it, which adds what was drawn to the row, such as a seed for "
        "numpy.random.default_rng()"
    )
    free = frozenset({"schema", "thread_safe"})

    fn: Function
    _: KW_ONLY
    version: str | None = None
    schema: Schema | None = None
    thread_safe: bool = False

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        at, used = (at["below"], at["row"]) if "below" in at else (at, 0)
        return _Rows(self, below(at), used)

    def rows_of(self, row: Any) -> Iterable[Any]:
        found = self.fn(row)
        if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
            raise DataError(
                f"{self}: the function returns rows, as a list or something else that can be iterated, got "
                f"{type(found).__name__}; for one row return [row], for none []"
            )
        return found


class _Rows:
    def __init__(self, stage: FlatMap, below: RunSource, used: int) -> None:
        self._stage = stage
        self._below = below
        self._run: Run | None = None
        self._rows: list[Any] = []
        self._number = 0  # of the row at hand in its run
        self._used = 0  # of what is made of it
        self._skip = used
        self._made: Iterator[Any] | None = None
        self._rounds = EmptyRounds()

    def next_run(self) -> Run:
        while True:
            if self._run is None:
                self._run = self._below.next_run()
                self._next = self._stage._draw_watch.around(self._take)
                self._rows = list(self._run.unroll())
                self._number = self._used = 0
            found = self._lot(self._run)
            if found is not None:
                self._rounds.gave()
                return found
            self._rounds.saw(self._run)
            self._rounds.check(self._stage)
            self._run = None

    def _lot(self, run: Run) -> Run | None:
        rows: list[Any] = []
        made: Pairs = []  # of each row: that of the run it is made of, and how many of its rows are used then
        while self._number < len(self._rows) and len(rows) < RUN_ROWS:
            number = self._number
            got = self._next(run, number, RUN_ROWS - len(rows))
            rows += got
            made += [(number, self._used + k) for k in range(1, len(got) + 1)]
            self._used += len(got)
            if len(rows) < RUN_ROWS:  # there are no more of this one
                self._made, self._used = None, 0
                self._number += 1
        if not rows:
            return None
        places = [(made[0][0], made[0][1] - 1), *made]
        if self._made is None:  # all that is made of the last row is given
            places[-1] = self._number, 0
        return self._as_run(run, rows, made, places)

    def _as_run(self, run: Run, rows: list[Any], made: Pairs, places: Pairs) -> Run:
        whose, counts = np.array(made, dtype=np.int64).T.copy()
        numbers, used = np.array(places, dtype=np.int64).T.copy()
        below = run.block.take(whose)
        part = below.part + (counts << PLACE_BITS)
        bases, which = np.unique(numbers, return_inverse=True)
        states = tuple({"below": run.cursors.state(k)} for k in bases.tolist())
        cursors = Cursors(states, which.reshape(-1).astype(np.int64), used)
        block = Block(rows, below.ids, epoch=below.epoch, part=part)
        block.made_of = below.made_of
        return Run(block, cursors)

    def _take(self, run: Run, number: int, most: int) -> list[Any]:
        """Up to so many rows made of one, after those that a state says are used up."""
        passed = skip = 0
        try:
            if self._made is None:
                self._made = iter(self._stage.rows_of(self._rows[number]))
                skip, self._skip = self._skip, 0
                passed = sum(1 for _ in islice(self._made, skip))
                self._used = skip
            found = list(islice(self._made, most))
            if any(row is None for row in found):
                raise DataError(f"{self._stage}: a row is None; leave it out instead")
        except Exception as error:
            ids = run.row_ids(number)
            blame(error, self._stage, int(ids[0]) if len(ids) else None)
            raise
        if passed < skip:
            raise StateError(
                f"{self._stage}: the state was saved after {skip} rows made of one row, for which the "
                f"function now gives {passed}: use the function as it was, or load the state as it was "
                "saved"
            )
        return found
