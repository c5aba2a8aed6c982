"""Where the rows of a batch stand: file, row group and row of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from trainpipes._internal.secrets import hidden
from trainpipes._internal.table import table
from trainpipes._internal.text import cut
from trainpipes.columns.block import WHOLE, Block, Pieces
from trainpipes.columns.payload import payload_rows
from trainpipes.columns.run import unplaced
from trainpipes.engine.planning.chain import Inputs
from trainpipes.engine.shards.items import ItemRows
from trainpipes.kinds.source import Place, Reader, RowMixture, RowSource, read_rows
from trainpipes.kinds.stage_kinds import RunStage

#: Characters of a row's text in a table.
TEXT = 40


@dataclass(frozen=True, repr=False)
class RowPlace(Place):
    """Where a row of a batch comes from.

    Attributes:
        path: the file; None where rows are of no file.
        row_group: of a Parquet file, from 0; of rows in memory, their block.
        row: in the file, from 0; in the data set or stream where there is no file; of an image, None.
        source: its name in a ``mix``, or its number in a ``zip``.
        index: which row of the batch it is, or is part of, from 0.
        epoch: in which it is read, from 0; in a ``mix`` that of its source.
        segment: of a packed row, which of its documents this is: the number in ``segment_ids``, from 1.
        tokens: of a packed row, the document's first token that is in it, and the one after the last.
    """

    index: int = 0
    epoch: int = 0
    segment: int | None = None
    tokens: tuple[int, int] | None = None


class Provenance(list[RowPlace]):
    """Where the rows of one batch come from: a ``RowPlace`` for each, in the batch's order. Of a packed row
    there is one for each of its documents, of a row of ``zip`` one for each source.

    Printed, it is a table, with files as they stand in the folder that all of them have in common.
    """

    def __init__(self, rows: ItemRows, inputs: Inputs) -> None:
        super().__init__()
        self._inputs = inputs
        pieces = Pieces.whole(rows.ids, rows.epochs) if rows.pieces is None else rows.pieces
        ids, epochs, starts, lengths, bounds = (column.tolist() for column in pieces)
        self._ids: list[int] = []  # of each place
        for index, (first, stop) in enumerate(pairwise(bounds)):
            for n in range(first, stop):
                segment = tokens = None
                if lengths[n] != WHOLE:
                    segment, tokens = n - first + 1, (starts[n], starts[n] + lengths[n])
                for p in inputs.places_of(ids[n]):
                    place = (p.path, p.row_group, p.row, p.source)
                    self.append(RowPlace(*place, index, epochs[n], segment, tokens))
                    self._ids.append(ids[n])

    def __repr__(self) -> str:
        return self.table([])

    @cached_property
    def texts(self) -> list[str]:
        """The first text among the columns of each place's row, as its source gives it; "" where it has none,
        or where a row can't be read by its number (streams). Reads these rows."""
        with ExitStack() as opened:
            readers: dict[int, Reader] = {}
            rows = sorted(set(self._ids))  # those of a row group one after the other
            found = {row: _text_of(self._inputs, row, readers, opened) for row in rows}
        return [found[row] for row in self._ids]

    def table(self, texts: Sequence[str]) -> str:
        """The places as a table of text, with the columns that tell them apart, and files as they stand in
        the folder that all of them have in common.

        Args:
            texts: the start of one for each place; none to leave that column out.
        """
        columns: dict[str, list[str]] = {"in batch": [str(p.index) for p in self]}
        paths = [hidden(place.path) for place in self if place.path is not None]
        prefix = os.path.commonprefix(paths)  # noqa: RUF071  which is cut at a slash
        folder = prefix[: prefix.rfind("/") + 1]
        for name, title in TITLES.items():
            values = [getattr(place, name) for place in self]
            if name == "path":
                values = [v and hidden(v)[len(folder) :] for v in values]
            if any(value is not None for value in values):
                columns[title] = ["" if v is None else _said(v) for v in values]
        if any(texts):
            columns["text"] = [cut(" ".join(text[: 2 * TEXT].split()), TEXT) for text in texts]
        return table([list(columns), *zip(*columns.values(), strict=True)])


#: Titles of a table's columns, by what they show.
TITLES = {
    "segment": "segment",
    "source": "source",
    "path": "file",
    "row_group": "row group",
    "row": "row",
    "tokens": "tokens",
    "epoch": "epoch",
}


def _said(value: Any) -> str:
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value)


def _text_of(inputs: Inputs, row: int, readers: dict[int, Reader], opened: ExitStack) -> str:
    """The first text of a row, as its source gives it; "" where there is none.

    Args:
        inputs: where the rows are.
        row: its number there.
        readers: by source, those that were opened; one more may be.
        opened: closes them.
    """
    if isinstance(inputs.source, RowMixture):
        inputs, row, _ = inputs.source.where(inputs, row)
    source = inputs.source
    if not isinstance(source, RowSource):
        return ""
    if id(source) not in readers:
        readers[id(source)] = reader = source.reader()
        if reader is not source:
            opened.callback(reader.close)
    block, own = inputs.blocks.where(row)
    data = read_rows(source, readers[id(source)], block, own, own + 1)
    late = inputs.chain.opener.late()
    if isinstance(late, RunStage):
        data = late.process(unplaced(Block(data, np.array([row], dtype=np.int64)))).block.data
    first = payload_rows(data)[0]
    values = first.values() if isinstance(first, dict) else [first]
    return next((value for value in values if isinstance(value, str)), "")
