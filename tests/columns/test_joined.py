"""Tables joined in memory of large pages are what Arrow joins."""

from collections.abc import Iterator
from typing import Any
from weakref import ref

import pyarrow as pa
import pytest

from trainpipes import SchemaError
from trainpipes.columns import payload
from trainpipes.columns.payload import join_payloads

COLUMNS: dict[str, Any] = {
    "ints": pa.array(range(50), pa.int16()),
    "floats": pa.array([n / 3 for n in range(50)]),
    "lists": pa.array([list(range(n % 4)) for n in range(50)], pa.list_(pa.int32())),
    "long lists": pa.array([[0.5] * (n % 3) for n in range(50)], pa.large_list(pa.float32())),
    "texts": pa.array([f"täxt {n}" * (n % 3) for n in range(50)]),
    "long texts": pa.array([f"{n}" for n in range(50)], pa.large_string()),
    "bytes": pa.array([bytes([n]) * 3 for n in range(50)], pa.binary()),
    "empty": pa.array([""] * 50),
    "nothing in lists": pa.array([[]] * 50, pa.list_(pa.int64())),
    "nulls": pa.array([None if n % 7 == 0 else n for n in range(50)]),
    "null lists": pa.array([None if n % 5 == 0 else [n] for n in range(50)]),
    "nulls in lists": pa.array([[n, None] for n in range(50)]),
    "bools": pa.array([n % 2 == 0 for n in range(50)]),
    "nested": pa.array([[[n], [n, n]] for n in range(50)]),
    "structs": pa.array([{"a": n, "b": [n]} for n in range(50)]),
    "times": pa.array(range(50), pa.timestamp("s")),
    "fixed": pa.array([[n, n + 1] for n in range(50)], pa.list_(pa.int32(), 2)),
    "words": pa.array(["a", "b"] * 25).dictionary_encode(),
}


def joined_tables(tables: list[pa.Table]) -> pa.Table:
    # One row more than there is, or the last table would be kept as it is.
    joining = payload.Joining(sum(map(len, tables)) + 1)
    for table in tables:
        joining.add(table)
    return joining.table()


@pytest.mark.parametrize("name", COLUMNS)
def test_as_arrow_joins_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(payload, "LARGE", 0)
    schema = pa.schema([pa.field(name, COLUMNS[name].type, metadata={"k": "v"})], {"about": "rows"})
    table = pa.table([COLUMNS[name]], schema=schema)
    # Parts that start in the middle of an array, and one without rows.
    parts = [table.slice(3, 20), table.slice(0, 0), table.slice(23, 1), table.slice(30)]
    expected = pa.concat_tables(parts)
    found = joined_tables(parts)
    assert found.equals(expected, check_metadata=True)
    found.validate(full=True)
    assert found.column(0).num_chunks == 1
    assert joined_tables(parts[1:2]).equals(parts[1])
    # What it holds is its own: rows can be had from it in any order.
    assert found.take(pa.array([40, 0])).to_pylist() == [expected.to_pylist()[i] for i in (40, 0)]


def test_more_than_offsets_can_count_stays_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "LARGE", 0)
    lists = pa.array([[1], [2, 3]], pa.list_(pa.int8()))
    column = pa.chunked_array([lists, lists])
    monkeypatch.setattr(payload, "largest", lambda offsets: 3)
    table = joined_tables([pa.table([column], names=["a"])])
    assert table.column("a").to_pylist() == [[1], [2, 3]] * 2


@pytest.mark.parametrize("rows", [1, 20, 1000])
def test_parts_may_be_more_than_expected_and_turn_out_otherwise(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(payload, "LARGE", 0)
    parts = [
        pa.table({"x": pa.array([[1, 2]] * 9, pa.list_(pa.int64())), "y": pa.array([3] * 9)}),
        pa.table({"x": pa.array([[7] * 50] * 40, pa.list_(pa.int64())), "y": pa.array([4] * 40)}),
        pa.table({"x": pa.array([None, [5]], pa.list_(pa.int64())), "y": pa.array([6, None])}),
        pa.table({"x": pa.array([[8]] * 9, pa.list_(pa.int64())), "y": pa.array([3] * 9)}),
    ]
    joining = payload.Joining(rows)
    for part in parts:
        joining.add(part)
    assert joining.table().equals(pa.concat_tables(parts))
    with pytest.raises(SchemaError, match="'x' as list<item: int64>, and later ones as int64"):
        joining.add(pa.table({"x": [1], "y": [2]}))


def test_a_part_is_let_go_before_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "LARGE", 0)
    alive: list[ref[pa.Table]] = []

    def parts() -> Iterator[pa.Table]:
        for _ in range(3):
            assert all(table() is None for table in alive)
            table = pa.table({"x": pa.array(range(100))})
            alive.append(ref(table))
            yield table
            del table

    assert len(join_payloads(parts(), 300)) == 300
