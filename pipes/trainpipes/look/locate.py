"""``locate``: any batch of a run, made again, with the rows it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainpipes._internal.checks import whole_number
from trainpipes._internal.progress import counted
from trainpipes._internal.text import shown
from trainpipes.engine.iterating.consumer_iterator import ConsumerIterator, RunOptions
from trainpipes.engine.iterating.session import Session
from trainpipes.engine.topology import Topology
from trainpipes.errors import ConfigError, StateError
from trainpipes.loader import Loader
from trainpipes.look.provenance import Provenance
from trainpipes.pipeline import Pipeline
from trainpipes.state.format import Position


@dataclass(frozen=True, eq=False)
class LocatedBatch:
    """A batch that was found again. Printed, it is a table of its rows.

    Attributes:
        batch: the very batch, before stages that place it (``pin``, ``to``).
        places: where its rows come from.
        epoch: the pass over the data, from 0.
        m: its number in that, over all ranks.
        rank: the rank that has it.
        world_size: ranks of that run.
    """

    batch: Any
    places: Provenance
    epoch: int
    m: int
    rank: int
    world_size: int

    def __str__(self) -> str:
        who = f"rank {self.rank} of {self.world_size}" if self.world_size > 1 else "one rank"
        head = f"batch m = {self.m} of epoch {self.epoch}, {who}"
        return f"{head}\n{self.places.table(self.places.texts)}"

    __repr__ = __str__


def locate(
    run: Loader | Pipeline,
    at: int | Mapping[str, Any],
    *,
    after: int = 0,
    epoch: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> LocatedBatch:
    """Find a batch of a run, past or to come: make it again, and say where its rows come from. Moves nothing.

    Where batches are counted, by arithmetic: at most the shuffle windows of its rows are read. Of others the
    rank's batches from the epoch's start, or from a state, are made again one after the other.

    Args:
        run: the pipeline, or its loader; one with other workers or threads will do.
        at: the batch's number among those of its rank in the epoch, from 0, as ``enumerate(loader)`` counts
            them where the epoch began on this number of ranks; or a state, for the batch that comes next
            after it. Where batches are not counted and there are several ranks, a state with the shards of
            the rank asked about.
        after: with a state, so many batches later. Where batches are counted it may be less than 0: -1 is
            the last one before the state.
        epoch: the pass that ``at`` counts in; if left out, the one that is under way in ``run``, or comes
            next.
        rank: whose batch; this process's if left out.
        world_size: ranks of the run; those of this process's if left out.

    Raises:
        StateError: the state does not fit, or there is no such batch.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(["one", "two", "three", "four"]).shuffle(4).batch(2)
    >>> found = tp.locate(pipe, 1, epoch=7)
    >>> found.batch
    ['two', 'one']
    >>> print(found)
    batch m = 1 of epoch 7, one rank
    in batch  row  epoch  text
    0         1    7      two
    1         0    7      one
    """
    if not isinstance(run, Loader | Pipeline):
        raise ConfigError(f"locate(run) takes a pipeline or a Loader, got {type(run).__name__}")
    session = run._session
    topology = _topology(session, rank, world_size)
    if isinstance(at, Mapping):
        if epoch is not None:
            raise ConfigError(
                f"locate(epoch) goes with the number of a batch, got {shown(epoch)} and a state: "
                "leave epoch out"
            )
        whole_number(after, None, "locate(after)", "batches after the state")
        position, passed = session.parse(at), after
    else:
        whole_number(at, 0, "locate(at)", "a batch's number in its epoch, or a state")
        if after:
            raise ConfigError(
                f"locate(after) counts from a state, got {shown(after)} without one: "
                "give a state, or leave after out"
            )
        position, passed = _start(session, epoch), at
    return _found(session, topology, position, passed)


def _topology(session: Session, rank: int | None, world_size: int | None) -> Topology:
    own, world = session.ranks()
    if world_size is not None:
        whole_number(world_size, 1, "locate(world_size)", "ranks of the run")
        world = world_size
    if rank is None:
        rank = own
    whole_number(rank, 0, "locate(rank)", "a rank of the run")
    if rank >= world:
        way = "give world_size, too" if world_size is None else "ranks count from 0"
        raise ConfigError(f"locate(rank) is a rank of {world}, got {rank}; {way}")
    topology, chain = Topology(rank, world), session.plan.chain
    topology.check(chain.num_shards, chain.shard is not None, chain.opener.one_consumer)
    return topology


def _start(session: Session, epoch: int | None) -> Position:
    if epoch is None:
        return session.start_of_epoch_at_hand()
    whole_number(epoch, 0, "locate(epoch)", "a pass over the data")
    return session.start_of(epoch)


def _found(session: Session, topology: Topology, start: Position, passed: int) -> LocatedBatch:
    plan, world = session.plan, topology.world_size
    position, walked = start, passed
    if plan.counted:  # the step that holds it
        position, walked = replace(start, m=start.m + passed * world), 0
        if position.m < 0:
            raise StateError(
                f"locate(after={passed}) goes back beyond the start of epoch {start.epoch}, of "
                f"which m = {start.m} batches (of all ranks) were done in this state; for a "
                "batch of another epoch give its number, and epoch="
            )
    elif passed < 0:
        raise StateError(
            f"locate(after={passed}) cannot count back from a state here, since in this pipeline "
            "the rows of a batch do not follow from its number (as with a filter, or pack()): "
            "give an earlier state, or the batch's number in its epoch"
        )
    else:
        position.require(topology.shards(start.m, start.num_shards))
    items = ConsumerIterator(plan, topology, position, position.m, RunOptions(with_rows=True))
    try:
        for _ in counted(range(walked), "making the batches before it", walked, "batches"):
            next(items)
        batch = next(items)
    except StopIteration:
        raise _beyond(passed, topology, start) from None
    finally:
        items.close()
    assert items.rows is not None
    assert items.m is not None
    places = Provenance(items.rows, plan.inputs)
    return LocatedBatch(batch, places, start.epoch, items.m, topology.rank, world)


def _beyond(passed: int, topology: Topology, start: Position) -> StateError:
    whose = f"of rank {topology.rank} of {topology.world_size} " if topology.world_size > 1 else ""
    since = f"from m = {start.m} on " if start.m else ""
    return StateError(f"epoch {start.epoch} {whose}has no batch number {passed} {since}(from 0)")
