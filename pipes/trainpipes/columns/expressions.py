"""Arrow expressions over columns: given as such or as conditions, as text, and asked of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import require, several, wrong
from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.content import short_digest

#: Of a filter, at most: of some 9,000 Arrow (25) ends the process.
MOST_CONDITIONS = 2000


def as_expression(filter: Any, caller: str) -> pc.Expression:
    if isinstance(filter, pc.Expression):
        text = text_of(filter)
        _check_count(1 + text.count(" and ") + text.count(" or "), caller)
        return filter
    if several(filter):
        options = (clause for clause in filter if several(clause))
        _check_count(
            sum(len(clause) if clause and several(clause[0]) else 1 for clause in options), caller
        )
    try:
        import pyarrow.parquet as pq

        return pq.filters_to_expression(filter)
    except Exception as error:  # of any kind, for a list of any values
        example = '[["x", ">", 20], ["lang", "in", ["en", "de"]]]'
        rule = f"a pyarrow expression, or a list such as {example}"
        way = "put .filter(function) after it" if callable(filter) else str(error)
        raise wrong(caller, rule, filter, way) from None


def _check_count(conditions: int, caller: str) -> None:
    way = 'give the values of a column as one condition, ["x", "in", [...]], or a function of a row'
    rule = f"at most {MOST_CONDITIONS:,} conditions, which Arrow goes through by recursion"
    require(conditions <= MOST_CONDITIONS, caller, rule, conditions, way)


def text_of(expression: pc.Expression) -> str:
    """The text of an expression, with a digest where Arrow leaves out some of its values."""
    try:
        text = str(expression)
    except UnicodeDecodeError:  # Arrow has cut a value within a character
        text = "..."
    if "..." in text:
        _, (content,) = expression.__reduce__()
        text += f" sha256:{short_digest(content)}"
    return text


def rows_that_match(table: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    """For which rows an expression is true, bool ``[rows]``; raises Arrow's errors."""
    numbered = table.append_column("", to_arrow(np.arange(len(table))))
    mask = np.zeros(len(table), dtype=np.bool_)
    mask[to_numpy(numbered.filter(expression).column(table.num_columns))] = True
    return mask
