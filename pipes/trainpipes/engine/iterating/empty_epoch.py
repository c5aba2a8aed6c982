"""A warning where an epoch gives nothing, which a training loop passes over without a word."""

from __future__ import annotations

from typing import Any

from trainpipes._internal.messages import warn_once
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.topology import Topology
from trainpipes.kinds.source import RowSource


def warn_if_all_empty(plan: Plan, topology: Topology) -> None:
    """Warn, once for a pipeline, that a consumer's whole epoch gave nothing, and say why.

    Says nothing where other consumers may have had something, or where nothing was asked for.
    """
    world, workers = topology.world_size, topology.num_workers
    if plan.quiet or (plan.chain.ragged and world > 1):
        return
    if plan.counts.known:  # one says it for all
        if topology.rank or topology.worker or plan.counts.end(world):
            return
    elif workers > 1:
        return
    cause = _cause(plan, world)
    if cause is not None:
        warn_once(f"an epoch of this pipeline gives nothing: {cause}", plan.identity)


def _cause(plan: Plan, world: int) -> str | None:
    """Which stages left nothing of how many rows; None where there was nothing, or nothing was asked for."""
    rows = (
        int(plan.inputs.source.lengths.sum()) if isinstance(plan.inputs.source, RowSource) else None
    )
    stages = [s for p in (*plan.mixed.values(), plan) for s in p.chain.stages if _drops(s)]
    if rows == 0 or any(stage.share == 0 or _takes_none(stage) for stage in stages):
        return None
    if plan.counts.known and plan.counts.batches_in_pass:
        batches = int(plan.counts.batches_in_pass)
        return f"its {batches} batches are fewer than {world} ranks, which get as many each"
    count = "the rows" if rows is None else f"{rows:,} rows"
    return f"{' and '.join(map(str, stages))} left none of {count}" if stages else None


def _drops(stage: Any) -> bool:
    """Whether a stage may leave items out."""
    if stage.role == "batch":
        return bool(stage.drop_last)
    if stage.role == "pack":
        return bool(stage.name != "pack")
    some = stage.role in ("rows", "finish") and not stage.keeps_rows
    return some or stage.role in ("take", "skip")


def _takes_none(stage: Any) -> bool:
    return stage.role == "take" and bool(stage.count == 0)
