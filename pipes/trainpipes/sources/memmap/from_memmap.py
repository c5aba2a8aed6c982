from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import one_chunk, to_arrow
from trainpipes.columns.columns import from_columns
from trainpipes.columns.content import short_digest
from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors.text import amount
from trainpipes.interfaces.read_columns import Ragged
from trainpipes.interfaces.source import Place, RandomAccessSource, even_blocks
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources.files.file_list import digests
from trainpipes.sources.memmap.dataset import MemmapDataset, check_options
from trainpipes.sources.memmap.manifest import Array

#: Bytes and rows of a block, at most: pieces that a shuffle within a buffer puts in another order.
BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 8192


class NarrowRows(TensorRows):
    """int64 when they are looked at; until then as narrow as in their file."""

    arrays: list[Array]

    def __init__(self, arrays: list[Array], names: tuple[str, ...]) -> None:
        vars(self).update(arrays=arrays, names=names)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.part(0, len(self))

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def nbytes(self) -> int:
        return 8 * sum(array.size for array in self.arrays)

    def take(self, index: IntArray) -> TensorRows:
        return NarrowRows([array[index] for array in self.arrays], self.names or ())

    def slice(self, start: int, stop: int) -> TensorRows:
        return NarrowRows([array[start:stop] for array in self.arrays], self.names or ())

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        parts = [array[start:stop].astype(np.int64, order="C") for array in self.arrays]
        return tuple(map(torch.from_numpy, parts))


class FromMemmap(Source, random_access=True):
    """Rows of memory-mapped files: dicts or tuples of tensors; with a ragged column, rows as Arrow.

    Args:
        path, columns, dtype, length, labels: as in ``read_memmap``.

    >>> import numpy as np, pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "squares.memmap"
    >>> _ = tp.write_memmap(path, {"x": np.arange(4), "y": np.arange(4) ** 2})
    >>> list(tp.from_memmap(path).batch(2).collate())[1]
    {'x': tensor([2, 3]), 'y': tensor([4, 9])}
    """

    free = frozenset({"path"})

    path: Any
    _: KW_ONLY
    columns: Sequence[str] | None = None
    dtype: Any = None
    length: int | None = None
    labels: bool = False

    def check(self) -> None:
        self._set(**check_options(**self.options))

    def open(self) -> MemmapSource:
        return MemmapSource(MemmapDataset(**self.options))


class MemmapSource(RandomAccessSource):
    """Rows of a ``MemmapDataset``, by number."""

    by_number = True
    holds_numbers = True

    def __init__(self, dataset: MemmapDataset) -> None:
        self._dataset = dataset
        self.row_bytes = dataset.row_bytes or None
        block_rows = int(min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1.0, dataset.row_bytes))))
        edges = [even_blocks(file.rows, block_rows) for file in dataset.files]
        self._begins = np.concatenate([e[:-1] for e in edges])
        self.lengths = np.concatenate([np.diff(e) for e in edges])
        self.file_of_block: IntArray = np.repeat(
            np.arange(len(edges), dtype=np.int64), [len(e) - 1 for e in edges]
        )
        ragged = [c.values for f in dataset.files for c in f.columns if c.offsets is not None]
        many = any(len(values) >= 1 << 31 for values in ragged)
        self._list = pa.LargeListArray if many else pa.ListArray
        self._offset = np.int64 if many else np.int32

    def read(self, block: int, start: int, stop: int) -> Payload:
        file = self._dataset.files[int(self.file_of_block[block])]
        file.check()
        columns = file.columns
        first = int(self._begins[block])
        chosen = [columns[number] for number in self._dataset.chosen]
        return self._payload([column.slice(first + start, first + stop) for column in chosen])

    def take(self, index: IntArray) -> Payload:
        files = self._dataset.files
        touched = np.searchsorted(self._dataset.firsts, index, side="right") - 1
        for number in np.unique(touched).tolist() if len(files) > 1 else [0]:
            files[number].check()
        return self._payload([self._dataset.column_at(n, index) for n in self._dataset.chosen])

    def _payload(self, columns: list[Array | Ragged]) -> Payload:
        dataset = self._dataset
        names = tuple(column.name for column in dataset.columns)
        if any(column.ragged for column in dataset.columns):
            return from_columns(dict(zip(names, map(self._arrow, columns), strict=True)), self)
        # What is mapped cannot be written, and a tensor can: a copy.
        own: list[Array] = [np.require(column, requirements=("C", "W")) for column in columns]
        if own[0].dtype != dataset.columns[0].dtype:
            return NarrowRows(own, names)
        tensors = tuple(map(torch.from_numpy, own))
        return TensorRows(tensors, None if dataset.layout == "tuple" else names)

    def _arrow(self, column: Array | Ragged) -> Any:
        if not isinstance(column, Ragged):
            return column
        offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(self._offset)
        values = one_chunk(from_columns({"": column.values}, self).column(0))
        return self._list.from_arrays(to_arrow(offsets), values)

    def will_need(self, start: int, stop: int) -> None:
        dataset = self._dataset
        file = int(np.searchsorted(dataset.firsts, start, side="right")) - 1
        first = int(dataset.firsts[file])
        for number in dataset.chosen:
            dataset.files[file].columns[number].will_need(start - first, stop - first)

    def place(self, block: int, row: int) -> Place:
        path = self._dataset.paths[int(self.file_of_block[block])]
        return Place(path, row=int(self._begins[block]) + row)

    def relative_names(self) -> list[str]:
        return self._dataset.relative_names()

    def fingerprint(self) -> dict[str, Any]:
        files = self._dataset.files
        return {
            "files": len(files),
            "rows": len(self._dataset),
            "columns": [str(c) for c in self._dataset.columns],
            **({"names": digests(self.relative_names())} if len(files) > 1 else {}),
            "digest": short_digest(json.dumps([file.identity for file in files]).encode()),
        }

    def describe(self) -> list[tuple[str, str]]:
        dataset = self._dataset
        lines = [("memory map", f"{len(dataset.files):,} file{'s' * (len(dataset.files) > 1)}")]
        lines.append(("columns", ", ".join(map(str, dataset.columns))))
        lines.append(("rows", f"{len(dataset):,} of {amount(dataset.row_bytes)}"))
        return lines

    def __repr__(self) -> str:
        return "from_memmap()"
