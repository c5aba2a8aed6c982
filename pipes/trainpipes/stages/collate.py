"""``collate``: a function that makes a batch of a list of rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

from torch.utils.data import default_collate
from torchdata.nodes import BaseNode

from trainpipes.errors import ConfigError
from trainpipes.runtime.rows.block import Block, TensorRows
from trainpipes.runtime.rows.columns import table_of, to_columns
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.stages.blame import blame, each
from trainpipes.stages.map import named

__all__ = ["Collate"]


class Collate(Stage):
    """Makes one batch of the rows of each micro-batch.

    In: micro-batches. Out: what the function returns. Cursor: none of its own. Costs a Python call a
    micro-batch, and with ``format="rows"`` a Python object a row; token ids are padded faster by
    ``pad_collate``.

    Args:
        source: the node below, or None as a step of a pipeline.
        fn: function of one micro-batch; torch's ``default_collate`` if left out.
        format: what the function takes: "rows", a list of rows as ``DataLoader`` gives to its
            ``collate_fn``; or the columns as "arrow", "numpy" or "torch" (see ``map_batches``).
        version: names the function in checkpoints; see ``map``.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: [(1, 0.5), (2, 1.5)]).batch(2).collate())
    [[tensor([1, 2]), tensor([0.5000, 1.5000], dtype=torch.float64)]]
    """

    role = "finish"

    def __init__(
        self,
        source: BaseNode[Any] | None = None,
        fn: Callable[[Any], Any] | None = None,
        *,
        format: Literal["rows", "arrow", "numpy", "torch"] = "rows",
        version: str | None = None,
    ) -> None:
        if fn is not None and not callable(fn):
            raise ConfigError(f"collate(fn) takes a function of a list of rows, got {fn!r}")
        if format not in ("rows", "arrow", "numpy", "torch"):
            raise ConfigError(f'format is "rows", "arrow", "numpy" or "torch", got {format!r}')
        super().__init__(source, fn=fn, format=format, version=version)
        self._fn = fn
        self._format = format

    def identity(self) -> dict[str, Any]:
        return named(super().identity(), self.options["version"])

    def process(self, run: Run) -> Run:
        if run.items is not None:
            raise ConfigError(f"{self} stands above batch(), and nothing else has collated yet")
        if self._format == "rows":
            if (
                self._fn is None
                and isinstance(run.block.data, TensorRows)
                and run.bounds is not None
            ):
                return run.with_items(run.block.data.batches(run.bounds.tolist()))
            return run.with_items(each(self, self._fn or default_collate, run))
        if run.bounds is None:
            raise ConfigError(f"{self} works on micro-batches: put .batch(n) before it")
        edges = run.bounds.tolist()
        items = []
        for start, stop in pairwise(edges):
            items.append(self._of_columns(run.block.slice(start, stop)))
        return run.with_items(items)

    def _of_columns(self, block: Block) -> Any:
        columns = to_columns(table_of(block.data, self), self._format)
        try:
            return columns if self._fn is None else self._fn(columns)
        except Exception as error:
            blame(error, self, int(block.ids[0]))
            raise
