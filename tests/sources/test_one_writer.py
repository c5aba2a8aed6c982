"""An index is made by one process of a machine; the others wait for it, also if that one is killed."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.text import json_rows

FILES, ROWS = 3, 5
context = multiprocessing.get_context("fork")


def write_lines(path: Path, rows: int) -> None:
    path.with_suffix(".jsonl").write_text("".join(f'{{"x": {n}}}\n' for n in range(rows)))


def write_tar(path: Path, rows: int) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for n in range(rows):
            member = tarfile.TarInfo(f"{n}.x")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"1"))


def write_parquet(path: Path, rows: int) -> None:
    pq.write_table(pa.table({"x": range(rows)}), path.with_suffix(".parquet"))


def write_stream(path: Path, rows: int) -> None:
    table = pa.table({"x": range(rows)})
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as stream:
        stream.write_table(table)


def write_array(path: Path, rows: int) -> None:
    np.save(path.with_suffix(".npy"), np.arange(rows))


#: How files are written and read.
KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[..., tp.Pipeline]]] = {
    "json": (write_lines, tp.read_json),
    "tar": (write_tar, tp.read_webdataset),
    "parquet": (write_parquet, tp.read_parquet),
    "arrow": (write_stream, tp.read_arrow),
    "numpy": (write_array, tp.read_numpy),
}
every = pytest.mark.parametrize("kind", KINDS)
#: How often a file is looked at: JSON once for its rows, and once for their types.
LOOKS = {"json": 2}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    found = tmp_path / "d"
    found.mkdir()
    for n in range(FILES):
        KINDS[kind][0](found / f"{n}", ROWS)
        for path in found.glob(f"{n}.*"):
            os.utime(path, (time.time() - 60,) * 2)
    return found


def open_it(
    kind: str, folder: Path, looked: Any, started: Any, results: Any, seconds: float
) -> None:
    """In a process: open a pipeline, slowly. Gives its rows, and how many files it has looked at."""
    complete, own = IndexStore.complete, []

    def slowly(store: IndexStore, scan: Any, *more: Any, **options: Any) -> None:
        def slow(job: Any) -> Any:
            own.append(1)
            looked.set()
            time.sleep(seconds)
            return scan(job)

        complete(store, slow, *more, **options)

    IndexStore.complete = slowly  # type: ignore[method-assign]
    started.wait()
    results.put((len(KINDS[kind][1](folder, index=True)), len(own)))


@every
def test_of_several_processes_one_makes_the_index(kind, folder):
    started, results = context.Barrier(3), context.Queue()
    several = [
        context.Process(target=open_it, args=(kind, folder, context.Event(), started, results, 0.2))
        for _ in range(3)
    ]
    for one in several:
        one.start()
    found = sorted(results.get(timeout=60) for _ in several)
    for one in several:
        one.join()
    looks = FILES * LOOKS.get(kind, 1)
    assert found == [(FILES * ROWS, 0), (FILES * ROWS, 0), (FILES * ROWS, looks)]
    assert tp.cache.info().indexes == 1


def look_at_types(folder: Path, started: Any, results: Any) -> None:
    """In a process: find the types of all rows, slowly. Gives how many pieces it has looked at."""
    infer, pieces = json_rows.Json.infer, []

    def slow(*arguments: Any) -> Any:
        pieces.append(1)
        time.sleep(0.3)
        return infer(*arguments)

    json_rows.Json.infer = slow  # type: ignore[method-assign]
    started.wait()
    results.put((next(iter(tp.read_json(folder, index=True, infer="all"))), len(pieces)))


@pytest.mark.parametrize("kind", ["json"])
def test_of_several_processes_one_looks_at_the_types(folder):
    started, results = context.Barrier(3), context.Queue()
    several = [
        context.Process(target=look_at_types, args=(folder, started, results)) for _ in range(3)
    ]
    for one in several:
        one.start()
    found = [results.get(timeout=60) for _ in several]
    for one in several:
        one.join()
    assert [row for row, _ in found] == [{"x": 0}] * 3
    assert sorted(pieces for _, pieces in found) == [0, 0, FILES]


@every
def test_if_the_one_that_makes_it_is_killed_another_one_does(kind, folder, kept):
    looked, results = context.Event(), context.Queue()
    first = context.Process(
        target=open_it, args=(kind, folder, looked, context.Barrier(1), results, 600)
    )
    first.start()
    assert looked.wait(60)
    second = context.Process(
        target=open_it, args=(kind, folder, context.Event(), context.Barrier(1), results, 0)
    )
    second.start()
    second.join(0.5)
    assert second.is_alive()  # it waits
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    assert results.get(timeout=60) == (FILES * ROWS, FILES * LOOKS.get(kind, 1))
    first.join()
    second.join()
    third = context.Process(
        target=open_it, args=(kind, folder, context.Event(), context.Barrier(1), results, 0)
    )
    third.start()
    assert results.get(timeout=60) == (FILES * ROWS, 0)
    third.join()
    assert [path.suffix for path in (kept / "footers").iterdir()] == [".arrow"]


@every
def test_a_file_that_has_changed_is_looked_at_again_and_no_other(kind, folder):
    results = context.Queue()
    for rows, files in ((ROWS, FILES), (ROWS + 2, 1)):
        KINDS[kind][0](folder / "1", rows)
        for path in folder.glob("1.*"):
            os.utime(path, (time.time() - 60 + rows,) * 2)
        one = context.Process(
            target=open_it, args=(kind, folder, context.Event(), context.Barrier(1), results, 0)
        )
        one.start()
        assert results.get(timeout=60) == (2 * ROWS + rows, files * LOOKS.get(kind, 1))
        one.join()
