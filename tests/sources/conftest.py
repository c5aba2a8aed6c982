"""What holds for all tests of sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from faulty_server import FaultyServer, serving
from s3_store import s3_store
from trainpipes.filesystems import retry
from trainpipes.sources import read_parquet
from trainpipes.sources.files import file_bytes


@pytest.fixture(autouse=True)
def files_are_not_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote files of a few KB stand for large ones, which do not stay in memory."""
    monkeypatch.setattr(file_bytes, "SMALL_FILE", 0)
    monkeypatch.setattr(read_parquet, "WHOLE_BYTES", 0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails is made again at once."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


@pytest.fixture
def server(folder: Path) -> Iterator[FaultyServer]:
    """Serves the folder that the test's own file makes."""
    pytest.importorskip("aiohttp")
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def s3(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of a store with a bucket, which is called as the test's file."""
    with s3_store(request.node.path.stem.replace("_", "-")) as options:
        yield options


class CountedFiles(MemoryFileSystem):
    """Files in memory that count as those of a server, of which every byte that is fetched is counted."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fetched = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any):
        found = super().cat_file(path, start, end, **kwargs)
        self.fetched += len(found)
        return found

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {**super().info(path, **kwargs), "ETag": "1"}


@pytest.fixture
def counted() -> Iterator[CountedFiles]:
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    CountedFiles.store.clear()
    files = fsspec.filesystem("counted")
    files.fetched = 0
    yield files
    CountedFiles.store.clear()
