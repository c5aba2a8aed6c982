"""Where to cut rows so that no rectangle of them has more cells than a budget allows."""

from __future__ import annotations

from typing import Literal, NoReturn

import numpy as np

from trainpipes._internal.checks import whole_number
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError
from trainpipes.kinds.blame import blame
from trainpipes.kinds.stage import Stage

LongRow = Literal["raise", "alone"]


class Budget:
    """At most so many cells and rows.

    Args:
        asker: the stage, for messages.
        max_tokens: N: rows times the longest of them, padding included.
        max_rows: rows at most.
        overflow: what becomes of a row longer than N: refused, or a rectangle of its own.

    Raises:
        ConfigError: an option is none that can be had.
    """

    def __init__(
        self, name: str, max_tokens: int, max_rows: int | None, overflow: LongRow | None
    ) -> None:
        whole_number(max_tokens, 1, f"{name}(max_tokens)", "rows x longest row of a micro-batch")
        if max_rows is not None:
            whole_number(max_rows, 1, f"{name}(max_rows)", "rows in a micro-batch at most")
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.alone = overflow == "alone"

    def check(self, lengths: IntArray, ids: IntArray, asker: Stage) -> None:
        """Raise for the first row that is too long by itself, unless it may be alone."""
        longer = lengths > self.max_tokens
        if not self.alone and longer.any():
            self._refuse(int(np.argmax(longer)), lengths, ids, asker)

    def _refuse(self, place: int, lengths: IntArray, ids: IntArray, asker: Stage) -> NoReturn:
        error = DataError(
            f"{asker}: no row is longer than max_tokens, got one of {lengths[place]}; raise max_tokens, "
            'cut rows (tokenize(max_length=...)), or pass overflow="alone" for a micro-batch of its own',
            stage=str(asker),
        )
        blame(error, asker, int(ids[place]))
        raise error

    def cut(self, lengths: IntArray) -> IntArray:
        """Where rectangles of rows in the order given start, and the end: int64 ``[rectangles + 1]``.

        Each takes rows as long as the next one fits; the last one might have room for more. Costs a few
        NumPy calls a rectangle.

        >>> Budget("batch", 12, None, None).cut(np.array([3, 4, 4, 6, 6, 1])).tolist()
        [0, 3, 5, 6]
        """
        edges = [0]
        guess = 64
        while edges[-1] < len(lengths):
            rows = self._rows(lengths[edges[-1] : edges[-1] + guess])
            if rows == guess and (self.max_rows is None or rows < self.max_rows):
                guess *= 2
                continue
            edges.append(edges[-1] + rows)
            guess = 2 * rows + 8
        return np.array(edges, dtype=np.int64)

    def _rows(self, lengths: IntArray) -> int:
        """How many of the first rows fit together."""
        cells = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        rows = int(np.searchsorted(cells, self.max_tokens, side="right"))
        return max(1, rows if self.max_rows is None else min(rows, self.max_rows))

    def full(self, lengths: IntArray) -> bool:
        """Whether no row at all could join these."""
        most = int(lengths.max(initial=0)) * (len(lengths) + 1)
        return len(lengths) == self.max_rows or most > self.max_tokens
