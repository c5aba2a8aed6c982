"""``find``: in which steps of a run some rows are, as ``locate`` finds the rows of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import IntArray, require, whole_number
from trainpipes._internal.messages import Printed
from trainpipes.engine.iterating.iteration_state import (
    MOST_EPOCHS,
    IterationState,
    PipelineOrLoader,
    iteration_of,
)
from trainpipes.engine.record import Record, is_pipeline_or_loader
from trainpipes.errors import ConfigError, hidden
from trainpipes.look.row_numbers import RowName, named, numbered
from trainpipes.look.row_steps import steps_of
from trainpipes.state.format import Position, carried

#: Lines that a text shows.
MOST_LINES = 20
RUN_RULE = "a pipeline or a Loader"
#: What is known of each time that a row comes, in numbers.
COLUMNS = ("row", "epoch", "step", "rank", "index", "m", "data_epoch")


@dataclass(frozen=True)
class FoundRow:
    """Where a row is in a run.

    Attributes:
        row: its place in the list that was given, from 0.
        epoch: of the batch, as ``locate(epoch=)`` takes it.
        step: the batch's number among those of its rank in the epoch, from 0.
        rank: that has it.
        index: the row of the batch, from 0; of a packed one the row that it is packed into.
        m: the batch's number in the epoch over all ranks.
        data_epoch: how often the data was gone through before, where an epoch repeats it; else ``epoch``.
            In a ``mix`` as ``RowPlace.epoch``.
        seen: whether the run has seen it, where a state is given.
    """

    row: int
    epoch: int
    step: int
    rank: int
    index: int
    m: int
    data_epoch: int
    seen: bool | None = None


@dataclass(frozen=True, eq=False, repr=False)
class FoundRows(Printed):
    """Where rows are in a run: a ``FoundRow`` for each time that one comes, in the order of the run. Prints
    as a table.

    Attributes:
        row, epoch, step, rank, index, m, data_epoch: those of all of them, int64 ``[found]``.
        seen: bool ``[found]``; None without a state.
        missing: which of the given rows come in no batch of these epochs, int64: those that a filter,
            ``take`` or ``drop_last`` leaves out.
        world_size: ranks of the run.
    """

    row: IntArray
    epoch: IntArray
    step: IntArray
    rank: IntArray
    index: IntArray
    m: IntArray
    data_epoch: IntArray
    seen: npt.NDArray[np.bool_] | None
    missing: IntArray
    world_size: int
    _names: Sequence[RowName] = field(default=())
    _epochs: Sequence[int] = field(default=())

    def __len__(self) -> int:
        return len(self.row)

    def __iter__(self) -> Iterator[FoundRow]:
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, place: int) -> FoundRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[FoundRow]: ...
    def __getitem__(self, place: int | slice) -> FoundRow | list[FoundRow]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        seen = None if self.seen is None else bool(self.seen[place])
        return FoundRow(**{name: int(getattr(self, name)[place]) for name in COLUMNS}, seen=seen)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return {
            "found": [{**self._name(row.row), **asdict(row)} for row in self],
            "missing": [{**self._name(row), "row": row} for row in self.missing.tolist()],
            "world_size": self.world_size,
        }

    def _name(self, row: int) -> dict[str, Any]:
        name = named(self._names[row], "find(rows)")
        return {
            "path": name.path and hidden(name.path),
            "row_in_file": name.row,
            "source": name.source,
        }

    def _rows(self) -> list[Sequence[str]]:
        shown = list(islice(self, MOST_LINES))
        names = [self._name(found.row) for found in shown]
        columns: dict[str, list[Any]] = {
            "file": [name["path"] for name in names],
            "source": [name["source"] for name in names],
            "row": [name["row_in_file"] for name in names],
            **{title: [getattr(f, title) for f in shown] for title in ("epoch", "step", "rank")},
            "in batch": [found.index for found in shown],
            "seen": [{True: "seen", False: "to come", None: None}[found.seen] for found in shown],
        }
        filled = {
            title: ["" if cell is None else str(cell) for cell in cells]
            for title, cells in columns.items()
            if any(cell is not None for cell in cells)
        }
        return [list(filled), *zip(*filled.values(), strict=True)]

    def __str__(self) -> str:
        more = f"… and {len(self) - MOST_LINES:,} more" if len(self) > MOST_LINES else ""
        text = super().__str__() if len(self) else ""
        return "\n".join(filter(None, [self._said(), text, more]))

    def _said(self) -> str:
        rows = len(self._names) - len(self.missing)
        other = (np.diff(self.epoch) != 0) | (np.diff(self.m) != 0)
        batches = int(other.sum()) + (len(self) > 0)
        first, last = min(self._epochs), max(self._epochs)
        epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        said = f"{rows:,} of {len(self._names):,} rows in {batches:,} batches of {epochs}{ranks}"
        if self.seen is not None:
            seen = int(self.seen.sum())
            said += f"; {seen:,} times seen, {len(self) - seen:,} times to come"
        return said


def find(
    run: PipelineOrLoader,
    rows: Sequence[RowName],
    *,
    epoch: int | Iterable[int] | None = None,
    state: Mapping[str, Any] | None = None,
    steps: int | None = None,
    world_size: int | None = None,
) -> FoundRows:
    """Find the steps of a run that have some rows: what ``locate`` is the inverse of. The run does not move.

    Where batches are counted, it is arithmetic, and nothing is read: a million rows take a few seconds.
    Else it goes through the batches of these epochs, and reads what filters, packing and batches by length
    look at; nothing where these are not in the chain. It does so by the pipeline as it is now: an epoch of
    such batches in which ``allow_changes`` changed them is found as it would be without the change.

    Args:
        run: the pipeline, or its loader; with any number of workers and threads.
        rows: each a tuple of a file and the row's number in it, from 0; a place from ``locate`` or an error;
            a path, for all rows of a file; or a number over all rows where these are of no file. Of a path,
            the end that tells it from others is enough. A row in several ``windows`` is found in each.
        epoch: one or several; if left out that of the state, else the one under way in ``run``, or the next.
        state: of the run: says of each time whether the run has seen it, or it is still to come.
        steps: only the first ones of each epoch; needed where an epoch has no end.
        world_size: ranks of the run; those of this process's if left out. A batch's number ``m`` is the same
            for any.

    Raises:
        ConfigError: an option is invalid, or a file is not one of the pipeline's, or not the only one of its
            name.
        StateError: the state does not fit.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(["one", "two", "three", "four"]).shuffle(4).batch(2)
    >>> found = tp.find(pipe, [0, 3], epoch=7)
    >>> print(found)
    2 of 2 rows in 2 batches of epoch 7
    row  epoch  step  rank  in batch
    3    7      0     0     0
    0    7      1     0     1
    >>> tp.locate(pipe, found[1].step, epoch=7).batch[found[1].index]
    'one'
    """
    require(is_pipeline_or_loader(run), "find(run)", RUN_RULE, run)
    if steps is not None:
        whole_number(steps, 1, "find(steps)", "steps of each epoch")
    iteration = iteration_of(run)
    stands, plan = (None, iteration.plan) if state is None else iteration.looked_at(state)
    rank, world = iteration.ranks()
    world = (
        world if world_size is None else whole_number(world_size, 1, "find(world_size)", "ranks")
    )
    iteration_of(
        Record(plan.chain.stages).distributed(rank=min(rank, world - 1), world_size=world)
    ).topology()
    if plan.chain.has_no_end and steps is None:
        raise ConfigError(
            "find(steps) must be given where an epoch has no end, got None; "
            "give the steps of the run that are to be looked at"
        )
    starts = _starts(iteration, epoch, stands)
    names = numbered(plan.inputs, rows, "find(rows)")
    parts: list[Sequence[IntArray]] = []
    for start in starts:
        found = steps_of(plan, start, names, world, steps)
        counts = np.diff(names.bounds)[found.which]
        first = names.bounds[:-1][found.which]
        each = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
        epoch_of_run = np.full(len(each), start.pass_number, dtype=np.int64)
        repeats = plan.chain.repeat is not None or plan.chain.mixes
        parts.append((
            names.which[first[each] + place], epoch_of_run, found.step[each], found.m[each] % world,
            found.place[each], found.m[each], found.epoch[each] if repeats else epoch_of_run,
        ))  # fmt: skip
    columns = {
        name: np.concatenate(values)
        for name, values in zip(COLUMNS, zip(*parts, strict=True), strict=True)
    }
    seen = None
    if stands is not None:
        before, now = columns["epoch"] < stands.pass_number, columns["epoch"] == stands.pass_number
        seen = before | (now & (columns["m"] < stands.m))
    missing = np.flatnonzero(np.bincount(columns["row"], minlength=len(rows)) == 0)
    epochs = [start.pass_number for start in starts]
    return FoundRows(
        **columns, seen=seen, missing=missing, world_size=world, _names=rows, _epochs=epochs
    )


def _starts(
    iteration: IterationState, epoch: int | Iterable[int] | None, stands: Position | None
) -> list[Position]:
    """The start of each epoch that is asked for."""
    at_hand = iteration.start_of_epoch_at_hand()
    if stands is not None:
        at_hand = Position(
            stands.pass_number, 0, stands.num_shards, sizes=stands.sizes, reweighed=stands.reweighed
        )
    if epoch is None:
        return [at_hand]
    epochs = sorted({*epoch}) if isinstance(epoch, Iterable) else [epoch]
    require(epochs, "find(epoch)", "one epoch or more", epoch)
    for number in epochs:
        whole_number(number, 0, "find(epoch)", "from 0 on", MOST_EPOCHS - 1)
    starts = []
    for number in epochs:
        start = at_hand
        if number != at_hand.pass_number:
            start = iteration.start_of(number)
            if stands is not None:
                later = carried(stands.reweighed) if number > stands.pass_number else ()
                start.reweighed = later
        starts.append(start)
    return starts
