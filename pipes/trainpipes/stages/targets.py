"""Rows without a target of the loss: warned of, refused or left out."""

from __future__ import annotations

import logging
import threading
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from trainpipes._internal.messages import warn_once
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.kinds.blame import at_row
from trainpipes.kinds.stage import Stage, made_once

#: What torch's ``cross_entropy`` leaves out by default.
IGNORED = -100


log = logging.getLogger("trainpipes")


class LeftOut:
    """Counts rows left out in this process, and logs the first, the 10th, the 100th, ..."""

    def __init__(self, stage: Any, why: str, kind: str = "document", unit: str = "tokens") -> None:
        self._stage, self._why, self._kind, self._unit = stage, why, kind, unit
        self._next = 1
        self._lock = threading.Lock()
        self.seen = self.documents = self.tokens = 0

    def add(self, ids: IntArray, dropped: IntArray) -> None:
        lost = np.flatnonzero(dropped)
        with self._lock:
            self.seen += len(ids)
            self.documents += len(lost)
            self.tokens += int(dropped.sum())
            if not len(lost) or self.documents < self._next:
                return
            self._next = 10 ** len(str(self.documents))
            said = str(self)
        place, inputs = int(lost[-1]), self._stage.plan_inputs
        where = "" if inputs is None else f" at {inputs.place_of(int(ids[place]))}"
        size = f" has {dropped[place]:,}" if self._unit else ""
        log.warning("%s: %s; the last one%s%s", self._stage, said, size, where)

    def __str__(self) -> str:
        """What was left out; "" for nothing."""
        if not self.documents:
            return ""
        many = "" if self.seen == 1 else "s"
        size = f" ({self.tokens:,} {self._unit})" if self._unit else ""
        return f"{self.documents:,} of {self.seen:,} {self._kind}{many} left out: {self._why}{size}"


#: What becomes of rows that cannot be used; None differs from one reason to another.
OnError = Literal["raise", "skip", "keep"]
#: One for each row, bool ``[rows]``.
Flags = npt.NDArray[np.bool_]


def have_target(labels: npt.NDArray[Any], lengths: IntArray) -> Flags:
    """Whether each row has a label that is not -100.

    >>> have_target(np.array([-100, 5, -100, -100]), np.array([2, 0, 2])).tolist()
    [True, False, False]
    """
    found = np.zeros(len(lengths), dtype=np.bool_)
    some = lengths > 0
    if some.any():
        starts = (np.cumsum(lengths) - lengths)[some]
        found[some] = np.logical_or.reduceat(labels != IGNORED, starts)
    return found


class TargetStage(Stage):
    """A stage that does what its ``on_error`` says with rows that have no target."""

    asks_inputs = True
    item: ClassVar[str] = "row"

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return bool(self.options["on_error"] != "skip")

    @made_once
    def without_target(self) -> LeftOut:
        return LeftOut(self, "they have no target, or cannot be read", self.item, unit="")

    def report(self) -> str:
        return str(self.without_target)

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        if self.options["on_error"] != "skip":  # nothing else shapes the rows
            found.pop("on_error", None)
        return found

    def refuse_batches(self, run: Run) -> None:
        if self.options["on_error"] == "skip" and (run.bounds is not None or run.items is not None):
            raise ConfigError(f'{self} leaves out rows with on_error="skip": put it before batch()')

    def check_targets(
        self, run: Run, found: Flags, cut: Flags | None = None, bad: Flags | None = None
    ) -> Run:
        """The run without rows that are ``bad`` or in which no target was ``found``, if these are
        left out; else raises or warns of the latter, of which ``cut`` were cut.
        """
        asked, ids = self.options["on_error"], run.block.ids
        if asked == "skip":
            found = found if bad is None else found & ~bad
            self.without_target.add(ids, (~found).astype(np.int64))
            return run if found.all() else run.pick(np.flatnonzero(found).astype(np.int64))
        if asked == "keep" or found.all():
            return run
        lacking = np.flatnonzero(~found)
        rows, ways = f"{len(lacking):,} of {len(found):,} {self.item}s", '"raise", "skip" or "keep"'
        if asked == "raise":
            lacking, rows, ways = lacking[:1], f"a {self.item}", '"skip" or "keep"'
        one, lost = len(lacking) == 1, 0 if cut is None else int(cut[lacking].sum())
        who, most = "it was" if one else f"{lost:,} of them were", self.options.get("max_length")
        why = f", since {who} cut before the response" if lost else ""
        way = f"{f'raise max_length={most}, or ' if most else ''}choose on_error={ways}"
        said = f"{self}: {rows} {'has' if one else 'have'} no target for the loss{why}: {way}"
        if asked == "raise":
            raise at_row(said, self, ids[lacking[0]])
        warn_once(said, key=("no target", self.name, most))
        return run
