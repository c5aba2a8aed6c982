"""Which documents share a row: the algorithms, against plain loops and against the best there is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpipes.columns.packing import (
    Placing,
    best_fit,
    best_window,
    concat,
    first_fit,
    fit_a_row,
    joint_window,
    placed,
)

CAPACITY = 12
pieces = st.lists(st.integers(1, CAPACITY), max_size=40)
most = st.one_of(st.none(), st.integers(1, 5))


def plain_fit(lengths: list[int], capacity: int, limit: int | None, best: bool) -> list[int]:
    """First-fit in the order given, or best-fit longest first, row by row."""
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k]) if best else range(len(lengths))
    rows: list[list[int]] = []
    found = [0] * len(lengths)
    for k in order:
        room = [capacity - sum(row) for row in rows]
        open_ = [
            r for r in range(len(rows))
            if room[r] >= lengths[k] and (limit is None or len(rows[r]) < limit)
        ]  # fmt: skip
        row = min(open_, key=lambda r: (room[r], r) if best else (r,), default=len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(lengths[k])
        found[k] = row
    return found


@given(pieces, most, st.booleans())
def test_a_fit_is_what_a_plain_loop_gives(
    lengths: list[int], limit: int | None, best: bool
) -> None:
    found = (best_fit if best else first_fit)(np.array(lengths, dtype=np.int64), CAPACITY, limit)
    assert found.tolist() == plain_fit(lengths, CAPACITY, limit, best)


def check_placing(found: Placing, lengths: list[int], capacity: int, limit: int | None) -> None:
    """Every token has one place, rows are not too long, and documents keep their order in a row."""
    document, start, length = (one.tolist() for one in (found.document, found.start, found.length))
    cells = [(d, s + k) for d, s, n in zip(document, start, length, strict=True) for k in range(n)]
    assert sorted(cells) == [(d, k) for d, n in enumerate(lengths) for k in range(n)]
    assert min(length, default=1) >= 1
    for first, stop in pairwise(found.bounds.tolist()):
        assert 1 <= stop - first <= (limit or capacity)
        assert sum(length[first:stop]) <= capacity
        own = [*zip(document[first:stop], start[first:stop], strict=True)]
        assert own == sorted(own)


documents = st.lists(st.integers(0, 40), max_size=40)


@given(documents, most, st.booleans())
def test_fitted_documents_have_one_place_and_are_split_only_where_they_must(
    lengths: list[int], limit: int | None, best: bool
) -> None:
    given_ = np.array(lengths, dtype=np.int64)
    found = placed(given_, CAPACITY, limit, best_fit if best else first_fit)
    check_placing(found, lengths, CAPACITY, limit)
    parts = np.bincount(found.document, minlength=len(lengths)).tolist()
    assert parts == [-(-length // CAPACITY) for length in lengths]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=64), most)
def test_a_window_ends_where_its_rows_are_fullest(lengths: list[int], limit: int | None) -> None:
    given_ = np.array(lengths, dtype=np.int64)
    count, found = best_window(given_, CAPACITY, limit)
    assert len(lengths) - len(lengths) // 16 <= count <= len(lengths)
    check_placing(found, lengths[:count], CAPACITY, limit)
    whole = placed(given_, CAPACITY, limit, best_fit)
    # A share at least as large as that of all: s / r >= S / R.
    assert sum(lengths[:count]) * len(whole) >= sum(lengths) * len(found)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=64), most, st.booleans(), st.integers(0, 64)
)
def test_where_an_epoch_ends_one_row_holds_what_is_left(
    lengths: list[int], limit: int | None, best: bool, wanted: int
) -> None:
    given_ = np.array(lengths, dtype=np.int64)
    ends = np.arange(1, len(lengths) + 1)
    fits = np.flatnonzero(fit_a_row(given_, ends, CAPACITY, limit)) + 1
    begun = max([k for k in fits.tolist() if k <= wanted], default=0)
    fit = best_fit if best else first_fit
    count, found = joint_window(given_, CAPACITY, limit, fit, begun)
    assert max(begun, 1) <= count <= len(lengths)
    check_placing(found, lengths[:count], CAPACITY, limit)
    left = [n for n in lengths[count:] if n]
    assert sum(left) <= CAPACITY
    assert len(left) <= (limit or CAPACITY)
    rows = np.repeat(np.arange(len(found)), np.diff(found.bounds))
    assert len(set(rows[found.document < begun].tolist())) <= 1
    whole = placed(given_, CAPACITY, limit, fit, begun)
    assert sum(lengths[:count]) * len(whole) >= sum(lengths) * len(found)


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.2])
@pytest.mark.parametrize(("mean", "most"), [(831, 0.0025), (1811, 0.003)])
def test_windows_of_1024_documents_are_hardly_padded(sigma: float, mean: int, most: float) -> None:
    rng = np.random.default_rng(5)
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 16 * 1024)
    lengths = np.maximum(1, drawn).astype(int)
    cells = tokens = first = 0
    while first + 1024 <= len(lengths):
        count, found = best_window(lengths[first : first + 1024], 4096, None)
        cells += len(found) * 4096
        tokens += int(lengths[first : first + count].sum())
        first += count
    assert 1 - tokens / cells < most


def plain_concat(
    lengths: list[int], skip: int, capacity: int, limit: int | None, ended: bool
) -> list[list[tuple[int, int]]]:
    """Rows of (document, token), token by token."""
    rows: list[list[tuple[int, int]]] = []
    row: list[tuple[int, int]] = []
    for cell in [(d, k) for d, n in enumerate(lengths) for k in range(n)][skip:]:
        new = not row or row[-1][0] != cell[0]
        if new and row and limit is not None and len({d for d, _ in row}) == limit:
            rows.append(row)
            row = []
        row.append(cell)
        if len(row) == capacity:
            rows.append(row)
            row = []
    # A row that holds as many documents as it may is closed by the next one's first token.
    return [*rows, row] if row and ended else rows


@given(documents, st.integers(0, 50), most, st.booleans())
def test_concatenated_documents_are_what_a_plain_loop_gives(
    lengths: list[int], skip: int, limit: int | None, ended: bool
) -> None:
    skip = min(skip, lengths[0] - 1) if lengths and lengths[0] else 0
    found, edges = concat(np.array(lengths, dtype=np.int64), skip, CAPACITY, limit, ended)
    rows = [
        [
            (int(found.document[p]), int(found.start[p]) + k)
            for p in range(found.bounds[r], found.bounds[r + 1])
            for k in range(found.length[p])
        ]
        for r in range(len(found))
    ]
    expected = plain_concat(lengths, skip, CAPACITY, limit, ended)
    if limit is not None and not ended and len(rows) > len(expected):
        expected = plain_concat([*lengths, 1], skip, CAPACITY, limit, ended)
    assert rows == expected
    assert edges.tolist() == [skip + sum(map(len, rows[:r])) for r in range(len(rows) + 1)]
