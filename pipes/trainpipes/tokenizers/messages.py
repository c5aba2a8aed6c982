"""Messages and tools of a conversation, as columns hold them, made what a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainpipes.errors import DataError


def messages_of(value: Any, parse_arguments: bool = True) -> list[dict[str, Any]]:
    """A conversation as transformers takes it, without what is null: a column of dicts has every key that
    any of its rows has, and null where a row has none.

    Args:
        value: a list of messages.
        parse_arguments: whether arguments of tool calls that are a JSON object as text become a dict.

    Raises:
        DataError: it is no conversation.
    """
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"a conversation is a list of messages, one or more, got {type(value).__name__}"
            f"{' of none' if value is not None and not value else ''}"
        )
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f'message {number} of a conversation is a dict with "role" and "content", got {message!r:.80}'
            )
    found: list[dict[str, Any]] = _filled(value)
    if parse_arguments:
        for message in found:
            if "tool_calls" in message:
                _parse(message["tool_calls"])
    return found


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Tools as transformers takes them; None for none.

    Args:
        value: a list of JSON schemas, or of texts that hold one each; or a text that holds the list.

    Raises:
        DataError: it is none of these.
    """
    try:
        found = json.loads(value or "[]") if isinstance(value, str) else value or []
        if isinstance(found, list):
            found = [json.loads(tool) if isinstance(tool, str) else tool for tool in found]
        filled = _filled(found)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tools are JSON, which this is not ({error}): {value!r:.80}") from None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise DataError(f"tools are a list of JSON schemas, got {value!r:.80}")
    return filled or None


def _filled(value: Any) -> Any:
    """A value without keys that are null."""
    if isinstance(value, Mapping):
        return {k: _filled(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_filled(v) for v in value]
    return value


def _parse(calls: Any) -> None:
    """Make dicts of the arguments of tool calls."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):  # what a model wrote, and may be wrong
            continue
        if isinstance(arguments, dict):
            function["arguments"] = arguments
