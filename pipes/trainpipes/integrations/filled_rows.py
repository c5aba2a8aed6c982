"""Micro-batches filled up with rows that they have already, so that all ranks have as many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainpipes.errors import ConfigError

__all__ = ["filled", "rows_in"]


def rows_in(batch: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor or array, or the length of a list of rows.

    Args:
        batch: what a pipeline gives.

    Raises:
        ConfigError: it holds none of these.
    """
    rows = _rows(batch)
    if rows is None:
        raise ConfigError(
            "the last batches of all ranks are filled up to as many rows, where they are tensors, arrays or "
            f"lists of rows, got {type(batch).__name__}: let the pipeline end with pad_collate() or "
            "collate()"
        )
    return rows


def _rows(value: Any) -> int | None:
    if isinstance(value, Mapping | tuple) or _is_columns(value):
        parts = value.values() if isinstance(value, Mapping) else value
        return next((found for part in parts if (found := _rows(part)) is not None), None)
    if isinstance(value, torch.Tensor | np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def filled(batch: Any, rows: int) -> Any:
    """A batch of so many rows: its own, and then these again from the first one on.

    Args:
        batch: as ``rows_in`` takes it, with one row or more.
        rows: of the batch returned, no fewer than it has.

    >>> import torch
    >>> filled({"x": torch.arange(3), "name": ["a", "b", "c"]}, 5)
    {'x': tensor([0, 1, 2, 0, 1]), 'name': ['a', 'b', 'c', 'a', 'b']}
    """
    have = rows_in(batch)
    return batch if have == rows else _taken(batch, have, [row % have for row in range(rows)])


def _taken(value: Any, have: int, places: list[int]) -> Any:
    if isinstance(value, Mapping):
        return {name: _taken(part, have, places) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = (_taken(part, have, places) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if _is_columns(value):
        return [_taken(part, have, places) for part in value]
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim and len(value) == have:
        return value[places]
    if isinstance(value, list) and len(value) == have:
        return [value[place] for place in places]
    return value


def _is_columns(value: Any) -> bool:
    """Whether a list holds the columns of a batch, as torch's ``default_collate`` makes it of pairs, and not
    its rows."""
    if not isinstance(value, list) or not all(isinstance(part, torch.Tensor) for part in value):
        return False
    return len({part.shape[0] if part.ndim else None for part in value}) == 1
