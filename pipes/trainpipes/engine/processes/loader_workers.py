"""The worker processes of a ``Loader``, from one pass to the next."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import finalize

from trainpipes._internal.messages import log_once
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.executors import FOREVER, Executor, Processes
from trainpipes.engine.processes.handed_out import Workers, is_worth_it
from trainpipes.engine.processes.stage_calls import StageCall
from trainpipes.interfaces.stage import Stage


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
    timeout: float = 0
    _sent: Sequence[Stage] | None = None
    #: Processes for another pass, and the plan whose functions they call.
    _idle: tuple[Workers, Plan] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_idle": None}

    def begin(self, plan: Plan) -> Workers | None:
        """The workers of a pass; None where no stage calls Python for its rows."""
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
        self._sent = self._sent or self.stages()
        executor = self.executor
        if isinstance(executor, Processes):
            method = executor.start_method or multiprocessing.get_start_method()
            executor = replace(executor, start_method=method)
            if not executor._forks:
                self.check()
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


def calls_python(plan: Plan) -> bool:
    """Whether there is something to do for worker processes."""
    own = any(map(is_worth_it, plan.chain.steps))
    return own or any(map(calls_python, plan.mixed.values()))
