"""``repack`` writes the rows that it read, each once, in the order that was asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from datetime import UTC
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainpipes as tp
from prepare.repack_reference import expected, read, same
from trainpipes.prepare import repack
from trainpipes.testing import shuffle_quality
from trainpipes.writers import Processes, Threads, formats
from unfinished import row_groups

GOLDEN = Path(__file__).parent.parent / "golden" / "repack.json"
#: So little that a few large rows are many parts.
LITTLE = "64KB"
SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 3}


def small(rows: int = 300) -> pa.Table:
    return pa.table(
        {
            "n": pa.array([None if i % 7 == 0 else i * 37 % 100 for i in range(rows)], pa.int32()),
            "x": [float("nan") if i % 11 == 0 else (i % 5) / 2 for i in range(rows)],
            "text": [f"é{i % 50}" * (i % 4) for i in range(rows)],
            "ids": [list(range(i % 6)) if i % 13 else None for i in range(rows)],
            "wide": [b"w" * 1000] * rows,
        }
    )


def check_rows(options: dict[str, Any], kind: str, folder: Path) -> None:
    """The rows are those of the reference, in its order, whatever the memory and who does the work."""
    table = small()
    pipe = tp.from_arrow(table)
    if kind == "stream":
        pipe = pipe.filter(lambda row: True)
    wanted = expected(table.to_pylist(), **options)
    for number, (memory, executor) in enumerate([(LITTLE, Threads(1)), (10**8, Threads(3))]):
        done = repack(
            pipe, folder / str(number), rows_per_file=90, row_group_size=32, memory_limit=memory,
            executor=None if not any(options.values()) else executor, **options,
        )  # fmt: skip
        assert same(read(done.files), wanted)
        assert done.rows == len(wanted)
        sizes = [pq.read_metadata(path).num_rows for path in done.files]
        assert sizes == [90] * (len(wanted) // 90) + [len(wanted) % 90] * (len(wanted) % 90 > 0)
        done.verify()
        assert repack(
            pipe, folder / str(number), rows_per_file=90, row_group_size=32, **options
        ).kept == len(sizes)


@pytest.mark.parametrize("kind", ["counted", "stream"])
@pytest.mark.parametrize("options", [{}, SHUFFLED], ids=str)
def test_rows_are_those_of_a_few_lines_in_memory(options, kind, tmp_path):
    check_rows(options, kind, tmp_path)


def test_processes_write_the_same_rows(tmp_path):
    done = repack(
        tp.from_arrow(small()).map(twice), tmp_path / "out", memory_limit="128KB", num_files=3,
        executor=Processes(2), **SHUFFLED,
    )  # fmt: skip
    wanted = [twice(row) for row in expected(small().to_pylist(), **SHUFFLED)]
    assert same(read(done.files), wanted)


def twice(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": 2 * row["text"]}


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
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=60),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    per_file=st.integers(1, 70),
    per_group=st.none() | st.integers(1, 30),
    wide=st.integers(0, 3000),
    threads=st.integers(1, 2),
)
def test_any_rows_come_out_in_the_order_of_the_reference(
    tmp_path_factory, rows, shuffle, seed, per_file, per_group, wide, threads
):
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed}
    table = pa.Table.from_pylist(rows, TYPES)
    table = table.append_column("wide", pa.array([b"w" * wide] * len(rows)))
    folder = tmp_path_factory.mktemp("out")
    done = repack(
        tp.from_arrow(table), folder, memory_limit=LITTLE, rows_per_file=per_file,
        row_group_size=per_group, executor=Threads(threads), **options,
    )  # fmt: skip
    assert same(read(done.files), expected(table.to_pylist(), **options))
    meta = [pq.read_metadata(path) for path in done.files]
    assert all(m.num_rows <= per_file for m in meta)
    groups = [m.row_group(g).num_rows for m in meta for g in range(m.num_row_groups)]
    assert per_group is None or max(groups) <= per_group


def test_the_order_of_a_seed_stays_the_same(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    for count in (12, 100_000):
        rows = tp.from_arrow(pa.table({"n": np.arange(count)}))
        done = repack(rows, tmp_path / str(count), shuffle=True, seed=42)
        assert [row["n"] for row in read(done.files)[:12]] == golden[str(count)]


def test_files_are_as_well_shuffled_as_a_list(tmp_path):
    table = pa.table({"n": np.arange(20_000)})
    for number in range(5):
        pq.write_table(table.slice(number * 4000, 4000), tmp_path / f"{number}.parquet")
    done = repack(
        tmp_path / "*.parquet", tmp_path / "out", shuffle=True, rows_per_file=7000,
        memory_limit="100KB",
    )  # fmt: skip
    order = [row["n"] for row in read(done.files)]
    found = shuffle_quality(order, files=[4000] * 5)
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    assert abs(found.neighbor_distance - 1 / 3) < 0.01
    assert found.neighbors_kept < 0.001
    assert found.files_per_batch == pytest.approx(found.random_files_per_batch, rel=0.01)


class Counted(MemoryFileSystem):
    """Object storage that counts the reads of temporary files."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012  (as its parent has it)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    reads = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("counted:/"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        Counted.reads += path.endswith(".pieces")
        return bytes(super().cat_file(path, start, end, **options))


@pytest.mark.parametrize("most", [36, pytest.param(144, marks=pytest.mark.slow)])
def test_reads_of_temporary_files_grow_as_files_times_their_square_root(most, tmp_path):
    fsspec.register_implementation("counted", Counted, clobber=True)
    reads = {}
    for files in (16, most):
        rows = files * 15  # which a task can hold
        table = pa.table({"n": np.arange(rows), "wide": [os.urandom(1000) for _ in range(rows)]})
        Counted.reads = 0
        done = repack(
            tp.from_arrow(table), tmp_path / str(files), shuffle=True, num_files=files,
            memory_limit=LITTLE, temp_dir="counted://temporary", executor=Threads(1),
        )  # fmt: skip
        assert [row["n"] for row in read(done.files)] == [
            row["n"] for row in expected(table.select(["n"]).to_pylist(), shuffle=True)
        ]
        reads[files] = Counted.reads
        assert not Counted.store
    # There are about as many parts as files. If each file were read from each part, that were 36 x 36.
    assert reads[most] <= (most / 16) ** 1.5 * reads[16], reads
    assert reads[most] <= 3 * most**1.5, reads


def test_pieces_that_hold_more_than_was_expected_are_taken_apart(tmp_path):
    """The first rows say little of the others, which are a hundred times as large."""
    texts = ["short"] * 900 + ["x" * 5000 for _ in range(300)]
    table = pa.table({"n": np.arange(1200), "text": texts})
    done = repack(
        tp.from_arrow(table), tmp_path / "out", shuffle=True, memory_limit="128KB", num_files=3
    )
    assert same(read(done.files), expected(table.to_pylist(), shuffle=True))


PEAK = """
import sys, threading, time
import pyarrow as pa, trainpipes as tp
from trainpipes.prepare import repack
from trainpipes.writers import Threads
source, out = sys.argv[1:]
rows = tp.list_files(source).read_parquet()
def resident():
    said = open("/proc/self/status").read()  # without pages of files
    return int(said.split("RssAnon:")[1].split()[0]) * 1024
for _ in rows.batch(2000): pass  # what reading takes
base = most = resident()
def watch():
    global most
    while True:
        most = max(most, resident())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
repack(rows, out, shuffle=True, memory_limit="64MB", executor=Threads(2))
print(most - base)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [25_000, 100])
def test_memory_stays_at_the_limit(rows, tmp_path):
    """Besides what reading takes, some 100 MB for each task."""
    random = np.random.default_rng(0)
    ids = np.tile(random.integers(0, 50_000, 10_000, dtype=np.int32), 1000)
    column = pa.FixedSizeListArray.from_arrays(ids, len(ids) // rows).cast(pa.list_(pa.int32()))
    table = pa.table({"ids": column, "n": random.permutation(rows)})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=2000, use_dictionary=False)
    for number in range(1, 4):  # 160 MB in memory
        shutil.copy(tmp_path / "0.parquet", tmp_path / f"{number}.parquet")
    arguments = [str(tmp_path / "*.parquet"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (64 + 2 * 100) << 20


def test_row_groups_are_of_a_size_that_suits_training(tmp_path):
    wide = pa.table({"x": ["w" * 1_000_000] * 30})
    thin = pa.table({"x": np.arange(40_000, dtype=np.int8)})
    done = repack(tp.from_arrow(wide), tmp_path / "wide", **SHUFFLED)
    assert pq.read_metadata(done.files[0]).num_row_groups == 4  # of 8 MiB, about
    for name, options in (("plain", {}), ("shuffled", SHUFFLED)):
        done = repack(tp.from_arrow(thin), tmp_path / name, **options)
        meta = pq.read_metadata(done.files[0])
        assert [meta.row_group(n).num_rows for n in range(3)] == [16_384, 16_384, 7232]


def test_row_groups_do_not_depend_on_memory_or_who_does_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "GROUP_BYTES", 300_000)
    table = small(20_000).drop_columns(["wide"])
    table = table.append_column("odd", pa.array([None, True, None, False] * 5000))
    groups = []
    for number, (memory, threads) in enumerate([("64KB", 1), ("1GB", 2)]):
        done = repack(
            tp.from_arrow(table), tmp_path / str(number), memory_limit=memory, **SHUFFLED,
            executor=Threads(threads),
        )  # fmt: skip
        groups.append(row_groups(done.files))
    assert groups[0] == groups[1]


def test_how_many_files_there_are(tmp_path):
    rows = tp.from_arrow(pa.table({"x": np.arange(10)}))
    done = repack(rows, tmp_path / "three", num_files=3, shuffle=True)
    assert [pq.read_metadata(path).num_rows for path in done.files] == [4, 3, 3]
    done = repack(rows, tmp_path / "four", rows_per_file=4)
    assert [pq.read_metadata(path).num_rows for path in done.files] == [4, 4, 2]
    for shuffle in (False, True):
        with pytest.raises(tp.ConfigError, match="at most the number of rows, 10, got 11"):
            repack(rows, tmp_path / "many", num_files=11, shuffle=shuffle)
        with pytest.raises(tp.ConfigError, match="left out where rows_per_file is given"):
            repack(rows, tmp_path / "both", num_files=2, rows_per_file=2, shuffle=shuffle)


def all_types() -> pa.Table:
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
        "uuid": pa.array([bytes(16), None, b"0123456789abcdef"], pa.uuid()),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2)),
        "nothing": pa.nulls(3),
    }  # fmt: skip
    fields = [
        pa.field(name, column.type, metadata={"about": name}) for name, column in columns.items()
    ]
    fields.append(pa.field("never null", pa.int32(), nullable=False))
    table = pa.Table.from_arrays(
        [*columns.values(), pa.array([1, 2, 3], pa.int32())], schema=pa.schema(fields)
    )
    return pa.concat_tables([table] * 100)


def test_all_types_come_out_as_they_went_in(tmp_path):
    table = all_types()
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    plain = repack(path, tmp_path / "plain")
    assert pq.read_table(plain.files[0]).equals(pq.read_table(path))
    shuffled = repack(path, tmp_path / "shuffled", shuffle=True, memory_limit=LITTLE)
    found = pq.read_table(shuffled.files[0])
    for done in (plain, shuffled):  # with what fields say of themselves
        schema = pq.read_schema(done.files[0])
        assert schema.equals(pq.read_schema(path), check_metadata=True)
    assert same(found.to_pylist(), expected(table.to_pylist(), shuffle=True))


def test_dictionaries_come_out_as_their_values(tmp_path):
    text = pa.array(["a", None, "a", "c" * 1000] * 50).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(201), pa.int32()), text)
    inner = pa.StructArray.from_arrays([text], ["inner"])
    table = pa.table({"x": text, "lists": lists, "struct": inner})
    done = repack(tp.from_arrow(table), tmp_path / "out", memory_limit=LITTLE, shuffle=True)
    assert same(read(done.files), expected(table.to_pylist(), shuffle=True))
    assert pq.read_schema(done.files[0]).field("x").type == pa.string()


@pytest.mark.parametrize(
    ("kind", "options"), [("parquet", {}), ("parquet", SHUFFLED), ("arrow", {}), ("url", {})]
)
def test_what_hugging_face_says_of_columns_is_kept(kind, options, tmp_path):
    about = {b"huggingface": b'{"info": {"features": {}}}', b"pandas": b"{}"}
    table = pa.table({"x": [1, 2]}).replace_schema_metadata(about)
    path: Any = tmp_path / f"rows.{kind}"
    if kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        path = "memory://told/rows.parquet"
        with fsspec.open(path, "wb") as file:
            pq.write_table(table, file)
    done = repack(path, tmp_path / "out", **options)
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
    rows.select("n").write_memmap(folder / "map")
    return {
        "parquet": folder / "rows.parquet", "json": folder / "json", "arrow": str(folder / "arrow"),
        "csv": [folder / "rows.csv"], "numpy": folder / "*.npz", "memmap": folder / "map",
        "pipeline": rows.map(dict),
    }  # fmt: skip


def test_any_source_can_be_rewritten(tmp_path):
    table = pa.table({"n": np.arange(50), "text": [f"row {i}" for i in range(50)]})
    for name, data in write_all_formats(tmp_path, table).items():
        done = repack(data, tmp_path / f"out of {name}", shuffle=True, columns=["n"])
        assert [row["n"] for row in read(done.files)] == [
            row["n"] for row in expected(table.to_pylist(), shuffle=True)
        ], name


@pytest.mark.parametrize("kind", ["parquet", "json", "csv", "webdataset"])
def test_columns_that_are_not_kept_may_differ(kind, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    if kind == "parquet":
        pq.write_table(pa.table({"n": [0], "x": [1]}), data / "a.parquet")
        pq.write_table(pa.table({"n": [1], "x": ["one"], "y": [1]}), data / "b.parquet")
    elif kind == "json":
        rows = [{"n": n, "x": 1} if n < 200_000 else {"n": n, "x": "one"} for n in range(200_001)]
        (data / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        (data / "a.csv").write_text("n,x\n0,1\n")
        (data / "b.csv").write_text("n\n1\n")
    else:
        with tarfile.open(data / "a.tar", "w") as archive:
            for name in ("0.n", "0.x", "1.n"):
                archive.addfile(tarfile.TarInfo(name))
    done = repack(data, tmp_path / "out", columns=["n"])
    rows = read(done.files)
    assert all(list(row) == ["n"] for row in rows)
    if kind == "webdataset":
        assert rows == [{"n": b""}] * 2
    else:
        assert [row["n"] for row in rows] == [*range(200_001 if kind == "json" else 2)]


def test_a_manifest_of_something_else_is_no_memory_map(tmp_path):
    pq.write_table(pa.table({"n": [1]}), tmp_path / "rows.parquet")
    (tmp_path / "manifest.json").write_text('{"name": "mine"}')
    with pytest.raises(
        tp.ConfigError,
        match=r"manifest\.json for read_json, .*rows\.parquet for read_parquet: name files",
    ):
        repack(tmp_path, tmp_path.parent / "out")


def test_an_input_without_rows_is_refused(tmp_path):
    empty = tp.from_arrow(pa.table({"x": pa.array([], pa.int64())}))
    nothing = tp.from_arrow(pa.table({"x": [1]})).filter(lambda row: False)
    for rows in (empty, nothing):
        for options in ({}, {"shuffle": True}):
            with pytest.raises(tp.ConfigError, match=r"repack\(\): the pipeline has no rows"):
                repack(rows, tmp_path / "out", **options)
            assert not (tmp_path / "out").exists()


def test_rows_of_other_columns_are_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(tp.SchemaError, match="x"):
        repack(tmp_path / "*.parquet", tmp_path / "out", shuffle=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": ["z"]}, "no column 'z'"),
        ({"compression": "zip"}, "compression"),
        ({"row_group_size": 0}, "row_group_size"),
        ({"memory_limit": 512}, r"memory_limit\) must be a number of bytes of 64,000 or more, .* got 512"),
        ({"memory_limit": "much"}, "must be a number of bytes"),
        ({"memory_limit": True}, "memory_limit"),
        ({"shuffle": 1}, "shuffle"),
        ({"columns": []}, "columns"),
        ({"executor": 2}, "executor"),
        ({"data": tp.from_arrow(small()).batch(2)}, "before batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(options, said, tmp_path):
    with pytest.raises(tp.TrainpipesError, match=said):
        repack(**{"data": tp.from_arrow(small()), "folder": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, SHUFFLED], ids=str)
def test_what_parquet_has_no_form_for_is_refused(options, tmp_path):
    union = pa.UnionArray.from_dense(
        pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]
    )
    rows = tp.from_arrow(pa.table({"x": [1], "u": union}))
    with pytest.raises(tp.SchemaError, match=r"column 'u' holds .* Parquet cannot hold"):
        repack(rows, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
