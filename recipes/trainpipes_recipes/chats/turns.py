"""What is wrong with conversations: whose turn it is, and what is not said; many rows at once.

>>> told = [{"role": "user", "content": "hi"}, {"role": "user", "content": "hello?"}]
>>> problems(pa.array([told]))[0]
"message 1 is of role 'user' and comes after one of 'user', where 'assistant' comes"
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes_recipes.chats.messages import flattened

__all__ = ["problems"]

#: Roles of which each has its place, and the number of that.
PLACES = {"system": 0, "developer": 0, "user": 1, "assistant": 2, "tool": 3, "function": 3}
START, ASSISTANT = 4, 2
#: Who may follow, by the number of the one before.
NEXT = [("user",), ("assistant",), ("user", "tool"), ("tool", "assistant"), ("system", "user")]
FOLLOWS = np.array(
    [[name in names for name in ("system", "user", "assistant", "tool")] for names in NEXT]
)


def problems(messages: pa.Array, prompt: pa.Array | None = None) -> dict[int, str]:
    """What is wrong with each row that something is wrong with: see ``conversations``.

    Args:
        messages: a column of lists of messages, as ``to_messages`` makes it.
        prompt: a column of the messages before them.
    """
    own = _Turns(messages)
    empty = np.flatnonzero(own.lengths == 0).tolist()
    found = dict.fromkeys(empty, "a conversation has no message")
    if prompt is not None:
        before = _Turns(prompt)
        for row in np.flatnonzero(before.lengths == 0).tolist():
            found.setdefault(row, "there is no message in the prompt")
        rows, firsts = np.unique(own.rows, return_index=True)
        for row in rows[own.places[firsts] != ASSISTANT].tolist():
            found.setdefault(row, "the response does not start with a message of 'assistant'")
        own = _Turns.joined(before, own)
    spoken = np.bincount(own.rows[own.places == ASSISTANT], minlength=len(messages))
    new = np.append(True, own.rows[1:] != own.rows[:-1])[: len(own.rows)]
    before_it = np.where(new, START, np.roll(own.places, 1))
    known = (own.places >= 0) & (before_it >= 0)
    unordered = ~FOLLOWS[np.where(known, before_it, 0), np.where(known, own.places, 0)] & known
    wrong = (own.places < 0) | unordered | own.silent
    begins = np.flatnonzero(new)
    for place in np.flatnonzero(wrong).tolist():
        row = int(own.rows[place])
        number = place - int(begins[np.searchsorted(begins, place, side="right") - 1])
        found.setdefault(row, f"message {number} {own.complaint(place, int(before_it[place]))}")
    for row in np.flatnonzero(spoken == 0).tolist():
        found.setdefault(row, "there is no message of 'assistant', which is what is learnt")
    return dict(sorted(found.items()))


class _Turns:
    """The messages of a column, one after the other.

    Args:
        rows: of each, its row.
        lengths: how many each row has.
        places: of each, the number of its role; -1 if that is not known.
        silent: whether each lacks what it should say.
        roles: of each.
    """

    def __init__(self, messages: pa.Array) -> None:
        values, lengths = flattened(messages)
        self.lengths = np.asarray(lengths)
        self.rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        role = pc.struct_field(values, "role")
        names = pa.array(list(PLACES), pa.string())
        numbers = pa.array([*PLACES.values()], pa.int64())
        places = numbers.take(pc.index_in(role, value_set=names))
        self.places: Any = np.asarray(pc.fill_null(places, -1))
        content = pc.struct_field(values, "content")
        absent = np.asarray(content.is_null())
        blank = absent | np.asarray(pc.fill_null(pc.equal(_size(content), 0), True))
        if "tool_calls" in values.type.names:
            calls = pc.fill_null(pc.list_value_length(pc.struct_field(values, "tool_calls")), 0)
            absent, blank = (flag & (np.asarray(calls) == 0) for flag in (absent, blank))
        self.silent = np.where(self.places == ASSISTANT, blank, absent)
        self.roles = role

    @staticmethod
    def joined(first: _Turns, second: _Turns) -> _Turns:
        """Those of both columns, row by row."""
        order = np.argsort(np.concatenate([first.rows, second.rows]), kind="stable")
        found = object.__new__(_Turns)
        for name in ("rows", "places", "silent"):
            both = np.concatenate([getattr(first, name), getattr(second, name)])
            setattr(found, name, both[order])
        found.lengths = first.lengths + second.lengths
        found.roles = pa.concat_arrays([first.roles, second.roles]).take(pa.array(order))
        return found

    def complaint(self, place: int, before: int) -> str:
        """What is wrong with a message."""
        role = self.roles[place].as_py()
        if role is None:
            return "has no role"
        if self.places[place] < 0:
            known = ", ".join(PLACES)
            return (
                f"is of role {role!r}, which is none of {known}: give its role, as in roles="
                f'{{{role!r}: "user"}}'
            )
        if self.silent[place]:
            how = "an empty response" if role == "assistant" else "without content"
            return f"of role {role!r} is {how}"
        expected = " or ".join(map(repr, NEXT[before]))
        after = (
            "is the first"
            if before == START
            else f"comes after one of {self.roles[place - 1].as_py()!r}"
        )
        return f"is of role {role!r} and {after}, where {expected} comes"


def _size(content: Any) -> Any:
    """How much is said: characters that are no spaces around a text, or parts."""
    if pa.types.is_string(content.type):
        return pc.binary_length(pc.utf8_trim_whitespace(content))
    if pa.types.is_list(content.type) or pa.types.is_large_list(content.type):
        return pc.list_value_length(content)
    return pa.array(np.ones(len(content), np.int64))
