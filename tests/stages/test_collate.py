"""collate without a function: what torch stacks, and what is refused with its row."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import trainpipes as tp

TODAY = datetime.date(2020, 1, 1)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, 2, 3, 4, 5, None, 7, 8], "column 'a' is null"),
        ([1.5] * 5 + [None] + [2.5] * 2, "column 'a' is null"),
        ([[1, 2]] * 5 + [[3]] + [[4, 5]] * 2, r"has the shape \[1\].* has \[2\].*pad_collate"),
        ([[1, 2]] * 5 + [None] + [[4, 5]] * 2, "column 'a' is null"),
        ([[1, 2]] * 5 + [[3, None]] + [[4, 5]] * 2, r"is \[3, None\]"),
        (pa.array([[1, 2]] * 5 + [None] + [[4, 5]] * 2, pa.list_(pa.int8(), 2)), "column 'a' is null"),
    ],
    ids=["null", "null float", "ragged", "null list", "null within", "null of fixed size"],
)  # fmt: skip
def test_a_row_that_cannot_be_stacked_is_named(column: Any, message: str, tmp_path: Path) -> None:
    table = pa.table({"n": range(8), "a": column})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    pipe = tp.list_files(tmp_path).read_parquet().batch(4).collate()
    with pytest.raises(tp.DataError, match=message) as caught:
        list(pipe)
    error = caught.value
    assert (error.row_group, error.row, error.stage) == (1, 5, "collate()")
    assert str(error.path).endswith("x.parquet")


@pytest.mark.parametrize(
    ("rows", "row", "message"),
    [
        ([{"a": 1}, {"a": 1, "b": 2}], 1, r"the keys \['a', 'b'\] where the first .* has \['a'\]"),
        ([{"a": 1, "b": 2}, {"a": 1}], 1, r"the keys \['a'\] where the first .* has \['a', 'b'\]"),
        ([{"a": TODAY}, {"a": TODAY}], 0, r"is datetime.date\(2020, 1, 1\) \(date\)"),
        ([(1, 2), (1, 2, 3)], 1, r"a row has the shape \[3\]"),
        ([np.zeros(2), np.zeros(3)], 1, r"the shape \[3\] where the first .* has \[2\]"),
        ([None, 1], 0, "a row is null"),
        ([1, 2, 2**70], 2, r"is 1180591620717411303424 \(int\)"),
    ],
)
def test_python_rows_that_cannot_be_stacked_are_named(rows: Any, row: int, message: str) -> None:
    pipe = tp.from_dataset(rows).batch(len(rows)).collate()
    with pytest.raises(tp.DataError, match=message) as caught:
        list(pipe)
    assert caught.value.row == row


class Whole(int):
    """A kind of int that is not int itself."""


def same(found: Any, expected: Any) -> bool:
    """Whether two batches are alike in types, dtypes and bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, torch.Tensor):
        alike = found.dtype == expected.dtype and found.shape == expected.shape
        return alike and found.numpy().tobytes() == expected.numpy().tobytes()
    if isinstance(found, dict):
        return [*found] == [*expected] and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2, -(2**63), 2**63 - 1],
        [0.5, -0.0, float("nan"), float("inf")],
        [True, False, True, True],
        [1, 2.5, True, 3],
        [True, 2, 3, 4],
        [Whole(1), Whole(2), 3, 4],
        ["a", "b", "c", "d"],
        [b"a", b"b", b"c", b"d"],
        [(1, "a", 0.5)] * 4,
        [(1, (2, {"x": 3.5}))] * 4,
        [()] * 4,
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        [{"a": n, "b": n / 4, "c": str(n), "d": {"e": n}} for n in range(4)],
        [{"b": 1, "a": 2}, {"a": 3, "b": 4}] * 2,
        [{}] * 4,
        [np.float32(n) for n in range(4)],
        [np.arange(3, dtype=np.int16) + n for n in range(4)],
        [torch.arange(3) + n for n in range(4)],
        [{"x": torch.zeros(2, 2), "y": n} for n in range(4)],
    ],
)
def test_rows_are_stacked_bit_for_bit_as_torch_stacks_them(rows: list[Any]) -> None:
    for threads in (0, None, 1):
        loader = tp.Loader(tp.from_dataset(rows).batch(3).collate(), threads=threads)
        expected = [default_collate(rows[:3]), default_collate(rows[3:])]
        assert same(list(loader), expected)


def test_columns_are_stacked_bit_for_bit_as_their_rows_would_be() -> None:
    generator = np.random.default_rng(0)
    columns: dict[str, Any] = {
        str(np.dtype(kind)): generator.integers(0, 100, 40).astype(kind)
        for kind in "bhilBHIL?efd"  # all of NumPy's numbers
    }
    columns["text"] = [f"row {n}" for n in range(40)]
    columns["lists"] = [[n, n + 1] for n in range(40)]
    columns["struct"] = [{"x": n, "y": n / 3} for n in range(40)]
    columns["images"] = pa.FixedSizeListArray.from_arrays(np.arange(240, dtype=np.uint8), 6)
    table = pa.table(columns)
    # From the middle of a buffer, and in several pieces.
    pieces = pa.concat_tables([table.slice(20), table.slice(0, 9)])
    for given in (table, table.slice(3, 30), pieces):
        rows = given.to_pylist()
        for row in rows:
            row["images"] = np.array(row["images"], np.uint8)
        expected = [default_collate(rows[k : k + 8]) for k in range(0, len(rows), 8)]
        found = list(tp.from_arrow(given).batch(8).collate())
        assert same(found, expected)
        found[0]["int32"].zero_()  # no batch shares memory with another, or with the table
        assert same(list(tp.from_arrow(given).batch(8).collate()), expected)


class Point:
    x = 3


def test_a_function_that_torch_is_given_for_a_type_is_called() -> None:
    pipe = tp.from_dataset([(n, Point()) for n in range(4)]).batch(2).collate()
    default_collate_fn_map[Point] = lambda points, *, collate_fn_map: [one.x for one in points]
    try:
        assert list(pipe) == [[pytest.approx([0, 1]), [3, 3]], [pytest.approx([2, 3]), [3, 3]]]
    finally:
        del default_collate_fn_map[Point]


class Counted:
    """Items that say when they were asked for, one of which cannot be had."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> int:
        self.asked.append(number)
        if number == 42:
            raise OSError("a bad sector")
        return number


@pytest.mark.parametrize("threads", [0, None])
def test_items_are_asked_for_when_their_batch_is(threads: int | None) -> None:
    dataset = Counted()
    loader = tp.Loader(tp.from_dataset(dataset).batch(5).collate(), threads=threads)
    batches = iter(loader)
    for number in range(8):
        assert next(batches).tolist() == dataset.asked[-5:]
        assert dataset.asked == list(range(5 * number + 5))
    state = loader.state_dict()
    for _ in range(2):  # asked again, it fails again
        with pytest.raises(OSError, match="a bad sector") as caught:
            next(batches)
        assert "row 42" in caught.value.__notes__[0]
        assert loader.state_dict() == state
