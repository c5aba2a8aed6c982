"""Small remote files: fetched once, many at a time, and read from memory after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import FaultyServer, serving
from trainpipes.filesystems import retry
from trainpipes.sources import read_parquet
from trainpipes.sources.files import file_bytes


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(file_bytes, "SMALL_FILE", 64 << 10)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "kept"))
    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(20):
        table = pa.table({"x": range(10 * n, 10 * n + 10)})
        pq.write_table(table, folder / f"{n}.parquet", row_group_size=4)
    with serving(folder) as found:
        yield found


def gets(server: FaultyServer) -> Counter[str]:
    found = Counter(one for one in server.asked if one.startswith("GET") and "parquet" in one)
    server.asked.clear()
    return found


def test_each_is_asked_for_once_in_all_epochs(server):
    pipe = (
        tp.list_files(f"{server.url}/*.parquet")
        .read_parquet(index=False)
        .shuffle(50, seed=1)
        .batch(7)
    )
    for epoch in range(2):
        pipe.set_epoch(epoch)
        assert sorted(row["x"] for batch in pipe for row in batch) == list(range(200))
    assert gets(server) == Counter(f"GET {n}.parquet" for n in range(20))


def test_what_cannot_be_had_at_once_is_asked_for_again(server):
    server.fault = lambda how, name, n: (
        (503, {}) if how == "GET" and name == "7.parquet" and n % 2 else None
    )
    assert [
        row["x"] for row in tp.list_files(f"{server.url}/*.parquet").read_parquet(index=False)
    ] == list(range(200))


def test_no_more_than_a_limit_stays(server, monkeypatch):
    monkeypatch.setattr(file_bytes, "SMALL_FILES", 5000)
    pipe = tp.list_files(f"{server.url}/*.parquet").read_parquet(index=False)
    assert [row["x"] for row in pipe] == list(range(200))
    asked = gets(server)
    assert 0 < sum(count == 1 for count in asked.values()) < 20


def test_rows_are_of_the_version_that_was_fetched(server):
    pipe = tp.list_files(f"{server.url}/*.parquet").read_parquet(index=False)
    len(pipe)
    for path in server.folder.iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    assert [row["x"] for row in pipe] == list(range(200))


def test_a_file_and_its_footer_are_one_request_where_the_index_is_there(
    server, tmp_path, monkeypatch
):
    index = str(tmp_path / "index.arrow")
    len(tp.list_files(f"{server.url}/*.parquet").read_parquet(index=index))
    gets(server)
    monkeypatch.setattr(file_bytes, "SMALL_FILE", 0)
    monkeypatch.setattr(read_parquet, "WHOLE_BYTES", 1 << 20)
    pipe = tp.list_files(f"{server.url}/*.parquet").read_parquet(index=index)
    assert [row["x"] for row in pipe] == list(range(200))
    assert gets(server) == Counter(f"GET {n}.parquet" for n in range(20))
