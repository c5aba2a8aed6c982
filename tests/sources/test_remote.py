"""Bytes of a remote file: the same wherever they are asked for, with few requests and little held."""

from __future__ import annotations

import random
from collections.abc import Iterator

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainpipes.sources.remote import file as remote
from trainpipes.sources.remote.file import RemoteFile

DATA = random.Random(0).randbytes(50_000)


@pytest.fixture(scope="module")
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    system.pipe("/remote/file", DATA)
    yield system
    system.rm("/remote", recursive=True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_read_gives_the_bytes_of_that_place(
    memory: fsspec.AbstractFileSystem, data: st.DataObject
) -> None:
    kept = remote.HELD_BYTES, remote.LEAST_BYTES, remote.GAP, remote.REQUEST_BYTES
    remote.HELD_BYTES = data.draw(st.sampled_from([100, 5000, 1 << 20]))
    remote.LEAST_BYTES, remote.GAP, remote.REQUEST_BYTES = 64, 32, 2000
    place = st.integers(0, len(DATA))
    try:
        file = RemoteFile(memory, "/remote/file", len(DATA))
        for _ in range(data.draw(st.integers(1, 25))):
            if data.draw(st.booleans()):
                ends = sorted(data.draw(st.lists(place, max_size=8, unique=True)))
                file.expect(list(zip(ends[::2], ends[1::2], strict=False)))
            start, size = data.draw(place), data.draw(st.integers(0, 3000))
            assert file.seek(start) == start
            assert file.read(size) == DATA[start : start + size]
            assert file.tell() == min(len(DATA), start + size)
    finally:
        remote.HELD_BYTES, remote.LEAST_BYTES, remote.GAP, remote.REQUEST_BYTES = kept


def test_columns_read_in_turn_are_fetched_together_and_little_is_held(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HELD_BYTES", 8000)
    monkeypatch.setattr(remote, "LEAST_BYTES", 100)
    monkeypatch.setattr(remote, "GAP", 0)
    rounds: list[int] = []
    cat_ranges = type(memory).cat_ranges

    def count(system: object, paths: list[str], *more: object, **options: object) -> object:
        rounds.append(len(paths))
        return cat_ranges(system, paths, *more, **options)

    monkeypatch.setattr(type(memory), "cat_ranges", count)
    file = RemoteFile(memory, "/remote/file", len(DATA))
    columns = [(0, 10_000), (12_000, 22_000), (30_000, 40_000), (40_000, 50_000)]
    file.expect(columns)
    for offset in range(0, 10_000, 250):
        for start, _ in columns:
            file.seek(start + offset)
            assert file.read(250) == DATA[start + offset : start + offset + 250]
            assert sum(len(s.data) for s in file._stretches) <= 2 * 8000
    assert len(rounds) <= 12  # 40 kB, 4 kB at a time
    assert max(rounds) <= 4
