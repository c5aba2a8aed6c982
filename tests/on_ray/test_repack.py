"""``repack`` on a Ray cluster writes the files that threads of one machine write, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
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


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["trainpipes.prepare.repack.repack"]
    monkeypatch.setattr(module, "LEAST_MEMORY", 1)
    monkeypatch.setattr(os, "fsync", lambda _: None)


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


def hashes(folder: Path) -> dict[str, str]:
    """Of all files, temporary ones and the manifest too."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def test_files_are_those_of_threads(cluster: None, given: Path, tmp_path: Path) -> None:
    for number, options in enumerate(CHOICES):
        threads, tasks = tmp_path / f"threads {number}", tmp_path / f"tasks {number}"
        wanted = repack(given, threads, **{**ONE, **options})
        assert len(wanted.files) > 1
        done = repack(given, tasks, engine="ray", **{**ONE, **options})
        assert (done.rows, done.duplicates) == (wanted.rows, wanted.duplicates), options
        assert hashes(tasks) == hashes(threads), options


def test_a_worker_that_is_killed_changes_nothing(
    cluster: None, given: Path, tmp_path: Path
) -> None:
    for number, options in enumerate(CHOICES[2:4]):  # the large files are shuffled
        note = tmp_path / f"killed {number}"
        pipe = rows(given).map(kills_once(1500, note))
        repack(pipe, tmp_path / f"ray {number}", engine="ray", **{**ONE, **options})
        assert note.exists()
        repack(pipe, tmp_path / f"threads {number}", **{**ONE, **options})
        assert hashes(tmp_path / f"ray {number}") == hashes(tmp_path / f"threads {number}")


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


def test_a_driver_that_is_killed_while_it_reads_goes_on_after_what_is_whole(
    cluster: None, given: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", {"shuffle": True, "rows_per_file": 100}
    read = out / ".repack" / "read"
    with free_cores(1):
        kill_when(start(given, out, options), lambda: len(list(read.glob("0*.json"))) >= 2)
    seen: list[Any] = []
    how = {**options, "progress": lambda *said: seen.append(said)}
    repack(rows(given), out, engine="ray", memory_limit=MEMORY, **how)
    assert seen[0][0] == "reading"
    assert seen[0][1] > 0  # parts that are whole are not read again
    repack(rows(given), tmp_path / "whole", memory_limit=MEMORY, **options)
    assert hashes(out) == hashes(tmp_path / "whole")


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
        repack(bad, tmp_path / "out", engine="ray", shuffle=True, **ONE)
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
        repack(rows(given).map(bad), tmp_path / "out", engine="ray", shuffle=True, **ONE)
    assert "1.parquet" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert notes.read_text() == "tried\n"


def test_a_full_disk_leaves_whole_files_only(cluster: None, given: Path, tmp_path: Path) -> None:
    options = {"shuffle": True, "num_files": 2, "full": True, "compression": None}
    driver = start(given, tmp_path / "out", options)
    _, error = driver.communicate(timeout=200)
    assert driver.returncode == 1
    assert b"cannot be written" in error.splitlines()[-1]
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [name for name in left if name.startswith(".")]
    repack(rows(given), tmp_path / "whole", shuffle=True, num_files=2, compression=None)
    good = hashes(tmp_path / "whole")
    for name, found in hashes(tmp_path / "out").items():
        assert name.startswith((".repack/", "_")) or good[name] == found
