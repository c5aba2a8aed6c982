"""Rows that teach nothing: refused, left out, or kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import trainpipes as tp
from trainpipes.columns.run import Run
from trainpipes.kinds.blame import blame
from trainpipes.kinds.made_once import made_once
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.left_out import LeftOut
from trainpipes.stages.ragged_column import row_table
from trainpipes.stages.targets import OnError

__all__ = ["CheckRows", "EmptyTexts", "checked"]


def checked(
    rows: tp.Pipeline, find: Callable[[pa.Table], Mapping[int, str]], on_error: OnError | None
) -> tp.Pipeline:
    """Rows of which ``find`` says nothing.

    Args:
        rows: rows with columns.
        find: says of a table what is wrong with each row that something is wrong with, by its number there.
        on_error: "raise", or None, names the first one; "skip" leaves them out, and the log counts them, so
            that how many rows there are is not known before an epoch's end; "keep" does not look.
    """
    if on_error not in (None, "raise", "skip", "keep"):
        raise tp.ConfigError(f'on_error must be "raise", "skip", "keep" or None, got {on_error!r}')
    if on_error == "keep":
        return rows
    return rows.then(CheckRows(find, on_error=on_error or "raise"))


class CheckRows(RunStage):
    """Refuses rows, or leaves them out.

    In: rows with columns. Out: the same rows, or those left. Cursor: none of its own.

    Args:
        find: as ``checked`` takes it.
        on_error: as ``checked`` takes it.

    Raises:
        DataError: with "raise", something is wrong with a row; names it.
    """

    needs_columns = True
    thread_safe = True
    asks_inputs = True

    find: Callable[[pa.Table], Mapping[int, str]]
    _: KW_ONLY
    on_error: Literal["raise", "skip"] = "raise"

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.on_error == "raise"

    @made_once
    def _left_out(self) -> LeftOut:
        return LeftOut(self, "they teach nothing", "row", unit="")

    def report(self) -> str:
        return str(self._left_out) if self._left_out.documents else ""

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        try:
            found = self.find(table)
        except Exception as error:
            row = getattr(error, "row", None)
            blame(error, self, None if row is None else int(block.ids[row]))
            raise
        run = run.with_block(block)
        if found and self.keeps_rows:
            row = min(found)
            bad = tp.DataError(
                f'{found[row]}; on_error="skip" leaves such rows out, "keep" takes them as they are',
                stage=str(self),
            )
            blame(bad, self, int(block.ids[row]))
            raise bad
        if self.keeps_rows:
            return run
        lost = np.zeros(len(block), dtype=np.int64)
        lost[list(found)] = 1
        self._left_out.add(block.ids, lost)
        return run.pick(np.flatnonzero(lost == 0)) if found else run


@dataclass(frozen=True)
class EmptyTexts:
    """Says which of some columns' texts are empty, or nothing but spaces.

    Args:
        columns: of texts.
    """

    columns: tuple[str, ...]

    def __call__(self, table: pa.Table) -> dict[int, str]:
        found: dict[int, str] = {}
        for name in self.columns:
            texts = table.column(name)
            if pa.types.is_nested(texts.type):
                raise tp.SchemaError(f"column {name!r} holds texts, got {texts.type}")
            texts = pc.cast(texts, pa.string())
            blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)
            for row in pc.indices_nonzero(pc.fill_null(blank, True)).to_pylist():
                found.setdefault(row, f"column {name!r}: an empty response")
        return found
