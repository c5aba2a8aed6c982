"""Conversations whose messages are texts and pictures, in the layouts that are common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trainpipes as tp
from trainpipes.tokenizers.chat import messages_of
from trainpipes_recipes.chats import problem, to_messages

__all__ = ["conversation"]

#: How LLaVA's files mark a picture in a text.
MARK = "<image>"


def conversation(
    values: Sequence[Any], pictures: int, roles: Mapping[str, str], column: str
) -> list[dict[str, Any]]:
    """Messages whose content is a list of parts, with as many pictures as there are.

    Where no part is a picture, they stand where a text says ``<image>``, or else before the first
    text of the user.

    >>> from trainpipes_recipes.chats import ROLES
    >>> talk = [{"from": "human", "value": "<image>\\nA cat?"}, {"from": "gpt", "value": "Yes."}]
    >>> [user, _] = conversation([talk], 1, ROLES, "conversations")
    >>> user
    {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': '\\nA cat?'}]}
    """
    given = values[0] if len(values) == 1 else _asked(*values)
    if isinstance(given, str | bytes):
        given = json.loads(given)
    if isinstance(given, Mapping):  # of a sample in a tar
        given = next((given[name] for name in ("messages", "conversations") if name in given), None)
    talk = given if isinstance(given, list | tuple) else [given]
    parts = [_parts(_content(message)) for message in talk]
    if not any(part["type"] == "image" for some in parts for part in some):
        marks = sum(part.get("text", "").count(MARK) for some in parts for part in some)
        if pictures and marks == pictures:
            parts = [[new for part in some for new in _split(part)] for some in parts]
        elif pictures and parts:
            speaks = [_role(message, roles) for message in talk]
            first = speaks.index("user") if "user" in speaks else 0
            parts[first] = [{"type": "image"}] * pictures + parts[first]
    read = to_messages(
        [
            {**turn, "content": _text(some)} if isinstance(turn, Mapping) else turn
            for turn, some in zip(talk, parts, strict=True)
        ],
        roles, column,
    )  # fmt: skip
    if (wrong := problem(read)) is not None:
        raise tp.DataError(f"column {column!r}: {wrong}")
    held = sum(part["type"] == "image" for some in parts for part in some)
    if held != pictures:
        rule = "a conversation has a place for each picture"
        raise tp.DataError(f"column {column!r}: {rule}, got {held} places and {pictures} pictures")
    read = [{**turn, "content": some} for turn, some in zip(read, parts, strict=True)]
    return messages_of(read)


def _asked(prompt: Any, response: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _role(message: Any, roles: Mapping[str, str]) -> Any:
    role = message.get("role") or message.get("from") if isinstance(message, Mapping) else None
    return roles.get(role, role) if isinstance(role, str) else role


def _content(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return None
    return message.get("value") if message.get("content") is None else message["content"]


def _parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            rule = (
                'a content is text or a list of {"type": "image"} and {"type": "text", "text": ...}'
            )
            raise tp.DataError(f"{rule}, got {part!r:.80}")
    return parts


def _split(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(part["text"].split(MARK)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def _text(parts: Sequence[Mapping[str, Any]]) -> str | None:
    return "".join(part.get("text", MARK) for part in parts) if parts else None
