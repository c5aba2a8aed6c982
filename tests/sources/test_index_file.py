"""Footers that are kept: the same answers as from the files, without reading them."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trainpipes as tp
from trainpipes import ConfigError, DataChangedError, SchemaError, UnreadableError
from trainpipes._internal import messages as warn_once
from trainpipes.sources.files import index_store as index_module
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.parquet import index as parquet_index
from trainpipes.sources.parquet.index import ParquetIndex
from trainpipes.sources.parquet.read_parquet import ParquetSource
from trainpipes.storage.caching import checked_file

LONG_AGO = 1_700_000_000 * 10**9
#: What the index of Parquet files says it is.
ABOUT = {"layouts": 1, "format": "Parquet", "key": ""}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kept"
    monkeypatch.setenv("TRAINPIPES_CACHE", str(folder))
    monkeypatch.setattr(warn_once, "_warned", set())
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten files, some of several row groups, some without rows, of two schemas."""
    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(10):
        write(folder / f"{n}.parquet", 40 * (n % 4), pa.int32() if n < 7 else pa.int64())
    return folder


def write(path: Path, rows: int, kind: pa.DataType | None = None, age: int = 10) -> Path:
    texts = [f"row {i} " + "x" * (i % 50) for i in range(rows)]
    table = pa.table(
        {"x": pa.array(range(rows), kind or pa.int64()), "text": texts, "z": [0.5] * rows}
    )
    pq.write_table(table, path, row_group_size=25)
    stamp = path.stat().st_mtime_ns - age * 10**9
    os.utime(path, ns=(stamp, stamp))
    return path


class Reads:
    """Counts the files whose footers are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        inner = parquet_index.read_footer

        def read(system: Any, path: str, *more: Any) -> bytes:
            self.names.append(Path(path).name)
            return inner(system, path, *more)

        monkeypatch.setattr(parquet_index, "read_footer", read)

    def taken(self) -> list[str]:
        found, self.names = sorted(self.names), []
        return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def open_index(
    files: Any, columns: list[str] | None = None, index: str | bool | None = True
) -> ParquetIndex:
    return ParquetSource(ListFiles(urls=files).files(), columns, "read_parquet()", index).index


def assert_same(one: ParquetIndex, other: ParquetIndex) -> None:
    for name in ("sizes", "footers", "checksums", "first_group", "rows", "group_bytes"):
        found, wanted = getattr(one, name), getattr(other, name)
        assert found.dtype == wanted.dtype == np.int64
        assert found.tolist() == wanted.tolist(), name
    assert one.schema.equals(other.schema)
    assert (
        one.row_bytes == other.row_bytes
    )  # to the last bit: the windows of a shuffle depend on it


NAMES = [f"{n}.parquet" for n in range(10)]


# What is kept is what the files say


@pytest.mark.parametrize("columns", [None, ["x"], ["text", "z"]])
def test_a_warm_start_reads_no_footer_and_says_the_same(
    data: Path, reads: Reads, columns: list[str] | None
) -> None:
    cold = open_index(data, columns)
    assert reads.taken() == NAMES
    warm = open_index(data, columns)
    assert reads.taken() == []
    assert_same(warm, cold)
    assert_same(warm, open_index(data, columns, index=False))
    assert reads.taken() == NAMES


def test_other_columns_read_only_the_sample_again(tmp_path: Path, reads: Reads) -> None:
    for n in range(130):
        write(tmp_path / f"{n}.parquet", 3)
    for columns in (["x"], ["text"], None):
        found = open_index(tmp_path, columns)
        assert len(reads.taken()) == (130 if columns == ["x"] else 44)  # every third
        assert_same(found, open_index(tmp_path, columns, index=False))
        reads.taken()
    for columns in (["x"], ["text"], ["z", "x"], None):
        assert_same(open_index(tmp_path, columns), open_index(tmp_path, columns, index=False))
        assert len(reads.taken()) == 130  # of the second


def test_pipelines_see_no_difference(data: Path) -> None:
    def batches(index: Any) -> list[Any]:
        rows = tp.list_files(data).read_parquet(index=index).sharding_filter(4)
        pipe = rows.shuffle(50, max_bytes=20_000).batch(8)
        found = list(pipe)
        state = pipe.state_dict()
        assert state is not None
        return [found, state["pipeline"]]

    cold, warm, without = batches(True), batches(True), batches(False)
    assert cold == warm == without


def test_schemas_that_do_not_fit_are_still_found(data: Path, reads: Reads) -> None:
    open_index(data)
    assert open_index(data).schema.field("x").type == pa.int64()
    pq.write_table(pa.table({"x": ["a"], "text": ["a"], "z": [0.5]}), data / "5b.parquet")
    for _ in range(2):
        with pytest.raises(
            SchemaError, match=r"'x' is int32 in .*0\.parquet and string in .*5b\.parquet"
        ):
            open_index(data)
    with pytest.raises(SchemaError, match=r"no column 'y'.* in .*0\.parquet"):
        open_index(data, ["y"])


def test_the_check_of_each_footer_at_open_goes_on(data: Path) -> None:
    open_index(data)
    pipe = tp.list_files(data).read_parquet(index=True)
    stat = (data / "3.parquet").stat()
    content = (data / "3.parquet").read_bytes()
    write(data / "3.parquet", 90)
    padded = (data / "3.parquet").read_bytes()
    assert len(padded) < len(content)
    # As long as before and of the same time, and still another file.
    footer = int.from_bytes(padded[-8:-4], "little") + 8
    gap = bytes(len(content) - len(padded))
    (data / "3.parquet").write_bytes(padded[:-footer] + gap + padded[-footer:])
    os.utime(data / "3.parquet", ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    with pytest.raises(DataChangedError, match=r"3\.parquet.*the file has changed"):
        list(pipe)
    again = tp.list_files(data).read_parquet(index=True)  # made anew, as the message says
    assert len(list(again)) == len(list(pipe_without_index(data)))


def pipe_without_index(data: Path) -> tp.Pipeline:
    return tp.list_files(data).read_parquet(index=False)


# What has changed is read again


def test_a_changed_file_is_noticed(data: Path, reads: Reads) -> None:
    open_index(data)
    reads.taken()
    write(data / "3.parquet", 77)
    write(data / "4.parquet", 0, age=99)  # as it was, at another time
    found = open_index(data)
    assert reads.taken() == ["3.parquet", "4.parquet"]
    assert_same(found, open_index(data, index=False))
    reads.taken()
    open_index(data)
    assert reads.taken() == []


def test_files_come_go_and_move_in_the_order(data: Path, reads: Reads) -> None:
    open_index(data)
    reads.taken()
    (data / "2.parquet").unlink()
    write(data / "1b.parquet", 9)
    assert_same(open_index(data), open_index(data, index=False))
    reads.taken()
    listed = [str(data / name) for name in ("8.parquet", "1b.parquet", "0.parquet")]
    assert_same(open_index(listed), open_index(listed, index=False))
    assert reads.taken() == ["0.parquet", "1b.parquet", "8.parquet"]  # of the second
    open_index(data)
    assert reads.taken() == []


def test_a_file_that_may_change_within_the_clocks_tick_is_not_believed(
    data: Path, reads: Reads
) -> None:
    just_now = time.time_ns()
    os.utime(data / "6.parquet", ns=(just_now, just_now))
    started = time.time_ns()
    open_index(data)  # waits for the tick to pass
    assert time.time_ns() - just_now > index_module.TICK
    assert time.time_ns() - started < 10**9
    ahead = time.time_ns() + 60 * 10**9  # by the clock of a server
    os.utime(data / "7.parquet", ns=(ahead, ahead))
    reads.taken()
    for _ in range(2):
        open_index(data)
        assert reads.taken() == ["7.parquet"]


def test_an_unreadable_file_is_named_and_the_rest_is_not_lost(data: Path, reads: Reads) -> None:
    open_index(data)
    good = (data / "5.parquet").read_bytes()
    (data / "5.parquet").write_bytes(good[:-9])
    for _ in range(2):
        with pytest.raises(UnreadableError, match=r"1 of 10 files .*\n  .*5\.parquet: cut short"):
            open_index(data)
    (data / "5.parquet").write_bytes(good)
    reads.taken()
    open_index(data)
    assert reads.taken() == ["5.parquet"]


# The file itself


def the_file(kept: Path) -> Path:
    (found,) = kept.glob("footers/*.arrow")
    return found


@pytest.mark.parametrize("how", ["empty", "cut", "foreign", "old", "other columns", "flipped"])
def test_a_file_that_is_not_whole_is_made_again(
    how: str, data: Path, kept: Path, reads: Reads
) -> None:
    want = open_index(data)
    path = the_file(kept)
    content = path.read_bytes()
    path.unlink()
    table = pa.table({"path": ["x"], "stamp": ["1"]})
    if how == "old":
        checked_file.write(path, lambda: [table], {"layouts": 0})
    elif how == "other columns":
        checked_file.write(path, lambda: [table], ABOUT)
    else:
        half = len(content) // 2
        path.write_bytes(
            {
                "empty": b"",
                "cut": content[:half],
                "foreign": b"PAR1 and so on" * 99,
                "flipped": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
            }[how]
        )
    reads.taken()
    if how == "old":
        assert_same(open_index(data), want)
    else:
        with pytest.warns(UserWarning, match=r"was damaged: .* made again"):
            assert_same(open_index(data), want)
    assert reads.taken() == NAMES
    assert_same(open_index(data), want)
    assert reads.taken() == []


def test_it_can_be_kept_in_a_file_or_folder_of_ones_own(
    data: Path, kept: Path, tmp_path: Path, reads: Reads
) -> None:
    for where in (tmp_path / "own" / "footers.arrow", tmp_path / "own" / "several"):
        for _ in range(2):
            tp.list_files(data).read_parquet(index=where).explain()
        assert reads.taken() == NAMES
    assert (tmp_path / "own" / "footers.arrow").is_file()
    assert len(list((tmp_path / "own" / "several").iterdir())) == 1
    assert tp.cache.info().indexes == 0


def test_few_local_files_leave_no_file_and_many_do(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(64):
        write(tmp_path / f"{n}.parquet", 1)
    few = [str(tmp_path / f"{n}.parquet") for n in range(63)]
    tp.list_files(few).read_parquet().explain()
    assert not kept.exists()
    monkeypatch.setenv("TRAINPIPES_CACHE", "off")
    tp.list_files(tmp_path / "*.parquet").read_parquet(index=True).explain()
    monkeypatch.setenv("TRAINPIPES_CACHE", str(kept))
    tp.list_files(tmp_path / "*.parquet").read_parquet(index=False).explain()
    assert not kept.exists()
    tp.list_files(tmp_path / "*.parquet").read_parquet().explain()
    assert tp.cache.info().indexes == 1


def test_where_it_cannot_be_written_all_goes_on(data: Path, tmp_path: Path, reads: Reads) -> None:
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        assert_same(open_index(data, index=str(tmp_path / "file")), open_index(data, index=False))
    assert reads.taken() == sorted(NAMES * 4)


@pytest.mark.parametrize("index", ["", 3, b"x.arrow", ["x"]])
def test_what_is_no_place_is_refused(index: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"index.* is a file that ends in \.arrow, a folder, True, False or None"
    ):
        tp.list_files("x").read_parquet(index=index)


def test_it_is_no_part_of_a_state(data: Path) -> None:
    stages = [
        tp.list_files(data).read_parquet(index=i).stages[1].identity()
        for i in (None, "here", False)
    ]
    assert stages[0] == stages[1] == stages[2]


def test_other_files_of_the_same_folder_stay_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    for n in range(12):
        write(tmp_path / "d" / f"{n}.parquet", 1) if n else (tmp_path / "d").mkdir()
    open_index([str(tmp_path / "d" / f"{n}.parquet") for n in range(1, 9)])
    monkeypatch.setattr(index_module, "SOME_OTHERS", 2)
    monkeypatch.setattr(index_module, "OTHERS", 1)
    open_index([str(tmp_path / "d" / f"{n}.parquet") for n in range(9, 12)])
    table = checked_file.read(the_file(kept), ABOUT)
    assert table is not None
    assert len(table) == 6
    assert {"9", "10", "11"} <= {Path(p).stem for p in table.column("path").to_pylist()}


# Other stores


class Told(MemoryFileSystem):
    """Files in memory; what a listing says of them besides is set by the test."""

    protocol = "told"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    more: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("told://", "memory://"))

    def find(self, path: str, **options: Any) -> Any:
        found = super().find(path, **options)
        return {name: {**info, **self.more} for name, info in found.items()}


@pytest.fixture
def told() -> type[Told]:
    fsspec.register_implementation("told", Told, clobber=True)
    Told.store, Told.more = {}, {}
    Told.clear_instance_cache()
    system = fsspec.filesystem("told")
    for n in range(3):
        with system.open(f"/d/{n}.parquet", "wb") as file:
            pq.write_table(pa.table({"x": range(n + 1)}), file)
    return Told


def test_an_etag_tells_whether_a_remote_file_has_changed(told: type[Told], reads: Reads) -> None:
    for etag, again in (("a", 3), ("a", 0), ("b", 3), ("b", 0)):
        told.more = {"ETag": etag}
        open_index("told://d", index=None)
        assert len(reads.taken()) == again


def test_of_files_that_tell_neither_time_nor_etag_nothing_is_kept(
    told: type[Told], reads: Reads, kept: Path
) -> None:
    for _ in range(2):
        open_index("told://d")
        assert len(reads.taken()) == 3
    assert not kept.exists()


# Several processes, and how long it takes


def test_processes_that_write_at_once_always_find_a_whole_file(data: Path, kept: Path) -> None:
    total = int(open_index(data).rows.sum())
    context = multiprocessing.get_context("fork")
    good = context.Value("i", 0)

    def child(clears: bool) -> None:
        for _ in range(40):
            assert open_index(data).rows.sum() == total
            if clears:
                tp.cache.clear()
        with good.get_lock():
            good.value += 1

    running = [context.Process(target=child, args=(clears,)) for clears in (True, False, False)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
        process.kill()
    assert good.value == 3
    assert not list(kept.rglob("*.part"))


def test_a_start_over_a_thousand_files_reads_no_footer(tmp_path: Path, reads: Reads) -> None:
    content = write(tmp_path / "0.parquet", 100).read_bytes()
    for n in range(1, 1000):
        (tmp_path / f"{n}.parquet").write_bytes(content)
        os.utime(tmp_path / f"{n}.parquet", ns=(LONG_AGO, LONG_AGO))
    open_index(tmp_path, index=None)
    assert len(reads.taken()) == 1000
    pipe = tp.list_files(tmp_path).read_parquet().sharding_filter().shuffle().batch(32)
    assert len(pipe) == 3125
    assert reads.taken() == []
