"""Who calls: for what other libraries do not say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["callers"]


def callers() -> Iterator[tuple[str, str]]:
    """Module and qualified name of each function on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        frame = frame.f_back
