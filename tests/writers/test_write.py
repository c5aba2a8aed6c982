"""Rows of a pipeline written to files: which rows, in which files, and what a folder holds."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.writers import Processes, Threads
from unfinished import contents, noted, row_groups

FORMATS = ["parquet", "arrow", "json"]


def table(rows: int = 1000) -> pa.Table:
    rng = np.random.default_rng(1)
    lists = [rng.integers(0, 99, n % 7).tolist() if n % 11 else None for n in range(rows)]
    return pa.table(
        {
            "x": range(rows),
            "text": [f'row {n} "and\nmore" é' * (n % 4) if n % 5 else None for n in range(rows)],
            "ids": pa.array(lists, pa.list_(pa.int32())),
            "real": rng.random(rows),
            "flag": [None if n % 7 == 0 else n % 2 == 0 for n in range(rows)],
        }
    )


def rows(count: int = 1000) -> tp.Pipeline:
    return tp.from_arrow(table(count))


def write(pipe: tp.Pipeline, format: str, folder: Path, **options: Any) -> Any:
    return getattr(pipe, f"write_{format}")(folder, **options)


def read(paths: Any) -> list[dict[str, Any]]:
    """Rows of files, by their formats' own readers."""
    found: list[dict[str, Any]] = []
    for path in map(str, paths):
        if path.endswith(".parquet"):
            found += pq.read_table(path).to_pylist()
        elif path.endswith(".arrow"):
            with pa.ipc.open_file(path) as file:
                found += file.read_all().to_pylist()
        else:
            data = Path(path).read_bytes()
            if path.endswith(".gz"):
                data = gzip.decompress(data)
            if path.endswith(".zst"):
                with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
                    data = stream.read()
            found += [json.loads(line) for line in data.splitlines()]
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_files_hold_the_rows_that_the_pipeline_gives_in_its_order(format, tmp_path):
    pipe = rows().shuffle(100, seed=2).filter(pc.field("x") > 30)
    written = write(pipe, format, tmp_path / "out", rows_per_file=300)
    assert read(written.files) == list(pipe)
    assert [Path(name).name for name in written.files] == [
        f"part-{n:05d}{Path(written.files[0]).suffix}" for n in range(4)
    ]
    assert written.rows == 969
    assert [len(read([name])) for name in written.files] == [300, 300, 300, 69]


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression": "zstd"}])
def test_json_lines_may_be_compressed(options, tmp_path):
    written = rows().write_json(tmp_path / "out", **options)
    assert read(written.files) == table().to_pylist()
    assert written.files[0].endswith(
        {"gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}[options["compression"]]
    )


def test_a_number_of_files_shares_the_rows_evenly(tmp_path):
    for count, files in ((1000, 1), (1000, 7), (7, 7)):
        written = rows(count).write_json(tmp_path / f"{count} {files}", num_files=files)
        counts = [len(read([name])) for name in written.files]
        assert (len(counts), sum(counts)) == (files, count)
        assert max(counts) - min(counts) <= 1


def test_row_groups_have_the_rows_that_are_asked_for(tmp_path):
    written = rows().write_parquet(tmp_path / "out", row_group_size=64, rows_per_file=200)
    assert row_groups(written.files) == [[64, 64, 64, 8]] * 5
    written = rows().write_arrow(tmp_path / "batches", row_group_size=300)
    with pa.ipc.open_file(written.files[0]) as file:
        counts = [file.get_batch(n).num_rows for n in range(file.num_record_batches)]
    assert counts == [300, 300, 300, 100]


def test_large_rows_make_small_row_groups_and_files_that_end(tmp_path, monkeypatch):
    def large() -> Iterator[dict[str, Any]]:
        return ({"x": n, "image": bytes(1 << 20)} for n in range(140))

    monkeypatch.setattr("trainpipes.writers.formats.FILE_BYTES", 120 << 20)
    written = tp.from_iterable(large).write_parquet(tmp_path / "out", compression="snappy")
    groups = row_groups(written.files)
    assert max(max(of_file) for of_file in groups) <= 32
    assert [sum(of_file) > 100 for of_file in groups] == [True, False]


def test_sharding_has_no_part_in_it(tmp_path):
    pipe = rows().shuffle(50, seed=4)
    dealt = pipe.sharding_filter(24).distributed(rank=1, world_size=4)
    one, other = pipe.write_json(tmp_path / "a"), dealt.write_json(tmp_path / "b")
    assert read(one.files) == read(other.files)


def test_python_rows_become_columns_of_one_schema(tmp_path):
    pipe = tp.from_iterable(lambda: ({"x": n, **({"y": n / 2} if n > 3 else {})} for n in range(9)))
    written = pipe.write_parquet(tmp_path / "out")
    found = pq.read_table(written.files[0])
    assert found.schema.equals(pa.schema([("x", pa.int64()), ("y", pa.float64())]))
    assert found.column("y").to_pylist() == [None] * 4 + [n / 2 for n in range(4, 9)]
    arrays = tp.from_dataset([{"x": np.arange(n)} for n in range(3)]).filter(
        pc.field("x").is_valid()
    )
    file = pa.ipc.open_file(arrays.write_arrow(tmp_path / "arrow").files[0])
    assert file.schema.equals(pa.schema([("x", pa.list_(pa.int64()))]), check_metadata=True)
    lines = Path(arrays.write_json(tmp_path / "json", compression=None).files[0])
    assert [json.loads(line)["x"] for line in lines.read_text().splitlines()] == [[], [0], [0, 1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.take(37),
        lambda p: p.skip(900),
        lambda p: p.filter(pc.field("x") > 30).take(37),
        lambda p: p.filter(pc.field("x") > 30).shuffle(20).skip(5).take(200),
        lambda p: p.select("x", "ids").flat_map(doubled),
        lambda p: p.drop_columns("flag").with_columns(longer, format="numpy"),
        lambda p: tp.mix({"a": p, "b": p.take(50)}, weights={"a": 1, "b": 1}),
        lambda p: tp.concat(p, p).shuffle(100),
    ],
)
def test_what_iteration_gives_is_what_is_written(make, tmp_path):
    pipe = make(rows())
    written = pipe.write_arrow(tmp_path / "out", rows_per_file=60)
    assert read(written.files) == list(pipe)


def doubled(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return iter([row, row] if row["x"] % 3 else [])


def longer(columns: dict[str, Any]) -> dict[str, Any]:
    return {"more": columns["x"] + 1}


@pytest.mark.parametrize("format", FORMATS)
def test_the_manifest_has_counts_columns_and_checksums(format, tmp_path):
    written = write(rows(), format, tmp_path / "out", num_files=2)
    about = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert about["rows"] == 1000
    assert [entry["rows"] for entry in about["files"]] == [500, 500]
    assert about["columns"]["ids"] == "list<item: int32>" or about["columns"]["ids"].startswith(
        "list<"
    )
    assert [entry["bytes"] for entry in about["files"]] == [
        os.path.getsize(name) for name in written.files
    ]
    assert sorted(os.listdir(tmp_path / "out")) == [
        "_manifest.json", *(entry["file"] for entry in about["files"]),
    ]  # fmt: skip
    written.verify()
    with open(written.files[1], "r+b") as file:
        file.seek(40)
        file.write(b"\xff")
    with pytest.raises(tp.DataChangedError, match=r"part-00001.* is not as it was written"):
        written.verify()


@pytest.mark.parametrize("format", FORMATS)
def test_writing_again_what_is_there_does_nothing(format, tmp_path):
    pipe = rows().filter(pc.field("x") > 30)
    first = write(pipe, format, tmp_path / "out", rows_per_file=500)
    times = [os.stat(name).st_mtime_ns for name in first.files]
    again = write(pipe, format, tmp_path / "out", rows_per_file=500)
    assert again == first
    assert [os.stat(name).st_mtime_ns for name in first.files] == times


def test_another_pipeline_or_other_options_are_refused_unless_to_be_overwritten(tmp_path):
    rows().write_parquet(tmp_path / "out", num_files=3)
    with pytest.raises(tp.ConfigError, match=r"rows of another pipeline.*overwrite=True"):
        rows().shuffle(5).write_parquet(tmp_path / "out", num_files=3)
    with pytest.raises(tp.ConfigError, match=r"with num_files: 3, now 2; .*overwrite=True"):
        rows().write_parquet(tmp_path / "out", num_files=2)
    with pytest.raises(
        tp.ConfigError, match='that were written with format: "parquet", now "json"'
    ):
        rows().write_json(tmp_path / "out", num_files=3)
    written = rows().shuffle(5).write_json(tmp_path / "out", num_files=2, overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "_manifest.json", "part-00000.jsonl", "part-00001.jsonl",
    ]  # fmt: skip
    assert read(written.files) == list(rows().shuffle(5))


@pytest.mark.parametrize("make", [tp.from_dataset, tp.from_iterable])
@pytest.mark.parametrize("count", [60, 5000])
def test_rows_in_memory_that_were_changed_are_refused_unless_to_be_overwritten(
    make, count, tmp_path
):
    held, fails = [{"x": float(n), "when": date(2026, 1, 1)} for n in range(count)], True

    def failing(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "y": 1 / 0 if fails and row["x"] == count - 1 else 0}

    def begin() -> Any:
        pipe = make(held).map(failing, version="1")
        return write(pipe, "json", tmp_path / "begun", rows_per_file=50)

    def done(**options: Any) -> Any:
        return write(make(held), "json", tmp_path / "done", **options)

    with pytest.raises(ZeroDivisionError):
        begin()
    assert not done().kept
    assert done().kept == 1
    fails, held[-1]["x"] = False, 7e6
    for again in (begin, done):
        with pytest.raises(tp.DataChangedError, match=r"in memory are not those.*overwrite=True"):
            again()
    assert read(done(overwrite=True).files)[-1]["x"] == 7e6

    manifest = tmp_path / "done/_manifest.json"
    about = json.loads(manifest.read_text())
    del about["in_memory"]  # as none had it once
    manifest.write_text(json.dumps(about))
    held[0]["x"] = 5.0
    assert done().kept == 1


def test_files_that_nothing_here_has_written_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(tp.ConfigError, match="holds files that no writer has written"):
            rows().write_json(tmp_path, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["notes.txt"]
    (tmp_path / "part-00000.jsonl").write_text("mine")
    (tmp_path / "_manifest.json").write_text('{"files": ["part-00000.jsonl"]}')
    before = contents(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(tp.ConfigError, match="holds files that no writer has written"):
            rows().write_json(tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"trainpipes_files": 1, "files": [{"odd": 1}]}'])
def test_a_damaged_manifest_is_refused(text, tmp_path):
    rows().write_json(tmp_path / "out")
    about = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    if "odd" in text:
        text = json.dumps(about | json.loads(text))
    (tmp_path / "out" / "_manifest.json").write_text(text)
    with pytest.raises(tp.UnreadableError, match=r"_manifest.json is damaged"):
        rows().write_json(tmp_path / "out")
    assert rows().write_json(tmp_path / "out", overwrite=True).rows == 1000


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("format", "executor"),
    [
        *((format, Threads(2)) for format in FORMATS if format != "json"),
        *((format, Processes(2)) for format in ("parquet", "json")),
    ],
)
def test_the_bytes_are_those_of_one_thread_whatever_does_the_work(executor, format, tmp_path):
    pq.write_table(table(), tmp_path / "in.parquet", row_group_size=90)
    pipe = tp.read_parquet(str(tmp_path / "in.parquet")).shuffle(250, seed=3).select("x", "ids")
    write(pipe, format, tmp_path / "one", rows_per_file=130)
    written = write(pipe, format, tmp_path / "several", rows_per_file=130, executor=executor)
    assert contents(tmp_path / "one") == contents(tmp_path / "several")
    assert read(written.files) == list(pipe)


@pytest.mark.parametrize("kind", [Threads, Processes])
@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_a_number_of_workers_is_1_or_more(kind, n):
    with pytest.raises(tp.ConfigError, match=rf"{kind.__name__}\(n\) .*got {n!r}"):
        kind(n)
    assert (Threads().workers, Processes().workers) == (1, len(psutil.Process().cpu_affinity()))


def test_one_thread_goes_on_where_several_stopped(tmp_path, monkeypatch):
    pipe = rows().shuffle(100, seed=3).select("x")
    replace, lock = os.replace, threading.Lock()
    broken: list[Any] = []

    def failing(before: Any, after: Any) -> None:
        with lock:
            if str(after).endswith("part-00002.jsonl") and not broken:
                broken.append(after)
                raise OSError(28, "No space left on device")
        replace(before, after)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(tp.ConfigError, match="No space left"):
        pipe.write_json(tmp_path / "out", rows_per_file=70, executor=Threads(3))
    whole = [info["file"] for info in noted(tmp_path / "out")]
    assert "part-00002.jsonl" not in whole
    written = pipe.write_json(tmp_path / "out", rows_per_file=70)
    assert written.kept == len(whole)
    pipe.write_json(tmp_path / "whole", rows_per_file=70)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def changing(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": columns["x"], "y" if columns["x"][0] < 3000 else "z": columns["x"]}


LARGE = pc.field("x") > 3
BEFORE = r"call it before batch\(\), collate\(\) and repeat\(\), got"
#: A pipeline of 5,000 rows, options, and what is said.
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batches": (lambda p: p.batch(2), {}, BEFORE),
    "collated": (lambda p: p.batch(2).collate(), {}, BEFORE),
    "endless": (lambda p: p.repeat(), {}, BEFORE),
    "repeated": (lambda p: p.repeat(3), {}, BEFORE),
    "no files": (None, {"num_files": 0}, "num_files"),
    "no rows in a file": (None, {"rows_per_file": 0}, "rows_per_file"),
    "both": (None, {"num_files": 2, "rows_per_file": 2}, "left out where rows_per_file is given"),
    "more files than rows": (None, {"num_files": 5001}, "at most the number of rows, 5,000, got 5001"),
    "codec": (None, {"compression": "lzma"}, "compression"),
    "files of unknown rows": (lambda p: p.filter(LARGE), {"num_files": 2}, "give rows_per_file"),
    "no rows": (lambda p: p.filter(pc.field("x") > 9999), {}, "has no rows"),
    "threads, unknown rows": (
        lambda p: p.filter(LARGE), {"rows_per_file": 9, "executor": Threads(2)}, "how many rows filter"
    ),
    "threads, not cut": (None, {"executor": Threads(2)}, "given with num_files=.* or rows_per_file"),
    "threads, a function": (
        lambda p: p.map(dict), {"num_files": 2, "executor": Threads(2)}, r"Processes\(n\), or left out"
    ),
    "no executor": (None, {"executor": "rays"}, r"executor\) must be tp.Threads\(n\).*got 'rays'"),
    "does not pickle": (
        lambda p: p.map(lambda row: row, version="1"), {"num_files": 2, "executor": Processes(2)},
        "must pickle to reach a worker process.*or use executor=Threads\\(1\\)",
    ),
    "other columns": (
        lambda p: p.map_batches(changing, format="numpy"), {},
        r"all have the same columns, got x.*z.* after x.*y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_written_is_said(kind, tmp_path):
    make, options, said = REFUSED[kind]
    pipe = rows(5000).select("x")
    pipe = pipe if make is None else make(pipe)
    with pytest.raises((tp.ConfigError, tp.SchemaError), match=said):
        pipe.write_json(tmp_path / "out", **options)
    assert not list(tmp_path.glob("out/[!_]*"))


def test_an_error_of_a_function_names_its_row_and_leaves_whole_files(tmp_path):
    fail = True

    def checked(row: dict[str, Any]) -> dict[str, Any]:
        if fail and row["x"] == 700:
            raise RuntimeError("no")
        return row

    pipe = rows().select("x").map(checked, version="1")
    with pytest.raises(RuntimeError, match="no") as caught:
        pipe.write_json(tmp_path / "out", num_files=4)
    assert "row 700" in caught.value.__notes__[0]
    whole = ["part-00000.jsonl", "part-00001.jsonl"]
    assert sorted(os.listdir(tmp_path / "out"))[1:] == whole
    assert [entry["file"] for entry in noted(tmp_path / "out")] == whole
    fail = False
    assert read(pipe.write_json(tmp_path / "out", num_files=4).files) == [
        {"x": n} for n in range(1000)
    ]
    assert sorted(os.listdir(tmp_path / "out"))[0] == "_manifest.json"


@pytest.mark.parametrize(("format", "count", "files"), [("json", 1000, 9), ("parquet", 36_000, 2)])
def test_a_full_disk_is_said_and_the_next_call_goes_on_to_the_same_files(
    count, files, format, tmp_path, monkeypatch
):
    pipe = rows(count).shuffle(count // 7, seed=3)
    replace, done = os.replace, []

    def failing(before: Any, after: Any) -> None:
        done.append(after)
        if len(done) == files + 2:
            raise OSError(28, "No space left on device")
        replace(before, after)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing)
        with pytest.raises(
            tp.ConfigError, match=r"written: No space left on device; free space there"
        ):
            write(pipe, format, tmp_path / "out", num_files=files)
    assert not (tmp_path / "out" / "_manifest.json").exists()
    written = write(pipe, format, tmp_path / "out", num_files=files)
    write(pipe, format, tmp_path / "whole", num_files=files)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert [row["x"] for row in read(written.files)] == [row["x"] for row in pipe.select("x")]


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tp.ConfigError, match="cannot be written"):
        rows().write_parquet(tmp_path / "file" / "out")


def test_a_tilde_is_the_home_as_where_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    rows = tp.from_arrow(pa.table({"x": [1, 2]}))
    assert rows.write_parquet("~/out").folder == str(tmp_path / "out")
    assert list(tp.read_parquet("~/out")) == list(rows)
    rows.write_memmap("~/map")
    assert len(tp.from_memmap("~/map")) == len(tp.from_memmap(tmp_path / "map")) == 2


def test_a_memory_map_is_written_as_by_the_function(tmp_path):
    pipe = rows().select("x", "real").shuffle(10)
    data = pipe.write_memmap(tmp_path / "a.memmap", dtype={"x": "int32"})
    tp.write_memmap(tmp_path / "b.memmap", pipe, dtype={"x": "int32"})
    assert contents(tmp_path / "a.memmap") == contents(tmp_path / "b.memmap")
    assert [int(x) for x in data[:5]["x"]] == [row["x"] for row in pipe.take(5)]


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_end_by_their_bytes_are_cut_alike_when_a_run_goes_on(
    format, tmp_path, monkeypatch
):
    for name, size in {
        "FILE_BYTES": 30_000,
        "GROUP_BYTES": 9_000,
        "OTHER_GROUP_BYTES": 9_000,
    }.items():
        monkeypatch.setattr(f"trainpipes.writers.formats.{name}", size)
    pipe = rows().shuffle(90, seed=1).filter(pc.field("x") > 30)
    whole = write(pipe, format, tmp_path / "whole")
    assert len(whole.files) > 2
    replace = os.replace
    for stop in Path(whole.files[1]).name, Path(whole.files[-1]).name:

        def failing(before: Any, after: Any, stop: str = stop) -> None:
            if str(after).endswith(stop):
                raise KeyboardInterrupt
            replace(before, after)

        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            write(pipe, format, tmp_path / stop)
        monkeypatch.setattr(os, "replace", replace)
        assert write(pipe, format, tmp_path / stop).kept in (1, len(whole.files) - 1)
        assert contents(tmp_path / stop) == contents(tmp_path / "whole")


@pytest.mark.parametrize("blocks", [1, 7])
def test_long_rows_are_few_in_a_row_group(blocks, tmp_path, monkeypatch):
    monkeypatch.setattr("trainpipes.writers.formats.GROUP_BYTES", 128 << 10)
    monkeypatch.setattr("trainpipes.writers.formats.OTHER_GROUP_BYTES", 64 << 10)
    monkeypatch.setattr("trainpipes.writers.epoch_rows.MANY_BYTES", 16 << 10)
    texts = ["x" * (size << 4) for size in (1, 9000, 9000, 1, 700, 9000, 1) + 15 * (600,)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet", row_group_size=22 // blocks)
    pipe = tp.read_parquet(tmp_path / "in.parquet")
    for name, groups in {"parquet": [2, 1, 3, 15, 1], "arrow": [2, 1, 3, 8, 7, 1]}.items():
        written = write(pipe, name, tmp_path / name)
        if name == "parquet":
            about = pq.ParquetFile(written.files[0]).metadata
            lengths = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        else:
            file = pa.ipc.open_file(written.files[0])
            lengths = [len(file.get_batch(n)) for n in range(file.num_record_batches)]
        assert lengths == groups
        read = getattr(tp, f"read_{name}")(tmp_path / name)
        assert [row["text"] for row in read] == texts
