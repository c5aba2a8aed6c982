"""The text of a shard's cursor in a state:

    {"epoch": 1, "window": 0, "row": 11, "delivered": 2, "at": 2, "check": "5f0c9a3e"}

"delivered" counts batches of the pass, "at" those of the epoch; "ended" says that there are no
more. The checksum covers the text, its key, the pipeline and the epoch of the state.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy as np
import torch

from trainpipes.columns.tensor_rows import FOREIGN
from trainpipes.errors import StateError, cut, shown
from trainpipes.order.layout import slots_before

_END = re.compile(r'(.*),"check":"([0-9a-f]{8,16})"\}', re.DOTALL)


def checksum(*parts: object) -> str:
    """CRC-32, as 8 hexadecimal digits.

    >>> checksum("{}", 1), checksum("{}", 2)
    ('908d03b8', '09845202')
    """
    return f"{crc32(chr(0).join(map(str, parts)).encode('utf-8', 'surrogatepass')):08x}"


def sealed(text: str, check: str) -> str:
    """A JSON object's text with a checksum as its last entry.

    >>> sealed('{"row":3}', "908d03b8")
    '{"row":3,"check":"908d03b8"}'
    """
    return f'{text[:-1]},"check":"{check}"}}'


def unsealed(text: str) -> tuple[str, str | None]:
    """The text that was sealed, and its checksum or None.

    >>> unsealed('{"row":3,"check":"908d03b8"}')
    ('{"row":3}', '908d03b8')
    """
    match = _END.fullmatch(text)
    return (text, None) if match is None else (match[1] + "}", match[2])


#: All that a state counts is less than this.
MOST = 1 << 62


def shard_key(shard: int) -> str:
    return f"shard-{shard:04d}"


def shard_of(key: str, num_shards: int) -> int:
    """The shard of a cursor's key; raises StateError if there is none."""
    digits = key.removeprefix("shard-")
    shard = int(digits) if digits.isdecimal() and len(digits) < 20 else -1
    if not 0 <= shard < num_shards or key != shard_key(shard):
        raise StateError(
            f"{cut(key)}: no such shard among {num_shards}; load the state as it was saved"
        )
    return shard


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2**62."""
    return type(value) is int and 0 <= value < MOST


def cursor_text(cursor: dict[str, Any], shard: int, tag: str, epoch: int) -> str:
    """A shard's cursor in a state; ``tag`` is the checksum of the pipeline's identity."""
    text = json.dumps(cursor, separators=(",", ":"))
    return sealed(text, checksum(text, shard_key(shard), tag, epoch))


def read_cursor(key: str, value: Any, epoch: int, m: int, shards: int, tag: str) -> dict[str, Any]:
    """The cursor of a key; raises StateError if it is damaged, or of another step."""
    shard = shard_of(key, shards)
    text, check = unsealed(value) if isinstance(value, str) else ("", None)
    if check is None or check != checksum(text, key, tag, epoch):
        raise StateError(
            f"{key}: must be a position as state_dict() wrote it, got {shown(value)}; "
            "the state was edited or is damaged: load it as it was saved"
        )
    cursor: dict[str, Any] = json.loads(text)
    check_delivered(shard, cursor, m, shards)
    return cursor


def check_delivered(shard: int, cursor: dict[str, Any], m: int, num_shards: int) -> None:
    """Raise StateError unless a shard has delivered its items up to ``m``, or has ended."""
    delivered, owed = cursor["delivered"], slots_before(m, shard, num_shards)
    if delivered != owed and not ("ended" in cursor and delivered < owed):
        raise StateError(
            f"{shard_key(shard)}/delivered: {delivered} batches, but batches = {m} means {owed}; the state "
            "was edited, or ranks saved it at different steps: save on all ranks after the same step"
        )


class KnownRow(dict[str, Any]):
    """A row that knows which it is while a stage holds it: its number, epoch and part (see ``Block``)."""

    __slots__ = ("whose",)
    whose: tuple[int, int, int]

    @staticmethod
    def of(row: dict[str, Any], whose: tuple[int, int, int]) -> KnownRow:
        known = KnownRow(row)
        known.whose = whose
        return known


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
        if value.dtype in FOREIGN:
            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            dtype = str(value.dtype).removeprefix("torch.")
            about = {"dtype": dtype, "shape": [*value.shape]}
            return {OF: "tensor", **about, "array": encoded(bits)}
        return {OF: "tensor", "array": encoded(value.numpy(force=True), path)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        data = b64encode(value.tobytes()).decode("ascii")
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {OF: kind, "dtype": value.dtype.str, "shape": [*value.shape], "data": data}
    if type(value) in {list, tuple}:
        items = [encoded(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        return items if isinstance(value, list) else {OF: "tuple", "items": items}
    if type(value) is KnownRow and hasattr(value, "whose"):
        return {OF: "row", "whose": [*value.whose], "row": encoded(dict(value), path)}
    if type(value) is dict or type(value) is KnownRow:
        for key in value:
            if type(key) is not str or key == OF:
                raise TypeError(f"{path} has the key {key!r}; keys are texts, and not {OF!r}")
        return {key: encoded(inner, f"{path}[{key!r}]") for key, inner in value.items()}
    way = "; sorted(...) makes a list of a set" if isinstance(value, set | frozenset) else ""
    raise TypeError(f"{path} is a {type(value).__name__}{way}")


def known_rows(value: Any) -> Iterator[tuple[int, ...]]:
    """The numbers of the rows in a value of ``encoded``."""
    if isinstance(value, list | dict):
        for inner in value if isinstance(value, list) else value.values():
            yield from known_rows(inner)
    if isinstance(value, dict) and value.get(OF) == "row":
        yield tuple(value["whose"])


def decoded(value: Any) -> Any:
    """The value that ``encoded`` made JSON of."""
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(OF)
    if kind is None:
        return {key: decoded(inner) for key, inner in value.items()}
    if kind == "float":
        return float(value["text"])
    if kind == "tuple":
        return tuple(decoded(value["items"]))
    if kind == "row":
        return KnownRow.of(decoded(value["row"]), tuple(value["whose"]))
    if kind == "tensor":
        tensor = torch.from_numpy(decoded(value["array"]))
        if "dtype" not in value:
            return tensor
        return tensor.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    data = b64decode(value["data"])
    if kind in {"bytes", "bytearray"}:
        return data if kind == "bytes" else bytearray(data)
    array = np.frombuffer(bytearray(data), dtype=value["dtype"]).reshape(value["shape"])
    return array if kind == "array" else array[()]
