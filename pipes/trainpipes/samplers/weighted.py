"""``WeightedRandomSampler``: rows drawn with given probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainpipes._internal.checks import flag, require, whole_number
from trainpipes.engine.layout import IntArray
from trainpipes.engine.permutation import uniform
from trainpipes.errors import ConfigError
from trainpipes.samplers.row_sampler import RowSampler, digest


class WeightedRandomSampler(RowSampler):
    """Rows drawn with given probabilities.

    Args:
        weights: one for each row, 0 or more; they need not sum to 1. A row of weight 0 never comes.
        num_samples: indices in an epoch.
        replacement: whether a row can come more than once in an epoch.
        seed: for the draws.
    """

    def __init__(
        self,
        weights: Sequence[float] | Any,
        num_samples: int,
        replacement: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        if isinstance(weights, torch.Tensor):
            weights = weights.detach().cpu().numpy()
        found = np.asarray(weights)
        good = found.ndim == 1 and found.dtype.kind in "biuf"
        require(good, "WeightedRandomSampler(weights)", "a number for each row, [rows]", weights)
        found = found.astype(np.float64)
        for row in np.flatnonzero(~(np.isfinite(found) & (found >= 0)))[:1]:
            given = f"{found[row]} for row {row:,}"
            raise ConfigError(
                f"WeightedRandomSampler(weights) must be finite and 0 or more, got {given}"
            )
        require(found.sum() > 0, "WeightedRandomSampler(weights)", "above 0 for some row", weights)
        super().__init__(len(found))
        self.weights = found
        self.num_samples = whole_number(
            num_samples, 1, "WeightedRandomSampler(num_samples)", "indices in an epoch"
        )
        self.replacement = flag(replacement, "WeightedRandomSampler(replacement)")
        self.seed = whole_number(seed, None, "WeightedRandomSampler(seed)", "a seed")
        possible = int(np.count_nonzero(found))
        if not self.replacement and num_samples > possible:
            raise ConfigError(
                f"WeightedRandomSampler(num_samples={num_samples:,}, replacement=False): only "
                f"{possible:,} rows have a weight above 0"
            )
        self._ends = np.cumsum(found)
        self._last = int(np.flatnonzero(found)[-1])
        self._order: tuple[int, IntArray] | None = None
        self._guide: IntArray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_order": None, "_guide": None}

    def length(self, rows: int) -> int:
        return self.num_samples

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        if not self.replacement:
            return self._without(epoch)[start:stop]
        return self._looked_up(uniform(start, stop, self.seed, "weighted", epoch))

    def _looked_up(self, draws: npt.NDArray[np.float64]) -> IntArray:
        """``searchsorted(ends, draws * total, side="right")`` by a guide table (Chen and Asau, 1974), up to
        the last possible row.
        """
        if self._guide is None:
            # A power of two, so that no rounding puts a draw outside of its own stretch.
            parts = 1 << max(1, len(self.weights) - 1).bit_length()
            edges = np.arange(parts + 1) / parts * self._ends[-1]
            self._guide = np.searchsorted(self._ends, edges, side="right").astype(np.int64)
        guide = self._guide
        stretch = (draws * (len(guide) - 1)).astype(np.int64)
        low, high = guide[stretch], guide[stretch + 1]
        wanted = draws * self._ends[-1]
        open_ = np.flatnonzero(low < high)
        while len(open_):
            middle = (low[open_] + high[open_]) // 2
            above = self._ends[middle] <= wanted[open_]
            low[open_[above]] = middle[above] + 1
            high[open_[~above]] = middle[~above]
            open_ = open_[low[open_] < high[open_]]
        np.minimum(low, self._last, out=low)
        return low

    def _without(self, epoch: int) -> IntArray:
        """By exponential keys: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006."""
        order = self._order
        if order is None or order[0] != epoch:
            draws = uniform(0, len(self.weights), self.seed, "weighted", epoch)
            with np.errstate(divide="ignore"):
                keys = -np.log1p(-draws) / self.weights
            keys[self.weights == 0] = np.inf
            sorted_rows = np.argsort(keys, kind="stable")[: self.num_samples]
            order = self._order = (epoch, sorted_rows.astype(np.int64, copy=False))
        return order[1]

    def fingerprint(self) -> dict[str, Any]:
        known = {"weights": len(self.weights), "digest": digest(self.weights)}
        return {**self._named(), **known, **self._named("num_samples", "replacement", "seed")}
