"""``truncate``: lists of numbers cut to a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from torchdata.nodes import BaseNode

from trainpipes.arrays import list_array
from trainpipes.byte_rows import cut_rows
from trainpipes.checks import column_names, whole_number
from trainpipes.errors import ConfigError
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.shown import shown
from trainpipes.stages.naming import need_columns
from trainpipes.stages.ragged_column import row_table
from trainpipes.stages.token_columns import numbers_of

__all__ = ["Truncate"]

#: What is cut where nothing is said, if it is there.
USUAL = ("input_ids", "labels", "attention_mask", "token_type_ids")


class Truncate(Stage):
    """Cuts lists of numbers to a length.

    In: rows with columns of lists of numbers. Out: the same rows, no list longer than ``length``. Cursor:
    none of its own. Costs about 1 ns a number, and nothing where all fit.

    For text, ``tokenize(max_length=...)`` is better: it knows which tokens are special, and keeps them.

    Args:
        source: the node below, or None as a step of a pipeline.
        length: numbers that are kept of each list, at most.
        columns: which ones are cut; by default "input_ids" and those of "labels", "attention_mask" and
            "token_type_ids" that are there.
        side: "right" cuts the end off, "left" the start.

    Raises:
        DataError: a null; names the row.
        SchemaError: a column is not there, or holds no lists of numbers.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4]]}))
    >>> list(rows.truncate(2, side="left"))
    [{'input_ids': [2, 3]}, {'input_ids': [4]}]
    """

    role = "rows"
    needs_columns = True

    def __init__(
        self,
        source: BaseNode[Any] | None = None,
        length: int = 512,
        *,
        columns: str | Sequence[str] | None = None,
        side: Literal["right", "left"] = "right",
    ) -> None:
        whole_number(length, 0, "truncate(length)", "numbers that are kept of each list")
        names = None if columns is None else column_names(columns, "truncate(columns)")
        if side not in ("right", "left"):
            raise ConfigError(f'truncate(side) is "right" or "left", got {shown(side)}')
        super().__init__(source, length=length, columns=columns, side=side)
        self._names = names

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        names = self._names
        if names is None:
            names = [name for name in USUAL if name in table.column_names] or ["input_ids"]
        need_columns(table.column_names, names, self)
        most, cut = self.options["length"], False
        for name in names:
            values, lengths = numbers_of(block, name, self)
            if not (lengths > most).any():
                continue
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            cut_side: Literal["pre", "post"] = "post" if self.options["side"] == "right" else "pre"
            place = table.column_names.index(name)
            table = table.set_column(
                place, name, list_array(*cut_rows(values, offsets, most, cut_side))
            )
            cut = True
        return run.with_block(block.with_data(table)) if cut else run.with_block(block)
