"""What becomes of rows in the stages above them that need no order: each run by itself, in any thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeGuard

import numpy as np

from trainpipes.errors import TrainpipesError
from trainpipes.kinds.source import Place
from trainpipes.rows.bad_text import naming_bad_text
from trainpipes.rows.block import Block
from trainpipes.rows.run import Cursors, Run
from trainpipes.runtime.planning.plan import Plan

__all__ = ["Finishing", "is_about_a_row", "raise_placed", "say_where", "unplaced"]


class Finishing:
    """The stages above the rows that are dealt, where each treats rows or micro-batches by themselves.

    Args:
        on_rows: those below ``batch``.
        on_items: those above it.
    """

    def __init__(self, on_rows: Sequence[Any], on_items: Sequence[Any]) -> None:
        self._on_rows, self._on_items = list(on_rows), list(on_items)
        #: Seconds that the last run took.
        self.seconds = math.inf

    @property
    def has_workers(self) -> bool:
        """Whether workers of a stage can be given a run before its turn."""
        return any(stage.has_workers for stage in (*self._on_rows, *self._on_items))

    def __call__(self, run: Run) -> Run:
        """What becomes of a run."""
        start = perf_counter()
        found = self._through(run, self._on_rows, self._on_items)
        self.seconds = perf_counter() - start
        return found

    def submit_run(self, run: Run) -> Callable[[], Run]:
        """Put a run through the stages up to the first with workers, and have these begin; what is returned
        waits for them, and does the rest."""
        for number, stage in enumerate(self._on_rows):
            with naming_bad_text(run.block, stage):
                rest = stage.submit_run(unplaced(run.block))
            if rest is not None:
                return partial(self._rest_of_rows, run, rest, self._on_rows[number + 1 :])
            run = self._through(run, [stage], [])
        for number, stage in enumerate(self._on_items):
            with naming_bad_text(run.block, stage):
                rest = stage.submit_run(run)
            if rest is not None:
                return partial(self._rest_of_items, rest, self._on_items[number + 1 :])
            run = self._through(run, [], [stage])
        return lambda: run

    def _rest_of_rows(self, run: Run, rest: Callable[[], Run], later: Sequence[Any]) -> Run:
        return self._through(run.with_block(rest().block), later, self._on_items)

    def _rest_of_items(self, rest: Callable[[], Run], later: Sequence[Any]) -> Run:
        return self._through(rest(), [], later)

    def _through(self, run: Run, on_rows: Sequence[Any], on_items: Sequence[Any]) -> Run:
        if on_rows:
            block = run.block
            for stage in on_rows:
                with naming_bad_text(block, stage):
                    block = stage.process(unplaced(block)).block
            run = run.with_block(block)
        for stage in on_items:
            with naming_bad_text(run.block, stage):
                run = stage.process(run)
        return run


def unplaced(block: Block, bounds: Any = None) -> Run:
    """A run whose positions nobody asks for."""
    items = len(block) if bounds is None else len(bounds) - 1
    none = np.zeros(items + 1, dtype=np.int64)
    return Run(block, Cursors(({},), none, none), bounds)


def is_about_a_row(error: BaseException) -> TypeGuard[Exception]:
    """Whether a stage said which row an error is about: others had no trouble, and may come before it."""
    return getattr(error, "_trainpipes", (None, None))[1] is not None


def raise_placed(error: BaseException, plan: Plan) -> NoReturn:
    """Raise an error from below, which says where its row stands."""
    if isinstance(error, StopIteration):
        raise RuntimeError("a function that was called for rows raised StopIteration") from error
    if isinstance(error, Exception):
        say_where(error, plan)
    raise error


def say_where(error: Exception, plan: Plan) -> None:
    """Add to an error that a stage marked with a row: which stage, and where the row stands."""
    if not hasattr(error, "_trainpipes"):
        return
    stage, row = error._trainpipes
    place = Place() if row is None else _own_place(error, plan.inputs.place_of(row))
    if isinstance(error, TrainpipesError):
        error.path = error.path or place.path
        error.row_group = place.row_group if error.row_group is None else error.row_group
        error.row = place.row if error.row is None else error.row
        error.stage = error.stage or stage
        error.source = error.source or place.source
        if row is not None:
            error.message = f"{error.message} (at {place})"
    else:
        error.add_note(f"raised in {stage}" + ("" if row is None else f" at {place}"))
    del error._trainpipes


def _own_place(error: Exception, place: Place) -> Place:
    """The place of the row that an error is about: where it stands in its own pipeline, where that is one of
    several whose rows are read as one."""
    own: Place | None = getattr(error, "_place", None)
    return place if own is None else replace(own, source=place.source)
