"""normalize_columns, encode_categories, and fit_columns, which finds what they need."""

from __future__ import annotations

import json
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
from trainpipes.config import loads
from trainpipes.look.fit import Tables
from trainpipes.samplers import SubsetRandomSampler, WeightedRandomSampler
from trainpipes.testing import digest

AGE = {"age": {"mean": 40.0, "std": 10.0}}


def column(values: Any, kind: pa.DataType | None = None, name: str = "age") -> tp.Pipeline:
    return tp.from_arrow(pa.table({name: pa.array(values, kind)}))


def ids(values: Any, known: Any, kind: pa.DataType | None = None) -> list[Any]:
    rows = column(values, kind, "x").encode_categories({"x": known})
    return [row["x"] for row in rows]


# Numbers


@pytest.mark.parametrize("values", [
    pa.array([30, 50], pa.int8()),
    pa.array([30, 50], pa.uint64()),
    pa.array([30.0, 50.0], pa.float16()),
    pa.array([Decimal(30), Decimal(50)], pa.decimal128(5, 2)),
    pa.array([30, 50], pa.int32()).cast(pa.date32()),
    pa.array([30, 50]).cast(pa.timestamp("ns")),
    pa.array([30, 50]).cast(pa.duration("s")),
    pa.array([30, 50]).dictionary_encode(),
])  # fmt: skip
def test_numbers_of_all_types_are_normalized_to_float32(values: pa.Array) -> None:
    batches = tp.from_arrow(pa.table({"n": [0, 1], "age": values})).normalize_columns(AGE).batch(2)
    (batch,) = batches.pad_collate()
    assert batch["age"].dtype == torch.float32
    assert batch["age"].tolist() == [-1.0, 1.0]
    assert batches.collate(dtype=torch.float32).peek()["age"].dtype == torch.float32


def test_a_constant_column_becomes_zero() -> None:
    pipe = column([0.1] * 1000)
    fitted = pipe.fit_columns("age")
    assert fitted.numbers == {"age": {"mean": 0.1, "std": 0.0, "nulls": 0}}
    assert {row["age"] for row in pipe.normalize_columns(fitted)} == {0.0}
    assert [row["age"] for row in column([0.6]).normalize_columns(fitted)] == [0.5]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_nulls_become_what_is_said_of_them(missing: Any) -> None:
    pipe = column([30.0, missing, 50.0])
    assert [row["age"] for row in pipe.normalize_columns(AGE, nulls="mean")] == [-1, 0, 1]
    found = [row["age"] for row in pipe.normalize_columns(AGE, nulls="nan")]
    assert np.isnan(found[1])
    assert [found[0], found[2]] == [-1, 1]
    with pytest.raises(tp.DataError, match=r"'age' is null or NaN.*nulls=\"mean\".*row 1\)"):
        list(pipe.normalize_columns(AGE))


def test_a_column_of_nulls_has_a_mean_if_one_is_given() -> None:
    pipe = column([None, None])
    assert [row["age"] for row in pipe.normalize_columns(AGE, nulls="mean")] == [0, 0]
    with pytest.raises(tp.DataError, match="'age' must hold a number, got nulls only"):
        pipe.fit_columns("age")


@pytest.mark.parametrize(("values", "kind", "error", "said"), [
    ([1.0, float("inf")], None, tp.DataError, r"is inf, which has no place.*row 1\)"),
    ([1.0, -float("inf")], None, tp.DataError, r"is -inf.*row 1\)"),
    ([1.0, 1e300], None, tp.DataError, r"1e\+300, which float32 cannot hold.*row 1\)"),
    (["a", "b"], None, tp.SchemaError, r"'age' must hold numbers, got string: encode_categories\(\)"),
    (["a", "b"], pa.large_string(), tp.SchemaError, "must hold numbers, got large_string"),
    ([[1], [2]], None, tp.SchemaError, "must hold numbers, got list"),
])  # fmt: skip
def test_what_is_no_number_is_named(values: Any, kind: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        list(column(values, kind).normalize_columns(AGE))


@pytest.mark.parametrize("fitted", ["us", "s", "ns", "date"])
def test_dates_and_times_of_another_unit_are_what_they_were_to_the_fit(
    fitted: str, tmp_path: Path
) -> None:
    days = pa.array([datetime(2026, 1, day) for day in (1, 2, 3)], pa.timestamp("ms"))
    kinds = {unit: pa.timestamp(unit) for unit in ("s", "us", "ns")}
    kinds |= {"date": pa.date32(), "date64": pa.date64()}
    tp.from_arrow(pa.table({"age": days.cast(kinds[fitted])})).fit_columns("age").save(
        tmp_path / "columns.json"
    )
    for kind in kinds.values():
        pipe = tp.from_arrow(pa.table({"age": days.cast(kind)}))
        found = [row["age"] for row in pipe.normalize_columns(tmp_path / "columns.json")]
        assert found == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)
    with pytest.raises(tp.ConfigError, match=r"of a unit among \['ns', .*got .*'h'"):
        pipe.normalize_columns({"age": {"mean": 1, "std": 1, "unit": "h"}})


def test_predictions_become_as_large_as_they_were() -> None:
    values = torch.tensor([12.0, 47.5, 60.25], dtype=torch.float64)
    rows = tp.from_tensors(age=values)
    fitted = rows.fit_columns("age")
    batch = rows.normalize_columns(fitted).batch(3).pad_collate().peek()
    assert torch.allclose(fitted.denormalize("age", batch["age"].double()), values, rtol=1e-6)
    with pytest.raises(
        tp.ConfigError, match=r"denormalize\(column\).* got 'x'; there are \['age'\]"
    ):
        fitted.denormalize("x", 1)
    values = [fitted.denormalize("age", number) for number in (0.5, -1.0)]
    assert fitted.denormalize("age", [0.5, -1.0]).tolist() == values


# Categories


@pytest.mark.parametrize("kind", [
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()),
])  # fmt: skip
def test_texts_of_all_kinds_have_ids(kind: pa.DataType) -> None:
    assert ids(["b", "", "a", None, "c", "b"], ["a", "b", ""], kind) == [3, 4, 2, 0, 1, 3]


@pytest.mark.parametrize(("values", "known", "expected"), [
    ([7, 5, 6, None], [7, 5], [2, 3, 1, 0]),
    ([7.0, float("nan"), None], [7], [2, 0, 0]),
    ([True, False, None], [1], [2, 1, 0]),
    ([True, False, None], [True, False], [2, 3, 0]),
    ([1, 0, 2], [np.int8(0), np.True_], [3, 2, 1]),
    ([["a", "b"], [], None, [None, "c"]], ["a", "b"], [[2, 3], [], [], [0, 1]]),
    ([[3], [3, 9]], [3], [[2], [2, 1]]),
    ([None, None], ["a"], [0, 0]),
    (["1", "2"], [1, "2"], [1, 3]),
    ([1, 2], ["1", 2], [1, 3]),
    ([1, 2], [], [1, 1]),
    (["a"], [], [1]),
    ([-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)], [3, 2]),
])  # fmt: skip
def test_nulls_are_0_unknown_values_1_and_known_ones_follow(
    values: Any, known: Any, expected: Any
) -> None:
    assert ids(values, known) == expected


@pytest.mark.parametrize(("values", "kind", "error", "said"), [
    ([1.0, 2.5], None, tp.DataError, r"holds 2.5, and a label is a text or a whole number.*row 1\)"),
    ([1.0, float("inf")], None, tp.DataError, r"holds inf.*row 1\)"),
    ([1, 2**63], pa.uint64(), tp.DataError, rf"holds {2**63}, .*below 2\*\*63: make texts .*row 1\)"),
    ([date(2026, 1, 1)], None, tp.SchemaError, "must hold labels.* got date32"),
    ([b"a"], None, tp.SchemaError, "must hold labels.* got binary"),
    ([Decimal(1)], None, tp.SchemaError, "must hold labels.* got decimal"),
    ([[["a"]]], None, tp.SchemaError, "must hold labels"),
])  # fmt: skip
def test_what_is_no_category_is_named(values: Any, kind: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        ids(values, ["a", 1], kind)


@pytest.mark.parametrize(("values", "known", "said"), [
    ([12, 7], ["01", "A2"], r"'x' holds int64, and its known values are texts: read it as text"),
    ([True], ["true"], "'x' holds bool, and its known values are texts"),
    ([[1], []], ["a"], r"'x' holds list<.*int64>, and its known values are texts"),
    (["1", None], [1, 2], "'x' holds string, and its known values are integers: make integers"),
])  # fmt: skip
def test_values_of_a_type_that_no_known_one_has_are_refused(
    values: Any, known: Any, said: str
) -> None:
    with pytest.raises(tp.SchemaError, match=said):
        ids(values, known)
    assert ids([None] * len(values), known, pa.array(values).type) in ([0] * len(values), [[], []])


def test_a_column_that_is_not_there_is_named() -> None:
    pipe = column([1])
    with pytest.raises(tp.SchemaError, match=r"no column 'agee' .did you mean 'age'"):
        list(pipe.encode_categories({"agee": [1]}))
    with pytest.raises(
        tp.ConfigError, match=r"columns that were fitted, got 'size'; there are \['age'\]"
    ):
        pipe.normalize_columns(AGE, columns=["size"])


# What is found by a pass


def shop(count: int = 5000) -> pa.Table:
    rng = np.random.default_rng(1)
    cities = rng.choice(["Oslo", "Paris", "Rome", "Lima"], count, p=[0.5, 0.3, 0.199, 0.001])
    prices = pa.array(rng.lognormal(3, 1, count), mask=rng.random(count) < 0.1)
    return pa.table({
        "price": prices,
        "city": pa.array(cities, mask=rng.random(count) < 0.1),
        "items": [rng.integers(0, 9, n % 4).tolist() for n in range(count)],
        "when": pa.array(10**18 + rng.integers(0, 10**12, count)).cast(pa.timestamp("ns")),
    })  # fmt: skip


def test_one_pass_finds_what_numpy_finds(tmp_path: Path) -> None:
    table = shop()
    for number in range(4):
        part = table.slice(number * 1250, 1250)
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=300)
    rows = tp.read_parquet(tmp_path)
    shuffled = rows.sharding_filter(4).shuffle(100).batch(8).repeat()
    fitted = rows.fit_columns(["price", "when"], ["city", "items"])
    assert shuffled.fit_columns(["price", "when"], ["city", "items"]) == fitted
    prices = np.array(table["price"].drop_null().to_pylist())
    assert fitted.rows == 5000
    assert fitted.numbers["price"]["mean"] == pytest.approx(prices.mean(), rel=1e-5)
    assert fitted.numbers["price"]["std"] == pytest.approx(prices.std(), rel=1e-5)
    assert fitted.numbers["price"]["nulls"] == table["price"].null_count
    times = np.array(table["when"].cast(pa.int64()).to_pylist()) - 10**18
    assert fitted.numbers["when"]["mean"] - 10**18 == pytest.approx(times.mean(), rel=1e-5)
    assert fitted.numbers["when"]["std"] == pytest.approx(times.std(), rel=1e-5)
    counted = {
        v["values"]: v["counts"] for v in table["city"].drop_null().value_counts().to_pylist()
    }
    assert dict(zip(fitted.categories["city"], fitted.counts["city"], strict=True)) == counted
    assert fitted.categories["city"] == ["Oslo", "Paris", "Rome", "Lima"]
    assert sum(fitted.counts["items"]) == sum(map(len, table["items"].to_pylist()))
    assert fitted.sizes == {"city": 6, "items": 11}


def test_rare_values_are_cut_off_and_equal_counts_are_in_order() -> None:
    rows = column(["b", "a", "c", "c", "a", "b", "d"], name="x")
    assert rows.fit_columns(categories="x").categories == {"x": ["a", "b", "c", "d"]}
    assert rows.fit_columns(categories="x", min_count=2).categories == {"x": ["a", "b", "c"]}
    assert rows.fit_columns(categories="x", max_size=2).categories == {"x": ["a", "b"]}
    assert rows.fit_columns(categories="x", min_count=9).categories == {"x": []}


def test_many_values_are_added_up_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, calls, whole = Tables(most=100), [], Tables.whole
    monkeypatch.setattr(Tables, "whole", lambda self: calls.append(1) or whole(self))
    for start in range(0, 10_000, 10):
        tables.add(pa.array(range(start, start + 10)))
    assert len(calls) < 20
    assert sum(tables.found(1, None)[1]) == 10_000


def test_a_part_of_the_rows_is_the_first_one_in_their_order() -> None:
    rows = tp.from_tensors(x=torch.arange(1000))
    assert rows.fit_columns("x", rows=100).numbers["x"]["mean"] == 49.5
    mixed = rows.shuffle(1000, seed=3).sharding_filter(4).fit_columns("x", rows=400)
    assert mixed.rows == 400
    assert mixed.numbers["x"]["mean"] == pytest.approx(500, abs=50)
    assert rows.repeat().fit_columns("x", rows=1500).rows == 1000


def test_numbers_far_from_0_lose_nothing() -> None:
    values = 1e15 + np.arange(1000.0) % 7
    found = column(values).fit_columns("age").numbers["age"]
    assert found["std"] == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("call", "error", "said"), [
    (lambda p: p.fit_columns(), tp.ConfigError, r"fit_columns\(\) must be given numbers or categories"),
    (lambda p: p.fit_columns([]), tp.ConfigError, r"fit_columns\(numbers\) must be a column name"),
    (lambda p: p.fit_columns("age", rows=0), tp.ConfigError, r"fit_columns\(rows\)"),
    (lambda p: p.fit_columns("age", min_count=0), tp.ConfigError, r"fit_columns\(min_count\)"),
    (lambda p: p.fit_columns("agee"), tp.SchemaError, "no column 'agee'"),
    (lambda p: p.filter(lambda row: False).fit_columns("age"), tp.DataError, "got none"),
    (lambda p: tp.mix({"a": p}, stop="repeat").fit_columns("age"), tp.ConfigError, "have no end"),
    (lambda p: p.map(lambda row: {"age": float("inf")}).fit_columns("age"), tp.DataError, "is inf"),
    (lambda p: p.map(lambda row: {"age": (-1.7e308, 1.7e308)[row["age"] % 2]}).fit_columns("age"),
        tp.DataError, r"column 'age' is 1.7e\+308, too large to have a deviation.*row 0\)"),
])  # fmt: skip
def test_what_cannot_be_fitted_is_refused(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(column([1, 2]))


# Files, YAML and states


def test_a_saved_file_has_a_line_for_each_id_and_is_read_again(tmp_path: Path) -> None:
    fitted = tp.from_arrow(shop()).fit_columns(["price"], ["city", "items"])
    fitted.save(tmp_path / "columns.json")
    assert tp.FittedColumns.load(tmp_path / "columns.json") == fitted
    written = (tmp_path / "columns.json").read_text()
    assert f'\n      [2, "Oslo", {fitted.counts["city"][0]}],\n' in written
    assert json.loads(written)["numbers"]["price"] == fitted.numbers["price"]
    assert "0: null, 1: others, 2: 'Oslo' (" in str(fitted)
    empty = tp.FittedColumns(3, categories={"x": []}, counts={"x": []})
    empty.save(tmp_path / "empty.json")
    assert tp.FittedColumns.load(tmp_path / "empty.json") == empty


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tp.MissingFilesError, match=r"no file .*fit_columns\(...\).save\(path\)"):
        column([1]).normalize_columns(str(tmp_path / "x.json"))
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(tp.ConfigError, match=r"a file that FittedColumns.save wrote, got .*x.json"):
        column([1]).encode_categories(tmp_path / "x.json")


@pytest.mark.parametrize("by_path", [False, True])
def test_yaml_has_what_was_fitted(by_path: bool, tmp_path: Path) -> None:
    pq.write_table(shop(100), tmp_path / "x.parquet")
    rows = tp.read_parquet(tmp_path / "x.parquet")
    fitted = rows.fit_columns(["price"], ["city", "items"])
    fitted.save(tmp_path / "columns.json")
    given: Any = str(tmp_path / "columns.json") if by_path else fitted
    pipe = rows.normalize_columns(given, nulls="mean").encode_categories(given, columns=["city"])
    again = loads(pipe.to_yaml())
    assert again == pipe
    batches, others = (list(p.batch(9).collate(ragged="offsets")) for p in (pipe, again))
    assert digest(batches) == digest(others)


def test_a_state_knows_what_was_fitted_and_not_where_it_lies(tmp_path: Path) -> None:
    rows = tp.from_arrow(shop(100))
    fitted = rows.fit_columns(["price"], ["city", "items"])
    fitted.save(tmp_path / "columns.json")
    state = iter(
        rows.encode_categories(fitted).normalize_columns(fitted, nulls="mean")
    ).state_dict()
    path = tmp_path / "columns.json"
    rows.encode_categories(path).normalize_columns(path, nulls="mean").load_state_dict(state)
    other = rows.fit_columns(["price"], ["city", "items"], max_size=2)
    with pytest.raises(tp.StateError, match="categories"):
        rows.encode_categories(other).normalize_columns(other, nulls="mean").load_state_dict(state)
    changed = {"price": {"mean": 1.0, "std": 2.0}}
    with pytest.raises(tp.StateError, match="numbers"):
        rows.encode_categories(path).normalize_columns(changed, nulls="mean").load_state_dict(state)


def test_many_categories_are_no_burden_of_a_state() -> None:
    known = [f"city {n}" for n in range(100_000)]
    iterator = iter(column(known[:5], name="x").encode_categories({"x": known}))
    assert [row["x"] for row in iterator] == [2, 3, 4, 5, 6]
    assert len(json.dumps(iterator.state_dict())) < 2000


def test_a_run_goes_on_after_each_batch(tmp_path: Path) -> None:
    rows = tp.from_arrow(shop(60)).drop_columns("when")
    fitted = rows.fit_columns(["price"], ["city", "items"])
    pipe = rows.sharding_filter(4).shuffle(20).normalize_columns(fitted, nulls="mean")
    pipe = pipe.encode_categories(fitted).batch(4)
    check_resume(pipe.collate(ragged="offsets", dtype=torch.float32), processes=1)


def test_rows_of_python_are_normalized_as_columns_are() -> None:
    rows: list[dict[str, Any]] = [
        {"age": datetime(1970, 1, 1, 0, 0, 0, 30), "x": "a"},
        {"age": datetime(1970, 1, 1, 0, 0, 0, 50), "x": None},
    ]
    pipe = tp.from_dataset(rows).normalize_columns(AGE).encode_categories({"x": ["a"]})
    assert list(pipe) == [{"age": -1.0, "x": 2}, {"age": 1.0, "x": 0}]


def test_what_cannot_be_saved_leaves_no_file(tmp_path: Path) -> None:
    fitted = tp.FittedColumns(1, {"age": {"mean": 1.0, "std": 0.0}})
    (tmp_path / "taken").mkdir()
    with pytest.raises(tp.ConfigError, match=r"save\(\): .*taken cannot be written"):
        fitted.save(tmp_path / "taken")
    with pytest.raises(tp.ConfigError, match=r"save\(\): .*nowhere/fitted.json cannot be written"):
        fitted.save(tmp_path / "nowhere" / "fitted.json")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


class EveryOther(tp.StatefulStage):
    """Leaves out every other row."""

    def start(self) -> None:
        self.count = 0

    def process(self, row: Any) -> list[Any]:
        self.count += 1
        return [row] * (self.count % 2)

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("rows", [None, 2])
def test_fitted_rows_are_those_that_come(rows: int | None) -> None:
    values = tp.from_arrow(
        pa.table({"x": [float(n) for n in range(20)], "c": ["a"] * 10 + ["b"] * 10})
    )
    for pipe in (
        values.shuffle(sampler=SubsetRandomSampler([0, 1, 2])),
        values.shuffle(sampler=WeightedRandomSampler([1.0] * 3 + [0.0] * 17, 3, replacement=False)),
        values.shuffle(20, seed=1).take(3),
        values.deduplicate("c").filter(lambda row: row["x"] > 5),
        values.flat_map(lambda row: [row] * 2).filter(lambda row: row["x"] > 5),
        values.then(EveryOther()),
    ):
        seen = [row["x"] for row in pipe][:rows]
        fitted = pipe.batch(2).fit_columns("x", "c", rows=rows)
        assert fitted.rows == len(seen)
        assert fitted.numbers["x"]["mean"] == pytest.approx(np.mean(seen))
    sharded = values.sharding_filter(4).flat_map(lambda row: [row] * 2)
    assert sharded.fit_columns("x", rows=rows).rows == (rows or 40)
