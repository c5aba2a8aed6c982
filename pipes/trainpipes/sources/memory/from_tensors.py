"""``from_tensors``: rows of tensors in memory, as ``TensorDataset`` has them."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trainpipes._internal.text import shown
from trainpipes.columns.content import tensor_digest
from trainpipes.columns.lone_copy import gathered
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.kinds.stage_kinds import Source

BLOCK_ROWS = 8192


class FromTensors(Source):
    """Rows of tensors that share their first dimension.

    Out: tuples of tensors, or dicts where the tensors are given by name. Cursor: a row number. Costs
    the tensors; batches are gathered, not stacked row by row. The first state costs one pass over them,
    about 1 GB/s in each thread, since a state knows tensors by all of their numbers.

    Args:
        tensors: each ``[N, ...]``, as tensors, arrays or lists of numbers.
        names: a name for each, or None for tuples.

    Raises:
        ConfigError: first dimensions differ.

    >>> import torch, trainpipes as tp
    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    >>> list(tp.from_tensors(x, y).batch(2).collate())[1]
    [tensor([[4., 5.]]), tensor([0])]
    """

    random_access = True
    free = frozenset({"tensors", "names"})

    tensors: tuple[Any, ...]
    names: tuple[str, ...] | None = None

    def check(self) -> None:
        if not self.tensors:
            raise ConfigError("from_tensors(...) takes one tensor or more, got none")
        try:
            converted = tuple(torch.as_tensor(t) for t in self.tensors)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                "from_tensors(...) takes tensors, arrays or lists of numbers, got "
                f"{shown(self.tensors, 60)}: {error}"
            ) from error
        shapes = [tuple(t.shape) for t in converted]
        if any(not s for s in shapes) or len({s[0] for s in shapes}) > 1:
            raise ConfigError(
                f"from_tensors(...) takes tensors of the same first dimension, got shapes {shapes}"
            )
        self._set(tensors=converted)

    @cached_property
    def _rows(self) -> TensorRows:
        return TensorRows(self.tensors, self.names)

    def open(self) -> TensorSource:
        return TensorSource(self._rows)

    def __repr__(self) -> str:
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors]
        if self.names is not None:
            shapes = [f"{n}={s}" for n, s in zip(self.names, shapes, strict=True)]
        return f"from_tensors({', '.join(shapes)})"


class TensorSource(RandomAccessSource):
    """Tensors in memory, in blocks."""

    by_number = True

    def __init__(self, rows: TensorRows) -> None:
        self._rows = rows
        self._starts = np.arange(0, max(1, len(rows)), BLOCK_ROWS, dtype=np.int64)
        self.lengths = np.diff(np.append(self._starts, len(rows)))
        total = sum(t.nbytes for t in rows.tensors)
        self.row_bytes = total / len(rows) if len(rows) else None

    def read(self, block: int, start: int, stop: int) -> TensorRows:
        first = int(self._starts[block])
        return self._rows.slice(first + start, first + stop)

    def take(self, index: IntArray) -> TensorRows:
        tensors = tuple(gathered(tensor, index) for tensor in self._rows.tensors)
        return TensorRows(tensors, self._rows.names)

    def place(self, block: int, row: int) -> Place:
        return Place(row=int(self._starts[block]) + row)

    def block_key(self, block: int) -> Any:
        """A digest of all rows, and which of them are meant."""
        names = self._rows.names
        return [[tensor_digest(t) for t in self._rows.tensors], names and list(names), block]

    def fingerprint(self) -> dict[str, Any]:
        shapes = [f"{t.dtype}{list(t.shape)}" for t in self._rows.tensors]
        digest = hashlib.sha256()
        for tensor in self._rows.tensors:
            for row in tensor[:: max(1, len(self._rows) // 4)][:5]:
                digest.update(repr(row.tolist()).encode())
        content = hashlib.sha256("".join(map(tensor_digest, self._rows.tensors)).encode())
        return {
            "rows": len(self._rows),
            "tensors": shapes,
            "sample": digest.hexdigest()[:16],
            "content": content.hexdigest()[:16],
        }

    def describe(self) -> list[tuple[str, str]]:
        return [("rows", f"{len(self._rows):,}")]
