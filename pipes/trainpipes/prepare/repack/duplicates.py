"""Which rows are there before, found by hashes of 128 bits on disk.

The hashes of each part of the input are sorted and kept. All parts' hashes of one range are then brought
together, range by range: of several equal ones the row with the lowest number stays. That two rows which
differ have the same 128 bits happens by chance once in 2^128 pairs: among 10 billion rows with a chance of
1.5 in 10^19, far below that of a memory error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.columns.content_hash import HashArray, row_hashes
from trainpipes.engine.layout import IntArray
from trainpipes.prepare.repack.temporary import TemporaryFiles

#: Bytes that an entry takes while its range is looked at.
ENTRY_BYTES = 128
#: Buckets of hashes, by their first bits: where each begins in a part's file is kept beside it.
BUCKET_BITS = 12


def hash_rows(table: pa.Table) -> HashArray:
    """Both hashes of each row, uint64 ``[rows, 2]``."""
    return np.stack([row_hashes(table, 1), row_hashes(table, 2)], axis=1)


def save_hashes(files: TemporaryFiles, stem: str, hashes: HashArray, first: int) -> int:
    """Keep the hashes of one part's rows, sorted, each once: ``stem.npy``, with ``stem-buckets.npy``; and
    the numbers of rows that the part has before: ``stem-dropped.npy``.

    Args:
        files: temporary files.
        stem: name of the files, without their ends.
        hashes: of its rows.
        first: number of its first row.

    Returns:
        How many rows the part has before.
    """
    entries = np.empty((len(hashes), 3), dtype=np.uint64)
    entries[:, :2], entries[:, 2] = hashes, np.arange(first, first + len(hashes))
    kept, dropped = _apart(entries)
    edges = np.arange(1 << BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - BUCKET_BITS)
    buckets = np.append(np.searchsorted(kept[:, 0], edges), len(kept))
    files.save_array(f"{stem}-dropped.npy", dropped)
    files.save_array(f"{stem}-buckets.npy", buckets.astype(np.int64))
    files.save_array(f"{stem}.npy", kept)
    return len(dropped)


def num_ranges(entries: int, most_bytes: int) -> int:
    """Of how many ranges each is small enough."""
    return max(1, min(entries, -(-entries * ENTRY_BYTES // max(1, most_bytes))))


def find_dropped(files: TemporaryFiles, stems: Sequence[str], number: int, ranges: int) -> IntArray:
    """Numbers of rows that another part has before, of one range of hashes, ascending.

    Args:
        files: temporary files.
        stems: of all parts' files.
        number: of the range.
        ranges: how many there are.
    """
    low, high = number * 2**64 // ranges, (number + 1) * 2**64 // ranges
    shift = 64 - BUCKET_BITS
    first, stop = low >> shift, ((high - 1) >> shift) + 1
    buckets = [own[[first, stop]] for own in files.arrays([f"{s}-buckets.npy" for s in stems])]
    starts, stops = np.array(buckets).T.tolist()
    found = []
    names = [f"{stem}.npy" for stem in stems]
    for entries in files.stretches(names, starts, stops, np.uint64, 3):
        hashes = entries[:, 0]
        begin = int(np.searchsorted(hashes, np.uint64(low)))
        end = len(hashes) if high == 2**64 else int(np.searchsorted(hashes, np.uint64(high)))
        found.append(np.array(entries[begin:end]))
    return _apart(np.concatenate(found))[1]


def _apart(entries: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], IntArray]:
    """The first of equal entries, sorted by hash; and the numbers of the rows of all others, ascending."""
    entries = entries[np.lexsort(entries.T[::-1])]
    again = np.zeros(len(entries), dtype=np.bool_)
    again[1:] = (entries[1:, :2] == entries[:-1, :2]).all(axis=1)
    return entries[~again], np.sort(entries[again, 2].astype(np.int64))
