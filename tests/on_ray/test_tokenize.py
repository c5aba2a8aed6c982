"""Tokenizing on Ray: the files of a single machine, whatever dies on the way."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.prepare import tokenize
from trainpipes.writers import Processes, Ray, Threads

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # workers, too, import it

from unfinished import noted

FILES, ROWS = 6, 400


def text(number: int) -> str:
    return f"{number} über allen Gipfeln " * (1 + number % 7)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for file in range(FILES):
        rows = [text(file * ROWS + row) for row in range(ROWS)]
        table = pa.table({"text": pa.array(rows, pa.string())})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=100)
    return folder


def pipeline(texts: Path) -> tp.Pipeline:
    rows = tp.list_files(texts).read_parquet()
    return rows.shuffle(500, seed=0).tokenize("bytes", add_eos=True).batch(8).pad_collate()


def plain(texts: Path) -> tp.Pipeline:
    return tp.list_files(texts).read_parquet().tokenize("bytes")


#: So that each input file becomes two.
SMALL = 30_000


def hashes(folder: Path) -> dict[str, str]:
    """Of all that lies in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a single machine writes."""
    folder = tmp_path_factory.mktemp("alone")
    done = tokenize(pipeline(texts), folder, bytes_per_file=SMALL, executor=Threads(1))
    assert len(done.files) == 2 * FILES
    return hashes(folder)


@contextmanager
def only(workers: int) -> Iterator[None]:
    """Leave so many of the cluster's four cores."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if workers == 4:
        yield
        return
    taken = placement_group([{"CPU": 4 - workers}])
    ray.get(taken.ready())
    try:
        yield
    finally:
        remove_placement_group(taken)


def test_files_are_those_of_a_single_machine(cluster, texts, alone, tmp_path):
    done = tokenize(pipeline(texts), tmp_path / "ids", bytes_per_file=SMALL, executor=Ray())
    done.verify()
    assert hashes(tmp_path / "ids") == alone
    assert (done.rows, done.kept) == (FILES * ROWS, 0)


def test_what_is_whole_is_not_made_again_by_either_executor(cluster, texts, alone, tmp_path):
    tokenize(pipeline(texts), tmp_path, bytes_per_file=SMALL, executor=Ray())
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for executor in (Ray(), Processes(2)):
        done = tokenize(pipeline(texts), tmp_path, bytes_per_file=SMALL, executor=executor)
        assert done.kept == 2 * FILES
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(ConfigError, match="another pipeline"):
        tokenize(plain(texts), tmp_path, bytes_per_file=SMALL, executor=Ray())
    tokenize(pipeline(texts), tmp_path, bytes_per_file=SMALL, executor=Ray(), overwrite=True)
    assert hashes(tmp_path) == alone


def check_whole(folder: Path) -> list[str]:
    """The files that an unfinished folder says are whole are there, whole, and nothing besides."""
    files = noted(folder)
    names = [entry["file"] for entry in files]
    assert sorted(path.name for path in folder.glob("[!_]*")) == sorted(names)
    for entry in files:
        assert pq.read_table(folder / entry["file"]).num_rows == entry["rows"]
    return names


def error_of(make: Any) -> BaseException:
    with pytest.raises(tp.TrainpipesError) as caught:
        make()
    return caught.value


def test_a_file_that_cannot_be_read_fails_once_with_the_error_of_a_single_machine(
    cluster, texts, tmp_path
):
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in texts.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damaged = folder / "3.parquet"
    content = bytearray(damaged.read_bytes())
    content[4:60] = b"\xff" * 56
    damaged.write_bytes(content)
    rows = tp.list_files(folder).read_parquet().tokenize("bytes")
    here = error_of(lambda: tokenize(rows, tmp_path / "here", executor=Threads(1)))
    there = error_of(lambda: tokenize(rows, tmp_path / "there", executor=Ray()))
    assert isinstance(here, UnreadableError)
    assert (type(there), str(there), vars(there)) == (type(here), str(here), vars(here))
    assert "3.parquet" in str(there)
    check_whole(tmp_path / "there")


# A driver in a process of its own

DRIVER = """
import resource, sys, time
import trainpipes as tp
from pathlib import Path
from trainpipes.prepare import tokenize
from trainpipes.writers import Ray

texts, out, how = sys.argv[1:4]

def work(row):
    if how == "slow":
        time.sleep(0.0025)
    if how == "full" and row["text"].startswith("1200 "):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    return row

rows = tp.list_files(texts).read_parquet().map(work, version="1").tokenize("bytes")
tokenize(rows, out, executor=Ray("auto"))
"""


def environment() -> dict[str, str]:
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@contextmanager
def driver(texts: Path, out: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(texts), str(out), how],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_files(out: Path, count: int, process: subprocess.Popen[str]) -> list[str]:
    """Names of files that are noted as whole, once there are so many."""
    while True:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        try:
            names = [entry["file"] for entry in noted(out)]
        except (OSError, ValueError):
            names = []
        if len(names) >= count:
            return names
        time.sleep(0.05)


def test_a_disk_that_is_full_leaves_whole_files(cluster, texts, tmp_path):
    out = tmp_path / "ids"
    with driver(texts, out, "full") as process:
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "ConfigError: tokenize(): " in stderr
    assert "File too large; free space there" in stderr
    if out.exists():  # else none was whole yet when the first one failed
        check_whole(out)


def test_ctrl_c_leaves_whole_files(cluster, texts, tmp_path):
    out = tmp_path / "ids"
    with only(2), driver(texts, out, "slow") as process:
        wait_for_files(out, 1, process)
        process.send_signal(signal.SIGINT)
        process.wait(300)
    check_whole(out)


# The command


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainpipes", "tokenize", *map(str, words)],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def config(texts: Path, path: Path) -> Path:
    path.write_text(tp.list_files(texts).read_text().tokenize("bytes").to_yaml())
    return path


def test_the_command_writes_what_it_writes_alone_and_says_nothing_of_ray(cluster, tmp_path):
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.txt").write_text(f"text of {name}\n" * 5000)
    words = ("--config", config(tmp_path / "in", tmp_path / "it.yaml"), "--json")
    alone = command(tmp_path / "alone", *words, "--executor", "threads:1")
    assert (alone.returncode, alone.stderr) == (0, "")
    done = command(tmp_path / "ids", *words, "--executor", "ray")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]
    assert hashes(tmp_path / "ids") == hashes(tmp_path / "alone")


def test_the_command_tells_an_error_in_its_own_words(cluster, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"good\n" * 9000 + b"\xff\xfe\n")
    words = ("--config", config(tmp_path / "in", tmp_path / "it.yaml"))
    done = command(tmp_path / "ids", *words, "--executor", "ray:auto")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "a.txt" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ray" not in done.stderr.lower()


# Storage on other machines


def test_paths_of_one_machine_are_refused_on_several(cluster, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.nodes", lambda: 2 * [{"Alive": True}])
    with pytest.raises(ConfigError, match=r"tokenize\(folder\): .* has 2 nodes"):
        tokenize(pipeline(texts), tmp_path, executor=Ray())
    with pytest.raises(ConfigError, match=r"tokenize\(pipeline\): .* has 2 nodes"):
        tokenize(pipeline(texts), "s3://bucket/several", executor=Ray())
    done = tokenize(pipeline(texts), tmp_path / "ids", executor=Ray(shared_filesystem=True))
    assert done.rows == FILES * ROWS
