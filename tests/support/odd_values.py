"""Values that no option means: what a test gives to each of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["ODD", "said_well"]

#: Characters of a message, at most.
MOST = 20_000


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Color(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


def endless(kind: type) -> Any:
    found = kind()
    if kind is dict:
        found["x"] = found
    else:
        found.append(found)
    return found


def deep(levels: int = 5000) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


#: By name, what makes each: generators are used up.
ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "huge": lambda: 2**70,
    "hugest": lambda: 10**5000,
    "complex": lambda: 1j,
    "no text": lambda: "",
    "text": lambda: "nope",
    "long text": lambda: "x" * 200_000,
    "surrogate": lambda: "a\udc80b",
    "zero byte": lambda: "a\0b",
    "bytes": lambda: b"x",
    "long bytes": lambda: b"x" * 200_000,
    "odd bytes": lambda: bytes(range(256)) * 9,
    "bytearray": lambda: bytearray(b"x" * 500),
    "no list": list,
    "list of None": lambda: [None],
    "twice": lambda: ["x", "x"],
    "long list": lambda: list(range(10_000)),
    "endless list": lambda: endless(list),
    "endless dict": lambda: endless(dict),
    "deep": deep,
    "list of odd": lambda: [Silent(), np.zeros(3), b"x" * 500],
    "tuple": lambda: ("x",),
    "no dict": dict,
    "dict": lambda: {"x": 1},
    "dict of odd": lambda: {1: Silent(), b"x" * 500: np.zeros(2), None: None},
    "set": lambda: {"x"},
    "range": lambda: range(3),
    "generator": lambda: (n for n in range(3)),
    "numpy int": lambda: np.int64(3),
    "numpy uint": lambda: np.uint64(2**64 - 1),
    "numpy float": lambda: np.float32(0.5),
    "numpy nan": lambda: np.float64("nan"),
    "numpy bool": lambda: np.bool_(True),
    "numpy text": lambda: np.str_("x"),
    "numpy array": lambda: np.arange(3),
    "numpy empty": lambda: np.zeros((0, 3)),
    "numpy scalar array": lambda: np.array(3),
    "numpy objects": lambda: np.array([Silent(), None], dtype=object),
    "tensor": lambda: torch.arange(3),
    "tensor of one": lambda: torch.tensor(2),
    "large tensor": lambda: torch.zeros(2000),
    "object": object,
    "silent": Silent,
    "class": lambda: Silent,
    "enum": lambda: Color.RED,
    "int enum": lambda: Number.ONE,
    "path": lambda: Path("nope"),
}


def said_well(error: BaseException) -> str:
    """What is wrong with an error that an odd value has led to; "" for nothing."""
    import trainpipes as tp

    text = str(error)
    if len(text) > MOST:
        return f"a message of {len(text)} characters"
    if isinstance(error, tp.TrainpipesError):
        return ""
    ours = isinstance(error, TypeError) and text.split("(")[0].isidentifier() and "()" in text[:40]
    return "" if ours else f"{type(error).__name__}: {text[:200]}"
