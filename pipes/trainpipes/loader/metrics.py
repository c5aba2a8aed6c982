"""``Loader.metrics``: where a run stands in numbers, for a line of a log."""

from __future__ import annotations

import math
from time import perf_counter

from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import StateError
from trainpipes.order.layout import slots_before
from trainpipes.sources.mix import Mix
from trainpipes.sources.mixture import Mixture
from trainpipes.stages.pack import Pack
from trainpipes.state.format import BatchSizes, Position


class Meter:
    """What a loader's ``metrics()`` says; asked between batches, it counts nothing while they are made."""

    def __init__(self, iteration: IterationState) -> None:
        self._iteration = iteration
        #: When it was asked last, and the seconds that loops had waited then.
        self._asked = perf_counter(), iteration.wait_seconds

    def read(self) -> dict[str, float]:
        iteration, (since, waited) = self._iteration, self._asked
        self._asked = now, wait_seconds = perf_counter(), iteration.wait_seconds
        state = iteration.state()
        if state is None:
            raise StateError(
                "metrics() of a Loader must be called in the process that iterates it, got a call in a "
                "DataLoader's worker; log in the training loop"
            )
        position = iteration.parse(state)
        plan = iteration.plan_of(position).resized(position.sizes, position.m)
        numbers = {
            "epoch": position.pass_number,
            "batch": position.m,
            "waiting": min(1.0, (wait_seconds - waited) / max(now - since, 1e-9)),
            "wait_seconds": wait_seconds,
        }
        rows = _rows(plan, position, iteration.ranks()[1])
        if rows is not None:
            numbers["rows"] = rows
            packing = [stage for stage in plan.chain.after if isinstance(stage, Pack)]
            if packing:
                numbers["tokens"] = rows * packing[-1].max_length
        shares = {f"mix/{name}": share for name, share in _shares(plan, position).items()}
        return {f"data/{name}": value for name, value in (numbers | shares).items()}


def _rows(plan: Plan, position: Position, world_size: int) -> int | None:
    """Rows of all batches that all ranks have got up to a position; None where that is not known."""
    chain, counts = plan.chain, plan.counts
    sized = chain.batch is None or chain.batch.batch_size is not None
    if not sized or chain.groups or chain.opener.traits.makes_batches:
        return None
    if plan.grows and position.pass_number:
        return None  # epochs before had other files
    if counts.counted:
        whole = counts.end(world_size) if position.pass_number else 0
        before = 0 if math.isinf(whole) else position.pass_number * _counted(plan, int(whole))
        return before + _counted(plan, position.m, position.sizes)
    are_full = chain.endless or chain.batch is None or chain.drop_last
    if position.pass_number or not are_full or plan.layouts.sizes is not None:
        return None  # short batches, and those of epochs before, are not known
    batches = _given(plan, position, world_size)
    return None if batches is None else batches * chain.batch_size


def _given(plan: Plan, position: Position, world_size: int) -> int | None:
    """Batches of a pass, where these are not counted, that all ranks have got; None where that is not known.

    A state counts the turns of shards that have ended, and batches that are skipped, too.
    """
    chain, shards = plan.chain, position.num_shards
    if chain.uneven and plan.counts.ends_unevenly and world_size > 1:
        return None  # of shards of other ranks it is not known which have ended
    cursors = position.cursors.items()
    turns: int = sum(
        slots_before(position.m, s, shards) - cursor["delivered"] for s, cursor in cursors
    )
    skipped = chain.skip_batches if plan.counts.limits_items else 0
    return position.m - turns - skipped


def _counted(plan: Plan, m: int, sizes: BatchSizes | None = None) -> int:
    """Rows of the first batches of a pass, where these are counted."""
    chain, counts = plan.chain, plan.counts
    epoch_rows = plan.inputs.epoch_rows or 0
    pieces = ((0, chain.batch_size),) if sizes is None else sizes.sizes

    def rows(batches: int, most: float) -> int:
        ends = [*(first for first, _ in pieces[1:]), batches]
        parts = zip(pieces, ends, strict=True)
        held = sum(max(0, min(end, batches) - first) * size for (first, size), end in parts)
        return int(min(held, most))

    if chain.rolling:
        return rows(m, math.inf if chain.times is None else epoch_rows * chain.times)
    skipped = rows(chain.skip_batches, epoch_rows)
    epochs = divmod(m, counts.batches_in_epoch) if counts.by_epoch and sizes is None else (0, m)
    of_epoch = rows(chain.skip_batches + counts.batches_in_epoch, epoch_rows) - skipped
    return epochs[0] * of_epoch + rows(chain.skip_batches + epochs[1], epoch_rows) - skipped


def _shares(plan: Plan, position: Position) -> dict[str, float]:
    """The shares of a mix that hold at a position; none where they change by a schedule."""
    mix, source = plan.chain.opener, plan.inputs.source
    if not isinstance(mix, Mix) or not isinstance(source, Mixture):
        return {}
    known = [new for new in position.reweighed if new.batch <= position.m]
    steps = source.steps
    if known:
        steps = mix.reweighed(known[-1].weights).steps(source.sizes)[1]
    if len(steps) > 1:
        return {}
    return {name: w / sum(steps[0]) for name, w in zip(source.names, steps[0], strict=True)}
