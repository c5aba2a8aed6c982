"""Numbers of a batch as NumPy's, and only as many as one can afford to look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["MOST_CELLS", "Array", "Grid", "grid", "head"]

Array = npt.NDArray[Any]
#: Token ids ``[B, L]``, and which cells hold one; None where all do.
Grid = tuple[Array, "npt.NDArray[np.bool_] | None"]

#: Numbers of one tensor that are looked at: 0.1 s to count, and larger ones are told by their first rows.
MOST_CELLS = 1 << 24


def head(value: Any) -> Array | None:
    """The numbers of an array or tensor, of a large one its first rows; None where there are none to see: of
    sparse, quantized and meta tensors, and of arrays of objects."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            return None
        if value.device.type == "meta":
            return None
        value = _first_rows(value.detach(), value.numel()).cpu().resolve_conj().resolve_neg()
        if value.dtype.is_floating_point and value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        found: Array = value.numpy()
        return found
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        cut: Array = _first_rows(value, value.size)
        return cut
    return None


def _first_rows(value: Any, cells: int) -> Any:
    while cells > MOST_CELLS and value.ndim:
        each = cells // len(value)
        value = value[: max(1, MOST_CELLS // max(1, each))]
        cells = each * len(value)
        if len(value) == 1 and cells > MOST_CELLS:
            value, cells = value[0], each
    return value


def grid(value: Any) -> Grid | None:
    """Whole numbers of one or two dimensions as ``[B, L]``; lists of lists, and nested tensors, are filled
    up. None for anything else."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return _filled([head(row) for row in value.unbind()[:4096]])
    if isinstance(value, torch.Tensor | np.ndarray):
        found = head(value)
        if found is None or found.dtype.kind not in "iu" or found.ndim not in (1, 2):
            return None
        return (found if found.ndim == 2 else found[None]), None
    if not isinstance(value, list | tuple) or not value:
        return None
    if _is_number(value[0]):
        return _filled([_of_list(value)])
    if isinstance(value[0], list | tuple | np.ndarray | torch.Tensor):
        rows = value[:4096]
        return _filled([_of_list(r) if isinstance(r, list | tuple) else head(r) for r in rows])
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _of_list(value: Any) -> Array | None:
    if not all(map(_is_number, value[:MOST_CELLS])):
        return None
    try:
        return np.fromiter(value[:MOST_CELLS], dtype=np.int64)
    except OverflowError:
        return None


def _filled(rows: list[Array | None]) -> Grid | None:
    good = [row for row in rows if row is not None and row.ndim == 1]
    if len(good) < len(rows) or any(row.dtype.kind not in "iu" for row in good if len(row)):
        return None
    longest = max((len(row) for row in good), default=0)
    most = max(1, MOST_CELLS // max(1, longest))
    good = good[:most]
    found = np.zeros((len(good), longest), dtype=np.int64)
    there = np.zeros(found.shape, dtype=np.bool_)
    for k, row in enumerate(good):
        found[k, : len(row)], there[k, : len(row)] = row, True
    return found, None if there.all() else there
