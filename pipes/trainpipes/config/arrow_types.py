"""Arrow types as text, both ways: ``list<int32>``, ``struct<a: int64, b: string>``."""

from __future__ import annotations

import re
from contextlib import suppress

import pyarrow as pa

from trainpipes._internal.shown import shown

__all__ = ["parse_type", "type_text"]

_WORD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)")
_NESTED = {"list": pa.list_, "large_list": pa.large_list}
_DEEPEST = 32


def parse_type(text: str) -> pa.DataType:
    """The type that a text names.

    Raises:
        ValueError: it names none.

    >>> parse_type("list<struct<a: int64, b: list<string>>>")
    ListType(list<item: struct<a: int64, b: list<item: string>>>)
    """
    parser = _Parser(text)
    found = parser.type(0)
    parser.end()
    return found


def type_text(kind: pa.DataType) -> str:
    """The text that ``parse_type`` reads as that type.

    Raises:
        ValueError: there is none.
    """
    text = str(kind)
    found = None
    with suppress(ValueError):
        found = parse_type(text)
    if found is None or not found.equals(kind, check_metadata=True):
        raise ValueError(f"the Arrow type {text} has no form as text here")
    return text


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _wrong(self, what: str = "") -> ValueError:
        return ValueError(
            f"an Arrow type is written as int64, string, list<int32> or struct<a: int64>, got "
            f"{shown(self._text)}{what}"
        )

    def end(self) -> None:
        if self._text[self._at :].strip():
            raise self._wrong()

    def _take(self, mark: str) -> bool:
        rest = self._text[self._at :]
        blank = len(rest) - len(rest.lstrip())
        if rest[blank:].startswith(mark):
            self._at += blank + len(mark)
            return True
        return False

    def _need(self, mark: str) -> None:
        if not self._take(mark):
            raise self._wrong()

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self._at)
        if end < 0:
            raise self._wrong()
        found, self._at = self._text[self._at : end], end + len(mark)
        return found

    def _field(self, depth: int, default: str | None) -> pa.Field:
        start = self._at
        named = re.compile(r"\s*([^<>:,]+):\s").match(self._text, start)
        name = default
        if named is not None:
            name, self._at = named[1], named.end()
        if name is None:
            raise self._wrong()
        kind = self.type(depth + 1)
        return pa.field(name, kind, nullable=not self._take("not null"))

    def type(self, depth: int) -> pa.DataType:
        if depth > _DEEPEST:
            raise self._wrong()
        word = _WORD.match(self._text, self._at)
        if word is None:
            raise self._wrong()
        self._at = word.end()
        name = word[1]
        if name in _NESTED and self._take("<"):
            inner = self._field(depth, "item")
            self._need(">")
            return _NESTED[name](inner)
        if name == "fixed_size_list" and self._take("<"):
            inner = self._field(depth, "item")
            self._need(">")
            self._need("[")
            return pa.list_(inner, self._number(self._until("]")))
        if name == "struct" and self._take("<"):
            fields: list[pa.Field] = []
            while not self._take(">"):
                if fields:
                    self._need(",")
                fields.append(self._field(depth, None))
            return pa.struct(fields)
        if name == "map" and self._take("<"):
            key = self.type(depth + 1)
            self._need(",")
            value = self.type(depth + 1)
            self._need(">")
            return pa.map_(key, value)
        if name == "dictionary" and self._take("<"):
            self._need("values=")
            values = self.type(depth + 1)
            self._need(", indices=")
            indices = self.type(depth + 1)
            self._need(", ordered=")
            ordered = self._number(self._until(">"))
            return pa.dictionary(indices, values, bool(ordered))
        if name in ("decimal128", "decimal256") and self._take("("):
            digits, _, scale = self._until(")").partition(",")
            return getattr(pa, name)(self._number(digits), self._number(scale))
        if name == "fixed_size_binary" and self._take("["):
            return pa.binary(self._number(self._until("]")))
        if name in ("timestamp", "duration", "time32", "time64") and self._take("["):
            unit, _, zone = self._until("]").partition(", tz=")
            try:
                return (
                    pa.timestamp(unit, zone or None)
                    if name == "timestamp"
                    else getattr(pa, name)(unit)
                )
            except ValueError:
                raise self._wrong() from None
        try:
            return pa.type_for_alias(name)
        except ValueError:
            raise self._wrong() from None

    def _number(self, text: str) -> int:
        if not text.strip().isdigit() or len(text) > 9:
            raise self._wrong()
        return int(text)
