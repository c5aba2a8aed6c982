"""Values as plain JSON types for a record that others see: short, and without credentials.

What a record names a value by is what a state knows it by (``kinds.options.identify``); what could hold a
secret is left out: values under such names, and credentials and queries of URLs, also within a text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.secret_text import LEFT_OUT, hidden, is_secret
from trainpipes._internal.shown import cut
from trainpipes.kinds.options import argument_names, identify

__all__ = ["content_hash", "plain", "without_secrets"]

#: Characters of one option; a larger list or dict is known by its length and content.
MOST = 8192
#: Characters of what an object says of itself.
MOST_TEXT = 500

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: Any, name: str = "") -> Any:
    """An option as JSON types; functions by module and name, arrays and tables by their content.

    Args:
        value: any option of a stage, or a part of one.
        name: what it is called.

    >>> plain({"size": (224, 224), "dtype": torch.float32, "password": "x"})
    {'size': [224, 224], 'dtype': 'torch.float32', 'password': '(left out)'}
    """
    found = _plain(value, name)
    if isinstance(found, list | dict) and len(text := json.dumps(found)) > MOST:
        return (
            f"{len(found):,} {'items' if isinstance(found, list) else 'entries'}, {_digest(text)}"
        )
    return found


def _plain(value: Any, name: str = "") -> Any:
    if value is not None and not isinstance(value, bool) and is_secret(name):
        return LEFT_OUT
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return hidden(str(value))
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if k != "storage_options"}
        return {k: _plain(v, k) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.dtype | torch.device | np.dtype | pa.DataType):
        return str(value)
    if isinstance(value, pa.Schema):
        return {field.name: str(field.type) for field in value}
    if isinstance(value, pa.Table | pa.RecordBatch):
        return f"{type(value).__name__} of {len(value):,} rows"
    if getattr(value, "func", None) is not None and hasattr(value, "keywords"):  # a partial
        named = zip(argument_names(value), value.args, strict=True)
        return {
            "function": _plain(value.func),
            "arguments": [_plain(one, name) for name, one in named],
            "keywords": _plain(value.keywords),
        }
    found = identify(value)
    if isinstance(found, str):
        return cut(hidden(_ADDRESS.sub("", found.removesuffix(": "))), MOST_TEXT)
    return _plain(found)


def without_secrets(value: Any) -> Any:
    """A value of JSON types without what may be a credential.

    >>> without_secrets(["https://me:pw@host/a.csv?sig=abc", "s3://bucket/part-?.parquet"])
    ['https://…@host/a.csv?sig=…', 's3://bucket/part-?.parquet']
    """
    return _plain(value)


def content_hash(value: Any) -> str:
    """A digest of a value of JSON types: equal for what a state takes for equal, where None is as good as
    nothing and the order of keys does not matter.

    >>> content_hash({"a": 1, "b": None}) == content_hash({"a": 1}) != content_hash({"a": 1.0})
    True
    """
    return _digest(json.dumps(_canonical(value), sort_keys=True, separators=(",", ":")))


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items() if inner is not None}
    if not isinstance(value, list):
        return value
    found = [_canonical(inner) for inner in value]
    while found and found[-1] is None:
        found.pop()
    return found
