"""Columns of lists of numbers, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.kinds.blame import blame
from trainpipes.kinds.stage import Stage
from trainpipes.stages.columns import columns_of
from trainpipes.stages.token_columns import numbers_of


def row_table(run: Run, asker: Stage) -> tuple[Block, pa.Table]:
    """The rows of a run as Arrow columns: a block of them, and its table.

    Raises:
        ConfigError: they are tensors or other finished items by now.
        SchemaError: they have no columns.
    """
    if run.items is not None:
        raise ConfigError(
            f"{asker} works on columns of rows: put it before pad_collate() or collate()"
        )
    block = columns_of(run.block, asker)
    table = block.data
    assert isinstance(table, pa.Table)
    return block, table


def beside(
    block: Block, name: str, column: str, lengths: IntArray, asker: Stage
) -> npt.NDArray[Any]:
    """The values of a column that has as many numbers in each row as another one.

    Args:
        block: the rows.
        name: the column.
        column: the other one.
        lengths: numbers in each of its rows, int64 ``[rows]``.
        asker: the stage, for messages.

    Raises:
        DataError: a row has more or fewer; names it.
    """
    values, own = numbers_of(block, name, asker)
    if not np.array_equal(own, lengths):
        place = int(np.argmax(own != lengths))
        error = DataError(
            f"{asker}: column {name!r} goes with {column!r} and has as many numbers in each row, got "
            f"{own[place]} where {column!r} has {lengths[place]}",
            stage=str(asker),
        )
        blame(error, asker, int(block.ids[place]))
        raise error
    return values


def refuse_taken(table: pa.Table, names: Sequence[str], asker: Stage) -> None:
    """Raise if a column that a stage adds is there already."""
    for name in names:
        if name in table.column_names:
            raise taken(name, asker)


def taken(name: str, asker: Stage) -> SchemaError:
    """What to raise where a column that a stage adds is there already."""
    return SchemaError(
        f"{asker}: the rows have a column {name!r} already; rename() it, or drop it with select()",
        stage=str(asker),
    )
