"""Documents, and the rows of fixed length that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import Array, to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.stages.pack_fit import Placing
from trainpipes.stages.targets import IGNORED

#: Columns of token ids and of what is made for them.
PACKED = ("input_ids", "labels", "position_ids", "segment_ids")

Overflow = Literal["split", "truncate", "drop", "raise"]


@dataclass(frozen=True)
class Documents:
    """Documents as flat columns ``[tokens]``, with the start and length of each; and the tokens of
    those that are left out as too long, 0 for the others (None if there are none).
    """

    columns: dict[str, Array]
    starts: IntArray
    lengths: IntArray
    dropped: IntArray | None = None


def rows_of(
    documents: Documents, placing: Placing, first: int, stop: int, length: int, pad_id: int
) -> pa.Table:
    """Packed rows ``first`` to ``stop``: fixed-size lists of ``length`` numbers."""
    low, high = int(placing.bounds[first]), int(placing.bounds[stop])
    lengths = placing.length[low:high]
    from_ = documents.starts[placing.document[low:high]] + placing.start[low:high]
    places = placing.bounds[first : stop + 1] - low
    number = np.arange(1, high - low + 1) - np.repeat(places[:-1], np.diff(places))

    # What is left of a row is a piece too, numbered 0, of tokens that are painted over.
    left = length - np.add.reduceat(lengths, places[:-1])
    short = left > 0
    if short.any():
        at = places[1:][short]
        lengths = np.insert(lengths, at, left[short])
        from_ = np.insert(from_, at, 0)
        number = np.insert(number, at, 0)
    ends = np.cumsum(lengths)
    before = ends - lengths
    padding = _ranges(before[number == 0], lengths[number == 0])

    total = int(ends[-1])
    kind = np.int32 if max(total, int(documents.starts[-1]) + length) < 2**31 else np.int64
    cells: Array = np.arange(total, dtype=kind)
    index: Array = np.repeat((from_ - before).astype(kind), lengths)
    index += cells
    cells -= np.repeat(before.astype(kind), lengths)
    cells[padding] = 0

    def column(values: Array, fill: int) -> Array:
        found: Array = values.take(index, mode="clip")
        found[padding] = fill
        return found

    ids = column(documents.columns["input_ids"], pad_id)
    given = documents.columns.get("labels")
    labels = ids.copy() if given is None else column(given, IGNORED)
    labels[before] = IGNORED
    labels[padding] = IGNORED
    columns = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": cells.astype(np.int32, copy=False),
        "segment_ids": np.repeat(number.astype(np.int32), lengths),
    }
    for name, values in documents.columns.items():
        if name not in columns:
            columns[name] = column(values, 0)
    made = {
        name: pa.FixedSizeListArray.from_arrays(to_arrow(values), length)
        for name, values in columns.items()
    }
    return pa.table(made)


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """The places of several stretches, one after the other."""
    ends = np.cumsum(counts)
    places: IntArray = np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())
    return places
