"""Bytes of a remote file: the same wherever they are asked for, with few requests and little held."""

from __future__ import annotations

import io
import random
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from trainpipes.filesystems import systems
from trainpipes.sources.files import file_bytes as range_file
from trainpipes.sources.files import remote_bytes
from trainpipes.sources.files.file_bytes import FileBytes, RangeFile
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.files.remote_bytes import open_bytes

DATA = random.Random(0).randbytes(50_000)


@pytest.fixture(scope="module")
def remote() -> Iterator[FileBytes]:
    system = fsspec.filesystem("memory")
    system.pipe("/remote/file", DATA)
    yield open_bytes(ListFiles(urls="memory://remote/file").files(), 0)
    system.rm("/remote", recursive=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_bytes, "PART_BYTES", 2000)
    monkeypatch.setattr(remote_bytes, "GAP", 32)
    monkeypatch.setattr(range_file, "LEAST_BYTES", 64)


@settings(examples(200), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_ranges_and_any_read_give_the_bytes_of_that_place(remote, data):
    place = st.integers(0, len(DATA))
    pairs = [sorted(pair) for pair in data.draw(st.lists(st.tuples(place, place), max_size=6))]
    ranges = [(a, b) for a, b in pairs]
    assert [bytes(part) for part in remote.read(ranges)] == [DATA[a:b] for a, b in ranges]
    file = RangeFile(remote, held=data.draw(st.sampled_from([100, 5000, 1 << 20])))
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            ends = sorted(data.draw(st.lists(place, max_size=8, unique=True)))
            file.expect(list(zip(ends[::2], ends[1::2], strict=False)))
        elif data.draw(st.booleans()):
            file.follow(data.draw(place))
        start, size = data.draw(place), data.draw(st.integers(0, 3000))
        assert file.seek(start) == start
        assert file.read(size) == DATA[start : start + size]
        assert file.tell() == min(len(DATA), start + size)
    at = data.draw(place)
    with remote.stream(at) as stream:
        assert stream.read() == DATA[at:]


def test_columns_read_in_turn_are_fetched_together_and_little_is_held(remote, monkeypatch):
    monkeypatch.setattr(remote_bytes, "GAP", 0)
    rounds: list[int] = []
    read = type(remote).read

    def count(source: FileBytes, ranges: list[tuple[int, int]]) -> object:
        rounds.append(sum(stop - start for start, stop in ranges))
        return read(source, ranges)

    monkeypatch.setattr(type(remote), "read", count)
    file = RangeFile(remote, held=8000)
    columns = [(0, 10_000), (12_000, 22_000), (30_000, 40_000), (40_000, 50_000)]
    file.expect(columns)
    for offset in range(0, 10_000, 250):
        for start, _ in columns:
            file.seek(start + offset)
            assert file.read(250) == DATA[start + offset : start + offset + 250]
    assert len(rounds) <= 12  # 40 kB, 4 kB at a time
    assert sum(rounds) == 40_000
    assert max(rounds) <= 8000


def test_a_file_of_unknown_size_that_a_row_names_is_fetched_whole(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/sizeless", DATA)
    monkeypatch.setattr(type(memory), "size", lambda system, path: None)
    with systems.open_named("memory://sizeless", whole=False) as file:
        assert file.read() == DATA


def test_a_file_that_a_row_names_keeps_few_blocks_wherever_it_is_read(monkeypatch):
    monkeypatch.setattr(systems, "BLOCK", 100)
    monkeypatch.setattr(systems, "MOST", 800)
    monkeypatch.setattr(systems, "HELD", 1000)
    fsspec.filesystem("memory").pipe_file("/named", DATA)
    draws = random.Random(0)
    with systems.open_named("memory://named", whole=False) as file:
        assert isinstance(file, systems.RangedFile)
        assert file.read() == DATA
        for _ in range(300):
            start, size = draws.randrange(len(DATA)), draws.randrange(3000)
            assert file.seek(start) == start
            assert file.read(size) == DATA[start : start + size]
            assert len(file._blocks) <= 10
        file.check()


class FTPFileSystem(MemoryFileSystem):
    """Files in memory, called as a system with a single connection; counts who uses it at once."""

    protocol = "single"
    store: dict[str, Any] = {}  # noqa: RUF012  (as its parent has it)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    busy = most = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("single:/"))

    def cat_file(self, path: str, *given: Any, **options: Any) -> bytes:
        FTPFileSystem.busy += 1
        FTPFileSystem.most = max(FTPFileSystem.most, FTPFileSystem.busy)
        time.sleep(0.001)
        FTPFileSystem.busy -= 1
        return bytes(super().cat_file(path, *given, **options))


def test_a_system_with_a_single_connection_is_asked_for_one_file_at_a_time():
    fsspec.register_implementation("single", FTPFileSystem, clobber=True)
    contents = {f"single://d/{n}.txt": b"%d\n" % n * 9 for n in range(40)}
    for url, content in contents.items():
        fsspec.filesystem("single").pipe_file(url, content)
    for files in ("single://d/*.txt", "simplecache::single://d/*.txt"):
        FTPFileSystem.most = 0
        rows = list(tp.list_files(files).read_bytes().shuffle(9, seed=0))
        assert sorted(row["bytes"] for row in rows) == sorted(contents.values())
        assert len(list(tp.list_files(files).read_text())) == 9 * 40
        assert FTPFileSystem.most <= 1
    FTPFileSystem.store.clear()


def test_files_in_an_archive_come_as_they_are(tmp_path):
    contents = [random.Random(n).randbytes(30_000) for n in range(100)]
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for n, content in enumerate(contents):
            member = tarfile.TarInfo(f"{n:03}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    rows = tp.list_files(f"tar://*.bin::{tmp_path}/all.tar").read_bytes()
    for _ in range(3):
        assert [row["bytes"] for row in rows] == contents
