"""States of torchdata nodes as plain JSON types, and back.

Most are plain already, and stay as they are. What JSON would change without a word, or cannot hold, is
written as a dict of one key: tuples, bytes, dicts whose keys are no strings, arrays, tensors (such as
the state of a random generator).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_KINDS = ("__tuple__", "__bytes__", "__items__", "__array__", "__tensor__")
#: The keys of the states of torchdata's nodes, and that of the state of what is below them. Iterables and
#: samplers with a state of their own have one key more, and are not known.
_KNOWN = {
    frozenset({"_num_yielded"}): "",
    frozenset({"_num_yielded", "_epoch"}): "",
    frozenset({"source"}): "source",
    frozenset({"source", "batch_idx"}): "source",
    frozenset({"it_state"}): "it_state",
    frozenset({"snapshot", "steps_since_snapshot"}): "snapshot",
    frozenset(
        {
            "datasets_exhausted",
            "dataset_node_states",
            "epoch",
            "num_yielded",
            "weighted_sampler_state",
        }
    ): "dataset_node_states",
}


def plain(value: Any) -> Any:
    """A copy of a state, of JSON types; objects that have no form there are left as they are.

    >>> plain({"n": 3, "rng": (1, 2)})
    {'n': 3, 'rng': {'__tuple__': [1, 2]}}
    >>> restored(plain({"n": 3, "rng": (1, 2)}))
    {'n': 3, 'rng': (1, 2)}
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not is_wrapped(value):
            return {key: plain(inner) for key, inner in value.items()}
        return {"__items__": [[plain(key), plain(inner)] for key, inner in value.items()]}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, tuple):
        return {"__tuple__": [plain(inner) for inner in value]}
    if isinstance(value, bytes):
        return {"__bytes__": text_of(value)}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.asarray(value)
        return {"__array__": [array.dtype.str, list(array.shape), text_of(array.tobytes())]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        # Not a plain reshape: a tensor of one value has no dimension to be viewed as bytes.
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = text_of(flat.view(torch.uint8).numpy().tobytes())
        return {"__tensor__": [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
    return value


def restored(value: Any) -> Any:
    """A fresh copy of the state of which ``plain`` made this."""
    if isinstance(value, list):
        return [restored(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if not is_wrapped(value):
        return {key: restored(inner) for key, inner in value.items()}
    [(kind, content)] = value.items()
    if kind == "__tuple__":
        return tuple(restored(inner) for inner in content)
    if kind == "__bytes__":
        return base64.b64decode(content)
    if kind == "__items__":
        return {restored(key): restored(inner) for key, inner in content}
    dtype, shape, text = content
    data = bytearray(base64.b64decode(text))  # writable, as it was
    if kind == "__array__":
        array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
        return array if shape else array[()]
    element = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=element)
    return torch.frombuffer(data, dtype=element).reshape(shape)


def is_wrapped(value: Any) -> bool:
    """Whether this is one of the dicts that ``plain`` writes for what JSON cannot hold."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _KINDS


def text_of(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode("ascii")


def tells_start(state: Any) -> bool:
    """Whether a node's state right after ``reset()`` is known to lead to the start of that epoch.

    That of an iterable may not: if it goes to its start with the first item only, its state says until
    then where the epoch before was left. Who is not known may be such a one.
    """
    if not isinstance(state, dict) or "trainpipes" in state:
        return True
    below = _KNOWN.get(frozenset(state))
    if below == "dataset_node_states":
        return all(map(tells_start, state[below].values()))
    return below is not None and (not below or tells_start(state[below]))
