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

import trainpipes as tp

TODAY = datetime.date(2020, 1, 1)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, 2, 3, 4, 5, None, 7, 8]), "column 'a' is null"),
        (pa.array([1.5] * 5 + [None] + [2.5] * 2), "column 'a' is null"),
        (
            pa.array([[1, 2]] * 5 + [[3]] + [[4, 5]] * 2),
            r"has the shape \[1\].* has \[2\].*pad_collate",
        ),
        (pa.array([[1, 2]] * 5 + [None] + [[4, 5]] * 2), "column 'a' is null"),
        (pa.array([[1, 2]] * 5 + [[3, None]] + [[4, 5]] * 2), r"is \[3, None\]"),
        (
            pa.array([[1, 2]] * 5 + [None] + [[4, 5]] * 2, pa.list_(pa.int8(), 2)),
            "column 'a' is null",
        ),
    ],
    ids=["null", "null float", "ragged", "null list", "null within", "null of fixed size"],
)
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


def test_what_torch_stacks_is_stacked_as_before() -> None:
    table = pa.table({"n": [1, 2], "t": ["a", "b"], "f": pa.array([0.5, 1.5], pa.float32())})
    (batch,) = tp.from_arrow(table).batch(2).collate()
    assert batch["n"].tolist() == [1, 2]
    assert batch["t"] == ["a", "b"]
    assert batch["f"].dtype == torch.float64  # rows hold Python's floats
    ((left, right),) = tp.from_dataset([(1, {"a": 2}), (3, {"a": 4})]).batch(2).collate()
    assert (left.tolist(), right["a"].tolist()) == ([1, 3], [2, 4])
