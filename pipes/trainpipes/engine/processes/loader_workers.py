"""The worker processes of a ``Loader``: which stages they run, among those that a shard opens; and how they
stay from one pass to the next.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

from trainpipes._internal import activity
from trainpipes._internal.checks import flag, function, require
from trainpipes._internal.messages import log_once, warn_once
from trainpipes.columns.run import Run
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.executors import FOREVER, Executor, Processes
from trainpipes.engine.processes.stage_calls import Group, StageCall, sent, steps_of
from trainpipes.engine.processes.worker_pool import WorkerPool
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.stage import Stage

#: Fewest rows of a window in a task.
LEAST_ROWS = 16


def is_worth_it(stage: Stage) -> bool:
    """Whether a stage calls Python for each row or batch, which threads would do one at a time."""
    if not (isinstance(stage, kinds.RunStage) or is_called_ahead(stage)):
        return False
    if isinstance(stage, kinds.WorkingStage) and stage.has_workers:
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

        def hand_out(stages: Sequence[Any], batch: int | None = None) -> None:
            last, first = stages[-1], self._numbers[id(stages[0])]
            later = steps[steps.index(last) + 1 :]
            keeps = any(isinstance(stage, kinds.RegroupStage) for stage in (last, *later))
            number = Group(first, self._numbers[id(last)] + 1, batch, keeps)
            most_begun = max(2 if made else 1, -(-self.ahead // shards))
            made.append(HandedOut(tuple(stages), self, number, most_begun))

        def end_group() -> None:
            worth = [n for n, stage in enumerate(group) if is_worth_it(stage)]
            if not worth:
                made.extend(group)
            else:
                first, stop = worth[0], worth[-1] + 1
                made.extend(group[:first])
                hand_out(group[first:stop])
                if is_called_ahead(group[stop - 1]):
                    made.append(group[stop - 1].after_calls())
                made.extend(group[stop:])
            group.clear()

        def end_with_batches(batch: Stage, above: Sequence[Stage]) -> int:
            """Hand out what makes rows with what is made of their batches; how many of these there are."""
            first = next((n for n, stage in enumerate(group) if is_worth_it(stage)), len(group))
            stops = [
                n
                for n, stage in enumerate(above, 1)
                if isinstance(stage, kinds.FinishingStage) or is_worth_it(stage)
            ]
            last = max(stops, default=0)
            below = group[first:]
            if not (below and last and all(stage.traits.keeps_rows for stage in below)):
                end_group()
                made.append(batch)
                return 0
            made.extend((*group[:first], batch))
            group.clear()
            hand_out((*below, *above[:last]), self._numbers[id(below[-1])] + 1)
            return last

        waiting = list(stages)
        while waiting:
            stage = waiting.pop(0)
            if isinstance(stage, kinds.RunStage) and not _has_workers(stage):
                group.append(stage)
            elif is_called_ahead(stage):
                group.append(stage)
                end_group()
            elif _cuts_by_count(stage):
                alone = (
                    n
                    for n, s in enumerate(waiting)
                    if not isinstance(s, kinds.RunStage) or _has_workers(s)
                )
                above = waiting[: next(alone, len(waiting))]
                del waiting[: end_with_batches(stage, above)]
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
        return self._pool.closed or self._pool.is_elsewhere

    def start(self) -> None:
        self._pool.start()

    def close(self) -> None:
        self._pool.close()


def _cuts_by_count(stage: Stage) -> bool:
    """Whether a stage makes batches of a fixed number of rows, and not by what they hold."""
    return isinstance(stage, kinds.BatchingStage) and stage.traits.keeps_rows and not stage.nested


def _has_workers(stage: Stage) -> bool:
    return isinstance(stage, kinds.WorkingStage) and stage.has_workers


class HandedOut(kinds.WorkingStage):
    """Stages that worker processes run."""

    stages: tuple[kinds.RunStage, ...]
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


def check_worker_options(persistent: Any, init: Any, timeout: Any, workers: int) -> None:
    """Raise unless options of a ``Loader`` are in range, also where there are no workers that have them."""
    flag(persistent, "Loader(persistent_workers)")
    good = timeout is None or (isinstance(timeout, int | float) and timeout >= 0)
    require(good, "Loader(timeout)", "seconds, 0 or more", timeout, "0 is no end")
    if init is not None:
        function(init, "Loader(worker_init_fn)")
    if timeout and not workers:
        log_once(
            f"Loader(timeout={timeout}): no call is ended here: this process calls functions; "
            "num_workers=1 has one that does"
        )


@dataclass(eq=False)
class LoaderWorkers:
    """Starts a ``Loader``'s workers.

    Args:
        stages: gives the stages of the pipeline, as workers get them.
        check: raises if stages can't be sent to processes that are not forked.
        executor: where they work.
        ahead: runs that each is given ahead.
        persistent: whether they stay from one pass to the next.
        init: called with the number of a worker in each.
        timeout: seconds that a call may take, at least; 0 for no end.
    """

    stages: Callable[[], Sequence[Stage]]
    check: Callable[[], None]
    executor: Executor
    ahead: int
    persistent: bool
    init: Callable[[int], None] | None
    timeout: float | None = 0
    _sent: Sequence[Stage] | None = None
    #: Processes for another pass, and the plan whose functions they call.
    _idle: tuple[Workers, Plan] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_idle": None}

    def begin(self, plan: Plan) -> Workers | None:
        """The workers of a pass; None where no stage calls Python for its rows."""
        if within := called_within(plan.inputs):
            warn_once(
                f"Loader(executor={self.executor}): {within[0]} is called by this process and not by "
                "workers: put it after that, or give it workers of its own, as map(num_workers=) takes "
                "them; of data sets, from_dataset() takes a ConcatDataset"
            )
        if not calls_python(plan):
            log_once(
                f"Loader(executor={self.executor}): no worker is started; they would call functions, and "
                "this pipeline has none, or these have workers of their own"
            )
            return None
        idle, self._idle = self._idle, None
        if idle is not None:
            workers, of = idle
            if of.inputs is plan.inputs and not workers.is_closed:
                return workers
            workers.close()
        executor = self.executor
        if isinstance(executor, Processes):
            method = executor.start_method or multiprocessing.get_start_method()
            executor = replace(executor, start_method=method)
            if not executor._forks and self._sent is None:
                self.check()
        self._sent = self._sent or self.stages()
        count = executor.workers
        call = StageCall(plan, self._sent, count, self.init)
        # A step may take minutes: they stay until the pass is over.
        pool = executor._answering(call, timeout=self.timeout or None, idle=FOREVER)
        workers = Workers(plan, call, pool, count * self.ahead)
        finalize(workers, pool.close).atexit = False
        return workers

    def end(self, workers: Workers, plan: Plan) -> None:
        """A pass is over, or left."""
        if self.persistent and self._idle is None:
            self._idle = workers, plan
        else:
            workers.close()

    def shut(self) -> None:
        """Nobody begins another pass."""
        self.persistent = False
        idle, self._idle = self._idle, None
        if idle is not None:
            idle[0].close()


def called_within(inputs: Inputs) -> list[str]:
    """The stages that call functions within the sources of concat(), zip() and windows(), in words: workers
    do not run these.
    """
    joined = getattr(inputs.source, "joined_inputs", ())
    steps = (stage for part in joined for stage in part.chain.steps)
    stages = [
        f"{stage} within {inputs.chain.opener.name}()"
        for stage in steps
        if is_worth_it(stage) and stage._calls_function
    ]
    return [*stages, *(stage for part in inputs.parts for stage in called_within(part))]


def calls_python(plan: Plan) -> bool:
    """Whether there is something to do for worker processes."""
    own = any(map(is_worth_it, plan.chain.steps))
    return own or any(map(calls_python, plan.mixed.values()))
