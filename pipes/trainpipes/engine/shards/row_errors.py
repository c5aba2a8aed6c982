"""Errors about a row: which stage raised them, and where the row stands."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn, TypeGuard

from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import TrainpipesError
from trainpipes.kinds.source import Place


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
