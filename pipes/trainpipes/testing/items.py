"""What an item holds: its digest, and what is different in another one."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.errors import shown

#: Characters of a value in a message.
QUOTED = 40


def digest(item: Any) -> str:
    """A short hash of an item's dtypes, shapes, bytes, keys, strings and numbers."""
    return digest_and_size(item)[0]


def digest_and_size(item: Any) -> tuple[str, int]:
    """The digest of an item, and about how many bytes it holds."""
    parts: list[bytes] = []
    _add(item, parts)
    held = b"".join(parts)
    return hashlib.sha256(held).hexdigest()[:16], len(held)


#: What is written as Python does it.
PLAIN = {type(None), bool, int, float, str, bytes}


def _add(item: Any, parts: list[bytes]) -> None:
    if type(item) in PLAIN:
        parts.append(repr(item).encode())
    elif isinstance(item, torch.Tensor):
        parts.append(f"tensor {item.dtype} {tuple(item.shape)}".encode())
        whole = item.detach().cpu().clone(memory_format=torch.contiguous_format)
        parts.append(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray) and item.dtype != object:
        parts.append(f"array {item.dtype} {item.shape}".encode())
        parts.append(np.ascontiguousarray(item).tobytes())
    elif isinstance(item, pa.Table | pa.RecordBatch):
        parts.append(f"{type(item).__name__} {item.schema}".encode())
        _add(item.to_pylist(), parts)
    elif isinstance(item, Mapping):
        parts.append(f"{type(item).__name__} {len(item)}".encode())
        for key, value in item.items():
            parts.append(repr(key).encode())
            _add(value, parts)
    elif isinstance(item, list | tuple | np.ndarray):
        parts.append(f"{type(item).__name__} {len(item)}".encode())
        if PLAIN.issuperset(map(type, item)):
            parts.append("".join(map(repr, item)).encode())
            return
        for value in item:
            _add(value, parts)
    elif isinstance(item, bool | int | float | str | bytes):
        parts.append(repr(item).encode())
    else:
        parts.append(pickle.dumps(item))


def difference(item: Any, other: Any) -> str:
    """The first difference of two items, as text; "" if there is none.

    >>> difference([{"x": 1, "y": [2, 7]}], [{"x": 1, "y": [2, 3]}])
    "row 0, column 'y' at [1] is 7 instead of 3"
    """
    return _difference(item, other, "")


def _difference(item: Any, other: Any, where: str) -> str:
    if digest(item) == digest(other):
        return ""
    here = where or "it"
    if type(item) is not type(other):
        kinds = type(item).__name__, type(other).__name__
        values = shown(item, QUOTED), shown(other, QUOTED)
        return f"{here} is {values[0]} ({kinds[0]}) instead of {values[1]} ({kinds[1]})"
    if isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype != object):
        return _of_arrays(item, other, here)
    if isinstance(item, pa.Table | pa.RecordBatch):
        if item.schema != other.schema:
            return f"{here} has the columns {shown(item.schema)} instead of {shown(other.schema)}"
        return _difference(item.to_pylist(), other.to_pylist(), where)
    if isinstance(item, Mapping):
        if list(item) != list(other):
            return f"{here} has {shown(list(item))} instead of {shown(list(other))}"
        name = next(name for name in item if digest(item[name]) != digest(other[name]))
        return _difference(item[name], other[name], f"{where}, column {name!r}".removeprefix(", "))
    if isinstance(item, list | tuple | np.ndarray):
        if len(item) != len(other):
            return f"{here} has the length {len(item)} instead of {len(other)}"
        place = next(n for n, part in enumerate(item) if digest(part) != digest(other[n]))
        where = f"{where} at [{place}]" if where else f"row {place}"
        return _difference(item[place], other[place], where)
    return f"{here} is {shown(item, QUOTED)} instead of {shown(other, QUOTED)}"


def _of_arrays(item: Any, other: Any, where: str) -> str:
    kinds = [
        f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}" for array in (item, other)
    ]
    if kinds[0] != kinds[1]:
        what = "a tensor" if isinstance(item, torch.Tensor) else "an array"
        return f"{where} is {what} {kinds[0]} instead of {kinds[1]}"
    ours, theirs = (np.array(array.tolist(), dtype=object).reshape(-1) for array in (item, other))
    same = [repr(a) == repr(b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
    if all(same):  # in bits that are not shown
        return f"{where} has other bits"
    place = same.index(False)
    at = [int(n) for n in np.unravel_index(place, tuple(item.shape))]
    return f"{where}{f' at {at}' if at else ''} is {ours[place]} instead of {theirs[place]}"
