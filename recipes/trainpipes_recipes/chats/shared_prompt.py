"""Two conversations that start the same: what they share is the prompt.

>>> ask = {"role": "user", "content": "1 + 1?"}
>>> one, other = ({"role": "assistant", "content": said} for said in "23")
>>> table = pa.table({"chosen": [[ask, one]], "rejected": [[ask, other]]})
>>> found = SplitPrompt("chosen", "rejected", "prompt")(table)
>>> [len(column[0]) for column in found.values()]
[1, 1, 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes_recipes.chats.messages import flattened, nested

__all__ = ["SplitPrompt"]


@dataclass(frozen=True)
class SplitPrompt:
    """A function for ``with_columns``: the messages that two columns share at their start go to a third.

    At least one message stays in each.

    Args:
        chosen: a column of lists of messages.
        rejected: another one.
        prompt: the column to add.
    """

    chosen: str
    rejected: str
    prompt: str

    def __call__(self, table: pa.Table) -> dict[str, Any]:
        one, lengths = _taken_apart(table, self.chosen)
        other, others = _taken_apart(table, self.rejected)
        most = np.maximum(np.minimum(lengths, others) - 1, 0)
        rows = np.repeat(np.arange(len(table)), most)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(most) - most, most)
        starts, other_starts = np.cumsum(lengths) - lengths, np.cumsum(others) - others
        same = _same(_at(one, starts[rows] + place), _at(other, other_starts[rows] + place))
        shared = most.copy()  # up to the first message that differs
        np.minimum.at(shared, rows[~same], place[~same])
        first = np.arange(len(one)) - np.repeat(starts, lengths) < np.repeat(shared, lengths)
        second = np.arange(len(other)) - np.repeat(other_starts, others) < np.repeat(shared, others)
        return {
            self.prompt: nested(one.filter(pa.array(first)), pa.array(shared)),
            self.chosen: nested(one.filter(pa.array(~first)), pa.array(lengths - shared)),
            self.rejected: nested(other.filter(pa.array(~second)), pa.array(others - shared)),
        }


def _taken_apart(table: pa.Table, name: str) -> tuple[Any, Any]:
    values, lengths = flattened(table.column(name), name)
    return values, np.asarray(lengths)


def _at(values: Any, index: Any) -> Any:
    return values.take(pa.array(index))


def _same(one: Any, other: Any) -> Any:
    """Which elements are equal: bools ``[elements]``."""
    if one.type == other.type and pa.types.is_struct(one.type):
        found = np.asarray(pc.equal(one.is_null(), other.is_null()))
        for name in one.type.names:
            found = found & _same(pc.struct_field(one, name), pc.struct_field(other, name))
        return found
    if (
        one.type == other.type
        and not pa.types.is_nested(one.type)
        and not pa.types.is_null(one.type)
    ):
        either = pc.or_(one.is_null(), other.is_null())
        alike = pc.if_else(either, pc.and_(one.is_null(), other.is_null()), pc.equal(one, other))
        return np.asarray(pc.fill_null(alike, False))
    return np.array([a == b for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True)], bool)
