from __future__ import annotations

import hashlib
from typing import Any

import torch

from trainpipes._internal.checks import column_names, require, wrong
from trainpipes._internal.locks import cached_property
from trainpipes._internal.types import IntArray
from trainpipes.columns.content import tensor_digest
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.interfaces.source import NumberedRowsSource
from trainpipes.interfaces.stage_kinds import Source


class FromTensors(Source, random_access=True):
    """Rows of tensors that share their first dimension: tuples, or dicts if tensors have names.

    The first state hashes all numbers.

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

    free = frozenset({"tensors", "names"})

    tensors: tuple[Any, ...]
    names: tuple[str, ...] | None = None

    def check(self) -> None:
        some = isinstance(self.tensors, list | tuple) and len(self.tensors) > 0
        require(some, "from_tensors(...)", "one tensor or more", self.tensors)
        if self.names is not None:
            names = column_names(self.names, "from_tensors(names)")
            require(
                len(names) == len(self.tensors),
                "from_tensors(names)",
                "a name for each tensor",
                names,
            )
            self._set(names=tuple(names))
        try:
            converted = tuple(torch.as_tensor(t) for t in self.tensors)
        except (RuntimeError, TypeError, ValueError) as error:
            rule = "tensors, arrays or lists of numbers"
            raise wrong("from_tensors(...)", rule, self.tensors, str(error)) from error
        shapes = [tuple(t.shape) for t in converted]
        alike = all(shapes) and len({s[0] for s in shapes if s}) < 2
        require(alike, "from_tensors(...)", "tensors of the same first dimension", shapes)
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


class TensorSource(NumberedRowsSource):
    """Rows of tensors in memory."""

    def __init__(self, rows: TensorRows) -> None:
        super().__init__(len(rows))
        self._rows = rows
        self.row_bytes = rows.nbytes / len(rows) if len(rows) else None

    def slice(self, start: int, stop: int) -> TensorRows:
        return self._rows.slice(start, stop)

    def take(self, index: IntArray) -> TensorRows:
        return self._rows.take(index)

    def block_key(self, block: int) -> Any:
        names = self._rows.names
        return [[tensor_digest(t) for t in self._rows.tensors], names and list(names), block]

    def fingerprint(self) -> dict[str, Any]:
        shapes = [f"{t.dtype}{list(t.shape)}" for t in self._rows.tensors]
        digest = hashlib.sha256()
        for tensor in self._rows.tensors:
            for row in tensor[:: max(1, len(self._rows) // 4)][:5]:
                digest.update(repr(row.tolist()).encode())
        content = hashlib.sha256("".join(map(tensor_digest, self._rows.tensors)).encode())
        sample, known = digest.hexdigest()[:16], content.hexdigest()[:16]
        return {"rows": self.rows, "tensors": shapes, "sample": sample, "content": known}
