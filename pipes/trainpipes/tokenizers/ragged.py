"""Rows of token ids of different lengths: a flat array and where rows start."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import list_array, stretches
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
    def of_lists(rows: Iterable[list[int]]) -> Ragged:
        values, lengths = array("i"), array("q")
        for row in rows:  # list by list: what has been read is freed while it is in cache
            values.fromlist(row)
            lengths.append(len(row))
        return Ragged.of_lengths(np.array(values, np.int32), np.array(lengths, np.int64))

    @staticmethod
    def of_rows(rows: Sequence[npt.NDArray[Any]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        values = np.concatenate(rows) if rows else lengths
        return Ragged.of_lengths(values.astype(np.int32, copy=False), lengths)

    def parts(self, starts: IntArray, lengths: IntArray) -> Ragged:
        return Ragged.of_lengths(self.values[stretches(starts, lengths)], lengths)

    def to_arrow(self) -> pa.ListArray:
        if self.offsets[-1] > np.iinfo(np.int32).max:
            said = f"{self.offsets[-1]:,} tokens in {len(self):,} rows are more than an Arrow array holds"
            raise DataError(f"{said}; tokenize after batch(), where fewer rows come at a time")
        return list_array(self.values, self.lengths)

    def to_rows(self) -> list[Ids]:
        edges = self.offsets.tolist()
        return [self.values[a:b] for a, b in pairwise(edges)]


def assemble(
    segments: Sequence[Ragged], prefix: Sequence[int] = (), suffix: Sequence[int] = (),
    room: int | IntArray | None = None, side: str = "right",
) -> tuple[Ragged, IntArray]:  # fmt: skip
    """Each row's segments joined, cut to ``room`` tokens, between prefix and suffix; and the tokens
    of each piece, these included, int64 ``[rows, pieces]``.
    """
    kept, counts = _cut(segments, room, side)
    rows, around = len(counts), (*prefix, *suffix)
    pieces = np.empty((rows, len(kept) + 2), dtype=np.int64)
    pieces[:, 0], pieces[:, 1:-1], pieces[:, -1] = len(prefix), counts, len(suffix)
    if len(kept) == 1:
        if not around:
            return kept[0], pieces
        edges = np.stack([kept[0].offsets[:-1], kept[0].offsets[1:]], axis=1).reshape(-1)
        places = np.repeat(edges, np.tile([len(prefix), len(suffix)], rows))
        values = np.insert(kept[0].values, places, np.tile(around, rows))
    else:  # of each token, the piece that it is of: those of a piece stand in the order of rows
        numbers = np.tile(np.arange(pieces.shape[1], dtype=np.uint8), rows)
        piece = np.repeat(numbers, pieces.reshape(-1))
        values = np.empty(len(piece), dtype=np.int32)
        parts = [np.tile(prefix, rows), *(k.values for k in kept), np.tile(suffix, rows)]
        for number, part in enumerate(parts):
            values[piece == number] = part
    return Ragged.of_lengths(values, pieces.sum(axis=1)), pieces


def _cut(
    segments: Sequence[Ragged], room: int | IntArray | None, side: str
) -> tuple[Sequence[Ragged], IntArray]:
    lengths = np.stack([segment.lengths for segment in segments], axis=1)
    total = lengths.sum(axis=1)
    if room is None or (total <= room).all():
        return segments, lengths
    ends, most = np.cumsum(lengths, axis=1), np.minimum(total, room)
    low = total - most if side == "left" else np.zeros_like(total)  # of the joined segments
    first = np.clip(low[:, None], ends - lengths, ends)
    counts = np.clip((low + most)[:, None], ends - lengths, ends) - first
    starts = first - (ends - lengths) + np.stack([s.offsets[:-1] for s in segments], axis=1)
    whole = (counts == lengths).all(axis=0)
    each = enumerate(segments)
    return [s if whole[k] else s.parts(starts[:, k], counts[:, k]) for k, s in each], counts
