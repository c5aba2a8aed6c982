"""Whether two contestants delivered the same rows, and whether they came in the same order.

A row is hashed by its token ids, by one multiplication and addition for each, modulo 2^64, with a multiplier
for each place, then mixed (the finaliser of MurmurHash3). A multiset of rows has the sum of its rows' hashes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["Tally", "of_ragged"]

_PLACES = np.random.Philox(2026).random_raw(1 << 16) | np.uint64(1)


def _mixed(sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        sums = (sums ^ (sums >> np.uint64(shift))) * np.uint64(factor)
    return sums ^ (sums >> np.uint64(33))


def of_padded(ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Hashes of the rows of a padded batch, uint64 ``[B]``."""
    terms = (ids.astype(np.uint64) + np.uint64(1)) * _PLACES[: ids.shape[1]]
    terms *= mask.astype(np.uint64)
    return _mixed(terms.sum(axis=1, dtype=np.uint64))


def of_ragged(rows: pa.ListArray) -> int:
    """The digest of the multiset of rows of a column ``list<int32>``. No row may be empty."""
    values = rows.flatten().to_numpy().astype(np.uint64) + np.uint64(1)
    lengths = rows.value_lengths().to_numpy()
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(values)) - np.repeat(starts, lengths)
    sums = np.add.reduceat(values * _PLACES[places], starts)
    return int(_mixed(sums).sum(dtype=np.uint64))


class Tally:
    """Counts what is delivered."""

    def __init__(self) -> None:
        self.batches = self.rows = self.tokens = 0
        self._sum = 0
        self._sequence = hashlib.blake2b(digest_size=8)

    def add(self, batch: dict[str, Any]) -> None:
        """Take in a batch.

        Raises:
            ValueError: it is not what all are to deliver: int64 "input_ids" and "attention_mask" [B, L].
        """
        names = sorted(batch)
        shapes = [(tuple(batch[name].shape), str(batch[name].dtype)) for name in names]
        same = names == ["attention_mask", "input_ids"] and shapes[0] == shapes[1]
        if not same or len(shapes[0][0]) != 2 or shapes[0][1] != "torch.int64":
            raise ValueError(f"a batch is input_ids and attention_mask [B, L], int64; got {shapes}")
        mask = batch["attention_mask"].numpy()
        hashes = of_padded(batch["input_ids"].numpy(), mask)
        self.batches += 1
        self.rows += len(hashes)
        self.tokens += int(mask.sum())
        self._sum = (self._sum + int(hashes.sum(dtype=np.uint64))) % (1 << 64)
        self._sequence.update(hashes.tobytes())
        self._sequence.update(b"|")

    @property
    def multiset(self) -> str:
        """The same for the same rows in any order."""
        return f"{self._sum:016x}"

    @property
    def sequence(self) -> str:
        """The same for the same batches in the same order."""
        return self._sequence.hexdigest()
