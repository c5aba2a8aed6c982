"""``repack`` on a Ray cluster writes the rows that threads of one machine write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

import trainpipes as tp
from trainpipes.prepare import repack
from trainpipes.storage import Ray

sys.path.insert(0, str(Path(__file__).parent))

from repack_driver import MEMORY, kills_once, rows, table

DRIVER = Path(__file__).parent / "repack_driver.py"
ONE: dict[str, Any] = {"rows_per_file": 800, "memory_limit": MEMORY}
CHOICES: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "seed": 3, "row_group_size": 64},
    {"sort": ["x", "text"], "descending": True, "compression": "snappy"},
    {"drop_duplicates": ["text"], "shuffle": True, "num_files": 3, "rows_per_file": None},
    {
        "drop_duplicates": ["key", "x"],
        "sort": ["key"],
        "columns": ["x", "key"],
        "rows_per_file": 90,
    },
]
try:
    import duckdb  # noqa: F401
except ImportError:
    CHOICES = CHOICES[:2]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files whose row groups are smaller and larger than a part of the input."""
    folder = tmp_path_factory.mktemp("given")
    for number, group in enumerate((100, 1000, 37)):
        part = table().slice(number * 1000, 1000)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=group)
    return folder


@contextmanager
def free_cores(count: int) -> Iterator[None]:
    """The cluster has room for so many tasks at a time."""

    class Holder:
        def ready(self) -> None: ...

    holders = [ray.remote(num_cpus=1)(Holder).remote() for _ in range(4 - count)]
    ray.get([holder.ready.remote() for holder in holders])
    try:
        yield
    finally:
        for holder in holders:
            ray.kill(holder)


def contents(folder: Path) -> dict[str, Any]:
    """The rows of all files, as text, where NaN is NaN."""
    assert all(p.suffix == ".parquet" or p.name == "_manifest.json" for p in folder.iterdir())
    paths = sorted(folder.glob("*.parquet"))
    return {path.name: repr(pq.read_table(path).to_pylist()) for path in paths}


def test_files_are_those_of_threads(cluster: None, given: Path, tmp_path: Path) -> None:
    for number, options in enumerate(CHOICES):
        threads, tasks = tmp_path / f"threads {number}", tmp_path / f"tasks {number}"
        wanted = repack(given, threads, **{**ONE, **options})
        assert len(wanted.files) > 1
        done = repack(given, tasks, executor=Ray(), **{**ONE, **options})
        assert (done.rows, done.duplicates) == (wanted.rows, wanted.duplicates), options
        assert contents(tasks) == contents(threads), options


def test_a_worker_that_is_killed_changes_nothing(
    cluster: None, given: Path, tmp_path: Path
) -> None:
    for number, options in enumerate(CHOICES[1:2]):
        note = tmp_path / f"killed {number}"
        pipe = rows(given).map(kills_once(1500, note))
        repack(pipe, tmp_path / f"ray {number}", executor=Ray(), **{**ONE, **options})
        assert note.exists()
        repack(pipe, tmp_path / f"threads {number}", **{**ONE, **options})
        assert contents(tmp_path / f"ray {number}") == contents(tmp_path / f"threads {number}")


def start(given: Path, folder: Path, options: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A driver in a process of its own, on the same cluster."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(DRIVER), str(given), str(folder), address, json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill_when(driver: subprocess.Popen[bytes], seen: Callable[[], Any]) -> None:
    begun = time.monotonic()
    while not seen():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() - begun < 200
        time.sleep(0.005)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert driver.returncode == -signal.SIGKILL


def test_a_driver_that_is_killed_goes_on_to_the_same_rows(
    cluster: None, given: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", {"shuffle": True, "rows_per_file": 100}
    with free_cores(1):
        done = "_unfinished/repack/*/scattered-*/_unfinished/*.done.json"
        kill_when(start(given, out, options), lambda: len(list(out.glob(done))) >= 2)
    repack(rows(given), out, executor=Ray(), memory_limit=MEMORY, **options)
    repack(rows(given), tmp_path / "whole", memory_limit=MEMORY, **options)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_file_that_cannot_be_read_fails_once_with_its_name(
    cluster: None, given: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "given" / "bad.parquet"
    bad.parent.mkdir()
    pq.write_table(table(), bad, row_group_size=500, compression="none", use_dictionary=False)
    content = bytearray(bad.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3000] = bytes(3000)
    bad.write_bytes(content)
    with pytest.raises(tp.DataError, match=r"bad\.parquet"):
        repack(bad, tmp_path / "out", executor=Ray(), shuffle=True, **ONE)
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_row_that_cannot_be_done_fails_once(cluster: None, given: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def bad(row: Any) -> Any:
        if row["n"] == 1500:
            with open(notes, "a") as file:
                file.write("tried\n")
            raise ValueError("this row is bad")
        return row

    with pytest.raises(ValueError, match="this row is bad") as raised:
        repack(rows(given).map(bad), tmp_path / "out", executor=Ray(), shuffle=True, **ONE)
    assert "1.parquet" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert notes.read_text() == "tried\n"


def test_a_full_disk_leaves_whole_files_only(cluster: None, given: Path, tmp_path: Path) -> None:
    options = {"shuffle": True, "num_files": 2, "full": True, "compression": None}
    driver = start(given, tmp_path / "out", options)
    _, error = driver.communicate(timeout=200)
    assert driver.returncode == 1
    assert b"cannot be written" in error.splitlines()[-1]
    assert not [*(tmp_path / "out").rglob("*.part")]
    repack(rows(given), tmp_path / "whole", shuffle=True, num_files=2, compression=None)
    good = contents(tmp_path / "whole")
    for path in (tmp_path / "out").glob("*.parquet"):
        assert repr(pq.read_table(path).to_pylist()) == good[path.name]
