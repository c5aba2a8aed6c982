"""``add_labels``: what a model is to predict, made of the token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from trainpipes._internal.checks import ColumnName, several, whole_number
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import list_array
from trainpipes.columns.run import Run
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.label_column import refuse_taken, row_table
from trainpipes.stages.targets import IGNORED
from trainpipes.stages.token_columns import beside, ids_of, label_dtype


class AddLabels(RunStage):
    """Adds a column "labels": the token ids, or -100 where nothing is to be predicted.

    In: rows with a column of token ids. Out: the same rows with "labels", lists of the same lengths. Labels
    are not shifted: the label at position t is the token at t, which the logits at t - 1 predict. Cursor:
    none of its own. Costs about 1 ns a token.

    ``tokenize(labels=...)`` makes labels from columns of text, and ``pack`` adds them where rows have none.

    Args:
        column: the token ids.
        where: a column of lists of numbers or bools, as long as those of ``column``: an id is a label where
            it is not 0. None: every id is one.
        ignore: ids that get -100, such as those of special tokens.

    Raises:
        DataError: a null, or lists of different lengths; names the row.
        SchemaError: a column is not there, or holds no lists of integers; or there is a column "labels"
            already.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[5, 6, 7, 0]], "answer": [[0, 1, 1, 0]]}))
    >>> next(iter(rows.add_labels(where="answer").select("labels")))
    {'labels': [-100, 6, 7, -100]}
    >>> next(iter(rows.add_labels(ignore=[0]).select("labels")))
    {'labels': [5, 6, 7, -100]}
    """

    needs_columns = True

    column: ColumnName = "input_ids"
    _: KW_ONLY
    where: ColumnName | None = None
    ignore: int | Sequence[int] = ()

    def check(self) -> None:
        ids: Any = [self.ignore] if isinstance(self.ignore, int) else self.ignore
        self._require(several(ids), "ignore", "a token id, or several")
        for token in ids:
            whole_number(token, 0, "add_labels(ignore)")
        self._set(ignore=list(ids) or ())

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        asked = [self.column, *([] if self.where is None else [self.where])]
        need_columns(table.column_names, asked, self)
        refuse_taken(table, ["labels"], self)
        values, lengths = ids_of(block, self.column, self)
        labels = values.astype(label_dtype(values))
        if self.where is not None:
            labels[beside(block, self.where, self.column, lengths, self) == 0] = IGNORED
        if self.ignore:
            labels[np.isin(values, self.ignore)] = IGNORED
        return run.with_block(
            block.with_data(table.append_column("labels", list_array(labels, lengths)))
        )
