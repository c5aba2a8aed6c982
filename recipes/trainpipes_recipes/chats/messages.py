"""Columns of conversations in OpenAI's layout: from ShareGPT's, many rows at once.

>>> told = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
>>> to_messages(pa.array([told])).to_pylist()  # doctest: +NORMALIZE_WHITESPACE
[[{'role': 'user', 'content': '1 + 1?', 'tool_calls': None},
  {'role': 'assistant', 'content': '2', 'tool_calls': None}]]
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import DataError, SchemaError

__all__ = ["ROLES", "flattened", "nested", "to_messages"]

#: Names of roles that are not OpenAI's.
ROLES: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
#: Names of a message's role, and of what it says: the first that is not null is taken.
ROLE, CONTENT = ("role", "from"), ("content", "value")
CALLS = pa.list_(
    pa.struct(
        [
            ("type", pa.string()),
            ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
        ]
    )
)
NO_MESSAGES = pa.struct([("role", pa.string()), ("content", pa.string())])


def to_messages(
    column: pa.Array | pa.ChunkedArray,
    roles: Mapping[str, str] = ROLES,
    name: str = "messages",
) -> pa.Array:
    """Conversations as lists of messages with "role" and "content".

    What a message has besides stays. A "function_call" of ShareGPT, whose text is JSON, becomes a tool call.

    Args:
        column: lists of dicts with "role" or "from", and "content" or "value".
        roles: what roles are called, by the names that they have.
        name: of the column, for messages.

    Raises:
        SchemaError: it holds something else.
    """
    messages, lengths = flattened(column, name)
    names = messages.type.names if pa.types.is_struct(messages.type) else []
    if not set(names) & set(ROLE):
        raise SchemaError(
            f'column {name!r} holds lists of messages, dicts with "role" and "content" or with "from" and '
            f'"value", got {column.type}'
        )
    fields = {key: pc.struct_field(messages, key) for key in names}
    role = _text(_first(fields, ROLE, name))
    if not pa.types.is_string(role.type):
        raise SchemaError(f"column {name!r}: a role is text, got {role.type}")
    content = _first(fields, CONTENT, name)
    content = pa.nulls(len(messages), pa.string()) if content is None else _text(content)
    if _is_parts_of_text(content.type):
        content = _joined(content, lengths)
    others = {key: value for key, value in fields.items() if key not in (*ROLE, *CONTENT)}
    if "from" in names and "tool_calls" not in names and pa.types.is_string(content.type):
        content, others["tool_calls"] = _calls(role, content)
    if "weight" in others and pc.any(pc.equal(others["weight"], 0)).as_py():
        raise DataError(
            f'column {name!r}: a message has "weight" 0, and all that the assistant says is learnt: make '
            "such messages part of a prompt, or leave the key out with map()"
        )
    known = pa.array(list(roles), pa.string())
    mapped = pa.array(list(roles.values()), pa.string()).take(pc.index_in(role, value_set=known))
    found = {"role": pc.coalesce(mapped, role), "content": content, **others}
    made = pa.StructArray.from_arrays(
        list(found.values()), names=list(found), mask=messages.is_null()
    )
    return nested(made, lengths)


def flattened(column: pa.Array | pa.ChunkedArray, name: str = "messages") -> tuple[Any, Any]:
    """All elements of a column of lists, and how many each row has; null counts as none."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too long for one array, or none
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.nulls(0)
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(0, NO_MESSAGES), pa.array([0] * len(array), pa.int64())
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(kind) for is_kind in lists):
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        told = ": make lists of it with map(), as by json.loads" if text else ""
        raise SchemaError(f"column {name!r} holds lists of messages, got {kind}{told}")
    values = array.flatten()
    if pa.types.is_null(values.type):
        values = pa.nulls(len(values), NO_MESSAGES)
    return values, pc.cast(pc.fill_null(pc.list_value_length(array), 0), pa.int64())


def nested(values: pa.Array, lengths: pa.Array) -> pa.Array:
    """Lists of so many elements each."""
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    return pa.LargeListArray.from_arrays(offsets, values)


def _first(fields: Mapping[str, Any], keys: tuple[str, str], name: str) -> Any:
    """What stands under one of two names, in each message the one that is there."""
    found = [fields[key] for key in keys if key in fields]
    if not found:
        return None
    found = [value for value in found if not pa.types.is_null(value.type)] or found[:1]
    if pa.types.is_null(found[0].type):
        return pc.cast(found[0], pa.string())
    if len(found) == 1:
        return found[0]
    try:
        return pc.coalesce(*found)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {name!r} has {keys[0]!r} and {keys[1]!r}, of {found[0].type} and {found[1].type}: "
            "rename or drop one with map()"
        ) from error


def _text(values: Any) -> Any:
    """Text of any type as strings; anything else as it is."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if pa.types.is_string(values.type) or not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    ):
        return values
    return pc.cast(values, pa.string())


def _is_parts_of_text(kind: Any) -> bool:
    """Whether content is a list of dicts with "type" and "text" alone."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    part = kind.value_type
    return pa.types.is_struct(part) and set(part.names) in ({"text"}, {"type", "text"})


def _joined(content: Any, lengths: Any) -> Any:
    """The text of parts, of each message in one."""
    parts, counts = flattened(content)
    texts = pc.struct_field(parts, "text")
    lacking = texts.is_null()
    if pc.any(lacking).as_py():
        message = bisect_right(
            pc.cumulative_sum(counts).to_pylist(), pc.index(lacking, True).as_py()
        )
        row = bisect_right(pc.cumulative_sum(lengths).to_pylist(), message)
        raise DataError("content is text, or parts of text, got a part without text", row=row)
    joined = pc.binary_join(nested(pc.cast(texts, pa.string()), counts), "")
    return pc.if_else(
        content.is_valid(), pc.cast(joined, pa.string()), pa.scalar(None, pa.string())
    )


def _calls(role: Any, content: Any) -> tuple[Any, Any]:
    """Content and tool calls, where messages are calls of functions as JSON text."""
    calls: list[Any] = [None] * len(role)
    for place in pc.indices_nonzero(pc.equal(role, "function_call")).to_pylist():
        try:
            said = json.loads(content[place].as_py() or "")
        except (ValueError, RecursionError):  # it stays what the assistant says
            continue
        every = said if isinstance(said, list) else [said]
        if every and all(isinstance(call, dict) and "name" in call for call in every):
            calls[place] = [_call(call) for call in every]
    made = pa.array(calls, CALLS)
    return pc.if_else(made.is_valid(), pa.scalar(None, pa.string()), content), made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": str(call["name"]), "arguments": text}}
