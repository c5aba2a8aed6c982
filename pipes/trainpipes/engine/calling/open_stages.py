"""The stages on a shard's rows, opened: runs go through them one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from trainpipes._internal.activity import each
from trainpipes.columns.block import naming_bad_values
from trainpipes.columns.run import Run
from trainpipes.interfaces.held import EmptyRounds
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import (
    FinishingStage,
    OpenBelow,
    RegroupStage,
    RunStage,
    WorkingStage,
)

#: What is said of a function that raises what would end the rows.
RAISED_STOP = "a function that was called for rows raised StopIteration"
_Made = TypeVar("_Made")
#: Fewest rows that a function is called for at a time, if it is called for rows.
LEAST_ROWS = 8
#: About how many bytes a run has.
RUN_BYTES = 4 << 20


def open_stages(
    stages: Sequence[Stage], rows: OpenBelow, at: dict[str, Any], batch_size: int = 1
) -> tuple[Iterator[Run], Submitted | None]:
    """A shard's runs from stages, opened at a cursor; ``rows`` opens those below. And what the first stage
    with workers makes, which can be begun ahead. Whoever meets an error opens the stages anew.

    Stages that regroup rows make many items at once. Functions are called, and batches collated, for few of
    them: what they make takes memory, and a shard is asked for one item at a time.
    """
    submitted: list[Submitted] = []
    for stage in stages:
        if any(_calls_python(s) or isinstance(s, FinishingStage) for s in _inner(stage)):
            rows = partial(_in_parts, stage, rows, max(batch_size, LEAST_ROWS))
        rows = partial(_open_stage, stage, rows, submitted)
    return rows(at), submitted[0] if submitted else None


def _inner(stage: Stage) -> tuple[Stage, ...]:
    return stage.inner if isinstance(stage, WorkingStage) else (stage,)


def _calls_python(stage: Stage) -> bool:
    """Whether a stage calls a function, or makes an object, for each row or batch."""
    of_objects = stage.traits.gives == "objects" or isinstance(stage, FinishingStage)
    return stage.traits.per_row and (of_objects or stage._calls_function)


def _in_parts(stage: Stage, below: OpenBelow, rows: int, at: dict[str, Any]) -> Iterator[Run]:
    """Runs of as many items as a stage is to have at a time. None that was given is held."""
    return _parts(stage, below(at), rows)


def _parts(stage: Stage, runs: Iterator[Run], rows: int) -> Iterator[Run]:
    calls_python = any(map(_calls_python, _inner(stage)))
    while (run := next(runs, None)) is not None:
        most = _items_at_a_time(stage, run, rows, calls_python)
        firsts = range(0, len(run), most)
        parts = deque(
            [run] if len(firsts) < 2 else [run.part(n, min(n + most, len(run))) for n in firsts]
        )
        del run
        while parts:
            yield parts.popleft()


def _items_at_a_time(stage: Stage, run: Run, rows: int, calls_python: bool) -> int:
    if not calls_python:
        return max(1, int(RUN_BYTES * len(run) / max(1.0, run.block.row_bytes * len(run.block))))
    workers = stage.most_workers if isinstance(stage, WorkingStage) and stage.has_workers else 1
    return workers * (rows if run.bounds is None and run.items is None else 1)


def _open_stage(
    stage: Stage, below: OpenBelow, submitted: list[Submitted], at: dict[str, Any]
) -> Iterator[Run]:
    runs: Iterator[Run]
    if isinstance(stage, RegroupStage):
        runs = each(stage, stage.open(below, at))
    elif isinstance(stage, WorkingStage) and stage.has_workers:
        runs = Submitted(stage, below(at))
        submitted.append(runs)
    else:
        assert isinstance(stage, RunStage)
        runs = map(partial(called, stage, stage.process), below(at))
    return not_empty(runs, stage)


def not_empty(runs: Iterator[Run], stage: object) -> Iterator[Run]:
    """The runs of a stage that have an item; raises after many epochs without. No run that was given is
    held: its memory is free for the next one.
    """
    rounds = EmptyRounds()

    def has_items(run: Run) -> bool:
        if len(run):
            rounds.gave()
            return True
        rounds.saw(run)
        rounds.check(stage)
        return False

    return filter(has_items, runs)


def called(stage: RunStage, function: Callable[[Run], _Made], run: Run) -> _Made:
    try:
        with naming_bad_values(run.block, stage):
            return function(run)
    except StopIteration as error:  # the function's own: the rows have not ended
        raise RuntimeError(RAISED_STOP) from error


class Submitted(Iterator[Run]):
    """Runs through a stage whose workers may begin with some of them ahead."""

    def __init__(self, stage: WorkingStage, below: Iterator[Run]) -> None:
        self._stage = stage
        self._below = below
        #: Runs that workers of the stage have begun with, and what waits for them; or what went wrong.
        self._begun: deque[tuple[Run, Callable[[], Run] | None] | Exception] = deque()

    def begin(self) -> None:
        """Have workers begin with one more run; errors are raised in its turn."""
        try:
            run = next(self._below)
            self._begun.append((run, called(self._stage, self._stage.submit_run, run)))
        except Exception as error:
            self._begun.append(error)

    def __next__(self) -> Run:
        while len(self._begun) < self._stage.most_begun:
            self.begin()
            if isinstance(self._begun[-1], Exception):
                break
        begun = self._begun.popleft() if self._begun else (next(self._below), None)
        if isinstance(begun, Exception):
            raise begun
        run, wait = begun
        return called(self._stage, self._stage.process if wait is None else lambda _: wait(), run)
