"""Rows without a target of the loss: warned of, refused or left out."""

from __future__ import annotations

import logging
import threading
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainpipes._internal.messages import warn_once
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.kinds.blame import at_row
from trainpipes.kinds.stage import made_once
from trainpipes.kinds.stage_kinds import RunStage

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


class Targets:
    """What ``on_error`` does with rows that have no target; None warns once and keeps them."""

    def __init__(self, stage: Any, cure: str = "", item: str = "row") -> None:
        self._stage, self._cure, self._item = stage, cure, item
        self.left_out = LeftOut(stage, "they have no target, or cannot be read", item, unit="")

    @property
    def asked_for(self) -> bool:
        return bool(self._stage.on_error != "keep")

    def check(
        self, run: Run, found: Flags, cut: Flags | None = None, bad: Flags | None = None
    ) -> Run:
        stage, asked = self._stage, self._stage.on_error
        if asked == "skip":
            found = found if bad is None else found & ~bad
            self.left_out.add(run.block.ids, (~found).astype(np.int64))
            return run if found.all() else run.pick(np.flatnonzero(found).astype(np.int64))
        if asked == "keep" or found.all():
            return run
        lacking = np.flatnonzero(~found)
        rows, ways = (
            f"{len(lacking):,} of {len(found):,} {self._item}s",
            '"raise", "skip" or "keep"',
        )
        if asked == "raise":
            lacking, rows, ways = lacking[:1], f"a {self._item}", '"skip" or "keep"'
        one, cut_off = len(lacking) == 1, 0 if cut is None else int(cut[lacking].sum())
        who = "it was" if one else f"{cut_off:,} of them were"
        why = f", since {who} cut before the response" if cut_off else ""
        cure = f"{self._cure}, or " if self._cure else ""
        said = (
            f"{stage}: {rows} {'has' if one else 'have'} no target for the loss{why}: {cure}choose "
            f"on_error={ways}"
        )
        if asked == "raise":
            raise at_row(said, stage, run.block.ids[lacking[0]])
        warn_once(said, key=("no target", stage.name, self._cure))
        return run

    def refuse_batches(self, run: Run) -> None:
        if self._stage.on_error == "skip" and (run.bounds is not None or run.items is not None):
            raise ConfigError(
                f'{self._stage} leaves out rows with on_error="skip": put it before batch()'
            )

    def __str__(self) -> str:
        return str(self.left_out) if self.left_out.documents else ""


class TargetStage(RunStage):
    asks_inputs = True

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return bool(self.options["on_error"] != "skip")

    @made_once
    def _targets(self) -> Targets:
        length = self.options.get("max_length")
        return Targets(self, f"raise max_length={length}" if length else "")

    def report(self) -> str:
        return str(self._targets)

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        if self.keeps_rows:  # only "skip" shapes the rows
            found.pop("on_error", None)
        return found
