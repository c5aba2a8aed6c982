"""Rectangles of rows, against what they are cell by cell."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainpipes.columns import rectangles as module
from trainpipes.columns.rectangles import RaggedRows, Rectangles, cut_rows

KINDS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32"]
sides = st.sampled_from(["left", "right"])


def rectangles(values: Any, lengths: Any, bounds: Any, value: Any, **options: Any) -> Rectangles:
    """Those of rows that lie one after the other."""
    rows = RaggedRows(values, np.cumsum(lengths) - lengths, lengths, value, **options)
    return rows.rectangles(None, bounds)


def alone(rows: list[Any], width: int, value: Any, dtype: Any, side: str) -> Any:
    inner = rows[0].shape[1:]
    cells = np.full((len(rows), width, *inner), value, dtype)
    for cell, row in zip(cells, rows, strict=True):
        if len(row):
            cell[slice(width - len(row), None) if side == "left" else slice(len(row))] = row
    return cells


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(KINDS),
    st.sampled_from(["int64", "float64", "int32"]),
    st.integers(-128, 127),
    st.sampled_from([(), (2,), (2, 3)]),
    sides,
    sides,
    st.none() | st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([None, "bool", "int64", "int32"]),
    st.data(),
)
def test_are_what_they_are_cell_by_cell(
    batches: Any, kind: str, dtype: str, value: int, inner: Any, side: Any, cut: Any,
    limit: int | None, multiple: int, mask: Any, data: Any,
) -> None:  # fmt: skip
    lengths = np.array([n for batch in batches for n in batch], dtype=np.int64)
    numbers = st.integers(0, 100)
    values = data.draw(
        arrays.arrays(np.dtype(kind), (int(lengths.sum()), *inner), elements=numbers)
    )
    bounds = np.cumsum([0, *map(len, batches)])
    found = rectangles(
        values, lengths, bounds, value, dtype=dtype, padding_side=side, mask=mask,
        truncation_side=cut, max_length=limit, multiple=multiple,
    )  # fmt: skip
    rows = np.split(values, np.cumsum(lengths)[:-1])
    if limit is not None:
        rows = [row[-limit:] if cut == "left" else row[:limit] for row in rows]
    assert len(found) == len(batches)
    order = data.draw(st.permutations(range(len(batches))))  # whoever asks first
    for k in order:
        (start, stop), (cells, real) = list(pairwise(bounds.tolist()))[k], found[k]
        width = -(-(limit or max(map(len, rows[start:stop]))) // multiple) * multiple
        np.testing.assert_array_equal(cells, alone(rows[start:stop], width, value, dtype, side))
        assert cells.dtype == np.dtype(dtype)
        assert cells.flags.owndata or cells.base is not None
        assert cells.flags.writeable
        assert cells.flags.c_contiguous
        if mask is None:
            assert real is None
            continue
        assert real.dtype == np.dtype(mask)
        ones = [np.ones(len(row), dtype=mask) for row in rows[start:stop]]
        np.testing.assert_array_equal(real, alone(ones, width, 0, mask, side))


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("uint16", "int64", -100),  # which the rows' own type cannot hold
        ("int32", "float32", float("nan")),
        ("float32", "float64", 0.1),
        ("float16", "float16", -0.0),
        ("bool", "bool", True),
        ("float64", "float64", float("-inf")),
        ("int64", "int64", -(2**63)),
        ("complex64", "complex64", 1j),  # not plain bits
    ],
)
def test_are_filled_with_any_value_of_their_type(kind: str, dtype: str, value: Any) -> None:
    values = np.array([1, 0, 1, 1, 0, 1], dtype=kind)
    lengths = np.array([1, 3, 0, 2])
    found = rectangles(values, lengths, np.array([0, 2, 4]), value, dtype=dtype)
    rows = np.split(values, np.cumsum(lengths)[:-1])
    for k, width in enumerate((3, 2)):
        expected = alone(rows[2 * k : 2 * k + 2], width, value, dtype, "right")
        assert found[k][0].tobytes() == expected.tobytes()


def test_those_without_rows_have_no_width() -> None:
    found = rectangles(np.arange(4), np.array([3, 1]), np.array([0, 0, 2, 2]), 0, dtype="int64")
    assert [cells.shape for cells, _ in found] == [(0, 0), (2, 3), (0, 0)]


@pytest.mark.parametrize("dtype", ["int64", "float32", "complex64"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_anywhere_among_the_values_in_any_order(side: Any, dtype: str) -> None:
    values = np.arange(1, 31, dtype="int32")
    starts = np.array([27, 0, 12, 5, 29, 3])  # the first and the last values are some rows'
    lengths = np.array([3, 2, 7, 0, 1, 4])
    rows = [values[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    ragged = RaggedRows(values, starts, lengths, -1, dtype=dtype, padding_side=side, mask="int64")
    index = np.array([4, 2, 0, 1, 5, 3, 2])
    for k, (cells, real) in enumerate(ragged.rectangles(index, np.array([0, 3, 5, 7]))):
        some = [rows[i] for i in index[[0, 3, 5][k] : [3, 5, 7][k]]]
        width = max(map(len, some))
        np.testing.assert_array_equal(cells, alone(some, width, -1, dtype, side))
        ones = [np.ones(len(row), dtype="int64") for row in some]
        np.testing.assert_array_equal(real, alone(ones, width, 0, "int64", side))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([*KINDS, "bool", "float64"]),
    st.sampled_from([(), (3,)]),
    st.integers(0, 6),
    sides,
)
def test_rows_are_cut_as_bytes(
    lengths: list[int], kind: str, inner: Any, most: int, side: Any
) -> None:
    offsets = np.cumsum([2, *lengths])  # rows need not start where the values do
    values = np.arange(int(offsets[-1] + 1) * int(np.prod(inner, dtype=int))) % 2 == 1
    values = values.astype(kind).reshape(-1, *inner)
    rows = [values[a:b] for a, b in pairwise(offsets.tolist())]
    found, sizes = cut_rows(values, offsets, most, side)
    expected = [row[max(0, len(row) - most) :] if side == "left" else row[:most] for row in rows]
    assert sizes.tolist() == list(map(len, expected))
    np.testing.assert_array_equal(found, np.concatenate([values[:0], *expected]))


def test_wide_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDE", 1)
    test_are_what_they_are_cell_by_cell()
    for side in ("left", "right"):
        for dtype in ("int64", "float32", "complex64"):
            test_rows_anywhere_among_the_values_in_any_order(side, dtype)
    values = np.arange(20_000, dtype=np.float32)
    monkeypatch.undo()
    lengths = np.array([9_000, 11_000])
    ((cells, real),) = rectangles(
        values, lengths, np.array([0, 2]), 0, dtype="float32", mask="bool"
    )
    assert cells.shape == (2, 11_000)
    assert np.array_equal(cells[real], values)
    assert not cells[~real].any()
