"""``tokenize``, ``repack`` and a writer make the files of one machine on a Ray cluster: by 1 and 4 workers,
and after a worker or the driver is killed. Of 50 MB of text.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))

from large_files import JOBS, kills_once, make, write_texts

from trainpipes.writers import Ray, Threads

DRIVER = Path(__file__).parent / "large_files.py"
pytestmark = pytest.mark.timeout(1800)


class Texts(NamedTuple):
    folder: Path
    rows: int


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    return Texts(folder, write_texts(folder, 50 * 10**6, 12))


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(job: str, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one machine makes."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    done = make(
        job, texts.folder, folder, **({"executor": Threads(1)} if job == "tokenize" else {})
    )
    assert len(done.files) == 12
    assert done.rows == texts.rows
    return hashes(folder)


def hashes(folder: Path) -> dict[str, str]:
    """Of all that lies in a folder, which is removed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    rmtree(folder)
    return found


@contextmanager
def workers(count: int) -> Iterator[None]:
    """The cluster has room for so many tasks at a time."""

    class Holder:
        def ready(self) -> None: ...

    holder = ray.remote(num_cpus=4 - count)(Holder).remote() if count < 4 else None
    try:
        if holder is not None:
            ray.get(holder.ready.remote())
        yield
    finally:
        if holder is not None:
            ray.kill(holder)


@pytest.mark.parametrize("count", [1, 4])
def test_files_are_those_of_one_machine_whatever_the_number_of_workers(
    cluster: None, job: str, texts: Texts, alone: dict[str, str], tmp_path: Path, count: int
) -> None:
    with workers(count):
        make(job, texts.folder, tmp_path / "out", executor=Ray())
    assert hashes(tmp_path / "out") == alone


def test_a_worker_that_is_killed_in_the_middle_changes_nothing(
    cluster: None, job: str, texts: Texts, alone: dict[str, str], tmp_path: Path
) -> None:
    kills = kills_once(texts.rows // 2, tmp_path / "killed")
    make(job, texts.folder, tmp_path / "out", kills, executor=Ray())
    assert (tmp_path / "killed").exists()
    assert hashes(tmp_path / "out") == alone


def test_a_driver_that_is_killed_in_the_middle_goes_on_by_the_same_call(
    cluster: None, job: str, texts: Texts, alone: dict[str, str], tmp_path: Path
) -> None:
    out, address = tmp_path / "out", ray.get_runtime_context().gcs_address
    with workers(1):
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), job, str(texts.folder), str(out), address],
            env=dict(os.environ), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            while len(list(out.glob("part-*"))) < 3:
                assert driver.poll() is None, driver.communicate()
                time.sleep(0.01)
        finally:
            driver.kill()
            driver.communicate()
    assert not (out / "_manifest.json").exists()
    kept = make(job, texts.folder, out, executor=Ray())
    if job != "write_parquet":
        assert kept.kept > 0
    assert hashes(out) == alone
