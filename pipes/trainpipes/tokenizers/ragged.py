"""Rows of token ids of different lengths: a flat array and where rows start."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.columns.arrays import list_array, stretches
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths."""

    values: Ids
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @staticmethod
    def of_lengths(values: Ids, lengths: IntArray) -> Ragged:
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, offsets)

    @staticmethod
    def of_lists(rows: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        total = int(lengths.sum())
        values = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)
        return Ragged.of_lengths(values, lengths)

    @staticmethod
    def of_encodings(encodings: Sequence[Any]) -> Ragged:
        """Ids of ``tokenizers``' encodings: about 30 ns a token, 20 of them in making the lists."""
        values = array("i")
        for encoding in encodings:  # list by list: what has been read is freed while it is in cache
            values.fromlist(encoding.ids)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
        return Ragged.of_lengths(np.array(values, dtype=np.int32), lengths)

    def parts(self, starts: IntArray, lengths: IntArray) -> Ragged:
        return Ragged.of_lengths(self.values[stretches(starts, lengths)], lengths)

    def to_arrow(self) -> pa.ListArray:
        if self.offsets[-1] > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.offsets[-1]:,} tokens in {len(self):,} rows are more than one Arrow list "
                "array holds (2,147,483,647); tokenize after batch(), where fewer rows come at a time"
            )
        return list_array(self.values, self.lengths)

    def to_rows(self) -> list[Ids]:
        edges = self.offsets.tolist()
        return [self.values[a:b] for a, b in pairwise(edges)]


def assemble(
    segments: Sequence[Ragged],
    prefix: Sequence[int] = (),
    suffix: Sequence[int] = (),
    room: int | None = None,
    side: str = "right",
) -> tuple[Ragged, IntArray]:
    """Each row's segments joined, cut to ``room`` tokens, between prefix and suffix; and the tokens
    of each piece, these included, int64 ``[rows, pieces]``.
    """
    count = len(segments[0])
    lengths = np.stack([segment.lengths for segment in segments], axis=1)
    total = lengths.sum(axis=1)
    if len(segments) == 1 and (room is None or not (total > room).any()):
        return _framed(segments[0], prefix, suffix)
    # Each row as a range of its joined segments, and of each segment what lies within it.
    low, high = np.zeros_like(total), total
    if room is not None and side == "right":
        high = np.minimum(total, room)
    elif room is not None:
        low = np.maximum(total - room, 0)
    end = np.cumsum(lengths, axis=1)
    start = end - lengths
    first = np.clip(low[:, None], start, end)
    last = np.clip(high[:, None], start, end)

    source = [np.asarray(prefix, dtype=np.int32), *(s.values for s in segments)]
    source.append(np.asarray(suffix, dtype=np.int32))
    base = np.cumsum([0, *map(len, source)])
    pieces = np.empty((count, len(segments) + 2), dtype=np.int64)
    starts = np.empty_like(pieces)
    pieces[:, 0], pieces[:, -1] = len(prefix), len(suffix)
    starts[:, 0], starts[:, -1] = 0, base[-2]
    for k, segment in enumerate(segments):
        pieces[:, k + 1] = last[:, k] - first[:, k]
        starts[:, k + 1] = base[k + 1] + segment.offsets[:-1] + first[:, k] - start[:, k]
    joined = Ragged(np.concatenate(source), base).parts(starts.reshape(-1), pieces.reshape(-1))
    return Ragged.of_lengths(joined.values, pieces.sum(axis=1)), pieces


def _framed(rows: Ragged, prefix: Sequence[int], suffix: Sequence[int]) -> tuple[Ragged, IntArray]:
    """What ``assemble`` makes of whole rows, at a third of its cost."""
    pieces = np.empty((len(rows), 3), dtype=np.int64)
    pieces[:] = len(prefix), 0, len(suffix)
    pieces[:, 1] = rows.lengths
    if not prefix and not suffix:
        return rows, pieces
    lengths = pieces.sum(axis=1)
    framed = Ragged.of_lengths(np.empty(int(lengths.sum()), dtype=np.int32), lengths)
    own = np.ones(len(framed.values), dtype=bool)
    places = [framed.offsets[:-1] + k for k in range(len(prefix))]
    places += [framed.offsets[1:] - len(suffix) + k for k in range(len(suffix))]
    for place, token in zip(places, (*prefix, *suffix), strict=True):
        framed.values[place] = token
        own[place] = False
    framed.values[own] = rows.values
    return framed, pieces
