"""Rows that travel together, and what may be done with them without looking at one by itself.

A payload is one of

- ``pyarrow.Table``: columns, the built-in path;
- ``TensorRows``: tensors with a common first dimension (``from_tensors``);
- ``list``: opaque Python objects, one a row (``from_dataset``, or after a row function).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainpipes.order import IntArray

__all__ = ["Block", "Payload", "TensorRows"]


@dataclass(frozen=True)
class TensorRows:
    """Rows of several tensors that share their first dimension.

    Args:
        tensors: each ``[rows, ...]``.
        names: names of the tensors where a row is a dict; None where it is a tuple.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] | None

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])

    def take(self, index: IntArray) -> TensorRows:
        rows = torch.from_numpy(np.ascontiguousarray(index))
        return TensorRows(tuple(t.index_select(0, rows) for t in self.tensors), self.names)

    def slice(self, start: int, stop: int) -> TensorRows:
        return TensorRows(tuple(t[start:stop] for t in self.tensors), self.names)

    def rows(self) -> list[Any]:
        columns = zip(*self.tensors, strict=True)
        if self.names is None:
            return list(columns)
        return [dict(zip(self.names, row, strict=True)) for row in columns]


Payload: TypeAlias = "pa.Table | TensorRows | list[Any]"


@dataclass(frozen=True)
class Block:
    """Rows that travel together.

    Args:
        data: the rows.
        ids: number of each row in file order over all files, int64 ``[rows]``: who it is, for
            errors and for randomness by row.
    """

    data: Payload
    ids: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: IntArray) -> Block:
        """The rows at ``index``, in that order."""
        data: Payload
        if isinstance(self.data, list):
            data = [self.data[i] for i in index.tolist()]
        else:
            data = self.data.take(index)
        return Block(data, self.ids[index])

    def slice(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop``, without a copy where the payload allows it."""
        data: Payload
        if isinstance(self.data, list):
            data = self.data[start:stop]
        elif isinstance(self.data, TensorRows):
            data = self.data.slice(start, stop)
        else:
            data = self.data.slice(start, stop - start)
        return Block(data, self.ids[start:stop])

    def rows(self) -> list[Any]:
        """One Python object a row: a dict of Python values for Arrow rows."""
        if isinstance(self.data, list):
            return self.data
        if isinstance(self.data, TensorRows):
            return self.data.rows()
        return list(self.data.to_pylist())

    def with_data(self, data: Payload) -> Block:
        return Block(data, self.ids)

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """All rows of the blocks, one after the other."""
        if len(blocks) == 1:
            return blocks[0]
        ids = np.concatenate([block.ids for block in blocks])
        return Block(join_payloads([block.data for block in blocks]), ids)


def join_payloads(parts: Sequence[Payload]) -> Payload:
    """All rows of the payloads, one after the other; Arrow columns come out in one chunk."""
    tables = [part for part in parts if isinstance(part, pa.Table)]
    if len(tables) == len(parts):
        return pa.concat_tables(tables).combine_chunks()
    tensors = [part for part in parts if isinstance(part, TensorRows)]
    if len(tensors) == len(parts):
        columns = zip(*(part.tensors for part in tensors), strict=True)
        return TensorRows(tuple(torch.cat(column) for column in columns), tensors[0].names)
    return [row for part in parts for row in Block(part, _no_ids).rows()]


_no_ids = np.empty(0, dtype=np.int64)


def batches_of(block: Block, bounds: IntArray) -> Iterable[list[Any]]:
    """The rows of each micro-batch as a list, cut at ``bounds`` int64 ``[batches + 1]``."""
    rows = block.rows()
    edges = bounds.tolist()
    for start, stop in pairwise(edges):
        yield rows[start:stop]
