"""Stretches of bytes as Arrow's ``binary_view``, which Arrow copies one after the other in one call,
during which other threads run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import Array, stretches
from trainpipes.engine.layout import IntArray

#: How Arrow lays out a view: up to ``INLINE`` bytes stand in it, in place of all but the size.
VIEW = np.dtype([("size", "<i4"), ("prefix", "<i4"), ("buffer", "<i4"), ("start", "<i4")])
INLINE = 12
#: Bytes from one buffer over the same content to the next, since starts have 32 bits; and of the
#: longest stretch.
STEP = 1 << 30


def buffers_of(content: Array) -> list[pa.Buffer]:
    return [pa.py_buffer(content[at:]) for at in range(0, max(1, len(content)), STEP)]


def views_of(content: Array, starts: IntArray, sizes: IntArray, first: int = 0) -> Array:
    """Views of stretches of uint8 ``content``, whose buffers are number ``first`` and those after it."""
    views = np.zeros(len(sizes), VIEW)
    views["size"], views["start"] = sizes, starts % STEP
    views["buffer"] = starts // STEP + first
    few = np.flatnonzero(sizes <= INLINE)
    if len(few):
        places = stretches(few * VIEW.itemsize + VIEW["size"].itemsize, sizes[few])
        views.view(np.uint8)[places] = content[stretches(starts[few], sizes[few])]
    return views


def joined_views(views: Array, buffers: Sequence[pa.Buffer], nbytes: int) -> Array:
    """What is viewed, ``nbytes`` in all, as uint8; not to be written to."""
    if not nbytes:
        return np.empty(0, np.uint8)
    kind = pa.binary() if nbytes <= np.iinfo(np.int32).max else pa.large_binary()
    array = pa.Array.from_buffers(
        pa.binary_view(), views.size, [None, pa.py_buffer(views), *buffers]
    )
    return np.frombuffer(pc.cast(array, kind).buffers()[2], np.uint8, nbytes)
