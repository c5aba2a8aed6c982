"""What a stage keeps between rows, as JSON and back."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch

#: The key that tells a value that JSON lacks from a dict of a user.
OF = "__of__"


def encoded(value: Any, path: str = "state") -> Any:
    """A copy of JSON types. Raises TypeError where there is none, which names the place."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) in {str, int}:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {OF: "float", "text": repr(value)}
    if isinstance(value, bytes | bytearray):
        kind = "bytearray" if isinstance(value, bytearray) else "bytes"
        return {OF: kind, "data": b64encode(value).decode("ascii")}
    if isinstance(value, torch.Tensor):
        return {OF: "tensor", "array": encoded(value.detach().cpu().numpy(), path)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        data = b64encode(value.tobytes()).decode("ascii")
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {OF: kind, "dtype": value.dtype.str, "shape": [*value.shape], "data": data}
    if type(value) in {list, tuple}:
        items = [encoded(one, f"{path}[{number}]") for number, one in enumerate(value)]
        return items if isinstance(value, list) else {OF: "tuple", "items": items}
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key == OF:
                raise TypeError(f"{path} has the key {key!r}; keys are texts, and not {OF!r}")
        return {key: encoded(one, f"{path}[{key!r}]") for key, one in value.items()}
    way = "; sorted(...) makes a list of a set" if isinstance(value, set | frozenset) else ""
    raise TypeError(f"{path} is a {type(value).__name__}{way}")


def decoded(value: Any) -> Any:
    """What ``encoded`` made JSON of."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(OF)
    if kind is None:
        return {key: decoded(one) for key, one in value.items()}
    if kind == "float":
        return float(value["text"])
    if kind == "tuple":
        return tuple(decoded(value["items"]))
    if kind == "tensor":
        return torch.from_numpy(decoded(value["array"]))
    data = b64decode(value["data"])
    if kind in {"bytes", "bytearray"}:
        return data if kind == "bytes" else bytearray(data)
    array = np.frombuffer(bytearray(data), dtype=value["dtype"]).reshape(value["shape"])
    return array if kind == "array" else array[()]
