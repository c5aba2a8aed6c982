"""Random numbers of rows: a generator for each, the same whenever and wherever the row is made.

Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) has a key of 128 bits and
a counter of 256. The key says who draws: a seed and a name. The upper 192 bits of the counter say for whom:
the row, its epoch, and which part of the row it is. The lower 64 count what one row draws. So no row has
another's numbers, and none depends on what was drawn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence

from trainpipes.runtime.run import Run

__all__ = ["RowKey", "Words", "words_of"]

#: The upper counter words of some items: uint64 ``[items, 3]``.
Words = npt.NDArray[np.uint64]


class RowKey(ISeedSequence):  # a Philox asks it for its key
    """Who draws.

    Args:
        key: two uint64, as ``order.random_key`` makes them.

    >>> from trainpipes.order import random_key
    >>> key = RowKey(random_key(0, "noise"))
    >>> rng = key.generator([0, 7, 2])  # row 7 of epoch 2
    >>> rng.bit_generator.random_raw(2).tolist()
    [18436814177646055453, 6772959251520411799]
    """

    def __init__(self, key: npt.NDArray[np.uint64]) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[np.uint64]:
        return self.key

    def generator(self, words: Sequence[int]) -> Generator:
        """The generator of one item. About 4 us.

        Args:
            words: the three upper ones of the counter.
        """
        bits = Philox(self)  # type: ignore[arg-type]  # takes what gives a state, as documented
        state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": (0, *words), "key": self.key},
            "buffer": NOTHING,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        bits.state = state
        return Generator(bits)


NOTHING = np.zeros(4, dtype=np.uint64)


def words_of(run: Run) -> Words:
    """For whom the items of a run are drawn, uint64 ``[items, 3]``: of a row its part, number and epoch; of
    several rows together a digest of these."""
    block = run.block
    places = np.empty((len(block), 3), dtype="<u8")
    places[:, 0], places[:, 1], places[:, 2] = block.part, block.ids, block.epoch
    if run.bounds is None:
        return places
    digests = [
        hashlib.sha256(places[start:stop].tobytes()).digest()[:24]
        for start, stop in pairwise(run.bounds.tolist())
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 3)
