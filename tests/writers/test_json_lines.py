"""What JSON lines say of Arrow's values, compared with the standard library's reader."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.writers.formats import lines_of


def lines(table: pa.Table) -> list[Any]:
    return [json.loads(line) for line in lines_of(table).split(b"\n")[:-1]]


texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
floats = st.none() | st.floats(allow_nan=False, allow_infinity=False)
integers = st.none() | st.integers(-(2**63), 2**63 - 1)
row = st.fixed_dictionaries(
    {
        "text": texts,
        "real": floats,
        "number": integers,
        "flag": st.none() | st.booleans(),
        "numbers": st.lists(st.integers(-9, 9), max_size=3),
        "lists": st.none() | st.lists(st.none() | st.lists(texts, max_size=3), max_size=3),
        "record": st.none()
        | st.fixed_dictionaries({"a": floats, "b": st.none() | st.lists(integers, max_size=2)}),
        "turns": st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3),
    }
)  # fmt: skip
TURN = pa.struct([("role", pa.string()), ("content", pa.large_string())])
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("real", pa.float64()),
        ("number", pa.int64()),
        ("flag", pa.bool_()),
        ("numbers", pa.list_(pa.int16())),
        ("lists", pa.list_(pa.large_list(pa.string()))),
        ("record", pa.struct([("a", pa.float64()), ("b", pa.list_(pa.int64()))])),
        ("turns", pa.list_(TURN)),
    ]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(row, min_size=1, max_size=9), st.integers(0, 8), st.integers(1, 9))
def test_every_value_is_read_as_what_it_was(rows, first, count):
    table = pa.Table.from_pylist(rows, SCHEMA).slice(min(first, len(rows) - 1), count)
    found, expected = lines(table), table.to_pylist()
    assert found == expected
    assert repr(found) == repr(expected)  # 1 and 1.0 are different, and so is -0.0


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1.0, 0.25, -1e-3], pa.float64()), ["1.0", "0.25", "-0.001"]),
        (pa.array([0.1, 3.0], pa.float32()), ["0.10000000149011612", "3.0"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array(["é\u2028\x00\x1f"]), ['"é\u2028\\u0000\\u001f"']),
        (pa.array(["a", "b"]).dictionary_encode(), ['"a"', '"b"']),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), ["[1,2]", "null"]),
        (pa.array([{"k": 1}, {}, None], pa.map_(pa.string(), pa.int8())), ['{"k":1}', "{}", "null"]),
        (pa.array([datetime.date(2024, 2, 29)]), ['"2024-02-29"']),
        (pa.array([datetime.datetime(2024, 2, 29, 1, 2, 3)], pa.timestamp("s", "UTC")),
         ['"2024-02-29 01:02:03Z"']),
        (pa.array([Decimal("1.50")]), ['"1.50"']),
        (pa.array([90], pa.duration("s")), ["90"]),
        (pa.nulls(2), ["null", "null"]),
        (pa.array([{}, None], pa.struct([])), ["{}", "null"]),
        (pa.array([[1], None, []], pa.list_view(pa.int32())), ["[1]", "null", "[]"]),
        (pa.array([[Decimal("1.5"), None], None], pa.large_list_view(pa.decimal128(3, 1))),
         ['["1.5",null]', "null"]),
        (pa.array([[[1], None], None], pa.list_view(pa.list_view(pa.int8()))),
         ["[[1],null]", "null"]),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2)),
         ["[[0,1],[2,3]]", "[[4,5],[6,7]]"]),
        (pa.array(['{"a": [1, null]}', None, "[]"], pa.json_()), ['{"a":[1,null]}', "null", "[]"]),
        (pa.ListArray.from_arrays([0, 1, 1], pa.array(['"a"'], pa.json_())), ['["a"]', "[]"]),
        (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
         ["true", "false", "null"]),
        (pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([5, None])),
         ["5", "5", "null"]),
        (pa.RunEndEncodedArray.from_arrays([1, 2], pa.array(["a", None], pa.string_view())),
         ['"a"', "null"]),
        (pa.ListArray.from_arrays(
            [0, 1, 3], pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None]))
        ), ['["a"]', '["a",null]']),
        (pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string_view())), ['{"a":"b"}', "null"]),
        (pa.MapArray.from_arrays([0, 1], ["k"], pa.array(["[1]"], pa.json_())), ['{"k":[1]}']),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)  # fmt: skip
def test_each_type_has_its_text(array, expected):
    found = lines_of(pa.table({"x": array})).decode()
    assert found == "".join(f'{{"x":{text}}}\n' for text in expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_no_number_for_is_refused_with_its_row(value, tmp_path):
    rows = tp.from_arrow(pa.table({"x": [[0.5]] * 40 + [[1.0, value]] + [[]] * 3}))
    with pytest.raises(tp.DataError, match=r"'x': JSON has no NaN .* \(row 40 of those written\)"):
        rows.write_json(tmp_path / "out")


def test_half_of_a_pair_of_surrogates_is_refused_with_its_row(tmp_path):
    texts = pa.array(['"ok"'] * 40 + [r'["\ud83d\ude00", "\ud83d"]'], pa.json_())
    rows = tp.from_arrow(pa.table({"x": texts}))
    with pytest.raises(
        tp.DataError, match=r"'x': .* cannot hold '\\ud83d', half of .* \(row 40 of those written\)"
    ):
        rows.write_json(tmp_path / "out")


def test_a_map_with_a_key_twice_is_refused_with_its_row(tmp_path):
    maps = [[("a", 1), ("b", 2)]] * 40 + [[("a", 1), ("a", 2)], None]
    rows = tp.from_arrow(pa.table({"m": pa.array(maps, pa.map_(pa.string(), pa.int8()))}))
    with pytest.raises(
        tp.DataError, match=r"'m': a map has a key twice, .* \(row 40 of those written\)"
    ):
        rows.write_json(tmp_path / "out")


@pytest.mark.parametrize(
    "array",
    [
        pa.array([b"\xff"]),
        pa.array([{"image": b""}]),
        pa.array([[b"a"]]),
        pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8())),
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
    ],
)
def test_a_type_that_json_has_no_form_for_is_refused(array, tmp_path):
    rows = tp.from_arrow(pa.table({"odd": array}))
    with pytest.raises(tp.DataError, match=r"'odd': .*JSON has no form for .*drop_columns"):
        rows.write_json(tmp_path / "out")
