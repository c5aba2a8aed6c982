"""The tensors of a batch, however it is nested: mappings, lists, tuples, dataclasses, and objects that know
themselves how they are pinned or moved. Called by the thread that iterates."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

SEQUENCES = (list, deque, UserList)


def map_tensors(item: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting, with other tensors. Containers that change are copies of the same class; the others,
    and what is no container, stay as they are.

    Args:
        item: a batch.
        change: is called with each tensor, and with each object that is none; returns what takes its place,
            or None where it has nothing to say of it.
    """
    if item is None or isinstance(item, (str, bytes, int, float)):
        return item
    found = change(item)
    if found is not None:
        return found
    if isinstance(item, Mapping):
        entries = {key: map_tensors(value, change) for key, value in item.items()}
        for key, value in entries.items():
            if value is not item[key]:
                return entries if type(item) is dict else _mapping(item, entries)
        return item
    if isinstance(item, (tuple, *SEQUENCES)):
        values = [map_tensors(value, change) for value in item]
        if all(new is old for new, old in zip(values, item, strict=True)):
            return item
        if isinstance(item, tuple):
            kind: Any = type(item)
            return kind._make(values) if hasattr(kind, "_make") else kind(values)
        return values if type(item) is list else _sequence(item, values)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return _record(item, change)
    return item


def _mapping(item: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if not isinstance(item, MutableMapping):
        kind: Any = type(item)
        return kind(entries)
    clone = copy.copy(item)
    for key, value in entries.items():
        clone[key] = value
    return clone


def _sequence(item: Any, values: list[Any]) -> Any:
    clone = copy.copy(item)
    for number, value in enumerate(values):
        clone[number] = value
    return clone


def _record(item: Any, change: Callable[[Any], Any]) -> Any:
    names = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]
    values = {name: map_tensors(getattr(item, name), change) for name in names}
    if all(value is getattr(item, name) for name, value in values.items()):
        return item
    clone = copy.copy(item)
    for name, value in values.items():
        object.__setattr__(clone, name, value)  # also where the class is frozen
    return clone


def recorded(item: Any) -> Iterator[Any]:
    """What of a batch has a ``record_stream``: its tensors, and objects that call that of theirs."""
    if isinstance(item, torch.Tensor) or callable(getattr(item, "record_stream", None)):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from recorded(value)
    elif isinstance(item, (tuple, *SEQUENCES)):
        for value in item:
            yield from recorded(value)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from recorded(getattr(item, field.name, None))
    elif callable(getattr(item, "to", None)) and not isinstance(item, type):
        for value in vars(item).values() if hasattr(item, "__dict__") else ():
            if isinstance(value, (torch.Tensor, Mapping, tuple, *SEQUENCES)):
                yield from recorded(value)
