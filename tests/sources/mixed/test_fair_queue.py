"""Which source comes next: the bound on every share, and the rule said once more with fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import examples
from trainpipes.sources.fair_queue import (
    RowOrder,
    by_tokens,
    common_total,
    phases_of,
    whole_weights,
)

#: Even ones, tiny ones beside large ones, primes, ones that all come due at once.
WEIGHTS = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.lists(st.sampled_from([1, 2, 999, 1000, 1001, 65_537]), min_size=2, max_size=5),
    st.lists(st.just(7), min_size=2, max_size=9),
    st.lists(st.integers(0, 10**15), min_size=2, max_size=4).filter(any),
)
SHARDS = st.integers(0, 100)


def drawn(weights: list[int], shard: int, rows: int) -> list[int]:
    """The sources of the first rows."""
    order, found = RowOrder(weights, [0] * len(weights), phases_of(shard, len(weights))), []
    while len(found) < rows:
        found += order.take([10**9] * len(weights), min(37, rows - len(found))).tolist()
    return found


def drawn_anew(weights: list[int], shard: int, rows: int, step: int) -> list[int]:
    """The same, gone on with from how far each is ahead after so many."""
    total, k = sum(weights), len(weights)
    ahead, found = [0] * k, []
    while len(found) < rows:
        wanted = min(step, rows - len(found))
        order = RowOrder(weights, ahead, phases_of(shard, k)).take([10**9] * k, wanted).tolist()
        ahead = [a + total * order.count(i) - weights[i] * wanted for i, a in enumerate(ahead)]
        found += order
    return found


def off(
    weights: list[int], order: list[int], lengths: list[int] | None = None
) -> list[list[Fraction]]:
    """After each row, how far each source is ahead of its share."""
    total = sum(weights)
    given, at, found = [0] * len(weights), 0, []
    for n, source in enumerate(order):
        length = 1 if lengths is None else lengths[n]
        given[source] += length
        at += length
        found.append([g - Fraction(w * at, total) for g, w in zip(given, weights, strict=True)])
    return found


@examples(120)
@given(weights=WEIGHTS, shard=SHARDS)
def test_no_source_is_ever_off_its_share_by_a_whole_row(weights, shard):
    for ahead in off(weights, drawn(weights, shard, 400)):
        assert max(map(abs, ahead)) < 1


@examples(60)
@given(weights=WEIGHTS, shard=SHARDS, step=st.integers(1, 90))
def test_the_order_does_not_depend_on_how_many_rows_are_asked_for_at_a_time(weights, shard, step):
    assert drawn_anew(weights, shard, 200, step) == drawn(weights, shard, 200)


@examples(100)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0, 1, 5, 50, 500]), min_size=3, max_size=3).filter(any),
            st.integers(1, 60),
        ),
        min_size=1,
        max_size=12,
    ),
    shard=SHARDS,
)
def test_weights_that_change_carry_over_what_is_owed(steps, shard):
    total, ahead = 1000, (0, 0, 0)
    for step, rows in steps:
        weights = whole_weights(step, total)
        for source in RowOrder(weights, ahead, phases_of(shard, 3)).take([999] * 3, rows).tolist():
            ahead = tuple(
                a + total * (i == source) - w
                for i, (a, w) in enumerate(zip(ahead, weights, strict=True))
            )
            assert max(map(abs, ahead)) < 2 * total


def by_the_rule(weights: list[int], shard: int, rows: int) -> list[int]:
    """The rule of ``RowOrder`` with fractions, looking at every deadline."""
    total, k = sum(weights), len(weights)
    share = [Fraction(w, total) for w in weights]
    phases = phases_of(shard, k)
    given, found = [0] * k, []
    for t in range(rows):
        may = [i for i in range(k) if share[i] and floor(given[i] / share[i]) <= t]
        due = {i: ceil((given[i] + 1) / share[i]) for i in may}
        place = {
            i: floor((given[i] + 1 - Fraction(phases[i], 1024)) / share[i] * 1024) for i in may
        }
        first = min(may, key=lambda i: (due[i], place[i], i))
        wanted = min(may, key=lambda i: (place[i], i))
        late = range(due[first], due[wanted])
        fits = len(late) <= 1024 and all(
            sum(max(0, floor(share[i] * d) - given[i]) for i in range(k)) <= d - t - 1 for d in late
        )
        found.append(wanted if fits else first)
        given[found[-1]] += 1
    return found


@examples(60)
@given(weights=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), shard=SHARDS)
def test_the_order_is_the_rule_s(weights, shard):
    assert drawn(weights, shard, 120) == by_the_rule(weights, shard, 120)


def test_the_order_of_some_weights_stays_what_it_is():
    assert "".join(map(str, drawn([7, 3], 0, 20))) == "10010010001001001000"
    assert "".join(map(str, drawn([5, 3, 2], 1, 20))) == "02100120010210012001"
    assert "".join(map(str, drawn([1, 1, 98], 2, 60))) == (
        "222222222221222222222222222222222222222222222222222222222222"
    )


@pytest.mark.parametrize(
    "weights", [[7, 3], [5, 3, 2], [50, 30, 15, 5], [137, 61, 29, 11, 3], [1000, 1, 1]]
)
def test_shards_out_of_phase_keep_the_whole_closer(weights):
    shards, rows = 24, 300
    each = np.array([off(weights, drawn(weights, s, rows)) for s in range(shards)], dtype=float)
    alike = np.array(off(weights, drawn(weights, 0, rows)), dtype=float) * shards
    apart = each.sum(axis=0)
    # Root mean squares of how far the whole is off; typically it is a quarter.
    assert np.sqrt((apart**2).mean()) < 0.6 * np.sqrt((alike**2).mean())


@examples(100)
@given(
    weights=st.lists(st.integers(1, 50), min_size=2, max_size=4),
    longest=st.lists(st.sampled_from([1, 3, 10, 100, 1000]), min_size=4, max_size=4),
    first=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 2**32),
)
def test_by_tokens_no_source_is_off_by_more_than_the_longest_row(weights, longest, first, seed):
    rng = np.random.default_rng(seed)
    k = len(weights)
    lengths = [rng.integers(1, longest[i] + 1, 2000).tolist() for i in range(k)]
    order = by_tokens(weights, (0,) * k, first, lengths, 500).tolist()
    waiting = [iter(own) for own in lengths]
    taken = [next(waiting[i]) for i in order]
    aheads = off(weights, order, taken)
    most = max(max(own) for own in lengths)
    assert max(abs(a) for row in aheads for a in row) <= most


def test_a_row_100_times_as_long_waits_for_100_short_ones():
    order = by_tokens([1, 1], (0, 0), None, [[100] * 9, [1] * 900], 808).tolist()
    assert order.count(0) == 8
    assert order.count(1) == 800


def test_it_ends_where_a_source_has_none_left():
    assert RowOrder([1, 1], (0, 0), phases_of(0, 2)).take([2, 9], 100).tolist().count(0) == 2
    assert by_tokens([1, 1], (0, 0), None, [[1, 1], [1] * 9], 100).tolist().count(0) == 2


@examples(100)
@given(
    weights=st.lists(st.fractions(0, 1000), min_size=1, max_size=6).filter(any),
    total=st.integers(6, 10**9),
)
def test_weights_are_made_whole_with_the_sum_asked_for(weights, total):
    found = whole_weights(weights, total)
    assert sum(found) == total
    assert [w > 0 for w in found] == [w > 0 for w in weights]
    amount = sum(weights)
    if min((w for w in weights if w), default=0) * total >= amount:  # none had to be raised to 1
        assert all(abs(f - w * total / amount) < 1 for f, w in zip(found, weights, strict=True))


def test_a_sum_is_found_for_which_all_steps_are_exact():
    assert (
        common_total([[Fraction(1, 2), Fraction(1, 2)], [Fraction(1, 3), Fraction(2, 3)]], False)
        == 6
    )
    assert common_total([[Fraction(1), Fraction(10**30)]], False) == 1 << 40
