"""Counts work instead of timing it: calls of the library's functions, and bytes gone through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import trainpipes as tp

__all__ = ["Work", "counted"]

LIBRARY = str(Path(tp.__file__).parent)
#: Methods of arrays, tensors and tables that go through all that they are called on.
READING = {
    "all", "any", "argsort", "astype", "clone", "combine_chunks", "contiguous", "copy", "cumsum", "filter",
    "flatten", "index_select", "max", "min", "repeat", "sum", "take", "to", "tobytes", "tolist", "to_pylist",
}  # fmt: skip
HOLDERS = (np.ndarray, torch.Tensor, pa.Table, pa.ChunkedArray, pa.Array)


@dataclass
class Work:
    """What was done.

    Args:
        calls: of functions of the library.
        nbytes: of all arrays, tensors and tables of which a method went through the whole.
        widened: bytes of arrays that were cast to another dtype.
    """

    calls: int = 0
    nbytes: int = 0
    widened: int = 0


def counted(do: Callable[[], Any]) -> tuple[Any, Work]:
    """What a function returns, and the work that this thread did for it."""
    work = Work()

    def hook(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            work.calls += frame.f_code.co_filename.startswith(LIBRARY)
        elif event == "c_call" and function.__name__ in READING:
            held = getattr(function, "__self__", None)
            if isinstance(held, HOLDERS):
                work.nbytes += held.nbytes
                work.widened += held.nbytes if function.__name__ == "astype" else 0

    sys.setprofile(hook)
    try:
        found = do()
    finally:
        sys.setprofile(None)
    return found, work
