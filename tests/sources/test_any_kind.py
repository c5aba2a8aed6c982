"""concat and mix of rows of any kind: Arrow columns of several types, tensors, Python objects."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from torchdata.nodes import IterableWrapper

import trainpipes as tp

ROWS = 23
X = list(range(ROWS))
TEXT = [f"row {n}" for n in X]
PYTHON = [{"x": x, "text": text} for x, text in zip(X, TEXT, strict=True)]


def table(x: Any = pa.int64(), text: Any = pa.string()) -> pa.Table:  # noqa: B008
    return pa.table({"x": pa.array(X, x), "text": pa.array(TEXT, text)})


def written(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    path = folder / name
    if not path.exists():
        write(path)
    return path


def lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in PYTHON))


def arrays(path: Path) -> None:
    np.savez(path, x=np.arange(ROWS, dtype=np.int32))


def memory_map(path: Path) -> None:
    tp.write_memmap(path, {"x": np.arange(ROWS)})


def pairs(file: Any) -> Any:
    return pa.Table.from_pylist([json.loads(line) for line in file])


#: Pipelines of the same rows.
KINDS: dict[str, Callable[[Path], tp.Pipeline]] = {
    "parquet": lambda d: tp.read_parquet(
        written(d, "a.parquet", lambda p: pq.write_table(table(), p, row_group_size=7))
    ),
    "arrow": lambda d: tp.read_arrow(
        written(d, "a.arrow", lambda p: pa.feather.write_feather(table(pa.int16()), p))
    ),
    "csv": lambda d: tp.read_csv(written(d, "a.csv", lambda p: pa.csv.write_csv(table(), p)), block_rows=5),
    "json": lambda d: tp.read_json(written(d, "a.jsonl", lines), block_rows=5),
    "own format": lambda d: tp.read_files(written(d, "a.jsonl", lines), pairs),
    "from_arrow": lambda d: tp.from_arrow(table(pa.uint8(), pa.large_string())),
    "views": lambda d: tp.from_arrow(table(pa.int32(), pa.string_view())),
    "dictionary": lambda d: tp.from_arrow(table(text=pa.dictionary(pa.int8(), pa.string()))),
    "from_dataset": lambda d: tp.from_dataset(PYTHON),
    "map": lambda d: tp.from_arrow(table()).map(dict),
    "map with a schema": lambda d: tp.from_dataset(PYTHON).map(
        dict, schema=pa.schema([("x", pa.int32()), ("text", pa.string())])
    ),
}  # fmt: skip
#: The same, of which a row need not be counted.
STREAMS: dict[str, Callable[[Path], tp.Pipeline]] = {
    "filter": lambda d: tp.from_dataset(PYTHON).filter(lambda row: row["x"] >= 0),
    "from_iterable": lambda d: tp.from_iterable(lambda: iter(PYTHON)),
    "from_torchdata": lambda d: tp.from_torchdata(IterableWrapper(PYTHON)),
}
#: Pipelines of numbers alone.
NUMBERS: dict[str, Callable[[Path], tp.Pipeline]] = {
    "parquet": lambda d: KINDS["parquet"](d).select("x"),
    "from_dataset": lambda d: tp.from_dataset([{"x": n} for n in X]),
    "tensors": lambda d: tp.from_tensors(x=torch.arange(ROWS)),
    "narrow tensors": lambda d: tp.from_tensors(x=torch.arange(ROWS, dtype=torch.int16)),
    "npz": lambda d: tp.read_numpy(written(d, "a.npz", arrays)),
    "memmap": lambda d: tp.from_memmap(written(d, "a.memmap", memory_map)),
}


def values(rows: Any) -> list[Any]:
    return [
        {name: v.item() if hasattr(v, "item") else v for name, v in row.items()} for row in rows
    ]


@pytest.mark.parametrize("reach", [2, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", [KINDS, NUMBERS], ids=["text", "numbers"])
def test_rows_of_any_two_kinds_are_joined_and_mixed(kinds: Any, reach: int, tmp_path: Path) -> None:
    """Each with those that are near in the list, in both orders."""
    schemas: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    ring = list(kinds)
    for place, one in enumerate(ring):
        expected = values(kinds[one](tmp_path))
        for other in [ring[place - 1], *(ring * 2)[place + 1 : place + reach]]:
            first, second = kinds[one](tmp_path), kinds[other](tmp_path)
            assert values(tp.concat(first, second)) == [*expected, *expected], (one, other)
            mixed = tp.mix({"a": first, "b": second}, weights={"a": 1, "b": 1}).sharding_filter(2)
            assert sorted(row["x"] for row in values(mixed)) == sorted([*X, *X]), (one, other)
            for pipe in (tp.concat(first, second), mixed):
                batches = pipe.batch(10).collate(format="arrow")
                schemas[frozenset((one, other))] |= {str(batch.schema.types) for batch in batches}
    assert {pair: len(types) for pair, types in schemas.items()} == dict.fromkeys(schemas, 1)


@pytest.mark.parametrize("stream", STREAMS)
def test_rows_that_are_not_counted_are_mixed_with_columns(stream: str, tmp_path: Path) -> None:
    for kind in ("parquet", "from_arrow", "from_dataset"):
        sources = {"a": STREAMS[stream](tmp_path), "b": KINDS[kind](tmp_path)}
        rows = list(tp.mix(sources, weights={"a": 1, "b": 1}))
        assert sorted(row["x"] for row in rows) == sorted([*X, *X])
        assert {row["text"] for row in rows} == set(TEXT)


# Types

#: Types of two columns and the type that holds both.
TYPES: list[tuple[Any, Any, Any]] = [
    (pa.int32(), pa.int64(), pa.int64()),
    (pa.uint8(), pa.int8(), pa.int16()),
    (pa.uint32(), pa.int32(), pa.int64()),
    (pa.float32(), pa.float64(), pa.float64()),
    (pa.float16(), pa.float32(), pa.float32()),
    (pa.int64(), pa.float32(), pa.float64()),
    (pa.string(), pa.large_string(), pa.large_string()),
    (pa.string_view(), pa.string(), pa.string()),
    (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), pa.large_string()),
    (pa.binary(), pa.large_binary(), pa.large_binary()),
    (pa.binary(3), pa.binary(), pa.binary()),
    (pa.null(), pa.string(), pa.string()),
    (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
    (pa.list_(pa.int32()), pa.large_list(pa.int16()), pa.large_list(pa.int32())),
    (pa.list_(pa.int32(), 2), pa.list_(pa.int32()), pa.list_(pa.int32())),
    (pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.string())),
    (pa.list_(pa.list_(pa.int8())), pa.list_(pa.list_(pa.int64())), pa.list_(pa.list_(pa.int64()))),
    (
        pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int64()), ("b", pa.string())]),
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
    ),
    (
        pa.list_(pa.struct([("role", pa.string())])), pa.list_(pa.struct([("role", pa.large_string())])),
        pa.list_(pa.struct([("role", pa.large_string())])),
    ),
    (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us")),
    (pa.date32(), pa.date64(), pa.date64()),
    (pa.decimal128(5, 2), pa.decimal128(7, 1), pa.decimal128(8, 2)),
]  # fmt: skip


def some(kind: pa.DataType) -> list[Any]:
    """Two values of a type."""
    asked = pa.types
    if asked.is_struct(kind):
        return [{field.name: some(field.type)[n] for field in kind} for n in (0, 1)]
    if asked.is_nested(kind):
        return [some(kind.value_type), some(kind.value_type)]
    if asked.is_dictionary(kind):
        return some(kind.value_type)
    if asked.is_null(kind):
        return [None, None]
    if asked.is_decimal(kind):
        return [decimal.Decimal("1.5"), None]
    if asked.is_temporal(kind):
        day = datetime.date(2020, 1, 2)
        return [day if asked.is_date(kind) else datetime.datetime(2020, 1, 2), None]
    if "binary" in str(kind):
        return [b"abc", None]
    if "string" in str(kind):
        return ["abc", None]
    return [1, None]


@pytest.mark.parametrize(("one", "other", "both"), TYPES, ids=str)
def test_columns_of_two_types_become_one_that_holds_both(one: Any, other: Any, both: Any) -> None:
    tables = [pa.table({"c": pa.array(some(kind), kind)}) for kind in (one, other)]
    expected = [row for t in tables for row in t.cast(pa.schema([("c", both)])).to_pylist()]
    sources = [tp.from_arrow(t) for t in tables]
    for order in (1, -1):
        joined = tp.concat(*sources[::order])
        (batch,) = joined.batch(4).collate(format="arrow")
        assert batch.schema.field("c").type == both
        assert batch.to_pylist() == (expected if order == 1 else [*expected[2:], *expected[:2]])
    for pipe in (
        tp.mix(dict(zip("ab", sources, strict=True)), weights={"a": 1, "b": 1}),
        tp.concat(*sources).shuffle(9)
        if "view" in str(one)
        else tp.concat(*sources).shuffle(scope="global"),
    ):
        batches = list(pipe.batch(1).collate(format="arrow"))
        assert {batch.schema.field("c").type for batch in batches} == {both}
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert sorted(map(repr, rows)) == sorted(map(repr, expected))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.bool_(), pa.int8()), (pa.string(), pa.binary()), (pa.string(), pa.int64()),
        (pa.int64(), pa.uint64()), (pa.list_(pa.int64()), pa.int64()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")), (pa.decimal128(5, 2), pa.float64()),
        (pa.list_(pa.string()), pa.list_(pa.int8())), (pa.date32(), pa.timestamp("us")),
    ],
    ids=str,
)  # fmt: skip
def test_types_that_no_type_holds_are_refused_and_both_are_named(one: Any, other: Any) -> None:
    sources = [tp.from_arrow(pa.table({"c": pa.array([None], kind)})) for kind in (one, other)]
    named = rf"column 'c' as {re.escape(str(one))}.*column 'c' as {re.escape(str(other))}.*map_batches\(\)"
    for pipe in (tp.concat(*sources), tp.mix(dict(zip("ab", sources, strict=True)))):
        with pytest.raises(tp.SchemaError, match=named):
            list(pipe)


# Rows of Python


def test_python_rows_take_the_types_of_columns_where_theirs_say_nothing() -> None:
    types = {"ids": pa.list_(pa.int32()), "note": pa.large_string(), "ok": pa.bool_()}
    schema = pa.schema(types)
    arrow = tp.from_arrow(pa.table({"ids": [[1, 2]], "note": ["a"], "ok": [True]}, schema=schema))
    empty = tp.from_dataset([{"ids": [], "note": None, "ok": None}] * 300)
    (batch,) = tp.concat(arrow, empty).batch(301).collate(format="arrow")
    assert batch.schema.types == schema.types
    full = tp.from_dataset([{"ids": [n], "note": "b", "ok": n > 1} for n in range(4)])
    (batch,) = tp.concat(full, arrow).batch(9).collate(format="arrow")
    assert list(map(str, batch.schema.types)) == ["list<item: int64>", "large_string", "bool"]
    assert batch.to_pylist()[3:] == [
        {"ids": [3], "note": "b", "ok": True},
        {"ids": [1, 2], "note": "a", "ok": True},
    ]
    for bad in ({"ids": ["a"], "note": "b", "ok": True}, {"ids": [1], "note": "b", "ok": 1}):
        with pytest.raises(tp.SchemaError, match=r"as list<item: int32>|as bool"):
            list(tp.concat(arrow, tp.from_dataset([bad])))


def test_flipped_and_big_endian_arrays_are_tensors_too() -> None:
    numbers = np.arange(6, dtype=np.int32).reshape(3, 2)
    for array in (numbers[::-1], numbers[:, ::-1], numbers.astype(">i4")):
        assert [row["x"].tolist() for row in tp.from_tensors(x=array)] == array.tolist()


def test_arrays_in_python_rows_go_with_tensors_and_lists() -> None:
    arrays = tp.from_dataset([{"v": np.full(3, n, np.float32)} for n in range(4)])
    lists = tp.from_arrow(pa.table({"v": pa.array([[0.5] * 3], pa.list_(pa.float32()))}))
    tensors = tp.from_tensors(v=torch.ones(2, 3))
    batches = list(tp.concat(arrays, lists, tensors).batch(7).pad_collate())
    assert batches[0]["v"].shape == (7, 3)
    assert batches[0]["v"].dtype == torch.float32
    other = tp.from_tensors(v=torch.ones(2, 4))
    with pytest.raises(tp.SchemaError, match=r"tensors torch.float32\[3\].*|fixed_size_list"):
        list(tp.concat(tensors, other))


ODD = [{"x": "no" if n == 290 else n, "text": "a"} for n in range(300)]
COLUMNS, NONE = tp.from_arrow(table()), tp.from_dataset([{"x": object(), "text": "a"}])
#: Two sources, and what is said of them.
UNLIKE: dict[str, tuple[tp.Pipeline, tp.Pipeline, str]] = {
    "a value that the wider type does not hold": (
        tp.from_arrow(pa.table({"c": [*range(20), 2**53 + 1]})), tp.from_arrow(pa.table({"c": [0.5]})),
        r"column 'c' as int64, which becomes column 'c' as double.*row 20",
    ),
    "a column less": (
        COLUMNS, tp.from_dataset([{"x": 1}]), r"has column 'text' as string, \S+( 1)? no column 'text'"
    ),
    "a column more": (
        COLUMNS, tp.from_dataset([{"x": 1, "text": "a", "z": 1}]),
        r"no column 'z', \S+( 1)? column 'z' as int64",
    ),
    "a row that does not fit": (
        COLUMNS, tp.from_dataset(ODD), r"'x' = 'no', and the column holds int64.*row 290"
    ),
    "rows that make no columns": (
        COLUMNS, NONE, r"Arrow columns x, text.* Python objects that make no columns"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNLIKE)
def test_rows_that_do_not_go_together_are_refused_with_both_sources(kind: str) -> None:
    one, other, said = UNLIKE[kind]
    for pipe in (tp.concat(one, other), tp.mix({"a": one, "b": other}, weights={"a": 1, "b": 1})):
        with pytest.raises(tp.SchemaError, match=said):
            list(pipe)


def test_python_rows_that_make_no_columns_stay_as_they_are_beside_others() -> None:
    assert len(list(tp.concat(NONE, COLUMNS.map(dict)))) == ROWS + 1


def test_python_rows_alone_stay_as_they_are() -> None:
    calls: list[int] = []

    def seen(row: dict[str, Any]) -> Any:
        calls.append(row["x"])
        return (row["x"], object())

    rows = tp.from_dataset(PYTHON).map(seen)
    assert all(isinstance(row, tuple) for row in tp.concat(rows, rows))
    assert sorted(calls) == sorted([*X, *X])  # no row is looked at besides


# Where it runs


def sources() -> list[tp.Pipeline]:
    return [
        tp.from_arrow(table(pa.int32(), pa.large_string())),
        tp.from_dataset(PYTHON),
        tp.from_tensors(x=torch.arange(ROWS)).with_columns(named),
    ]


def named(columns: Any) -> Any:
    return {"text": columns.column("x").cast(pa.string())}


def test_stages_above_see_columns_of_one_schema() -> None:
    joined = tp.concat(*sources())
    parts = {str(n): source for n, source in enumerate(sources())}
    for pipe in (joined, tp.mix(parts)):
        batches = list(pipe.select("text", "x").tokenize("bytes", "text").batch(8).pad_collate())
        assert {batch["x"].dtype for batch in batches} == {torch.int64}
        tables: list[pa.Schema] = []
        list(
            pipe.map_batches(lambda t, tables=tables: tables.append(t.schema) or t, format="arrow")
        )
        assert len({str(schema) for schema in tables}) == 1
    nested = tp.mix({"both": joined.shuffle(9), "more": tp.from_arrow(table(pa.uint8()))})
    batches = list(nested.batch(9).collate(format="arrow"))
    assert len({str(batch.schema.types) for batch in batches}) == 1
    both = {"in": tp.mix(parts), "out": tp.from_dataset(PYTHON)}
    assert len(list(tp.mix(both, weights={"in": 3, "out": 1}))) >= 4 * ROWS
    assert len(list(tp.concat(joined, tp.from_dataset(PYTHON), joined))) == 7 * ROWS


def test_a_cache_above_keeps_the_common_columns(tmp_path: Path) -> None:
    first = tp.from_arrow(table(pa.int32()))

    def types(other: Any) -> set[str]:
        pipe = tp.concat(first, tp.from_arrow(table(other))).cache(tmp_path)
        batches = pipe.batch(64).collate(format="arrow")
        return {str(batch.schema.field("x").type) for batch in batches}

    assert types(pa.int32()) == {"int32"}
    assert types(pa.int64()) == {"int64"}
    assert types(pa.float64()) == {"double"}
    assert types(pa.int32()) == {"int32"}


def test_a_name_that_the_mix_adds_is_there_when_types_are_looked_for() -> None:
    parts = {name: tp.from_dataset([{"t": name}] * 4) for name in "ab"}
    pipe = tp.mix(parts, output_column="whose").map(lambda row: {"text": row["whose"] + row["t"]})
    assert {row["text"] for row in pipe.select("text")} == {"aa", "bb"}


def test_a_source_without_rows_changes_no_kind_and_stages_above_still_see_columns() -> None:
    empty = tp.from_arrow(table().slice(0, 0))
    objects = tp.from_dataset(PYTHON)
    for parts in ((empty, objects), (objects, empty)):
        assert list(tp.concat(*parts)) == PYTHON
        (batch,) = tp.concat(*parts).select("x").batch(99).collate(format="arrow")
        assert batch.schema == pa.schema([("x", pa.int64())])
    assert list(tp.concat(empty, empty)) == []


def test_an_error_of_a_later_source_comes_when_its_row_is_due() -> None:
    def fails(columns: Any) -> Any:
        raise ValueError("no")

    late = tp.from_arrow(table()).map_batches(fails)
    both = tp.concat(tp.from_arrow(table(pa.int32())), late)
    assert [row["x"] for row in both.take(ROWS)] == X
    with pytest.raises(ValueError, match="no"):
        list(both)


class Own(tp.Source):
    """A source of one's own, of which nothing is known before it is read."""

    rows: Any
    holds_data = True

    def open(self) -> tp.RowSource:
        return OwnRows(self.rows)


class OwnRows(tp.RowSource):
    def __init__(self, rows: Any) -> None:
        self._rows, self.lengths = rows, np.array([len(rows)])

    def read(self, block: int, start: int, stop: int) -> Any:
        return self._rows[start:stop]

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": len(self._rows)}


def test_sources_of_ones_own_go_with_others() -> None:
    tables, rows = (tp.Pipeline([Own(data)]) for data in (table(pa.int8()), PYTHON))
    for parts in ((tables, rows), (rows, tables), (tables, tp.from_arrow(table()))):
        batches = list(tp.concat(*parts).shuffle(64).batch(9).collate(format="arrow"))
        assert {str(batch.schema.field("x").type) for batch in batches} == {"int64"}
    assert list(tp.concat(rows, tp.from_dataset(PYTHON))) == PYTHON * 2
