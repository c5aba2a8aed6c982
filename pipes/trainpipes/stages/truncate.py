from __future__ import annotations

from dataclasses import KW_ONLY

import numpy as np

from trainpipes._internal.checks import ColumnNames, Natural, column_names
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import list_array
from trainpipes.columns.rectangles import Side, cut_rows
from trainpipes.columns.run import Run
from trainpipes.stages.columns import row_table
from trainpipes.stages.targets import OnError, TargetStage, have_target
from trainpipes.stages.token_columns import numbers_of

#: What is cut where nothing is said, if it is there.
USUAL = ("input_ids", "labels", "attention_mask", "token_type_ids")


class Truncate(TargetStage):
    """Cut lists of numbers to a length.

    For text use ``tokenize(max_length=...)``, which keeps special tokens.

    Args:
        max_length: the most numbers that a list keeps.
        columns: the columns to cut; by default "input_ids", and "labels", "attention_mask" and
            "token_type_ids" if they are there.
        truncation_side: "right" cuts the end off, "left" the start.
        on_error: for rows whose "labels" are then all -100; as in ``tokenize``.

    Raises:
        DataError: a null, or with ``on_error="raise"`` a row without a target.
        SchemaError: a column is not there, or holds no lists of numbers.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4]]}))
    >>> list(rows.truncate(2, truncation_side="left"))
    [{'input_ids': [2, 3]}, {'input_ids': [4]}]
    """

    needs_columns = True
    thread_safe = True

    max_length: Natural
    _: KW_ONLY
    columns: ColumnNames | None = None
    truncation_side: Side = "right"
    on_error: OnError | None = None

    def process(self, run: Run) -> Run:
        self._targets.refuse_batches(run)
        block, table = row_table(run, self)
        if self.columns is None:
            names = [name for name in USUAL if name in table.column_names] or ["input_ids"]
        else:
            names = column_names(self.columns, "truncate(columns)")
        need_columns(table.column_names, names, self)
        most, cut = self.max_length, False
        lost = np.zeros(len(block), dtype=np.bool_)  # rows whose targets are cut off
        for name in names:
            values, lengths = numbers_of(block, name, self)
            if not (lengths > most).any():
                continue
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            place = table.column_names.index(name)
            kept, kept_lengths = cut_rows(values, offsets, most, self.truncation_side)
            table = table.set_column(place, name, list_array(kept, kept_lengths))
            cut = True
            if name == "labels":
                lost = (lengths > most) & ~have_target(kept, kept_lengths)
        run = run.with_block(block.with_data(table)) if cut else run.with_block(block)
        return self._targets.check(run, ~lost, lost) if self._targets.asked_for else run
