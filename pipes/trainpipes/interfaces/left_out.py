"""Rows that are left out: counted, logged, and with ``Quarantine`` listed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainpipes._internal.types import IntArray
from trainpipes.columns.block import Block, Pieces
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError, UnreachableError
from trainpipes.errors.text import cut, hidden
from trainpipes.interfaces.quarantine import Quarantine, leaves_out, lines_of
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.tally import Numbers, Tally, is_aside

log = logging.getLogger("trainpipes")

#: Characters of an error that is shown.
SHOWN = 300
#: Rows that ``max_share`` is a share of, at least.
LEAST_ROWS = 1000
#: With ``on_error="skip"``, the share that may be left out, of so many rows at the start.
SKIPPED_SHARE, FIRST_ROWS = 0.5, 10_000


class LeftOut(Tally):
    """Rows left out; logs the first, the 10th, the 100th, ..."""

    def __init__(
        self,
        stage: Any,
        why: str,
        kind: str = "document",
        unit: str = "tokens",
        on_error: Any = None,
    ) -> None:
        super().__init__(stage)
        self._why, self._kind, self._unit = why, kind, unit
        self._quarantine = on_error if isinstance(on_error, Quarantine) else None
        self._max_share = SKIPPED_SHARE if on_error == "skip" else 1.0
        if self._quarantine is not None:
            self._max_share = self._quarantine.max_share

    def drop(
        self,
        given: Block,
        dropped: IntArray,
        error_of: Callable[[int], Any] | None = None,
        value_of: Callable[[int], Any] | None = None,
    ) -> None:
        """Count rows, of which those are left out where ``dropped`` is not 0. ``error_of`` says why, and
        ``value_of`` what a row holds, by its place in the block.
        """
        if is_aside():
            return
        lost = np.flatnonzero(dropped)
        totals = self.add((len(dropped), len(lost), int(dropped.sum())))
        if not len(lost):
            return
        if self._quarantine is not None:
            why = error_of or (lambda _: self._why)
            value = value_of or (lambda row: given.slice(row, row + 1).rows()[0])
            lines_of(self._quarantine).add(self.stage, self._places(given, lost), why, value)
        if self._quarantine is not None or totals[0] - len(dropped) < FIRST_ROWS:
            first = int(lost[0])
            said = error_of(first) if error_of else self._why
            self._stop_at_share(totals, f"{self._place(int(given.ids[first]))}: {said}")
        before = totals[1] - len(lost)
        if before and len(str(before)) == len(str(totals[1])):
            return
        last = int(lost[-1])
        where = "" if self.stage._inputs is None else f" at {self._place(int(given.ids[last]))}"
        size = f" has {dropped[last]:,}" if self._unit else ""
        stage = str(self.stage)  # log records, which are kept, hold no workers of it
        log.warning("%s: %s; the last one%s%s", stage, self._said(totals), size, where)

    def _place(self, row: int) -> Place:
        inputs = self.stage._inputs
        return Place(row=row) if inputs is None else inputs.place_of(row)

    def _places(self, given: Block, lost: IntArray) -> Iterator[tuple[int, Place, int]]:
        """Of rows, and of all that a packed one is made of: the row, the place and the epoch."""
        pieces = given.made_of or Pieces.whole(given.ids, given.epoch)
        for row in lost.tolist():
            own = slice(*pieces.bounds[row : row + 2].tolist())
            for number, epoch in zip(pieces.ids[own], pieces.epochs[own], strict=True):
                yield row, self._place(int(number)), int(epoch)

    def _stop_at_share(self, totals: Numbers, last: str) -> None:
        seen, lost, _ = totals
        if lost / max(seen, LEAST_ROWS) > self._max_share:
            raise self._too_many(seen, lost, last)

    def check_pass(self, numbers: Numbers) -> None:
        seen, lost, _ = numbers
        if seen and lost == seen and self._max_share < 1:
            raise self._too_many(seen, lost, "")

    def _too_many(self, seen: int, lost: int, last: str) -> DataError:
        said = f"{self.stage}: {lost:,} of {seen:,} rows of this process are left out"
        if self._quarantine is not None:
            share = f"max_share={self._max_share} of them (or of {LEAST_ROWS:,})"
            text = f"{said}, more than {share}; {lines_of(self._quarantine).summary()}"
        else:
            text = f"{said}: {self._why}"
            text += f", such as {hidden(cut(last, SHOWN))}" if last else ""
            text += (
                '; on_error="skip" leaves out half of them at most: fix the data, or list rows and leave '
                "out any number, by on_error=tp.Quarantine(folder, max_share=1)"
            )
        return DataError(text, stage=str(self.stage))

    def _said(self, numbers: Numbers) -> str:
        seen, lost, tokens = numbers
        if not lost:
            return ""
        many = "" if seen == 1 else "s"
        size = f" ({tokens:,} {self._unit})" if self._unit else ""
        where = f"; listed in {hidden(str(self._quarantine.folder))}" if self._quarantine else ""
        return f"{lost:,} of {seen:,} {self._kind}{many} left out: {self._why}{size}{where}"


#: Where an object lies in memory: other in each run, and so of each row another error.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: What a function raises for another reason than what a row holds: each row would fail, or another one next
#: time.
NOT_OF_ROWS = (
    ConfigError,
    ImportError,
    MemoryError,
    ConnectionError,
    TimeoutError,
    UnreachableError,
)


@dataclass(frozen=True)
class Failed:
    """In place of what a function makes of a row of which it raises: why."""

    why: str


@dataclass(frozen=True)
class Guarded:
    """A function of the user's, which gives ``Failed`` where it raises for what a row holds."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        try:
            return self.fn(*args)
        except NOT_OF_ROWS:
            raise
        except Exception as error:
            return Failed(ADDRESS.sub("", f"{type(error).__name__}: {error}"))


class LeavesOut(Stage):
    """A stage that may leave out rows by its ``on_error``."""

    def _traits(self) -> dict[str, Any]:
        keeps = not self.leaves_out and self._fixed.keeps_rows
        return {**super()._traits(), "keeps_rows": keeps}

    @property
    def leaves_out(self) -> bool:
        return leaves_out(self.options["on_error"])

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if not self.leaves_out:  # nothing else shapes the rows
            identity.pop("on_error", None)
        return identity

    def refuse_batches(self, run: Run) -> None:
        if self.leaves_out and (run.bounds is not None or run.items is not None):
            raise ConfigError(f"{self} leaves out rows by its on_error: put it before batch()")


class CallsFunction(LeavesOut, asks_inputs=True):
    """A stage on rows whose ``on_error`` says what becomes of those of which the user's function raises."""

    @made_once
    def _left_out(self) -> LeftOut:
        why, on_error = "the function raised", self.options["on_error"]
        return LeftOut(self, why, "row", unit="", on_error=on_error)

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)

    def guarded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which gives ``Failed`` for rows that are left out."""
        return Guarded(fn) if self.leaves_out else fn

    def without_failed(self, run: Run, results: Sequence[Any]) -> IntArray:
        """Places of the rows of which a guarded function made something; others are counted and listed."""
        failed = np.array([isinstance(result, Failed) for result in results], dtype=np.int64)
        self._left_out.drop(run.block, failed, lambda row: results[row].why)
        return np.flatnonzero(failed == 0).astype(np.int64)
