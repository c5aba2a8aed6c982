"""What travels between stages: a run of items with the position after each of them.

A position is the state that the nearest stage with a place of its own had before the oldest row
still needed, and how many rows after it are used up. Rows are read again, never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import stretches
from trainpipes.columns.block import Block, naming_bad_values


class Positions(Protocol):
    """Positions of a stage that are worked out when a position is asked for."""

    def at(self, row: int) -> dict[str, Any]: ...

    def place(self, row: int) -> dict[str, Any]:
        """The ``innermost`` part of it."""
        ...


@dataclass(slots=True, eq=False)
class Cursors:
    """Positions before a run's first item and after each: for each its base in ``bases``, and
    the rows used up since, int64 ``[items + 1]``. ``before``: items of the shard's epoch before the run,
    where a position counts them.
    """

    bases: tuple[dict[str, Any] | Positions, ...]
    which: IntArray
    rows: IntArray
    before: int | None = None

    @staticmethod
    def counting(base: dict[str, Any] | Positions, rows: IntArray) -> Cursors:
        return Cursors((base,), np.zeros(len(rows), dtype=np.int64), rows)

    def __len__(self) -> int:
        return len(self.rows)

    def state(self, k: int) -> dict[str, Any]:
        base, row = self.bases[self.which[k]], int(self.rows[k])
        state = {**base, "row": row} if isinstance(base, dict) else base.at(row)
        return state if self.before is None else {**state, "at": self.before + k}

    def place(self, k: int) -> dict[str, Any]:
        """Where the rows at the bottom stand, without states of stages above."""
        base, row = self.bases[self.which[k]], int(self.rows[k])
        return innermost({**base, "row": row}) if isinstance(base, dict) else base.place(row)

    def after(self, items: int) -> Cursors:
        """The same positions, with how many items of the shard's epoch come before each."""
        return Cursors(self.bases, self.which, self.rows, items)

    def pick(self, index: IntArray | slice) -> Cursors:
        return Cursors(self.bases, self.which[index], self.rows[index])

    def compact(self) -> Cursors:
        """The same positions without the states that none of them counts from."""
        if len(self.bases) == 1:
            return self
        used = np.bincount(self.which, minlength=len(self.bases)) > 0
        if used.all():
            return self
        bases = tuple(self.bases[k] for k in np.flatnonzero(used).tolist())
        return Cursors(bases, (np.cumsum(used) - 1)[self.which], self.rows)

    @staticmethod
    def join(parts: Sequence[Cursors]) -> Cursors:
        """Positions joined; of two that meet, the later run's start is kept."""
        if len(parts) == 1:
            return parts[0]
        bases: list[dict[str, Any] | Positions] = []
        which: list[IntArray] = []
        rows: list[IntArray] = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            which.append((part.which if last else part.which[:-1]) + len(bases))
            rows.append(part.rows if last else part.rows[:-1])
            bases.extend(part.bases)
        return Cursors(tuple(bases), np.concatenate(which), np.concatenate(rows))


@dataclass(slots=True, eq=False)
class Run:
    """Rows, their items (rows, or batches cut at ``bounds``), and a position after each item."""

    block: Block
    cursors: Cursors
    bounds: IntArray | None = None
    items: MutableSequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.cursors) - 1

    def unroll(self) -> MutableSequence[Any]:
        """One Python object an item: outputs, lists of rows, or rows."""
        if self.items is not None:
            return self.items
        with naming_bad_values(self.block):
            rows = self.block.rows()
        if self.bounds is None:
            return rows
        return [rows[start:stop] for start, stop in pairwise(self.bounds.tolist())]

    def unroll_copies(self) -> MutableSequence[Any]:
        """As ``unroll``, for a function that may change a row that Python gave: who gave it may keep it."""
        if self.items is not None or not isinstance(self.block.data, list):
            return self.unroll()
        return self.with_block(self.block.with_data(copies(self.block.data))).unroll()

    def with_block(self, block: Block) -> Run:
        return Run(block, self.cursors, self.bounds, self.items)

    def with_items(self, items: MutableSequence[Any]) -> Run:
        return Run(self.block, self.cursors, self.bounds, items)

    def row_ids(self, item: int) -> IntArray:
        if self.bounds is None:
            return self.block.ids[item : item + 1]
        return self.block.ids[self.bounds[item] : self.bounds[item + 1]]

    def first_ids(self) -> list[int]:
        """The number of each item's first row; -1 of an item without rows."""
        if self.bounds is None:
            return list(self.block.ids.tolist())
        ids = np.append(self.block.ids, -1)
        starts, stops = self.bounds[:-1], self.bounds[1:]
        return list(np.where(starts < stops, ids[starts], -1).tolist())

    def pick(self, index: IntArray) -> Run:
        """The items at ``index``, ascending; those after the last are used up."""
        ends = np.concatenate([[0], index + 1]).astype(np.int64)
        ends[-1] = len(self) if len(index) else 0
        return self.moved(index, self.cursors.pick(ends))

    def keep(self, mask: npt.NDArray[np.bool_]) -> Run:
        """The items for which ``mask`` is True, bool ``[items]``."""
        return self if mask.all() else self.pick(np.flatnonzero(mask).astype(np.int64))

    def part(self, first: int, stop: int) -> Run:
        """The items from ``first`` to before ``stop``."""
        cursors = self.cursors.pick(slice(first, stop + 1)).compact()
        items = None if self.items is None else self.items[first:stop]
        if self.bounds is None:
            return Run(self.block.slice(first, stop), cursors, None, items)
        bounds = self.bounds[first : stop + 1]
        block = self.block.slice(int(bounds[0]), int(bounds[-1]))
        return Run(block, cursors, bounds - bounds[0], items)

    def moved(self, order: IntArray, cursors: Cursors) -> Run:
        """The items at ``order``, in that order."""
        items = None if self.items is None else [self.items[i] for i in order.tolist()]
        if self.bounds is None:
            return Run(self.block.take(order), cursors, None, items)
        sizes = np.diff(self.bounds)[order]
        block = self.block.take(stretches(self.bounds[:-1][order], sizes))
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return Run(block, cursors, bounds, items)

    def grouped(self, bounds: IntArray) -> Run:
        """The first items, in groups cut at ``bounds`` int64 ``[groups + 1]``, which starts with 0: rows in
        batches, or items in lists.
        """
        rows, groups = bounds, None
        if self.items is not None or self.bounds is not None:
            items = self.unroll()
            groups = [list(items[a:b]) for a, b in pairwise(bounds.tolist())]
            rows = bounds if self.bounds is None else self.bounds[bounds]
        whole = rows[-1] == len(self.block)
        block = self.block if whole else self.block.slice(0, int(rows[-1]))
        return Run(block, self.cursors.pick(bounds), rows, groups)

    @staticmethod
    def join(runs: Sequence[Run]) -> Run:
        """Consecutive runs as a single run."""
        if len(runs) == 1:
            return runs[0]
        items = bounds = None
        if runs[0].items is not None:
            items = [item for run in runs for item in run.items or ()]
        if runs[0].bounds is not None:
            sizes = [np.diff(run.bounds) for run in runs if run.bounds is not None]
            bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
        cursors = Cursors.join([run.cursors for run in runs]).compact()
        return Run(Block.join([run.block for run in runs]), cursors, bounds, items)


#: Gives the items of a run.
Unroll: TypeAlias = Callable[[Run], MutableSequence[Any]]


def copies(rows: Iterable[Any]) -> list[Any]:
    """Rows, of which dicts and lists may be changed."""
    return [row.copy() if type(row) in (dict, list) else row for row in rows]


def unplaced(block: Block) -> Run:
    return Run(block, Cursors.counting({}, np.zeros(len(block) + 1, dtype=np.int64)))


def round_of(place: dict[str, Any]) -> tuple[int, int]:
    """Counts passes over all rows: the epoch, and in a mix that of the source behind."""
    cursors = [c for c in place.get("sources", {}).values() if not c.get("gone")]
    return place.get("epoch", 0), min((innermost(c)["epoch"] for c in cursors), default=0)


def levels(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while "below" in state:
        yield state
        state = state["below"]


def innermost(state: dict[str, Any]) -> dict[str, Any]:
    """The state of the rows at the bottom of nested states."""
    while "below" in state:
        state = state["below"]
    return state
