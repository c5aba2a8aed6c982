"""Which file and row an error is about, said when it leaves the pipeline."""

from __future__ import annotations

from dataclasses import replace

from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import TrainpipesError
from trainpipes.interfaces.source import Place


def say_where(error: Exception, plan: Plan) -> None:
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
    """The place that the error gives, in the row's own pipeline."""
    own: Place | None = getattr(error, "_place", None)
    return place if own is None else replace(own, source=place.source)
