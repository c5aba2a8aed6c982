"""Bytes of remote files that are kept on a local disk: fetched once, bounded, checked, and never of
another version."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import subprocess
import tarfile
import threading
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import FaultyServer, serving
from interpreters import python
from s3_store import address_of, s3_store
from trainpipes._internal import messages
from trainpipes.cache import kept_file
from trainpipes.cache.kept_file import Store
from trainpipes.sources.files import remote_bytes
from trainpipes.sources.files.remote_bytes import CHUNK, open_bytes
from trainpipes.testing import digest

FILES = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.mkdir()
    for file in range(FILES):
        rows = range(500 * file, 500 * file + 500)
        table = pa.table({"x": rows, "text": [f"row {n} " * 40 for n in rows]})
        pq.write_table(table, found / f"{file}.parquet", row_group_size=50)
    return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, nothing_warned_of: None) -> None:
    monkeypatch.setattr(remote_bytes, "CHUNK", 10_000)


def in_batches(files: tp.Pipeline) -> tp.Pipeline:
    return files.read_parquet(index=False).shuffle(250, seed=1).batch(8)


def rows(server: FaultyServer, cache: Path | None, **options: Any) -> tp.Pipeline:
    urls = [f"{server.url}/{file}.parquet" for file in range(FILES)]
    return in_batches(tp.list_files(urls, cache_dir=cache, **options))


def local(folder: Path) -> tp.Pipeline:
    return in_batches(tp.list_files(folder))


def digests(pipe: tp.Pipeline) -> list[str]:
    return [digest(batch) for batch in pipe]


def gets(server: FaultyServer) -> int:
    """Requests for data since the last call."""
    found = sum(asked.startswith("GET") for asked in server.asked)
    server.asked.clear()
    return found


def chunks(cache: Path) -> list[Path]:
    return sorted(cache.glob("bytes/??/*.chunk"))


def kept(cache: Path) -> int:
    return sum(path.stat().st_size for path in chunks(cache))


def test_later_epochs_and_runs_fetch_nothing(
    server: FaultyServer, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    pipe, here = rows(server, cache), local(folder)
    wanted = [digests(here) for _ in range(2)]
    assert digests(pipe) == wanted[0]
    assert gets(server)
    assert digests(pipe) == wanted[1]
    assert gets(server) == 0
    assert digests(rows(server, cache)) == wanted[0]
    assert gets(server) == 0
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < kept(cache) < 1.01 * size
    modes = {stat.S_IMODE(path.stat().st_mode) for path in chunks(cache)}
    assert modes == {0o600}
    assert stat.S_IMODE((cache / "bytes").stat().st_mode) == 0o700
    found = tp.cache.info(cache)
    assert (found.chunks, found.chunk_bytes) == (len(chunks(cache)), kept(cache))
    assert str(found).endswith(f"{found.chunks} remote chunks ({found.chunk_bytes:,} bytes)")
    assert tp.cache.clear(cache) == found
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_folder_on_s3_is_fetched_once(folder: Path, tmp_path: Path) -> None:
    with s3_store("kept-store") as options:
        system = fsspec.filesystem("s3", **options)
        for path in folder.iterdir():
            system.put(str(path), f"kept-store/{path.name}")
        with serving(tmp_path) as server:
            server.upstream = address_of(options)
            options["endpoint_url"] = server.url
            files = tp.list_files(
                "s3://kept-store", storage_options=options, cache_dir=tmp_path / "cache"
            )
            pipe, here = in_batches(files), local(folder)
            for epoch in range(2):
                assert digests(pipe) == digests(here)
                data = [a for a in server.asked if a.startswith("GET") and ".parquet" in a]
                assert bool(data) == (epoch == 0)
                server.asked.clear()


def test_what_changes_is_fetched_again_and_never_mixed(
    server: FaultyServer, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    old = digests(rows(server, cache))
    table = pq.read_table(folder / "0.parquet")
    other = table.set_column(0, "x", pa.array(range(5000, 5500)))
    pq.write_table(other, folder / "0.parquet", row_group_size=50)
    gets(server)
    new = digests(rows(server, cache))
    assert new != old
    assert new == digests(local(folder))
    # Half of a file is here when it changes.
    pipe = rows(server, tmp_path / "another")
    next(iter(pipe))
    pq.write_table(table, folder / "0.parquet", row_group_size=50)
    for path in chunks(tmp_path / "another")[::2]:
        path.unlink()
    with pytest.raises(tp.DataChangedError, match=r"0\.parquet"):
        list(chain(pipe, pipe))


def spoil(paths: list[Path], how: str) -> None:
    whole = [path.read_bytes() for path in paths]
    alike = [n for n, data in enumerate(whole) if len(data) == max(map(len, whole))]
    other = dict(zip(alike, alike[::-1], strict=True))
    for n, path in enumerate(paths):
        data = whole[n]
        spoiled = {"cut": data[: len(data) // 2], "empty": b"", "flipped": b"x" + data[1:]}
        path.write_bytes(spoiled.get(how, whole[other.get(n, n)]))


def test_a_chunk_that_is_damaged_or_another_one_is_fetched_again(
    server: FaultyServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    wanted = digests(rows(server, cache))
    for how in ("cut", "empty", "flipped", "exchanged"):
        spoil(chunks(cache), how)
        kept_file._whole.clear()
        messages._warned.clear()
        gets(server)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert digests(rows(server, cache)) == wanted
        told = [one for one in said if "chunk was damaged" in str(one.message)]
        assert len(told) == (how != "exchanged")
        assert gets(server)
    assert digests(rows(server, cache)) == wanted
    assert gets(server) == 0


def test_a_limit_holds_and_the_least_recently_used_goes_first(
    server: FaultyServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    wanted = digests(rows(server, None))
    assert digests(rows(server, cache, cache_bytes=45_000)) == wanted
    assert 20_000 < kept(cache) <= 45_000
    store, size = Store(tmp_path / "own", "bytes", 10 * 1012, "most", "own", "none"), 1000

    def put(path: Path, size: int) -> None:
        def fill(file: Any) -> None:
            file.write(bytes(size))
            kept_file.add_checksum(file)

        store.make(path, fill)

    paths = [store.path(f"{n:064}") for n in range(12)]
    for n, path in enumerate(paths[:10]):
        put(path, size)
        os.utime(path, (n, n))
    assert kept_file.read_content(paths[0], len) == size  # and so it was used now
    put(paths[10], size)
    there = [n for n, path in enumerate(paths) if path.exists()]
    assert 0 in there
    assert 10 in there
    assert 1 not in there
    assert kept(tmp_path / "own") <= 10 * 1012
    said = r"most must be at least the size of an entry, got 10,120"
    with pytest.warns(UserWarning, match=said) as told:
        put(paths[11], 20_000)
    assert told[0].filename == __file__
    assert not paths[11].exists()
    assert store.is_off(paths[11])


PUT = """
import os, sys
from pathlib import Path
from trainpipes.cache.kept_file import Store
store = Store(Path(sys.argv[1]), "bytes", 100_000, "most", "own", "none")
def size(path):
    try:
        return os.stat(path).st_size
    except FileNotFoundError:  # it was just removed
        return 0
for n in range(60):
    path = store.path(f"{int(sys.argv[2]) * 1000 + n:064}")
    store.make(path, lambda file: file.write(os.urandom(5000)))
    total = sum(size(os.path.join(at, name))
                for at, _, names in os.walk(sys.argv[1]) for name in names if name.endswith("chunk"))
    assert total <= 100_000, total
"""


def test_the_limit_is_of_all_processes_together(tmp_path: Path) -> None:
    children = [
        subprocess.Popen([*python(), "-c", PUT, str(tmp_path / "cache"), str(n)]) for n in range(3)
    ]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    assert 50_000 < kept(tmp_path / "cache") <= 100_000


def test_a_full_disk_costs_no_row_and_is_said_once(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = digests(rows(server, None))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_file.os, "replace", full)
    with pytest.warns(UserWarning, match=r"bytes cannot be kept in .*No space.*cache_dir") as said:
        assert digests(rows(server, tmp_path / "cache")) == wanted
    assert len(said) == 1


def test_threads_that_want_the_same_fetch_it_once(server: FaultyServer, tmp_path: Path) -> None:
    files = tp.list_files(f"{server.url}/0.parquet", cache_dir=tmp_path / "cache")
    stage: Any = files.stages[0]
    listed = stage.files()
    content = (server.folder / "0.parquet").read_bytes()
    found: list[bytes] = []
    gets(server)

    def read() -> None:
        found.append(bytes(open_bytes(listed, 0).read([(100, len(content))])[0]))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [content[100:]] * 8
    assert gets(server) == 1
    assert CHUNK > 1 << 20


@pytest.mark.parametrize(
    ("option", "value"),
    [("cache_bytes", "much"), ("cache_bytes", 0), ("prefetch_bytes", "1 G a second")],
)
def test_what_is_no_number_of_bytes_is_refused(option: str, value: Any) -> None:
    with pytest.raises(tp.ConfigError, match=rf"list_files\({option}\) must be a number of bytes"):
        tp.list_files("x", **{option: value})
    for folder in ("s3://bucket", ""):
        with pytest.raises(tp.ConfigError, match=r"list_files\(cache_dir\) must be a path"):
            tp.list_files("x", cache_dir=folder)


def test_all_kinds_of_files_are_read_through_the_cache_cold_and_scanned_again(
    server: FaultyServer, folder: Path, tmp_path: Path
) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(500))
    for name, opener in (("a.jsonl", open), ("b.jsonl.gz", gzip.open), ("c.jsonl.xz", lzma.open)):
        with opener(folder / name, "wt") as file:
            file.write(lines)
    np.save(folder / "d.npy", np.arange(500))
    with tarfile.open(folder / "e.tar.gz", "w:gz") as archive:
        for n in range(9):
            archive.add(folder / "d.npy", f"{n}.npy")

    def counts(**options: Any) -> list[int]:
        def files(name: str) -> Any:
            return tp.list_files(f"{server.url}/{name}", **options)

        names = ["a.jsonl", "b.jsonl.gz", "c.jsonl.xz"]
        pipes = [files(name).read_json(index=False) for name in names]
        pipes += [files("a.jsonl").read_text("document", index=False)]
        pipes += [files("d.npy").read_numpy(), files("e.tar.gz").read_webdataset(index=False)]
        return [sum(1 for _ in pipe) for pipe in pipes]

    plain = counts()
    assert plain == [500, 500, 500, 1, 500, 9]
    for _ in range(2):
        assert counts(cache_dir=tmp_path / "cache") == plain
