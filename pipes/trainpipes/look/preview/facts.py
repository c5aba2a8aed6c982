"""What a value is: its type, its shape, its least and greatest number, or its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainpipes._internal.secret_text import hidden
from trainpipes._internal.shown import MOST_OF_URL, cut, shown
from trainpipes.look.preview.grids import head
from trainpipes.look.preview.images import image_facts
from trainpipes.look.preview.legible import legible

__all__ = ["Facts", "facts_of"]

#: Characters of a text in a table, and of a value that is quoted.
TEXT, QUOTED = 200, 120
#: Texts of a batch that are quoted.
FEW = 3


@dataclass(frozen=True)
class Facts:
    """One value of an item.

    Attributes:
        name: of the column, ``0.input`` for what is within a tuple; "" for an item that is one value.
        type: of the value, ``tensor int64`` or ``str``.
        shape: of an array, or the length of a list; None where it has none.
        low: least number, as text; None where there is none.
        high: greatest number.
        text: of texts and other values, cut; None for arrays.
    """

    name: str
    type: str
    shape: tuple[int, ...] | None = None
    low: str | None = None
    high: str | None = None
    text: str | None = None

    def to_dict(self) -> dict[str, Any]:
        found = {
            "name": self.name, "type": self.type,
            "shape": None if self.shape is None else list(self.shape),
            "min": self.low, "max": self.high, "text": self.text,
        }  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}


def facts_of(name: str, value: Any) -> Facts:
    """What there is to say of a value, whatever it is."""
    name = legible(name, 80)
    image = image_facts(value)
    if image is not None:
        return Facts(name, image)
    if isinstance(value, torch.Tensor):
        kind = f"tensor {str(value.dtype).removeprefix('torch.')}"
        if value.device.type != "cpu":
            kind += f" on {value.device}"
        if value.is_nested:
            return Facts(name, f"nested {kind}", (value.size(0),))
        return _of_numbers(name, kind, tuple(value.shape), value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUS" and value.ndim == 1:
            return _of_list(name, f"array {value.dtype.kind}", value[:FEW].tolist(), len(value))
        return _of_numbers(name, f"array {value.dtype}", value.shape, value)
    if isinstance(value, str):
        kind = "str" if len(value) <= TEXT else f"str of {len(value):,} characters"
        return Facts(name, kind, text=legible(_quoted(value), TEXT))
    if isinstance(value, bytes | bytearray | memoryview):
        return Facts(name, f"bytes of {len(value):,}", text=legible(shown(bytes(value[:32]), 60)))
    if isinstance(value, list | tuple):
        return _of_sequence(name, value)
    kind = "None" if value is None else type(value).__name__
    return Facts(name, kind, text=legible(shown(value, QUOTED)))


def _quoted(text: str) -> str:
    """A text without secrets, cut."""
    return cut(hidden(cut(text, MOST_OF_URL)), TEXT)


def _of_numbers(name: str, kind: str, shape: tuple[int, ...], value: Any) -> Facts:
    numbers = head(value)
    if numbers is None or not numbers.size or numbers.dtype.kind not in "biuf":
        return Facts(name, kind, shape)
    if numbers.dtype.kind == "f":
        real = numbers[~np.isnan(numbers)]
        lost = numbers.size - real.size
        text = f"{lost:,} NaN" if lost else None
        if not real.size:
            return Facts(name, kind, shape, text=text)
        return Facts(name, kind, shape, f"{real.min():.4g}", f"{real.max():.4g}", text)
    return Facts(name, kind, shape, str(numbers.min()), str(numbers.max()))


def _of_sequence(name: str, value: Sequence[Any]) -> Facts:
    kind = type(value).__name__
    kinds = {type(one).__name__ for one in value[:100]}
    if len(kinds) == 1:
        kind += f" of {next(iter(kinds))}"
    if kinds <= {"int", "float"} and value:
        some = np.array(value[: 1 << 20], dtype=np.float64 if "float" in kinds else object)
        if "float" in kinds:
            return _of_numbers(name, kind, (len(value),), some)
        few = ", ".join(map(str, value[:8])) + (", …" if len(value) > 8 else "")
        return Facts(name, kind, (len(value),), str(min(some)), str(max(some)), few)
    return _of_list(name, kind, list(value[:FEW]), len(value))


def _of_list(name: str, kind: str, few: list[Any], count: int) -> Facts:
    parts = [
        f"'{legible(_quoted(one), 80)}'" if isinstance(one, str) else legible(shown(one, QUOTED))
        for one in few
    ]
    text = ", ".join(parts) + (", …" if count > len(few) else "")
    return Facts(name, kind, (count,), text=text or None)
