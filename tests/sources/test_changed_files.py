"""A file that is overwritten while it is read, to the same size, gives no row of the new one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from every_format import FORMATS
from faulty_server import FaultyServer
from trainpipes.sources.files import file_errors, range_file
from trainpipes.sources.text import pieces

ROWS = 12_000  # more than is read ahead
#: Formats, and rows of a block.
BLOCKS = {"parquet": ROWS, "json lines": 1000, "csv": 1000, "arrow": 1000, "npy": 1000, "tar": 50}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(range_file, "HELD_BYTES", 40_000)
    monkeypatch.setattr(range_file, "LEAST_BYTES", 10_000)
    yield
    gc.collect()  # readers that errors hold, which ask servers that are gone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def small_pages(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    small = {"data_page_size": 8000, "write_batch_size": 1000, "use_dictionary": False}
    pq.write_table(table, sink, compression="none", write_statistics=False, **small)
    return bytes(sink.getvalue())


@cache
def contents(name: str) -> list[bytes]:
    """A file of numbers of five digits, and another one of the same size."""
    rows = ROWS // 6 if name == "tar" else ROWS
    y = [0.5] * rows
    tables = [pa.table({"x": range(n, n + rows), "y": y}) for n in (10_000, 50_000)]
    if name == "parquet":
        return [small_pages(table) for table in tables]
    return [FORMATS[name].write(table, BLOCKS[name]) for table in tables]


def check(name: str, file: str, put: Callable[[bytes], None], **options: Any) -> None:
    """Read some rows, overwrite the file, and go on."""
    old, new = contents(name)
    assert len(old) == len(new)
    put(old)
    pipe = FORMATS[name].read(file, BLOCKS[name], **options)
    rows = iter(pipe)
    found = [FORMATS[name].number(next(rows))]
    put(new)
    said = f"rows{FORMATS[name].suffix}.*has changed"
    with pytest.raises(tp.DataChangedError, match=said):
        found.extend(map(FORMATS[name].number, chain(rows, pipe)))  # what was read ahead is old
    assert max(found) < 50_000


HERE = [(name, "in place") for name in BLOCKS]
HERE += [(name, "in place of it") for name in ("parquet", "csv", "tar")]
HERE += [(name, "with its time") for name in ("json lines", "arrow", "npy")]


@pytest.mark.parametrize(("name", "how"), HERE)
def test_on_this_machine(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / f"rows{FORMATS[name].suffix}"

    def put(content: bytes) -> None:
        if not path.exists():
            path.write_bytes(content)
            os.utime(path, ns=(0, 10**9))  # long ago, whatever the clock of files
            return
        if how == "in place":
            with path.open("r+b") as file:
                file.write(content)
            return
        times = path.stat()
        (tmp_path / "beside").write_bytes(content)
        if how == "with its time":
            os.utime(tmp_path / "beside", ns=(times.st_atime_ns, times.st_mtime_ns))
        (tmp_path / "beside").replace(path)

    check(name, str(path), put)


def test_a_file_system_that_makes_up_inodes_is_told_by_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": 1}\n' * 10)
    pipe = tp.list_files(path).read_json()
    assert len(pipe) == 10
    times = path.stat()
    (tmp_path / "beside").write_text('{"x": 1}\n' * 10)
    os.utime(tmp_path / "beside", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "beside").replace(path)
    device = f"{os.major(times.st_dev)}:{os.minor(times.st_dev)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 35 {device} / /data rw - fuse.gcsfuse bucket rw\n")
    monkeypatch.setattr(file_errors, "MOUNTS", str(mounts))
    assert len(list(pipe)) == 10


TOLD = [(name, "ETag") for name in BLOCKS] + [(name, "Last-Modified") for name in ("arrow", "csv")]


@pytest.mark.parametrize(("name", "told"), TOLD)
def test_over_http(
    server: FaultyServer, name: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.versions, times = told, [0]
    path = server.folder / f"rows{FORMATS[name].suffix}"

    def put(content: bytes) -> None:
        path.write_bytes(content)
        times.append(10**9 * len(times))  # whole seconds, as over HTTP
        os.utime(path, ns=(0, times[-1]))

    with caplog.at_level("WARNING", "trainpipes"):
        check(name, f"{server.url}/{path.name}", put)
    assert caplog.text.count("gives no ETag") == (told == "Last-Modified")


@pytest.mark.parametrize("name", BLOCKS)
def test_on_s3(s3: dict[str, Any], name: str) -> None:
    system = fsspec.filesystem("s3", **s3)
    url = f"s3://test-changed-files/rows{FORMATS[name].suffix}"
    check(name, url, lambda content: system.pipe(url, content), storage_options=s3)
