"""Large pieces of memory that are used again.

Memory that a process has not touched yet costs many times what writing to it costs afterwards, and what the
allocator keeps of large pieces that come and go is hard to foretell. Windows come and go all the time, and
are about equally large: they take turns at the same pieces.
"""

from __future__ import annotations

import mmap
from collections import deque
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
#: Free pieces that are kept although they do not fit.
MOST_FREE = 8


class LargeMemory:
    """Pieces of memory; one that nothing refers to any more is given out again.

    Given up with the object, but for pieces that are still in use.
    """

    def __init__(self) -> None:
        # No lock: a piece comes back whenever garbage is collected, in any thread, at any place.
        self._free: deque[mmap.mmap] = deque()

    def take(self, nbytes: int) -> Bytes:
        """Memory of so many bytes, with anything in it: uint8 ``[nbytes]``. Arrays and Arrow buffers that
        look into it keep it."""
        piece = self._found(nbytes) or self._made(nbytes)
        whole: Bytes = np.frombuffer(piece, np.uint8)
        back = finalize(whole, _give_back, ref(self), piece)
        back.atexit = False
        return whole[:nbytes]

    def _found(self, nbytes: int) -> mmap.mmap | None:
        """A free piece of about that size. Those that are passed over too often are given up."""
        for _ in range(len(self._free)):
            try:
                piece = self._free.popleft()
            except IndexError:  # another thread took it
                return None
            if nbytes <= len(piece) <= max(PAGE, MOST_WASTE * nbytes):
                return piece
            if len(self._free) < MOST_FREE:
                self._free.append(piece)
        return None

    def _made(self, nbytes: int) -> mmap.mmap:
        size = -(-max(1, nbytes) // PAGE) * PAGE
        # Private: shared memory seldom has large pages, and a forked child would write into ours.
        private = (
            {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        )
        piece = mmap.mmap(-1, size, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            piece.madvise(mmap.MADV_HUGEPAGE)
        return piece


def _give_back(memory: ref[LargeMemory], piece: Any) -> None:
    asked = memory()
    if asked is not None:
        asked._free.append(piece)
