"""Who of many ranks and workers gets what: for ``explain()`` and for choosing ``num_shards``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainpipes.engine.iterating.loader_workers import share_out
from trainpipes.engine.layout import Layout, slots_before
from trainpipes.engine.planning.plan import Plan

__all__ = ["Share", "reads_per_block", "shares"]


@dataclass(frozen=True)
class Share:
    """What one process gets of an epoch.

    Attributes:
        rank: its rank.
        worker: its worker; 0 where the rank itself reads.
        shards: its shards.
        spans: the ranges of rows that it reads.
        rows: rows that it delivers, as planned.
        batches: micro-batches that it delivers; None where that is not known.
    """

    rank: int
    worker: int
    shards: tuple[int, ...]
    spans: tuple[int, ...]
    rows: int
    batches: int | None


def shares(plan: Plan, world_size: int, num_workers: int) -> list[Share]:
    """The share of each process of an epoch: of each worker where there are some, else of each rank."""
    layout = plan.layouts.of(plan.chain.first_epoch(0))
    found = []
    for rank in range(world_size):
        shards = list(range(rank, plan.chain.num_shards, world_size))
        workers = max(1, min(num_workers, len(shards)))
        owners = share_out(shards, layout.num_spans, workers)
        for worker in range(workers):
            own = tuple(s for s in shards if owners[s] == worker)
            spans = tuple(sorted({s % layout.num_spans for s in own}))
            rows = batches = 0
            for shard in own:
                if plan.counts.known:
                    count = slots_before(plan.counts.batches_in_epoch, shard, plan.chain.num_shards)
                    batches += count
                    rows += count * plan.chain.batch_size
                elif isinstance(layout, Layout):
                    start, stop = layout.span(shard % layout.num_spans)
                    rows += (stop - start) // layout.sharers
            known = batches if plan.counts.known else None
            found.append(Share(rank, worker, own, spans, rows, known))
    return found


def reads_per_block(plan: Plan, processes: list[Share]) -> float:
    """How often a block of rows is read in an epoch, on average: once for each span it lies in and
    each process that reads that span."""
    epoch = plan.chain.first_epoch(0)
    layout = plan.layouts.of(epoch)
    assert isinstance(layout, Layout)
    starts, _ = plan.inputs.blocks.order(epoch, plan.layouts.block_order)
    filled = int(np.count_nonzero(np.diff(starts)))
    if not filled:
        return 0.0
    reads = 0
    for process in processes:
        for span in process.spans:
            first, stop = layout.span(span)
            if first < stop:
                low = int(np.searchsorted(starts, first, side="right")) - 1
                reads += int(np.searchsorted(starts, stop, side="left")) - low
    return reads / filled
