"""The named values that an item is made of: dicts, tuples, records, and these within each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from trainpipes.look.preview.images import image_facts

__all__ = ["as_mapping", "leaves"]

#: Values of an item that are looked at, and how deep within each other.
MOST_VALUES, DEEPEST = 64, 4


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """What has names as a mapping: dicts, what is like one, named tuples, dataclasses; else None."""
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in islice(value.items(), MOST_VALUES + 1)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves(item: Any, of_row: bool = False) -> tuple[list[tuple[str, Any]], bool]:
    """The values of an item with their names, ``0.input`` for what is within others, and whether there
    are more. A value by itself has the name "".

    Args:
        item: of a pipeline.
        of_row: whether it is one row, so that a list of dicts in it is no column of them.

    >>> leaves(({"x": 1, "y": "a"}, 2))
    ([('0.x', 1), ('0.y', 'a'), ('1', 2)], False)
    """
    found = list(islice(_leaves("", item, 0, of_row), MOST_VALUES + 1))
    return found[:MOST_VALUES], len(found) > MOST_VALUES


def _leaves(name: str, value: Any, depth: int, of_row: bool) -> Iterator[tuple[str, Any]]:
    named = None if depth and image_facts(value) else as_mapping(value)
    if named is None and _holds_several(value, depth, of_row):
        named = {str(k): inner for k, inner in enumerate(value[: MOST_VALUES + 1])}
    if not named or depth >= DEEPEST:
        yield name, value
        return
    for own, inner in named.items():
        yield from _leaves(f"{name}.{own}" if name else own, inner, depth + 1, of_row)


def _holds_several(value: Any, depth: int, of_row: bool) -> bool:
    """Whether a sequence is several values, such as (inputs, targets), and not one of many numbers."""
    if not isinstance(value, list | tuple) or not value:
        return False
    if depth == 0 and isinstance(value, tuple):
        return True
    if depth and not of_row and as_mapping(value[0]) is not None:
        return False
    return all(hasattr(one, "shape") or as_mapping(one) for one in value[:8])
