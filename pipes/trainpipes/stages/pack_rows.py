"""Documents, and the rows of fixed length that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import Array, to_arrow
from trainpipes.columns.block import Block
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.blame import at_row
from trainpipes.kinds.stage import Stage
from trainpipes.stages.pack_fit import Placing
from trainpipes.stages.targets import IGNORED
from trainpipes.stages.token_columns import check_beside, ids_of, names_of, numbers_of

#: Columns of token ids and of what is made for them.
PACKED = ("input_ids", "labels", "position_ids", "segment_ids")

Overflow = Literal["split", "truncate", "drop", "raise"]


@dataclass(frozen=True)
class Documents:
    """Some documents, as flat columns.

    Args:
        columns: of each name the values of all documents, ``[tokens]``: "input_ids" int32, "labels"
            int32 if they are given, and what is packed along.
        starts: where each document starts, int64 ``[documents]``.
        lengths: tokens of each that are packed, int64 ``[documents]``.
        dropped: tokens of each that is left out as too long, 0 for the others, int64 ``[documents]``;
            None where there is none.
    """

    columns: dict[str, Array]
    starts: IntArray
    lengths: IntArray
    dropped: IntArray | None = None


def documents_of(
    block: Block, column: str, along: Sequence[str], overflow: Overflow, length: int, asker: Stage
) -> Documents:
    """The documents of some rows.

    Args:
        block: a row each.
        column: of token ids.
        along: other columns to pack.
        overflow: what becomes of those longer than ``length``.
        length: tokens of a packed row.
        asker: the stage, for messages.

    Raises:
        SchemaError: a column is not there, or holds something else.
        DataError: a null, an id beyond int32, columns of different lengths, or a document that is too
            long under "raise"; names the row.
    """
    ids, lengths = ids_of(block, column, asker, np.int32)
    columns = {"input_ids": ids.astype(np.int32, copy=False)}
    given = ["labels"] if "labels" in names_of(block, asker) else []
    for name in [*given, *along]:
        if name == "labels":
            values, own = ids_of(block, name, asker, np.int32)
            values = values.astype(np.int32, copy=False)
        else:
            values, own = numbers_of(block, name, asker)
        check_beside(block, name, own, column, lengths, asker)
        columns[name] = values
    starts = np.cumsum(lengths) - lengths
    longer = lengths > length
    if overflow != "split" and longer.any():
        if overflow == "raise":
            place = int(np.argmax(longer))
            message = (
                f"{asker}: documents must have at most {length} tokens, got one of {lengths[place]}; raise "
                'max_length, or pass overflow="split", "truncate" or "drop"'
            )
            raise at_row(message, asker, block.ids[place])
        if overflow == "drop":
            dropped = np.where(longer, lengths, 0)
            return Documents(columns, starts, lengths - dropped, dropped)
        lengths = np.minimum(lengths, length)
    return Documents(columns, starts, lengths)


def rows_of(
    documents: Documents, placing: Placing, first: int, stop: int, length: int, pad_id: int
) -> pa.Table:
    """Packed rows ``first`` to ``stop``: fixed-size lists of ``length`` numbers.

    Args:
        documents: that the rows are made of.
        placing: of their pieces.
        first: row.
        stop: the row after the last.
        length: tokens of a row.
        pad_id: what input_ids are padded with.
    """
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
