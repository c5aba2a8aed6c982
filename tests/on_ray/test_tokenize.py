"""Tokenizing on Ray: the files of a single machine, whatever dies on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import trainpipes as tp
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.prepare import tokenize
from trainpipes.writers import Processes, Ray, Threads

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # workers, too, import it

from unfinished import contents, noted

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


@pytest.fixture(scope="module")
def alone(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a single machine writes."""
    folder = tmp_path_factory.mktemp("alone")
    done = tokenize(pipeline(texts), folder, bytes_per_file=SMALL, executor=Threads(1))
    assert len(done.files) == 2 * FILES
    return contents(folder)


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
    assert contents(tmp_path) == alone


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


# The command


def test_the_command_tells_an_error_in_its_own_words(cluster, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"good\n" * 9000 + b"\xff\xfe\n")
    config = tmp_path / "it.yaml"
    config.write_text(tp.list_files(tmp_path / "in").read_text().tokenize("bytes").to_yaml())
    address = ray.get_runtime_context().gcs_address
    words = ["tokenize", tmp_path / "ids", "--config", config, "--executor", f"ray:{address}"]
    done = subprocess.run(
        [sys.executable, "-m", "trainpipes", *map(str, words)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
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
