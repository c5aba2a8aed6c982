"""Rows that teach nothing: refused, left out, or kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

import trainpipes as tp

__all__ = ["BadRows", "EmptyTexts", "checked"]

BadRows = Literal["error", "drop", "keep"]

#: Column of what is wrong with a row, while rows are dropped.
PROBLEM = "what is wrong with this row"


def checked(
    rows: tp.Pipeline, find: Callable[[pa.Table], Mapping[int, str]], bad_rows: BadRows
) -> tp.Pipeline:
    """Rows of which ``find`` says nothing.

    Args:
        rows: rows with columns.
        find: says of a table what is wrong with each row that something is wrong with, by its number there.
        bad_rows: "error" names the first one; "drop" leaves them out, so that how many rows there are is not
            known before an epoch's end; "keep" does not look.
    """
    if bad_rows not in ("error", "drop", "keep"):
        raise tp.ConfigError(f'bad_rows is "error", "drop" or "keep", got {bad_rows!r}')
    if bad_rows == "keep":
        return rows
    rows = rows.with_columns(_Checked(find, bad_rows == "drop"))
    if bad_rows == "drop":
        rows = rows.filter(pc.field(PROBLEM).is_null()).drop_columns(PROBLEM)
    return rows


@dataclass(frozen=True)
class _Checked:
    find: Callable[[pa.Table], Mapping[int, str]]
    drop: bool

    def __call__(self, table: pa.Table) -> Any:
        found = self.find(table)
        if self.drop:
            return {PROBLEM: pa.array([found.get(row) for row in range(len(table))], pa.string())}
        for row, problem in sorted(found.items()):
            raise tp.DataError(
                f'{problem}; bad_rows="drop" leaves such rows out, "keep" takes them as they are',
                row=row,
            )
        return table


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
