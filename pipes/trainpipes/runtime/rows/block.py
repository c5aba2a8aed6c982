"""Rows that travel together, and what may be done with them without looking at one by itself.

A payload is one of

- ``pyarrow.Table``: columns, the built-in path;
- ``TensorRows``: tensors with a common first dimension (``from_tensors``);
- ``list``: opaque Python objects, one a row (``from_dataset``, or after a row function).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainpipes.arrays import to_arrow
from trainpipes.order import IntArray
from trainpipes.runtime.rows.fixed_lists import python_rows
from trainpipes.runtime.rows.joined import Joining
from trainpipes.runtime.rows.lazy_batches import late_if_small
from trainpipes.runtime.rows.lone_copy import copied, gathered

__all__ = ["Block", "Each", "Part", "Payload", "TensorRows"]


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
        return TensorRows(tuple(gathered(t, index) for t in self.tensors), self.names)

    def slice(self, start: int, stop: int) -> TensorRows:
        return TensorRows(tuple(t[start:stop] for t in self.tensors), self.names)

    def joined(self, others: Sequence[TensorRows]) -> TensorRows:
        """These rows and those of the others."""
        columns = zip(*(part.tensors for part in (self, *others)), strict=True)
        return TensorRows(tuple(torch.cat(column) for column in columns), self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The tensors of rows ``start`` to ``stop``, in memory that no other rows lie in. Costs these rows
        only."""
        return tuple(_part(tensor, start, stop) for tensor in self.tensors)

    def batches(self, edges: Sequence[int]) -> MutableSequence[Any]:
        """What ``default_collate`` makes of the rows of each micro-batch, cut at ``edges``."""

        def make(k: int) -> Any:
            parts = self.part(edges[k], edges[k + 1])
            return list(parts) if self.names is None else dict(zip(self.names, parts, strict=True))

        return late_if_small(make, len(edges) - 1, self.nbytes)

    def rows(self) -> list[Any]:
        columns = zip(*self.tensors, strict=True)
        if self.names is None:
            return list(columns)
        return [dict(zip(self.names, row, strict=True)) for row in columns]


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some rows: a copy, unless they are all that lies in the tensor's memory."""
    if stop - start == len(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return copied(tensor[start:stop])


Payload: TypeAlias = "pa.Table | TensorRows | list[Any]"


#: A number that all rows share, or one of each row: int64 ``[rows]``.
Each: TypeAlias = "int | IntArray"


@dataclass(frozen=True)
class Part:
    """Micro-batches of a block whose rows are in one payload.

    Args:
        data: the payload, which may have rows of others, too.
        index: places of their rows in it, int64 ``[rows]``; None for all of it.
        bounds: first row of each micro-batch among these, and the end, int64 ``[batches + 1]``.
    """

    data: Payload
    index: IntArray | None
    bounds: IntArray


class Block:
    """Rows that travel together. Gathered when somebody asks for them as a whole.

    Args:
        data: the rows.
        ids: number of each row in file order over all files, int64 ``[rows]``: who it is, for
            errors and for randomness by row.
        index: places of the rows in ``data``, int64 ``[rows]``, where they are yet to be gathered;
            None where ``data`` is just them.
        epoch: in which they are read.
        part: which one it is of those of the same id and epoch, where there may be several: a sampler
            may draw a row twice, and a document may be packed into several rows.
    """

    __slots__ = ("_data", "_index", "epoch", "ids", "part")

    def __init__(
        self,
        data: Payload,
        ids: IntArray,
        index: IntArray | None = None,
        *,
        epoch: Each = 0,
        part: Each = 0,
    ) -> None:
        self._data = data
        self._index = index
        self.ids = ids
        self.epoch = epoch
        self.part = part

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def data(self) -> Payload:
        """The rows, gathered."""
        if self._index is not None:
            self._data, self._index = take_payload(self._data, self._index), None
        return self._data

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, gathered; 0 for Python objects, of which that cannot be told."""
        return payload_bytes(self.data)

    @property
    def within(self) -> Payload:
        """What the rows, or the first of them, are picked from: for a look at their kind."""
        return self._data

    @property
    def has_columns(self) -> bool:
        """Whether the rows are Arrow's, told without gathering them."""
        return isinstance(self._data, pa.Table)

    def parts(self, bounds: IntArray) -> list[Part]:
        """The micro-batches cut at ``bounds`` int64 ``[batches + 1]``, in order, without gathering them
        where that can be."""
        return [Part(self._data, self._index, bounds)]

    def take(self, index: IntArray) -> Block:
        """The rows at ``index``, in that order."""
        below = index if self._index is None else self._index[index]
        epoch, part = _at(self.epoch, index), _at(self.part, index)
        return Block(self._data, self.ids[index], below, epoch=epoch, part=part)

    def slice(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop``, without a copy where the payload allows it."""
        rows = slice(start, stop)
        epoch, part = _at(self.epoch, rows), _at(self.part, rows)
        if self._index is not None:
            index = self._index[rows]
            return Block(self._data, self.ids[rows], index, epoch=epoch, part=part)
        data = slice_payload(self._data, start, stop)
        return Block(data, self.ids[rows], epoch=epoch, part=part)

    def rows(self) -> list[Any]:
        """One Python object a row: for Arrow rows a dict, as ``python_rows`` makes it."""
        data = self.data
        if isinstance(data, list):
            return data
        if isinstance(data, TensorRows):
            return data.rows()
        return python_rows(data)

    def with_data(self, data: Payload) -> Block:
        return Block(data, self.ids, epoch=self.epoch, part=self.part)

    def with_columns(self, change: Callable[[pa.Table], pa.Table]) -> Block:
        """Arrow rows with other columns, made without looking at any row."""
        assert isinstance(self._data, pa.Table)
        return Block(change(self._data), self.ids, self._index, epoch=self.epoch, part=self.part)

    def of_epoch(self, epoch: int) -> Block:
        """The same rows, read in an epoch."""
        return Block(self._data, self.ids, self._index, epoch=epoch, part=self.part)

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """All rows of the blocks, one after the other."""
        return blocks[0] if len(blocks) == 1 else _Joined(blocks)


class _Joined(Block):
    """The rows of several blocks, one after the other, which are gathered when they are asked for."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Block]) -> None:
        sizes = [len(block) for block in blocks]
        epoch = _joined([block.epoch for block in blocks], sizes)
        part = _joined([block.part for block in blocks], sizes)
        super().__init__([], np.concatenate([b.ids for b in blocks]), epoch=epoch, part=part)
        self._blocks: Sequence[Block] = blocks

    def _gather(self) -> None:
        if self._blocks:
            self._data = join_payloads([block.data for block in self._blocks])
            self._blocks = ()

    @property
    def data(self) -> Payload:
        self._gather()
        return self._data

    def parts(self, bounds: IntArray) -> list[Part]:
        if not self._blocks:
            return super().parts(bounds)
        found: list[Part] = []
        first = k = 0  # row of the block, and micro-batch, that come next
        for block in self._blocks:
            last = int(np.searchsorted(bounds, first + len(block), side="right")) - 1
            if last > k:  # some that are whole
                start, stop = int(bounds[k]) - first, int(bounds[last]) - first
                whole = stop - start == len(block)
                own = block if whole else block.slice(start, stop)
                found += own.parts(bounds[k : last + 1] - bounds[k])
                k = last
            first += len(block)
            if k + 1 < len(bounds) and bounds[k] < first < bounds[k + 1]:  # one that goes on
                start, stop = int(bounds[k]), int(bounds[k + 1])
                found.append(Part(self._between(start, stop), None, bounds[k : k + 2] - start))
                k += 1
        return found

    def _between(self, start: int, stop: int) -> Payload:
        """Rows ``start`` to ``stop``, gathered."""
        parts: list[Payload] = []
        first = 0
        for block in self._blocks:
            low, high = max(0, start - first), min(len(block), stop - first)
            if low < high or not (parts or start < stop):
                parts.append(block.slice(low, max(low, high)).data)
            first += len(block)
        return join_payloads(parts)

    def take(self, index: IntArray) -> Block:
        self._gather()
        return super().take(index)

    def slice(self, start: int, stop: int) -> Block:
        self._gather()
        return super().slice(start, stop)

    def with_columns(self, change: Callable[[pa.Table], pa.Table]) -> Block:
        if not self._blocks:
            return super().with_columns(change)
        return _Joined([block.with_columns(change) for block in self._blocks])

    def of_epoch(self, epoch: int) -> Block:
        self._gather()
        return super().of_epoch(epoch)

    @property
    def within(self) -> Payload:
        return self._blocks[0].within if self._blocks else self._data

    @property
    def has_columns(self) -> bool:
        blocks = self._blocks
        return all(block.has_columns for block in blocks) if blocks else super().has_columns


def _at(values: Each, rows: IntArray | slice) -> Each:
    return values if isinstance(values, int) else values[rows]


def _joined(values: Sequence[Each], sizes: Sequence[int]) -> Each:
    """Those of all blocks: one number where they share it."""
    first = values[0]
    if isinstance(first, int) and all(isinstance(v, int) and v == first for v in values):
        return first
    return np.concatenate(
        [np.broadcast_to(v, size) for v, size in zip(values, sizes, strict=True)]
    ).astype(np.int64, copy=False)


def take_payload(data: Payload, index: IntArray) -> Payload:
    """The rows at ``index``."""
    if isinstance(data, list):
        return [data[i] for i in index.tolist()]
    if isinstance(data, TensorRows):
        return data.take(index)
    return take_rows(data, index)


def take_rows(table: pa.Table, index: IntArray) -> pa.Table:
    """The rows of a table at ``index``."""
    places = to_arrow(index)
    try:
        return table.take(places)
    except (
        pa.ArrowNotImplementedError
    ):  # of views of text and bytes, whose rows Arrow cannot gather
        plain = [field.with_type(_PLAIN.get(field.type, field.type)) for field in table.schema]
        return table.cast(pa.schema(plain)).take(places).cast(table.schema)
    except (
        pa.ArrowInvalid
    ):  # several chunks, which Arrow would join, hold more than 32-bit offsets count
        columns = [_taken_by_chunk(column, index) for column in table.columns]
        return pa.table(columns, schema=table.schema)


def _taken_by_chunk(column: pa.ChunkedArray, index: IntArray) -> pa.Array:
    firsts = np.cumsum([0, *map(len, column.chunks)])
    chunk_of = np.searchsorted(firsts, index, side="right") - 1
    parts = [
        column.chunk(n).take(to_arrow(index[chunk_of == n] - firsts[n]))
        for n in np.unique(chunk_of).tolist()
    ]
    place = np.empty(len(index), dtype=np.int64)
    place[np.argsort(chunk_of, kind="stable")] = np.arange(len(index))
    return pa.concat_arrays(parts).take(to_arrow(place))


#: Types that hold what views hold, and whose rows Arrow can gather.
_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def payload_bytes(data: Payload) -> int:
    """Bytes of rows in memory; 0 for Python objects, of which that cannot be told."""
    if isinstance(data, list):
        return 0
    return int(data.nbytes)


def slice_payload(data: Payload, start: int, stop: int) -> Payload:
    """Rows ``start`` to ``stop``, views where the payload has any."""
    if isinstance(data, list):
        return data[start:stop]
    if isinstance(data, TensorRows):
        return data.slice(start, stop)
    return data.slice(start, stop - start)


def join_payloads(parts: Iterable[Payload], rows: int | None = None) -> Payload:
    """All rows of the payloads, one after the other; Arrow columns come out in one chunk.

    Args:
        parts: the payloads; Arrow ones are not held once the next one is taken.
        rows: how many there will be; counted if None.
    """
    if rows is None:
        parts = list(parts)
        rows = sum(map(len, parts))
    coming = iter(parts)
    joining: Joining | None = None
    others: list[Payload] = []
    for part in coming:
        if not isinstance(part, pa.Table):
            others = [part, *coming]
            break
        joining = joining or Joining(rows)
        joining.add(part)
        del part
    if joining is not None:
        if not others:
            return joining.table()
        others.insert(0, joining.table())
    tensors = [part for part in others if isinstance(part, TensorRows)]
    if len(tensors) == len(others):
        return tensors[0].joined(tensors[1:])
    return [row for part in others for row in Block(part, _no_ids).rows()]


_no_ids = np.empty(0, dtype=np.int64)


def batches_of(block: Block, bounds: IntArray) -> Iterable[list[Any]]:
    """The rows of each micro-batch as a list, cut at ``bounds`` int64 ``[batches + 1]``."""
    rows = block.rows()
    edges = bounds.tolist()
    for start, stop in pairwise(edges):
        yield rows[start:stop]
