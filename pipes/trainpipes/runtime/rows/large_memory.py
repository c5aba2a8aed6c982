"""Large pieces of memory that are used again.

Memory that a process has not touched yet costs many times what writing to it costs afterwards, and what the
allocator keeps of large pieces that come and go is hard to foretell. Windows come and go all the time, and
are about equally large: they take turns at the same pieces.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any
from weakref import finalize, ref

import numpy as np
import numpy.typing as npt

__all__ = ["LargeMemory"]

Bytes = npt.NDArray[np.uint8]

#: Bytes of which pieces are made up: a large page.
PAGE = 2 << 20
#: How many times what is asked for a piece may be.
MOST_WASTE = 1.5


class LargeMemory:
    """Pieces of memory; one that nothing refers to any more is given out again.

    Given up with the object, but for pieces that are still in use.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Memory of so many bytes, with anything in it: uint8 ``[nbytes]``. Arrays and Arrow buffers that
        look into it keep it."""
        piece = self._found(nbytes) or self._made(nbytes)
        whole: Bytes = np.frombuffer(piece, np.uint8)
        back = finalize(whole, _give_back, ref(self), piece)
        back.atexit = False
        return whole[:nbytes]

    def _found(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            fits = [p for p in self._free if nbytes <= len(p) <= max(PAGE, MOST_WASTE * nbytes)]
            if not fits:
                # What has not the right size for what is asked for now has it for nothing soon.
                self._free = self._free[-1:] if len(self._free) > 8 else self._free
                return None
            piece = min(fits, key=len)
            self._free.remove(piece)
            return piece

    def _made(self, nbytes: int) -> mmap.mmap:
        piece = mmap.mmap(-1, -(-max(1, nbytes) // PAGE) * PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            piece.madvise(mmap.MADV_HUGEPAGE)
        return piece


def _give_back(memory: ref[LargeMemory], piece: Any) -> None:
    asked = memory()
    if asked is not None:
        with asked._lock:
            asked._free.append(piece)
