"""with_columns and drop_columns: which columns rows have after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp


def rows(count: int = 20) -> tp.Pipeline:
    table = {"x": range(count), "text": [f"row {n}" for n in range(count)]}
    return tp.from_arrow(pa.table(table))


def squares(columns: Any) -> dict[str, Any]:
    return {"square": columns["x"] * columns["x"]}


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_columns_come_after_those_that_are_there(format: Any) -> None:
    found = list(rows().with_columns(squares, format=format))
    assert found == [{"x": n, "text": f"row {n}", "square": n * n} for n in range(20)]
    assert list(found[0]) == ["x", "text", "square"]


def test_a_column_of_a_name_that_is_there_takes_its_place() -> None:
    found = list(rows(3).with_columns(lambda columns: {"x": columns["x"] + 1}, format="numpy"))
    assert [list(row.items()) for row in found] == [
        [("x", n + 1), ("text", f"row {n}")] for n in range(3)
    ]


def test_a_whole_table_may_come_back_as_it_may_from_map_batches() -> None:
    def both(table: pa.Table) -> pa.Table:
        return table.append_column("again", table.column("x")).select(["again", "text"])

    assert list(rows(2).with_columns(both)) == [
        {"x": n, "text": f"row {n}", "again": n} for n in range(2)
    ]


def test_arrays_of_several_dimensions_reach_the_batch_as_they_are() -> None:
    def images(columns: Any) -> dict[str, Any]:
        return {"image": np.broadcast_to(columns["x"][:, None, None], (len(columns["x"]), 2, 3))}

    batch = next(iter(rows().with_columns(images, format="numpy").drop_columns("text").batch(4)
                      .collate()))  # fmt: skip
    assert batch["image"].shape == (4, 2, 3)
    assert torch.equal(batch["image"][:, 1, 2], batch["x"])


def test_rows_that_are_dicts_become_columns_first() -> None:
    pipe = tp.from_iterable(lambda: ({"x": n} for n in range(3)))
    assert list(pipe.with_columns(squares, format="numpy").drop_columns("x")) == [
        {"square": 0}, {"square": 1}, {"square": 4},
    ]  # fmt: skip


def test_python_lists_have_the_type_of_the_first_rows_also_after_a_resume() -> None:
    def tags(columns: Any) -> dict[str, Any]:
        return {"tags": [["odd"] if x % 2 else [] for x in columns["x"].tolist()]}

    pipe = rows().with_columns(tags, format="numpy").batch(1)
    pipe.load_state_dict(pipe.state_at(18))
    assert next(iter(pipe))[0]["tags"] == []


def refuse_thirteen(table: pa.Table) -> pa.Table:
    for place, x in enumerate(table.column("x").to_pylist()):
        if x == 13:
            raise tp.DataError("an unlucky number", row=place)
    return table


def test_an_error_of_the_function_may_say_which_row_it_is_about(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(20)}), tmp_path / "x.parquet", row_group_size=5)
    read = tp.list_files(tmp_path).read_parquet()
    for pipe in (read.with_columns(refuse_thirteen), read.map_batches(refuse_thirteen)):
        with pytest.raises(tp.DataError, match=r"an unlucky number \(at .*x\.parquet") as caught:
            list(pipe)
        assert (caught.value.row_group, caught.value.row) == (2, 13)


def test_another_number_of_rows_is_refused() -> None:
    pipe = rows().with_columns(lambda columns: {"y": columns["x"][1:]}, format="numpy")
    with pytest.raises(
        tp.DataError, match="one row for each row it gets, got 1 rows and returned 0"
    ):
        list(pipe)


def test_what_makes_no_columns_is_refused() -> None:
    with pytest.raises(
        tp.SchemaError, match=r"returns a dict of columns or a pyarrow.Table, got int"
    ):
        list(rows().with_columns(lambda columns: 3))
    with pytest.raises(tp.ConfigError, match=r"with_columns\(fn\) must be a function, got 3"):
        rows().with_columns(3)  # type: ignore[arg-type]


def test_an_error_of_the_function_names_the_stage_and_the_row() -> None:
    with pytest.raises(KeyError) as caught:
        list(rows().with_columns(lambda columns: {"y": columns["z"]}, format="numpy"))
    assert "with_columns(" in caught.value.__notes__[0]


def test_finished_batches_are_refused() -> None:
    with pytest.raises(tp.ConfigError, match="after them"):
        list(rows().drop_columns("text").batch(2).collate().with_columns(squares))


def test_columns_that_are_dropped_are_gone_and_the_others_in_order() -> None:
    pipe = tp.from_arrow(pa.table({"a": [1], "b": [2], "c": [3]}))
    assert list(next(iter(pipe.drop_columns("b"))).items()) == [("a", 1), ("c", 3)]
    assert list(pipe.drop_columns("a", "c")) == [{"b": 2}]


def test_a_column_to_drop_must_be_there() -> None:
    with pytest.raises(tp.SchemaError, match="did you mean 'text'"):
        list(rows().drop_columns("txt"))


def test_one_column_is_left() -> None:
    with pytest.raises(tp.ConfigError, match="keep one column at least, and have x, text"):
        list(rows().drop_columns("x", "text"))
    with pytest.raises(
        tp.ConfigError, match=r"drop_columns\(columns\) must be a column name or several"
    ):
        rows().drop_columns()


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("batched", r"map_batches\(fn\) .* replaces them, with_columns\(fn\) adds"),
        ("batch_size", r"map_batches\(fn\)"),
        ("num_proc", "num_workers"),
        ("remove_columns", "drop_columns"),
        ("with_indices", "enumerate"),
    ],
)
def test_options_of_another_librarys_map_lead_to_what_is_here(option: str, hint: str) -> None:
    options: Any = {option: True}
    with pytest.raises(TypeError, match=hint):
        rows().map(dict, **options)
