from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Rational, Real
from typing import Any, Literal

import pyarrow as pa

from trainpipes._internal.checks import require, several
from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.columns.block import Block
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError
from trainpipes.sources.combined.common_columns import columns_of, said

#: Steps that a linear stretch of a schedule is made of.
LINEAR_STEPS = 64
#: Weights from sizes and a temperature are whole numbers up to this.
SIZE_WEIGHTS = 1_000_000
#: Where a stretch begins, in rows or tokens of the whole mix, and the weights there.
Schedule = list[tuple[int, dict[str, Fraction]]]


def checked_weights(weights: Any, names: Sequence[str], option: str) -> dict[str, Fraction]:
    """The weights; a float is the decimal number that it prints as."""
    rule = f"a dict with a number for each source ({', '.join(names)})"
    good = isinstance(weights, Mapping) and set(weights) == set(names)
    require(good, option, rule, weights, "0 leaves a source out")
    for name, value in weights.items():
        good = is_number(value) and value >= 0
        require(good, f"{option}: {name!r}", "a number of 0 or more", value)
    require(any(weights.values()), option, "more than 0 for one source at least", weights)
    return {
        name: Fraction(
            weights[name] if isinstance(weights[name], Rational) else repr(float(weights[name]))
        )
        for name in names
    }


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def checked_schedule(schedule: Any, names: Sequence[str]) -> Schedule:

    def check(good: Any, value: Any) -> None:
        rule = (
            "a list of (draws, weights), with draws of the whole mix that increase from 0 or more"
        )
        require(good, "mix(schedule)", rule, value)

    check(several(schedule) and len(schedule), schedule)
    found: Schedule = []
    for step in schedule:
        check(several(step) and len(step) == 2, step)
        start, weights = step
        whole = isinstance(start, int) and not isinstance(start, bool)
        check(whole and start > (found[-1][0] if found else -1), [one[0] for one in schedule])
        found.append((start, checked_weights(weights, names, f"mix(schedule) at {start}")))
    return found


def steps_of(points: Schedule, linear: bool) -> Schedule:
    """Steps of constant weights; a linear stretch becomes several, with the weights of their middles."""
    if not linear:
        return points
    found: Schedule = []
    for (start, before), (stop, after) in pairwise(points):
        before, after = _shares(before), _shares(after)
        steps = min(LINEAR_STEPS, stop - start)
        for k in range(steps):
            part = Fraction(2 * k + 1, 2 * steps)
            weights = {n: w + (after[n] - w) * part for n, w in before.items()}
            found.append((start + (stop - start) * k // steps, weights))
    return [*found, points[-1]]


def _shares(weights: Mapping[str, Fraction]) -> dict[str, Fraction]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def by_size(sizes: Mapping[str, int], temperature: float | None) -> dict[str, Fraction]:
    if temperature is None or temperature == 1:
        return {name: Fraction(size) for name, size in sizes.items()}
    most = max(sizes.values())
    shares = {name: (size / most) ** (1 / temperature) for name, size in sizes.items()}
    return {name: Fraction(max(1, round(share * SIZE_WEIGHTS))) for name, share in shares.items()}


Stop = Literal["all_exhausted", "first_exhausted", "repeat"]


@dataclass(frozen=True)
class MixRules:
    """How sources, sorted by name, are mixed: steps of whole weights from ``starts`` in rows, or in tokens by
    ``lengths``.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    max_epochs: tuple[int | None, ...]
    stop: Stop
    lengths: Callable[[Block], IntArray] | None
    output_column: str | None
    caller: object

    def epoch_rows(self, sizes: Mapping[str, int | None]) -> float | None:
        """About how many rows an epoch has, where that is known."""
        first, counted = self.stop == "first_exhausted", [sizes[name] for name in self.names]
        if self.stop == "repeat" or self.lengths or len(self.steps) > 1 or None in counted:
            return None
        total = sum(self.steps[0])
        parts = zip(counted, self.steps[0], self.max_epochs, strict=True)
        ends = [(n or 0) * total / w * (limit or 1 if first else 1) for n, w, limit in parts if w]
        return min(ends) if first else max(ends)

    def with_names(self, block: Block, source: IntArray) -> Block:
        column, data = self.output_column, block.data
        if column is None:
            return block
        if isinstance(data, pa.Table):
            names = set(data.column_names)
        elif isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
            names = {name for row in data for name in row}
        else:
            raise SchemaError(
                f"{self.caller}: output_column={column!r} needs rows with columns, got "
                f"{said(columns_of(data))}; make dicts with map() in the sources",
                stage=str(self.caller),
            )
        if column in names:
            raise SchemaError(
                f"{self.caller}: the rows have a column {column!r} already; give output_column another name",
                stage=str(self.caller),
            )
        if isinstance(data, pa.Table):
            added = python_to_arrow(self.names, pa.string()).take(to_arrow(source))
            return block.with_data(data.append_column(column, added))
        rows = zip(data, source.tolist(), strict=True)
        return block.with_data([{**row, column: self.names[i]} for row, i in rows])
