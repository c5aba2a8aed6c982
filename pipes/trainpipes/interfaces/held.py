"""Rows that wait for others, and where they stand."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from trainpipes._internal.checks import LARGEST, IntArray
from trainpipes._internal.messages import warn_once
from trainpipes.columns.arrays import Array
from trainpipes.columns.block import SOURCE_BIT, Block, Pieces
from trainpipes.columns.run import Cursors, Run, innermost, round_of
from trainpipes.errors import DataError, StateError
from trainpipes.order.layout import Layout, StreamLayout
from trainpipes.order.permutation import permutation

#: Epochs in a row that may give nothing, of small data. Where a shard has one row in an epoch and a
#: condition that half of the rows meet, that many are empty once in 65,536.
MOST_EMPTY_EPOCHS = 16

#: Rows that are looked at for nothing, unless a single epoch has more.
MOST_EMPTY_ROWS = 2**20


def most_empty(layout: Layout | StreamLayout) -> int:
    """Epochs in a row that may give nothing, where each is cut as ``layout`` says."""
    rows = layout.rows if isinstance(layout, Layout) else 0
    return max(1, min(MOST_EMPTY_EPOCHS, MOST_EMPTY_ROWS // max(1, rows)))


class EmptyRounds:
    """The epochs, and those of a mix's sources, that rows came from since a row was let through."""

    def __init__(self) -> None:
        #: Whose rounds are not in ``_seen`` yet: most are never asked for.
        self._taken: list[Cursors] = []
        self._seen: set[tuple[int, int]] = set()

    def saw(self, run: Run) -> None:
        self._taken.append(run.cursors)

    def gave(self) -> None:
        self._taken.clear()
        self._seen.clear()

    def check(self, stage: object) -> None:
        """Raise DataError if there are so many that nothing ever may come out. They are counted: of a mix
        whose epoch ends, those of its sources go on a million later.
        """
        self._seen.update(round_of(cursors.place(0)) for cursors in self._taken)
        self._taken.clear()
        if len(self._seen) > MOST_EMPTY_EPOCHS + 1:
            raise DataError(
                f"{stage} kept no row of a shard in {MOST_EMPTY_EPOCHS} epochs, so that repeat() or mix() "
                "would wait forever: check its options. If the rows that it keeps stand together in the "
                'files, sharding_filter(split="stride") deals them to all shards; if each n-th row is one, '
                "another num_shards does",
                stage=str(stage),
            )


def check_shard(layout: Layout | StreamLayout, shard: int, epoch: int, last_epoch: int) -> None:
    """Raise DataError if a shard of a pass without an end has got nothing since epoch ``given``."""
    if epoch - last_epoch >= most_empty(layout):
        shards = layout.num_shards
        way = "check the stages that leave out rows, such as filter(), take() and skip()"
        way = f"lower num_shards in sharding_filter(), or {way}" if shards > 1 else way
        raise DataError(
            f"repeat() or mix() would wait forever: shard {shard} of {shards} got no rows up to epoch "
            f"{epoch}; {way}"
        )


#: Fewer items than these may all be at joints by chance.
FEW_ITEMS = 8
#: Positions before an item of a window, and after each up to another.
CursorsOf = Callable[[int, int], Cursors]


def _epoch(run: Run, item: int = 0) -> int:
    epoch: int = run.cursors.place(item).get("epoch", 0)
    return epoch


def _at_joint(run: Run) -> tuple[Run, Run | None]:
    """The items of a run that begin in the epoch of its first item, and the others: where runs are cut must
    not matter.
    """
    first = _epoch(run) if len(run) else 0
    if not len(run) or _epoch(run, len(run) - 1) == first:
        return run, None
    stop = bisect_right(range(len(run)), first, key=lambda item: _epoch(run, item))
    return run.part(0, stop), run.part(stop, len(run))


def in_epochs(run: Run, order: IntArray, stage: object) -> IntArray:
    """An order of a run's items in which those of a source keep the order of its epochs: each of its rows
    comes before any of its next epoch. Items that hold rows of two epochs keep their places among the others.
    """
    block, count = run.block, len(run)
    rows = np.arange(len(block) + 1) if run.bounds is None else run.bounds
    pieces = block.made_of or Pieces.whole(block.ids, block.epoch)
    if not len(pieces.epochs) or (pieces.epochs == pieces.epochs[0]).all():
        return order
    item = np.repeat(np.arange(count), np.diff(pieces.bounds[rows]))
    # Parts of items, each of a single source: its first and last epoch.
    sources, source = np.unique(pieces.ids >> SOURCE_BIT, return_inverse=True)
    part, whose = np.unique(source.reshape(-1) * count + item, return_inverse=True)
    first, last = np.full(len(part), LARGEST), np.full(len(part), -1)
    np.minimum.at(first, whose.reshape(-1), pieces.epochs)
    np.maximum.at(last, whose.reshape(-1), pieces.epochs)
    source, item = np.divmod(part, count)
    group, age = np.zeros(count, np.int64), np.zeros(count, np.int64)
    if len(part) == len(np.unique(item)) and (first == last).all():
        group[item], age[item] = source, first
    else:  # no item passes a joint of any source
        newest = [np.maximum.accumulate(last[source == k]) for k in range(len(sources))]
        begins = np.concatenate(
            [np.diff(epoch_numbers, prepend=epoch_numbers[:1]) > 0 for epoch_numbers in newest]
        )
        joint = np.zeros(count + 1, dtype=np.bool_)
        joint[item[begins]] = True
        crossing = item[first < last]
        joint[crossing] = joint[crossing + 1] = True
        age = np.cumsum(joint[:count])
        if count >= FEW_ITEMS and age[-1] > count // 2:
            warn_once(
                f"{stage} hardly moves what it is given: most items hold rows of two epochs of a source, and "
                "each row comes once an epoch; put it before the stage that joins rows, such as batch() or "
                "pack()"
            )
    places = np.argsort(group[order], kind="stable")
    ordered = np.empty_like(order)
    ordered[places] = order[np.lexsort((age[order], group[order]))]
    return ordered


class _Joints:
    """Where rows of a source begin its next epoch while rows of the last epoch wait."""

    def __init__(self) -> None:
        self._rows = 0  # that wait
        #: Of each source, the last row's place and epoch.
        self._seen: dict[int, tuple[int, int]] = {}
        #: Places of the two rows of a source between which each joint is.
        self._found: list[tuple[int, int]] = []

    @property
    def last(self) -> int:
        return self._found[-1][1] if self._found else 0

    def before(self, rows: int) -> IntArray:
        return np.array([place for _, place in self._found if place < rows], dtype=np.int64)

    def saw(self, block: Block) -> None:
        sources = block.ids >> SOURCE_BIT
        epochs = np.broadcast_to(np.asarray(block.epoch, dtype=np.int64), len(block))
        joints: list[tuple[int, int]] = []
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            epochs_seen, places = epochs[places], places + self._rows
            place, epoch = self._seen.get(source, (-1, epochs_seen[0]))
            later = np.flatnonzero(np.diff(epochs_seen, prepend=epoch) > 0)
            before, after = np.append(place, places)[later], places[later]
            joints += zip(before.tolist(), after.tolist(), strict=True)
            self._seen[source] = int(places[-1]), int(epochs_seen[-1])
        self._found += sorted((joint for joint in joints if joint[0] >= 0), key=itemgetter(1))
        self._rows += len(block)

    def drop(self, rows: int) -> None:
        self._rows -= rows
        self._seen = {s: (place - rows, epoch) for s, (place, epoch) in self._seen.items()}
        self._found = [(a - rows, b - rows) for a, b in self._found if a >= rows]


class Held:
    """Rows that wait. ``alone``: of a single epoch; ``joints``: it is noted where epochs begin."""

    def __init__(
        self, stage: Any, below: Iterator[Run], alone: bool = False, joints: bool = False
    ) -> None:
        self._stage, self._below, self._alone = stage, below, alone
        self._runs: list[Run] = []
        self._rounds = EmptyRounds()
        self._joints = _Joints() if joints else None
        self.rows = 0
        #: Whether no row joins those that wait.
        self.ended = False
        self._after: Run | None = None  # of the next epoch

    def fill(self, rows: int, least: float = math.inf) -> bool:
        """Wait for so many rows, or for a joint after the first ``least`` of them."""
        if self._after is not None and not self.rows:
            later, self._after, self.ended = self._after, None, False
            self._take_of_epoch(later)
        while self.rows < rows and not self.ended:
            if self._joints is not None and self._joints.last > least:
                break
            run = next(self._below, None)
            if run is None:
                self.ended = True
                break
            if self._alone and self.rows and _epoch(run) != _epoch(self._runs[0]):
                self._after, self.ended = run, True
                break
            self._take_of_epoch(run)
        return self.rows > 0

    def _take_of_epoch(self, run: Run) -> None:
        later: Run | None = None
        if self._alone:
            run, later = _at_joint(run)
        self._take(run)
        if later is not None:
            self._after, self.ended = later, True

    @property
    def epoch(self) -> int:
        """The epoch of the first row."""
        return _epoch(self._runs[0])

    def _take(self, run: Run) -> None:
        self._rounds.saw(run)
        self._runs.append(run)
        if self._joints is not None and run.bounds is None:
            self._joints.saw(run.block)
        self.rows += len(run)

    def joints(self, rows: int) -> IntArray:
        """How many rows wait before each joint, if fewer than ``rows``: int64, ascending."""
        assert self._joints is not None
        return self._joints.before(rows)

    def waiting(self) -> Run:
        self._runs = [Run.join(self._runs)]
        return self._runs[0]

    def drop(self, rows: int, gave: bool = True) -> None:
        """Let the first rows go; raises after many epochs whose rows gave nothing."""
        if gave:
            self._rounds.gave()
        else:
            self._rounds.check(self._stage)
        if rows:
            run = self.waiting()
            self._runs = [run.part(rows, len(run))] if rows < len(run) else []
            self.rows -= rows
            if self._joints is not None:
                self._joints.drop(rows)

    def take(self, bounds: IntArray) -> Run:
        """The first rows, as items cut at ``bounds`` int64 ``[items + 1]``, which starts with 0."""
        batches = self.waiting().grouped(bounds)
        self.drop(int(bounds[-1]))
        return batches

    def window(
        self,
        items: int,
        count: int,
        used: int,
        salt: str,
        reorders: bool,
        numbers: tuple[int, int] | None = None,
    ) -> tuple[IntArray, CursorsOf]:
        """Items that the first ``count`` rows make, in the order drawn, and their positions. The
        rows are let go; ``used`` items were given before. ``numbers``: of the window and the next
        one, if positions keep them.
        """
        run = self.waiting()
        epoch = run.cursors.place(0).get("epoch", 0) if reorders else 0
        order = permutation(items, self._stage.seed, salt, epoch, int(run.block.ids[0]))
        in_buffer = None if numbers is None else [{"buffer": number} for number in numbers]
        return order, self.close_window(items, count, used, in_buffer)

    def close_window(
        self, items: int, count: int, used: int, turns: Sequence[dict[str, Any]] | None = None
    ) -> CursorsOf:
        """Positions of items that the first ``count`` rows make; the rows are let go. ``used`` items were
        given before. ``turns``: further values that positions of the window, and of the next window, keep.
        """
        self.check_used(used, items)
        run = self.waiting()
        ends: list[dict[str, Any]] = [{"below": run.cursors.state(k)} for k in (0, count)]
        if turns is not None:
            ends = [{**end, **more} for more, end in zip(turns, ends, strict=True)]
        self.drop(count, items > 0)
        return partial(_within, tuple(ends), items)

    def check_used(self, used: int, most: int) -> None:
        if used and used >= most:
            said = f"saved after {used} rows, batches or tokens of data that has fewer"
            way = "it was edited or is damaged: load it as it was saved"
            raise StateError(f"{self._stage}: the state was {said}; {way}")


def _within(ends: tuple[dict[str, Any], ...], items: int, first: int, stop: int) -> Cursors:
    rows = np.arange(first, stop + 1, dtype=np.int64)
    which = np.zeros(len(rows), dtype=np.int64)
    if stop == items:
        which[-1], rows[-1] = 1, 0
    return Cursors(ends, which, rows)


def around(joints: IntArray, fits: Array) -> tuple[int, int | None]:
    """Rows before the last joint up to which all fit into an item, and before the next joint."""
    passed = len(fits) if fits.all() else int(np.argmin(fits))
    begun = int(joints[passed - 1]) if passed else 0
    return begun, int(joints[passed]) if passed < len(joints) else None


@dataclass(frozen=True)
class Turn:
    """A shard's next batch of a pass: how many came before, and in which epoch the pass began."""

    number: int
    epoch: int

    @staticmethod
    def of(at: dict[str, Any]) -> Turn:
        """The turn of a state; a pass begins where it says nothing of turns."""
        saved = at.get("turn")
        return Turn(0, int(innermost(at).get("epoch", 0))) if saved is None else Turn(*saved)

    def after(self, batches: int) -> Turn:
        return Turn(self.number + batches, self.epoch)

    @property
    def kept(self) -> dict[str, Any]:
        return {"turn": [self.number, self.epoch]}


def opened(at: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A state as that of the rows below, and how many of them are used."""
    return (at["below"], at["row"]) if "below" in at else (at, 0)
