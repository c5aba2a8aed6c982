"""Which row an error is about: noted when raised, said when it leaves the pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.messages import need_columns
from trainpipes._internal.types import IntArray
from trainpipes.columns.bad_values import BadCell
from trainpipes.columns.columns import table_of
from trainpipes.columns.expressions import rows_that_match
from trainpipes.columns.run import Run
from trainpipes.errors import DataError, SchemaError, TrainpipesError
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import Stage


def each(stage: Stage, fn: Callable[[Any], Any], run: Run) -> list[Any]:
    fn = stage._draw_watch.around(fn)
    results: list[Any] = []
    append = results.append
    items = run.unroll()
    try:
        for item in items:
            append(fn(item))
    except Exception as error:
        ids = run.row_ids(len(results))
        blame(error, stage, int(ids[0]) if len(ids) else None)
        raise
    return results


def matching(run: Run, expression: Any, stage: Stage) -> npt.NDArray[np.bool_]:
    """Which rows of a run an Arrow expression keeps, bool ``[rows]``."""
    table = table_of(run.block.data, stage)
    try:
        return rows_that_match(table, expression)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, KeyError) as error:
        missing = re.match(r"No match for FieldRef.Name\((.*?)\) in ", str(error))
        need_columns(table.column_names, missing.groups() if missing else (), stage)
        said = f" does not fit the columns {table.column_names}: {error}"
        raise refused(stage, said) from error


def refused(stage: Stage, message: str, kind: type[DataError] = SchemaError) -> DataError:
    """The error of a stage about rows, none of them by itself."""
    return kind(f"{stage}{message}", stage=str(stage))


def at_row(message: str, stage: Stage, row: Any, kind: type[DataError] = DataError) -> DataError:
    error = kind(message, stage=str(stage))
    blame(error, stage, int(row))
    return error


def in_column(bad: BadCell, name: str, stage: Stage, ids: IntArray) -> DataError:
    """A stage's error about a column or a value in it; ``ids`` are its rows' numbers."""
    message = f"{stage}: column {name!r} {bad}"
    if bad.row is None:
        return SchemaError(message, stage=str(stage))
    return at_row(message, stage, ids[bad.row])


class naming:
    """Bad cells that are met within are errors about a stage's column; see ``in_column``."""

    def __init__(self, name: str, stage: Stage, ids: IntArray) -> None:
        self._about = name, stage, ids

    def __enter__(self) -> None:
        """Nothing is to be done before one is met."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadCell):
            raise in_column(error, *self._about) from None


def blame(error: BaseException, stage: Stage, row: int | None) -> None:
    if not hasattr(error, "_trainpipes"):
        error._trainpipes = (str(stage), row)  # type: ignore[attr-defined]


def is_about_a_row(error: BaseException) -> TypeGuard[Exception]:
    """Whether an error names its row: earlier rows may still come."""
    return getattr(error, "_trainpipes", (None, None))[1] is not None


def say_where(error: Exception, place_of: Callable[[int], Place]) -> None:
    """Say which file and row an error is about, when it leaves the pipeline."""
    if not hasattr(error, "_trainpipes"):
        return
    stage, row = error._trainpipes
    place = Place() if row is None else _own_place(error, place_of(row))
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
