"""Row groups of remote files are fetched several at a time, and are what reading one by one gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trainpipes as tp
from faulty_server import serving
from trainpipes.sources.files import remote_bytes
from trainpipes.sources.files.block_reader import MAX_THREADS
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.testing import digest

#: Seconds that a request waits for others, whose threads may start late on a slow machine.
HELD = 0.5


class Far(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory that takes a while to answer, and counts how many wait at once."""

    protocol = "far"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    changed = threading.Condition()
    waiting = most = asked = wanted = 0

    @classmethod
    def count(cls, wanted: int = 0) -> None:
        """Count anew, and hold requests until so many have waited at once."""
        cls.most = cls.asked = 0
        cls.wanted = wanted

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("far://", "memory://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        cls = type(self)
        with cls.changed:
            cls.waiting += 1
            cls.asked += 1
            cls.most = max(cls.most, cls.waiting)
            cls.changed.notify_all()
            cls.changed.wait_for(lambda: cls.most >= cls.wanted, HELD)
        time.sleep(0.01)
        with cls.changed:
            cls.waiting -= 1
        return super().cat_file(path, start, end, **more)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are in the store too."""
    fsspec.register_implementation("far", Far, clobber=True)
    Far.store.clear()
    Far.count()
    for file in range(12):
        rows = range(100 * file, 100 * file + 100)
        table = pa.table({"x": list(rows), "text": [f"row {n}" * 20 for n in rows]})
        pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=25)
        Far("far").pipe_file(f"/rows/{file}.parquet", (tmp_path / f"{file}.parquet").read_bytes())
    yield tmp_path
    Far.store.clear()


def rows(place: str | Path) -> tp.Pipeline:
    return tp.list_files(str(place)).read_parquet()


def test_shuffled_row_groups_are_fetched_side_by_side(far):
    expected = [digest(b) for b in rows(far).shuffle(300, seed=1).batch(8)]
    pipe = rows("far://rows/*.parquet").shuffle(300, seed=1).batch(8)
    len(pipe)  # lists, and reads the footers
    Far.count(wanted=2)
    assert [digest(b) for b in tp.Loader(pipe, threads=0)] == expected
    assert 2 <= Far.most <= MAX_THREADS


def arrow(path: Path, x: np.ndarray) -> None:
    table = pa.table({"x": x, "kind": pa.array(["a", "b"] * 50).dictionary_encode()})
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=25)


def arrays(save: Callable[..., None]) -> Callable[[Path, np.ndarray], None]:
    return lambda path, x: save(path, x=x, y=x * 0.5)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (arrays(np.savez), tp.read_numpy),
        (arrays(np.savez_compressed), tp.read_numpy),
        (arrow, tp.read_arrow),
    ],
    ids=["arrays", "compressed arrays", "record batches"],
)
def test_shuffled_blocks_are_fetched_side_by_side_by_a_request_each(far, write, read):
    suffix = ".arrows" if read is tp.read_arrow else ".npz"
    for file in range(12):
        path = far / f"{file}{suffix}"
        write(path, np.arange(100 * file, 100 * file + 100))
        Far("far").pipe_file(f"/blocks/{path.name}", path.read_bytes())

    def batches(place: str | Path) -> tp.Pipeline:
        pipe = read(str(place), block_rows=25, index=False).shuffle(300, seed=1).batch(8)
        len(pipe)
        return pipe

    expected = [digest(b) for b in batches(far)]
    remote = batches("far://blocks")
    Far.count(wanted=2)
    assert [digest(b) for b in tp.Loader(remote, threads=0)] == expected
    assert 2 <= Far.most <= MAX_THREADS
    assert Far.asked <= 4 * 12


def test_whole_files_of_blocks_that_come_next_are_fetched_side_by_side(far):
    for file in range(40):
        (far / f"{file}.bin").write_bytes(b"content %d" % file)
        Far("far").pipe_file(f"/whole/{file}.bin", b"content %d" % file)

    def batches(place: str | Path) -> tp.Pipeline:
        files = tp.list_files(str(place), suffix=".bin").read_bytes(block_rows=1).select("bytes")
        pipe = files.filter(lambda row: True).shuffle(20, seed=1).batch(8)
        len(list(pipe))
        return pipe

    expected = [digest(b) for b in tp.Loader(batches(far), threads=0)]
    remote = batches("far://whole")
    Far.count(wanted=2)
    assert [digest(b) for b in tp.Loader(remote, threads=0)] == expected
    assert 2 <= Far.most <= MAX_THREADS
    assert Far.asked == 40  # each of them once


@pytest.mark.parametrize("shuffled", [False, True])
def test_whole_files_of_later_batches_are_fetched_meanwhile_and_each_of_them_once(far, shuffled):
    for file in range(40):
        (far / f"{file}.bin").write_bytes(b"content %d" % file)
        Far("far").pipe_file(f"/whole/{file}.bin", b"content %d" % file)

    def batches(place: str | Path, rank: int, ranks: int) -> list[str]:
        pipe = tp.list_files(str(place), suffix=".bin").read_bytes().select("bytes")
        pipe = pipe.shuffle(30, seed=1) if shuffled else pipe
        pipe = pipe.sharding_filter(2).batch(2).distributed(rank=rank, world_size=ranks)
        return [digest(b) for b in tp.Loader(pipe, threads=0)]

    for ranks in (1, 2):
        Far.count(wanted=8)
        for rank in range(ranks):
            assert batches("far://whole", rank, ranks) == batches(far, rank, ranks)
        assert Far.asked == 40
        assert 8 <= Far.most <= MAX_THREADS


JOINED: dict[str, Callable[[tp.Pipeline, tp.Pipeline], tp.Pipeline]] = {
    "zip": lambda a, b: a.zip(b.rename({"bytes": "more"})),
    "zip, shuffled": lambda a, b: a.zip(b.rename({"bytes": "more"})).shuffle(30, seed=1),
    "zip of parts": lambda a, b: a.skip(3).zip(b.take(17).rename({"bytes": "more"})),
    "concat": tp.concat,
    "concat, shuffled": lambda a, b: tp.concat(a, b).shuffle(30, seed=1),
    "concat, in any order": lambda a, b: tp.concat(a, b).shuffle(scope="global", seed=1),
    "concat of zips": lambda a, b: tp.concat(
        a.zip(b.rename({"bytes": "more"})).take(9), a.zip(b.rename({"bytes": "more"})).skip(9)
    ).shuffle(scope="global"),
}


@pytest.mark.parametrize("how", JOINED)
def test_whole_files_of_several_pipelines_are_fetched_side_by_side_and_each_of_them_once(far, how):
    for name in "ab":
        (far / name).mkdir()
        for file in range(20):
            (far / name / f"{file}.bin").write_bytes(b"%d of " % file + name.encode())
            Far("far").pipe_file(f"/{name}/{file}.bin", (far / name / f"{file}.bin").read_bytes())

    def batches(place: str) -> list[str]:
        files = (tp.list_files(f"{place}{name}").read_bytes(block_rows=4) for name in "ab")
        pipe = JOINED[how](*(one.select("bytes") for one in files))
        Far.count()
        len(pipe)
        Far.count(wanted=17)
        return [digest(b) for b in tp.Loader(pipe.sharding_filter(1).batch(2), threads=0)]

    expected = batches(f"{far}/")
    assert batches("far://") == expected
    rows = 34 if "parts" in how else 40
    assert rows <= Far.asked <= rows + 2  # one looked at for its columns
    assert 16 < Far.most <= MAX_THREADS + 1  # with the one that reads


def test_windows_of_joined_remote_files_are_fetched_ahead(far):
    def pipe(place: str) -> tp.Pipeline:
        a, b = rows(f"{place}/*[02468].parquet"), rows(f"{place}/*[13579].parquet")
        return a.zip(b.rename({"x": "y", "text": "more"})).sharding_filter(1).shuffle(30).batch(8)

    expected = [digest(b) for b in pipe(str(far))]
    remote = pipe("far://rows")
    len(remote)
    Far.count(wanted=5)
    assert [digest(b) for b in tp.Loader(remote, threads=0)] == expected
    assert Far.most > 4  # of more than one window at a time


def test_little_is_fetched_ahead_where_little_is_allowed(far):
    expected = [digest(b) for b in rows(far).shuffle(300, seed=1).batch(8)]
    files = tp.list_files("far://rows/*.parquet", prefetch_bytes=1)
    pipe = files.read_parquet().shuffle(300, seed=1).batch(8)
    len(pipe)
    Far.count()
    assert [digest(b) for b in tp.Loader(pipe, threads=0)] == expected
    assert Far.most <= 2


def test_parts_of_a_large_range_are_fetched_side_by_side(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote_bytes, "PART_BYTES", 20_000)
    (tmp_path / "a.bin").write_bytes(bytes(200_000))
    with serving(tmp_path) as server:
        data = remote_bytes.open_bytes(ListFiles(urls=f"{server.url}/a.bin").files(), 0)
        all_at_once, asked = threading.Barrier(10), len(server.asked)

        def together(*_: Any) -> None:
            all_at_once.wait(60)

        server.fault = together
        assert bytes(data.read([(0, 150_000), (160_000, 200_000)])[1]) == bytes(40_000)
        assert len(server.asked) - asked == 10


def test_rows_in_file_order_are_fetched_in_few_requests(far):
    pipe = rows("far://rows/*.parquet").batch(8)
    len(pipe)
    Far.asked = 0
    assert [digest(b) for b in pipe] == [digest(b) for b in rows(far).batch(8)]
    assert Far.asked <= 4 * 12


def test_a_file_that_is_gone_when_its_turn_comes_is_named(far):
    pipe = rows("far://rows/*.parquet").shuffle(2000, seed=1).batch(8)
    len(pipe)
    Far("far").rm("/rows/7.parquet")
    with pytest.raises(tp.MissingFilesError, match=r"7\.parquet"):
        list(pipe)


def test_a_file_that_has_changed_when_its_turn_comes_is_named(far):
    pipe = rows("far://rows/*.parquet").shuffle(2000, seed=1).batch(8)
    len(pipe)
    Far("far").pipe_file("/rows/7.parquet", (far / "6.parquet").read_bytes())
    with pytest.raises(tp.DataChangedError, match=r"7\.parquet"):
        list(pipe)
