"""What an item holds, as a number: types, shapes and bytes, in the order in which they came."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import torch

__all__ = ["digest"]


def digest(item: Any) -> str:
    """16 hex digits of the content."""
    found = hashlib.sha256()
    _add(found, item)
    return found.hexdigest()[:16]


def _add(found: Any, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        _tag(found, "tensor", item.dtype, tuple(item.shape))
        found.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                     if item.numel() else b"")  # fmt: skip
    elif isinstance(item, np.ndarray):
        _tag(found, "array", item.dtype, item.shape)
        if item.dtype == object:
            for value in item.reshape(-1):
                _add(found, value)
        else:
            found.update(np.ascontiguousarray(item).tobytes())
    elif isinstance(item, np.generic):
        _tag(found, "scalar", item.dtype)
        found.update(item.tobytes())
    elif isinstance(item, pa.Table | pa.RecordBatch):
        _tag(found, "table", item.num_rows, *(f"{f.name}:{f.type}" for f in item.schema))
        for name in item.schema.names:
            _add(found, item.column(name).to_pylist())
    elif isinstance(item, dict):
        _tag(found, "dict", len(item))
        for key, value in item.items():
            _add(found, key)
            _add(found, value)
    elif isinstance(item, list | tuple):
        _tag(found, type(item).__name__ if type(item) in (list, tuple) else "tuple", len(item))
        for value in item:
            _add(found, value)
    elif isinstance(item, bytes | bytearray | memoryview):
        _tag(found, "bytes", len(item))
        found.update(bytes(item))
    elif item is None or isinstance(item, str | bool | int | float):
        _tag(found, type(item).__name__, repr(item))
    else:
        raise TypeError(f"no digest for {type(item)}")


def _tag(found: Any, *words: object) -> None:
    found.update(("\0".join(map(str, words)) + "\1").encode())
