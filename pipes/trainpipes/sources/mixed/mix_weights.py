from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Rational, Real
from typing import Any

from trainpipes._internal.checks import require, several

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
    exact = {}
    for name in names:
        value = weights[name]
        good = is_number(value) and value >= 0
        require(good, f"{option}: {name!r}", "a number of 0 or more", value)
        exact[name] = Fraction(value if isinstance(value, Rational) else repr(float(value)))
    require(any(exact.values()), option, "more than 0 for one source at least", weights)
    return exact


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def checked_schedule(schedule: Any, names: Sequence[str]) -> Schedule:

    def check(good: Any, value: Any) -> None:
        rule = (
            "a list of (draws, weights), with draws of the whole mix that increase from 0 or more"
        )
        require(good, "mix(schedule)", rule, value)

    check(several(schedule) and len(schedule), schedule)
    checked: Schedule = []
    for step in schedule:
        check(several(step) and len(step) == 2, step)
        start, weights = step
        whole = isinstance(start, Integral) and not isinstance(start, bool)
        check(
            whole and start > (checked[-1][0] if checked else -1), [point[0] for point in schedule]
        )
        checked.append((int(start), checked_weights(weights, names, f"mix(schedule) at {start}")))
    return checked


def steps_of(points: Schedule, linear: bool) -> Schedule:
    """Steps of constant weights; a linear stretch becomes several, with the weights of their middles."""
    if not linear:
        return points
    spread: Schedule = []
    for (start, before), (stop, after) in pairwise(points):
        before, after = _shares(before), _shares(after)
        steps = min(LINEAR_STEPS, stop - start)
        for k in range(steps):
            part = Fraction(2 * k + 1, 2 * steps)
            weights = {n: w + (after[n] - w) * part for n, w in before.items()}
            spread.append((start + (stop - start) * k // steps, weights))
    return [*spread, points[-1]]


def _shares(weights: Mapping[str, Fraction]) -> dict[str, Fraction]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def by_size(sizes: Mapping[str, int], temperature: float | None) -> dict[str, Fraction]:
    if temperature is None or temperature == 1:
        return {name: Fraction(size) for name, size in sizes.items()}
    most = max(sizes.values())
    shares = {name: (size / most) ** (1 / temperature) for name, size in sizes.items()}
    return {name: Fraction(max(1, round(share * SIZE_WEIGHTS))) for name, share in shares.items()}
