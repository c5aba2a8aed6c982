from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainpipes.columns.arrays import parts_of
from trainpipes.columns.payload import Payload, join_payloads, take_payload
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.sources.combined.joined_input import Cut, JoinedInput, JoinedRows, JoiningSource
from trainpipes.sources.files.row_names import file_names


class Concat(JoiningSource):
    """The rows of several pipelines, one after the other, as one source.

    Each pipeline needs a source whose blocks are known in advance, and stages that keep all rows, such as
    ``select``, or ``take`` and ``skip``. A column's types are widened; Python objects and tensors become
    columns where another source gives columns.

    Args:
        pipelines: in this order, one by one or in a list.

    Raises:
        SchemaError: two pipelines have different columns or types; names both.

    >>> import pyarrow as pa, trainpipes as tp
    >>> old, new = tp.from_arrow(pa.table({"x": [1, 2]})), tp.from_arrow(pa.table({"y": [3]}))
    >>> list(tp.concat(old, new.rename({"y": "x"})))
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """

    def rows_of(self, parts: Sequence[JoinedInput]) -> JoinedRows:
        if all(isinstance(part.source, RandomAccessSource) for part in parts):
            return JoinedByNumber(self, parts)
        return Joined(self, parts)


class Joined(JoinedRows):
    def __init__(self, stage: JoiningSource, parts: Sequence[JoinedInput]) -> None:
        super().__init__(stage, parts)
        self._first_block = np.cumsum([0, *(len(part.lengths) for part in parts)])
        self.lengths = np.concatenate([part.lengths for part in parts])
        rows = [int(part.edges[-1]) for part in parts]
        self.firsts: IntArray = np.cumsum([0, *rows], dtype=np.int64)
        sizes = [part.source.row_bytes for part in parts]
        if sum(rows) and None not in sizes:
            total = sum(n * size for n, size in zip(rows, sizes, strict=True) if size is not None)
            self.row_bytes = total / sum(rows)
        blocks = [part.block_bytes for part in parts]
        if all(own is not None for own in blocks):
            self.block_bytes = np.concatenate(blocks)
        self._names: list[str] = []
        files = []
        for part in parts:
            own = part.source.file_of_block
            files.append((np.zeros_like(part.lengths) if own is None else own) + len(self._names))
            self._names += [f"{part.number}/{name}" for name in file_names(part.inputs)]
        self.file_of_block: IntArray = np.concatenate(files)

    def relative_names(self) -> list[str]:
        return self._names

    def cut(self, block: int, start: int, stop: int) -> list[Cut]:
        part, own = self.where(block)
        return [Cut(part, int(self.firsts[part.number]), [(own, start, stop)])]

    def where(self, block: int) -> tuple[JoinedInput, int]:
        number = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return self.parts[number], block - int(self._first_block[number])

    def place(self, block: int, row: int) -> Place:
        part, own = self.where(block)
        return part.place(int(part.edges[own]) + row)

    def places(self, block: int, row: int) -> list[Place]:
        part, own = self.where(block)
        return part.places(int(part.edges[own]) + row)

    def block_key(self, block: int) -> Any:
        part, own = self.where(block)
        return part.block_key(own)

    def describe(self) -> list[tuple[str, str]]:
        lines = [("sources", f"{len(self.parts)}, one after the other")]
        return [*lines, *(line for part in self.parts for line in part.describe())]


class JoinedByNumber(Joined, RandomAccessSource):
    def take(self, index: IntArray) -> Payload:
        parts, back = parts_of(self.firsts, index)
        found = [self.parts[n].take(places, int(self.firsts[n])) for n, places in parts]
        if back is None:
            return found[0]
        return take_payload(join_payloads(found), back) if found else []
