"""Conversations in the columns of rows: ShareGPT's layout made OpenAI's, and rows that teach nothing found.

``conversations`` is public, for recipes of your own:

>>> import trainpipes as tp
>>> told = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
>>> list(conversations(tp.from_dataset([{"chat": told}]), "chat"))  # doctest: +NORMALIZE_WHITESPACE
[{'chat': [{'role': 'user', 'content': '1 + 1?', 'tool_calls': None},
           {'role': 'assistant', 'content': '2', 'tool_calls': None}]}]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import trainpipes as tp
from trainpipes.stages.targets import OnError
from trainpipes_recipes.chats.bad_rows import checked
from trainpipes_recipes.chats.messages import ROLES, to_messages
from trainpipes_recipes.chats.turns import problems

__all__ = ["conversations"]


def conversations(
    rows: tp.Pipeline,
    column: str,
    *,
    prompt: str | None = None,
    roles: Mapping[str, str] | None = None,
    on_error: OnError | None = None,
) -> tp.Pipeline:
    """Rows whose conversations have the layout that chat templates take, a row at a time or many.

    A message is a dict with "role" and "content", and what else the template knows ("tool_calls", "name").
    ShareGPT's "from" and "value" are renamed, with the roles in them ("human" is "user", "gpt" "assistant"),
    and its messages of "function_call" become tool calls; parts of text are joined. A row is bad if

    - it has no message, or none of the assistant
    - roles are not in order: "system" or "developer" first if at all, then "user" and "assistant" in turn; an
      assistant's message may be followed by messages of "tool", and the assistant's next
    - a role is none of these, or a message that calls no tool has no content; an assistant's may not be empty

    Args:
        rows: rows with a column of lists of messages.
        column: that column.
        prompt: a column of the messages before it, which are looked at together with it: an assistant's
            message comes next.
        roles: more names of roles, or others: ``{"narrator": "system"}``.
        on_error: None, or "raise", names the first such row; "skip" leaves them out, and the log counts them,
            so that how many rows there are is not known before an epoch's end; "keep" has the template say
            what it makes of them.

    Raises:
        DataError: a row is bad; names it.
        SchemaError: the column holds no messages.
    """
    given = dict(roles or {}) if isinstance(roles, Mapping | None) else {"": None}
    if not all(isinstance(name, str) for pair in given.items() for name in pair):
        raise tp.ConfigError(
            f"roles are a dict of names and the roles they stand for, got {roles!r}"
        )
    names = (column,) if prompt is None else (column, prompt)
    rows = rows.with_columns(_Messages(names, {**ROLES, **given}))
    return checked(rows, _Problems(column, prompt), on_error)


@dataclass(frozen=True)
class _Messages:
    columns: tuple[str, ...]
    roles: Mapping[str, str] = field(hash=False)

    def __call__(self, table: pa.Table) -> dict[str, Any]:
        for name in self.columns:
            if name not in table.column_names:
                raise tp.SchemaError(
                    f"there is no column {name!r} of messages; there are {table.column_names}"
                )
        return {name: to_messages(table.column(name), self.roles, name) for name in self.columns}


@dataclass(frozen=True)
class _Problems:
    column: str
    prompt: str | None

    def __call__(self, table: pa.Table) -> dict[int, str]:
        prompt = None if self.prompt is None else table.column(self.prompt)
        found = problems(table.column(self.column), prompt)
        return {row: f"column {self.column!r}: {problem}" for row, problem in found.items()}
