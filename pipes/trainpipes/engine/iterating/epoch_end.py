"""An epoch's two ends: what the data-parallel ranks agree on, where it ends and which files it has; and what
is said at its end: that it gave nothing, batches that its ranks leave out, counts of stages.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.utils.data import get_worker_info

from trainpipes._internal.messages import warn_once
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import MissingFilesError, TopologyError
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Numbers
from trainpipes.interfaces.stage_kinds import BatchingStage, CountingStage, PackingStage, RunStage
from trainpipes.order.layout import Topology
from trainpipes.state.format import Position

#: Of an integer of each rank the least, or with True the sum.
Agreement = Callable[[int, bool], int]

#: How long to wait for a rank whose batches take long.
TIMEOUT = timedelta(minutes=30)

#: By the default group and the members.
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroupGloo] = {}
# Their threads must end before the interpreter does: later the process may be aborted.
atexit.register(_groups.clear)


def agreement_over(topology: Topology) -> Agreement:
    """An all-reduce of the minimum, or the sum, over the data-parallel ranks, in a gloo group of their own.
    One rank agrees with itself.

    Raises:
        TopologyError: ``torch.distributed`` is not initialized, or has other ranks.
    """
    if topology.world_size == 1:
        return lambda number, _: number
    group = _group_over(
        topology,
        "row counts of this pipeline are not known in advance",
        "where an epoch ends",
        "add .repeat() and count steps",
    )

    def agreed(number: int, total: bool) -> int:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if total else dist.ReduceOp.MIN  # type: ignore[assignment]
        shared = torch.tensor([number], dtype=torch.int64, device="cpu")
        group.allreduce([shared], options).wait()  # type: ignore[attr-defined]
        return int(shared.item())

    return agreed


def from_first_rank(
    topology: Topology, make: Callable[[], str], why: str, subject: str, or_else: str
) -> str:
    """A text that rank 0 makes, on all data-parallel ranks; if it fails there, it fails on all.

    Raises:
        TopologyError: as ``agreement_over`` does, or the ranks are not all of ``torch.distributed``.
    """
    text, failed = "", None
    if topology.rank == 0:
        try:
            text = f"+{make()}"
        except Exception as error:
            text, failed = f"-{type(error).__name__}: {error}", error
    group = _group_over(topology, why, subject, or_else)
    if topology.members and len(topology.members) != dist.get_world_size():
        raise TopologyError(
            f"{why}, which all processes must agree on, and the mesh has {len(topology.members)} of "
            f"{dist.get_world_size()} of them: make a pipeline of the files of each epoch, list_files(names)"
        )
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    group.broadcast([size], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
    if topology.rank:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
    group.broadcast([data], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
    if failed is not None:
        raise failed
    said = data.numpy().tobytes().decode()
    if said[0] == "-":
        raise MissingFilesError(f"rank 0 could not list the files of this epoch: {said[1:]}")
    return said[1:]


def members_of(topology: Topology, why: str, subject: str, or_else: str) -> tuple[int, ...]:
    """The data-parallel ranks among those of ``torch.distributed``; raises TopologyError if unknown."""
    if not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            f"{why}, so that its ranks must agree {subject}, and torch.distributed is not initialized: call "
            f"init_process_group() first, or {or_else}"
        )
    members = topology.members or tuple(range(dist.get_world_size()))
    if len(members) != topology.world_size:
        raise TopologyError(
            f"the pipeline is one of {topology.world_size} ranks, and torch.distributed has "
            f"{len(members)}, so that it is not known which ranks must agree {subject}: give "
            "pipe.distributed(mesh=...) the data-parallel dimension of a DeviceMesh"
        )
    return members


def _group_over(topology: Topology, why: str, subject: str, or_else: str) -> dist.ProcessGroupGloo:
    members = members_of(topology, why, subject, or_else)
    if (
        get_worker_info() is not None
    ):  # such as a function of a Loader, whose connections are the parent's
        raise TopologyError(
            f"{why}, so that its ranks must agree {subject}, and they cannot in a worker process: iterate it "
            f"in the process that trains, give it pipe.distributed(rank=0, world_size=1), or {or_else}"
        )
    world = dist.group.WORLD
    if (world, members) not in _groups:
        for known in [known for known in _groups if known[0] is not world]:
            del _groups[known]  # of an earlier world
        _groups[world, members] = _group(members)
    return _groups[world, members]


def _group(members: tuple[int, ...]) -> dist.ProcessGroupGloo:
    """A gloo group that only its members make, since ``new_group(use_local_synchronization=True)`` hangs
    where members are in different numbers of groups.
    """
    name = "trainpipes/agreement/" + "-".join(map(str, members))
    store, rank = PrefixStore(name, _get_default_store()), members.index(dist.get_rank())
    return dist.ProcessGroupGloo(store, rank, len(members), TIMEOUT)


log = logging.getLogger("trainpipes")

#: Batches that a rank makes to count those it leaves out, and the text in place of more of them.
MOST_COUNTED = 256
MANY = 1 << 40


def say_counts(plan: Plan, consumer: Topology, start: Position, before: Sequence[Numbers]) -> None:
    """Log the counts of stages in a pass, or warn of them."""
    rank = f", rank {consumer.rank}" if consumer.world_size > 1 else ""
    worker = f", worker {consumer.worker}" if consumer.num_workers > 1 else ""
    since = f" from batch {start.m} on" if start.m else ""
    name = f"epoch {start.pass_number}{rank}{worker}{since}"
    for tally, numbers in zip(plan.tallies, before, strict=True):
        tally.end()
        if tally.warns and (said := tally.said(tally.since(numbers))):
            log.warning("%s: %s: %s", name, str(tally.stage), said)  # a record holds no workers
        if not start.m and consumer.world_size == consumer.num_workers == 1:
            tally.check_pass(tally.since(numbers))


def say_left_out(plan: Plan, topology: Topology, epoch: int, origin: int, step: int) -> None:
    """Log how many batches were left out where counts are known, since a pass has whole steps."""
    if not plan.counts.known or topology.rank or topology.worker:
        return
    batches = int(plan.counts.end(step, origin))
    if left := int(plan.counts.batches_in_pass) - batches:
        why = f"{step} ranks get as many each"
        if step != topology.world_size:
            why = f"each step has {step}"
        log.info("epoch %d: %s: %s", epoch, _left(left, batches), why)


def say_uneven(
    plan: Plan, topology: Topology, epoch: int, batches: int, left: int, first: int, step: int
) -> None:
    """Log how many batches were left out since ranks end together, where batch ``first`` is missing."""
    if not left:
        if not batches:
            warn_if_all_empty(plan, topology, step)
        return
    shard = first % plan.chain.num_shards if first < plan.chain.num_shards else None
    ranks = "the ranks end together," if topology.world_size > 1 else "steps end"
    loss, why = _left(left, batches), f"{ranks} where the first shard does"
    way = "add .repeat() and count steps, to leave out none"
    if shard is not None:
        stages = " and ".join(map(str, _dropping(plan))) or "the stages"
        why = f"{why}, and {stages} left shard {shard} no row"
        way = (
            "a filter by where rows stand in the files leaves some shards none: write the rows that it keeps "
            'to files of their own, or deal rows in turn by sharding_filter(split="stride")'
        )
    log.warning("epoch %d: %s: %s; %s", epoch, loss, why, way)


def _left(left: int, batches: int) -> str:
    if left >= MANY:
        return f"at least {left % MANY:,} batches are left out besides {batches:,}"
    part = left / (left + batches)
    are = "is" if left == 1 else "are"
    return f"{left:,} of {left + batches:,} batches ({part:.1%}) {are} left out"


def warn_if_all_empty(plan: Plan, topology: Topology, step: int) -> None:
    """Warn once for a pipeline that a consumer's whole epoch gave nothing, and why."""
    world, workers = topology.world_size, topology.num_workers
    if plan.quiet or (plan.chain.uneven and world > 1):
        return
    if plan.counts.known:  # a single rank says it for all
        if topology.rank or topology.worker or plan.counts.end(step):
            return
    elif workers > 1:
        return
    cause = _cause(plan, world, step)
    if cause is not None:
        warn_once(f"an epoch of this pipeline gives nothing: {cause}", plan.identity)


def _cause(plan: Plan, world: int, step: int) -> str | None:
    """Which stages left nothing of how many rows; None if unknown."""
    source = plan.inputs.source
    rows = int(source.lengths.sum()) if isinstance(source, RowSource) else None
    stages = _dropping(plan)
    if rows == 0 or any(stage.traits.share == 0 or _takes_none(stage) for stage in stages):
        return None
    if plan.counts.known and plan.counts.batches_in_pass:
        batches = int(plan.counts.batches_in_pass)
        fewer = (
            f"{world} ranks, which get as many each" if step == world else f"the {step} of a step"
        )
        return f"its {batches} batches are fewer than {fewer}"
    count = "the rows" if rows is None else f"{rows:,} rows"
    return f"{' and '.join(map(str, stages))} left none of {count}" if stages else None


def _dropping(plan: Plan) -> list[Any]:
    return [s for p in (*plan.mixed.values(), plan) for s in p.chain.stages if _drops(s)]


def _drops(stage: Any) -> bool:
    if isinstance(stage, BatchingStage):
        return bool(stage.drop_last)
    if isinstance(stage, PackingStage):
        return bool(stage.name != "pack")
    some = isinstance(stage, RunStage) and not stage.traits.keeps_rows
    return some or isinstance(stage, CountingStage)


def _takes_none(stage: Any) -> bool:
    return isinstance(stage, CountingStage) and not stage.skips and not stage.count
