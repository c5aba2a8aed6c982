"""The run: a ``Loader`` over a pipeline, and a loop that counts, and waits as a trainer would."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import sharedctypes
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from trainpipes._internal.checks import whole_number
from trainpipes._internal.shown import shown
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, DataError
from trainpipes.loader import Loader
from trainpipes.look.trial.advice import with_advice
from trainpipes.look.trial.batch_counts import BatchCounts
from trainpipes.look.trial.memory import MemoryPeak
from trainpipes.look.trial.report import TrialReport
from trainpipes.look.trial.stage_clock import StageClock, labels_of
from trainpipes.pipeline import Pipeline

__all__ = ["DEFAULT_STEPS", "Progress", "trial"]

#: Steps where nothing says how many.
DEFAULT_STEPS = 100


@dataclass
class Progress:
    """Where a run stands, for who shows it.

    Attributes:
        counts: rows, tokens and padding so far.
        memory: of the process and its workers.
        started: the clock at the first ``next``.
        first_seconds: from there to the first batch; None before it.
    """

    counts: BatchCounts
    memory: MemoryPeak
    started: float
    first_seconds: float | None = None


def trial(
    pipeline: Pipeline,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    threads: int | None = None,
    num_workers: int = 0,
    simulate_step: float = 0.0,
    state: dict[str, Any] | None = None,
    recipe: str | None = None,
    see: Callable[[Any, Progress], None] | None = None,
    ended: Callable[[Loader], None] | None = None,
) -> TrialReport:
    """Run a pipeline alone through a ``Loader``, and say how fast it is, and where the time goes.

    The batches are those that a trainer would get. Ctrl-C ends the run, and the report is of what has come.

    Args:
        pipeline: what to run; of several ranks, this process's.
        steps: batches; where they are more than an epoch has, the next one follows. 100, or an epoch if that
            is shorter, where neither this nor ``epochs`` is given.
        epochs: instead of ``steps``, whole epochs.
        threads: as ``Loader`` takes it.
        num_workers: as ``Loader`` takes it.
        simulate_step: seconds that the loop sleeps after each batch, as long as a trainer would take.
        state: where to start.
        recipe: that the pipeline is of, whose options the report names.
        see: called with each batch, and where the run stands.
        ended: called with the loader at the end, for its state.

    Raises:
        ConfigError: epochs of a pipeline that has no end.
        DataError: the pipeline gives nothing.

    >>> import trainpipes as tp
    >>> report = trial(tp.from_tensors(x=range(10)).batch(4).collate(), epochs=2)
    >>> report.steps, report.rows, report.ended
    (6, 20, 'epochs')
    """
    _check(steps, epochs, simulate_step)
    plan = pipeline._session.plan
    pipeline = Pipeline(pipeline._stages, pipeline._ranks, pipeline._members)
    # The same plan, so that files are listed once; where it stands is its own.
    pipeline._session._plan = plan
    if epochs is not None and plan.chain.endless:
        raise ConfigError(
            f"this pipeline has no end, and so no epochs to count, got epochs={epochs}: say how many steps"
        )
    clock = _StageSeconds(plan, num_workers)
    loader = Loader(
        pipeline, threads=threads, num_workers=num_workers, worker_init_fn=clock.in_worker
    )
    if state is not None:
        loader.load_state_dict(state)
    counts = BatchCounts(plan)
    most = steps if steps is not None or epochs is not None else DEFAULT_STEPS
    passes = epochs if epochs is not None else (None if steps is not None else 1)
    with clock, MemoryPeak() as memory:
        run = _Run(loader, counts, Progress(counts, memory, perf_counter()), simulate_step, see)
        why = run.through(most, passes)
    if ended is not None:
        ended(loader)
    rank, world = pipeline._data_parallel()
    report = TrialReport(
        steps=counts.items, rows=counts.rows, cells=counts.cells, tokens=counts.tokens,
        learnt_share=counts.learnt_share, first_seconds=run.first, wait_seconds=run.waited,
        longest_wait_seconds=run.longest,
        step_seconds=run.stepped, later_rows=counts.rows - run.first_rows,
        later_tokens=counts.tokens - run.first_tokens, stages=clock.seconds,
        loading_seconds=clock.loading, memory_start=memory.start,
        memory_peak=memory.peak, rank=rank, world_size=world, epochs=run.passes,
        epoch_steps=_epoch_steps(pipeline), ended=why, threads=threads, num_workers=num_workers,
        simulated=simulate_step > 0,
    )  # fmt: skip
    return with_advice(report, plan, recipe)


def _check(steps: int | None, epochs: int | None, simulate_step: float) -> None:
    if steps is not None and epochs is not None:
        raise ConfigError(f"trial() takes steps or epochs, got steps={steps} and epochs={epochs}")
    for name, value, what in (("steps", steps, "batches"), ("epochs", epochs, "epochs")):
        if value is not None:
            whole_number(value, 1, f"trial({name})", what)
    if isinstance(simulate_step, bool) or not 0 <= simulate_step < 1e6:
        raise ConfigError(
            f"trial(simulate_step) is a number of seconds, got {shown(simulate_step)}"
        )


def _epoch_steps(pipeline: Pipeline) -> int | None:
    try:
        return len(pipeline)
    except TypeError:
        return None


class _Run:
    """The loop."""

    def __init__(
        self,
        loader: Loader,
        counts: BatchCounts,
        progress: Progress,
        step: float,
        see: Callable[[Any, Progress], None] | None,
    ) -> None:
        self._loader = loader
        self._counts = counts
        self._progress = progress
        self._step = step
        self._see = see
        self.first = self.waited = self.longest = self.stepped = 0.0
        self.first_rows = self.first_tokens = self.passes = 0

    def through(self, most: int | None, passes: int | None) -> str:
        """Run it, and say why it ended."""
        try:
            while passes is None or self.passes < passes:
                before = self._counts.items
                if self._one_pass(most):
                    return "steps"
                if self._counts.items == before and self.passes > 1:
                    raise DataError(
                        "an epoch gives nothing: see explain() for what becomes of the rows"
                    )
            return "epochs"
        except KeyboardInterrupt:
            return "interrupted"

    def _one_pass(self, most: int | None) -> bool:
        """One epoch, and whether it came to the last step."""
        self.passes += 1
        items = iter(self._loader)
        while most is None or self._counts.items < most:
            start = perf_counter()
            item = next(items, self)
            waited = perf_counter() - start
            if item is self:
                self._no_items()
                self.waited += waited
                return False
            self._took(item, waited)
        return True

    def _no_items(self) -> None:
        if not self._counts.items:
            raise DataError(
                "the pipeline gives nothing: see explain() for what the stages make of the rows"
            )

    def _took(self, item: Any, waited: float) -> None:
        first = not self._counts.items
        self._counts.add(item)
        if first:
            self._progress.first_seconds = self.first = waited
            self.first_rows, self.first_tokens = self._counts.rows, self._counts.tokens
        else:
            self.waited += waited
            self.longest = max(self.longest, waited)
        if self._see is not None:
            self._see(item, self._progress)
        if self._step:
            start = perf_counter()
            time.sleep(self._step)
            self.stepped += 0.0 if first else perf_counter() - start


class _StageSeconds:
    """Seconds of stages, while the block runs: in this process, or in workers, which share memory with it."""

    def __init__(self, plan: Plan, num_workers: int) -> None:
        self._plan = None if num_workers else plan
        self._labels = labels_of(plan)
        self._shape = max(1, num_workers), len(self._labels) + 1  # and loading
        self._memory: Any = sharedctypes.RawArray("d", max(1, self._shape[0] * self._shape[1]))
        self._clock: StageClock | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plan": None, "_clock": None}

    def _row(self, process: int) -> Any:
        count = self._shape[1]
        return np.frombuffer(self._memory)[process * count : (process + 1) * count]

    def __enter__(self) -> None:
        if self._plan is not None:
            self._clock = StageClock(self._plan, self._row(0))

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.stop()

    def in_worker(self, worker: int) -> None:
        """Have a worker measure its stages."""
        info = get_worker_info()
        if info is not None:
            made: Any = info.dataset
            StageClock(made.plan, self._row(worker))

    @property
    def seconds(self) -> dict[str, float]:
        """Of each stage, over all processes, without loading."""
        return dict(zip(self._labels, self._sums[:-1], strict=True))

    @property
    def loading(self) -> float:
        """Of loading, over all processes."""
        return self._sums[-1]

    @property
    def _sums(self) -> list[float]:
        found: list[float] = np.sum(
            [self._row(process) for process in range(self._shape[0])], axis=0
        ).tolist()
        return found
