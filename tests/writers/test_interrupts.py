"""Ctrl-C at any place of a writer: what is there is whole, and the same call ends with the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

import trainpipes as tp
from interrupts import Place, ends_in_time, is_interrupted, places_of
from resuming import EVERYWHERE
from s3_store import s3_store
from trainpipes.filesystems import places
from trainpipes.filesystems.retry import Requests
from trainpipes.prepare import repack
from trainpipes.writers import Processes, Threads
from unfinished import contents
from writers.killed_writers import CASES

#: What a writer waits in: elsewhere it waits for nobody.
ROOMS = ("writers", "filesystems", "_internal", "prepare")
#: What ends a writer.
END = ("OutputFolder.finish", "OutputFolder.__exit__", "OutputFolder._end", "OutputFolder._clean_up",
       "OutputFolder._clear", "OutputFolder._sweep", "run", "_LocalLock.free", "_Lease.free")  # fmt: skip
Write = Callable[[], Any]

# One that is raised in a generator's close is only reported.
pytestmark = [
    pytest.mark.own_process,
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning",
        "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    ),
]


def is_whole(found: dict[str, bytes]) -> bool:
    """Whether all is there that the manifest names, if there is one."""
    about = json.loads(found.get("_manifest.json", b'{"files": []}'))
    names = [name for one in about["files"] for name in (one["file"], *one["beside"])]
    return {*names} <= found.keys()


def check_all(
    write: Write, here: Callable[[], dict[str, bytes]], clear: Write, at: list[Place], **how: Any
) -> None:
    write()
    expected, came = here(), 0
    clear()
    for number, place in enumerate(at):
        again = 1 + number % 40 if how.get("twice") else None
        came += is_interrupted(write, place, ROOMS, how.get("error", KeyboardInterrupt), again)
        assert is_whole(here()), place
        write()
        assert here() == expected, place
        clear()
    assert came > 0.7 * len(at)  # what other threads have done meanwhile is not the same each time


def local(
    name: str, folder: Path, threads: int
) -> tuple[Write, Callable[[], dict[str, bytes]], Write]:
    (folder / "data").mkdir()
    work, out = CASES[name](folder / "data"), folder / "out"
    return (
        lambda: work(out, threads),
        lambda: contents(out),
        lambda: shutil.rmtree(out, ignore_errors=True),
    )


def some_of(found: list[Place], part: int, parts: int) -> list[Place]:
    assert len(found) > 50
    return found[part % parts :: parts]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_of_a_writer(name, tmp_path):
    write, here, clear = local(name, tmp_path, 2)
    found = places_of(write, ROOMS)
    clear()
    check_all(write, here, clear, some_of(found, [*CASES].index(name), 90))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_of_a_writer_at_every_place(name, threads, tmp_path):
    write, here, clear = local(name, tmp_path, threads)
    found = places_of(write, ROOMS)
    clear()
    check_all(write, here, clear, found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["counted, json", "repack, shuffled", "memmap"])
def test_as_a_writer_ends(name, tmp_path):
    write, here, clear = local(name, tmp_path, 1)
    found = [place for place in places_of(write, ROOMS) if place[1] in END]
    clear()
    assert len(found) > 30
    check_all(write, here, clear, found[:: 10 if name.startswith("repack") else 5])


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])  # as a handler of SIGTERM raises
def test_twice(error, tmp_path):
    write, here, clear = local("tokenize", tmp_path, 2)
    found = places_of(write, ROOMS)
    clear()
    check_all(write, here, clear, some_of(found, 3, 60), error=error, twice=True)


def test_of_rows_that_are_read_once_all_is_there_or_the_call_begins_anew(tmp_path):
    out = tmp_path / "out"

    def write() -> None:
        if not (out / "_manifest.json").exists():  # else it says that it is there
            tp.write_memmap(out, [{"x": n} for n in range(9)], rows_per_file=4)

    found = [place for place in places_of(write, ROOMS) if place[1] in END]
    shutil.rmtree(out)
    check_all(write, lambda: {n: d for n, d in contents(out).items() if n != "about.json"},
              lambda: shutil.rmtree(out, ignore_errors=True), found[::3])  # fmt: skip


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_store("interrupted") as options:
        yield options


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", ["write_json", "repack"])
def test_as_a_writer_to_a_store_ends(job, s3, monkeypatch):
    monkeypatch.setattr(places, "LEASE", 0.3)  # of a lock that was sent as Ctrl-C came
    rows = tp.from_arrow(pa.table({"x": range(60)})).shuffle(20, seed=1)
    url, system = "s3://interrupted/out", fsspec.filesystem("s3", **s3, use_listings_cache=False)

    def write() -> None:
        if job == "repack":
            repack(rows, url, rows_per_file=25, storage_options=s3, executor=Threads(2))
        else:
            rows.write_json(url, rows_per_file=25, storage_options=s3)

    def here() -> dict[str, bytes]:
        paths = system.find(url) if system.exists(url) else []
        return {path.removeprefix("interrupted/out/"): system.cat_file(path) for path in paths}

    def clear() -> None:
        system.rm(url, recursive=True) if system.exists(url) else None

    found = [place for place in places_of(write, ROOMS) if place[1] in END]
    clear()
    assert len(found) > 30
    check_all(write, here, clear, found[:: 4 if EVERYWHERE else 15])


def test_of_requests(s3):
    system = fsspec.filesystem("s3", **s3, use_listings_cache=False)
    paths = [f"interrupted/many/{n}" for n in range(12)]
    for path in paths:
        system.pipe_file(path, path.encode())

    def read() -> list[bytes]:
        requests = Requests()
        return requests.map(lambda path: requests.call(system, "cat_file", path), paths, 4)

    found = places_of(read, ROOMS)
    came = 0
    for place in some_of(found, 0, 3 if EVERYWHERE else 16):
        came += is_interrupted(read, place, ROOMS)
        with ends_in_time():
            assert read() == [path.encode() for path in paths]
    assert came > 3


def test_of_processes(tmp_path):
    rows = tp.from_arrow(pa.table({"x": range(60)}))

    def write() -> None:
        rows.write_json(tmp_path / "out", num_files=3, executor=Processes(2, "forkserver"))

    places = some_of(places_of(write, ("engine/processes/executors", "_internal")), 0, 60)
    shutil.rmtree(tmp_path / "out")
    check_all(write, lambda: contents(tmp_path / "out"),
              lambda: shutil.rmtree(tmp_path / "out", ignore_errors=True), places)  # fmt: skip
