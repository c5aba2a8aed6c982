"""Which source gives the next row, so that each has its share at any time: pure functions.

Sources have weights W_i with the sum D. After t units (rows or tokens) source i is owed W_i t / D, and has
given x_i. The state is how far it is ahead, in whole numbers:

    ahead_i = D x_i - (its W over the units so far, added up)

A row of length l (1 for rows) may be taken if its source is then ahead by less than l; its deadline is
(ahead_i + D l) / W_i units from now, and the earliest wins. By rows this is Pfair scheduling (Baruah, Cohen,
Plaxton and Varvel, "Proportionate progress", Algorithmica 15, 1996): no source is off by a whole row. By
tokens it is WF2Q (Bennett and Zhang, INFOCOM 1996) with rows taken early by their length: none is off by
more than the longest row. Each shard has a phase, so that not all are off in the same direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from trainpipes._internal.checks import IntArray

#: The largest sum of weights that is kept as it is; beyond, shares are rounded to 2**-40.
MOST_TOTAL = 1 << 60
ROUNDED_TOTAL = 1 << 40
#: Places within a row's time.
PLACES = 1024
#: Units that a row may be put off for another, at most: so many deadlines are looked at.
FARTHEST = 1024
#: The longest period after which rows are those of before, for which they are kept.
LONGEST_KEPT = 1 << 14

NEVER = 1 << 200
Ints = Sequence[int]


def whole_weights(weights: Sequence[Fraction | int], total: int) -> tuple[int, ...]:
    """``weights`` as whole numbers with the sum ``total``, by largest remainders; only 0 becomes 0."""
    amount = sum(weights)
    exact = [Fraction(weight) * total / amount for weight in weights]
    parts = [max(math.floor(e), int(e > 0)) for e in exact]
    order = sorted(range(len(exact)), key=lambda i: (parts[i] - exact[i], i))
    for i in range(total - sum(parts)):
        parts[order[i % len(order)]] += 1
    while sum(parts) > total:
        parts[max(range(len(parts)), key=lambda i: (parts[i], i))] -= 1
    return tuple(parts)


def common_total(steps: Sequence[Sequence[Fraction | int]], leaves: bool) -> int:
    """A small sum D for which all weights of a schedule are whole numbers."""
    total = 1
    for weights in steps:
        amount = sum(weights)
        total = math.lcm(total, *(Fraction(weight, amount).denominator for weight in weights))
        if total > MOST_TOTAL:
            return ROUNDED_TOTAL
    return total * (1 << 20) if leaves and total < 1 << 30 else max(total, ROUNDED_TOTAL * leaves)


def phases_of(shard: int, sources: int) -> tuple[int, ...]:
    """Each source's place within its rows' time, in 1,024ths: shards by van der Corput's sequence, sources by
    the golden ratio.
    """
    bits = int(f"{shard % PLACES:010b}"[::-1], 2)
    start = (bits + 16) % PLACES
    if sources == 2:
        return start, PLACES - start
    return tuple((start + 633 * i) % PLACES for i in range(sources))


class RowOrder:
    """The sources of one shard's rows under some weights, int64.

    >>> RowOrder([7, 3], [0, 0], phases_of(0, 2)).take([9, 9], 10).tolist()
    [1, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    """

    def __init__(self, weights: Ints, ahead: Ints, phases: Ints) -> None:
        self.of, self._phases = weights, phases
        divisor = math.gcd(*weights, *ahead)
        self._weights = tuple(weight // divisor for weight in weights)
        self._start = self._now = tuple(a // divisor for a in ahead)
        self._period = sum(self._weights)
        self._known, self._at = np.empty(0, dtype=np.int64), 0
        self._repeats = False

    def take(self, left: Ints, rows: int) -> IntArray:
        """The next ones, up to the last row that a source has ``left``."""
        is_kept = self._period <= LONGEST_KEPT
        if not self._repeats:
            stop = min(self._at + rows, self._period) if is_kept else self._at + rows
            lacking = max(0, stop - len(self._known))
            more, self._now = _rows(self._weights, self._now, self._phases, lacking)
            self._known = np.append(self._known, np.array(more, dtype=np.int64))
            self._repeats = len(self._known) == self._period and self._now == self._start
        sources = self._known[self._at : self._at + rows]
        if self._repeats:
            sources = self._known[np.arange(self._at, self._at + rows) % self._period]
        for source, ready in enumerate(left):
            taken = np.flatnonzero(sources == source)
            if len(taken) >= ready and self._weights[source]:
                sources = sources[: taken[ready - 1] + 1]
        self._at += len(sources)
        if not self._repeats and (not is_kept or self._at == self._period):
            self._known, self._at, self._start = self._known[self._at :], 0, self._now
        return sources


def _rows(weights: Ints, ahead: Ints, phases: Ints, rows: int) -> tuple[list[int], tuple[int, ...]]:
    total = sum(weights)
    now = list(ahead)  # D times the rows given, less the rows owed at the start
    sources = [i for i, weight in enumerate(weights) if weight]
    release, deadline, place = ([NEVER] * len(weights) for _ in range(3))
    for i in sources:
        release[i] = now[i] // weights[i]
        deadline[i] = -((-now[i] - total) // weights[i])
        place[i] = ((now[i] + total) * PLACES - phases[i] * total) // weights[i]
    order: list[int] = []
    tight = 0  # up to which every row is spoken for
    for t in range(rows):
        first = chosen = -1
        soonest = earliest = within = NEVER
        for i in sources:
            if release[i] <= t:
                d, p = deadline[i], place[i]
                if d < soonest or (d == soonest and p < within):
                    first, soonest, within = i, d, p
                if p < earliest:
                    chosen, earliest = i, p
        if first < 0:  # rows owed to sources that have left
            first = chosen = min(sources, key=deadline.__getitem__)
        if chosen != first and deadline[chosen] > soonest:
            if t < tight < deadline[chosen]:
                chosen = first
            else:
                late = deadline[chosen]
                missed = _tight(weights, now, total, deadline, t, soonest, late)
                if missed < late:
                    chosen, tight = first, missed
        order.append(chosen)
        weight = weights[chosen]
        credits = now[chosen] = now[chosen] + total
        release[chosen] = credits // weight
        deadline[chosen] = -((-credits - total) // weight)
        place[chosen] = ((credits + total) * PLACES - phases[chosen] * total) // weight
    return order, tuple(a - w * rows for a, w in zip(now, weights, strict=True))


def _tight(
    weights: Ints, now: Ints, total: int, deadline: Ints, t: int, soonest: int, late: int
) -> int:
    """The first deadline missed if the source with deadline ``late`` gives the row at ``t``; ``late`` if
    none.
    """
    if late - soonest > FARTHEST:
        return t
    spare = -t  # plus d: rows before d that no source is owed by then
    later: list[int] = []
    for i, due in enumerate(deadline):
        if due < late:
            weight, credit = weights[i], now[i] + total
            if due <= soonest:
                owed = (weight * soonest - now[i]) // total
                spare -= owed
                credit += owed * total
                due = -(-credit // weight)
            while due < late:
                later.append(due)
                credit += total
                due = -(-credit // weight)
    if soonest + spare < 1:
        return soonest
    later.sort()
    for due in later:
        spare -= 1
        if due + spare < 1:
            return due
    return late


def by_tokens(
    weights: Ints, ahead: Ints, first: int | None, lengths: Sequence[Ints], rows: int,
    tokens: int | None = None,
) -> IntArray:  # fmt: skip
    """The sources of the next rows, int64."""
    total = sum(weights)
    now = list(ahead)
    sources = [i for i, weight in enumerate(weights) if weight]
    release, deadline = ([NEVER] * len(weights) for _ in range(2))
    used = [0] * len(weights)
    for i in sources:
        length = lengths[i][0]
        release[i] = now[i] // weights[i] - length + 1
        deadline[i] = -((-now[i] - total * length) // weights[i])
    order: list[int] = []
    t = 0
    for _ in range(rows):
        chosen = -1
        soonest = NEVER
        for i in sources:
            if release[i] <= t and deadline[i] < soonest:
                chosen, soonest = i, deadline[i]
        if first is not None:
            chosen, first = first, None
        elif chosen < 0:
            chosen = min(sources, key=deadline.__getitem__)
        order.append(chosen)
        chosen_lengths = lengths[chosen]
        k = used[chosen]
        t += chosen_lengths[k]
        credits = now[chosen] = now[chosen] + total * chosen_lengths[k]
        k = used[chosen] = k + 1
        if k == len(chosen_lengths) or (tokens is not None and t >= tokens):
            break
        weight = weights[chosen]
        release[chosen] = credits // weight - chosen_lengths[k] + 1
        deadline[chosen] = -((-credits - total * chosen_lengths[k]) // weight)
    return np.array(order, dtype=np.int64)
