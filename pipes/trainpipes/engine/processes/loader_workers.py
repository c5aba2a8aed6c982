"""The worker processes of a ``Loader``, from one pass to the next."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from trainpipes._internal.checks import wrong
from trainpipes._internal.messages import log_once
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.handed_out import Workers, is_worth_it
from trainpipes.engine.processes.process_pool import ProcessPool
from trainpipes.engine.processes.stage_calls import StageCall
from trainpipes.interfaces.stage import Stage

#: Seconds.
FOREVER = 1e6


@dataclass(eq=False)
class LoaderWorkers:
    """Starts a ``Loader``'s workers.

    Args:
        stages: gives the stages of the pipeline, as workers get them.
        check: raises if stages can't be sent to processes that are not forked.
        most: how many there are.
        ahead: runs that each is given ahead.
        persistent: whether they stay from one pass to the next.
        init: called with the number of a worker in each.
        timeout: seconds that a call may take, at least; 0 for no end.
        context: of multiprocessing, or the name of a start method.
    """

    stages: Callable[[], Sequence[Stage]]
    check: Callable[[], None]
    most: int
    ahead: int
    persistent: bool
    init: Callable[[int], None] | None
    timeout: float = 0
    context: Any = None
    _sent: Sequence[Stage] | None = None
    #: Processes for another pass, and the plan whose functions they call.
    _idle: tuple[Workers, Plan] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_idle": None}

    def begin(self, plan: Plan) -> Workers | None:
        """The workers of a pass; None where no stage calls Python for its rows."""
        if not calls_python(plan):
            log_once(
                f"Loader(num_workers={self.most}): no worker is started; they would call functions, and this "
                "pipeline has none, or these have workers of their own"
            )
            return None
        idle, self._idle = self._idle, None
        if idle is not None:
            workers, of = idle
            if of.inputs is plan.inputs and not workers.is_closed:
                return workers
            workers.close()
        self._sent = self._sent or self.stages()
        context = self.context
        if context is None or isinstance(context, str):
            there = multiprocessing.get_all_start_methods()
            if context is not None and context not in there:
                raise wrong("Loader(multiprocessing_context)", f"one of {there} here", context)
            context = multiprocessing.get_context(context)
        if context.get_start_method() != "fork":
            self.check()
        call = StageCall(plan, self._sent, self.most, self.init)
        # A step may take minutes: they stay until the pass is over.
        processes = ProcessPool(call, self.most, context, self.timeout or None, FOREVER)
        workers = Workers(plan, call, processes, self.most * self.ahead)
        finalize(workers, processes.close).atexit = False
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
