"""``locate``: any batch of a run, made again, with the file, row group and row of each of its rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from trainpipes._internal.checks import IntArray, require, whole_number
from trainpipes._internal.messages import Printed
from trainpipes._internal.progress import counted
from trainpipes.columns.block import Pieces
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import LazyBatches
from trainpipes.engine.iterating.consumer import Consumer, RunOptions
from trainpipes.engine.iterating.iteration_state import PipelineOrLoader, iteration_of
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record, is_pipeline_or_loader
from trainpipes.errors import StateError, hidden
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import aside
from trainpipes.interfaces.stateful_stage import StatefulStage
from trainpipes.order.layout import Topology
from trainpipes.state.format import Position, carried

#: Columns of a table, by what they show.
TITLES = {
    "index": "in batch", "source": "source", "path": "file", "row_group": "row group", "row": "row",
    "epoch": "epoch",
}  # fmt: skip


class KnownItem(NamedTuple):
    """An item with its rows: ``ids`` in file order over all files and ``epochs``, int64 ``[rows]``;
    ``pieces`` where they are packed."""

    item: Any
    ids: IntArray
    epochs: IntArray
    pieces: Pieces | None


def known_items(run: Run) -> MutableSequence[Any]:
    items, block, bounds = run.unroll(), run.block, run.bounds
    count = len(items)
    if bounds is None:
        bounds = np.arange(count + 1, dtype=np.int64)
    epochs = np.broadcast_to(np.asarray(block.epoch, dtype=np.int64), len(block))
    ids, made_of = block.ids, block.made_of

    def known(k: int) -> KnownItem:
        rows = slice(int(bounds[k]), int(bounds[k + 1]))
        pieces = None if made_of is None else made_of.at(rows)
        item, items[k] = items[k], None  # held once
        return KnownItem(item, ids[rows], epochs[rows], pieces)

    if isinstance(items, LazyBatches):
        return LazyBatches(known, count)
    return [known(k) for k in range(count)]


def _keep_pieces(plan: Plan) -> None:
    plan.inputs.keeps_pieces = True
    for part in plan.mixed.values():
        _keep_pieces(part)


@dataclass(frozen=True, repr=False)
class RowPlace(Place):
    """Where a row of a batch comes from.

    Attributes:
        path: the file; None where rows are of no file.
        row_group: of a Parquet file, from 0; of rows in memory, their block.
        row: in the file, data set or stream, from 0; None for an image.
        source: its name in a ``mix``, or its number in a ``zip``.
        index: the row of the batch, from 0.
        epoch: from 0; in a ``mix`` that of its source, where those of the mix's epoch n begin at n * 2**20,
            as do those of pass n of an endless ``repeat``.
    """

    index: int = 0
    epoch: int = 0


class Provenance(Printed, list[RowPlace]):
    """Where the rows of a batch come from: a ``RowPlace`` for each, in order; for each document of a packed
    row, as ``segment_ids`` counts them, each row of a window, and each source of a row of ``zip``. Prints
    as a table.
    """

    def __init__(self, rows: KnownItem, inputs: Inputs) -> None:
        super().__init__()
        pieces = Pieces.whole(rows.ids, rows.epochs) if rows.pieces is None else rows.pieces
        ids, epochs, bounds = (column.tolist() for column in pieces)
        for index, (first, stop) in enumerate(pairwise(bounds)):
            for n in range(first, stop):
                for p in inputs.places_of(ids[n]):
                    self.append(RowPlace(p.path, p.row_group, p.row, p.source, index, epochs[n]))

    def _rows(self) -> list[Sequence[str]]:
        paths = [hidden(place.path) for place in self if place.path is not None]
        prefix = os.path.commonprefix(paths)  # noqa: RUF071
        folder = prefix[: prefix.rfind("/") + 1]
        columns = {}
        for name, title in TITLES.items():
            values = (getattr(place, name) for place in self)
            cells = ["" if value is None else hidden(str(value)) for value in values]
            if any(cells):
                columns[title] = [cell.removeprefix(folder) for cell in cells]
        return [list(columns), *zip(*columns.values(), strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class LocatedBatch(Printed):
    """A batch that was found again. Prints as a table of its rows.

    Attributes:
        batch: as the loader gave it, before ``pin`` and ``to``.
        places: where its rows come from.
        epoch: from 0.
        m: its number in the epoch, over all ranks.
        rank: the rank that has it.
        world_size: ranks of that run.
        note: what cannot be known of them; "" for most pipelines.
    """

    batch: Any
    places: Provenance
    epoch: int
    m: int
    rank: int
    world_size: int
    note: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank} of {self.world_size}" if self.world_size > 1 else "one rank"
        head = f"batch m = {self.m} of epoch {self.epoch}, {who}"
        return "\n".join([head, str(self.places), *filter(None, [self.note])])


def locate(
    run: PipelineOrLoader,
    at: int | Mapping[str, Any],
    *,
    after: int = 0,
    epoch: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> LocatedBatch:
    """Find a batch of a run, past or to come: make it again, and say where its rows come from. The run does
    not move.

    Where batches are counted, it reads at most the shuffle windows of its rows. Others are made again one
    after the other, from the epoch's start or from a state; by the pipeline as it is now, so that within an
    epoch in which ``allow_changes`` changed these, only a state saved since gives batches after the change.

    Args:
        run: the pipeline, or its loader; with any number of workers and threads.
        at: the batch's number among those of its rank in the epoch, from 0, as ``enumerate(loader)`` counts;
            or a state, for the batch after it. For several ranks and uncounted batches, a state with the
            shards of that rank.
        after: with a state, so many batches later; less than 0 (-1 is the last one before the state) where
            batches are counted.
        epoch: that ``at`` counts in; if left out, the one under way in ``run``, or the next.
        rank: whose batch; this process's if left out.
        world_size: ranks of the run; those of this process's if left out.

    Raises:
        ConfigError: an option is invalid, or ``after`` goes back too far.
        StateError: the state does not fit, or there is no such batch.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(["one", "two", "three", "four"]).shuffle(4).batch(2)
    >>> found = tp.locate(pipe, 1, epoch=7)
    >>> found.batch
    ['two', 'one']
    >>> print(found)
    batch m = 1 of epoch 7, one rank
    in batch  row  epoch
    0         1    7
    1         0    7
    """
    require(is_pipeline_or_loader(run), "locate(run)", "a pipeline or a Loader", run)
    iteration = iteration_of(run)
    plan, (own_rank, world) = iteration.plan, iteration.ranks()
    rank, world = own_rank if rank is None else rank, world if world_size is None else world_size
    topology = iteration_of(
        Record(plan.chain.stages).distributed(rank=rank, world_size=world)
    ).topology()
    if isinstance(at, Mapping):
        require(epoch is None, "locate(epoch)", "None where a state is given", epoch)
        whole_number(after, None, "locate(after)", "batches after the state")
        (start, plan), passed = iteration.looked_at(at), after
    else:
        whole_number(at, 0, "locate(at)", "a batch's number in its epoch, or a state")
        require(not after, "locate(after)", "0 where no state is given", after)
        start, passed = iteration.start_of_epoch_at_hand(), at
        if epoch is not None:
            start = iteration.start_of(whole_number(epoch, 0, "locate(epoch)", "from 0 on"))
    way = f"the state is {start.m} batches from the start of epoch {start.pass_number}"
    position = start
    if plan.counted:  # the step that holds it
        position = replace(start, m=start.m + passed * topology.world_size)
        require(position.m >= 0, "locate(after)", "within the epoch", passed, way)
    else:
        rule = "0 or more where batches are not counted (as with a filter, or pack())"
        way = "give an earlier state, or the batch's number in its epoch"
        require(passed >= 0, "locate(after)", rule, passed, way)
        position.require(topology.shards(start.m, start.num_shards))
    walked = 0 if plan.counted else passed
    _keep_pieces(plan)
    located, items = _walk(plan, topology, position, walked)
    is_over = start.m > 0 and items.m is None and not plan.counted and not plan.grows
    if is_over and not items.others_have_more:  # the run goes on with the next epoch
        number, weights = iteration.passes.after(start.pass_number), carried(start.reweighed)
        start = Position(number, 0, start.num_shards, reweighed=weights)
        located, items = _walk(plan, topology, start, walked)
    if located is None:
        raise _beyond(passed, topology, start)
    assert items.m is not None
    where = start.pass_number, items.m, topology.rank, topology.world_size
    return LocatedBatch(located.item, Provenance(located, plan.inputs), *where, _note(plan))


def _walk(
    plan: Plan, topology: Topology, position: Position, walked: int
) -> tuple[KnownItem | None, Consumer]:
    """The item after so many from a position on, None if there is none; and what gave it."""
    items = Consumer(plan, topology, position, options=RunOptions(unroll=known_items))
    try:
        with aside():
            for _ in counted(range(walked), "making the batches before it", walked, "batches"):
                next(items)
            return next(items), items
    except StopIteration:
        return None, items
    finally:
        items.close()


def _note(plan: Plan) -> str:
    """What a stage of the user's that keeps something between rows leaves open."""
    making = [stage for stage in plan.chain.after if isinstance(stage, StatefulStage)]
    lines = [
        f"{stage} may have made rows of several: each is named by the one that it came with; dicts that were "
        "held back and given as they were keep their names"
        for stage in making
    ]
    return "\n".join([*lines, *filter(None, map(_note, plan.mixed.values()))])


def _beyond(passed: int, topology: Topology, start: Position) -> StateError:
    whose = f"of rank {topology.rank} of {topology.world_size} " if topology.world_size > 1 else ""
    since = f"from m = {start.m} on " if start.m else ""
    return StateError(
        f"epoch {start.pass_number} {whose}has no batch number {passed} {since}(from 0)"
    )
