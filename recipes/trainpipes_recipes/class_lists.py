"""A stage of the recipe ``classification``, for rows of several classes.

>>> import trainpipes as tp
>>> list(tp.from_dataset([{"label": [0.0, 1.0, 1.0]}]).then(ClassLists("label", width=3)))
[{'label': [1, 2]}]
"""

from __future__ import annotations

import numpy as np

from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell
from trainpipes.columns.run import Run
from trainpipes.interfaces.read_columns import in_column
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.stages.columns import row_table, with_column
from trainpipes.stages.labels import LabelColumn

__all__ = ["ClassLists"]


class ClassLists(RunStage, takes="columns"):
    """Makes lists of class numbers of lists that hold a 1 or 0 for each of ``width`` classes. Without a
    width, refuses lists of class numbers that have one twice.
    """

    thread_safe = True

    column: str
    width: int | None = None

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, [self.column])
        labels = LabelColumn(table[self.column], self.column, self, block.ids)
        if labels.is_text or labels.lengths is None:
            return run
        numbers, lengths = arrays.to_numpy(labels.values), labels.lengths
        rows = np.repeat(np.arange(len(lengths)), lengths)
        if self.width is None:
            order = np.lexsort((numbers, rows))
            pairs = np.stack([rows, numbers])[:, order]
            twice = np.flatnonzero((np.diff(pairs) == 0).all(0))
            if len(twice):
                row, number = pairs[:, twice[0]].tolist()
                rule = "a list has each class once, or a 1 or 0 for each class in every row"
                bad = BadCell(row, f"holds the class {number} twice, and {rule}: fix it with map()")
                raise in_column(bad, self.column, self, block.ids)
            return run
        wrong = lengths != self.width
        wrong[rows[(numbers != 0) & (numbers != 1)]] = True
        if wrong.any():
            rule = f"must hold a 1 or 0 for each of {self.width} classes, as in the first rows"
            row = int(np.argmax(wrong))
            got = table[self.column][row].as_py()
            bad = BadCell(row, f"{rule}, got {got!r:.80}: fix it with map()")
            raise in_column(bad, self.column, self, block.ids)
        hot = numbers.reshape(-1, self.width) == 1
        lists = arrays.list_array(np.nonzero(hot)[1].astype(np.int64), hot.sum(1))
        return run.with_block(block.with_data(with_column(table, self.column, lists)))
