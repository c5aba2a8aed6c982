"""``sharding_filter``: deal the epoch to ranks and workers."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated, Literal

from trainpipes._internal.checks import Ge
from trainpipes.kinds.stage_kinds import DealStage


class ShardingFilter(DealStage):
    """Deals the batches of an epoch to logical shards, and these to ranks and workers.

    In and out: rows. Batch m of the one global sequence belongs to shard
    ``m % num_shards``; rank r of R takes every m with ``m % R == r``. So the sequence is the same
    on any number of ranks that divides ``num_shards``, and a state saved on one can be resumed on
    another. Cursor: one for each shard, unless batches are counted. Costs nothing; each rank reads only
    its own part of large data. Put it anywhere before ``batch``.

    Args:
        num_shards: S, the number of logical shards. A number with many divisors fits many world sizes: 24,
            48, 96, 240, 960.
        split: "spans" cuts the epoch into contiguous ranges, read side by side; "stride" deals
            batches in file order, and every consumer reads all rows: for evaluation.
        balance: "rows" cuts the epoch into ranges with equal numbers of rows, "bytes" into ranges of about
            equal size, by the files' footers. "bytes" is for pipelines whose batches are not counted in
            advance (a filter, batches by tokens), so that shards end nearly together.
        tail: "even" ends an epoch at the same step on all ranks, and leaves out the last few batches;
            "ragged" delivers all, so that ranks may end a step or more apart: for evaluation without
            collectives in the loop. A state saved at such an end loads on the same number of ranks only.
    """

    free = frozenset({"tail"})

    num_shards: Annotated[int, Ge(1, 2**20)] = 24
    _: KW_ONLY
    split: Literal["spans", "stride"] = "spans"
    balance: Literal["rows", "bytes"] = "rows"
    tail: Literal["even", "ragged"] = "even"
