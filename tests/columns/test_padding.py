"""``pad_sequences`` against Keras' own algorithm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainpipes import pad_sequences
from trainpipes.errors import ConfigError, DataError

sides = st.sampled_from(["pre", "post"])


def keras(
    sequences: Any, maxlen: int | None, dtype: str, padding: str, truncating: str, value: Any
) -> Any:
    """Row by row, as Keras does it."""
    maxlen = max(map(len, sequences)) if maxlen is None else maxlen
    shape = next((np.asarray(s).shape[1:] for s in sequences if len(s)), ())
    padded = np.full((len(sequences), maxlen, *shape), value, dtype=dtype)
    for row, s in zip(padded, sequences, strict=True):
        kept = np.asarray(s[-maxlen:] if truncating == "pre" else s[:maxlen], dtype=dtype)
        if len(s) and padding == "post":
            row[: len(kept)] = kept
        elif len(s):
            row[-len(kept) :] = kept
    return padded


@given(
    st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), min_size=1, max_size=6),
    st.none() | st.integers(1, 12),
    st.sampled_from(["int32", "int64", "float32"]),
    sides,
    sides,
    st.integers(-9, 9),
)
def test_it_gives_what_keras_gives(
    rows: list[list[int]], maxlen: int | None, dtype: str, padding: str, truncating: str, value: int
) -> None:
    found = pad_sequences(rows, maxlen, dtype, padding, truncating, value)
    expected = keras(rows, maxlen, dtype, padding, truncating, value)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.none() | st.integers(1, 7), sides, sides
)
def test_values_may_be_arrays(
    lengths: list[int], maxlen: int | None, padding: str, truncating: str
) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.random((n, 2, 3)) for n in lengths]
    found = pad_sequences(rows, maxlen, "float64", padding, truncating, 0.5)
    if not any(lengths):  # nothing says which shape the values have
        assert found.shape == (len(rows), maxlen or 0)
        return
    np.testing.assert_array_equal(found, keras(rows, maxlen, "float64", padding, truncating, 0.5))


@pytest.mark.parametrize(
    "rows",
    [
        [[1.7, 2.2], [-3.9]],
        [np.array([1, 2]), [3], (4, 5, 6)],
        np.arange(6).reshape(2, 3),
        ((), (1,)),
        [[True], [False, True]],
        [[[1, 2]], [[3, 4], [5, 6]]],
    ],
)
def test_any_kind_of_sequence_will_do(rows: Any) -> None:
    expected = keras(rows, 2, "int32", "pre", "pre", 0)
    np.testing.assert_array_equal(pad_sequences(rows, 2), expected)


def test_tensors_that_numpy_does_not_take_are_padded() -> None:
    rows = [torch.tensor([1.5], requires_grad=True), torch.ones(2, dtype=torch.bfloat16)]
    assert pad_sequences(rows, dtype="float32").tolist() == [[0, 1.5], [1, 1]]


class Labelled:
    """Rows by labels, as a pandas Series has them."""

    def __init__(self, rows: dict[int, Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows.values())

    def __getitem__(self, label: int) -> Any:
        return self.rows[label]


def test_rows_that_have_labels_are_taken_in_their_order() -> None:
    for make in (list, np.array):
        labelled = Labelled({2: make([1]), 0: make([2, 3]), 7: make([4, 5, 6])})
        assert pad_sequences(labelled).tolist() == [[0, 0, 1], [0, 2, 3], [4, 5, 6]]  # type: ignore[arg-type]


def test_what_is_filled_in_may_have_the_shape_of_the_values() -> None:
    rows = [[[3, 4], [5, 6]], [[1, 2]]]
    for side in ("pre", "post"):
        found = pad_sequences(rows, padding=side, value=[0, 7])
        np.testing.assert_array_equal(found, keras(rows, 2, "int32", side, "pre", [0, 7]))


def test_strings_go_into_objects() -> None:
    found = pad_sequences([["a"], ["bc", "d"]], dtype=object, value="")
    assert found.tolist() == [["", "a"], ["bc", "d"]]


def test_a_length_of_nothing_is_nothing() -> None:
    assert pad_sequences([[1], []], maxlen=0).shape == (2, 0)
    assert pad_sequences([[], []]).shape == (2, 0)
    assert pad_sequences([], maxlen=3).shape == (0, 3)


@pytest.mark.parametrize(
    ("sequences", "options", "error", "message"),
    [
        ([[1]], {"padding": "left"}, ConfigError, 'padding must be "pre" or "post", got \'left\''),
        (
            [[1]],
            {"dtype": torch.int64},
            ConfigError,
            "dtype must be a dtype of NumPy.*got torch.int64",
        ),
        ([[1]], {"truncating": 1}, ConfigError, 'truncating must be "pre" or "post", got 1'),
        (iter([[1]]), {}, DataError, r"got list_iterator, .* make a list\(\) of it"),
        ([[1], 2], {}, DataError, "got 2 at position 1, which has no length"),
        ([], {}, DataError, "got none; pass maxlen"),
        ([[1]], {"value": "x"}, ConfigError, "'x' is a string.*pass dtype=object"),
        ([[[1, 2]], [[3]]], {}, DataError, r"first, \(2,\), got \(1,\) .* at position 1"),
        ([[[1, 2], [3]]], {}, DataError, "at position 0 makes no array.*inhomogeneous"),
        (["ab", "c"], {"dtype": object}, DataError, "at position 0 makes no array: it is a single"),
    ],
)
def test_what_it_cannot_pad_it_refuses(
    sequences: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pad_sequences(sequences, **options)
    assert issubclass(error, ValueError)  # as Keras raises


@pytest.mark.parametrize(
    ("sequences", "options", "said"),
    [
        ([[1], np.array([2**40])], {}, r"position 1 .* int32: 1099511627776 is not within"),
        ([np.array([1]), np.array([-1])], {"dtype": "uint8"}, r"position 1 .*-1 is not within 0 to"),
        ([torch.tensor([300])], {"dtype": "uint8"}, r"position 0 .*300 is not within 0 to 255"),
        ([[1], [300]], {"dtype": "uint8"}, r"position 1 .*300"),
        ([np.array([1.0, np.nan])], {}, "position 0 makes no array of int32"),
        ([[1], [np.int64(300)]], {"dtype": "uint8"}, r"position 1 .*300 is not within 0 to 255"),
        ([[1], [np.int64(-1)]], {"dtype": "uint64"}, r"position 1 .*-1 is not within 0 to"),
        ([[[1]], [[np.int64(300)]]], {"dtype": "int8"}, r"position 1 .*300 is not within -128 to 127"),
        ([[1], [float("nan")]], {}, "position 1 makes no array of int32"),
        ([[1], [None]], {}, "position 1 makes no array of int32"),
        (pa.array([[1], None]), {}, "got .*None.* at position 1, which has no length"),
    ],
)  # fmt: skip
def test_a_value_that_the_dtype_does_not_hold_is_named_and_becomes_no_other(
    sequences, options, said
):
    with pytest.raises(DataError, match=said):
        pad_sequences(sequences, **options)


def test_a_value_to_fill_in_that_the_dtype_does_not_hold_is_refused():
    for value, dtype in (
        (300, "uint8"),
        (-1, "uint8"),
        (0.5, "int32"),
        (math.nan, "int32"),
        (None, "int8"),
    ):
        with pytest.raises(ConfigError, match=f"value must be one that {dtype} holds, got {value}"):
            pad_sequences([[1]], value=value, dtype=dtype)
    with pytest.raises(ConfigError, match="maxlen must be an integer of 0 or more, got -1"):
        pad_sequences([[1]], maxlen=-1)
    mixed = [np.array([1], np.int64), np.array([2**63], np.uint64), [3]]
    assert pad_sequences(mixed, dtype="uint64").tolist() == [[1], [2**63], [3]]
