"""Which rows are there before, found by hashes of 128 bits on disk.

The hashes of each part of the input are sorted and kept. All parts' hashes of one range are then brought
together, range by range: of several equal ones the row with the lowest number stays. That two rows which
differ have the same 128 bits happens by chance once in 2^128 pairs: among 10 billion rows with a chance of
1.5 in 10^19, far below that of a memory error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.order import IntArray
from trainpipes.prepare.repack.sorted_runs import save_array
from trainpipes.values.content_hash import HashArray, row_hashes

__all__ = ["DroppedRows", "find_dropped", "hash_rows", "num_ranges", "save_hashes"]

#: Bytes that an entry takes while its range is looked at.
ENTRY_BYTES = 128


def hash_rows(table: pa.Table) -> HashArray:
    """Both hashes of each row, uint64 ``[rows, 2]``."""
    return np.stack([row_hashes(table, 1), row_hashes(table, 2)], axis=1)


def save_hashes(stem: Path, hashes: HashArray, first: int, asker: str) -> None:
    """Keep the hashes of one part's rows, sorted, each once: ``stem.npy``; and the numbers of rows that
    the part has before: ``stem-dropped.npy``.

    Args:
        stem: path of both files, without their ends.
        hashes: of its rows.
        first: number of its first row.
        asker: for messages.
    """
    entries = np.empty((len(hashes), 3), dtype=np.uint64)
    entries[:, :2], entries[:, 2] = hashes, np.arange(first, first + len(hashes))
    kept, dropped = _apart(entries)
    save_array(stem.with_name(f"{stem.name}-dropped.npy"), dropped, asker)
    save_array(stem.with_suffix(".npy"), kept, asker)


def num_ranges(entries: int, most_bytes: int) -> int:
    """Of how many ranges each is small enough."""
    return max(1, min(entries, -(-entries * ENTRY_BYTES // max(1, most_bytes))))


def find_dropped(stems: Sequence[Path], number: int, ranges: int) -> IntArray:
    """Numbers of rows that another part has before, of one range of hashes.

    Args:
        stems: of all parts' files.
        number: of the range.
        ranges: how many there are.
    """
    low, high = number * 2**64 // ranges, (number + 1) * 2**64 // ranges
    found = [np.empty((0, 3), dtype=np.uint64)]
    for stem in stems:
        entries = np.load(stem.with_suffix(".npy"), mmap_mode="r")
        hashes = entries[:, 0]
        start = int(np.searchsorted(hashes, np.uint64(low)))
        stop = len(hashes) if high == 2**64 else int(np.searchsorted(hashes, np.uint64(high)))
        found.append(np.array(entries[start:stop]))
    return _apart(np.concatenate(found))[1]


def _apart(entries: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], IntArray]:
    """The first of equal entries, sorted by hash; and the numbers of the rows of all others, ascending."""
    entries = entries[np.lexsort(entries.T[::-1])]
    again = np.zeros(len(entries), dtype=np.bool_)
    again[1:] = (entries[1:, :2] == entries[:-1, :2]).all(axis=1)
    return entries[~again], np.sort(entries[again, 2].astype(np.int64))


class DroppedRows:
    """The rows that are left out, from files that each have some of their numbers, sorted.

    Args:
        files: paths.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def _opened(self) -> Iterator[IntArray]:
        return (np.load(path, mmap_mode="r") for path in self._files)

    def before(self, rows: IntArray) -> IntArray:
        """How many are left out before each of some rows, int64."""
        found = np.zeros(len(rows), dtype=np.int64)
        for own in self._opened():
            found += np.searchsorted(own, rows)
        return found

    def within(self, first: int, stop: int) -> IntArray:
        """Those from a row to another, sorted."""
        found = [np.empty(0, dtype=np.int64)]
        for own in self._opened():
            low, high = np.searchsorted(own, [first, stop])
            found.append(np.array(own[low:high]))
        return np.sort(np.concatenate(found))

    def among(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which of some rows are left out."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for own in self._opened():
            if len(own):
                found |= own[np.minimum(np.searchsorted(own, rows), len(own) - 1)] == rows
        return found
