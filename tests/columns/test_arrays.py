"""Arrow's arrays and NumPy's hold the same values, whichever way, whatever their type, slice and nulls."""

from __future__ import annotations

import datetime
import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.columns.arrays import (
    apart,
    first_null,
    gathered,
    laid_out,
    list_array,
    list_lengths,
    one_chunk,
    python_to_arrow,
    to_arrow,
    to_numpy,
)
from trainpipes.columns.columns import rows_that_match
from trainpipes.columns.python_values import lists_of

NUMBERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
NUMBERS += [np.dtype(name) for name in ("f2", "f4", "f8", "?")]
LISTS = [pa.list_(pa.int32()), pa.large_list(pa.float32()), pa.list_(pa.bool_())]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]

dtypes = st.sampled_from(NUMBERS)
small = st.lists(st.integers(0, 100), max_size=40)


@st.composite
def columns(draw: st.DrawFn, values: st.SearchStrategy[Any], kind: pa.DataType) -> Any:
    """An array, or one of several chunks, each a part of a larger one."""
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        whole = pa.array(draw(st.lists(values, max_size=20)), kind)
        start = draw(st.integers(0, len(whole)))
        chunks.append(whole.slice(start, draw(st.integers(0, len(whole) - start))))
    return chunks[0] if len(chunks) == 1 else pa.chunked_array(chunks, kind)


@st.composite
def numbers(draw: st.DrawFn) -> Any:
    kind = pa.from_numpy_dtype(draw(dtypes))
    values: st.SearchStrategy[Any] = st.integers(0, 100)
    if pa.types.is_boolean(kind):
        values = st.booleans()
    elif pa.types.is_floating(kind):
        values = st.floats(width=16).map(np.float16 if kind.bit_width == 16 else float)
    if draw(st.booleans()):
        values |= st.none()
    return draw(columns(values, kind))


@st.composite
def ragged(draw: st.DrawFn, kinds: list[pa.DataType], null: bool = False) -> Any:
    kind = draw(st.sampled_from(kinds))
    values: st.SearchStrategy[Any] = st.text(max_size=5)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        values = st.binary(max_size=5)
    elif kind.num_fields:
        is_bool = pa.types.is_boolean(kind.value_type)
        values = st.lists(st.booleans() if is_bool else st.integers(0, 100), max_size=5)
    return one_chunk(draw(columns(values | st.none() if null else values, kind)))


@given(numbers())
def test_numbers_are_those_that_arrow_says(column):
    expected = column.to_pylist()
    found = to_numpy(column)
    if None not in expected:
        assert pa.from_numpy_dtype(found.dtype) == column.type
    elif pa.types.is_boolean(
        column.type
    ):  # as Arrow gives them: there is no other way to hold them
        assert found.tolist() == expected
        return
    assert None in expected or not found.flags.writeable
    assert len(found) == len(expected)
    expected = [np.nan if value is None else value for value in expected]
    np.testing.assert_array_equal(found, np.array(expected, dtype=found.dtype))


@given(dtypes, small, st.integers(1, 3), st.sampled_from("<>"))
def test_arrow_holds_the_numbers_that_it_is_given(dtype, values, step, order):
    given_ = np.array(values, dtype=dtype.newbyteorder(order))[::step]
    found = to_arrow(given_)
    found.validate(full=True)
    assert found.type == pa.from_numpy_dtype(dtype)
    assert found.to_pylist() == given_.tolist()
    np.testing.assert_array_equal(to_numpy(found), given_)


@given(dtypes, st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=40))
def test_arrow_holds_the_nulls_that_it_is_given(dtype, pairs):
    values = np.array([value for value, _ in pairs], dtype=dtype)
    null = np.array([is_null for _, is_null in pairs], dtype=np.bool_)
    found = to_arrow(values, null)
    found.validate(full=True)
    both = zip(values.tolist(), null.tolist(), strict=True)
    assert found.to_pylist() == [None if is_null else value for value, is_null in both]
    assert first_null(found) == (int(np.argmax(null)) if null.any() else -1)


@pytest.mark.parametrize("shape", [(2, 3), (3, 4, 5)])
def test_lists_of_fixed_sizes_in_such_lists_are_gathered_where_they_are_sliced(shape):
    values = np.arange(20 * math.prod(shape)).reshape(20, *shape)
    whole, index = lists_of(values), np.array([3, 0, 14])
    wanted = values[5:][index].tolist()
    assert gathered(whole.slice(5), index).to_pylist() == wanted
    structs = pa.StructArray.from_arrays([whole], ["a"]).slice(5)
    assert [row["a"] for row in gathered(structs, index).to_pylist()] == wanted
    holes = pa.array([None, *values.tolist()], whole.type).slice(6)
    assert gathered(holes, index).to_pylist() == wanted
    table = pa.table({"n": range(15), "x": whole.slice(5)})
    assert gathered(table, index)["x"].to_pylist() == wanted
    assert np.flatnonzero(rows_that_match(table, pc.field("n") > 12)).tolist() == [13, 14]
    assert rows_that_match(table, pc.field("x").is_valid()).all()


@pytest.mark.parametrize(
    "values",
    [
        np.array(["2020-01-01", "2021-02-03"], "datetime64[D]"),
        np.array(["a", "bc"]),
        np.ma.masked_array([1, 2, 3], [False, True, False]),
        np.array([1, None, "x"][:2], dtype=object),
    ],
    ids=lambda values: str(values.dtype),
)
def test_what_is_no_plain_number_becomes_what_arrow_makes_of_it(values):
    assert to_arrow(values).equals(pa.array(values))


@given(ragged(LISTS))
def test_lists_taken_apart_are_their_values_and_where_they_start(rows):
    values, offsets = apart(rows)
    flat = values.to_pylist()
    edges = offsets.tolist()
    assert edges[0] == 0
    assert edges[-1] == len(flat)
    assert [flat[a:b] for a, b in itertools.pairwise(edges)] == rows.to_pylist()


@given(ragged(TEXTS))
def test_texts_taken_apart_are_their_bytes_and_where_they_start(rows):
    content, offsets = apart(rows)
    flat, edges = content.tobytes(), offsets.tolist()
    assert edges[0] == 0
    assert edges[-1] == len(flat)
    expected = [v.encode() if isinstance(v, str) else v for v in rows.to_pylist()]
    assert [flat[a:b] for a, b in itertools.pairwise(edges)] == expected


@given(ragged([*TEXTS, *LISTS], null=True), st.data())
def test_gathered_rows_are_those_at_the_numbers(rows, data):
    numbers = st.lists(st.integers(0, len(rows) - 1), max_size=30) if len(rows) else st.just([])
    index = np.array(data.draw(numbers), np.int64)
    found, table = gathered(rows, index), gathered(pa.table({"x": rows, "y": rows}), index)
    found.validate(full=True)
    values = rows.to_pylist()
    assert found.type == rows.type
    assert found.to_pylist() == [values[n] for n in index]
    assert table.column(1).to_pylist() == found.to_pylist()


@given(st.lists(st.none() | st.integers(0, 2), max_size=12), st.data())
def test_run_ends_are_gathered_as_other_rows_are(values, data):
    rows = pc.run_end_encode(pa.array(values, pa.int64()))
    numbers = st.lists(st.integers(0, len(values) - 1), max_size=30) if values else st.just([])
    index = np.array(data.draw(numbers), np.int64)
    found = gathered(pa.table({"y": values, "x": rows}), index)["x"]
    assert found.type == rows.type
    assert found.to_pylist() == [values[n] for n in index]


def views_and_runs() -> dict[str, Any]:
    """Arrays of three rows for which Arrow has no ``take``."""
    views = pa.array(["a", "b"], pa.string_view())
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None]))
    rows, deep = [0, 1, 2, 3], pa.map_(pa.string_view(), pa.large_list(pa.binary_view()))
    return {
        "a map of views": pa.array([[("a", "q")], None, []], pa.map_(pa.string(), pa.string_view())),
        "fixed lists of views": pa.array([["a"], None, ["b"]], pa.list_(pa.string_view(), 1)),
        "JSON in views": pa.ExtensionArray.from_storage(
            pa.json_(pa.string_view()), pa.array(["1", None, "2"], pa.string_view())
        ),
        "views in maps in structs in lists": pa.array(
            [[{"a": [("k", [b"v"])]}, None], None, [{"a": None}]], pa.list_(pa.struct([("a", deep)]))
        ),
        "runs of views": pa.RunEndEncodedArray.from_arrays([2, 3], views),
        "runs of lists": pa.RunEndEncodedArray.from_arrays([2, 3], pa.array([["a"], None])),
        "runs in lists": pa.ListArray.from_arrays(rows, runs),
        "runs in maps": pa.MapArray.from_arrays(rows, ["a", "b", "c"], runs),
        "runs in structs": pa.StructArray.from_arrays([runs], ["r"], mask=pa.array([False, True, False])),
        "runs in fixed lists": pa.FixedSizeListArray.from_arrays(runs, 1),
    }  # fmt: skip


@pytest.mark.parametrize("kind", views_and_runs())
def test_views_and_run_ends_at_any_depth_are_gathered_shuffled_and_written(kind, tmp_path):
    column = views_and_runs()[kind]
    for rows in (column, pa.concat_arrays([column] * 3).slice(2, 5)):
        values = rows.to_pylist()
        for index in ([], [1], [2, 0, 1, 1]):
            found = gathered(rows, np.array(index, np.int64))
            found.validate(full=True)
            assert found.type == rows.type
            assert found.to_pylist() == [values[n] for n in index]
        flat = laid_out(rows)
        flat.validate(full=True)
        assert flat.to_pylist() == values
    pipe = tp.from_arrow(pa.table({"x": column, "n": range(3)}))
    wanted = list(pipe)
    for shuffled in (pipe.shuffle(3), pipe.shuffle(scope="global")):
        assert sorted(shuffled, key=lambda row: row["n"]) == wanted
    pipe.write_arrow(tmp_path / "arrow")
    assert list(tp.read_arrow(tmp_path / "arrow")) == wanted
    if "runs" not in kind:  # which Parquet cannot hold
        pipe.write_parquet(tmp_path / "parquet")
        assert list(tp.read_parquet(tmp_path / "parquet")) == wanted


def test_run_ends_become_tensors_as_other_numbers_do():
    rows = tp.from_arrow(pa.table({"x": pc.run_end_encode(pa.array([5, 5, 6]))}))
    for batched in (rows.batch(3).collate(), rows.batch(3).pad_collate()):
        assert [batch["x"].tolist() for batch in batched] == [[5, 5, 6]]


@given(dtypes, st.lists(small, max_size=20))
def test_lists_of_values_and_lengths(dtype, rows):
    values = np.array([value for row in rows for value in row], dtype=dtype)
    found = list_array(values, np.array([len(row) for row in rows], dtype=np.int64))
    found.validate(full=True)
    assert found.type == pa.list_(pa.from_numpy_dtype(dtype))
    assert found.to_pylist() == [np.array(row, dtype).tolist() for row in rows]


@given(ragged([*TEXTS, *LISTS], null=True) | numbers().map(one_chunk))
def test_python_values_become_the_array_that_they_are_of(rows):
    found = python_to_arrow(rows.to_pylist(), rows.type)
    found.validate(full=True)
    assert found.type == rows.type
    assert repr(found.to_pylist()) == repr(rows.to_pylist())


def test_nested_and_other_python_values_become_the_array_that_they_are_of():
    nested = pa.large_list(pa.list_(pa.string()))
    for values, kind in (
        ([[["a", None], None, []], None, []], nested),
        ([None, datetime.date(2020, 1, 2)], pa.date32()),
        ([None, {"a": 1}], pa.struct([("a", pa.int8())])),
    ):
        found = python_to_arrow(values, kind)
        found.validate(full=True)
        assert found.equals(pa.array(values, kind))


@given(numbers())
def test_one_chunk_is_the_whole_column(column):
    found = one_chunk(column)
    assert isinstance(found, pa.Array)
    assert found.type == column.type
    assert repr(found.to_pylist()) == repr(column.to_pylist())


def test_memory_is_shared_where_it_can_be():
    values = np.arange(10, dtype=np.int32)
    array = to_arrow(values)
    assert np.shares_memory(to_numpy(array.slice(3)), values)
    assert not np.shares_memory(to_numpy(to_arrow(values[::2])), values)
    content, _ = apart(list_array(values, np.array([4, 6])).slice(1))
    assert np.shares_memory(to_numpy(content), values)


@given(
    columns(st.lists(st.integers(0, 9), max_size=5), pa.list_(pa.int32())),
    st.lists(st.integers(0, 10**6), max_size=9),
)
def test_lengths_of_lists_are_known_by_their_offsets(column: Any, places: list[int]) -> None:
    column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    lengths = [len(row) for row in column.to_pylist()]
    index = np.array([n % len(lengths) for n in places] if lengths else [], dtype=np.int64)
    assert list_lengths(column, None).tolist() == lengths
    assert list_lengths(column, index).tolist() == [lengths[n] for n in index]


def test_lengths_of_rows_that_may_be_null_or_no_lists_are_not_known() -> None:
    for column in ([[1], None], [1, 2], ["a", "b"]):
        assert list_lengths(pa.chunked_array([column]), None) is None
