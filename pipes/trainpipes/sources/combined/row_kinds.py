"""Of what kind a pipeline's rows are: as far as that is known before any is read, and by its first row.

Pure functions, called by the thread that looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainpipes.engine.planning.as_columns import gives_objects, known_columns
from trainpipes.engine.planning.first_rows import first_rows
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import TrainpipesError
from trainpipes.kinds.own_class import is_ours
from trainpipes.kinds.source import RowSource
from trainpipes.kinds.stage import Stage
from trainpipes.sources.combined.same_columns import OBJECTS, columns_of

#: Rows that can be read only once, of which no first one can be looked at.
ONCE = "once"


def is_python(inputs: Inputs) -> bool:
    """Whether it is known, without a look at any, that a pipeline's rows are Python objects."""
    stages = inputs.chain.stages
    return gives_objects(stages) and all(is_ours(type(stage)) for stage in stages)


def kind_of(inputs: Inputs, steps: Sequence[Stage], asker: str) -> Any:
    """Of what kind the rows are that come out of some stages: what ``columns_of`` tells, or ``ONCE``; None
    where there are none.

    Args:
        inputs: what the pipeline reads.
        steps: the stages.
        asker: who asks, for messages.
    """
    known = known_columns(inputs, steps)
    if known is not None:
        empty = isinstance(inputs.source, RowSource) and not inputs.blocks.rows
        return None if empty else known
    if is_python(inputs):
        return OBJECTS
    if inputs.chain.opener.read_once:
        return ONCE
    try:
        data = first_rows(inputs, steps, asker)
    except Exception as error:
        if isinstance(error, TrainpipesError) and not hasattr(error, "_trainpipes"):
            raise
        return None  # it is about a row, and raised when that is due
    return None if data is None else columns_of(data)
