"""Whether a state tells of a place to which its pipeline leads.

That of a counted pipeline does so by m alone. In all others a cursor has a level for each stage with a
position of its own, the outermost first, with the entries that the stage names (``CutStage.cursor_keys``)
and "below"; the inner ones are not there at an epoch's start. At the bottom are the rows: epoch, window,
row, and "stream" where a source goes by a state of its own. Those of a mix have a cursor for each source: see
``Mixture.leads``. Called by the thread that loads a state.
"""

from __future__ import annotations

from typing import Any

from trainpipes._internal.shown import shown
from trainpipes.engine.layout import Layout
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import StateError
from trainpipes.kinds.source import RowMixture, RowStream
from trainpipes.kinds.stage_kinds import CutStage
from trainpipes.state.cursor import is_count, shard_key
from trainpipes.state.format import Position, parse
from trainpipes.state.left_out_batches import LeftOutBatches, kept_batches

__all__ = ["leads", "position_of"]

_EDITED = "the state was edited or is damaged: load it as it was saved"


def position_of(state: Any, plan: Plan) -> Position:
    """A state as a position of a pipeline, which goes on with what the state knows of its rows.

    Raises:
        StateError: it is no state, is damaged, is of a newer format, or of another pipeline.
    """
    position = parse(state, plan.identity_for(state), plan.chain.num_shards)
    if plan.counted:
        position.cursors = {}  # which format 1 had, and which follow from m
    _check(plan.resized(position.sizes), position)
    plan.adopt(position.notes)
    return position


def _check(plan: Plan, position: Position) -> None:
    """Raise unless a position is one to which the pipeline leads, as far as that can be told."""
    chain, counts, number = plan.chain, plan.counts, position.epoch
    kept_batches(position.notes)
    if not is_count(_last_epoch(plan, number)):
        raise StateError(f"epoch: {number} is more than this pipeline can count to; {_EDITED}")
    if not _sizes_lead(plan, position):
        raise StateError(
            f"batch_sizes: {shown(position.sizes)} do not agree with micro-batches of "
            f"{chain.batch_size} rows in epoch {number}; {_EDITED}"
        )
    if plan.counted:
        most = counts.batches_in_pass
        # Ranks that end at different steps count the last one as a whole.
        if position.m > (most + chain.num_shards - 1 if chain.ragged else most):
            raise StateError(
                f"m: epoch {number} of this pipeline has {most} micro-batches, got m = "
                f"{position.m}; {_EDITED}"
            )
    for shard, cursor in position.cursors.items():
        place = {k: v for k, v in cursor.items() if k not in ("delivered", "ended")}
        if not (leads(plan, shard, number, place) and _delivered(plan, shard, position, cursor)):
            raise StateError(
                f"{shard_key(shard)}: {shown(cursor, 200)} is not a position after "
                f"{cursor['delivered']} micro-batches of epoch {number}; {_EDITED}"
            )


def _last_epoch(plan: Plan, number: int) -> int:
    """The epoch after the last one of a pass, or of those of the sources that are mixed in it."""
    after = plan.chain.first_epoch(number + 1)
    return max([after, *(_last_epoch(source, after) for source in plan.mixed.values())])


def _sizes_lead(plan: Plan, position: Position) -> bool:
    """Whether sizes of micro-batches may be those of a pass."""
    sizes, chain = position.sizes, plan.chain
    if sizes is None:
        return True
    if not plan.layouts.whole or chain.batch is None or sizes.start > position.m:
        return False
    first, after = (chain.first_epoch(position.epoch + k) for k in (0, 1))
    return sizes.sizes[-1][1] == chain.batch_size and first <= sizes.epoch < after


def _delivered(plan: Plan, shard: int, position: Position, cursor: dict[str, Any]) -> bool:
    """Whether the micro-batches of the epoch are among those of the pass."""
    number = position.epoch
    delivered, at, first = cursor["delivered"], cursor["at"], plan.chain.first_epoch(number)
    skipped, _ = plan.counts.chunks(plan.counts.slot(shard, first, first), first)
    left_out = LeftOutBatches.of(position)
    if left_out.starts:  # a shard may end among those that are left out
        most = left_out.of_shard(shard, delivered + 1)
        return bool(at <= delivered + skipped + most)
    if plan.chain.times == 1 and delivered:
        return bool(at == delivered + skipped)
    return bool(at <= delivered + skipped)


def leads(plan: Plan, shard: int, number: int, place: dict[str, Any]) -> bool:
    """Whether a position may be one of a shard's, as far as can be told.

    Args:
        plan: the pipeline's, or that of a source of a mix.
        shard: which shard.
        number: of the pass.
        place: the position, and "at".
    """
    if not is_count(place.get("at")):
        return False
    place = {key: value for key, value in place.items() if key != "at"}
    cutting = [stage for stage in reversed(plan.chain.after) if isinstance(stage, CutStage)]
    levels = [stage.cursor_keys for stage in cutting if stage.cursor_keys]
    ours = all(stage.cursor_keys is not None for stage in cutting)
    while "below" in place:
        if ours:
            keys = levels.pop(0) if levels else ()
            counted = all(is_count(place.get(key)) for key in keys)
            if place.keys() != {"below", *keys} or not counted:
                return False
        place = place["below"]
        if not isinstance(place, dict):
            return False
    return _rows_lead(plan, shard, number, place)


def _rows_lead(plan: Plan, shard: int, number: int, place: dict[str, Any]) -> bool:
    """The same of the rows at the bottom."""
    if not all(is_count(place.get(key)) for key in ("epoch", "window", "row")):
        return False
    epoch, window, row = (place[key] for key in ("epoch", "window", "row"))
    first, source = plan.chain.first_epoch(number), plan.inputs.source
    if not first <= epoch < plan.chain.first_epoch(number + 1):
        return False
    if isinstance(source, RowMixture):
        return source.leads(plan, shard, place)
    extra = place.keys() - {"epoch", "window", "row"}
    by_state = isinstance(source, RowStream) and source.seekable
    if extra and not (by_state and extra == {"stream"} and isinstance(place["stream"], dict)):
        return False
    layout = plan.layouts.of(epoch)
    if not isinstance(layout, Layout):
        return bool(row < 2 * layout.window_rows)  # the last one may be longer
    span = plan.counts.span(shard, epoch, first)
    windows = layout.num_windows(span)
    if window >= windows:
        return bool(window <= max(windows, 1) and row == 0)
    start, stop = layout.window(span, window)
    return bool(row < stop - start)
