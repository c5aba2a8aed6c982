"""A file that is overwritten while it is read, to the same size, gives no row of the new one."""

from __future__ import annotations

import gc
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import FaultyServer
from trainpipes.sources import text_pieces
from trainpipes.sources.files import file_bytes
from trainpipes.sources.files import file_bytes as range_file

ROWS = 40_000  # more than is read ahead


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(text_pieces, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(range_file, "HELD_BYTES", 40_000)
    monkeypatch.setattr(range_file, "LEAST_BYTES", 10_000)
    yield
    gc.collect()  # readers that errors hold, which ask servers that are gone


def parquet(values: list[int]) -> bytes:
    sink = pa.BufferOutputStream()
    small = {"data_page_size": 8000, "write_batch_size": 1000, "use_dictionary": False}
    pq.write_table(
        pa.table({"x": values}), sink, compression="none", write_statistics=False, **small
    )
    return bytes(sink.getvalue())


def arrow(values: list[int]) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(
        pa.table({"x": values}), sink, compression="uncompressed", chunksize=1000
    )
    return bytes(sink.getvalue())


def numpy(values: list[int]) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.array(values))
    return sink.getvalue()


def tar(values: list[int]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for n, value in enumerate(values[:2000]):
            info = tarfile.TarInfo(f"{n:04}.txt")
            info.size = 5
            archive.addfile(info, io.BytesIO(b"%05d" % value))
    return sink.getvalue()


#: A file of each format from numbers of five digits, what reads it, and a row's number.
FORMATS: dict[str, tuple[Callable[[list[int]], bytes], Callable[[Any], Any], Any]] = {
    "parquet": (parquet, lambda files: files.read_parquet(), lambda row: row["x"]),
    "jsonl": (lambda values: b"".join(json.dumps({"x": n}).encode() + b"\n" for n in values),
        lambda files: files.read_json(), lambda row: row["x"]),
    "csv": (lambda values: b"x\n" + b"".join(b"%d\n" % n for n in values), lambda files: files.read_csv(),
        lambda row: row["x"]),
    "arrow": (arrow, lambda files: files.read_arrow(), lambda row: row["x"]),
    "npy": (numpy, lambda files: files.read_numpy(block_rows=1000), lambda row: int(row["array"])),
    "tar": (tar, lambda files: files.read_webdataset(block_rows=50), lambda row: int(row["txt"])),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def check(name: str, files: tp.Pipeline, put: Callable[[bytes], None]) -> None:
    """Read some rows, overwrite the file, and go on."""
    write, reader, number = FORMATS[name]
    old, new = list(range(10_000, 10_000 + ROWS)), list(range(50_000, 50_000 + ROWS))
    assert len(write(old)) == len(write(new))
    put(write(old))
    pipe = reader(files)
    rows = iter(pipe)
    found = [number(next(rows))]
    put(write(new))
    with pytest.raises(tp.DataChangedError, match=f"rows.{name}.*has changed"):
        found.extend(map(number, chain(rows, pipe)))  # what was read ahead of time is old
    assert max(found) < 50_000


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", ["in place", "in place of it", "with its time"])
def test_on_this_machine(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / f"rows.{name}"

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

    check(name, tp.list_files(path), put)


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
    monkeypatch.setattr(file_bytes, "MOUNTS", str(mounts))
    assert len(list(pipe)) == 10


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("told", ["ETag", "Last-Modified"])
def test_over_http(
    server: FaultyServer, name: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.versions, times = told, [0]
    path = server.folder / f"rows.{name}"

    def put(content: bytes) -> None:
        path.write_bytes(content)
        times.append(10**9 * len(times))  # whole seconds, as over HTTP
        os.utime(path, ns=(0, times[-1]))

    with caplog.at_level("WARNING", "trainpipes"):
        check(name, tp.list_files(f"{server.url}/rows.{name}"), put)
    assert caplog.text.count("gives no ETag") == (told == "Last-Modified")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FORMATS)
def test_on_s3(s3: dict[str, Any], name: str) -> None:
    system = fsspec.filesystem("s3", **s3)
    url = f"s3://test-changed-files/rows.{name}"
    check(name, tp.list_files(url, storage_options=s3), lambda content: system.pipe(url, content))
