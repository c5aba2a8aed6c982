"""collate without a function: what torch stacks, and what is refused with its row."""

from __future__ import annotations

from fractions import Fraction
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
from resuming import check_resume
from trainpipes.testing import digest

HALF = Fraction(1, 2)


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
        (
            [{"x": {"a": 1}}, {"x": {"a": 1, "b": 2}}],
            1,
            r"column 'x' has the keys \['a', 'b'\] where .* has \['a'\]",
        ),
        ([({"a": 1},), ({"a": 1, "b": 2},)], 1, r"is \({'a': 1, 'b': 2},\)"),
        ([{"a": 1, "b": 2}, {"a": 1}], 1, r"the keys \['a'\] where the first .* has \['a', 'b'\]"),
        ([{"a": HALF}, {"a": HALF}], 0, r"is Fraction\(1, 2\) \(Fraction\)"),
        ([(1, 2), (1, 2, 3)], 1, r"a row has the shape \[3\]"),
        ([np.zeros(2), np.zeros(3)], 1, r"the shape \[3\] where the first .* has \[2\]"),
        ([None, 1], 0, "a row is null"),
        ([1, 2, 2**70], 2, r"is 1180591620717411303424 \(int\)"),
        (
            [torch.eye(2).to_sparse()] * 2,
            0,
            r"is tensor.* of which default_collate makes no tensor",
        ),
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


def test_floats_are_float64_wherever_integers_stand_among_them() -> None:
    rows = [{"x": x} for x in (1, 0.5, 2.5, 2, 16_777_217, 0.5)]
    found = list(tp.from_dataset(rows).batch(2).collate())
    assert same(found, list(tp.from_dataset(rows).select("x").batch(2).collate()))
    assert found[2]["x"].tolist() == [16_777_217.0, 0.5]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_binary(), pa.binary(2)])
def test_a_batch_may_hold_nothing_but_nulls_of_texts(kind: pa.DataType) -> None:
    column = pa.array(["aa", None, None, None]).cast(pa.binary()).cast(kind)
    for given in (column, column.dictionary_encode()):
        first, second = tp.from_arrow(pa.table({"x": given})).batch(2).collate()
        assert (first["x"], second["x"]) == (column[:2].to_pylist(), [None, None])


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


# Rows that a function makes of a batch


def with_image(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "image": np.full((3, 2, 2), row["x"], np.uint8)} for row in batch]


def doubled(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in batch for _ in range(2)]


def numbered(rows: int = 10) -> tp.Pipeline:
    table = pa.table({"x": range(rows), "ids": [[1] * (n % 3 + 1) for n in range(rows)]})
    return tp.from_arrow(table).sharding_filter(2).shuffle(5, seed=1)


def test_a_list_of_rows_that_map_returns_after_batch_collates_as_before_it() -> None:
    def one(row: dict[str, Any]) -> dict[str, Any]:
        return with_image([row])[0]

    rows = numbered().select("x")
    for added in (lambda rows: rows.collate(), lambda rows: rows.pad_collate()):
        expected = list(added(rows.map(one).batch(4)))
        found = list(added(rows.batch(4).map(with_image)))
        assert [digest(batch) for batch in found] == [digest(batch) for batch in expected]
        check_resume(added(rows.batch(4).map(with_image)), epochs=2, processes=0)
    lengths = rows.batch(4).map(with_image).collate(len)
    assert list(lengths) == [4, 4, 2]
    more = list(rows.batch(4).map(doubled).collate())
    assert [len(batch["x"]) for batch in more] == [8, 8, 4]


def test_pictures_may_be_decoded_once_rows_are_in_buckets() -> None:
    pipe = numbered(40).bucket_by_length(4, column="ids").map(with_image, num_workers=2)
    for batch in pipe.pad_collate():
        assert len(
            {int(n) for n in batch["attention_mask"].sum(1)} if "attention_mask" in batch else [1]
        )
        assert batch["image"].shape[1:] == (3, 2, 2)
        assert (batch["image"][:, 0, 0, 0] == batch["x"]).all()
        assert (batch["ids"].shape[1] - (batch["ids"] != 0).sum(1) <= 2).all()


def test_an_error_names_a_row_of_the_batch() -> None:
    rows = tp.from_arrow(pa.table({"x": range(8)})).batch(4)

    def ragged(batch: list[Any]) -> list[Any]:
        return [{"x": list(range(row["x"] // 6))} for row in batch]

    with pytest.raises(tp.DataError, match=r"shape \[1\] where .* \(at row 6\)"):
        list(rows.map(ragged).collate())
    with pytest.raises(tp.DataError, match=r"shape \[1\] where .* \(at row 4\)"):
        list(rows.map(ragged).map(doubled).collate())
    with pytest.raises(tp.DataError, match=r"got NoneType.* \(at row 0\)"):
        list(rows.map(lambda batch: [*batch, None]).pad_collate())


def test_what_is_no_list_of_rows_is_refused_with_what_it_is() -> None:
    rows = tp.from_arrow(pa.table({"x": range(8)})).batch(4)
    for added in (lambda rows: rows.collate(), lambda rows: rows.pad_collate()):
        with pytest.raises(tp.ConfigError, match="got a dict that a stage before it made of one"):
            list(added(rows.map(lambda batch: {"n": len(batch)})))
        with pytest.raises(tp.ConfigError, match="got a tuple that a stage"):
            list(added(rows.map(tuple)))
        with pytest.raises(tp.DataError, match=r"without rows: .*filter\(len\) \(at row 4\)"):
            list(added(rows.map(lambda batch: batch if batch[0]["x"] < 4 else [])))
        with pytest.raises(tp.ConfigError, match=r"batch\(2\) makes lists of batches: put "):
            list(added(rows.batch(2)))
        for twice in (lambda rows: rows.collate(), lambda rows: rows.pad_collate()):
            with pytest.raises(tp.ConfigError, match="collated them already: leave one of the two"):
                list(added(twice(rows)))
    with pytest.raises(tp.ConfigError, match="takes columns, got lists of Python rows"):
        list(rows.map(list).collate(format="numpy"))
    with pytest.raises(tp.ConfigError, match=r"or the map\(\) that made something of its batches"):
        list(rows.map(list).select("x"))
