"""Rows that are Python objects have one schema wherever a stage works on columns: the same from every place a
run starts at."""

import datetime
import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from resuming import check_resume
from trainpipes.testing import digest

Rows = list[dict[str, Any]]

ODD = {
    "missing": {"x": 1, "ids": [1, 2]},
    "int": {"x": 2, "ids": [3], "note": "a"},
    "float": {"x": 2.5, "ids": [4], "note": "b"},
    "whole float": {"x": 49.0, "ids": [5, 6, 7], "note": "c"},
    "null": {"x": None, "ids": [8], "note": None},
    "empty": {"x": 3, "ids": [], "note": "d"},
    "null list": {"x": 4, "ids": None, "note": "e"},
    "float ids": {"x": 5, "ids": [0.5], "note": "f"},
    "new key": {"x": 6, "ids": [9], "new": 1},
    "text": {"x": "7", "ids": [1], "note": "g"},
    "array": {"x": np.int32(8), "ids": np.array([1, 2], dtype=np.int32), "note": "h"},
    "tensor": {"x": 9, "ids": torch.tensor([1, 2, 3]), "note": "i"},
    "huge": {"x": 2**60 + 1, "ids": [1], "note": "j"},
    "bool": {"x": True, "ids": [1], "note": "k"},
    "nested": {"x": 10, "ids": [1], "note": "l", "meta": {"a": 1}},
    "nested other": {"x": 11, "ids": [1], "note": "m", "meta": {"b": []}},
    "all null": {"x": None, "ids": None, "note": None},
}


def is_kept(row: dict[str, Any]) -> bool:
    return len(str(row)) % 3 > 0


def halves(row: dict[str, Any]) -> Rows:
    return [row, {**row, "half": 1}] if len(str(row)) % 2 else []


CHAINS: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "map_batches": lambda p: p.map_batches(lambda t: t.append_column("y", t["x"])).batch(16),
    "an expression": lambda p: p.filter(pc.field("x") > 1).batch(16),
    "two expressions": lambda p: (
        p.filter(is_kept).filter(pc.field("x") > 1).filter(pc.field("x") < 40)
    ),
    "select": lambda p: p.select("x", "ids").batch(16),
    "rename": lambda p: p.rename({"x": "z"}).shuffle(40).batch(7),
    "truncate": lambda p: p.truncate(2, columns="ids").batch(16),
    "bucket_by_length": lambda p: p.select("ids", "note").bucket_by_length(
        8, column="ids", buffer_size=40
    ),
    "buckets of objects": lambda p: p.bucket_by_length(8, column="ids", buffer_size=40),
    "pack": lambda p: p.select("ids").pack(16, column="ids", buffer_size=32).batch(4).pad_collate(),
    "pad_collate": lambda p: p.shuffle(64, seed=1).batch(8).pad_collate(),
    "flat_map": lambda p: p.flat_map(halves).batch(16).pad_collate(),
    "collate": lambda p: p.batch(16).collate(format="arrow"),
    "max_tokens": lambda p: p.batch(max_tokens=20, column="ids"),
    "a sample by key": lambda p: p.sample(0.5, key="x").select("x", "note").batch(8),
    "shards": lambda p: (
        p.sharding_filter(3).shuffle(50).filter(pc.field("x") > 0).batch(8).repeat(2)
    ),
}


def outcome(source: Any, most: int = 60) -> tuple[list[str], list[Any], str]:
    """Digests of the items, the states before and after each, and how it ended."""
    items, states = [], [source.state_dict()]
    try:
        for item in source:
            items.append(digest(item))
            states.append(source.state_dict())
            if len(items) == most:
                return items, states, "cut"
    except tp.TrainpipesError as error:
        return items, states, f"{type(error).__name__} {error.row} {error}"
    return items, states, "end"


@examples(60)
@given(
    st.lists(st.sampled_from(sorted(ODD)), min_size=1, max_size=5),
    st.lists(st.sampled_from(sorted(ODD)), max_size=3),
    st.sampled_from(sorted(CHAINS)),
    st.sampled_from(["dataset", "iterable", "map", "files of rows"]),
    st.data(),
)
def test_a_resume_gives_the_same_items_or_the_same_error(
    first: list[str], later: list[str], chain: str, source: str, data: st.DataObject
) -> None:
    rows = [ODD[first[n % len(first)]] for n in range(270)]
    rows += [ODD[(first + later)[n % len(first + later)]] for n in range(60)]

    def make() -> Any:
        pipe = {
            "dataset": lambda: tp.from_dataset(rows),
            "iterable": lambda: tp.from_iterable(lambda: iter(rows)),
            "map": lambda: tp.from_tensors(n=range(len(rows))).map(lambda row: rows[int(row["n"])]),
            "files of rows": lambda: tp.concat(*map(tp.from_dataset, (rows[:200], rows[200:]))),
        }[source]()
        if source == "iterable" and "shards" in chain:
            pipe = tp.from_dataset(rows)
        return iter(CHAINS[chain](pipe))

    items, states, end = outcome(make())
    for k in {data.draw(st.integers(0, len(states) - 1), "stop"), len(states) - 1}:
        resumed = make()
        resumed.load_state_dict(states[k])
        found, _, how = outcome(resumed, 60 - k)
        if end != "error" and k == len(items) and "Error" not in end:
            continue  # it goes on with the next epoch
        assert (found, how) == (items[k:], end)


def rows_of(count: int = 300) -> Rows:
    """Whole numbers first, one of them with a fraction; a key that comes late; empty lists."""
    return [
        {"x": n if n != 30 else 0.5, "ids": list(range(n % 3)), **({"late": n} if n > 99 else {})}
        for n in range(count)
    ]


def ended_by(pipe: Any) -> tp.TrainpipesError:
    with pytest.raises(tp.TrainpipesError) as caught:
        list(pipe)
    return caught.value


class TestTheSchema:
    def test_ints_beside_floats_are_floats_in_every_batch(self) -> None:
        batches = list(tp.from_dataset(rows_of()).select("x").batch(10).pad_collate())
        assert {batch["x"].dtype for batch in batches} == {torch.float64}

    def test_a_key_that_comes_late_is_none_before(self) -> None:
        rows = list(tp.from_dataset(rows_of()).select("x", "late"))
        assert rows[0] == {"x": 0.0, "late": None}
        assert rows[299] == {"x": 299.0, "late": 299}

    def test_arrays_keep_their_dtype(self) -> None:
        a = np.ones((2, 3), np.float32)
        rows = [{"a": a, "b": np.arange(n % 4, dtype=np.int16)} for n in range(9)]
        table = next(iter(tp.from_dataset(rows).batch(9).collate(format="arrow")))
        assert table.schema.field("a").type == pa.list_(pa.list_(pa.float32(), 3), 2)
        assert table.schema.field("b").type == pa.list_(pa.int16())
        batch = next(iter(tp.from_dataset(rows).batch(9).pad_collate()))
        assert batch["a"].shape == (9, 2, 3)
        assert batch["a"].dtype == torch.float32

    @pytest.mark.parametrize("unit", ["D", "s", "ms", "us", "ns"])
    def test_times_of_numpy_are_times(self, unit: str) -> None:
        days = [np.datetime64(f"2020-01-0{n}", unit) for n in (1, 2)]
        spans = [np.timedelta64(n, "s" if unit == "D" else unit) for n in (1, 2)]
        rows = [
            {"day": day, "span": span, "days": np.array([day, days[0]])}
            for day, span in zip(days, spans, strict=True)
        ]
        rows.append({"day": None, "span": None, "days": np.array(["NaT"], days[0].dtype)})
        table = next(iter(tp.from_dataset(rows).batch(3).collate(format="arrow")))
        for name, values in (("day", days), ("span", spans)):
            assert table[name].slice(0, 2).combine_chunks().equals(pa.array(np.array(values)))
            assert table[name][2].as_py() is None
        assert pc.list_flatten(table["days"]).take([1, 2, 4]).equals(table["day"].take([0, 1, 2]))
        schema = pa.schema([("day", pa.date32())])
        late = tp.from_dataset([{"day": np.datetime64("2020-01-01T05", "s")}], schema=schema)
        assert "'day'" in str(ended_by(late))

    def test_a_given_one_makes_columns_at_once(self) -> None:
        fields = {"x": pa.float32(), "ids": pa.list_(pa.int8()), "late": pa.int64()}
        schema = pa.schema(fields.items())
        for pipe in (
            tp.from_dataset(rows_of(), schema=schema),
            tp.from_iterable(lambda: iter(rows_of()), schema=schema),
            tp.from_dataset(range(300)).map(rows_of().__getitem__, schema=schema),
            tp.from_dataset([rows_of()]).flat_map(list, schema=schema),
        ):
            table = next(iter(pipe.batch(300).collate(format="arrow")))
            assert table.schema.equals(schema)
            check_resume(pipe.batch(70), processes=0, epochs=1)

    def test_rows_that_no_stage_wants_columns_of_stay_as_they_are(self) -> None:
        rows = [{"x": {1, 2}, "f": len, "t": torch.ones(n)} for n in range(4)]
        seen: list[Any] = []
        list(tp.from_dataset(rows).filter(lambda row: True).batch(2).collate(seen.extend))
        assert seen[3]["f"] is len
        assert isinstance(seen[3]["t"], torch.Tensor)
        with_lengths = [{"ids": torch.ones(n)} for n in (3, 1, 2)]
        buckets = tp.from_dataset(with_lengths).bucket_by_length(3, column="ids").collate(list)
        assert all(isinstance(row["ids"], torch.Tensor) for row in next(iter(buckets)))

    def test_pad_collate_takes_objects_that_make_no_column(self) -> None:
        rows = [{"ids": [n], "what": object()} for n in range(4)]
        batch = next(iter(tp.from_dataset(rows).batch(4).pad_collate()))
        assert batch["what"] == [row["what"] for row in rows]

        shapes = [(2, 2), (2, 2), (2, 3), (2, 3)]
        images = tp.from_dataset([{"image": np.ones(shape)} for shape in shapes])
        assert [b["image"].shape[1:] for b in images.batch(2).pad_collate()] == [(2, 2), (2, 3)]

    def test_looking_calls_functions_for_256_rows_and_a_given_one_saves_that(self) -> None:
        calls: list[int] = []

        def function(n: int) -> dict[str, Any]:
            calls.append(n)
            return {"x": n}

        next(iter(tp.from_dataset(range(1000)).map(function).batch(4).pad_collate()))
        assert sorted({*calls}) == list(range(256))
        calls.clear()
        given = tp.from_dataset(range(1000)).map(function, schema=pa.schema([("x", pa.int64())]))
        next(iter(given.batch(4).pad_collate()))
        assert len(calls) < 100

    def test_rows_that_a_filter_drops_do_not_count(self) -> None:
        rows = [{"x": 1}] * 1000 + [{"x": 0.5}] * 100
        pipe = tp.from_dataset(rows).filter(lambda row: row["x"] < 1).select("x")
        assert list(pipe) == [{"x": 0.5}] * 100

    def test_of_mixed_sources_all_are_looked_at(self) -> None:
        one = tp.from_dataset([{"x": 1, "note": "a"}] * 120)
        two = tp.from_dataset([{"x": 0.5, "note": None}] * 4)
        mixed = tp.mix({"one": one, "two": two}, weights={"one": 30, "two": 1}).batch(10)
        batches = list(mixed.pad_collate())
        assert {batch["x"].dtype for batch in batches} == {torch.float64}
        check_resume(mixed.pad_collate(), processes=0, epochs=2, every=5)

    def test_mixed_sources_with_other_columns_are_refused(self) -> None:
        one, two = tp.from_dataset([{"x": 1}] * 9), tp.from_dataset([{"y": 1}] * 9)
        error = ended_by(tp.mix({"one": one, "two": two}).batch(3).pad_collate())
        assert isinstance(error, tp.SchemaError)
        assert "'one'" in str(error)
        assert "'two'" in str(error)

    def test_lists_that_map_batches_returns_have_one_type_too(self) -> None:
        def function(columns: dict[str, Any]) -> dict[str, Any]:
            numbers = columns["n"].tolist()
            return {"said": [None if n % 200 else "x" for n in numbers], "n": columns["n"]}

        rows = tp.from_arrow(pa.table({"n": range(1000)})).map_batches(function, format="numpy")
        tables = list(rows.shuffle(300).batch(50).collate(format="arrow"))
        assert {str(table.schema.field("said").type) for table in tables} == {"string"}
        check_resume(rows.filter(pc.field("n") > 7).batch(90), processes=0, epochs=1, every=3)


def columns(rows: list[Any]) -> tp.Pipeline:
    return tp.from_dataset(rows).select("x", "ids", "late")


class TestAChoiceOfWhatMakesNoColumns:
    def rows(self) -> tp.Pipeline:
        return tp.from_dataset([{"n": n, "path": f"{n}.png", "x": {n}} for n in range(40)])

    def test_keeps_the_values_as_they_are(self) -> None:
        assert list(self.rows().select("x", "n"))[:2] == [{"x": {0}, "n": 0}, {"x": {1}, "n": 1}]
        assert list(self.rows().drop_columns("path"))[1] == {"n": 1, "x": {1}}
        assert list(self.rows().rename({"x": "sets"}))[1] == {"n": 1, "path": "1.png", "sets": {1}}
        batches = list(self.rows().batch(4).drop_columns("path", "n"))
        assert batches[9] == [{"x": {n}} for n in range(36, 40)]

    def test_columns_are_made_of_what_is_left(self) -> None:
        kept = self.rows().drop_columns("x").filter(pc.field("n") > 37)
        assert next(iter(kept.batch(2).pad_collate()))["path"] == ["38.png", "39.png"]

    def test_a_resume_is_exact(self) -> None:
        pipe = self.rows().sharding_filter(4).shuffle(9, seed=1).drop_columns("path").batch(3)
        check_resume(pipe.map(str), processes=0, epochs=2)

    def test_sources_that_are_chosen_from_go_together(self) -> None:
        own, other = self.rows().select("x"), self.rows().rename({"x": "y"}).select("y")
        assert list(tp.zip(own, other))[1] == {"x": {1}, "y": {1}}
        assert list(tp.concat(own, own))[40] == {"x": {0}}
        mixed = tp.mix({"a": own, "b": own})
        assert sorted(map(str, mixed)) == sorted(2 * [str(row) for row in own])
        check_resume(mixed.batch(3).map(str), processes=0, epochs=1, every=3)
        with pytest.raises(tp.SchemaError, match="Python objects that make no columns"):
            list(tp.zip(own, tp.from_arrow(pa.table({"z": range(40)}))))
        with pytest.raises(tp.SchemaError, match="put it before the stage that makes them"):
            list(own.windows(2))

    def test_what_is_not_there_is_named_with_its_row(self) -> None:
        rows = [{"x": {1}, 2: 3}, {"y": {1}}, [4]]
        for pipe, said in (
            (lambda p: p.select("xs"), r"no column 'xs'.*there are \['x', 2\] \(at row 0\)"),
            (lambda p: p.rename({"x": "z"}), r"no column 'x'.*there are \['y'\] \(at row 1\)"),
            (lambda p: p.take(1).drop_columns("x").take(1).drop_columns("z"), r"no column 'z'"),
            (lambda p: p.skip(2).select("x"), r"must be a dict, got list.*\(at row 2\)"),
        ):
            with pytest.raises(tp.SchemaError, match=said):
                list(pipe(tp.from_dataset(rows)))
        with pytest.raises(
            tp.ConfigError, match=r"keep one column at least, and have y; .* \(at row 0\)"
        ):
            list(tp.from_dataset(rows[1:]).map(lambda row: row).drop_columns("y"))


class TestWhatDoesNotFit:
    def test_is_named_with_its_row_and_the_schema_that_would_hold_it(self) -> None:
        rows: Rows = [*rows_of(), {"x": 1, "ids": [0.5], "late": 2}]
        error = ended_by(columns(rows).batch(7))
        assert isinstance(error, tp.SchemaError)
        assert error.row == 300
        fields = '("x", pa.float64()), ("ids", pa.list_(pa.float64())), ("late", pa.int64())'
        assert f"schema=pa.schema([{fields}])" in str(error)
        schema = pa.schema(eval(fields, {"pa": pa}))
        assert len(list(tp.from_dataset(rows, schema=schema).batch(7))) == 43

    @pytest.mark.parametrize(
        ("row", "named"),
        [
            ({"x": "text"}, "'x' = 'text'"),
            ({"x": True}, "'x' = True"),
            ({"x": 2**53 + 1}, "9007199254740993"),
            ({"x": 1, "new": 1}, "'new'"),
            ({"ids": {1, 2}}, "'ids' = {1, 2}"),
            ({"ids": [[1]]}, "[[1]]"),
            ({"ids": ["a"]}, "['a']"),
            ({"x": datetime.date(2026, 1, 1)}, "datetime.date"),
            (7, "got int"),
            ({3: 4}, "the key 3"),
        ],
    )
    def test_is_never_cast_nor_dropped(self, row: Any, named: str) -> None:
        error = ended_by(columns([*rows_of(), row]).batch(7))
        assert isinstance(error, tp.SchemaError)
        assert error.row == 300
        assert named in str(error)

    def test_is_named_where_each_value_fits_by_itself(self) -> None:
        times = [np.datetime64("2020-01-01", "us"), datetime.datetime(2020, 1, 2)]
        for value in (lambda n: times[n // 2], lambda n: {"a": [times[n // 2]]}):
            rows = tp.from_dataset([{"t": value(n)} for n in range(4)])
            error = ended_by(rows.batch(4).collate(format="arrow"))
            assert isinstance(error, tp.SchemaError)
            assert error.row == 2
            assert "datetime.datetime(2020, 1, 2, 0, 0)" in str(error)

    def test_a_column_of_nothing_but_none_needs_a_schema(self) -> None:
        rows = [{"x": None, "y": []}] * 10_001
        error = ended_by(tp.from_dataset(rows).batch(7).pad_collate())
        assert 'schema=pa.schema([("x", ...), ("y", pa.list_(...))])' in str(error)
        schema = pa.schema([("x", pa.string()), ("y", pa.list_(pa.int64()))])
        assert len(list(tp.from_dataset(rows, schema=schema).batch(1000).pad_collate())) == 11

    def test_an_error_of_a_function_is_raised_when_its_row_is_due(self) -> None:
        for kind in (tp.DataError, ValueError):

            def function(n: int, kind: Any = kind) -> dict[str, Any]:
                if n == 100:
                    raise kind("no good")
                return {"s": "a"}

            pipe = tp.from_dataset(range(150)).map(function).encode_labels("s", classes=["a"])
            found = iter(pipe)
            assert len(list(islice(found, 100))) == 100
            with pytest.raises(kind, match="no good"):
                next(found)

    def test_what_is_about_no_row_is_raised_at_once(self) -> None:
        def function(n: int) -> dict[str, Any]:
            if n == 100:
                raise ConnectionError("no server")
            return {"x": n}

        loaded = tp.from_dataset(range(150)).map(function).batch(2).pad_collate()
        with pytest.raises(ConnectionError):
            next(iter(loaded))

    def test_a_schema_is_a_schema(self) -> None:
        for wrong in ({"x": "int64"}, "x", pa.schema([]), pa.schema([("x", pa.int8())] * 2)):
            with pytest.raises(tp.ConfigError, match="schema"):
                tp.from_dataset([1], schema=wrong)
        schema = pa.schema([("x", pa.int64())])
        with pytest.raises(tp.ConfigError, match="comes after batch"):
            list(tp.from_dataset(rows_of()).batch(2).map(len, schema=schema))


class TestStates:
    """A state holds no schema: a resume finds the same one again."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_resume_finds_the_same(self, workers: int) -> None:
        def function(n: int, rng: np.random.Generator) -> dict[str, Any]:
            return {"x": n if n != 40 else 0.5, "y": 0.5 if rng.random() < 0.02 else 1}

        def make() -> tp.Loader:
            rows = tp.from_dataset(range(600)).map(function, rng=True, version="1")
            pipe = rows.sharding_filter(2).shuffle(50).batch(10).pad_collate()
            return tp.Loader(pipe, num_workers=workers)

        whole = make()
        iterator = iter(whole)
        first = next(iterator)
        assert {first[name].dtype for name in "xy"} == {torch.float64}
        state = json.loads(json.dumps(whole.state_dict()))
        assert "double" not in state["pipeline"]
        resumed = make()
        resumed.load_state_dict(state)
        assert [digest(batch) for batch in resumed] == [digest(batch) for batch in iterator]

    def test_a_loaders_workers_find_it_once_and_not_the_process_that_trains(
        self, tmp_path: Path
    ) -> None:
        trains, log = os.getpid(), tmp_path / "calls"

        def function(n: int) -> dict[str, Any]:
            # As one that opens a file must not be called before a fork.
            assert os.getpid() != trains
            with log.open("a") as file:
                file.write("x")
            return {"x": n}

        pipe = tp.from_dataset(range(300)).map(function).batch(9).pad_collate()
        loader = tp.Loader(pipe, num_workers=1)
        calls = []
        for _ in range(2):
            assert len(list(loader)) == 34
            calls.append(len(log.read_text()))
        assert calls[0] > 300
        assert calls[1] == calls[0] + 300

    def test_a_resume_may_be_given_the_schema(self) -> None:
        def make(kind: pa.DataType | None) -> tp.Pipeline:
            schema = None if kind is None else pa.schema([("x", kind)])
            rows = tp.from_dataset(range(100)).map(one_column, schema=schema)
            return rows.batch(10).pad_collate()

        pipe = make(None)
        next(iter(pipe))
        wider = make(pa.float64())
        wider.load_state_dict(pipe.state_dict())
        batch = next(iter(wider))
        assert batch["x"].dtype == torch.float64
        assert batch["x"][0] == 10


def one_column(n: int) -> dict[str, Any]:
    return {"x": n}


def test_a_filter_of_batches_is_not_asked_for_rows() -> None:
    rows = [{"x": i, "text": str(i)} for i in range(20)]
    batches = tp.from_dataset(rows).batch(4).filter(lambda batch: batch[0]["x"] % 8 == 0)
    expected = [[*range(n, n + 4)] for n in (0, 8, 16)]
    assert [batch["x"].to_pylist() for batch in batches.collate(format="arrow")] == expected
    assert [batch["x"].tolist() for batch in batches.collate()] == expected


def with_arrays(n: int) -> dict[str, Any]:
    return {
        "array": np.arange(3, dtype=np.float32) + n,
        "tensor": torch.arange(2, dtype=torch.int16) + n,
        "flags": np.array([True, n > 1]),
        "matrix": torch.ones(2, 2) * n,
        "ragged": np.ones((n + 1, 2), np.int8),
        "inner": {"array": np.arange(n), "list": [1, n]},
        "frames": [np.ones(2, np.float32)] * n,
        "list": [1, n],
        "y": n,
    }


ON_COLUMNS: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "an expression": lambda p: p.filter(pc.field("y") >= 0),
    "conditions": lambda p: p.filter([["y", ">=", 0]]),
    "with_columns": lambda p: p.with_columns(lambda t: {"new": t["y"]}, format="arrow"),
    "enumerate": lambda p: p.map_batches(lambda t: t).enumerate(),
    "encode_categories": lambda p: p.encode_categories({"y": [0, 1, 2, 3]}),
    "a shuffle": lambda p: p.filter([["y", ">=", 0]]).shuffle(1),
    "a mix": lambda p: tp.concat(p.map_batches(lambda t: t), p.map_batches(lambda t: t)),
}


@pytest.mark.parametrize("name", ON_COLUMNS)
def test_arrays_and_tensors_come_out_of_columns_as_they_were(name: str) -> None:
    rows = [with_arrays(n) for n in range(4)]
    pipe = ON_COLUMNS[name](tp.from_dataset(rows))
    for row, wanted in zip(pipe, rows, strict=False):
        assert digest({key: row[key] for key in wanted if key != "y"}) == digest(
            {key: value for key, value in wanted.items() if key != "y"}
        )
    plain, through = (
        p.select("array", "tensor").batch(2).collate() for p in (pipe, pipe.map(dict))
    )
    alone = tp.from_dataset(rows).map(lambda row: {k: row[k] for k in ("array", "tensor")})
    for batches in (plain, through):
        assert digest(batches.peek()) == digest(alone.batch(2).collate().peek())
    offsets = pipe.select("array", "tensor").batch(2).collate(ragged="offsets").peek()
    assert offsets["tensor_offsets"].tolist() == [0, 2]


def test_lists_beside_arrays_are_lists_and_empty_ones_are_arrays() -> None:
    array, plain = np.arange(2), [0, 1]
    for rows in ([array, plain], [plain, array]):
        found = tp.from_dataset([{"x": value} for value in rows]).filter(pc.field("x").is_valid())
        assert [row["x"] for row in found] == [plain, plain]
    for rows in ([array, []], [[], array]):
        found = tp.from_dataset([{"x": value} for value in rows]).filter(pc.field("x").is_valid())
        assert {type(row["x"]) for row in found} == {np.ndarray}


@pytest.mark.parametrize("empty", [[], np.array([]), torch.tensor([]), np.array([], np.uint8)])
@pytest.mark.parametrize("at", [3, 310])
def test_an_empty_list_says_nothing_of_its_type(empty: Any, at: int) -> None:
    rows = [{"x": empty if n == at else np.array([20_000_003])} for n in range(320)]
    for pipe in (tp.from_dataset(rows), tp.from_dataset(rows).select("x")):
        for batches in (pipe.batch(160).pad_collate(), pipe.batch(160).map(list).pad_collate()):
            for batch in batches:
                assert batch["x"].dtype == torch.int64
                assert batch["x"].max() == 20_000_003
        assert pipe.batch(320).collate(ragged="offsets").peek()["x"].unique().tolist() == [
            20_000_003
        ]


def test_arrays_that_are_all_empty_keep_their_dtype() -> None:
    rows = tp.from_dataset([{"x": np.array([], np.float32)}] * 700)
    assert rows.batch(2).pad_collate().peek()["x"].dtype == torch.float32
    assert rows.filter(pc.field("x").is_valid()).peek()["x"].dtype == np.float32


@pytest.mark.parametrize("stage", ["select", "drop_columns", "rename"])
def test_dicts_within_rows_keep_their_keys_where_columns_are_chosen(stage: str) -> None:
    # Such as the arguments of tools, of which each has its own.
    rows: Rows = [{"said": [{f"key {n // 300}": n}], "n": n, "id": -n} for n in range(700)]
    del rows[5]["id"]
    pipe = tp.from_dataset(rows)
    chosen = {
        "select": pipe.select("said", "n", "id"),
        "drop_columns": pipe.drop_columns("n"),
        "rename": pipe.rename({"n": "number"}),
    }[stage]
    names = {"drop_columns": ["said", "id"], "rename": ["said", "number", "id"]}
    found = list(chosen.shuffle(50, seed=1))
    assert {tuple(row) for row in found} == {tuple(names.get(stage, ["said", "n", "id"]))}
    assert {row["said"][0].popitem() for row in found} == {
        (f"key {n // 300}", n) for n in range(700)
    }
    assert sum(row["id"] is None for row in found) == 1
    check_resume(chosen.shuffle(50, seed=1).batch(70), processes=0)
