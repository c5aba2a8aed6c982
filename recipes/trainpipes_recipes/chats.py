"""Conversations in rows: ShareGPT's layout made OpenAI's, bad rows found.

>>> import trainpipes as tp
>>> talk = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
>>> list(conversations(tp.from_dataset([{"chat": talk}]), "chat"))
[{'chat': [{'role': 'user', 'content': '1 + 1?'}, {'role': 'assistant', 'content': '2'}]}]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow.compute as pc

import trainpipes as tp
from trainpipes.columns.run import Run
from trainpipes.interfaces.quarantine import LeftOut, leaves_out
from trainpipes.interfaces.stage import Tally, made_once
from trainpipes.stages.filter import Filter
from trainpipes_recipes.inputs import OnError

__all__ = [
    "ROLES",
    "CheckedRows",
    "SplitPrompt",
    "checked",
    "conversations",
    "problem",
    "shared_start",
    "to_messages",
]

#: Names of roles that are not OpenAI's.
ROLES: Mapping[str, str] = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "bot": "assistant", "model": "assistant", "function_call": "assistant", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
#: Who may speak after whom; None is the start.
NEXT: Mapping[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
#: Other names of these.
SAME = {"developer": "system", "function": "tool"}
KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
#: Types of parts that are text, also with "annotations" or "cache_control".
TEXT_TYPES = ("text", "input_text", "output_text")


def conversations(
    rows: tp.Pipeline,
    column: str,
    *,
    prompt: str | None = None,
    roles: Mapping[str, str] | None = None,
    on_error: OnError | None = None,
) -> tp.Pipeline:
    """Rows whose conversations have the layout that chat templates take.

    A message is a dict with "role" and "content", and what else the template knows ("tool_calls",
    "name"). ShareGPT's "from" and "value" are renamed, with their roles ("human" is "user", "gpt"
    "assistant"), and its messages of "function_call" become tool calls; parts of text are joined. A
    message of the assistant with "weight" 0 or "train" False is not in the loss. A row is bad if

    - it has no message, or none of the assistant
    - roles are not in order: "system" or "developer" first if at all, then "user" and "assistant"
      in turn; messages of "tool", and then the assistant's next, may follow an assistant's
    - a role is none of these, or a message that calls no tool has no content; an assistant's may
      not be empty

    Args:
        rows: rows with a column of lists of messages.
        column: that column.
        prompt: a column of the messages before it; an assistant's message comes next.
        roles: more names of roles, or others: ``{"narrator": "system"}``.
        on_error: None or "raise" names the first bad row; "skip" leaves them out and logs how many;
            "keep" takes them as they are.

    Raises:
        DataError: a row is bad.
        SchemaError: the column holds no messages.
    """
    return checked(rows, CheckedRows(column, prompt=prompt, roles=roles or {}, on_error=on_error))


def checked(rows: tp.Pipeline, stage: CheckedRows) -> tp.Pipeline:
    """Rows that a stage has looked at, without those that it leaves out."""
    rows = rows.then(stage)
    if not leaves_out(stage.on_error):
        return rows
    return rows.then(NotNull(pc.field(stage.column).is_valid(), column=stage.column))


class NotNull(Filter):
    """``filter(predicate)`` that makes no Arrow columns of rows, whose values would change: states of the
    two are the same.
    """

    free = frozenset({"column"})
    name = "filter"

    _: KW_ONLY
    column: str = ""

    def _traits(self) -> dict[str, Any]:
        return {**super()._traits(), "takes": "rows", "per_row": True}

    def process(self, run: Run) -> Run:
        values = [row[self.column] for row in run.block.rows()]
        return run.keep(np.array([value is not None for value in values], dtype=np.bool_))


class CheckedRows(tp.RowStage, asks_inputs=True):
    """Conversations in a single layout, as ``conversations`` says; without ``roles``, texts that are not
    empty. "skip" puts None in the column, for ``checked``.
    """

    thread_safe = True

    column: str
    _: KW_ONLY
    prompt: str | None = None
    roles: Mapping[str, str] | None = None
    on_error: OnError | None = None

    def check(self) -> None:
        names = self.roles or {}
        if not isinstance(names, Mapping) or not all(isinstance(r, str) for r in names.values()):
            rule = "a dict of names and the roles they stand for"
            raise tp.ConfigError(f"roles must be {rule}, got {names!r}")

    def apply(self, row: Any) -> Any:
        row, wrong = self._read(row)
        if wrong is None or self.on_error == "keep":
            return row
        if not leaves_out(self.on_error):
            way = 'on_error="skip" leaves such rows out, "keep" takes them as they are'
            raise tp.DataError(f"{wrong}; {way}")
        return {**row, self.column: None}

    def process(self, run: Run) -> Run:
        checked = super().process(run)
        if leaves_out(self.on_error):
            rows, block = checked.block.rows(), run.block
            gone = np.array([row[self.column] is None for row in rows], dtype=np.int64)

            def error_of(n: int) -> str | None:
                return self._read(block.slice(n, n + 1).rows()[0])[1]

            self._left_out.drop(block, gone, error_of)
        return checked

    def _read(self, row: Any) -> tuple[Any, str | None]:
        """``_looked_at``; where bad rows are left out, one that cannot be read is bad."""
        try:
            return self._looked_at(row)
        except tp.DataError as error:
            if isinstance(error, tp.SchemaError) or not leaves_out(self.on_error):
                raise
            return row, error.message

    def _looked_at(self, row: Any) -> tuple[Any, str | None]:
        """A row in a single layout, and its problem."""
        self._check_keys(row, self.column, self.prompt)
        if self.roles is None:
            wrong = self._empty(row[self.column])
        else:
            names = [name for name in (self.column, self.prompt) if name is not None]
            talks = [to_messages(row[name], {**ROLES, **self.roles}, name) for name in names]
            row, wrong = row | dict(zip(names, talks, strict=True)), problem(*talks)
        return row, wrong and f"column {self.column!r}: {wrong}"

    def _check_keys(self, row: Any, *names: str | None) -> None:
        for name in names:
            if name is not None and (not isinstance(row, dict) or name not in row):
                there = list(row) if isinstance(row, dict) else type(row).__name__
                raise tp.SchemaError(f"there is no column {name!r}; there are {there}")

    def _empty(self, text: Any) -> str | None:
        if not isinstance(text, str | None):
            raise tp.SchemaError(f"column {self.column!r} holds texts, got {type(text).__name__}")
        return None if (text or "").strip() else "an empty response"

    @made_once
    def _left_out(self) -> LeftOut:
        return LeftOut(self, "they are bad", "row", unit="", on_error=self.on_error)

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)


class SplitPrompt(tp.RowStage):
    """Rows with the messages that two columns share at their start in a third; of texts the words."""

    thread_safe = True

    chosen: str
    rejected: str
    prompt: str

    def apply(self, row: Any) -> Any:
        columns = {name: row[name] for name in (self.chosen, self.rejected)}
        shared = shared_start(*(value or "" for value in columns.values()))
        there = next((value for value in columns.values() if value is not None), None)
        rest = {name: value and value[shared:] for name, value in columns.items()}
        return {**row, self.prompt: there and there[:shared], **rest}


def shared_start(chosen: Any, rejected: Any) -> int:
    """How many messages two conversations share at their start, but for the last of the shorter one; of
    texts, how many letters of whole words.

    >>> text = "Human: 1 + 1? Assistant: "
    >>> text[: shared_start(text + "Two.", text + "Three.")]
    'Human: 1 + 1? Assistant:'
    """
    shared, most = 0, max(min(len(chosen), len(rejected)) - 1, 0)
    while shared < most:
        middle = (shared + most + 1) // 2
        same = chosen[shared:middle] == rejected[shared:middle]
        shared, most = (middle, most) if same else (shared, middle - 1)
    if not isinstance(chosen, str):
        return shared
    return len(re.sub(r"\s", " ", chosen[:shared]).rpartition(" ")[0].rstrip())


def to_messages(
    messages: Any, roles: Mapping[str, str] = ROLES, column: str = "messages"
) -> list[dict[str, Any]]:
    """A conversation as messages with "role", "content", and what else they have."""
    if messages is not None and not isinstance(messages, list | tuple):
        way = ": make lists of it with map(), as by json.loads" if isinstance(messages, str) else ""
        got = f"{type(messages).__name__}{way}"
        raise tp.SchemaError(f"column {column!r} holds lists of messages, got {got}")
    return [
        _message({} if message is None else message, roles, column) for message in messages or ()
    ]


def _message(message: Any, roles: Mapping[str, str], column: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or (message and not {"role", "from"} & set(message)):
        rule = 'lists of messages, dicts with "role" and "content" or with "from" and "value"'
        raise tp.SchemaError(f"column {column!r} holds {rule}, got {message!r:.80}")
    role, content = (
        next((message[key] for key in keys if message.get(key) is not None), None)
        for keys in (("role", "from"), ("content", "value"))
    )
    more = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value")}
    if not isinstance(role, str | None):
        raise tp.SchemaError(f"column {column!r}: a role is text, got {role!r:.80}")
    if isinstance(content, list) and all(map(_is_text, content)):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        if None in texts:
            raise tp.DataError("content is text, or parts of text, got a part without text")
        content = "".join(texts)
    calls = _calls(content) if role == "function_call" and not more.get("tool_calls") else []
    if calls:
        content, more["tool_calls"] = None, calls
    return {"role": roles.get(role or "", role), "content": content, **more}


def _is_text(part: Any) -> bool:
    """Whether a part is of text; a column of parts has nulls for the keys that others have."""
    if not isinstance(part, Mapping):
        return isinstance(part, str)
    if part.get("type") in TEXT_TYPES and isinstance(part.get("text"), str):
        return True
    return {key for key, value in part.items() if value is not None} <= {"type", "text"}


def _calls(text: Any) -> list[dict[str, Any]]:
    """The function calls in a JSON text; none if it is the assistant's words."""
    try:
        said = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return []
    calls = said if isinstance(said, list) else [said]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return []
    return [{"type": "function", "function": _function(call)} for call in calls]


def _function(call: Mapping[str, Any]) -> dict[str, str]:
    arguments = call.get("arguments", {})
    arguments = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    return {"name": str(call["name"]), "arguments": arguments}


def problem(
    messages: Sequence[Mapping[str, Any]], prompt: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """What is wrong with a conversation, as ``conversations`` says; None if nothing is.

    >>> problem([{"role": "user", "content": "hi"}, {"role": "user", "content": "hello?"}])
    "message 1 is of role 'user' and comes after one of 'user', where 'assistant' comes"
    """
    if not messages:
        return "a conversation has no message"
    if prompt is not None and not prompt:
        return "there is no message in the prompt"
    if prompt is not None and messages[0]["role"] != "assistant":
        return "the response does not start with a message of 'assistant'"
    before = None
    for number, message in enumerate([*(prompt or ()), *messages]):
        wrong = _wrong(message, before)
        if wrong:
            return f"message {number} {wrong}"
        before = message["role"]
    if not any(message["role"] == "assistant" for message in messages):
        return "there is no message of 'assistant', which is what is in the loss"
    return None


def _wrong(message: Mapping[str, Any], before: str | None) -> str | None:
    """What is wrong with a message after a message of the role ``before``."""
    role, content = message["role"], message["content"]
    if role is None:
        return "has no role"
    if role not in KNOWN:
        way = f'give its role, as in roles={{{role!r}: "user"}}'
        return f"is of role {role!r}, which is none of {', '.join(KNOWN)}: {way}"
    said = content.strip() if isinstance(content, str) else content
    if not message.get("tool_calls") and role == "assistant" and said in (None, "", []):
        return f"of role {role!r} is an empty response"
    if not message.get("tool_calls") and content is None:
        return f"of role {role!r} is without content"
    expected = NEXT[SAME.get(before or "", before)]
    if SAME.get(role, role) in expected:
        return None
    after = "is the first" if before is None else f"comes after one of {before!r}"
    return f"is of role {role!r} and {after}, where {' or '.join(map(repr, expected))} comes"
