"""Wide tables: columns of one type together give the batches that column by column gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

import trainpipes as tp
from resuming import goes_on_exactly
from trainpipes.columns import payload
from trainpipes.columns.payload import join_payloads
from trainpipes.testing import digest

ROWS = 600
NUMBERS = np.random.default_rng(0)


def wide(rows: int = ROWS) -> pa.Table:
    columns: dict[str, Any] = {"id": np.arange(rows)}
    for n in range(12):
        columns[f"float{n}"] = NUMBERS.standard_normal(rows).astype(np.float32)
        columns[f"int{n}"] = NUMBERS.integers(-9, 9, rows).astype(np.int16)
        columns[f"double{n}"] = NUMBERS.standard_normal(rows)
    columns["big"] = np.arange(rows, dtype=np.uint64)
    columns["text"] = [f"row {n}" for n in range(rows)]
    columns["yes"] = NUMBERS.integers(0, 2, rows).astype(bool)
    return pa.table(columns)


TABLE = wide()


def parts(table: pa.Table, *sizes: int) -> list[pa.Table]:
    edges = np.cumsum([0, *sizes]).tolist()
    return [table.slice(a, b - a) for a, b in pairwise(edges)]


def test_joined_columns_of_one_type_are_found_together() -> None:
    table = join_payloads(parts(TABLE, 100, 1, 300, 199))
    assert table.equals(TABLE)
    table.validate(full=True)
    found = payload.numbers_of(table)
    assert sorted(len(numbers.places) for numbers in found) == [12, 12, 12]
    index = np.random.default_rng(1).permutation(ROWS)[:50]
    for numbers in found:
        rows, whole = numbers.picked(index), numbers.picked(None)
        for place, some, values in zip(numbers.places, rows, whole, strict=True):
            column = TABLE.column(place)
            assert some.tolist() == column.take(pa.array(index)).to_pylist()
            assert values.tolist() == column.to_pylist()
            assert np.shares_memory(numbers.picked(np.arange(5, 60))[0], whole[0])


def test_joined_tables_are_put_in_order() -> None:
    columns = dict(zip(TABLE.column_names, TABLE.columns, strict=True))
    columns["float3"] = pa.array(
        [None if n % 7 == 0 else float(n) for n in range(ROWS)], pa.float32()
    )
    columns["lists"] = pa.array([[n] * (n % 3) for n in range(ROWS)])
    columns["days"] = pa.array(range(ROWS), pa.date32())
    table = pa.table(columns)
    order = np.random.default_rng(2).permutation(ROWS)
    wide: Any = payload.join_in_order(iter(parts(table, 200, 0, 1, 399)), ROWS, order)
    assert wide[1] is True
    assert wide[0].equals(table.take(pa.array(order)))
    assert all(column.num_chunks == 1 for column in wide[0].columns)
    narrow = table.select(["id", "text"])
    for some, rows, places in ((narrow, ROWS, order), (table, ROWS, None), (table, 599, order)):
        as_it_is: Any = payload.join_in_order(iter(parts(some, 200, 400)), rows, places)
        assert as_it_is[1] is False
        assert as_it_is[0].equals(some)


def test_columns_with_nulls_and_those_of_other_tables_are_left_alone() -> None:
    columns = dict(zip(TABLE.column_names, TABLE.columns, strict=True))
    columns["float3"] = pa.chunked_array([[None, *[1.5] * (ROWS - 1)]], pa.float32())
    table = join_payloads(parts(pa.table(columns), 250, 350))
    assert table.equals(pa.table(columns))
    names = [{table.column_names[n] for n in m.places} for m in payload.numbers_of(table)]
    assert not any("float3" in some for some in names)
    assert {f"float{n}" for n in range(12) if n != 3} in names
    apart = pa.table({f"x{n}": pa.array(range(5)) for n in range(7)})
    assert payload.numbers_of(apart) == ()


def test_what_is_known_of_a_table_goes_with_it() -> None:
    table = join_payloads(parts(TABLE, 300, 300))
    (first, *_) = payload.numbers_of(table)
    assert payload.numbers_of(table)[0] is first
    held = weakref.ref(first.columns[0])
    del table, first
    gc.collect()
    assert held() is None


def test_a_part_of_a_table_and_some_of_its_columns() -> None:
    table = join_payloads(parts(TABLE, 300, 300))
    names = [f"double{n}" for n in (0, 1, 2, 3, 4, 5, 6, 7, 8)]
    some = table.slice(17, 80).select(["id", *names])
    (numbers,) = payload.numbers_of(some)
    assert [c.tolist() for c in numbers.picked(None)] == [some[name].to_pylist() for name in names]
    index = np.array([3, 79, 0])
    assert numbers.picked(index)[2].tolist() == some["double2"].take(pa.array(index)).to_pylist()


CHAINS: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "batches": lambda rows: rows.shuffle(150, seed=3).batch(16).collate(),
    "in order": lambda rows: rows.batch(50, drop_last=True).collate(),
    "shards": lambda rows: rows.sharding_filter(4).shuffle(50).batch(7).collate(),
    "one batch": lambda rows: rows.shuffle(1000).batch(ROWS).collate(),
    "filtered": lambda rows: rows.shuffle(100).filter(pc.field("int0") > 0).batch(9).collate(),
    "columns": lambda rows: (
        rows.shuffle(100).drop_columns("float5").rename({"int1": "i"}).batch(8).collate()
    ),
    "function": lambda rows: (
        rows.shuffle(100).map_batches(doubled, format="numpy").batch(8).collate()
    ),
    "balanced": lambda rows: rows.shuffle(100).batch(8).balance(4, cost="id").collate(),
    "packed up": lambda rows: rows.shuffle(100).batch(8).shuffle(4).collate(),
}


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return columns | {"float1": columns["float1"] * 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wide")
    table = TABLE.drop_columns(["text", "big"])
    pq.write_table(table.slice(0, 400), folder / "a.parquet", row_group_size=90)
    pq.write_table(table.slice(400), folder / "b.parquet", row_group_size=70)
    return str(folder / "*.parquet")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CHAINS)
def test_batches_are_those_of_columns_one_by_one(
    files: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches() -> list[Any]:
        pipe = CHAINS[name](tp.read_parquet(files))
        return [*pipe, *pipe]  # two epochs

    together = batches()
    monkeypatch.setattr(payload, "LEAST_COLUMNS", 1 << 20)
    one_by_one = batches()
    assert [list(batch) for batch in together] == [list(batch) for batch in one_by_one]
    assert digest(together) == digest(one_by_one)
    assert together[0]["float0"].dtype == torch.float64  # as of Python's numbers
    goes_on_exactly(lambda: CHAINS[name](tp.read_parquet(files)))


def test_a_batch_is_what_default_collate_makes_of_its_rows() -> None:
    rows = tp.from_arrow(TABLE.drop_columns(["big"]))
    batches = [*rows.shuffle(200).batch(32).collate()]
    lists = [*rows.shuffle(200).batch(32)]
    for batch, own in zip(batches, lists, strict=True):
        expected = default_collate(own)
        assert list(batch) == list(expected)
        for name, value in expected.items():
            same = torch.equal(batch[name], value) if name != "text" else batch[name] == value
            assert same, name


def test_a_batch_may_be_changed_in_place(files: str) -> None:
    pipe = tp.read_parquet(files).shuffle(200, seed=1).batch(16).collate()
    plain = [*tp.Pipeline(pipe.stages)]
    changed = []
    for batch in pipe:
        changed.append({name: value.clone() for name, value in batch.items()})
        for value in batch.values():
            value.zero_()
    assert digest(changed) == digest(plain)


@pytest.mark.parametrize("name", ["batches", "shards"])
def test_worker_processes_give_the_same(files: str, name: str) -> None:
    alone, shared = (CHAINS[name](tp.read_parquet(files)) for _ in range(2))
    assert digest([*tp.Loader(shared, num_workers=2)]) == digest([*alone])


def test_more_rows_than_expected_are_joined_all_the_same() -> None:
    joining = payload.Joining(10)
    for part in parts(TABLE, 30, 400, 170):
        joining.add(part)
    assert joining.table().equals(TABLE)


class Lent(np.ndarray):
    """Memory that somebody else uses as soon as nobody holds it."""


def test_columns_that_lie_side_by_side_are_each_held():
    """Also where another one than the reader made them, so that each has memory of its own."""

    def columns(table):
        memory = table["id"].to_numpy() + 1000 * np.arange(12)[:, None]
        memory = memory.astype(np.float32)

        def lent(column):
            values = column.view(Lent)
            weakref.finalize(values, column.fill, np.nan)
            return pa.Array.from_buffers(pa.float32(), len(table), [None, pa.py_buffer(values)])

        return pa.table({str(n): lent(memory[n]) for n in range(12)})

    pipe = tp.from_dataset([{"id": n} for n in range(256)]).map_batches(columns, format="arrow")
    for number, batch in enumerate(tp.Loader(pipe.batch(32).collate(), threads=0)):
        gc.collect()
        for name, values in batch.items():
            right = 1000 * int(name) + np.arange(32 * number, 32 * number + 32)
            np.testing.assert_array_equal(values.numpy(), right, err_msg=name)
