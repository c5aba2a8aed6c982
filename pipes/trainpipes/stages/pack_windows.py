"""Which documents are packed together: how many of those that wait, and which go on into the next epoch."""

from __future__ import annotations

import numpy as np

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import Array
from trainpipes.stages.pack_fit import Fit, Placing, best_fit, placed

#: Of a window of n documents, best-fit may leave up to n // SPARE to the next one.
SPARE = 16
#: Cells left empty, in rows, that are aimed at when a window's end is chosen. Where nearly none would be,
#: documents do not fit and cost a row more.
AIMED_AT = (0.08, 0.16, 0.30)
#: Numbers of documents that are tried where an epoch ends, at least, and times the documents.
FEWEST_TRIED, TRIED = 8, 1 << 12


def fit_a_row(lengths: IntArray, ends: IntArray, capacity: int, max_documents: int | None) -> Array:
    """Whether one row holds so many of the first documents, some of which have tokens."""
    tokens, documents = np.cumsum(lengths)[ends - 1], np.cumsum(lengths > 0)[ends - 1]
    fits: Array = (tokens > 0) & (tokens <= capacity) & (documents <= (max_documents or capacity))
    return fits


def best_window(
    lengths: IntArray, capacity: int, max_documents: int | None, begun: int = 0
) -> tuple[int, Placing]:
    """How many of n documents to pack, and their rows by best-fit.

    Of four numbers from n - n // 16 to n, the one that leaves the smallest share empty; else the
    last row is half empty on average.
    """
    least = min(len(lengths) - len(lengths) // SPARE + 1, len(lengths))
    numbers = np.arange(max(least, begun), len(lengths) + 1)
    left = -np.cumsum(lengths)[numbers - 1] % capacity
    tried = {len(numbers) - 1}
    for aim in AIMED_AT:
        tried.add(int(np.argmin((left - int(aim * capacity)) % capacity)))
    chosen = numbers[sorted(tried)]
    return _fullest(lengths, capacity, max_documents, chosen, best_fit, begun)


def joint_window(
    lengths: IntArray, capacity: int, max_documents: int | None, fit: Fit, begun: int
) -> tuple[int, Placing]:
    """How many of an epoch's last documents to pack, so that one row holds the others; and their
    rows. Of some numbers, the one that leaves the smallest share empty.
    """
    left = lengths.sum() - np.cumsum(lengths)
    documents = np.count_nonzero(lengths) - np.cumsum(lengths > 0)
    fits = (left <= capacity) & (documents <= (max_documents or capacity))
    least = max(int(np.argmax(fits)) + 1, begun) if lengths.any() else len(lengths)
    tries = max(FEWEST_TRIED, TRIED // len(lengths))
    numbers = len(lengths) - some_of(len(lengths) - least, tries)
    return _fullest(lengths, capacity, max_documents, numbers, fit, begun)


def some_of(most: int, count: int) -> IntArray:
    """At most ``count`` numbers from 0 to ``most``, evenly spread: int64, ascending."""
    return np.unique(np.arange(count, dtype=np.int64) * most // (count - 1))


def _fullest(
    lengths: IntArray, capacity: int, max_documents: int | None, numbers: IntArray, fit: Fit,
    begun: int,
) -> tuple[int, Placing]:  # fmt: skip
    tokens = np.cumsum(lengths)[numbers - 1]
    # The share of their rows that documents fill, best case first: it may be all that is looked at.
    hoped = _shares(tokens, -(-tokens // capacity))
    best = -1.0, 0, placed(lengths[:0], capacity, max_documents, fit)
    for k in np.argsort(-hoped, kind="stable").tolist():
        if hoped[k] > best[0]:
            number = int(numbers[k])
            placing = placed(lengths[:number], capacity, max_documents, fit, begun)
            share = float(_shares(tokens[k], np.array(len(placing))))
            if share > best[0]:
                best = share, number, placing
    return best[1], best[2]


def _shares(tokens: Array, rows: Array) -> Array:
    shares: Array = tokens / np.maximum(rows, 1)
    return shares
