"""What a user's function makes of the columns of many rows, for ``map_batches`` and ``with_columns``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.runtime.blame import blame
from trainpipes.runtime.planning.first_rows import find_schema
from trainpipes.runtime.rows.bad_cell import BadCell
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.rows.columns import from_columns, untyped_columns
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.stages.columns import columns_as

__all__ = ["Format", "returned_columns"]

CURE = "have the function return Arrow arrays of a type, pa.array(values, pa.string())"

Format = Literal["arrow", "numpy", "torch"]


def returned_columns(fn: Callable[[Any], Any], format: Format, run: Run, asker: Stage) -> pa.Table:
    """The columns that a function returns for the rows of a run: one row for each.

    Args:
        fn: the function.
        format: what it takes.
        run: the rows.
        asker: whose function it is; a stage that ``asks_inputs``.

    Raises:
        ConfigError: the run is of finished batches.
        DataError: there are more rows or fewer, or a null for which the format has no place.
        SchemaError: it returned what makes no columns.
    """
    if run.items is not None:
        raise ConfigError(
            f"{asker} stands below pad_collate() or collate(), which make tensors of columns; "
            "above them use map()"
        )
    columns = columns_as(run.block, format, asker)
    try:
        data = from_columns(fn(columns), asker, partial(_type, fn, format, asker))
    except BadCell as bad:
        error = SchemaError(f"{asker}: {bad}", stage=str(asker))
        blame(error, asker, int(run.block.ids[bad.row or 0]))
        raise error from None
    except Exception as error:
        blame(error, asker, int(run.block.ids[0]))
        raise
    if len(data) != len(run.block):
        raise DataError(
            f"{asker}: the function gives one row for each row it gets, got {len(run.block)} rows "
            f"and returned {len(data)}; to drop rows use filter()",
            stage=str(asker),
        )
    return data


def _type(fn: Callable[[Any], Any], format: Format, asker: Stage, name: str) -> pa.DataType | None:
    """The type of a column that the function returns as a list of Python values: that of the first
    rows, as for rows that are Python objects."""
    inputs = asker.plan_inputs
    key = f"{asker.name}-{inputs.chain.stages.index(asker)}"

    def find() -> pa.Schema:
        steps = inputs.chain.steps
        below = steps[: steps.index(asker)]
        return find_schema(inputs, below, str(asker), CURE, partial(_untyped, fn, format, asker))

    schema = inputs.schemas.get(key, find)
    return schema.field(name).type if name in schema.names else None


def _untyped(
    fn: Callable[[Any], Any], format: Format, asker: Stage, block: Block
) -> list[dict[str, Any]]:
    """Columns that the function returns as Python values, for some rows."""
    columns = untyped_columns(fn(columns_as(block, format, asker)))
    if not columns:
        return []
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
