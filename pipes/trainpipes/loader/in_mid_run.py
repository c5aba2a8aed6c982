"""A run between two batches: ``Loader.metrics``, where it stands in numbers, for a line of a log; and
``Loader.set_weights``, shares of a mix that change within a pass, at one batch on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from time import perf_counter
from typing import Any

from trainpipes._internal.checks import require, whole_number
from trainpipes._internal.messages import nearest
from trainpipes.engine.iterating.consumer import Consumer
from trainpipes.engine.iterating.epoch_end import members_of
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, StateError, shown
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import BalanceStage, BatchingStage, RegroupStage
from trainpipes.order.layout import Topology, slots_before
from trainpipes.sources.mix import Mix, checked_weights
from trainpipes.sources.mixture import Mixture
from trainpipes.stages.pack import Pack
from trainpipes.state.format import NewWeights, Position, Reweighed
from trainpipes.state.merge import TIMEOUT, gather


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
        last, world_size = iteration.last, iteration.ranks()[1]
        rows = _rows(plan, position, world_size, world_size if last is None else last.step)
        if rows is not None and iteration.passes.fixed is None:  # else passes are not known
            numbers["rows"] = rows
            packing = [stage for stage in plan.chain.after if isinstance(stage, Pack)]
            if packing:
                numbers["tokens"] = rows * packing[-1].max_length
        shares = {f"mix/{name}": share for name, share in _shares(plan, position).items()}
        return {f"data/{name}": value for name, value in (numbers | shares).items()}


def _rows(plan: Plan, position: Position, world_size: int, step: int) -> int | None:
    """Rows of all batches that all ranks have got up to a position; None where that is not known. ``step``:
    batches of all ranks, with a whole one of which each pass ends.
    """
    chain, counts = plan.chain, plan.counts
    sized = chain.batch is None or chain.batch.batch_size is not None
    if not sized or chain.groups or chain.opener.traits.makes_batches:
        return None
    if plan.grows and position.pass_number:
        return None  # epochs before had other files
    if counts.counted:
        whole = counts.end(step) if position.pass_number else 0
        before = 0 if math.isinf(whole) else position.pass_number * _counted(plan, int(whole))
        return before + _counted(plan, position.m, position)
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


def _counted(plan: Plan, m: int, position: Position | None = None) -> int:
    """Rows of the first batches of a pass, where these are counted; a position tells of other batch sizes."""
    chain, counts = plan.chain, plan.counts
    epoch_rows = plan.inputs.epoch_rows or 0
    sizes = None if position is None else position.sizes
    usual = ((0, chain.batch_size),)
    pieces = usual if sizes is None else sizes.sizes

    def rows(batches: int, most: float, pieces: Sequence[tuple[int, int]]) -> int:
        ends = [*(first for first, _ in pieces[1:]), batches]
        parts = zip(pieces, ends, strict=True)
        held = sum(max(0, min(end, batches) - first) * size for (first, size), end in parts)
        return int(min(held, most))

    if chain.rolling:
        most = math.inf if chain.times is None else epoch_rows * chain.times
        return rows(m, most, pieces)

    def given(batches: int, pieces: Sequence[tuple[int, int]]) -> int:
        skipped = rows(chain.skip_batches, epoch_rows, pieces)
        return rows(chain.skip_batches + batches, epoch_rows, pieces) - skipped

    if not counts.by_epoch:
        return given(m, pieces)
    before, whole = 0, given(counts.batches_in_epoch, usual)
    if position is not None and sizes is not None:
        first = chain.first_epoch(position.pass_number)
        end = counts.epoch_start(sizes.epoch + 1, first)
        before = (sizes.epoch - first) * whole + given(min(m, end) - sizes.start, pieces)
        m = max(0, m - end)
    epochs, m = divmod(m, counts.batches_in_epoch or 1)
    return before + epochs * whole + given(m, usual)


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


#: Where no batch is named, weights change at a multiple of it.
STEP = 64
OPTION = "set_weights(weights)"


def set_weights(iteration: IterationState, weights: Any, at_step: Any) -> int:
    """Change the weights of a mix from a batch on; returns its number. See ``Loader.set_weights``."""
    chain = iteration.plan.chain
    mix = _mix_of(chain)
    if iteration.is_queued:
        raise ConfigError(
            "set_weights() must be left out for the Loader of a WorkQueue, whose state does not hold new "
            "weights, got a call; make a queue of the new mix where nothing is in flight: "
            "load_state_dict(state, allow_changes=['mix'])"
        )
    unit = _batches_between_changes(chain)
    _check_names(weights, mix)
    position, last = iteration.upcoming(), iteration.last
    if last is not None and not last.ended:
        position = iteration.parse(last.state(ends=True))
    if at_step is None:
        at_step = _agreed_step(iteration.topology(), position, weights, math.lcm(STEP, unit))
    _check_step(at_step, position, unit, chain)
    before = [new for new in position.reweighed if new.batch < at_step]
    after = [new for new in position.reweighed if new.batch > at_step]
    known = [new for new in position.reweighed if new.batch <= at_step]
    new = NewWeights(int(at_step), _all_weights(mix, known, weights))
    position = replace(position, reweighed=(*_of_now(before, position.m), new, *after))
    if last is None or last.ended:
        iteration.reweigh(position, None)
        return new.batch
    for iterator in iteration.iterators:
        if isinstance(iterator, EpochIterator) and iterator._gives(last):
            iterator._go_on_from(position)
            return new.batch
    plan, topology = iteration.plan_of(position), iteration.topology()  # nobody iterates any more
    goes_on = Consumer(plan, topology, position, after=iteration.passes.after)
    iteration.reweigh(position, goes_on)
    return new.batch


def _mix_of(chain: Chain) -> Mix:
    mix = chain.opener
    if not isinstance(mix, Mix):
        raise ConfigError(
            f"set_weights() must be called for a pipeline that starts with mix(), got one that starts with "
            f"{mix}; write mix({{...}}, weights={{...}}), or change a mix by the state: "
            "load_state_dict(state, allow_changes=['mix'])"
        )
    if mix.weights is None or mix.schedule is not None:
        got = "schedule=" if mix.schedule is not None else "none"
        raise ConfigError(
            f"mix(weights) must be given, and no schedule, where set_weights() changes them, got {got}; "
            "start with the weights that hold first"
        )
    if chain.rolling:
        raise ConfigError(
            "repeat() must stand after batch() where set_weights() changes shares, got it before; or write "
            'mix(stop="repeat") in place of repeat()'
        )
    return mix


def _batches_between_changes(chain: Chain) -> int:
    """Batches of all shards after which no stage above the mix holds rows of it."""
    turns = 1
    for stage in chain.after:
        if isinstance(stage, BalanceStage):
            turns = math.lcm(turns, int(stage.options["window"]))
        elif not _lets_rows_go(stage):
            raise ConfigError(
                f"{stage} must stand in the sources of mix() where set_weights() changes shares, got it "
                "after mix(): it holds or drops mixed rows, so that no batch is the first of new shares; "
                "write {name: source." + stage.name + "(...)} for each source"
            )
    return 1 if turns == 1 else turns * chain.num_shards


def _lets_rows_go(stage: Stage) -> bool:
    if isinstance(stage, RegroupStage):
        return isinstance(stage, BatchingStage) and not stage._takes_turns
    return stage.traits.keeps_rows


def _check_names(weights: Any, mix: Mix) -> None:
    names = list(mix.sources)
    rule = f"a dict with a number for some of the sources ({', '.join(names)})"
    require(isinstance(weights, Mapping) and weights, OPTION, rule, weights)
    for name in weights:
        if name not in names:
            hint = nearest(str(name), names)
            raise ConfigError(f"{OPTION} must be {rule}, got {shown(name)}{hint}")


def _all_weights(
    mix: Mix, known: Sequence[NewWeights], weights: Mapping[str, Any]
) -> dict[str, int | float | str]:
    """Those of all sources, as a state has them; the last ones ``known`` hold for sources not named."""
    others = known[-1].weights if known else mix.weights or {}
    held = mix.reweighed(others).weights or {}
    merged = {**held, **weights}
    checked_weights(merged, list(mix.sources), OPTION)
    mix.reweighed(merged)  # refuses those under which nothing would be left
    return {name: _saved(weight) for name, weight in merged.items()}


def _check_step(at_step: Any, position: Position, unit: int, chain: Chain) -> None:
    option = "set_weights(at_step)"
    whole_number(at_step, 0, option, "the number of a batch of the pass, over all ranks")
    if at_step < position.m:
        raise ConfigError(
            f"{option} must be the number of a batch that is yet to come, {position.m} or more, got "
            f"{at_step}; leave it out for the next multiple of {math.lcm(STEP, unit)}"
        )
    if at_step % unit:
        windows = next(str(stage) for stage in chain.after if isinstance(stage, BalanceStage))
        raise ConfigError(
            f"{option} must be a multiple of {unit} ({unit // chain.num_shards} x {chain.num_shards} "
            f"shards), where windows of {windows} end, got {at_step}; leave it out for the next one"
        )


def _agreed_step(topology: Topology, position: Position, weights: Any, unit: int) -> int:
    """The next multiple of a number of batches that no rank has passed."""
    passed = position.m
    if topology.world_size > 1:
        why, subject = "set_weights() without at_step takes effect", "at which batch"
        members = members_of(topology, f"{why} at one batch on all ranks", subject, "give at_step")
        choice = [position.pass_number, passed, {name: str(w) for name, w in weights.items()}]
        by_rank = gather(choice, members, TIMEOUT, "set_weights() without at_step")
        first, _, named_first = by_rank[0]
        for rank, (number, _, named) in enumerate(by_rank):
            if (number, named) != (first, named_first):
                raise ConfigError(
                    f"{OPTION} must be the same on all ranks, in the same epoch, got {named_first} in epoch "
                    f"{first} on rank 0 and {named} in epoch {number} on rank {rank}; call it on all "
                    "ranks after the same step, with weights that all have"
                )
        passed = max(passed for _, passed, _ in by_rank)
    return -(-passed // unit) * unit


def _of_now(before: Sequence[NewWeights], m: int) -> Reweighed:
    """Those that hold at a batch or later."""
    passed = [new for new in before if new.batch <= m]
    return (*passed[-1:], *(new for new in before if new.batch > m))


def _saved(weight: Any) -> int | float | str:
    """A weight as a state has it: the same number when it is read."""
    if isinstance(weight, Fraction):
        return str(weight)
    return int(weight) if isinstance(weight, int) else float(weight)
