from __future__ import annotations

from functools import partial

from trainpipes.engine.layout import WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool
from trainpipes.engine.reading.listed_loader import ListedLoader, NumberedLoader
from trainpipes.engine.reading.stream_loader import StreamLoader
from trainpipes.engine.reading.windows import Windows
from trainpipes.kinds.source import MixedWindows, RandomAccessSource, RowMixture, RowStream

#: Memory for windows, those read ahead included: a share of the shuffle's, or bytes without a shuffle.
AHEAD_SHARE = 5 / 6
AHEAD_BYTES = 256 << 20


def open_windows(
    plan: Plan, pool: Pool | None = None, number: int = 0, last: WindowKey | None = None
) -> Windows | MixedWindows:
    """The windows of pass ``number`` for the shards of one process, up to ``last``, by the loader
    that the source needs."""
    chain, source = plan.chain, plan.inputs.source
    if isinstance(source, RowMixture):
        return source.windows(plan, pool, number)
    if isinstance(source, RowStream):
        return Windows(StreamLoader(plan, source))
    if isinstance(source, RandomAccessSource) and (
        chain.drawn is not None or (source.by_number and not chain.before)
    ):
        return Windows(NumberedLoader(plan, source))
    ahead = AHEAD_BYTES if chain.shuffle is None else int(chain.shuffle.max_bytes * AHEAD_SHARE)
    following = partial(_following, plan, chain.first_epoch(number))
    return Windows(
        ListedLoader(plan), None if plan.reads_user_code else pool, ahead, following, last
    )


def _following(plan: Plan, first_epoch: int, shard: int, epoch: int) -> int | None:
    if not plan.chain.goes_on(epoch, first_epoch):
        return None
    return plan.counts.span(shard, epoch + 1, first_epoch)
