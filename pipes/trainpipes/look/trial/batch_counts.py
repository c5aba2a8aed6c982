"""Rows, tokens and padding of batches, counted at a small cost: how is found out at the first one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainpipes.engine.planning.plan import Plan
from trainpipes.look.decoded import TokenGrid, known_ids, token_grids
from trainpipes.look.show import makes_batches
from trainpipes.look.values import as_mapping, leaves

__all__ = ["BatchCounts"]

#: Cells, tokens and targets of an item, and its tokens once more where something says which are targets.
Count = tuple[int, int, int, int]


@dataclass
class BatchCounts:
    """What was counted so far.

    Attributes:
        plan: of the pipeline.
        items: batches, or rows where nothing batches them.
        rows: in them.
        cells: B * L of all columns of token ids.
        tokens: of these, those that are no padding.
        learnt: of these, targets of the loss, of a few of the first items; see ``looked_at``.
        looked_at: tokens of these items, where labels or a mask say which are targets.
    """

    plan: Plan
    items: int = 0
    rows: int = 0
    cells: int = 0
    tokens: int = 0
    learnt: int = 0
    looked_at: int = 0
    _known: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = known_ids(self.plan)
        self._is_batch = makes_batches(self.plan)
        self._count: Callable[[Any], Count] | None = None

    def add(self, item: Any) -> None:
        """Count one more item."""
        self.items += 1
        self.rows += _rows(item) if self._is_batch else 1
        if self.items <= LOOKED_AT or self._count is None:
            cells, tokens, learnt, told = self._look(item)
            self.learnt += learnt
            self.looked_at += told
        else:
            cells, tokens, *_ = self._count(item)
        self.cells += cells
        self.tokens += tokens

    def _look(self, item: Any) -> Count:
        """Count an item as ``show()`` does, and find out how to do so with less work."""
        if self._is_batch and isinstance(item, list) and item and as_mapping(item[0]) is not None:
            looked = [self._of(dict(leaves(row, of_row=True)[0]), True) for row in item]
            if self._count is None and all(isinstance(row, Mapping) for row in item):
                names = {grid.name for _, grids in looked for grid in grids}
                self._count = lambda batch: _of_rows(batch, names)
            cells, tokens, learnt, told = (
                sum(c) for c in zip(*(c for c, _ in looked), strict=True)
            )
            return cells, tokens, learnt, told
        values = dict(leaves(item, of_row=not self._is_batch)[0])
        found, grids = self._of(values, not self._is_batch)
        if self._count is None and isinstance(item, Mapping) and grids:
            by = {grid.name: _mask_of(grid, values) for grid in grids}
            if all(by.values()):
                self._count = lambda batch: _quickly(batch, by)
        return found

    def _of(self, values: Mapping[str, Any], of_row: bool) -> tuple[Count, list[TokenGrid]]:
        grids = token_grids(values, self._known, of_row)
        tokens = sum(grid.tokens for grid in grids)
        told = any(grid.in_loss is not None for grid in grids)
        found = (
            sum(int(grid.ids.size) for grid in grids),
            tokens,
            sum(grid.loss_count for grid in grids),
            tokens if told else 0,
        )
        return found, grids

    @property
    def padding_share(self) -> float | None:
        """Padding as part of all cells; None where there are no token ids."""
        return (self.cells - self.tokens) / self.cells if self.cells else None

    @property
    def learnt_share(self) -> float | None:
        """Targets as part of the tokens of the first items; None where nothing says which they are."""
        return self.learnt / self.looked_at if self.looked_at else None


#: Items that are looked at as closely as ``show()`` does.
LOOKED_AT = 8


def _rows(item: Any) -> int:
    """Rows of a batch: the length of the first thing that has one."""
    named = as_mapping(item)
    values = list(named.values()) if named is not None else [item]
    if isinstance(item, tuple) and named is None:
        values = list(item)
    sized = [
        value for value in values if getattr(value, "ndim", 2) > 0 and hasattr(value, "__len__")
    ]
    of_rows = [value for value in sized if getattr(value, "ndim", 1) > 1] or sized
    if of_rows and as_mapping(of_rows[0]) is not None and item is not of_rows[0]:
        return _rows(of_rows[0])
    return len(of_rows[0]) if of_rows else 1


def _mask_of(grid: TokenGrid, values: Mapping[str, Any]) -> str | None:
    """The tensor that is 0 just where there is padding; None if none is told."""
    for end in ("attention_mask", "input_mask", "segment_ids"):
        for start in ("input_ids", "token_ids"):
            name = grid.name.removesuffix(start) + end
            mask = values.get(name)
            same = isinstance(mask, torch.Tensor | np.ndarray) and mask.shape == grid.ids.shape
            if grid.name.endswith(start) and same:
                return name
    return grid.name if not grid.padding and not grid.told else None


def _quickly(batch: Any, masks: Mapping[str, str | None]) -> Count:
    cells = tokens = 0
    for name, mask in masks.items():
        size = _size(batch.get(name))
        cells += size
        tokens += size if mask == name else _nonzero(batch.get(mask))
    return cells, tokens, 0, 0


def _of_rows(batch: Any, names: Collection[str]) -> Count:
    """Of rows that nothing has padded."""
    if not isinstance(batch, list):
        return 0, 0, 0, 0
    tokens = sum(_size(row[name]) for row in batch for name in names if row.get(name) is not None)
    return tokens, tokens, 0, 0


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel())
    return len(value) if isinstance(value, list | tuple) else int(np.size(value))


def _nonzero(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(torch.count_nonzero(value))
    return int(np.count_nonzero(value))
