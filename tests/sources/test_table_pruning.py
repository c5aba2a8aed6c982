"""Files that the log of a table rules out are not opened, and no row is missing for it."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.types import LongType

import trainpipes as tp
from delta_tables import by_deltalake, with_vector
from iceberg_tables import by_pyiceberg, lake
from trainpipes.sources.tables.table_files import log_bounds

DAY = datetime.date(2026, 1, 1)
FILES, ROWS = 6, 20


def part(number: int, seed: int) -> pa.Table:
    """Rows of one file, whose values lie near each other; some columns hold nulls, NaN, or nulls only."""
    rng = np.random.default_rng([seed, number])
    low, some = 10 * number, rng.random(ROWS) < 0.2 * (number % 3)
    micros = rng.integers(low * 10**6, (low + 9) * 10**6, ROWS)
    return pa.table({
        "i": pa.array(rng.integers(low, low + 9, ROWS), pa.int32(), mask=some),
        "j": pa.array(rng.integers(0, 50, ROWS), mask=np.full(ROWS, number == 2)),
        "f": pa.array(np.where(rng.random(ROWS) < 0.1 * (number % 2), np.nan, low + rng.random(ROWS))),
        "s": [f"{'x' * (40 if number == 3 else 1)}{low + n % 7:03}" for n in range(ROWS)],
        "d": pa.array((rng.integers(low, low + 5, ROWS)).astype(np.int32)).cast(pa.date32()),
        "t": pa.array(micros).cast(pa.timestamp("us", "UTC")),
        "c": pa.array([Decimal(low) + Decimal(int(n)) / 10**9 for n in rng.integers(1, 9, ROWS)],
            pa.decimal128(20, 9)),
        "b": pa.array(rng.random(ROWS) < (0, 0.5, 1)[number % 3]),
    })  # fmt: skip


def filters(table: pa.Table, seed: int) -> list[Any]:
    """Conditions on values that are there, or lie between them."""
    rng = np.random.default_rng(seed)
    drawn: list[Any] = []
    for _ in range(25):
        conditions = []
        for name in rng.choice(table.column_names, int(rng.integers(1, 3)), replace=False).tolist():
            values = table[name].drop_null().to_pylist()
            value = values[int(rng.integers(len(values)))]
            if isinstance(value, float) and value != value:
                value = 15.5
            sign = str(rng.choice(["<", "<=", ">", ">=", "=", "!=", "in"]))
            sign = "=" if name == "b" else sign
            if sign == "in":
                value = [value, values[0]] if values[0] == values[0] else [value]
            conditions.append((name, sign, value))
        drawn.append([[one] for one in conditions] if rng.random() < 0.3 else conditions)
    return drawn


def assert_none_is_missing(pipe_of: Any, whole: pa.Table, seed: int) -> int:
    """Rows that match are those of the format's own reader; gives how many files the log ruled out."""
    left_out = 0
    for conditions in filters(whole, seed):
        expected = whole.filter(pq.filters_to_expression(conditions))
        pipe = pipe_of(conditions)
        (found,) = pipe.batch(10_000).collate(format="arrow") if len(expected) else (expected,)
        rows = sorted(map(repr, found.select(["i", "s"]).to_pylist()))
        assert rows == sorted(map(repr, expected.select(["i", "s"]).to_pylist())), conditions
        said = re.search(r"(\d+) more files are left out by the log", str(pipe.explain()))
        left_out += int(said[1]) if said else 0
    return left_out


SEEDS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_log_of_delta_rules_out_files_and_no_row(tmp_path: Path, seed: int) -> None:
    uri = str(tmp_path / "t")
    vectors = {"delta.enableDeletionVectors": "true"}
    write_deltalake(uri, part(0, seed).drop_columns("j"), configuration=vectors)  # without a column
    for number in range(1, FILES):
        write_deltalake(uri, part(number, seed), mode="append", schema_mode="merge")
    with_vector(uri, np.random.default_rng(seed))
    DeltaTable(uri).delete("i = 31")
    whole = by_deltalake(uri)
    assert assert_none_is_missing(lambda f: tp.read_delta(uri, filter=f), whole, seed) > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_the_manifests_of_iceberg_rule_out_files_and_no_row(tmp_path: Path, seed: int) -> None:
    with load_catalog(**lake(tmp_path)) as catalog:
        catalog.create_namespace("logs")
        schema = part(0, seed).schema
        table = catalog.create_table("logs.t", schema=schema)
        for number in range(FILES):
            table.append(part(number, seed))
        with table.update_schema() as update:
            update.rename_column("j", "k")
            update.update_column("i", LongType())
        table.delete("i = 31")
        whole = pa.Table.from_pylist(by_pyiceberg(table), schema=table.scan().to_arrow().schema)
        found = assert_none_is_missing(lambda f: tp.read_iceberg(table, filter=f), whole, seed)
    assert found > 20


def test_files_that_the_log_rules_out_are_not_opened(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    for number in range(4):
        write_deltalake(uri, part(number, 0), mode="append")
    adds = pa.table(DeltaTable(uri).get_add_actions()).to_pylist()
    for add in adds:
        if add["min"]["i"] < 20:
            path = Path(uri) / add["path"]
            path.write_bytes(b"x" * path.stat().st_size)
    pipe = tp.read_delta(uri, columns=["i"], filter=[("i", ">=", 20)])
    whole = [i for number in range(4) for i in part(number, 0)["i"].to_pylist()]
    assert sorted(row["i"] for row in pipe) == sorted(i for i in whole if i is not None and i >= 20)
    assert "2 more files are left out by the log" in str(pipe.explain())
    with pytest.raises(tp.UnreadableError):
        list(
            tp.read_delta(uri, filter=[("c", ">=", Decimal(20))])
        )  # of decimals the log is not exact


def test_all_files_may_be_ruled_out(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    for number in range(3):
        write_deltalake(uri, part(number, 0), mode="append")
    assert list(tp.read_delta(uri, filter=[("i", ">", 10**6)])) == []


@pytest.mark.parametrize(
    ("least", "most", "nulls", "rows", "found"),
    [
        (1, 2, 0, 5, (1, 2, False)),
        (1, 2, 3, 5, (1, 2, True)),
        (1, 2, None, None, (1, 2, True)),
        (None, 2, 0, 5, None),
        (1, None, 0, 5, None),
        (None, None, 5, 5, (None, None, True)),
        (None, None, None, 5, None),
        (1.0, float("nan"), 0, 5, None),
    ],
)
def test_what_a_log_does_not_say_is_not_known(
    least: Any, most: Any, nulls: Any, rows: Any, found: Any
) -> None:
    kind = pa.float64() if isinstance(least, float) else pa.int64()
    bounds = log_bounds(pa.scalar(least, kind), pa.scalar(most, kind), nulls, rows)
    said = bounds and tuple(
        value.as_py() if isinstance(value, pa.Scalar) else value
        for value in (bounds.least, bounds.most, bounds.nulls)
    )
    assert said == found
