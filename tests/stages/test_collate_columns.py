"""collate of columns: which types become which tensors, and lists as values and offsets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from resuming import check_resume
from trainpipes.stages.device import map_tensors
from trainpipes.testing import digest

#: A type, values of it, and the numbers that they become.
KINDS: dict[str, tuple[pa.Array, torch.dtype, list[Any]]] = {
    "decimal": (
        pa.array([Decimal("1.25"), Decimal("-3"), Decimal(0)], pa.decimal128(9, 4)),
        torch.float64, [1.25, -3.0, 0.0],
    ),
    "decimal, 50 digits": (
        pa.array([Decimal(10) ** 40, Decimal(1), Decimal(2)], pa.decimal256(50, 2)),
        torch.float64, [1e40, 1.0, 2.0],
    ),
    "date": (pa.array([0, -1, 20_000], pa.int32()).cast(pa.date32()), torch.int64, [0, -1, 20_000]),
    "date in ms": (
        pa.array([0, -86_400_000, 86_400_000], pa.int64()).cast(pa.date64()), torch.int64, [0, -1, 1],
    ),
    "time": (pa.array([1, 2, 3], pa.int32()).cast(pa.time32("ms")), torch.int64, [1, 2, 3]),
    "time in ns": (pa.array([1, 2, 3]).cast(pa.time64("ns")), torch.int64, [1, 2, 3]),
    "timestamp": (pa.array([1, -2, 2**60]).cast(pa.timestamp("ns")), torch.int64, [1, -2, 2**60]),
    "timestamp with a zone": (
        pa.array([1, 2, 3]).cast(pa.timestamp("ms", "Europe/Rome")), torch.int64, [1, 2, 3],
    ),
    "duration": (pa.array([1, 2, 3]).cast(pa.duration("us")), torch.int64, [1, 2, 3]),
    "bool": (pa.array([True, False, True]), torch.bool, [True, False, True]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_type_becomes_the_numbers_that_the_rule_says(name: str, tmp_path: Path) -> None:
    column, dtype, numbers = KINDS[name]
    table = pa.table({"n": range(3), "x": column})
    pq.write_table(table, tmp_path / "x.parquet")
    pieces = pa.concat_tables([table.slice(2), table.slice(0, 2)])
    for given, expected in (
        (tp.from_arrow(table), numbers),
        (tp.from_arrow(pieces), [numbers[2], *numbers[:2]]),
        (tp.from_arrow(table).map_batches(lambda rows: rows), numbers),
        (tp.read_parquet(tmp_path / "x.parquet"), numbers),
    ):
        (batch,) = given.batch(3).collate()
        assert (batch["x"].dtype, batch["x"].tolist()) == (dtype, expected)


def test_values_of_python_become_the_numbers_that_columns_of_them_do() -> None:
    day, moment = date(2020, 1, 2), datetime(2020, 1, 2, 3, 4, 5, 6)
    rows = [
        {"a": Decimal("1.25"), "b": day, "c": moment, "d": moment.time(), "e": moment - day0}
        for day0 in (datetime(1970, 1, 1), datetime(2000, 1, 1))
    ]
    table = pa.Table.from_pylist(rows)
    (batch,) = tp.from_dataset(rows).map(dict).batch(2).collate()
    assert digest(batch) == digest(tp.from_arrow(table).batch(2).collate().peek())
    with pytest.raises(tp.DataError, match=r"NaN.*makes no tensor.*row 1\)"):
        list(tp.from_dataset([Decimal(1), Decimal("NaN")]).batch(2).collate())


FLOATS = np.array([[0.1, 2.0], [3.0, float("inf")], [0.5, -7.0]])


@pytest.mark.parametrize(
    "rows",
    [
        [{"x": row, "n": 2**40} for row in FLOATS],
        [{"x": torch.from_numpy(row), "n": 2**40} for row in FLOATS],
        [{"x": [row, row]} for row in FLOATS],
        [{"x": row.tolist()} for row in FLOATS],
        [{"x": {"y": (row[0], "a")}} for row in FLOATS.tolist()],
        [(1, row) for row in FLOATS],
        FLOATS.tolist(),
        list(FLOATS),
        [row.astype(np.float16) for row in FLOATS],
        [torch.from_numpy(row).bfloat16() for row in FLOATS],
        [row[0] for row in FLOATS.tolist()],
        [{"x": row[0], "n": True} for row in FLOATS.tolist()],
    ],
)
def test_floats_of_any_rows_have_the_dtype_asked_for(rows: list[Any]) -> None:
    def cast(batch: Any) -> Any:
        return map_tensors(
            batch, lambda t: t.float() if getattr(t, "is_floating_point", bool)() else None
        )

    expected = [cast(batch) for batch in tp.from_dataset(rows).batch(2).collate()]
    for source in (tp.from_dataset(rows), tp.from_dataset(rows).map(lambda row: row)):
        for batches in (source.batch(2), source.batch(2).map(list)):
            found = list(batches.collate(dtype=torch.float32))
            assert digest(found) == digest(expected)
            check_resume(batches.collate(dtype=torch.float32), processes=0)


def test_floats_of_tensors_have_the_dtype_asked_for() -> None:
    for pipe in (
        tp.from_tensors(x=torch.from_numpy(FLOATS)),
        tp.from_tensors(torch.from_numpy(FLOATS)),
    ):
        for batch in pipe.batch(2).collate(dtype=torch.float16):
            (values,) = batch.values() if isinstance(batch, dict) else batch
            assert values.dtype == torch.float16


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"x": np.array([1.0, big])} for big in (0.5, 1.0, 1e300)],
            r"column 'x' holds 1e\+300, .*row 2",
        ),
        ([{"x": {"y": big}} for big in (0.5, 1.0, 1e300)], r"column 'x' holds 1e\+300, .*row 2"),
        ([{"x": big} for big in (0.5, 1.0, 1e300)], r"column 'x' holds 1e\+300, .*row 2"),
        ([0.5, 1.0, 1e300], r"a row holds 1e\+300, which float32 cannot hold; leave .*row 2"),
    ],
)
@pytest.mark.parametrize("n", [2, 3])
def test_a_float_that_the_dtype_cannot_hold_is_named(rows: list[Any], said: str, n: int) -> None:
    for pipe in (tp.from_dataset(rows), tp.from_dataset(rows).map(lambda row: row)):
        with pytest.raises(tp.DataError, match=said):
            list(pipe.batch(n).collate(dtype=torch.float32))


@pytest.mark.parametrize("name", KINDS)
def test_a_null_of_any_type_is_named_and_other_batches_come(name: str) -> None:
    column, dtype, numbers = KINDS[name]
    column = pa.concat_arrays([column, pa.nulls(1, column.type)])
    batches = iter(tp.from_arrow(pa.table({"x": column})).batch(2).collate())
    first = next(batches)["x"]
    assert (first.dtype, first.tolist()) == (dtype, numbers[:2])
    with pytest.raises(tp.DataError, match=r"column 'x' is null, which a tensor.*row 3\)"):
        next(batches)


@pytest.mark.parametrize("name", ["decimal", "date", "timestamp with a zone"])
def test_dictionaries_of_them_become_the_same_numbers(name: str) -> None:
    column, dtype, numbers = KINDS[name]
    table = pa.table({"x": column.dictionary_encode()})
    (batch,) = tp.from_arrow(pa.concat_tables([table, table.slice(1)])).batch(5).collate()
    assert (batch["x"].dtype, batch["x"].tolist()) == (dtype, [*numbers, *numbers[1:]])


@pytest.mark.parametrize("value", ["a", b"a"])
def test_a_null_among_texts_stays_wherever_it_stands(value: Any) -> None:
    for values in ([value, None], [None, value]):
        rows = tp.from_dataset([{"x": each} for each in values])
        table = tp.from_arrow(pa.table({"x": values}))
        for pipe in (rows, table, table.map(dict)):
            (batch,) = pipe.batch(2).collate()
            assert batch == {"x": values}
    (batch,) = tp.from_arrow(pa.table({"x": pa.nulls(2, pa.string())})).batch(2).collate()
    assert batch == {"x": [None, None]}


def test_batches_of_converted_columns_share_no_memory() -> None:
    table = pa.table({"x": KINDS["date"][0]})
    pipe = tp.from_arrow(table).batch(3).collate()
    next(iter(pipe))["x"].zero_()
    assert pipe.peek()["x"].tolist() == [0, -1, 20_000]


# Lists


def listed(items: Any, kind: pa.DataType | None = None, **columns: Any) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"items": pa.array(items, kind), **columns}))


LISTS = [[3, 1], [], [2], [0, 0, 1], [4], []]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int8()),
        pa.large_list(pa.uint64()),
        pa.list_view(pa.int64()),
        pa.list_(pa.uint16()),
    ],
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_values_and_offsets_are_what_an_embedding_bag_takes(kind: pa.DataType, mode: str) -> None:
    bag = torch.nn.EmbeddingBag(5, 3, mode=mode)
    ending = torch.nn.EmbeddingBag(
        5, 3, mode=mode, include_last_offset=True, _weight=bag.weight.detach()
    )
    for order in (lambda pipe: pipe, lambda pipe: pipe.shuffle(6, seed=3)):
        pipe = order(listed(LISTS, kind, row=range(6))).batch(4)
        plain = list(pipe.collate(ragged="offsets"))
        with_end = list(pipe.collate(ragged="offsets_and_end"))
        for one, other in zip(plain, with_end, strict=True):
            assert one["items"].dtype == one["items_offsets"].dtype == torch.int64
            assert other["items_offsets"].tolist() == [
                *one["items_offsets"].tolist(),
                len(one["items"]),
            ]
            rows = [LISTS[row] for row in one["row"].tolist()]
            expected = torch.cat(
                [bag(torch.tensor(row, dtype=torch.int64), torch.tensor([0])) for row in rows]
            )
            assert torch.equal(bag(one["items"], one["items_offsets"]), expected)
            assert torch.equal(ending(other["items"], other["items_offsets"]), expected)


def test_weights_go_along_without_offsets_of_their_own() -> None:
    weights = [[float(n) for n in row] for row in LISTS]
    pipe = listed(LISTS, w=weights).shuffle(6, seed=1).batch(6)
    batch = pipe.collate(ragged="offsets", weights={"items": "w"}).peek()
    assert sorted(batch) == ["items", "items_offsets", "w"]
    assert batch["w"].dtype == torch.float32
    assert batch["w"].tolist() == batch["items"].tolist()
    bag = torch.nn.EmbeddingBag(5, 3, mode="sum")
    assert bag(batch["items"], batch["items_offsets"], per_sample_weights=batch["w"]).shape == (
        6,
        3,
    )


def test_other_columns_are_collated_as_ever_and_keep_their_places() -> None:
    even = pa.array([[1, 2]] * 6, pa.list_(pa.int8(), 2))
    pipe = tp.from_arrow(pa.table({
        "a": range(6), "items": LISTS, "even": even, "text": list("abcdef"), "more": LISTS,
    }))  # fmt: skip
    batch = pipe.batch(6).collate(ragged="offsets").peek()
    assert list(batch) == ["a", "items", "items_offsets", "even", "text", "more", "more_offsets"]
    rest = pipe.select("a", "even", "text").batch(6).collate().peek()
    assert torch.equal(batch["even"], rest["even"])
    assert (batch["a"].tolist(), batch["text"]) == (rest["a"].tolist(), rest["text"])


@pytest.mark.parametrize(
    "source",
    [
        lambda: tp.from_dataset([{"items": row} for row in LISTS]),
        lambda: tp.from_dataset([{"items": np.array(row, np.int32)} for row in LISTS]),
        lambda: tp.from_dataset([{"items": torch.tensor(row, dtype=torch.int64)} for row in LISTS]),
        lambda: listed(LISTS).map(dict),
        lambda: listed(LISTS).filter(lambda row: True),
    ],
    ids=["lists", "arrays", "tensors", "map", "filter"],
)
def test_rows_of_any_kind_have_offsets(source: Callable[[], tp.Pipeline]) -> None:
    batches = list(source().batch(2).collate(ragged="offsets"))
    assert [batch["items"].tolist() for batch in batches] == [[3, 1], [2, 0, 0, 1], [4]]
    assert [batch["items_offsets"].tolist() for batch in batches] == [[0, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("columns", "options", "error", "said"),
    [
        ({"items": [["a"], []]}, {}, tp.SchemaError, r"lists of numbers.* string>: encode_categories\(\)"),
        ({"items": [[[1]], []]}, {}, tp.SchemaError, "lists of lists"),
        ({"items": [[{"a": 1}], []]}, {}, tp.SchemaError, r"lists of numbers.*struct.*select\(\)"),
        ({"items": [[1], None]}, {}, tp.DataError, r"'items' is null.*row 1\)"),
        ({"items": [[1], [None]]}, {}, tp.DataError, r"a null within a list.*row 1\)"),
        ({"items": [[1.0], [1e300]]}, {}, tp.DataError, r"1e\+300, which float32 cannot hold.*row 1\)"),
        ({"items": pa.array([[1], [2**63]], pa.list_(pa.uint64()))}, {}, tp.DataError,
            r"int64 cannot hold.*row 1\)"),
        ({"items": [[1], [2]], "items_offsets": [1, 2]}, {}, tp.SchemaError,
            "column 'items_offsets' already"),
        ({"items": [[1], [2]], "x": [1, None]}, {}, tp.DataError, r"column 'x' is null.*row 1\)"),
        ({"items": [[1], [2]], "w": [[1.0], []]}, {"weights": {"items": "w"}}, tp.DataError,
            r"'w' goes with 'items'.* got 0 where 'items' has 1.*row 1\)"),
        ({"items": [[1], [2]], "w": [1.0, 2.0]}, {"weights": {"items": "w"}}, tp.SchemaError,
            "'w' must hold lists of numbers beside"),
        ({"items": [[1], [2]]}, {"weights": {"items": "v"}}, tp.SchemaError, "no column 'v'"),
    ],
)  # fmt: skip
def test_lists_that_make_no_tensor_are_named(
    columns: Any, options: Any, error: type[Exception], said: str
) -> None:
    pipe = tp.from_arrow(pa.table(columns)).batch(2)
    with pytest.raises(error, match=said):
        list(pipe.collate(ragged="offsets", **options))


def test_rows_that_a_function_made_of_batches_are_refused() -> None:
    pipe = listed(LISTS).batch(2).map(list).collate(ragged="offsets")
    with pytest.raises(
        tp.ConfigError, match=r"takes columns, got lists of Python rows.*leave ragged"
    ):
        list(pipe)


def test_lists_without_a_value_are_tensors_without_one() -> None:
    batch = listed([[], []], pa.list_(pa.int32())).batch(2).collate(ragged="offsets").peek()
    assert (batch["items"].dtype, batch["items"].shape) == (torch.int64, (0,))
    assert batch["items_offsets"].tolist() == [0, 0]


def test_values_and_offsets_are_pinned_and_moved_as_other_tensors() -> None:
    pipe = listed(LISTS).batch(4).collate(ragged="offsets").pin().to("cpu")
    assert [batch["items_offsets"].tolist() for batch in pipe] == [[0, 2, 2, 3], [0, 1]]
