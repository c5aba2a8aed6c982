"""Items that are made aside, to look at or to count: where a pipeline stands does not move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainpipes._internal.checks import copied
from trainpipes._internal.progress import counted
from trainpipes.engine.iterating.consumer import SERIAL, Consumer, RunOptions
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.errors import DataError, StateError, shown
from trainpipes.order.layout import Topology
from trainpipes.state.cursor import is_count


def state_at(iteration: IterationState, batches: int, epoch: int) -> dict[str, Any]:
    """The state after so many batches of each rank, in an epoch."""
    batches, epoch = copied(batches), copied(epoch)
    if not is_count(batches):
        raise StateError(f"state_at(batches_delivered) counts from 0, got {shown(batches)}")
    if not is_count(epoch):
        raise StateError(f"state_at(epoch) counts from 0, got {shown(epoch)}")
    plan, world = iteration.plan, iteration.ranks()[1]
    m = batches * world
    beyond = f"batches for each of {world} ranks, got {batches}"
    if plan.counts.known and m > plan.counts.batches_in_pass:
        most = int(plan.counts.batches_in_pass) // world
        raise StateError(f"state_at(batches_delivered): an epoch has {most} {beyond}")
    walked = 0 if plan.counted else m
    start = replace(iteration.start_of(epoch), m=m - walked)
    options = RunOptions(step=world if world > 1 else 0)  # ends where several ranks would
    walk = Consumer(plan, Topology(), start, options=options)
    for taken in counted(range(walked), "making the batches before it", walked, "batches"):
        try:
            next(walk)
        except StopIteration:
            walk.finish()
            said = f"state_at(batches_delivered): an epoch has {taken // world} {beyond}"
            raise StateError(said) from None
    return walk.state()


def peek(iteration: IterationState) -> Any:
    """The first item of what comes next."""
    for item in coming(iteration):
        return item
    raise DataError(
        "peek() shows the first item of the next epoch, and that gives nothing: see explain() for "
        "what the stages make of the rows"
    )


def coming(iteration: IterationState, options: RunOptions = SERIAL) -> Iterator[Any]:
    """The items of what comes next."""
    position = iteration.upcoming()
    plan = iteration.plan_of(position)
    if plan.grows and not position.m:
        plan = iteration.make_plan(iteration.of_run())
    starts = [position]
    if position.m:  # there may be nothing left
        starts.append(iteration.start_of(iteration.passes.after(position.pass_number)))
    for start in starts:
        gave = False
        for item in Consumer(plan, iteration.topology(), start, options=options):
            gave = True
            yield item
        if gave:
            return
