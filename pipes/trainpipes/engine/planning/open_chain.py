"""The stages on a shard's rows, opened: runs go through them one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from trainpipes.columns.bad_text import naming_bad_text
from trainpipes.columns.run import Run, RunSource
from trainpipes.interfaces.empty_epoch_guard import EmptyRounds
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import OpenBelow, RegroupStage, RunStage, WorkingStage

#: What is said of a function that raises what would end the rows.
RAISED_STOP = "a function that was called for rows raised StopIteration"
_Found = TypeVar("_Found")


class OpenChain:
    """A shard's runs from stages, opened at a cursor; ``rows`` opens those below."""

    def __init__(self, stages: Sequence[Stage], rows: OpenBelow, at: dict[str, Any]) -> None:
        self._submitting: _Processed | None = None  # the first one whose stage has workers
        for stage in stages:
            rows = partial(self._open_stage, stage, rows)
        self._runs = rows(at)

    def _open_stage(self, stage: Stage, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        if isinstance(stage, RegroupStage):
            return stage.open(below, at)
        assert isinstance(stage, RunStage)
        found = _Processed(stage, below(at))
        if isinstance(stage, WorkingStage) and stage.has_workers and self._submitting is None:
            self._submitting = found
        return found

    def next_run(self) -> Run:
        return self._runs.next_run()

    def begin(self) -> None:
        """Have workers of a stage begin with the next run."""
        if self._submitting is not None:
            self._submitting.begin()


class _Processed:
    def __init__(self, stage: RunStage, below: RunSource) -> None:
        self._stage = stage
        self._below = below
        #: Runs that workers of the stage have begun with, and what waits for them; or what went wrong.
        self._begun: deque[tuple[Run, Callable[[], Run] | None] | Exception] = deque()

    def begin(self) -> None:
        """Have workers begin with one more run; errors are raised in its turn."""
        assert isinstance(self._stage, WorkingStage)
        try:
            below = self._below.next_run()
            self._begun.append((below, self._called(self._stage.submit_run, below)))
        except Exception as error:
            self._begun.append(error)

    def next_run(self) -> Run:
        rounds: EmptyRounds | None = None
        while True:
            begun = self._begun.popleft() if self._begun else (self._below.next_run(), None)
            if isinstance(begun, Exception):
                raise begun
            below, rest = begun
            made = self._stage.process if rest is None else partial(_waited, rest)
            run = self._called(made, below)
            if len(run):
                return run
            rounds = rounds or EmptyRounds()
            rounds.saw(below)
            rounds.check(self._stage)

    def _called(self, function: Callable[[Run], _Found], below: Run) -> _Found:
        try:
            with naming_bad_text(below.block, self._stage):
                return function(below)
        except StopIteration as error:  # the function's own: the rows have not ended
            raise RuntimeError(RAISED_STOP) from error


def _waited(rest: Callable[[], Run], _: Run) -> Run:
    return rest()
