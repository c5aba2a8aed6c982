"""``split``: parts of the rows that never share one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Any

import numpy as np

from trainpipes._internal.checks import ColumnNames, Seed, require
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.stages.sample import EVERY, Drawn


class Split(Drawn):
    """Keeps one of several parts of the rows; each row is in exactly one part.

    The part is chosen by a hash of the row, as in ``sample``: a row stays in its part when files are added,
    and in any epoch, shard and order, on any machine. The hash is a number from 0 to 1, and parts are ranges
    of it in the order given: a new part that is taken from the last one leaves the others as they are.

    In: rows. Out: those of the part, in order. Cursor: none of its own. Costs what ``sample`` costs.

    Args:
        parts: fraction of each part, by name; they sum to 1.
        part: which one.
        key: a column, or several, whose values are hashed instead: rows of the same key are in the same part.
        seed: for the choice.

    Raises:
        DataError: a row's key is null.
        SchemaError: there is no such column, or its values are lists or structs.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"x": range(10)}))
    >>> parts = rows.split({"train": 0.7, "valid": 0.3})
    >>> {name: [row["x"] for row in part] for name, part in parts.items()}
    {'train': [0, 1, 2, 3, 4, 5, 6, 7, 9], 'valid': [8]}
    """

    parts: Mapping[str, float]
    part: str
    _: KW_ONLY
    key: ColumnNames | None = None
    seed: Seed = 0

    def check(self) -> None:
        self._set(parts=checked_parts(self.parts))
        self._require(self.part in self.parts, "part", f"one of {', '.join(self.parts)}")

    @property
    def share(self) -> float:  # type: ignore[override]
        return float(self.parts[self.part])

    @cached_property
    def _edges(self) -> tuple[float, float]:
        """Between which draws are kept."""
        edges = np.cumsum([0.0, *self.parts.values()])
        edges[-1] = EVERY
        number = list(self.parts).index(self.part)
        return float(edges[number]), float(edges[number + 1])

    def identity(self) -> dict[str, Any]:
        # What is cut where, whatever the other parts are called and in which order they are written.
        identity = super().identity()
        del identity["parts"]
        low, high = self._edges
        return {**identity, "from": low, "to": high}

    def process(self, run: Run) -> Run:
        draws, (low, high) = self.draws(run), self._edges
        kept = (draws >= low) & (draws < high)
        return run if kept.all() else run.pick(np.flatnonzero(kept).astype(np.int64, copy=False))


def checked_parts(parts: Any) -> dict[str, float]:
    """Fractions by name.

    Raises:
        ConfigError: not a dict of numbers above 0 that sum to 1.
    """
    rule = 'a dict such as {"train": 0.9, "valid": 0.1}'
    require(isinstance(parts, Mapping) and parts, "split(parts)", rule, parts)
    for name, fraction in parts.items():
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        good = isinstance(name, str) and number and 0 < fraction <= 1
        require(good, "split(parts)", "names and fractions above 0, up to 1", {name: fraction})
    total = sum(parts.values())
    if abs(total - 1) > 1e-9:
        raise ConfigError(
            f"split(parts) must sum to 1, got {total:g}; name the rest too, or take a sample() first"
        )
    return dict(parts)
