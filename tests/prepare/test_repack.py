"""``repack`` writes the rows that it read, each once, in the order that was asked for."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainpipes as tp
from prepare.repack_reference import contents, expected, read, same
from trainpipes.prepare import repack
from trainpipes.testing import shuffle_quality

MODULE = sys.modules["trainpipes.prepare.repack.repack"]
GOLDEN = Path(__file__).parent.parent / "golden" / "repack.json"


@pytest.fixture(autouse=True)
def little_memory_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are many parts; and nobody waits for the disk."""
    monkeypatch.setattr(MODULE, "LEAST_MEMORY", 1)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def small(rows: int = 300) -> pa.Table:
    return pa.table(
        {
            "n": pa.array([None if i % 7 == 0 else i * 37 % 100 for i in range(rows)], pa.int32()),
            "x": [float("nan") if i % 11 == 0 else (i % 5) / 2 for i in range(rows)],
            "text": [f"é{i % 50}" * (i % 4) for i in range(rows)],
            "ids": [list(range(i % 6)) if i % 13 else None for i in range(rows)],
        }
    )


CHOICES: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "seed": 3},
    {"sort": ["n"]},
    {"sort": ["x", "text"], "descending": True},
    {"drop_duplicates": True},
    {"drop_duplicates": ["n", "x"], "shuffle": True},
    {"drop_duplicates": ["text"], "sort": ["n"]},
]


@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("kind", ["counted", "stream"])
def test_rows_are_those_of_a_few_lines_in_memory(
    options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    table = small()
    pipe = tp.from_arrow(table)
    if kind == "stream":
        pipe = pipe.filter(lambda row: True)
    wanted = expected(table.to_pylist(), **options)
    files = None
    for number, (memory, threads) in enumerate([(12_000, 1), (64 << 20, 2), (30_000, 3)]):
        done = repack(
            pipe, tmp_path / str(number), rows_per_file=90, row_group_size=32, memory_limit=memory,
            threads=threads, **options,
        )  # fmt: skip
        assert same(read(done.files), wanted)
        assert (done.rows, done.rows_in, done.duplicates) == (len(wanted), 300, 300 - len(wanted))
        done.verify()
        files = files or contents(tmp_path / str(number))
        assert contents(tmp_path / str(number)) == files


@pytest.mark.parametrize("options", CHOICES[1:], ids=str)
def test_temporary_files_may_be_at_a_url(options: dict[str, Any], tmp_path: Path) -> None:
    import fsspec

    for place, folder in (("here", None), ("there", "memory://temporary")):
        done = repack(
            tp.from_arrow(small()), tmp_path / place, rows_per_file=90, memory_limit=12_000,
            temp_dir=folder, **options,
        )  # fmt: skip
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert done.rows
    assert not fsspec.filesystem("memory").find("/temporary")


VALUES = {
    "n": st.none() | st.integers(-3, 3),
    "x": st.none() | st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
    "text": st.none() | st.sampled_from(["", "a", "b", "ab", "é", "a" * 40]),
    "ids": st.none() | st.lists(st.none() | st.integers(0, 2), max_size=3),
}
TYPES = pa.schema(
    [("n", pa.int64()), ("x", pa.float64()), ("text", pa.string()), ("ids", pa.list_(pa.int16()))]
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=60),
    order=st.sampled_from(["none", "shuffle", "sort", "down"]),
    by=st.sampled_from([False, True, ["n"], ["x", "ids"]]),
    columns=st.sampled_from([["n"], ["x"], ["text", "n"], ["x", "n", "text"]]),
    memory=st.integers(400, 6000),
    seed=st.integers(0, 5),
    per_file=st.integers(5, 70),
    per_group=st.none() | st.integers(1, 30),
    threads=st.integers(1, 2),
)
def test_any_rows_come_out_in_the_order_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, order: str, by: Any, columns: Any,
    memory: int, seed: int, per_file: int, per_group: int | None, threads: int,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"drop_duplicates": by}
    if order == "shuffle":
        options |= {"shuffle": True, "seed": seed}
    elif order != "none":
        options |= {"sort": columns, "descending": order == "down"}
    table = pa.Table.from_pylist(rows, TYPES)
    folder = tmp_path_factory.mktemp("out")
    done = repack(
        tp.from_arrow(table), folder, memory_limit=memory, rows_per_file=per_file,
        row_group_size=per_group, threads=threads, verify=True, **options,
    )  # fmt: skip
    assert same(read(done.files), expected(table.to_pylist(), **options))
    meta = [pq.read_metadata(path) for path in done.files]
    assert all(m.num_rows <= per_file for m in meta)
    groups = [m.row_group(g).num_rows for m in meta for g in range(m.num_row_groups)]
    assert per_group is None or max(groups) <= per_group
    assert len(groups) == done.row_groups


def test_the_order_of_a_seed_stays_the_same(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    for count in (12, 100_000):
        rows = tp.from_arrow(pa.table({"n": np.arange(count)}))
        done = repack(rows, tmp_path / str(count), shuffle=True, seed=42)
        assert [row["n"] for row in read(done.files)[:12]] == golden[str(count)]


def test_files_are_as_well_shuffled_as_a_list(tmp_path: Path) -> None:
    table = pa.table({"n": np.arange(20_000)})
    for number in range(5):
        pq.write_table(table.slice(number * 4000, 4000), tmp_path / f"{number}.parquet")
    done = repack(
        tmp_path / "*.parquet",
        tmp_path / "out",
        shuffle=True,
        rows_per_file=7000,
        memory_limit=200_000,
    )
    order = [row["n"] for row in read(done.files)]
    found = shuffle_quality(order, files=[4000] * 5)
    assert abs(found.rank_correlation) < 0.03
    assert abs(found.displacement - 1 / 3) < 0.01
    assert found.neighbours_kept < 0.001
    assert found.file_spread == pytest.approx(1, abs=0.01)


def test_row_groups_are_of_a_size_that_suits_training(tmp_path: Path) -> None:
    wide = pa.table({"x": ["w" * 1_000_000] * 30})
    done = repack(tp.from_arrow(wide), tmp_path / "wide")
    assert done.row_groups == 4  # of 8 MiB at most
    thin = pa.table({"x": np.arange(40_000, dtype=np.int8)})
    meta = pq.read_metadata(repack(tp.from_arrow(thin), tmp_path / "thin").files[0])
    assert [meta.row_group(n).num_rows for n in range(3)] == [16_384, 16_384, 7232]


def test_how_many_files_there_are(tmp_path: Path) -> None:
    rows = tp.from_arrow(pa.table({"x": np.arange(10)}))
    done = repack(rows, tmp_path / "three", num_files=3, shuffle=True)
    assert [pq.read_metadata(path).num_rows for path in done.files] == [4, 3, 3]
    done = repack(rows, tmp_path / "four", rows_per_file=4)
    assert [pq.read_metadata(path).num_rows for path in done.files] == [4, 4, 2]
    with pytest.raises(tp.ConfigError, match="10 rows: give fewer files"):
        repack(rows, tmp_path / "many", num_files=11)
    with pytest.raises(tp.ConfigError, match="give one of the two"):
        repack(rows, tmp_path / "both", num_files=2, rows_per_file=2)


def test_equal_rows_stay_in_their_order_and_odd_values_at_the_end(tmp_path: Path) -> None:
    nan = float("nan")
    rows = pa.table({"x": [nan, 2.0, None, 1.0, 2.0, nan, None, 1.0], "n": range(8)})
    for down, wanted in ((False, [3, 7, 1, 4, 0, 5, 2, 6]), (True, [1, 4, 3, 7, 0, 5, 2, 6])):
        done = repack(tp.from_arrow(rows), tmp_path / str(down), sort="x", descending=down)
        assert [row["n"] for row in read(done.files)] == wanted


def test_the_first_of_rows_that_are_the_same_stays(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [
        {"a": nan, "b": None}, {"a": 0.0, "b": [1, 2]}, {"a": nan, "b": None},
        {"a": -0.0, "b": [1, 2]}, {"a": 0.0, "b": [2, 1]}, {"a": 0.0, "b": []}, {"a": 0.0, "b": None},
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows).append_column("n", pa.array(range(len(rows))))
    done = repack(tp.from_arrow(table), tmp_path / "out", drop_duplicates=["a", "b"])
    assert [row["n"] for row in read(done.files)] == [0, 1, 4, 5, 6]
    assert done.duplicates == 2


def test_all_types_come_out_as_they_went_in(tmp_path: Path) -> None:
    from datetime import date, datetime, time, timedelta
    from decimal import Decimal

    now = datetime(2024, 2, 29, 12, tzinfo=UTC)
    columns = {
        "bool": pa.array([True, None, False]),
        "int8": pa.array([1, None, -1], pa.int8()),
        "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "half": pa.array([1.5, None, -2.0], pa.float16()),
        "decimal": pa.array([Decimal("1.50"), None, Decimal("-3.25")], pa.decimal128(9, 2)),
        "wide": pa.array([Decimal(10) ** 50, None, Decimal(-1)], pa.decimal256(60, 0)),
        "zoned": pa.array([now, None, now], pa.timestamp("us", "Europe/Paris")),
        "ns": pa.array([now.replace(tzinfo=None)] * 3, pa.timestamp("ns")),
        "date": pa.array([date(2000, 1, 1), None, date(1960, 2, 3)]),
        "time": pa.array([time(1, 2, 3), None, time(4)], pa.time64("us")),
        "duration": pa.array([timedelta(1), None, timedelta(2)], pa.duration("ms")),
        "large": pa.array(["é" * 9, None, ""], pa.large_string()),
        "fixed": pa.array([b"abc", None, b"xyz"], pa.binary(3)),
        "bytes": pa.array([b"\0\xff", b"", None]),
        "view": pa.array(["a", None, "a text that is longer than a view"], pa.string_view()),
        "list": pa.array([[1, None], [], None], pa.large_list(pa.int64())),
        "pairs": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)),
        "struct": pa.array([{"a": [{"b": "x"}], "c": None}, None, {"a": None, "c": 1.5}]),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        "nothing": pa.nulls(3),
    }  # fmt: skip
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    fields.append(pa.field("never null", pa.int32(), nullable=False))
    table = pa.Table.from_arrays(
        [*columns.values(), pa.array([1, 2, 3], pa.int32())], schema=pa.schema(fields)
    )
    table = pa.concat_tables([table] * 4)
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    plain = repack(path, tmp_path / "plain", verify=True)
    assert pq.read_table(plain.files[0]).equals(pq.read_table(path))
    shuffled = repack(path, tmp_path / "shuffled", shuffle=True, memory_limit=500, verify=True)
    found = pq.read_table(shuffled.files[0])
    assert found.schema == pq.read_schema(path)
    assert same(found.to_pylist(), expected(table.to_pylist(), shuffle=True))
    once = repack(path, tmp_path / "once", drop_duplicates=True, memory_limit=500)
    assert (once.rows, once.duplicates) == (3, 9)


def test_dictionaries_come_out_as_their_values(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(["a", None, "b", "a"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "rows.parquet")
    done = repack(tmp_path / "rows.parquet", tmp_path / "out", shuffle=True)
    assert pq.read_schema(done.files[0]).field("x").type == pa.string()


def test_dictionaries_within_lists_and_structs_come_out_as_they_went_in(tmp_path: Path) -> None:
    text = pa.array(["a", "b", "a", "c"] * 50).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(201), pa.int32()), text)
    table = pa.table({"lists": lists, "struct": pa.StructArray.from_arrays([text], ["inner"])})
    for number, options in enumerate([{"shuffle": True}, {"drop_duplicates": True}]):
        done = repack(tp.from_arrow(table), tmp_path / str(number), memory_limit=4000, **options)
        assert same(read(done.files), expected(table.to_pylist(), **options))  # type: ignore[arg-type]


def test_what_hugging_face_says_of_columns_is_kept(tmp_path: Path) -> None:
    about = {b"huggingface": b'{"info": {"features": {}}}', b"pandas": b"{}"}
    table = pa.table({"x": [1, 2]}).replace_schema_metadata(about)
    pq.write_table(table, tmp_path / "rows.parquet")
    done = repack(tmp_path / "rows.parquet", tmp_path / "out", shuffle=True)
    assert pq.read_schema(done.files[0]).metadata == {b"huggingface": about[b"huggingface"]}


def write_all_formats(folder: Path, table: pa.Table) -> dict[str, Any]:
    rows = tp.from_arrow(table)
    pq.write_table(table, folder / "rows.parquet")
    rows.write_json(folder / "json")
    rows.write_arrow(folder / "arrow")
    lines = [",".join(table.column_names)]
    lines += [",".join(map(str, row.values())) for row in table.to_pylist()]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    np.savez(folder / "rows.npz", n=np.array(table["n"].to_pylist()))
    rows.select("n").batch(4).write_memmap(folder / "map")
    return {
        "parquet": folder / "rows.parquet", "json": folder / "json", "arrow": str(folder / "arrow"),
        "csv": [folder / "rows.csv"], "numpy": folder / "*.npz", "memmap": folder / "map",
        "pipeline": rows.map(dict),
    }  # fmt: skip


def test_any_source_can_be_rewritten(tmp_path: Path) -> None:
    table = pa.table({"n": np.arange(50), "text": [f"row {i}" for i in range(50)]})
    for name, data in write_all_formats(tmp_path, table).items():
        done = repack(
            data, tmp_path / f"out of {name}", shuffle=True, columns=["n"], memory_limit=500
        )
        assert [row["n"] for row in read(done.files)] == [
            row["n"] for row in expected(table.to_pylist(), shuffle=True)
        ], name


def test_text_is_rows_too(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("one\ntwo\nthree\n", "utf-8")
    done = repack(tmp_path / "a b.txt", tmp_path / "out", sort="text")
    assert [row["text"] for row in read(done.files)] == ["one", "three", "two"]


def test_an_input_without_rows_is_refused(tmp_path: Path) -> None:
    empty = pa.table({"x": pa.array([], pa.int64())})
    for number, options in enumerate([{}, {"shuffle": True}, {"sort": "x"}]):
        with pytest.raises(tp.ConfigError, match="no rows"):
            repack(tp.from_arrow(empty), tmp_path / str(number), **options)
    nothing = tp.from_arrow(pa.table({"x": [1]})).filter(lambda row: False)
    with pytest.raises(tp.ConfigError, match="no rows"):
        repack(nothing, tmp_path / "filtered", shuffle=True)


def test_one_row_is_enough(tmp_path: Path) -> None:
    for number, options in enumerate(CHOICES):
        done = repack(tp.from_arrow(small(1)), tmp_path / str(number), memory_limit=1, **options)
        assert done.rows == 1


def test_rows_of_other_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(tp.SchemaError, match="x"):
        repack(tmp_path / "*.parquet", tmp_path / "out", shuffle=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sort": "y"}, "no column 'y'"),
        ({"sort": "ids"}, "has no order"),
        ({"drop_duplicates": ["z"]}, "no column 'z'"),
        ({"sort": "n", "shuffle": True}, "give one of the two"),
        ({"compression": "zip"}, "compression"),
        ({"compression_level": 99}, "compression_level"),
        ({"row_group_size": 0}, "row_group_size"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"shuffle": 1}, "shuffle"),
        ({"columns": []}, "columns"),
        ({"threads": 0}, "threads"),
    ],
)
def test_what_cannot_be_done_is_said(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(tp.TrainpipesError, match=said):
        repack(tp.from_arrow(small()), tmp_path / "out", **options)


def test_what_parquet_has_no_form_for_is_refused(tmp_path: Path) -> None:
    union = pa.UnionArray.from_dense(
        pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]
    )
    for options in ({}, {"shuffle": True}):
        with pytest.raises(tp.SchemaError, match="Parquet cannot hold"):
            repack(tp.from_arrow(pa.table({"u": union})), tmp_path / "out", **options)


def test_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tp.ConfigError, match="before batch"):
        repack(tp.from_arrow(small()).batch(2), tmp_path / "out")


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    repack(
        tp.from_arrow(small()), tmp_path / "out", shuffle=True, drop_duplicates=True, memory_limit=4000,
        progress=lambda *args: told.append(args),
    )  # fmt: skip
    assert {job for job, _, _ in told} == {
        "reading", "finding duplicates", "shuffling rows", "writing",
    }  # fmt: skip
    assert all(0 <= done <= (total or done) for _, done, total in told)
    assert told[-1][0] == "writing"
    assert told[-1][1] == told[-1][2]
