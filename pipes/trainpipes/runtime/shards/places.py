"""Whether a state tells of a place to which its pipeline leads.

That of a counted pipeline does so by m alone. In all others a cursor has a level for each stage with a
position of its own, the outermost first, with the entries that the stage names (``CutStage.cursor_keys``)
and "below"; the inner ones are not there at an epoch's start. At the bottom are the rows: epoch, window,
row, and "stream" where a source goes by a state of its own. Those of a mix have a cursor for each source: see
``Mixture.leads``.
"""

from __future__ import annotations

from typing import Any

from trainpipes.cursor import is_count, shard_key
from trainpipes.errors import StateError
from trainpipes.order import Layout
from trainpipes.runtime.kinds import CutStage
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.source import RowMixture, RowStream
from trainpipes.shown import shown
from trainpipes.state import Position, parse

__all__ = ["leads", "position_of"]


def position_of(state: Any, plan: Plan) -> Position:
    """A state as a position of a pipeline, which goes on with what the state knows of its rows.

    Raises:
        StateError: it is no state, is damaged, is of a newer format, or of another pipeline.
    """
    position = parse(state, plan.identity_for(state), plan.num_shards)
    if plan.seekable:
        position.cursors = {}  # which format 1 had, and which follow from m
    _check(plan.resized(position.sizes), position)
    plan.adopt(position.notes)
    return position


def _check(plan: Plan, position: Position) -> None:
    """Raise unless a position is one to which the pipeline leads, as far as that can be told."""
    if not is_count(_last_epoch(plan, position.epoch)):
        raise StateError(
            f"epoch: there is no pass {position.epoch} of this pipeline, whose epochs could not be counted; "
            "the state was edited or is damaged: load it as it was saved"
        )
    _check_sizes(plan, position)
    _check_m(plan, position)
    for shard, cursor in position.cursors.items():
        place = {k: v for k, v in cursor.items() if k not in ("delivered", "ended")}
        good = leads(plan, shard, position.epoch, place)
        if not (good and _counts(plan, shard, position.epoch, cursor)):
            raise StateError(
                f"{shard_key(shard)}: {shown(cursor, 200)} is not where {cursor['delivered']} micro-batches "
                f"of pass {position.epoch} have led; the state was edited or is damaged: load it as "
                "it was saved"
            )


def _last_epoch(plan: Plan, number: int) -> int:
    """The epoch after the last one of a pass, or of those of the sources that are mixed in it."""
    after = plan.first_epoch(number + 1)
    return max([after, *(_last_epoch(source, after) for source in plan.mixed.values())])


def _check_sizes(plan: Plan, position: Position) -> None:
    sizes = position.sizes
    if sizes is None:
        return
    first, after = (plan.first_epoch(position.epoch + k) for k in (0, 1))
    good = (
        plan.whole
        and plan.batch is not None
        and sizes.sizes[-1][1] == plan.batch_size
        and sizes.start <= position.m
    )
    if not good or not first <= sizes.epoch < after:
        raise StateError(
            f"batch_sizes: {shown(sizes)} do not lead to micro-batches of {plan.batch_size} rows in pass "
            f"{position.epoch}; the state was edited or is damaged: load it as it was saved"
        )


def _check_m(plan: Plan, position: Position) -> None:
    if not plan.seekable:
        return
    most = plan.pass_batches
    # Ranks that end at different steps count the last one as a whole.
    if position.m > (most + plan.num_shards - 1 if plan.ragged else most):
        raise StateError(
            f"m: pass {position.epoch} of this pipeline has {most} micro-batches, got m = {position.m}; the "
            "state was edited or is damaged: load it as it was saved"
        )


def _counts(plan: Plan, shard: int, number: int, cursor: dict[str, Any]) -> bool:
    """Whether the micro-batches of the epoch are among those of the pass."""
    delivered, at, first = cursor["delivered"], cursor["at"], plan.first_epoch(number)
    epoch = _epoch(cursor) if plan.times == 1 else first
    skipped, _ = plan.chunks(plan.slot(shard, epoch, first), epoch)
    if plan.times == 1 and delivered:
        return bool(at == delivered + skipped)
    return bool(at <= delivered + skipped)


def _epoch(place: dict[str, Any]) -> int:
    while "below" in place:
        place = place["below"]
    return int(place["epoch"])


def leads(plan: Plan, shard: int, number: int, place: dict[str, Any]) -> bool:
    """Whether a position may be one of a shard's, as far as can be told.

    Args:
        plan: the pipeline's, or that of a source of a mix.
        shard: which shard.
        number: of the pass.
        place: the position, and "at".
    """
    place = dict(place)
    if not is_count(place.pop("at", None)):
        return False
    cutting = [stage for stage in reversed(plan.after) if isinstance(stage, CutStage)]
    levels = [stage.cursor_keys for stage in cutting if stage.cursor_keys]
    ours = all(stage.cursor_keys is not None for stage in cutting)
    while "below" in place:
        below = place["below"]
        if ours:
            keys = levels.pop(0) if levels else ()
            counts = [place.get(key) for key in keys]
            if place.keys() != {"below", *keys} or not all(map(is_count, counts)):
                return False
        if not isinstance(below, dict):
            return False
        place = below
    return _rows_lead(plan, shard, number, place)


def _rows_lead(plan: Plan, shard: int, number: int, place: dict[str, Any]) -> bool:
    if not all(is_count(place.get(key)) for key in ("epoch", "window", "row")):
        return False
    epoch, window, row = (place[key] for key in ("epoch", "window", "row"))
    first = plan.first_epoch(number)
    if not first <= epoch < plan.first_epoch(number + 1):
        return False
    source = plan.source
    if isinstance(source, RowMixture):
        return bool(source.leads(plan, shard, place))
    keys = place.keys() - {"epoch", "window", "row"}
    if keys and not (
        keys == {"stream"}
        and isinstance(place["stream"], dict)
        and isinstance(source, RowStream)
        and source.seekable
    ):
        return False
    layout = plan.layout_of(epoch)
    slot = plan.slot(shard, first if plan.rolling else epoch, first)
    if isinstance(layout, Layout):
        span = slot % layout.num_spans
        windows = layout.num_windows(span)
        if window >= windows:
            return bool(window <= max(windows, 1) and row == 0)
        start, stop = layout.window(span, window)
        return bool(row < stop - start)
    return bool(row < 2 * layout.window_rows)  # the last one may be longer
