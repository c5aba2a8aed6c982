"""A stage of a user that keeps something between rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from trainpipes._internal.messages import warn_once
from trainpipes.columns.block import Block, Pieces
from trainpipes.columns.run import Cursors, Run, copies, unplaced
from trainpipes.errors import ConfigError, DataError, StateError
from trainpipes.interfaces.read_columns import blame
from trainpipes.interfaces.stage import is_derived
from trainpipes.interfaces.stage_kinds import OpenBelow, PackingStage
from trainpipes.state import cursor

#: Rows in a run, at most.
RUN_ROWS = 256
#: Bytes of a state from which on there is a warning.
LARGE_STATE = 1 << 20
#: In a row's part (see ``Block``): where its place among those made of the same row begins.
PLACE_BITS = 40
#: Places of rows that were held back.
HELD_PLACES = 1 << 20
#: Number, epoch and part of a row.
Whose: TypeAlias = tuple[int, int, int]
#: Not empty where states are asked for more often, by threads, too.
_often: list[None] = []


@contextmanager
def asked_often() -> Iterator[None]:
    """Have stages asked for their states after each of the first rows of an epoch, and then ever less often:
    where few rows are tested, ``state_every`` may be more than there are.
    """
    _often.append(None)
    try:
        yield
    finally:
        _often.pop()


class StatefulStage(PackingStage, per_row=True, gives="objects"):
    """A stage that keeps something between rows, such as the rows before; see docs/extend.md.

    Stands after ``shuffle`` and before ``batch``. Define ``process``, which gives any number of rows
    for each. What you keep is set on ``self`` in ``start``, and goes into ``state_dict``. It is kept
    for each shard and epoch by itself. A resume loads the last state asked for and gives ``process``
    the rows since then again; rows that were delivered do not come twice.

    A row that is a dict, kept and given later as it was, is the same row still: ``locate``, draws and the
    epochs of a mix know it. Any other row counts as the row that ``process`` was called with.

    Attributes:
        state_every: ``state_dict`` is asked for after so many rows.

    >>> import trainpipes as tp
    >>> class Unseen(tp.StatefulStage):
    ...     def start(self):
    ...         self.seen = set()
    ...
    ...     def process(self, row):
    ...         if row not in self.seen:
    ...             self.seen.add(row)
    ...             yield row
    ...
    ...     def state_dict(self):
    ...         return {"seen": sorted(self.seen)}
    ...
    ...     def load_state_dict(self, state):
    ...         self.seen = set(state["seen"])
    >>> list(tp.from_dataset(["a", "b", "a"]).then(Unseen()))
    ['a', 'b']
    """

    _inside = PackingStage._inside | {"open"}
    state_every: ClassVar[int] = 1024

    def __init_subclass__(cls, **traits: Any) -> None:
        super().__init_subclass__(**traits)
        _let_set(cls)
        pair = (cls.state_dict, cls.load_state_dict)
        defaults = (StatefulStage.state_dict, StatefulStage.load_state_dict)
        if (pair[0] is defaults[0]) != (pair[1] is defaults[1]):
            raise ConfigError(f"{cls.__name__} must define both state_dict() and load_state_dict()")
        if not isinstance(cls.state_every, int) or cls.state_every < 1:
            said = f"must be a number of rows above 0, got {cls.state_every!r}"
            raise ConfigError(f"{cls.__name__}.state_every {said}")

    def start(self) -> None:
        """Set the state: called for each shard and epoch that has a row, and before
        ``load_state_dict``.
        """

    def process(self, row: Any) -> Iterable[Any]:
        """The rows to give for a row, in order; with ``yield``, or a list."""
        raise ConfigError(f"{type(self).__name__} needs process(row), which yields rows")

    def finish(self) -> Iterable[Any]:
        """Rows that were kept back, at the end of a shard's epoch."""
        return ()

    def state_dict(self) -> Any:
        """All that is kept, of JSON types, tuples, bytes, NumPy arrays and tensors."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Keep the state that ``state_dict`` returned."""

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        saved = {"kept": at["kept"]} if "kept" in at else {}
        at, used = (at["below"], at["row"]) if "below" in at else (at, 0)
        return _Rows(self, saved, used).runs(below(at))

    def _working(self, saved: dict[str, Any]) -> Self:
        """A copy that may be written, as it starts or with the values of a state."""
        fresh = self._fresh()
        vars(fresh)["_writable"] = True
        fresh.start()
        if type(self).state_dict is StatefulStage.state_dict:
            return fresh
        if saved:
            try:
                fresh.load_state_dict(cursor.decoded(saved["kept"]))
            except Exception as error:
                said = f"load_state_dict() failed: {type(error).__name__}: {error}"
                way = "it takes what state_dict() returned, with lists as lists"
                raise StateError(f"{self}: {said}; {way}") from error
        return fresh

    def _kept(self) -> dict[str, Any]:
        """The state of a copy at work, as JSON."""
        if type(self).state_dict is StatefulStage.state_dict:
            added = vars(self).keys() - self.options.keys() - {"_writable"}
            added = {name for name in added if not is_derived(self, name)}
            if added:
                said = f"keeps {min(added)!r} between rows, which no state holds"
                raise ConfigError(f"{self} {said}: define state_dict() and load_state_dict()")
            return {}
        try:
            state = cursor.encoded(self.state_dict())
        except TypeError as error:
            rule = "JSON types, tuples, bytes, NumPy arrays and tensors"
            raise DataError(
                f"{self}: state_dict() must return {rule}: {error}", stage=str(self)
            ) from error
        return {"kept": state}


def _let_set(cls: Any) -> None:
    refuse = cls.__setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        options = {field.name for field in dataclasses.fields(self)}
        if "_writable" in vars(self) and name not in options:
            vars(self)[name] = value
        else:
            refuse(self, name, value)

    cls.__setattr__ = __setattr__


_let_set(StatefulStage)


def rows_in(returned: Any, stage: object, who: str) -> Iterable[Any]:
    """What a function returned as rows, if it can be any."""
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        got = f"got {type(returned).__name__}; for one row return [row], for none []"
        raise DataError(f"{stage}: {who} returns rows, in a list or iterable, {got}")
    return returned


class _Rows:
    """The rows of a shard. A position is the position below at a state, that state, and how many
    rows were given since.
    """

    def __init__(self, stage: StatefulStage, saved: dict[str, Any], used: int) -> None:
        self._stage, self._kept, self._skip = stage, saved, used
        self._work: StatefulStage | None = None
        self._epoch: int | None = None
        self._base: dict[str, Any] = {}
        self._since = 0  # rows taken since the base
        self._before = 0  # rows of the epoch taken before the base, in this run
        self._given = 0  # rows given since the base, those skipped included
        #: Rows that a resume would know, too: those in the base, and those taken since.
        self._known: set[tuple[int, ...]] = set()
        #: The last row of the epoch, for rows of finish().
        self._last: Block | None = None

    def runs(self, below: Iterator[Run]) -> Iterator[Run]:
        for run in below:
            if not len(run):
                continue
            epoch = run.cursors.place(0).get("epoch", 0)
            if epoch != self._epoch:
                yield from self._finished()
                self._begin(run, epoch)
            yield from self._made_of(run)
            self._last = run.block.slice(len(run) - 1, len(run))
        yield from self._finished()

    def _begin(self, run: Run, epoch: int) -> None:
        self._work, self._epoch = self._stage._working(self._kept), epoch
        self._base = {"below": run.cursors.state(0), **(self._kept or self._work._kept())}
        self._known = {*cursor.known_rows(self._base.get("kept"))}
        self._kept, self._since, self._before, self._given = {}, 0, 0, 0

    @property
    def _every(self) -> int:
        """Rows after the base until the state is asked for."""
        every = self._stage.state_every
        return min(every, 1 + self._before // 32) if _often else every

    def _snapshot(self, run: Run, number: int) -> None:
        assert self._work is not None
        state = self._work._kept()
        if (size := len(json.dumps(state))) > LARGE_STATE:
            way = "keep less, such as hashes in place of rows, or set state_every higher"
            warn_once(f"{self._stage}: its state has {size:,} bytes for a shard: {way}")
        self._base = {"below": run.cursors.state(number), **state}
        self._known = {*cursor.known_rows(state)}
        self._before += self._since
        self._since = self._given = 0

    def _made_of(self, run: Run) -> Iterator[Run]:
        assert self._work is not None
        out = _Out(run.block, (self._base, self._given))
        whose, every = _whose(run.block), self._every
        self._known.update(whose)
        for number, row in enumerate(run.unroll()):
            if type(row) is dict:
                row = cursor.KnownRow.of(row, whose[number])
            elif type(row) is list:  # which a dataset may keep
                row = row.copy()
            if self._since >= every and not self._skip:
                self._snapshot(run, number)
                every = self._every
                self._known.update(whose[number:])
            self._since += 1
            results = self._called("process", lambda row=row: self._work.process(row), run, number)
            place = 0
            while rows := self._taken(results, RUN_ROWS, run, number):
                for result, known_by in rows:
                    place += 1
                    self._give(result, known_by or whose[number], out, number, place, whose[number])
                if len(out.rows) >= RUN_ROWS:
                    yield out.run()
                    out = _Out(run.block, (self._base, self._given))
        yield out.run()

    def _finished(self) -> Iterator[Run]:
        if self._work is None or self._last is None:
            return
        last = unplaced(self._last)
        results = self._called("finish", lambda: self._work.finish(), last, 0)
        (at,) = _whose(self._last)
        out, place = _Out(self._last, (self._base, self._given)), 1 << 20
        while rows := self._taken(results, RUN_ROWS, last, 0):
            for row, known_by in rows:
                place += 1
                self._give(row, known_by or at, out, 0, place, at)
            yield out.run()
            out = _Out(self._last, (self._base, self._given))
        if self._skip:
            said = (
                f"the state was saved after {self._given + self._skip} rows, of which it now makes"
            )
            way = "use the stage as it was, or load the state as it was saved"
            raise StateError(f"{self._stage}: {said} {self._given}: {way}")
        self._work = self._last = None

    def _give(self, row: Any, whose: Whose, out: _Out, number: int, place: int, at: Whose) -> None:
        if row is None:
            raise DataError(f"{self._stage}: a row is None; leave it out instead")
        self._given += 1
        if self._skip:
            self._skip -= 1
            out.ends[0] = (self._base, self._given)
            return
        if whose is not at and whose in self._known:
            out.held[len(out.rows)] = whose
        out.rows.append(row)
        out.places.append((number, place))
        out.ends.append((self._base, self._given))

    def _called(self, name: str, call: Any, run: Run, number: int) -> Iterator[Any]:
        try:
            returned = self._stage._draw_watch.around(call)()
            # islice() calls iter() again, at which some results begin anew.
            return chain(rows_in(returned, self._stage, f"{name}()"))
        except Exception as error:
            self._blame(error, run, number)
            raise

    def _taken(
        self, results: Iterator[Any], most: int, run: Run, number: int
    ) -> list[tuple[Any, Whose | None]]:
        """Rows as they are when each is given: the stage may change them later."""
        try:
            take = self._stage._draw_watch.around(lambda: list(map(_given, islice(results, most))))
            taken: list[tuple[Any, Whose | None]] = take()
            return taken
        except Exception as error:
            self._blame(error, run, number)
            raise

    def _blame(self, error: Exception, run: Run, number: int) -> None:
        ids = run.row_ids(number)
        blame(error, self._stage, int(ids[0]) if len(ids) else None)


def _given(row: Any) -> tuple[Any, Whose | None]:
    """A copy of a row, and the row that it is, where the stage got it as such."""
    if isinstance(row, cursor.KnownRow):
        return dict(row), getattr(row, "whose", None)
    return copies([row])[0], None


def _whose(block: Block) -> list[Whose]:
    """Number, epoch and part of each row."""
    each = (
        np.broadcast_to(np.asarray(value), len(block)).tolist()
        for value in (block.epoch, block.part)
    )
    return list(zip(block.ids.tolist(), *each, strict=True))


class _Out:
    """Rows of a run that is made, with the row that each is made of and the position after each."""

    def __init__(self, below: Block, start: tuple[dict[str, Any], int]) -> None:
        self._below = below
        self.rows: list[Any] = []
        self.places: list[tuple[int, int]] = []
        self.ends = [start]
        #: Of rows that were held back, by place: which they are.
        self.held: dict[int, tuple[int, int, int]] = {}

    def run(self) -> Run:
        number, place = np.array(self.places, dtype=np.int64).reshape(-1, 2).T.copy()
        below = self._below.take(number)
        if self.held:
            whose = _whose(below)
            for row, known_by in self.held.items():  # known by the row that they came with
                place[row] += whose[row][0] % HELD_PLACES
                whose[row] = known_by
            ids, epoch, part = np.array(whose, dtype=np.int64).T.copy()
            below.ids, below.epoch, below.part = ids, epoch, part
            if (made_of := below.made_of) is not None:
                rows = [slice(row, row + 1) for row in range(len(whose))]
                below.made_of = Pieces.join([
                    Pieces.whole(ids[row], epoch[row]) if row.start in self.held else made_of.at(row)
                    for row in rows
                ])  # fmt: skip
        part = below.part + (place << PLACE_BITS)
        block = Block(self.rows, below.ids, epoch=below.epoch, part=part)
        block.made_of = below.made_of
        bases: list[dict[str, Any]] = []
        which: list[int] = []
        for base, _ in self.ends:
            if not bases or bases[-1] is not base:
                bases.append(base)
            which.append(len(bases) - 1)
        counts = np.array([count for _, count in self.ends], dtype=np.int64)
        return Run(block, Cursors(tuple(bases), np.array(which, dtype=np.int64), counts))
