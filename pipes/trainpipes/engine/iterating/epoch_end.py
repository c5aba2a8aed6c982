"""Messages at an epoch's end: that it gave nothing, batches that its ranks leave out, counts of stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from trainpipes._internal.messages import warn_once
from trainpipes.engine.planning.plan import Plan
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Numbers
from trainpipes.interfaces.stage_kinds import BatchingStage, CountingStage, PackingStage, RunStage
from trainpipes.order.layout import Topology
from trainpipes.state.format import Position

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
