"""Pairs of texts, put together as a post-processor says: ids and type ids, a run at a time.

``tokenizers`` can do it too, but where it cuts a pair it also makes all the pieces that are left
over: 50 times as slow for texts much longer than ``max_length``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.tokenizers.ragged import Ragged, assemble


@dataclass(frozen=True)
class Frame:
    """What stands around and between two texts.

    Args:
        order: which text comes first, and which second: (0, 1) or (1, 0).
        ids: special tokens before, between and behind.
        types: type ids of what is before, of one text, between, of the other, behind.
    """

    order: tuple[int, int]
    ids: tuple[list[int], list[int], list[int]]
    types: tuple[int, int, int, int, int]

    @staticmethod
    def of(probe: Any) -> Frame | None:
        """From the encoding of two texts of one token each; None if each does not stand there just
        once, or special tokens side by side have different type ids."""
        texts = list(probe.sequence_ids)
        plain = list(probe.special_tokens_mask).count(0)
        if plain != 2 or texts.count(0) != 1 or texts.count(1) != 1:
            return None
        low, high = sorted((texts.index(0), texts.index(1)))
        cuts = [slice(0, low), slice(low, low + 1), slice(low + 1, high), slice(high, high + 1)]
        cuts.append(slice(high + 1, None))
        types = [set(probe.type_ids[cut]) or {0} for cut in cuts]
        if any(len(found) > 1 for found in types):
            return None
        before, first, between, second, behind = (found.pop() for found in types)
        ids = (probe.ids[cuts[0]], probe.ids[cuts[2]], probe.ids[cuts[4]])
        order = (texts[low], texts[high])
        return Frame(order, ids, (before, first, between, second, behind))

    @property
    def special(self) -> int:
        """How many special tokens there are."""
        return sum(map(len, self.ids))

    def join(self, pair: tuple[Ragged, Ragged]) -> tuple[Ragged, Ragged]:
        """Ids and type ids of the pairs."""
        before, between, behind = self.ids
        rows, count = len(pair[0]), len(between)
        middle = np.tile(np.asarray(between, dtype=np.int32), rows)
        joint = Ragged(middle, np.arange(rows + 1, dtype=np.int64) * count)
        segments = [pair[self.order[0]], joint, pair[self.order[1]]]
        ids, pieces = assemble(segments, before, behind)
        kinds = np.tile(np.asarray(self.types, dtype=np.int32), rows)
        return ids, Ragged(np.repeat(kinds, pieces.reshape(-1)), ids.offsets)


def longest_first(first: Ragged, second: Ragged, room: int, side: Side) -> tuple[Ragged, Ragged]:
    """Cut pairs to ``room`` tokens together: the longer text down to the other's length, then both.
    Of an odd number of tokens the one that was longer, else the second, keeps one more.
    """
    a, b = first.lengths, second.lengths
    short, long = np.minimum(a, b), np.maximum(a, b)
    too_long = short + long > room
    kept_short = np.where(too_long, np.minimum(short, room // 2), short)
    kept_long = np.where(too_long, room - kept_short, long)
    swapped = a > b
    kept_a = np.where(swapped, kept_long, kept_short)
    kept_b = np.where(swapped, kept_short, kept_long)
    return _cut(first, kept_a, side), _cut(second, kept_b, side)


def _cut(rows: Ragged, kept: IntArray, side: Side) -> Ragged:
    """The first tokens of each row, or the last ones if the left side is cut."""
    if not (kept < rows.lengths).any():
        return rows
    starts = rows.offsets[:-1] if side == "right" else rows.offsets[1:] - kept
    ends = np.cumsum(kept)
    index = np.repeat(starts - (ends - kept), kept) + np.arange(ends[-1] if len(ends) else 0)
    return Ragged.of_lengths(rows.values[index], kept)
