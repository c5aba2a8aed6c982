"""map_batches: what a function gets of columns, and what becomes of what it returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import trainpipes as tp


def numbers(count: int = 8) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(count)}))


def cells(numbers: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array for each number, of small values that every dtype holds."""
    wide = np.asarray(numbers).reshape(-1, *(1 for _ in shape))
    return ((wide + np.arange(np.prod(shape)).reshape(shape)) % 2).astype(dtype)


def arrays(dtype: str, shape: tuple[int, ...], format: Any = "numpy") -> tp.Pipeline:
    def make(columns: Any) -> dict[str, Any]:
        made = cells(columns["x"], dtype, shape)
        return {"x": columns["x"], "a": made if format == "numpy" else torch.from_numpy(made)}

    return numbers().map_batches(make, format=format, version="1")


SHAPES = [(2,), (2, 3), (1, 2, 2)]
DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


@pytest.mark.parametrize(
    ("dtype", "shape", "format"),
    [*zip(DTYPES, cycle(SHAPES), cycle(["numpy", "torch"])),
     *zip(DTYPES[::-1], cycle(SHAPES), cycle(["numpy", "torch"]))],
)  # fmt: skip
def test_arrays_of_several_dimensions_keep_their_shape_and_dtype_on_every_way_out(
    dtype: str, shape: tuple[int, ...], format: Any, tmp_path: Path
) -> None:
    pipe = arrays(dtype, shape, format)
    expected = cells(range(8), dtype, shape)

    def check(found: Any) -> None:
        assert str(found.dtype).removeprefix("torch.") == dtype
        assert np.array_equal(np.asarray(found), expected)

    check(np.stack([row["a"] for row in pipe]))
    check(default_collate(list(pipe))["a"])
    batches = pipe.batch(8)
    again = pipe.rename({"a": "b"}).rename({"b": "a"}).shuffle(1)
    again = again.map_batches(lambda columns: {"a": columns["a"]}, format=format).batch(8).collate()
    tp.write_memmap(tmp_path / "rows.memmap", pipe)
    written = tp.from_memmap(tmp_path / "rows.memmap").batch(8).collate()
    kept = DataLoader(pipe.to_map_dataset(str(tmp_path / "rows.arrow")), batch_size=8)
    of_rows = pipe.map(dict).batch(8).collate()
    torchs = batches.collate(format="torch")
    for way in (batches.collate(), torchs, batches.pad_collate(), of_rows, again, kept, written):
        check(next(iter(way))["a"])


def test_rows_of_one_block_do_not_share_memory() -> None:
    first, second = list(arrays("float32", (2,)))[:2]
    first["a"][:] = 9
    assert second["a"].tolist() == [1.0, 0.0]


def test_fixed_size_lists_are_stacked_by_collate_and_stay_lists_in_rows(tmp_path: Path) -> None:
    column = pa.array([[0.5, n] for n in range(6)], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"a": column}), tmp_path / "x.parquet", row_group_size=4)
    pipe = tp.list_files(tmp_path).read_parquet()
    assert next(iter(pipe)) == {"a": [0.5, 0.0]}
    batch = next(iter(pipe.batch(6).collate()))["a"]
    assert (batch.dtype, batch.tolist()) == (torch.float32, [[0.5, float(n)] for n in range(6)])


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_the_form_of_a_column_does_not_depend_on_the_rows_at_hand(format: Any) -> None:
    ragged = pa.array([None, [1, 2], [], [3]], pa.list_(pa.int32()))
    table = pa.table({"n": range(4), "r": ragged})
    seen: dict[int, Any] = {}

    def look(columns: Any) -> Any:
        seen.update(zip(map(int, columns["n"]), columns["r"], strict=True))
        return columns

    found = list(tp.from_arrow(table).map_batches(look, format=format))
    assert found == table.to_pylist()
    kind: Any = np.ndarray if format == "numpy" else torch.Tensor
    assert seen[0] is None
    assert all(isinstance(seen[n], kind) for n in (1, 2, 3))


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_list_views_beside_a_null_are_the_lists_that_they_were(format: Any) -> None:
    lists = [[1, 2], None, [], [3]]
    table = pa.table({"r": pa.array(lists, pa.list_view(pa.int64()))})
    found = list(tp.from_arrow(table).map_batches(lambda columns: columns, format=format))
    assert [row["r"] for row in found] == lists


def test_ragged_tensors_come_back_in_their_dtype() -> None:
    table = pa.table({"r": pa.array([[1, 2], [], [3]], pa.list_(pa.int16()))})
    found = tp.from_arrow(table).map_batches(lambda columns: columns, format="torch")
    (back,) = found.batch(3).collate(format="arrow")
    assert back.schema.field("r").type == pa.list_(pa.int16())


@pytest.mark.parametrize("format", ["numpy", "torch"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2, 3, 4, None, 6], pa.int64()),
        pa.array([True] * 4 + [None, False]),
        pa.array([[1], [2], [], [4], [None, 5], [6]], pa.list_(pa.int64())),
        pa.array([[1, 2]] * 4 + [None, [3, 4]], pa.list_(pa.int64(), 2)),
        pa.array([[1.0, 2.0]] * 4 + [[None, 0.5], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        pa.array([[[1, 2]]] * 4 + [[None, [3, 4]], []], pa.list_(pa.list_(pa.int64(), 2))),
        pa.array([[[1], [2]]] * 4 + [[[3, None], []], None], pa.list_(pa.list_(pa.int64()), 2)),
    ],
    ids=lambda column: str(column.type),
)
def test_a_null_without_a_place_in_an_array_is_refused_with_its_row(
    column: Any, format: Any, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"n": column}), tmp_path / "x.parquet", row_group_size=3)
    pipe = tp.list_files(tmp_path).read_parquet().map_batches(lambda c: c, format=format)
    with pytest.raises(tp.DataError, match="column 'n' holds a null") as caught:
        list(pipe)
    error = caught.value
    assert (error.row_group, error.row) == (1, 4)
    assert str(error.path).endswith("x.parquet")
    assert "map_batches" in str(error.stage)


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_a_null_in_a_dictionary_or_a_run_is_refused_too(format: Any) -> None:
    numbers = pa.array([5, None, 7])
    runs = pa.RunEndEncodedArray.from_arrays([1, 2, 3], numbers)
    for column in (numbers.dictionary_encode(), runs):
        pipe = tp.from_arrow(pa.table({"n": column})).map_batches(lambda c: c, format=format)
        with pytest.raises(tp.DataError, match=r"column 'n' holds a null.*row 1\)"):
            list(pipe)


@pytest.mark.parametrize("unit", ["s", "ns"])
def test_encoded_times_are_those_of_the_plain_column(unit: Any) -> None:
    times = pa.array([1_000_000_000, None, 3_000_000_000]).cast(pa.timestamp(unit))
    runs = pa.RunEndEncodedArray.from_arrays([1, 2, 3], times)
    table = pa.table({"plain": times, "coded": times.dictionary_encode(), "runs": runs})
    for format in ("numpy", "torch"):
        (batch,) = tp.from_arrow(table).batch(3).collate(format=format)
        assert str(batch["coded"]) == str(batch["runs"]) == str(batch["plain"])


def test_nulls_among_floats_and_texts_have_a_place() -> None:
    table = pa.table({"f": [0.5, None], "t": ["a", None]})
    found = list(tp.from_arrow(table).map_batches(lambda c: c, format="numpy"))
    assert [row["t"] for row in found] == ["a", None]
    assert np.isnan(found[1]["f"])


def test_a_row_that_makes_no_columns_is_named_once() -> None:
    table = pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    with pytest.raises(tp.SchemaError) as caught:
        list(tp.from_arrow(table).map_batches(lambda c: c, format="numpy"))
    assert str(caught.value).count("(at row 0)") == 1


def test_intervals_are_python_values() -> None:
    spans = pa.array([pa.MonthDayNano([1, 2, 3]), None])
    table = pa.table({"s": spans, "l": pa.ListArray.from_arrays([0, 1, 2], spans)})
    for format in ("numpy", "torch"):
        (batch,) = tp.from_arrow(table).batch(2).collate(format=format)
        assert {name: list(values) for name, values in batch.items()} == table.to_pydict()


def test_masked_arrays_have_nulls_where_they_are_masked() -> None:
    def masked(columns: Any) -> Any:
        flat = np.ma.masked_array(columns["x"], columns["x"] == 1)
        pairs = np.stack([columns["x"]] * 2, axis=1)
        both = np.ma.masked_array(pairs, (pairs == 2) & np.array([False, True]))
        return {"m": flat, "p": both}

    found = list(numbers(3).map_batches(masked, format="numpy"))
    assert [row["m"] for row in found] == [0, None, 2]
    assert found[2]["p"] == [2, None]
    assert found[1]["p"].tolist() == [1, 1]


TIMES = [np.datetime64("2020-01-01", "us"), datetime(2020, 1, 2)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda c: {"y": 5}, "in 'y' that cannot be made a column: one int for all rows"),
        (lambda c: {"y": None}, "in 'y' that cannot be made a column: one NoneType for all rows"),
        (lambda c: {"y": np.float32(5)}, "that cannot be made a column: one float32 for all rows"),
        (lambda c: {"y": "abcdefgh"}, "in 'y' that cannot be made a column: one str for all rows"),
        (lambda c: {"y": b"abcdefgh"}, "one bytes for all rows"),
        (lambda c: {"y": {"a": 1}}, "one dict for all rows"),
        (lambda c: {"y": [1, "a"] * 4}, "'y'"),
        (lambda c: {"y": [TIMES[x % 2] for x in c["x"]]}, "column 'y' has .*datetime"),
        (lambda c: {"y": [1] * len(c["x"]) + ["a"] * (len(c["x"]) < 8)}, "column 'y' has 'a'"),
        (lambda c: {"y": np.zeros(8, np.complex64)}, "in 'y' that cannot be made a column"),
        (lambda c: {1: c["x"]}, "the name of a column is a string, got 1"),
        (lambda c: {"x": c["x"], "y": c["x"][1:]}, "equally long, got . in 'x', . in 'y'"),
        (lambda c: pa.table([c["x"], c["x"]], names=["y", "y"]), "two columns 'y'"),
        (lambda c: [c["x"]], "a dict of columns or a pyarrow.Table, got list"),
        (lambda c: None, "a dict of columns or a pyarrow.Table, got NoneType"),
    ],
)
def test_what_makes_no_columns_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(tp.SchemaError, match=message):
        list(numbers().map_batches(returned, format="numpy"))


def test_arrays_in_another_byte_order_and_bfloat16_are_taken() -> None:
    swapped = numbers(3).map_batches(lambda c: {"y": c["x"].astype(">i4")}, format="numpy")
    assert [row["y"] for row in swapped] == [0, 1, 2]
    half = numbers(3).map_batches(lambda c: {"y": c["x"].to(torch.bfloat16)}, format="torch")
    assert [row["y"] for row in half] == [0.0, 1.0, 2.0]


def test_lists_of_arrays_keep_their_dtype() -> None:
    def make(columns: Any) -> Any:
        count = len(columns["x"])
        return {
            "flat": [np.zeros(n % 3, np.float32) for n in range(count)],
            "deep": [np.zeros((n % 3, 2), np.float32) for n in range(count)],
            "objects": np.array([np.zeros(n % 3 + 1, np.int8) for n in range(count)], dtype=object),
        }

    (table,) = numbers(5).map_batches(make, format="numpy").batch(5).collate(format="arrow")
    kinds = []
    for field in table.schema:
        kind = field.type
        while pa.types.is_nested(kind):
            kind = kind.value_type
        kinds.append(kind)
    assert kinds == [pa.float32(), pa.float32(), pa.int8()]


MOST = 50_000
BUFFER, PAIRS, TENSOR = np.empty(MOST), np.empty((MOST, 2)), torch.empty(MOST)


def into_arrays(columns: Any) -> dict[str, Any]:
    count = len(columns["x"])
    BUFFER[:count] = columns["x"] * 2
    PAIRS[:count] = columns["x"][:, None] * 3
    return {"flat": BUFFER[:count], "pairs": PAIRS[:count], "strided": PAIRS[:count, 1]}


def into_a_tensor(columns: Any) -> dict[str, Any]:
    TENSOR[: len(columns["x"])] = columns["x"] * 2
    return {"flat": TENSOR[: len(columns["x"])]}


@pytest.mark.parametrize(("function", "format"), [(into_arrays, "numpy"), (into_a_tensor, "torch")])
def test_parts_of_an_array_that_is_written_again_keep_their_values(
    function: Any, format: Any
) -> None:
    pipe = numbers(MOST).with_columns(function, format=format)
    for batch in pipe.batch(1000).collate():
        for name in batch.keys() - {"x"}:
            wanted = batch["x"] * (2 if name == "flat" else 3)
            first = batch[name][:, 0] if name == "pairs" else batch[name]
            assert first.tolist() == wanted.tolist(), name


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
    assert [str(row) for row in found] == [str({"x": n + 1, "text": f"row {n}"}) for n in range(3)]


def test_a_whole_table_may_come_back_as_it_may_from_map_batches() -> None:
    def both(table: pa.Table) -> pa.Table:
        return table.append_column("again", table.column("x")).select(["again", "text"])

    expected = [{"x": n, "text": f"row {n}", "again": n} for n in range(2)]
    assert list(rows(2).with_columns(both)) == expected


def test_rows_that_are_dicts_become_columns_first() -> None:
    pipe = tp.from_iterable(lambda: ({"x": n} for n in range(3)))
    assert list(pipe.with_columns(squares, format="numpy").drop_columns("x")) == [
        {"square": 0}, {"square": 1}, {"square": 4},
    ]  # fmt: skip


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


def fails_at(bad: int, error: Callable[[int], Exception], returned: type) -> Any:
    def function(columns: Any) -> dict[str, Any]:
        numbers = columns["x"].tolist()
        if bad in numbers:
            raise error(numbers.index(bad))
        return {"y": list(map(str, numbers)) if returned is list else np.array(numbers)}

    return function


@pytest.mark.parametrize("returned", [list, np.ndarray])
@pytest.mark.parametrize("bad", [0, 3, 64, 100])
@pytest.mark.parametrize(
    "error",
    [
        lambda place: tp.DataError("bad", row=place),
        lambda place: tp.DataError("bad"),
        lambda place: ValueError("bad"),
    ],
)
def test_an_error_of_the_function_names_its_row_where_types_are_looked_for_too(
    bad: int, error: Any, returned: Any
) -> None:
    read = numbers(150)
    for pipe in (read.shuffle(1, seed=1), read.shuffle(150, seed=1)):
        for add in (pipe.map_batches, pipe.with_columns):
            with pytest.raises(ValueError, match=r"^bad") as caught:
                list(add(fails_at(bad, error, returned), format="numpy", thread_safe=bad == 3))
            said = [str(caught.value), *getattr(caught.value, "__notes__", [])][-1]
            assert re.search(rf"\bat row {bad}\b", said), said
            assert len(said) < 120


@pytest.mark.parametrize("returned", [list, np.ndarray])
def test_rows_before_a_bad_one_come_first(returned: Any) -> None:
    error = lambda place: tp.DataError("bad", row=place)  # noqa: E731
    pipe = numbers(150).with_columns(fails_at(100, error, returned), format="numpy")
    rows = iter(pipe)
    assert next(rows)["x"] == 0
    with pytest.raises(tp.DataError) as caught:
        list(rows)
    assert caught.value.row == 100


def test_an_error_of_no_row_by_itself_names_none() -> None:
    def together(columns: Any) -> Any:
        if len(columns["x"]) > 1:
            raise ValueError("too many")
        return columns

    def never(columns: Any) -> Any:
        calls.append(len(columns["x"]))
        raise ConnectionError("no server")

    calls: list[int] = []
    for function, kind in ((together, ValueError), (never, ConnectionError)):
        with pytest.raises(kind) as caught:
            list(numbers().map_batches(function, format="numpy"))
        assert caught.value.__notes__[0].startswith("raised in map_batches(")
        assert " at " not in caught.value.__notes__[0]
    assert len(calls) == 1


def test_a_value_of_another_type_among_the_first_rows_is_named_once() -> None:
    mixed = lambda c: {"y": ["a" if x == 100 else 1 for x in c["x"]]}  # noqa: E731
    with pytest.raises(tp.SchemaError, match=r"'y' both int64 and string: 'a'") as caught:
        list(numbers(150).with_columns(mixed, format="numpy"))
    assert str(caught.value).count("(at row") == 1
    assert caught.value.row == 100


def test_an_error_of_the_function_names_the_stage_and_the_row() -> None:
    with pytest.raises(KeyError) as caught:
        list(rows().with_columns(lambda columns: {"y": columns["z"]}, format="numpy"))
    assert "with_columns(" in caught.value.__notes__[0]


def test_columns_that_are_dropped_are_gone_and_the_others_in_order() -> None:
    pipe = tp.from_arrow(pa.table({"a": [1], "b": [2], "c": [3]}))
    assert list(next(iter(pipe.drop_columns("b"))).items()) == [("a", 1), ("c", 3)]
    assert list(pipe.drop_columns("a", "c")) == [{"b": 2}]
    with pytest.raises(tp.SchemaError, match="did you mean 'text'"):
        list(rows().drop_columns("txt"))
    with pytest.raises(tp.ConfigError, match="keep one column at least, and have x, text"):
        list(rows().drop_columns("x", "text"))
    with pytest.raises(tp.ConfigError, match=r"drop_columns\(columns\) must be a column name or"):
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


def test_another_number_of_rows_is_refused() -> None:
    pipe = rows().with_columns(lambda columns: {"y": columns["x"][1:]}, format="numpy")
    said = "one row for each row it gets, got 1 rows and returned 0"
    with pytest.raises(tp.DataError, match=said):
        list(pipe)
