"""A column of labels, as texts or as integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import first_null, is_list, is_number, is_text, one_chunk, to_numpy
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.kinds.blame import in_column
from trainpipes.kinds.stage import Stage
from trainpipes.stages.columns import columns_of


class LabelColumn:
    """A column of labels, one a row or a list of them, read as texts or as integers.

    Args:
        column: texts, integers, bools, floats that are whole numbers, or lists of these.
        name: what it is called.
        asker: the stage, for messages.
        ids: the numbers of its rows, for messages.

    Raises:
        DataError: a null, or a float that is no whole number; names the row.
        SchemaError: it holds something else.

    Attributes:
        values: int64 ``[n]``, or an Arrow array of texts.
        lengths: labels of each row; None where each has one.
    """

    def __init__(self, column: Any, name: str, asker: Stage, ids: IntArray) -> None:
        self.name, self._asker, self._ids = name, asker, ids
        array, self.lengths = one_chunk(column), None
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        kind = array.type
        if pa.types.is_fixed_size_list(kind):
            array = array.cast(pa.list_(kind.value_type))
        if is_list(array.type):
            self._refuse_null(array)
            self.lengths = to_numpy(array.value_lengths()).astype(np.int64)
            array = array.flatten()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        self._refuse_null(array)
        if pa.types.is_null(array.type):  # without a row
            array = array.cast(pa.int64())
        if is_text(array.type):
            self.values = array
        elif is_number(array.type):
            self.values = self._whole(to_numpy(array))
        else:
            raise SchemaError(
                f"{asker}: column {name!r} must hold labels, which are texts, integers, bools or lists of "
                f"these, got {kind}: make texts of them with map(), or name another column",
                stage=str(asker),
            )

    @property
    def is_text(self) -> bool:
        """Whether labels are texts."""
        return isinstance(self.values, pa.Array)

    def fail(self, place: int, message: str) -> DataError:
        """What to raise over a label, by its place in ``values``."""
        row = place
        if self.lengths is not None:
            row = int(np.searchsorted(np.cumsum(self.lengths), place, side="right"))
        return in_column(BadCell(row, message), self.name, self._asker, self._ids)

    def _refuse_null(self, array: pa.Array) -> None:
        if array.null_count:
            raise self.fail(
                first_null(array),
                "holds a null, which is no label: leave such rows out with filter(), or give them a label "
                "with map()",
            )

    def _whole(self, values: Any) -> IntArray:
        """Numbers as int64."""
        found: IntArray
        with np.errstate(invalid="ignore"):
            found = values.astype(np.int64)
        bad = np.flatnonzero((found != values) | ((found < 0) != (values < 0)))
        if len(bad):
            place = int(bad[0])
            raise self.fail(
                place,
                f"holds {values[place]}, and a label is a text or a whole number: for numbers to predict "
                "leave encode_labels() out",
            )
        return found


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
