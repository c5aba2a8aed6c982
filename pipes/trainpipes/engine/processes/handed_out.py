"""Stages that worker processes run, among those that a shard opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainpipes._internal import activity
from trainpipes.columns.run import Run
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.stage_calls import Group, StageCall, sent, steps_of
from trainpipes.engine.processes.worker_pool import WorkerPool
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import RegroupStage, RunStage, WorkingStage

#: Fewest rows of a window in a task.
LEAST_ROWS = 16


def is_worth_it(stage: Stage) -> bool:
    """Whether a stage calls Python for each row or batch, which threads would do one at a time."""
    if not (isinstance(stage, RunStage) or is_called_ahead(stage)):
        return False
    if isinstance(stage, WorkingStage) and stage.has_workers:
        return False
    return stage.traits.per_row or stage._calls_function


def is_called_ahead(stage: Stage) -> bool:
    return hasattr(stage, "call_ahead")


class Workers:
    """The worker processes of one pass.

    Args:
        ahead: runs that they are given ahead, in all.
    """

    def __init__(self, plan: Plan, call: StageCall, pool: WorkerPool, ahead: int) -> None:
        self.ahead = ahead
        self.count = call.workers
        self._pool = pool
        self._numbers = {id(step): number for number, step in enumerate(steps_of(plan))}

    def handed_out(self, plan: Plan, stages: Sequence[Stage], shards: int = 1) -> tuple[Stage, ...]:
        """Some of a plan's steps, where those that processes run stand as one; for so many shards."""
        steps = plan.chain.steps
        made: list[Stage] = []
        group: list[Any] = []

        def end_group() -> None:
            worth = [n for n, stage in enumerate(group) if is_worth_it(stage)]
            if not worth:
                made.extend(group)
            else:
                first, stop = worth[0], worth[-1] + 1
                later = steps[steps.index(group[stop - 1]) + 1 :]
                last = group[stop - 1]
                keeps = any(isinstance(stage, RegroupStage) for stage in (last, *later))
                at = self._numbers[id(group[first])]
                number = Group(at, at + stop - first, keeps)
                made.extend(group[:first])
                most_begun = max(2 if made else 1, -(-self.ahead // shards))
                made.append(HandedOut(tuple(group[first:stop]), self, number, most_begun))
                if is_called_ahead(last):
                    made.append(last.after_calls())
                made.extend(group[stop:])
            group.clear()

        for stage in stages:
            if isinstance(stage, RunStage) and not _has_workers(stage):
                group.append(stage)
            elif is_called_ahead(stage):
                group.append(stage)
                end_group()
            else:
                end_group()
                made.append(stage)
        end_group()
        return tuple(made)

    def submit(self, group: Group, run: Run) -> Callable[[], Run]:
        wait, cursors = self._pool.submit((group, sent(run)), activity.is_on), run.cursors

        def made() -> Run:
            results, error = wait()
            if error is not None:
                raise error
            given: Run = results[0].run(cursors)
            return given

        return made

    @property
    def is_closed(self) -> bool:
        return self._pool.closed

    def start(self) -> None:
        self._pool.start()

    def close(self) -> None:
        self._pool.close()


def _has_workers(stage: Stage) -> bool:
    return isinstance(stage, WorkingStage) and stage.has_workers


class HandedOut(WorkingStage):
    """Stages that worker processes run."""

    stages: tuple[RunStage, ...]
    workers: Any
    group: Group
    runs: int

    @property
    def most_begun(self) -> int:
        return self.runs

    @property
    def inner(self) -> tuple[Stage, ...]:
        return self.stages

    def submit_run(self, run: Run) -> Callable[[], Run]:
        wait: Callable[[], Run] = self.workers.submit(self.group, run)
        return wait

    def process(self, run: Run) -> Run:
        """Of many rows parts are given to several processes."""
        most = 1 + len(run) // (2 * self.workers.count)
        if run.bounds is not None or run.items is not None or most < LEAST_ROWS:
            return self.submit_run(run)()
        starts = range(0, len(run), most)
        waits = [self.submit_run(run.part(n, min(n + most, len(run)))) for n in starts]
        return Run.join([wait() for wait in waits])

    def __repr__(self) -> str:
        return " and ".join(map(str, self.stages))
