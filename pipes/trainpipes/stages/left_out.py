"""What a stage leaves out by choice: counted, and said."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np

from trainpipes.engine.layout import IntArray

log = logging.getLogger("trainpipes")


class LeftOut:
    """Counts the documents, or other rows, that a stage leaves out in this process, read ahead or delivered.

    Says so by the logger ``trainpipes``: of the first, with its file and row, the 10th, the 100th, …, so
    that worker processes report too.

    Args:
        stage: which leaves them out; its ``plan_inputs`` say where rows are from.
        why: in words.
        kind: what a row is, in the singular.
        unit: what is counted of each, in the plural; "" where rows alone are counted.
    """

    def __init__(self, stage: Any, why: str, kind: str = "document", unit: str = "tokens") -> None:
        self._stage = stage
        self._why = why
        self._kind, self._unit = kind, unit
        self._next = 1
        self._lock = threading.Lock()
        self.seen = 0
        self.documents = 0
        self.tokens = 0

    def add(self, ids: IntArray, dropped: IntArray | None) -> None:
        """Count some documents that are used up.

        Args:
            ids: their rows' numbers, int64 ``[documents]``.
            dropped: tokens (or what is counted) of each that is left out, 0 for the others, int64
                ``[documents]``; None where there is none.
        """
        lost = np.empty(0, dtype=np.int64) if dropped is None else np.flatnonzero(dropped)
        with self._lock:
            self.seen += len(ids)
            if not len(lost):
                return
            self.documents += len(lost)
            self.tokens += int(dropped.sum())  # type: ignore[union-attr]
            if self.documents < self._next:
                return
            while self.documents >= self._next:
                self._next *= 10
            said = str(self)
        assert dropped is not None
        place = int(lost[-1])
        inputs = self._stage.plan_inputs
        where = "" if inputs is None else f" at {inputs.place_of(int(ids[place]))}"
        size = f" has {dropped[place]:,}" if self._unit else ""
        log.warning("%s: %s; the last one%s%s", self._stage, said, size, where)

    def __str__(self) -> str:
        many = "" if self.seen == 1 else "s"
        size = f" ({self.tokens:,} {self._unit})" if self._unit else ""
        return f"{self.documents:,} of {self.seen:,} {self._kind}{many} left out: {self._why}{size}"
