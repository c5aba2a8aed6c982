"""Rows without a target of the loss: counted, warned of, refused or left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import has_warned, warn_once
from trainpipes.columns.block import Block
from trainpipes.columns.packing import IGNORED
from trainpipes.columns.run import Run
from trainpipes.interfaces.quarantine import LeavesOut, LeftOut, leaves_out
from trainpipes.interfaces.read_columns import at_row
from trainpipes.interfaces.stage import Numbers, Tally, made_once


class WithoutTarget(Tally):
    """Rows that are kept without a target; ``size`` says how many of them were cut. Warns once where they
    pass each of these shares: of the first few rows only at the end of a pass.
    """

    SHARES = 0.01, 0.1, 0.5
    FEWEST = 10

    def __init__(self, stage: Any, kind: str) -> None:
        super().__init__(stage)
        self._kind = kind

    def adopt(self, more: Numbers) -> None:
        super().adopt(more)
        self.warn(self.FEWEST)

    def end(self) -> None:
        self.warn(1)

    def warn(self, fewest: int) -> None:
        seen, lacking, _ = self.numbers
        passed = sum(lacking >= share * seen for share in self.SHARES)
        if self.is_silent or lacking < fewest or not passed:
            return
        most = self.stage.options.get("max_length")
        keys = [("no target", self.stage.name, most, n) for n in range(passed, 4)]
        if not any(map(has_warned, keys)):
            ways = f'{raising(most)}choose on_error="raise", "skip" or "keep"'
            warn_once(f"{self.stage}: {self}: {ways}", keys[0])

    def _said(self, numbers: Numbers) -> str:
        seen, lacking, cut = numbers
        if not lacking:
            return ""
        have = "has" if lacking == 1 else "have"
        return f"{lacking:,} of {seen:,} {self._kind}s {have} no target for the loss{why_none(lacking, cut)}"


class WereCut(Tally):
    """Texts that lost tokens."""

    warns = False  # it was asked for

    def _said(self, numbers: Numbers) -> str:
        seen, cut, tokens = numbers
        most = self.stage.options["max_length"]
        return (
            f"{cut:,} of {seen:,} texts cut to max_length={most:,} ({tokens:,} tokens)"
            if cut
            else ""
        )


def why_none(rows: int, cut: int) -> str:
    who = "it was" if rows == 1 else f"{cut:,} of them were"
    return f", since {who} cut before the response" if cut else ""


def raising(max_length: int | None) -> str:
    return f"raise max_length={max_length}, or " if max_length else ""


#: One for each row, bool ``[rows]``.
Flags = npt.NDArray[np.bool_]


def have_target(labels: npt.NDArray[Any], lengths: IntArray) -> Flags:
    """Whether each row has a label that is not -100.

    >>> have_target(np.array([-100, 5, -100, -100]), np.array([2, 0, 2])).tolist()
    [True, False, False]
    """
    trains = np.zeros(len(lengths), dtype=np.bool_)
    some = lengths > 0
    if some.any():
        starts = (np.cumsum(lengths) - lengths)[some]
        trains[some] = np.logical_or.reduceat(labels != IGNORED, starts)
    return trains


class TargetStage(LeavesOut, asks_inputs=True):
    """A stage whose ``on_error`` decides about rows that have no target."""

    item: ClassVar[str] = "row"

    @made_once
    def without_target(self) -> LeftOut:
        why, on_error = "they have no target, or cannot be read", self.options["on_error"]
        return LeftOut(self, why, self.item, unit="", on_error=on_error)

    @made_once
    def kept_without(self) -> WithoutTarget:
        return WithoutTarget(self, self.item)

    def _tallies(self) -> Sequence[Tally]:
        return self.without_target, self.kept_without

    def check_targets(
        self,
        run: Run,
        trains: Flags,
        cut: Flags | None = None,
        bad: Mapping[int, str] | None = None,
        before: Block | None = None,
    ) -> Run:
        """The run without rows that are ``bad`` or in which no target was ``found``, if these are
        left out; else raises or warns of the latter, of which ``cut`` were cut. ``before``: the rows
        as they came.
        """
        asked, ids, bad = self.options["on_error"], run.block.ids, bad or {}
        if leaves_out(asked):
            trains[[*bad]] = False

            def error_of(row: int) -> str:
                was_cut = cut is not None and bool(cut[row])
                return bad.get(row) or f"no target for the loss{why_none(1, int(was_cut))}"

            block = run.block if before is None else before
            self.without_target.drop(block, (~trains).astype(np.int64), error_of)
            return run if trains.all() else run.pick(np.flatnonzero(trains).astype(np.int64))
        lacking = np.flatnonzero(~trains)
        if asked == "raise" and len(lacking):
            why = why_none(1, 0 if cut is None else int(cut[lacking[0]]))
            way = f'{raising(self.options.get("max_length"))}choose on_error="skip" or "keep"'
            said = f"{self}: a {self.item} has no target for the loss{why}: {way}"
            raise at_row(said, self, ids[lacking[0]])
        if asked is None:
            were_cut = 0 if cut is None else int(np.count_nonzero(cut[lacking]))
            self.kept_without.add((len(trains), len(lacking), were_cut))
            self.kept_without.warn(WithoutTarget.FEWEST)
        return run
